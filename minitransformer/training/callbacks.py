"""What happens beside the optimizer steps: checkpoints and stopping, samples, progress."""

import signal
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from minitransformer.checkpoint import MODEL_FILE, atomic_write, checkpoint_path, checkpoints, save_model
from minitransformer.data.datamodule import TextData
from minitransformer.generation.generate import fitting, stream
from minitransformer.model.transformer import Transformer
from minitransformer.training.config import CallbacksConfig
from minitransformer.training.module import LanguageModel

HELD_OUT_TOKENS = 24  # of validation text, as the prompt of samples


class Interrupted(Exception):
    """Training was stopped by a signal, after its state was saved."""

    def __init__(self, signum: int, step: int):
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step = signum, step


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all."""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options=None) -> None:
        with atomic_write(Path(path)) as file:
            torch.save(checkpoint, file)


class Checkpointer(pl.Callback):
    """Save the whole state and the model every few steps, at the end, and on SIGINT or SIGTERM.

    It saves when the next step is about to begin: all that belongs to the step before, validation included, is then
    done, and Lightning's counters agree with the optimizer's.
    """

    def __init__(self, run: Path, config: CallbacksConfig, console: Console):
        self.run, self.every, self.keep, self.console = run, config.checkpoint_every, config.keep_checkpoints, console
        self.saved_step = -1
        self.signum: int | None = None
        self._before: dict[int, object] = {}

    def _stop(self, signum: int, frame) -> None:
        self.signum = signum
        self.console.print("stopping after this step; once more to stop at once without saving")
        signal.signal(signum, signal.SIG_DFL)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.saved_step = trainer.global_step  # 0, or what was resumed: nothing new to save yet
        # Here and not in `setup`: Lightning puts its own handler for SIGTERM in between, which exits with 0.
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_exception(self, trainer: pl.Trainer, module: LanguageModel, exception: BaseException) -> None:
        self._restore_handlers()

    def on_train_batch_start(self, trainer: pl.Trainer, module: LanguageModel, batch, batch_idx: int) -> None:
        due = self.every and trainer.global_step % self.every == 0
        if due or self.signum is not None:
            self.save(trainer, module)
        if self.signum is not None:
            raise Interrupted(self.signum, trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.save(trainer, module)
        self._restore_handlers()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: LanguageModel, checkpoint: dict) -> None:
        """Lightning has counted the coming batch as ready; validation after a resume would come a step late."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts["ready"] = counts["started"] = counts["processed"] = counts["completed"]

    def save(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        step = trainer.global_step
        if step == self.saved_step:
            return
        with module.paused():
            trainer.save_checkpoint(checkpoint_path(self.run, step))
            if trainer.is_global_zero:
                save_model(self.run / MODEL_FILE, module.model, module.tokenizer)
                for old in checkpoints(self.run)[: -self.keep]:
                    old.unlink()
        self.saved_step = step


class Sampler(pl.Callback):
    """Show and keep text from the model as it improves, after a prompt of one's own or the start of held-out text."""

    def __init__(self, config: CallbacksConfig, console: Console, model: Transformer, data: TextData):
        self.config, self.console = config, console
        held_out = data.held_out_text(min(HELD_OUT_TOKENS, data.row_length // 4))
        self.prompt = held_out if config.sample_prompt is None else config.sample_prompt
        try:
            room = fitting(model, len(data.tokenizer.encode(self.prompt)) + 1, None)
        except ValueError as error:
            raise ValueError(f"callbacks.sample_prompt: {error}") from None
        self.n_new = min(config.sample_tokens, room)

    def on_train_batch_end(self, trainer: pl.Trainer, module: LanguageModel, outputs, batch, batch_idx: int) -> None:
        step = trainer.global_step
        if step % self.config.sample_every and step != trainer.max_steps:
            return
        if trainer.is_global_zero:
            with module.paused():
                self.show(module, step, Path(trainer.default_root_dir) / "samples.txt")

    def show(self, module: LanguageModel, step: int, path: Path) -> None:
        config, model = self.config, module.model
        model.eval()
        sampling = dict(temperature=config.sample_temperature, seed=0)
        text = "".join(stream(model, module.tokenizer, self.prompt, self.n_new, **sampling))
        model.train()
        text = self.prompt + text
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n{text}\n")
        self.console.print(Text(f"sample after step {step}", style="bold"))
        self.console.print(Text("\n".join("  │ " + printable(line) for line in text.split("\n")), style="cyan"))


def printable(text: str) -> str:
    """The text with control characters shown as escapes: a model may write any of them."""
    return "".join(c if c.isprintable() else " " * 4 if c == "\t" else ascii(c)[1:-1] for c in text)


class Bar(pl.Callback):
    """A progress bar in a terminal, progress lines elsewhere."""

    def __init__(self, console: Console, log_every: int):
        self.console, self.log_every = console, log_every
        self.bar: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.first = trainer.global_step
        if not self.console.is_terminal or not trainer.is_global_zero:
            return
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self.console,
            refresh_per_second=2,
        )
        self.task = self.bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, loss="")
        self.bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: LanguageModel, outputs, batch, batch_idx: int) -> None:
        step = trainer.global_step
        fresh = step % self.log_every == 0 or step == trainer.max_steps
        line = "loss {train/loss:.3f}  {speed/tokens_per_s:,.0f} tokens/s".format_map(module.metrics) if fresh else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, **({"loss": line} if fresh else {}))
        elif fresh and trainer.is_global_zero:
            left = module.seconds / (step - self.first) * (trainer.max_steps - step)
            self.console.print(f"step {step}/{trainer.max_steps}  {line}  {left:,.0f} s left")

    def on_validation_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if trainer.is_global_zero:
            line = "validation loss {val/loss:.4f}  bits per byte {val/bits_per_byte:.4f}".format_map(module.metrics)
            self.console.print(Text(f"step {trainer.global_step}  {line}", style="bold green"))

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if self.bar is not None:
            self.bar.stop()  # gives the cursor back
            self.bar = None

    def on_exception(self, trainer: pl.Trainer, module: LanguageModel, exception: BaseException) -> None:
        self.on_train_end(trainer, module)
