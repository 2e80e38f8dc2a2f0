"""Settings of training: optimizer, schedule, trainer, logging, callbacks; and the whole config of train.py."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from minitransformer.data.config import PretrainedConfig
from minitransformer.generation.config import OUTPUTS
from minitransformer.model.checks import Choice, at_least, choose, count, fraction, positive
from minitransformer.model.config import ModelConfig
from minitransformer.words import VERBATIM


@dataclass
class GroupConfig:
    """Other settings for the parameters whose names match `pattern`, in which * stands for anything.

    lr, weight_decay: theirs (None: as they were).
    """

    pattern: str = ""
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ValueError("optimizer.groups: a group has no pattern, such as blocks.*.norm.weight")
        if self.lr is not None:
            positive(f"optimizer.groups: lr of {self.pattern}", self.lr)
        if self.weight_decay is not None:
            at_least(f"optimizer.groups: weight_decay of {self.pattern}", self.weight_decay, 0)


@dataclass
class AdamWConfig(Choice):
    """AdamW for every parameter (Loshchilov and Hutter 2019).

    lr: peak learning rate. betas, eps: of the moments. weight_decay: on matrices only, decoupled.
    groups: exceptions by name; the first that matches a parameter holds.
    """

    group = "optimizer"

    kind: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    groups: list[GroupConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("optimizer.lr", self.lr)
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas={list(self.betas)} must be two numbers")
        for beta in self.betas:
            fraction("optimizer.betas", beta)
        at_least("optimizer.eps", self.eps, 1e-30)  # a zero gradient would be divided by 0, which fp32 makes of less
        at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass
class MuonConfig(AdamWConfig):
    """Muon for the hidden matrices (Jordan et al. 2024), AdamW for embedding, head, gains and biases.

    lr: peak rate of the hidden matrices; embedding_lr: of an embedding that is not tied to the head; adamw_lr: of the
    rest. momentum: of Muon, Nesterov's. ns_steps: Newton-Schulz rounds in each orthogonalisation.
    """

    kind: str = "muon"
    lr: float = 0.014
    embedding_lr: float = 0.1
    adamw_lr: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.95
    ns_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("optimizer.embedding_lr", self.embedding_lr)
        positive("optimizer.adamw_lr", self.adamw_lr)
        fraction("optimizer.momentum", self.momentum)
        count("optimizer.ns_steps", self.ns_steps, 1, 100)


@dataclass
class ScheduleConfig(Choice):
    """warmup_steps: steps to rise to the peak rate."""

    group = "schedule"

    warmup_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        count("schedule.warmup_steps", self.warmup_steps, 0)


@dataclass
class ConstantConfig(ScheduleConfig):
    """Warm-up, then the peak rate to the end."""

    kind: str = "constant"


@dataclass
class RangeConfig(ScheduleConfig):
    """From `first_ratio` of the peak rate to the peak in equal factors, to see where training is fastest (Smith 2017).

    At the end the rate of the steepest fall of the loss is printed.
    """

    kind: str = "range"
    warmup_steps: int = 0
    first_ratio: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("schedule.first_ratio", self.first_ratio, zero=False)
        positive("schedule.first_ratio", self.first_ratio)
        if self.warmup_steps:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps}: a range of rates has no warm-up; use 0")


@dataclass
class DecayConfig(ScheduleConfig):
    """min_ratio: the last rate over the peak."""

    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("schedule.min_ratio", self.min_ratio, one=True)


@dataclass
class LinearConfig(DecayConfig):
    """Warm-up, then down in a straight line to the end."""

    kind: str = "linear"


@dataclass
class InverseSqrtConfig(DecayConfig):
    """Warm-up, then 1 / sqrt(step), which knows no end (Vaswani et al. 2017, 5.3). min_ratio: never below it."""

    kind: str = "inverse_sqrt"


@dataclass
class WSDConfig(DecayConfig):
    """Warm-up, stable, linear decay (Hu et al. 2024, MiniCPM). decay_fraction: the part of all steps that decays."""

    kind: str = "wsd"
    decay_fraction: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("schedule.decay_fraction", self.decay_fraction, one=True)


@dataclass
class CosineConfig(DecayConfig):
    """Warm-up, then half a cosine to the end (Loshchilov and Hutter 2017)."""

    kind: str = "cosine"


@dataclass
class TrainerConfig:
    """How optimizer steps are made, and where.

    max_steps: optimizer steps. max_time: save and stop after this time, as HH:MM:SS or DD:HH:MM:SS (None: never).
    accumulate: micro-batches that a step's rows are cut into, which changes memory and not the result.
    precision: auto (bf16-mixed on a GPU that has it, else 32) | 32 | bf16-mixed | 16-mixed (on a GPU) | bf16-true.
    device: auto | cpu | cuda | mps.
    devices, nodes: processes on each machine, one for each GPU, and machines.
    strategy: auto (ddp where there are several processes) | ddp (Li et al. 2020) | fsdp (Zhao et al. 2023).
    compile: torch.compile for every block: a slower start, faster steps on a GPU.
    gradient_clip: largest norm of the gradient, 0 for none.
    gradient_checkpointing: what the backward pass works out again to save memory: none | full | selective (all but
        matrix products), in every `checkpoint_blocks`-th block.
    z_loss: weight of the squared log of the softmax's normaliser (Chowdhery et al. 2022); 0 for none.
    label_smoothing: of the training loss (Szegedy et al. 2016). Logged losses are without both.
    max_skipped: a step whose loss or gradient is not finite changes nothing; after this many in a row the run stops.
    val_every, log_every: in steps (validation also runs at the end).
    threads: CPU threads for torch (None: torch decides).
    find_batch: do not train; find how many rows at a time fit into memory and are fastest.
    profile: print where the time of steps 4 to 8 goes, and keep their trace.
    """

    max_steps: int = 1000
    max_time: str | None = None
    accumulate: int = 1
    precision: str = "auto"
    device: str = "auto"
    devices: int = 1
    nodes: int = 1
    strategy: str = "auto"
    compile: bool = False
    gradient_clip: float = 1.0
    gradient_checkpointing: str = "none"
    checkpoint_blocks: int = 1
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    max_skipped: int = 10
    val_every: int = 250
    log_every: int = 10
    threads: int | None = None
    find_batch: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        for name in ("max_steps", "accumulate", "checkpoint_blocks", "max_skipped", "val_every", "log_every"):
            count(f"trainer.{name}", getattr(self, name))
        for name in ("devices", "nodes"):
            count(f"trainer.{name}", getattr(self, name), 1, 2**16)
        if self.threads is not None:
            count("trainer.threads", self.threads, 1, 1024)
        at_least("trainer.gradient_clip", self.gradient_clip, 0)
        at_least("trainer.z_loss", self.z_loss, 0)
        fraction("trainer.label_smoothing", self.label_smoothing)
        choose("trainer.precision", self.precision, ("auto", "32", "bf16-mixed", "16-mixed", "bf16-true"))
        choose("trainer.device", self.device, ("auto", "cpu", "cuda", "mps"))
        choose("trainer.strategy", self.strategy, ("auto", "ddp", "fsdp"))
        choose("trainer.gradient_checkpointing", self.gradient_checkpointing, ("none", "full", "selective"))
        if self.gradient_checkpointing == "none" and self.checkpoint_blocks != 1:
            raise ValueError("trainer.checkpoint_blocks needs trainer.gradient_checkpointing: full or selective")
        if self.strategy != "auto" and self.ranks == 1:
            raise ValueError(f"trainer.strategy={self.strategy} is for several processes; set trainer.devices or nodes")
        if self.profile and self.max_steps < 8:
            raise ValueError(f"trainer.profile shows steps 4 to 8; trainer.max_steps={self.max_steps} are too few")
        if self.find_batch and self.ranks > 1:
            raise ValueError("trainer.find_batch measures one process; set trainer.devices=1 and trainer.strategy=auto")
        _ = self.seconds

    @property
    def seconds(self) -> float:
        """`max_time` in seconds; without end if it is not set."""
        if self.max_time is None:
            return math.inf
        match = re.fullmatch(r"(?:(\d{1,9}):)?(\d{1,9}):([0-5]?\d):([0-5]?\d)", self.max_time)
        if match is None:
            raise ValueError(f"trainer.max_time={self.max_time} is not a time; write HH:MM:SS or DD:HH:MM:SS")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.devices * self.nodes


@dataclass
class LoggerConfig(Choice):
    """Metrics in `RUN/metrics.jsonl` alone (`logger=none`), and the base of the others, which add to it."""

    group = "logger"

    kind: str = "none"


WANDB_MODES = ("online", "offline", "disabled")


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases.

    mode: auto (online with a key, else offline) | online | offline | disabled.
    log_model: upload the model at the end, as an artifact with the aliases latest and best.
    """

    kind: str = "wandb"
    project: str = "minitransformer"
    entity: str | None = None
    mode: str = "auto"
    tags: list[str] = field(default_factory=list)
    log_model: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("logger.mode", self.mode, ("auto", *WANDB_MODES))


@dataclass
class CallbacksConfig:
    """What happens beside training, counted in steps; 0 turns a thing off.

    checkpoint_every, keep_checkpoints: write the whole state that often (always at the end) and keep the newest.
    sample_every, sample_tokens, sample_temperature: text shown as the model improves, and a picture of its attention.
    sample_prompt: what it continues (None: what the data say, else the first words of the held-out text; empty: starts
        a document).
    progress: the progress bar (in a terminal) or progress lines (elsewhere).
    ema: decay of an exponential moving average of the weights, which is then what is validated and kept as the model
        (Polyak and Juditsky 1992); 0 for none.
    report: draw the run in `RUN/report.html` when it ends.
    """

    checkpoint_every: int = 250
    keep_checkpoints: int = 3
    sample_every: int = 250
    sample_prompt: str | None = field(default=None, metadata=VERBATIM)
    sample_tokens: int = 120
    sample_temperature: float = 0.7
    progress: bool = True
    ema: float = 0.0
    report: bool = True

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "sample_every"):
            count(f"callbacks.{name}", getattr(self, name), 0)
        for name in ("keep_checkpoints", "sample_tokens"):
            count(f"callbacks.{name}", getattr(self, name))
        at_least("callbacks.sample_temperature", self.sample_temperature, 0)
        fraction("callbacks.ema", self.ema)


@dataclass
class LoRAConfig:
    """Low-rank adapters beside the frozen matrices of `init_from` (Hu et al. 2021): W + alpha / rank * B A.

    rank: of B A; 0 trains the whole model. targets: the linear layers that have one, by name, in which * stands for
        anything; queries, keys and values are one layer, and so are a feed-forward's input and its gate.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: list[str] = field(default_factory=lambda: ["blocks.*"])

    def __post_init__(self) -> None:
        count("lora.rank", self.rank, 0, 2**16)
        positive("lora.alpha", self.alpha)
        if not self.targets:
            raise ValueError("lora.targets is empty; name at least one, such as blocks.*.attention.*")
        if not self.rank and (self.alpha, self.targets) != (16.0, ["blocks.*"]):
            raise ValueError("lora.alpha and lora.targets need a lora.rank above 0")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def check_name(name: str) -> None:
    """Raise ValueError when `name` cannot be that of a run: its directory must lie in `runs_dir`, where `latest` is
    the link to the newest run."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ValueError(f"name={name} is no name inside runs_dir; another place is set by runs_dir=PLACE")
    if parts[0].lower() == "latest":
        raise ValueError(f"name={name}: runs_dir/latest is a link to the newest run; give another name")
    if max(map(len, map(os.fsencode, parts))) > 200:  # of 255 that file systems take, with a number behind it
        raise ValueError(f"name={name[:20]}... is longer than 200 bytes; give a shorter one")


def run_name(given: str | None) -> str:
    """The name of a run: the time of its start if none was given. Raises ValueError as `check_name` does."""
    if given is None:
        return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    check_name(given)
    return given


GROUPS = ("data", "tokenizer", "optimizer", "schedule", "logger")  # whose choices have settings of their own


@dataclass
class TrainConfig:
    """The whole config of train.py.

    name: of the run and its directory under `runs_dir` (None: the time of the start).
    seed: of initialisation, dropout and the order of rows.
    resume: None starts anew; `auto` continues the newest checkpoint of run `name` (None: of the newest run);
        a path continues that run directory, or from that checkpoint.
    init_from: a run directory or model file whose weights, architecture and tokenizer to start from (None: afresh).
    """

    name: str | None = None
    runs_dir: str = "runs"
    seed: int = 0
    resume: str | None = None
    init_from: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    schedule: Any = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    logger: Any = None
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)

    def __post_init__(self) -> None:
        count("seed", self.seed, 0, 2**32 - 1)
        if self.name is not None:
            check_name(self.name)
        for name in GROUPS:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is not chosen; see --help for the choices")
        if self.trainer.checkpoint_blocks > self.model.n_layers:
            raise ValueError(
                f"trainer.checkpoint_blocks={self.trainer.checkpoint_blocks} are more than model.n_layers="
                f"{self.model.n_layers}"
            )
        if isinstance(self.optimizer, MuonConfig):
            self._check_rates(self.optimizer)
        if self.trainer.accumulate > self.data.batch_size:
            raise ValueError(
                f"trainer.accumulate={self.trainer.accumulate} is more than the data.batch_size="
                f"{self.data.batch_size} rows of a step"
            )
        if self.data.batch_size % self.trainer.ranks:
            raise ValueError(
                f"data.batch_size={self.data.batch_size} rows of a step do not divide into {self.trainer.ranks} ranks, "
                f"which are trainer.devices={self.trainer.devices} on each of trainer.nodes={self.trainer.nodes}"
            )
        if self.lora.rank and self.init_from is None:
            raise ValueError(f"lora.rank={self.lora.rank} needs init_from: adapters stand beside trained weights")
        if self.lora.rank and (self.trainer.strategy == "fsdp" or self.callbacks.ema):
            raise ValueError(f"lora.rank={self.lora.rank} cannot go with trainer.strategy=fsdp or callbacks.ema")
        if self.trainer.strategy == "fsdp" and self.callbacks.ema:
            raise ValueError(f"trainer.strategy=fsdp cannot go with callbacks.ema={self.callbacks.ema}; set it to 0")

    def _check_rates(self, optimizer: MuonConfig) -> None:
        """Refuse a rate of parameters that are not there, or not trained."""
        for name, unused in (
            ("embedding_lr", "model.tie_embeddings=true" if self.model.tie_embeddings else ""),
            ("embedding_lr", f"lora.rank={self.lora.rank}" if self.lora.rank else ""),
            ("adamw_lr", f"lora.rank={self.lora.rank}" if self.lora.rank else ""),
        ):
            if unused and (rate := getattr(optimizer, name)) != getattr(MuonConfig, name):
                raise ValueError(f"optimizer.{name}={rate} is used by no parameter with {unused}; leave it out")


HARMLESS = ("dropout", "attention.kernel")  # settings of the model that may differ from those of `init_from`


def inherit(config: TrainConfig, base: ModelConfig, given: Sequence[str]) -> TrainConfig:
    """The config with the model of `init_from`, and its tokenizer.

    given: names of the settings that the user gave.

    Raises:
        ValueError: one of these contradicts the model.
    """
    named = f"init_from={config.init_from}"
    asked, has = config.model.flat(), base.flat()
    for name in given:
        group, _, setting = name.partition(".")
        if name in ("model", "experiment") or group == "tokenizer":
            raise ValueError(f"{name} cannot go with {named}, which has its own model and tokenizer; leave it out")
        if group == "model" and setting not in HARMLESS and asked.get(setting) != has.get(setting, setting):
            here, there = asked.get(setting, "..."), has.get(setting, "another")
            raise ValueError(f"{name}={here} contradicts {named}, which has {there}; leave it out")
    kernel = config.model.attention.kernel if "model.attention.kernel" in given else base.attention.kernel
    dropout = config.model.dropout if "model.dropout" in given else base.dropout
    model = replace(base, dropout=dropout, attention=replace(base.attention, kernel=kernel))
    return replace(config, model=model, tokenizer=PretrainedConfig(name=config.init_from))


@dataclass
class ExplainConfig(TrainConfig):
    """The whole config of `python -m minitransformer.explain`: that of train.py, and

    gpu: one device of the table, to plan for (None: what trainer.device says, on this machine).
    throughput: tokens a second, as measured (None: from what the devices can do at most, and `mfu`).
    mfu: the part of a device's peak that training reaches (model FLOPs utilisation, Chowdhery et al. 2022).
    output: text or json.
    """

    gpu: str | None = None
    throughput: float | None = None
    mfu: float = 0.4
    output: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.throughput is not None:
            positive("throughput", self.throughput)
        fraction("mfu", self.mfu, zero=False, one=True)
        positive("mfu", self.mfu)
        choose("output", self.output, OUTPUTS)
