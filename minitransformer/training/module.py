"""One optimizer step, one validation: the LightningModule."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from minitransformer.data.packing import IGNORE
from minitransformer.data.rows import Batch
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import known_device, peak_memory
from minitransformer.model.cost import adapter_parameters, flops_per_token
from minitransformer.model.transformer import Transformer
from minitransformer.run.models import HEADER, describe
from minitransformer.training.config import TrainConfig
from minitransformer.training.lora import ADAPTER, fingerprint, merged
from minitransformer.training.loss import head_cross_entropy
from minitransformer.training.optimizers import by_name, make_optimizer
from minitransformer.training.schedules import rate


def parts(model: Transformer) -> dict[str, list[nn.Parameter]]:
    """The parameters by what they belong to: embedding, position, attention, feed_forward, norms, head."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        part = name.split(".")[2 if name.startswith("blocks.") else 0]
        found.setdefault("norms" if part.endswith("norm") else part, []).append(p)
    return found


def norm_of(tensors: Iterable[Tensor | None]) -> Tensor:
    """The Euclidean norm of all of them together, of their shards too; None counts as nothing."""
    norm = torch.nn.utils.get_total_norm([t for t in tensors if t is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def micro_batches(batch: Batch, n: int) -> list[Batch]:
    """The rows of a batch in at most `n` parts, each of which knows the targets of the whole step."""
    rows = -(-len(batch.tokens) // n)
    parts = zip(*(x.split(rows) for x in batch[:3]), strict=True)
    return [Batch(*part, batch.step_targets) for part in parts]


class LanguageModel(pl.LightningModule):
    """Trains a `Transformer` on batches that each are one whole optimizer step.

    Micro-batches are cut here and not by Lightning, so that the gradient is that of the mean over all target tokens
    of the step, whatever the accumulation, and a Lightning batch is an optimizer step, whatever the epoch.

    n_bytes: UTF-8 bytes of the validation text, for bits per byte. n_rows: rows of an epoch (None: of a stream).
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, config: TrainConfig, n_bytes: int, n_rows: int | None = None
    ):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.tokenizer, self.config, self.settings = model, tokenizer, config, config.trainer
        self.n_bytes, self.n_rows = n_bytes, n_rows
        self.strict_loading = not config.lora.rank  # a checkpoint of adapters leaves out what is frozen
        self.frozen = fingerprint(model) if config.lora.rank else None  # as loaded, before a precision rounds it
        self.model.checkpoint_gradients(self.settings.gradient_checkpointing, self.settings.checkpoint_blocks)
        if self.settings.compile:
            self.model.compile_blocks()
        self.metrics: dict[str, float] = {}  # what was last logged, for the progress bar and the summary
        self.tokens_seen = self.skipped = self.skipped_in_row = 0
        self.seconds, self.tokens_here = 0.0, 0  # spent in, and targets of, the steps of this process
        self._mark = time.perf_counter()
        self._window: dict[str, float | Tensor] = {}  # sums over the steps since the last log

    def configure_model(self) -> None:
        """Under fsdp, each block and the rest of the model become one group of shards."""
        if self.settings.strategy == "fsdp":
            from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

            if isinstance(self.model, FSDPModule):  # done before: Lightning asks again when it validates
                return
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            register_fsdp_forward_method(self.model, "hidden_states")

    def loss_sums(self, batch: Batch, smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """What is minimised, and the cross-entropy in nats, both summed over all targets, in fp32."""
        model = self.model
        x, _ = model.hidden_states(batch.tokens, positions=batch.positions)
        cap = model.config.logit_softcap
        return head_cross_entropy(x.flatten(0, 1), model.head.weight, batch.targets.flatten(), cap, smoothing, z_loss)

    # Training --------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.config.optimizer, self.model)

    def training_step(self, batch: Batch, _) -> None:
        settings, optimizer, step = self.settings, self.optimizers(), self.global_step
        self._seed_dropout(step)
        factor = rate(self.config.schedule, step - self.skipped, settings.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        nats = torch.zeros((), device=self.device)
        parts = micro_batches(batch, settings.accumulate)
        for part in parts:
            alone = part is parts[-1] or self.trainer.world_size == 1
            with nullcontext() if alone else self.trainer.strategy.block_backward_sync():
                objective, part_nats = self.loss_sums(part, settings.label_smoothing, settings.z_loss)
                self._backward(objective, batch.step_targets)
            nats += part_nats
        with self._without_autocast():
            optimizer.step()  # by way of `on_before_optimizer_step`
        optimizer.zero_grad()
        if batch.state is not None:
            self.trainer.datamodule.stream_state = batch.state
        self._count(nats, batch.step_targets, factor, step + 1)

    def _backward(self, objective: Tensor, step_targets: int) -> None:
        # Ranks average their gradients; times their number, the average is the sum over the step's targets.
        # A step may have none of these where rows hold long prefixes.
        scale = self.trainer.world_size / max(1, step_targets)
        # A loss that is not finite makes the whole gradient NaN, so all ranks see it and drop the step.
        scale = torch.where(objective.isfinite(), scale, math.nan)
        with self._without_autocast():
            self.manual_backward(objective * scale)

    def _without_autocast(self) -> torch.autocast:
        """The backward pass takes the dtypes of the forward pass, the optimizer those of the weights.

        Lightning's autocast would cast what both do in fp32.
        """
        return torch.autocast(self.device.type, enabled=False)

    def _seed_dropout(self, step: int) -> None:
        """Dropout is a function of (seed, step, rank), so a resumed run needs to remember nothing of it."""
        seed = int(np.random.SeedSequence((self.config.seed, step, self.global_rank)).generate_state(1)[0])
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)
        else:  # torch.manual_seed would take a millisecond to ask for GPUs
            torch.default_generator.manual_seed(seed)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the gradient down to `gradient_clip` if it is larger; drop it if it is not finite.

        Lightning calls this when gradients have been unscaled.
        """
        parameters = list(self.model.parameters())
        self._norm = norm_of([p.grad for p in parameters])
        if self._logs(self.global_step + 1):
            self._grad_norms = {name: norm_of([p.grad for p in part]) for name, part in parts(self.model).items()}
        if not self._norm.isfinite():
            self.skipped, self.skipped_in_row = self.skipped + 1, self.skipped_in_row + 1
            if (
                getattr(self.trainer.precision_plugin, "scaler", None) is None
            ):  # a scaler drops it, and lowers its scale
                optimizer.zero_grad()
            return
        self.skipped_in_row = 0
        if self.settings.gradient_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.gradient_clip, self._norm)

    def _logs(self, step: int) -> bool:
        return step % self.settings.log_every == 0 or step == self.settings.max_steps

    def _count(self, nats: Tensor, targets: int, factor: float, step: int) -> None:
        """Add a step to the window since the last log; log at every `log_every`-th step."""
        self.tokens_seen += targets
        self.tokens_here += targets
        window = self._window = self._window or dict(nats=0.0, targets=0, steps=0, seconds=self.seconds)
        if not self.skipped_in_row:
            window["nats"] = nats + window["nats"]
            window["targets"] += targets
        window["steps"] += 1
        if not self._logs(step):
            return
        loss = float(self.trainer.strategy.reduce(torch.as_tensor(window["nats"], device=self.device), reduce_op="sum"))
        spent = self.seconds + time.perf_counter() - self._mark - window["seconds"]
        tokens_per_s = window["targets"] / spent
        metrics = {
            "train/loss": loss / window["targets"] if window["targets"] else math.nan,  # every step was skipped
            "optim/lr": self.config.optimizer.lr * factor,
            "optim/lr_factor": factor,
            "optim/grad_norm": self._norm.item(),
            "optim/skipped_steps": float(self.skipped),
            "speed/tokens_per_s": tokens_per_s,
            "speed/step_ms": 1000 * spent / window["steps"],
            "speed/peak_memory_gb": self.peak_memory() / 1e9,
        }
        for group in self.optimizers().param_groups:
            metrics[f"optim/lr/{group['name']}"] = group["lr"]
        norms = {name: norm_of(part).item() for name, part in parts(self.model).items()}
        metrics["model/norm"] = math.hypot(*norms.values())
        for name, norm in norms.items():
            metrics[f"optim/grad_norm/{name}"] = self._grad_norms[name].item()
            metrics[f"model/norm/{name}"] = norm
        if self.n_rows is not None:
            metrics["data/epoch"] = step * self.config.data.batch_size / self.n_rows
        if peak := self.peak_flops():
            metrics["speed/mfu"] = self.flops_per_token() * tokens_per_s / (peak * self.trainer.world_size)
        self.log_now(metrics, step)
        if step % self.settings.log_every == 0:  # not at an end between, after which the run may be extended
            self._window = {}

    def peak_memory(self) -> int:
        """Bytes that this process has held at most: of the GPU's memory, or of the machine's."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_memory()

    def peak_flops(self) -> float | None:
        """What the device could do at most in the precision of training; None where it is not known."""
        if self.device.type != "cuda":
            return None
        device = known_device(torch.cuda.get_device_name(self.device))
        if device is None:
            return None
        return 1e12 * (device.full if self.trainer.precision == "32-true" else device.half)

    def flops_per_token(self) -> float:
        """Of training on this run's rows."""
        config, model = self.config, self.model.config
        adapters = adapter_parameters(model, config.lora.rank, config.lora.targets)
        rows = -(-config.data.batch_size // (config.trainer.ranks * config.trainer.accumulate))
        length = config.data.row_length or model.max_seq_len
        return flops_per_token(model, length, training=True, rows=rows, adapters=adapters)

    def log_now(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics and the tokens so far to the loggers at once (`self.log` costs time in every step)."""
        self.metrics.update(metrics)
        metrics = {"tokens": self.tokens_seen, **metrics}
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    # The clock counts optimizer steps alone: validation, samples and checkpoints pause it.

    def on_train_start(self) -> None:
        self._mark = time.perf_counter()

    def on_train_batch_end(self, *_) -> None:
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of `seconds` and out of tokens/s."""
        before = time.perf_counter()
        yield
        self._mark += time.perf_counter() - before

    def on_validation_start(self) -> None:
        self._validation_start = time.perf_counter()

    # Validation ------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(2, dtype=torch.float64)

    def validation_step(self, batch: Batch, _) -> None:
        nats = sum(self.loss_sums(part)[1] for part in micro_batches(batch, self.settings.accumulate))
        targets = (batch.targets != IGNORE).sum()
        self._validation += torch.tensor([nats.item(), targets.item()], dtype=torch.float64)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.world_size > 1:
            self._validation = self.trainer.strategy.reduce(self._validation.to(self.device), reduce_op="sum")
        nats, targets = self._validation.tolist()
        self.metrics |= {"val/loss": nats / targets, "val/bits_per_byte": nats / math.log(2) / self.n_bytes}

    def on_validation_end(self) -> None:
        """Comes after the callbacks: what is logged for a step that is the best has been kept as such."""
        self.log_now({name: self.metrics[name] for name in ("val/loss", "val/bits_per_byte")}, self.global_step)
        self._mark += time.perf_counter() - self._validation_start

    # Checkpoints -----------------------------------------------------------------------------------------------

    def plain_weights(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a model without adapters, which are merged; `state`, with this module's names, has those that
        differ from the ones of now."""
        state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        return merged(self.model.state_dict() | state, self.config.lora)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint[HEADER] = describe(self.model.config, self.tokenizer)
        if self.config.lora.rank:
            kept = {name: tensor for name, tensor in checkpoint["state_dict"].items() if ADAPTER.search(name)}
            checkpoint["state_dict"] = kept
            checkpoint["lora"] = asdict(self.config.lora) | {"frozen": self.frozen}
        if self.trainer.is_global_zero:  # fsdp gathers the state on this rank alone
            checkpoint["optimizer_states"] = [by_name(state) for state in checkpoint["optimizer_states"]]
        checkpoint["counts"] = {"tokens_seen": self.tokens_seen, "skipped": self.skipped}
        if self._window:
            window = {"nats": float(self._window["nats"]), "seconds": self._window["seconds"] - self.seconds}
            checkpoint["window"] = self._window | window

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.tokens_seen, self.skipped = (checkpoint["counts"][name] for name in ("tokens_seen", "skipped"))
        if "window" in checkpoint:
            self._window = {"seconds": 0.0} | checkpoint["window"]
