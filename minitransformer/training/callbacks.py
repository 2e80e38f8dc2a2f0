"""What happens beside the optimizer steps: the run directory, checkpoints and stopping, samples, progress."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from minitransformer.data.datamodule import TextData
from minitransformer.data.tokenizer import Tokenizer, printable
from minitransformer.generation.decode import fitting
from minitransformer.generation.generate import stream
from minitransformer.model.transformer import Transformer
from minitransformer.run.directory import (
    BEST_FILE,
    MODEL_FILE,
    atomic_write,
    best_validation,
    checkpoint_path,
    checkpoints,
    read_metrics,
    read_samples,
)
from minitransformer.run.models import save_model
from minitransformer.run.rewind import forget_later
from minitransformer.training.config import TrainConfig
from minitransformer.training.module import LanguageModel
from minitransformer.training.pictures import attention_picture

# What a terminal, a scheduler's end of time and SLURM's --signal=USR1 send; Windows lacks the last.
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
HELD_OUT_TOKENS = 24  # of validation text, as the prompt of samples
PICTURED_TOKENS = 48  # of validation text, in pictures of attention


class Interrupted(Exception):
    """Training was stopped from outside, by a signal or the clock, after its state was saved.

    code: what the process exits with.
    """

    def __init__(self, why: str, step: int, code: int):
        super().__init__(f"stopped by {why} after step {step}")
        self.step, self.code = step, code


class DivergedError(ValueError):
    """The validation loss, or the loss or gradient of the last steps, was not finite. The state was saved."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all.

    loaded: the checkpoint to go on from, which has been read to be checked and is handed on, not read again.
    """

    before: Callable[[dict], None]  # is given what is about to be written

    def __init__(self, loaded: dict | None):
        self.loaded = loaded

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = None) -> dict:
        loaded, self.loaded = self.loaded, None  # held no longer than it is needed
        assert loaded is not None
        return loaded

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options=None) -> None:
        self.before(checkpoint)
        with atomic_write(Path(path)) as file:
            torch.save(checkpoint, file)


class RunDirectory(pl.Callback):
    """Where the run lies, from the moment at which it begins: when Lightning has restored all that it goes on from.

    Whatever is refused before then has touched nothing. One rank makes the directory and its loggers and tells the
    others where it is.

    make: gives the directory. begin: (run) -> the loggers, once the directory is there.
    """

    def __init__(self, make: Callable[[], Path], begin: Callable[[Path], list[Logger]]):
        self._make, self._begin = make, begin
        self._path: Path | None = None

    @property
    def begun(self) -> bool:
        return self._path is not None

    @property
    def path(self) -> Path:
        assert self._path is not None, "the run has not begun"
        return self._path

    def _begin_once(self, trainer: pl.Trainer) -> None:
        if self.begun:
            return
        path = self._make() if trainer.is_global_zero else None
        self._path = trainer.strategy.broadcast(path)
        trainer.loggers = self._begin(self.path) if trainer.is_global_zero else []

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self._begin_once(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self._begin_once(trainer)  # a run that lacked only its last validation


class MovingAverage(EMAWeightAveraging):
    """Lightning's moving average of the weights. It is validated and saved as the model; training keeps its own."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        """Lightning takes the average away again here, before the Checkpointer could keep it."""

    def on_validation_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        super().on_validation_epoch_end(trainer, module)

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        """Lightning puts the average in place of the weights here, and the run could not be extended."""

    @contextmanager
    def in_place(self, trainer: pl.Trainer, module: LanguageModel) -> Iterator[None]:
        """Let the model be the average."""
        super().on_validation_epoch_start(trainer, module)
        try:
            yield
        finally:
            super().on_validation_epoch_end(trainer, module)


class Sampler:
    """Show and keep text from the model as it improves, after a prompt of one's own or the start of held-out text.

    A picture of its attention over the first held-out tokens is kept beside, where attention has weights (softmax).
    With a moving average, both are the average's.
    """

    def __init__(
        self, config: TrainConfig, console: Console, model: Transformer, data: TextData, average: MovingAverage | None
    ):
        self.config, self.console, self.average = config.callbacks, console, average
        prompts = (self.config.sample_prompt, data.config.sample_prompt)
        held_out = data.held_out_text(min(HELD_OUT_TOKENS, data.row_length // 4))
        self.prompt = next((prompt for prompt in prompts if prompt is not None), held_out)
        try:
            room = fitting(model, len(data.tokenizer.encode_document(self.prompt)), None)
        except ValueError as error:
            raise ValueError(f"callbacks.sample_prompt: {error}") from None
        self.n_new = min(self.config.sample_tokens, room)
        tokenizer, length = data.tokenizer, min(PICTURED_TOKENS, data.row_length)
        self.pictured = tokenizer.encode_document(data.held_out_text(length))[:length]

    def due(self, step: int) -> bool:
        every = self.config.sample_every
        return step > 0 and every > 0 and step % every == 0

    def show(self, trainer: pl.Trainer, module: LanguageModel, run: Path) -> None:
        """Show and keep a sample and a picture of this step, unless they are in `run` already."""
        step = trainer.global_step
        if not self.config.sample_every or trainer.strategy.broadcast(step in dict(read_samples(run))):
            return
        average = nullcontext() if self.average is None else self.average.in_place(trainer, module)
        was_training = module.model.training
        with module.paused(), average:
            model = self.whole_model(trainer, module)
            if trainer.is_global_zero:
                self.try_sample(model.eval(), module.tokenizer, step, trainer.loggers)
        module.model.train(was_training)

    def whole_model(self, trainer: pl.Trainer, module: LanguageModel) -> Transformer:
        """The model; under fsdp a copy for rank 0: ranks that read together would hang where their texts differ in
        length."""
        if module.settings.strategy != "fsdp":
            return module.model
        state = trainer.strategy.lightning_module_state_dict()
        if not trainer.is_global_zero:
            return module.model
        model = Transformer(module.model.config).to(module.device)
        model.load_state_dict(module.plain_weights(state))
        return model

    def try_sample(self, model: Transformer, tokenizer: Tokenizer, step: int, loggers: list[Logger]) -> None:
        """A sample is not worth a run: what fails is said, and training goes on."""
        try:
            text, png = self.sample(model, tokenizer), self.picture(model)
            for logger in loggers:
                if png is not None:
                    logger.log_attention(png, step)
                logger.log_sample(text, step)  # the last, as its being there stands for both
            self.console.print(Text(f"sample after step {step}", style="bold"))
            edge = "|" if self.console.options.ascii_only else "│"
            lines = (f"  {edge} {printable(line)}" for line in text.split("\n"))
            self.console.print(Text("\n".join(lines), style="cyan"))
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self.console.print(f"no sample after step {step}, training goes on ({why})")

    def sample(self, model: Transformer, tokenizer: Tokenizer) -> str:
        new = stream(model, tokenizer, self.prompt, self.n_new, temperature=self.config.sample_temperature, seed=0)
        return self.prompt + "".join(new)

    @torch.no_grad()
    def picture(self, model: Transformer) -> bytes | None:
        if model.config.attention.kind != "softmax":
            return None
        tokens = torch.tensor([self.pictured], device=model.embedding.weight.device)
        with torch.compiler.set_stance("force_eager"):
            _, weights = model(tokens, return_attention=True)
        return attention_picture(weights)


class Checkpointer(pl.Callback):
    """Save the whole state and the model every few steps, at the end, and when the run has to stop.

    It saves when the next step is about to begin: validation after the step before is then done, and Lightning's
    counters agree with the optimizer's. The weights with the lowest validation loss are kept apart. It stops at SIGINT,
    SIGTERM and SIGUSR1, when time is up, and when too many steps in a row were not finite.

    A sample comes after the save of its step, so whatever fails there costs no steps. So does the last validation. A
    run that was stopped in between has them made when it goes on.
    """

    def __init__(self, directory: RunDirectory, config: TrainConfig, console: Console, sampler: Sampler):
        self.directory, self.console, self.config, self.sampler = directory, console, config.callbacks, sampler
        self.deadline, self.max_skipped = time.monotonic() + config.trainer.seconds, config.trainer.max_skipped
        self.saved_step, self.best = -1, float("inf")
        self.signum: int | None = None
        self._before: dict[int, object] = {}

    @property
    def run(self) -> Path:
        return self.directory.path

    def _stop(self, signum: int, frame) -> None:
        self.signum = signum
        self.console.print("stopping after this step; once more to stop at once without saving")
        signal.signal(signum, signal.SIG_DFL)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def setup(self, trainer: pl.Trainer, module: LanguageModel, stage: str) -> None:
        # The model first, so that a kill cannot leave an older one beside a last checkpoint. A moving average has put
        # itself in the place of the weights by then.
        trainer.strategy.checkpoint_io.before = lambda state: self._save_model(MODEL_FILE, module, state["state_dict"])

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.saved_step = trainer.global_step  # 0, or what was resumed: nothing new to save yet
        self.best = self._best_before(trainer)
        # Here and not in `setup`: Lightning puts its own handler for SIGTERM in between, which exits with 0.
        self._before = {number: signal.signal(number, self._stop) for number in STOPS}

    def _best_before(self, trainer: pl.Trainer) -> float:
        """The loss of the weights that were kept as the best; infinite without any."""
        best = best_validation(read_metrics(self.run)) if (self.run / BEST_FILE).exists() else None
        return trainer.strategy.broadcast(math.inf if best is None else best.loss)

    def on_exception(self, trainer: pl.Trainer, module: LanguageModel, exception: BaseException) -> None:
        self._restore_handlers()

    def on_train_batch_start(self, trainer: pl.Trainer, module: LanguageModel, batch, batch_idx: int) -> None:
        due = self.config.checkpoint_every and trainer.global_step % self.config.checkpoint_every == 0
        diverged = module.skipped_in_row >= self.max_skipped  # on all ranks at once: they share one gradient
        # Signals and clocks differ from rank to rank; all stop when one does.
        stop = self.signum is not None or time.monotonic() > self.deadline
        if trainer.world_size > 1:
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        if due or stop or diverged:
            self.save(trainer, module)
        if diverged:
            self._diverged(module, trainer.global_step)
        if stop and self.signum is None and time.monotonic() > self.deadline:
            raise Interrupted("trainer.max_time", trainer.global_step, 0)
        if stop:
            number = self.signum or signal.SIGTERM
            raise Interrupted(signal.Signals(number).name, trainer.global_step, 128 + number)
        if self.sampler.due(trainer.global_step):
            self.sampler.show(trainer, module, self.run)

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.save(trainer, module)
        if module.skipped_in_row:
            self._diverged(module, trainer.global_step)
        self.sampler.show(trainer, module, self.run)
        self._restore_handlers()

    def _diverged(self, module: LanguageModel, step: int) -> None:
        good = [p for p in checkpoints(self.run) if p <= checkpoint_path(self.run, step - module.skipped_in_row)]
        before = f"; the last checkpoint before that is {good[-1]}" if good else ""
        raise DivergedError(
            f"loss or gradient was not finite in the last {module.skipped_in_row} steps "
            f"(trainer.max_skipped={self.max_skipped}); "
            f"the state after step {step} is in {checkpoint_path(self.run, step)}{before}; try a lower optimizer.lr"
        )

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
                for old in checkpoints(self.run)[: -self.config.keep_checkpoints]:
                    old.unlink()
                forget_later(self.run, step)
        self.saved_step = step

    def _save_model(self, name: str, module: LanguageModel, state: dict[str, torch.Tensor]) -> None:
        save_model(self.run / name, module.model.config, module.plain_weights(state), module.tokenizer)

    def on_validation_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if alone(trainer):
            self.best = self._best_before(trainer)
            self.save(trainer, module)  # the model file may be of another step, or missing
            self.sampler.show(trainer, module, self.run)

    # Comes before the moving average gives its place in the model back.
    def on_validation_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        loss = module.metrics["val/loss"]
        if loss < self.best:
            self.best = loss
            state = trainer.strategy.lightning_module_state_dict()  # to which every rank gives its shards
            if trainer.is_global_zero:
                self._save_model(BEST_FILE, module, state)


def alone(trainer: pl.Trainer) -> bool:
    """Is this the last validation, apart from training?"""
    return trainer.state.fn == TrainerFn.VALIDATING


class RateFinder(pl.Callback):
    """Remember the loss of each rate, and name the rate at which it fell most steeply (Smith 2017)."""

    def __init__(self, console: Console):
        self.console = console
        self.found: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: LanguageModel, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step % module.settings.log_every == 0:
            self.found.append((module.metrics["optim/lr"], module.metrics["train/loss"]))

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        best = steepest(*map(torch.tensor, zip(*self.found, strict=True))) if self.found else None
        if best is None:
            self.console.print("the loss fell nowhere: try schedule.first_ratio smaller, or more steps", style="bold")
        else:
            self.console.print(f"the loss fell most steeply around optimizer.lr={best:.2g}", style="bold")


def steepest(rates: torch.Tensor, losses: torch.Tensor, width: int = 9) -> float | None:
    """The rate before the lowest loss at which the loss, averaged over `width` steps, falls most for each factor in the
    rate; (n,) each. None where it never falls."""
    if len(losses) < 2 * width:
        return None
    losses = losses.double().nan_to_num(nan=float("inf"), posinf=1e9).unfold(0, width, 1).mean(-1)
    middle = rates.double().unfold(0, width, 1).log().mean(-1)
    slope = torch.gradient(losses, spacing=(middle,))[0][: int(losses.argmin()) + 1]
    return float(middle[slope.argmin()].exp()) if slope.min() < 0 else None


class Profiler(pl.Callback):
    """torch's profiler around steps 4 to 8: a table in the terminal, and a trace for chrome://tracing or Perfetto."""

    def __init__(self, directory: RunDirectory, console: Console):
        self.directory, self.console = directory, console
        schedule = torch.profiler.schedule(wait=2, warmup=1, active=5, repeat=1)
        self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self.show, acc_events=True)

    def show(self, profiler: torch.profiler.profile) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.console.print(profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=15))
        path = self.directory.path / "trace.json"
        profiler.export_chrome_trace(str(path))
        self.console.print(f"the whole trace is in {path}; open it in https://ui.perfetto.dev")

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if trainer.is_global_zero:
            self.profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: LanguageModel, outputs, batch, batch_idx: int) -> None:
        if trainer.is_global_zero:
            self.profiler.step()

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if trainer.is_global_zero:
            self.profiler.stop()


def progress_line(metrics: dict[str, float], validated: int = 0, room: float = float("inf")) -> str:
    """The newest losses in nats per token, and speed: as many of them as have room, in characters.

    validated: the step after which the last validation was.
    """
    shown = {
        "train/loss": "train {:.3f}",
        "val/loss": f"val {{:.3f}} at {validated}",
        "speed/tokens_per_s": "{:,.0f} tokens/s",
        "speed/mfu": "MFU {:.0%}",
    }
    parts = [text.format(metrics[name]) for name, text in shown.items() if name in metrics]
    while parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


class Bar(pl.Callback):
    """A progress bar in a terminal, progress lines elsewhere."""

    def __init__(self, console: Console, log_every: int):
        self.console, self.log_every = console, log_every
        self.bar: Progress | None = None
        self.validated = 0  # the step of the last validation

    def on_train_start(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.first = trainer.global_step
        if not self.console.is_interactive or not trainer.is_global_zero:
            return
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=1,
        )
        self.task = self.bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, line="")
        self.bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: LanguageModel, outputs, batch, batch_idx: int) -> None:
        step = trainer.global_step
        fresh = step % self.log_every == 0 or step == trainer.max_steps
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
            if fresh:
                room = self.console.width - 2 * len(str(trainer.max_steps)) - 23  # beside the other columns
                self.bar.update(self.task, line=progress_line(module.metrics, self.validated, room))
        elif fresh and trainer.is_global_zero:
            left = module.seconds / (step - self.first) * (trainer.max_steps - step)
            line = progress_line(module.metrics, self.validated)
            self.console.print(f"step {step}/{trainer.max_steps}  {line}  {left:,.0f} s left")

    def on_validation_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        self.validated = trainer.global_step
        if trainer.is_global_zero:
            line = "validation loss {val/loss:.4f}  bits per byte {val/bits_per_byte:.4f}".format_map(module.metrics)
            self.console.print(Text(f"step {trainer.global_step}  {line}", style="bold green"))

    def on_train_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        if self.bar is not None:
            self.bar.stop()  # gives the cursor back
            self.bar = None

    def on_exception(self, trainer: pl.Trainer, module: LanguageModel, exception: BaseException) -> None:
        self.on_train_end(trainer, module)


RISE = 1.1  # of the best validation loss: more than it goes up and down while a model learns
WHAT_HELPS = "what helps: fewer trainer.max_steps, more text, model.dropout=0.1"


class ValidationWatch(pl.Callback):
    """Say, once, that validation has risen well above its best while training falls; and, once, that its loss is worse
    than that of a uniform guess."""

    def __init__(self, directory: RunDirectory, console: Console):
        self.directory, self.console = directory, console
        self.rose = self.was_blind = False

    def on_validation_end(self, trainer: pl.Trainer, module: LanguageModel) -> None:
        """Comes before the loss of now is logged."""
        if not trainer.is_global_zero:
            return
        loss, train_loss = module.metrics["val/loss"], module.metrics.get("train/loss", math.inf)
        n_tokens = module.tokenizer.vocab_size
        uniform = math.log(n_tokens)
        if loss > uniform and not self.was_blind:
            self.was_blind = True
            why = f", while training loss is {train_loss:.4f}; {WHAT_HELPS}" if train_loss < uniform else ""
            self._warn(
                trainer,
                f"validation loss {loss:.4f} is worse than {uniform:.4f}, a uniform guess among {n_tokens:,} ids{why}",
            )
        best = best_validation(read_metrics(self.directory.path))
        if best is not None and loss > RISE * best.loss and train_loss < best.train_loss and not self.rose:
            self.rose = True
            self._warn(
                trainer,
                f"overfitting: validation loss {loss:.4f} has risen from its best, {best.loss:.4f} after step "
                f"{best.step}, while training loss falls; {BEST_FILE} keeps the best; {WHAT_HELPS}",
            )

    def _warn(self, trainer: pl.Trainer, line: str) -> None:
        self.console.print(f"step {trainer.global_step}  {line}", style="bold yellow")
