"""One optimizer step, one validation: the LightningModule."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from torch import Tensor

from minitransformer.checkpoint import HEADER, describe
from minitransformer.data.rows import Batch
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.model.transformer import Transformer
from minitransformer.training.config import AdamWConfig, ScheduleConfig, TrainerConfig
from minitransformer.training.loss import head_cross_entropy
from minitransformer.training.optimizers import make_optimizer
from minitransformer.training.schedules import rate


class LanguageModel(pl.LightningModule):
    """Trains a `Transformer` on batches that each are one whole optimizer step.

    Micro-batches are cut here and not by Lightning, so that the gradient is that of the mean over all target tokens
    of the step, whatever the accumulation, and a Lightning batch is an optimizer step, whatever the epoch.

    n_bytes: UTF-8 bytes of the validation text, for bits per byte.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        optimizer: AdamWConfig,
        schedule: ScheduleConfig,
        trainer: TrainerConfig,
        n_bytes: int,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.tokenizer = model, tokenizer
        self.optimizer_config, self.schedule, self.settings = optimizer, schedule, trainer
        self.n_bytes = n_bytes
        self.model.gradient_checkpointing = trainer.gradient_checkpointing
        self.metrics: dict[str, float] = {}  # what was last logged, for the progress bar and the summary
        self.tokens_seen = 0
        self.seconds = 0.0  # spent in optimizer steps since the start of this process
        self._mark = time.perf_counter()
        self._window: dict[str, float | Tensor] = {}  # sums over the steps since the last log
        self._rng: tuple | None = None  # of the checkpoint that is resumed

    def loss_sum(self, batch: Batch) -> Tensor:
        """The summed cross-entropy in nats over all targets, in fp32."""
        model = self.model
        x, _ = model.features(batch.tokens, positions=batch.positions)
        return head_cross_entropy(
            x.flatten(0, 1), model.head.weight, batch.targets.flatten(), model.config.logit_soft_cap
        )

    # Training --------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.optimizer_config, self.model)

    def training_step(self, batch: Batch, _) -> None:
        optimizer = self.optimizers()
        step = self.global_step
        factor = rate(self.schedule, step, self.settings.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        total = torch.zeros((), device=self.device)
        rows = -(-len(batch.tokens) // self.settings.accumulate)
        for start in range(0, len(batch.tokens), rows):
            part = Batch(*(x[start : start + rows] for x in batch[:3]), batch.step_targets)
            loss = self.loss_sum(part)
            # Ranks average their gradients; times their number, the average is the sum over the step's targets.
            # A step may have none where rows hold long prefixes.
            self.manual_backward(loss * (self.trainer.world_size / max(1, batch.step_targets)))
            total += loss.detach()
        norm = self._clip()
        optimizer.step()
        optimizer.zero_grad()
        if batch.state is not None:
            self.trainer.datamodule.stream_state = batch.state
        self._count(total, batch.step_targets, norm, factor, step + 1)

    def _clip(self) -> Tensor:
        """The norm of the gradient, which is scaled down to `gradient_clip` if it is larger."""
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.settings.gradient_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.gradient_clip, norm)
        return norm

    def _count(self, loss_sum: Tensor, targets: int, norm: Tensor, factor: float, step: int) -> None:
        """Add a step to the window since the last log; log at every `log_every`-th step."""
        self.tokens_seen += targets
        window = self._window = self._window or dict(loss=0.0, targets=0, seconds=self.seconds)
        window["loss"] = loss_sum + window["loss"]
        window["targets"] += targets
        if step % self.settings.log_every and step != self.settings.max_steps:
            return
        loss = self.trainer.strategy.reduce(window["loss"], reduce_op="sum").item() / window["targets"]
        now = time.perf_counter()
        spent = self.seconds + now - self._mark - window["seconds"]
        self.log_now(
            {
                "train/loss": loss,
                "optim/lr": self.optimizers().param_groups[0]["lr"],
                "optim/lr_factor": factor,
                "optim/grad_norm": norm.item(),
                "speed/tokens_per_s": window["targets"] / spent,
                "data/tokens": float(self.tokens_seen),
            },
            step,
        )
        self._window = {}

    def log_now(self, metrics: dict[str, float], step: int) -> None:
        """Hand metrics to the logger at once (`self.log` costs time in every step)."""
        self.metrics.update(metrics)
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step)

    # The clock counts optimizer steps alone: validation, samples and checkpoints pause it.

    def on_train_start(self) -> None:
        if self._rng is not None:
            cpu, cuda = self._rng
            torch.set_rng_state(cpu)
            if cuda is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(cuda)
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

    def on_validation_end(self) -> None:
        self._mark += time.perf_counter() - self._validation_start

    # Validation ------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(2, dtype=torch.float64)

    def validation_step(self, batch: Batch, _) -> None:
        loss = self.loss_sum(batch)
        self._validation += torch.tensor([loss.item(), batch.step_targets], dtype=torch.float64)

    def on_validation_epoch_end(self) -> None:
        nats, targets = self.trainer.strategy.reduce(self._validation, reduce_op="sum").tolist()
        metrics = {"val/loss": nats / targets, "val/bits_per_byte": nats / math.log(2) / self.n_bytes}
        self.log_now(metrics, self.global_step)

    # Checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint[HEADER] = describe(self.model.config, self.tokenizer)
        checkpoint["tokens_seen"] = self.tokens_seen
        if self._window:
            checkpoint["window"] = {"loss": float(self._window["loss"]), "targets": self._window["targets"]}
        checkpoint["rng"] = torch.get_rng_state()
        if torch.cuda.is_available():
            checkpoint["cuda_rng"] = torch.cuda.get_rng_state_all()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.tokens_seen = checkpoint["tokens_seen"]
        if "window" in checkpoint:
            self._window = checkpoint["window"] | {"seconds": 0.0}
        self._rng = checkpoint["rng"], checkpoint.get("cuda_rng")
