"""What train.py does, from the typed config to the finished run directory."""

import json
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minitransformer import __version__
from minitransformer.data.datamodule import TextData
from minitransformer.device import choose_device, choose_precision, keep_freed_memory, total_memory
from minitransformer.model.config import ModelConfig
from minitransformer.model.cost import adapter_parameters, parameter_count
from minitransformer.model.transformer import Transformer
from minitransformer.run.directory import (
    BEST_FILE,
    METRICS_FILE,
    MODEL_FILE,
    OWN,
    REPORT_FILE,
    SAMPLES_FILE,
    CheckpointError,
    add_start,
    atomic_write,
    best_validation,
    check_run,
    checkpoint_in_place,
    checkpoint_path,
    flat,
    read_metrics,
    read_settings,
    save_config,
    save_held_out,
    validated,
)
from minitransformer.run.models import HEADER, describe, keep_use, load, newest_readable, read_checkpoint
from minitransformer.run.names import latest_run, new_run, point_latest
from minitransformer.run.rewind import Rewind
from minitransformer.training.batch_size import find_batch_size
from minitransformer.training.callbacks import (
    AtomicCheckpointIO,
    Bar,
    Checkpointer,
    DivergedError,
    Interrupted,
    MovingAverage,
    Profiler,
    RateFinder,
    RunDirectory,
    Sampler,
    ValidationWatch,
)
from minitransformer.training.config import LoRAConfig, RangeConfig, TrainConfig, inherit, run_name
from minitransformer.training.logging import RunLogger, check_wandb, make_loggers, resolved
from minitransformer.training.lora import add_adapters, fingerprint
from minitransformer.training.module import LanguageModel
from minitransformer.training.optimizers import check_resumable, make_optimizer
from minitransformer.training.schedules import rate
from minitransformer.words import short

REPORTED_TOKENS = 1024  # of held-out text, kept for the report


def train(
    config: TrainConfig,
    command: str = "python train.py",
    sweep_dir: Path | None = None,
    given: Sequence[str] = (),
    draw: Callable[[Path], object] | None = None,
) -> float | None:
    """Train as `config` says and return the final validation loss in nats per token.

    A run to go on with is read and checked, here and by Lightning while it restores. Then it begins: until that moment
    nothing is written.

    Every process of a run on several devices comes through here; the first speaks and writes.

    Args:
        command: how the user started this, for the commands that are printed.
        sweep_dir: the directory of this job when it is one of a sweep.
        given: names of the settings that the user gave, which `init_from` may contradict.
        draw: draws the report of a run directory (None: there is no report).

    Raises:
        ValueError: the config or the data are wrong; nothing was written then.
        DivergedError: losses were not finite any more; the state was saved.
        Interrupted: a signal or the clock stopped it, after the state was saved.
    """
    console = Console(
        highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=rank_zero_only.rank != 0,
        force_interactive=None if sys.stdout.isatty() else False,  # FORCE_COLOR may colour a log, no more
    )  # fmt: skip
    _quiet()
    keep_freed_memory()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    device = choose_device(config.trainer.device)
    precision = choose_precision(config.trainer.precision, device)
    _check_device(config, device)
    wandb_settings = check_wandb(config, given)
    run, checkpoint, saved = _resume(config, console)
    _check_writable(run or Path(config.runs_dir))
    base, tokenizer = None, config.tokenizer
    if config.init_from is not None:
        if not Path(config.init_from).exists():
            raise ValueError(f"init_from={config.init_from} does not exist (looked in {Path.cwd()})")
        base, tokenizer = load(config.init_from, say=console.print)
        config = inherit(config, base.config, given)
        if saved is None:
            _warn_of_rate(config, given, console)

    row_length = config.data.row_length or config.model.max_seq_len
    if row_length > config.model.max_seq_len:
        raise ValueError(f"data.row_length={row_length} is more than model.max_seq_len={config.model.max_seq_len}")
    _check_size(config, row_length)
    data = TextData(config.data, tokenizer, row_length, config.seed)
    data.prepare(console)
    model_config = _with_vocabulary(config.model, data.tokenizer.vocab_size)
    pl.seed_everything(config.seed, verbose=False)
    model = Transformer(model_config)
    if base is not None:
        model.load_state_dict(base.state_dict())
        del base
    if config.lora.rank:
        add_adapters(model, config.lora)
    step, changed = 0, {}
    if saved is not None:
        _check_same(saved, describe(model_config, data.tokenizer), run)
        _check_adapters(saved, config, model, run)
        _check_optimizer(saved, config, model, run)
        step = saved["global_step"]
        if step > config.trainer.max_steps or (step == config.trainer.max_steps and validated(run, step)):
            console.print(f"{run} is already trained: {step} of trainer.max_steps={config.trainer.max_steps} steps")
            return None
        changed = changed_settings(run, config)
    rewind = None if run is None else Rewind.find(run, step)

    n_rows = None if data.steps is None else data.steps.n_rows
    module = LanguageModel(model, data.tokenizer, config, data.validation.n_bytes, n_rows)
    module.configure_optimizers()  # refuses a wrong pattern before work

    if config.trainer.find_batch:
        find_batch_size(module, device, precision, data.row_length, console)
        return None

    def begin(run: Path) -> list[RunLogger]:
        if checkpoint is None:
            save_config(run, asdict(config))
            with atomic_write(run / "tokenizer.json") as file:
                file.write(data.tokenizer.to_json().encode())
            if config.init_from is not None:
                keep_use(Path(config.init_from), run)
            save_held_out(run, data.held_out(REPORTED_TOKENS))
        else:
            console.print(f"resuming {run} after step {step}")
            say_changed(console, changed, run, step, config, module.skipped)
        if rewind is not None:
            rewind.apply()
        point_latest(run, Path(config.runs_dir))
        about = {"code": code_version(), "fingerprints": data.fingerprints, "parameters": parameter_count(model_config)}
        everything = resolved(config, model_config, row_length) | about
        loggers, logged = make_loggers(config, run, everything, wandb_settings, console)
        facts = summary(console, config, run, model, data, device, precision, logged["logging"])
        start = {"command": command, "max_steps": config.trainer.max_steps}
        start |= {"device_type": device.type, "precision": precision}
        if changed:
            start["changed"] = changed
        add_start(run, step, start | about | logged | facts)
        if changed:
            own = {name: value for name, value in read_settings(run).items() if name in OWN}
            save_config(run, asdict(config) | own)
        return loggers

    directory = RunDirectory(lambda: run or _new_directory(config, sweep_dir, command, console), begin)
    # Under fsdp every rank reads its own part of the file.
    checkpoint_io = AtomicCheckpointIO(None if config.trainer.strategy == "fsdp" else saved)
    del saved  # Lightning lets go of it when all is restored
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=config.trainer.devices,
        num_nodes=config.trainer.nodes,
        strategy=_strategy(config),
        precision=precision,
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=config.trainer.val_every,
        check_val_every_n_epoch=None,
        # Where a trained model was, before a step can ruin it.
        num_sanity_val_steps=-1 if config.init_from is not None and checkpoint is None else 0,
        logger=False,
        callbacks=make_callbacks(directory, config, console, model, data),
        plugins=[checkpoint_io, *_environment()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=config.runs_dir,
    )
    start, code = time.perf_counter(), 1
    try:
        try:
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
            if step == config.trainer.max_steps or config.trainer.max_steps % config.trainer.val_every:
                trainer.validate(module, data, verbose=False)
            if not math.isfinite(loss := module.metrics["val/loss"]):
                last = checkpoint_path(directory.path, config.trainer.max_steps)
                raise DivergedError(f"the validation loss is {loss}; the state is in {last}; try a lower optimizer.lr")
            report(config, directory.path, draw, console)
            for logger in trainer.loggers:  # they take what lies in the run directory by now
                logger.log_results()
            code = 0
        except Interrupted as stopped:
            code = stopped.code
            console.print(f"\n{stopped}; everything is in {directory.path}")
            console.print(f"go on with: {command} resume={shlex.quote(str(directory.path))}", style="bold")
            raise
        finally:
            for logger in trainer.loggers:
                logger.close(code)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    except (Interrupted, DivergedError):
        report(config, directory.path, draw, console)  # the last, as who stopped the run may not wait for it
        raise
    closing(console, directory.path, module, time.perf_counter() - start)
    return module.metrics["val/loss"]


def _warn_of_rate(config: TrainConfig, given: Sequence[str], console: Console) -> None:
    """The default rates are for weights that begin afresh: within a few steps trained ones are ruined by them."""
    lr = config.optimizer.lr
    if "optimizer.lr" not in given and lr == type(config.optimizer)().lr and not config.lora.rank:
        console.print(
            f"optimizer.lr={lr:g} is meant for a model that begins afresh; at that rate {config.init_from} may lose "
            "what it knows within a few steps. What works: optimizer=adamw optimizer.lr=1e-4",
            style="bold yellow",
        )


def _check_size(config: TrainConfig, row_length: int) -> None:
    """Refuse what this machine's memory could never hold, before its first byte is asked for."""
    vocab_size = config.model.vocab_size or getattr(config.tokenizer, "vocab_size", 1)
    model = replace(config.model, vocab_size=vocab_size)
    numbers = parameter_count(model) + adapter_parameters(model, config.lora.rank, config.lora.targets)
    positions = 2 * model.max_seq_len * model.head_width if model.position == "rotary" else 0  # float64
    for what, n_bytes in (
        ("a model of this model.d_model, n_layers and vocabulary", 4 * (numbers + positions)),
        ("data.batch_size rows of a step", 24 * config.data.batch_size * row_length),
    ):
        if n_bytes > (there := total_memory()):
            raise ValueError(f"{what} takes {short(n_bytes, 'B')}; this machine has {short(there, 'B')} of memory")


def _check_device(config: TrainConfig, device: torch.device) -> None:
    """Refuse what the chosen device cannot do."""
    if device.type == "cpu" and config.model.attention.kernel == "flex":
        raise ValueError("model.attention.kernel=flex has no gradients on a CPU; use kernel=auto, or train on a GPU")
    there = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device.type)
    if there is not None and config.trainer.devices > there:
        raise ValueError(
            f"trainer.devices={config.trainer.devices} are more than the {there} {device.type} devices here"
        )


def _strategy(config: TrainConfig) -> str | Strategy:
    if config.trainer.strategy == "fsdp":
        # One file with all weights, which every number of ranks can read.
        return ModelParallelStrategy(config.trainer.ranks, tensor_parallel_size=1, save_distributed_checkpoint=False)
    if config.trainer.ranks > 1:
        # Buffers are constants: to send them around before each validation batch would hang ranks that have fewer.
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    return "auto"


def _environment() -> list[SLURMEnvironment]:
    """SLURM without Lightning's requeueing, which saves in `runs_dir`, where every later run would find and load it."""
    if not SLURMEnvironment.detect():
        return []
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError:  # Lightning counts in tasks per node
        raise ValueError(
            f"SLURM was given --ntasks={os.environ['SLURM_NTASKS']}; give it --ntasks-per-node, and --nodes, instead"
        ) from None


def code_version() -> str:
    """The git commit of this code, with -dirty behind it where files were changed; elsewhere the package's version."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists() and shutil.which("git"):
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        found = subprocess.run(describe, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return __version__


def _new_directory(config: TrainConfig, sweep_dir: Path | None, command: str, console: Console) -> Path:
    if sweep_dir is None:
        runs_dir = Path(config.runs_dir)
        run = new_run(runs_dir, run_name(config.name))
        if config.name is not None and run != runs_dir / config.name:
            resume = f"{command} name={shlex.quote(config.name)} resume=auto"
            console.print(f"{runs_dir / config.name} is there already, so this is {run}; to go on with that: {resume}")
        return run
    if not any(sweep_dir.iterdir()):  # Hydra made it
        return sweep_dir
    return new_run(sweep_dir.parent, sweep_dir.name)


def make_callbacks(
    directory: RunDirectory, config: TrainConfig, console: Console, model: Transformer, data: TextData
) -> list[pl.Callback]:
    """In the order in which Lightning calls them: what is shown or drawn comes after the state has been saved."""
    average = MovingAverage(decay=config.callbacks.ema) if config.callbacks.ema else None
    sampler = Sampler(config, console, model, data, average)
    callbacks: list[pl.Callback] = [directory, Checkpointer(directory, config, console, sampler)]
    if average is not None:
        callbacks.append(average)
    if config.callbacks.progress:
        callbacks.append(Bar(console, config.trainer.log_every))
    callbacks.append(ValidationWatch(directory, console))
    if isinstance(config.schedule, RangeConfig):
        callbacks.append(RateFinder(console))
    if config.trainer.profile:
        callbacks.append(Profiler(directory, console))
    return callbacks


def _quiet() -> None:
    """Lightning advises about things that are decided here (workers, checkpoints, its own tips)."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*isinstance.*LeafSpec.*")
    warnings.filterwarnings("ignore", module="torch._inductor")


def _resume(config: TrainConfig, console: Console) -> tuple[Path | None, Path | None, dict | None]:
    """The run directory to go on in, its newest checkpoint or the one that is named, and what that holds.

    Raises:
        CheckpointError: there is no run, or nothing that can be read.
    """
    if config.resume is None:
        return None, None, None
    if Path(config.resume).is_file():
        path = Path(config.resume)
        return checkpoint_in_place(path), path, read_checkpoint(path)
    if config.resume != "auto":
        run = Path(config.resume)
        if not run.is_dir():
            raise CheckpointError(f"resume={run} is neither a run directory nor a checkpoint (looked in {Path.cwd()})")
    elif config.name is None:
        run = latest_run(Path(config.runs_dir))
    elif not (run := Path(config.runs_dir) / config.name).exists():
        return None, None, None
    check_run(run)
    found = newest_readable(run, console.print)
    if found is not None:
        return run, *found
    if config.resume != "auto":
        raise CheckpointError(f"resume={run} holds no checkpoint")
    console.print(f"{run} holds no checkpoint yet; starting from the beginning")
    return run, None, None


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written or made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise ValueError(f"the run cannot be kept in {folder}: {there} {why}; choose another runs_dir")


def changed_settings(run: Path, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """(before, now) of each setting that the run goes on with another value of, by its dotted name."""
    before, now = read_settings(run), flat(OmegaConf.to_container(OmegaConf.create(asdict(config))))
    both = (name for name in now if name in before and name not in OWN)
    return {name: (before[name], now[name]) for name in both if before[name] != now[name]}


def say_changed(console: Console, changed: dict, run: Path, step: int, config: TrainConfig, skipped: int) -> None:
    """Name the settings that are others from here on, and what that does to the learning rate."""
    if not changed:
        return
    named = (f"{name}={now} (was {before})" for name, (before, now) in changed.items())
    console.print(f"with other settings: {', '.join(named)}")
    of_schedule = [name for name in changed if name == "trainer.max_steps" or name.startswith("schedule.")]
    logged = [moment for moment in read_metrics(run) if moment["step"] <= step and "optim/lr_factor" in moment]
    if of_schedule and logged and step < config.trainer.max_steps:
        before, now = logged[-1], rate(config.schedule, step - skipped, config.trainer.max_steps)
        console.print(
            f"the learning rate was {before['optim/lr_factor']:.3g} of its peak in step {before['step']}; "
            f"it goes on with {now:.3g}"
        )


def _with_vocabulary(config: ModelConfig, tokens: int) -> ModelConfig:
    """The config with the tokenizer's size; a larger `model.vocab_size` stays, as padding of the embedding."""
    if config.vocab_size is not None and config.vocab_size < tokens:
        raise ValueError(f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {tokens} ids")
    return ModelConfig.from_dict(asdict(config) | {"vocab_size": config.vocab_size or tokens})


def _check_adapters(saved: dict, config: TrainConfig, model: Transformer, run: Path) -> None:
    """Refuse to resume with other adapters, or beside other weights."""
    old, new = saved.get("lora", asdict(LoRAConfig())), asdict(config.lora)
    for name in new:
        if old[name] != new[name]:
            raise ValueError(f"cannot resume {run}: it was trained with lora.{name}={old[name]}, not {new[name]}")
    if config.lora.rank and old["frozen"] != fingerprint(model):
        raise ValueError(f"cannot resume {run}: the weights in init_from={config.init_from} are no longer the same")


def _check_optimizer(saved: dict, config: TrainConfig, model: Transformer, run: Path) -> None:
    """Refuse to resume with another optimizer. Its settings may change: those of now hold."""
    try:
        check_resumable(make_optimizer(config.optimizer, model), saved["optimizer_states"][0])
    except ValueError as error:
        raise ValueError(f"cannot resume {run}: {error}") from None


def _check_same(saved: dict, now: dict, run: Path) -> None:
    """Refuse to resume with another model or tokenizer, naming the first difference."""
    old, new = (asdict(ModelConfig.from_dict(json.loads(header["model"]))) for header in (saved[HEADER], now))
    for name in new:
        if old[name] != new[name]:
            raise ValueError(f"cannot resume {run}: it was trained with model.{name}={old[name]}, not {new[name]}")
    if saved[HEADER]["tokenizer"] != now["tokenizer"]:
        raise ValueError(f"cannot resume {run}: it was trained with another tokenizer or other text")


def summary(console, config, run, model, data, device, precision, logging_line) -> dict[str, str]:
    """Say what is about to be trained, on what, and where it will lie."""
    model_config = model.config
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapters = f", {trained:,} in adapters of rank {config.lora.rank} trained" if config.lora.rank else ""
    source = f"; from {config.init_from}{adapters}" if config.init_from else ""
    train, held_out = data.train, data.validation
    steps, batch = config.trainer.max_steps, config.data.batch_size
    per_step = batch * data.row_length * data.efficiency
    optimizer = f"{config.optimizer.kind} lr {config.optimizer.lr:g}"
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    ranks = f"{config.trainer.ranks} x " if config.trainer.ranks > 1 else ""
    left_out = [(data.skipped, "blank ones skipped"), (data.boms, "byte-order marks dropped")]
    left_out = "".join(f", {number} {what}" for number, what in left_out if number)
    if data.steps is None:
        rows = f"streamed, {config.data.buffer:,} documents shuffled together"
        epochs, at_first = "", " in the first documents"
    else:
        rows = (
            f"{data.steps.n_rows:,} of {data.row_length} tokens, {data.efficiency:.1%} filled ({config.data.packing})"
        )
        epochs, at_first = f"{steps * batch / data.steps.n_rows:.1f} epochs, ", ""
    cut, prefixes = data.cut_prefixes
    if cut:
        rows += f"; {cut:,} of {prefixes:,} prefixes are longer than a row with their text, which is learned in part "
        rows += "without them"
    facts = {
        "run": str(run),
        "model": f"{parameter_count(model_config):,} parameters: {model_config.n_layers} layers, "
        f"d_model {model_config.d_model}, {model_config.n_heads} heads, {model_config.position} positions{source}",
        "data": f"{config.data.kind}: {len(train.documents):,} documents, {train.n_bytes:,} bytes{at_first}{left_out}; "
        f"{len(held_out.documents):,} documents, {held_out.n_bytes:,} bytes held out",
        "tokens": f"{train.n_tokens:,} of {config.tokenizer.kind} with a vocabulary of {data.tokenizer.vocab_size:,}, "
        f"{train.n_bytes / train.n_tokens:.2f} bytes each",
        "rows": rows,
        "training": f"{steps:,} steps of {batch} rows, {per_step * steps:,.0f} tokens, {epochs}{optimizer}",
        "device": f"{ranks}{device.type} ({hardware}), precision {precision}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "logging": logging_line,
    }
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:10}", "bold"), value))
    return facts


def report(config: TrainConfig, run: Path, draw: Callable[[Path], object] | None, console: Console) -> None:
    """Have the run drawn, from its directory alone."""
    if draw is None or not config.callbacks.report or rank_zero_only.rank:
        return
    try:
        draw(run)
    except Exception as error:  # whatever it is: the model is trained and saved, and more matters than a drawing
        console.print(f"no report was drawn: {' '.join(str(error).split())}")


def closing(console: Console, run: Path, module: LanguageModel, seconds: float) -> None:
    """Say what came of it and where it lies."""
    metrics = module.metrics
    best = best_validation(read_metrics(run))
    earlier = best is not None and not metrics["val/loss"] <= best.loss
    numbers = {
        "validation loss": f"{metrics['val/loss']:.4f} nats per token",
        "best validation": "-" if best is None else f"{best.loss:.4f} after step {best.step}",
        "bits per byte": f"{metrics['val/bits_per_byte']:.4f}",
        "tokens": f"{module.tokens_seen:,}",
        "time": f"{module.seconds:,.0f} s of stepping, {seconds:,.0f} s in all",
    }
    if module.tokens_here:  # not where all steps had been made before
        mfu = "  MFU {speed/mfu:.0%}".format_map(metrics) if "speed/mfu" in metrics else ""
        numbers["speed"] = f"{module.tokens_here / module.seconds:,.0f} tokens/s{mfu}"
    numbers["peak memory"] = f"{module.peak_memory() / 1e9:.2f} GB"
    files = {
        MODEL_FILE: "the model, its config and its tokenizer",
        BEST_FILE: "those with the lowest validation loss",
        "checkpoints": "to resume from",
        METRICS_FILE: "all that was measured",
        SAMPLES_FILE: "the samples",
        "attention": "pictures of its attention weights",
        REPORT_FILE: "the run in one page",
    }
    table = Table(show_header=False, box=box.ROUNDED)
    for name, value in numbers.items():
        table.add_row(Text(name, "bold"), value)
    table.add_section()
    for name, what in files.items():
        if (run / name).exists():
            table.add_row(Text(name, "bold"), what)
    console.print(f"\n{run}", style="bold green")
    console.print(table)
    script = Path(sys.argv[0])
    installed = script.suffix != ".py"
    generate = "minitransformer-generate" if installed else f"python {script.with_name('generate.py')}"
    model = run / BEST_FILE if earlier and (run / BEST_FILE).exists() else run
    console.print(f'generate from it:  {generate} checkpoint={shlex.quote(str(model))} prompt=""', style="bold")
