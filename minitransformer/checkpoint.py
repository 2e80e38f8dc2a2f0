"""What a run directory holds; the only place that reads or writes it.

    runs/NAME/
      config.yaml          the resolved training config
      tokenizer.json       of the `tokenizers` library
      model.safetensors    the newest weights, with the model's config and tokenizer in the header
      best.safetensors     those with the lowest validation loss
      checkpoints/         the whole training state, step-00000200.ckpt and so on
      metrics.jsonl        what was logged, an object a line: step, time (Unix), tokens (targets so far), metrics
      samples.txt          text sampled while the model trained
      attention/           pictures of attention weights at those steps
      starts.jsonl         how and on what the run was started and went on: an object each time
      held_out.json        a little held-out text, for looking at the model
      report.html          the run in one page
      hugging_face.zip     of a converted model: files of its folder that describe its use, for when it leaves again

When a run goes on from a checkpoint, later ones stand aside as *.later until the run has come as far again.

Both kinds of model file are self-contained, and neither can run code: safetensors holds numbers and strings,
checkpoints are read with `weights_only=True`.
"""

import errno
import json
import math
import operator
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from yaml import YAMLError

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.model.config import ModelConfig
from minitransformer.model.transformer import Transformer

CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.safetensors"
BEST_FILE = "best.safetensors"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.txt"
REPORT_FILE = "report.html"
STARTS_FILE = "starts.jsonl"
HELD_OUT_FILE = "held_out.json"
USE_FILE = "hugging_face.zip"
OWN = ("name", "resume", "runs_dir")  # settings that say where a run lies, and nothing about its result
HEADER = "minitransformer"  # the key under which both kinds of file describe the model


class CheckpointError(ValueError):
    """A checkpoint is missing, broken, or not one."""


# Writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under `path` whole or not at all.

    Raises:
        CheckpointError: the disk is full; `path` keeps what it held before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if full := _disk_full(error):
            raise CheckpointError(f"no space left on the disk for {path}; it was not written") from full
        raise


def write_page(text: str, out: str | Path | None, default: Path) -> Path:
    """Write an HTML page and return where it is: `out`, else `default`, or its name here where that is read-only.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = default if out is None else Path(out)
    if path.is_dir():
        raise CheckpointError(f"out={path} is a directory; name a file, such as out={path / default.name}")
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        if out is None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            print(f"{path.parent} is read-only; the page goes to the working directory")
            return write_page(text, default.name, default)
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
    return path


def _disk_full(error: BaseException | None) -> OSError | None:
    """The "no space left" behind an error: torch reports its own error on top of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None


def describe(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """What a model file says of itself, as plain strings."""
    about = {"model": json.dumps(asdict(config)), "tokenizer": tokenizer.to_json()}
    if len(tokenizer.end_ids) > 1:  # tokenizer.json has no place for several
        about["end_ids"] = json.dumps(sorted(tokenizer.end_ids))
    return about


def save_model(path: Path, config: ModelConfig, state: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    """Write weights (a model's `state_dict`), model config and tokenizer as one safetensors file."""
    tied = {"head.weight"} if config.tie_embeddings else set()  # one tensor, one entry
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items() if name not in tied}
    with atomic_write(path) as file:
        file.write(save(tensors, metadata=describe(config, tokenizer)))


# Reading ---------------------------------------------------------------------------------------------------------


def load(
    path: str | Path, device: str | torch.device = "cpu", say: Callable[[str], None] = print
) -> tuple[Transformer, Tokenizer]:
    """A trained model, ready for use, and its tokenizer.

    Args:
        path: a run directory (its newest weights that can be read), or one of its model files.
        say: told when a broken file is passed over.

    Raises:
        CheckpointError: there is nothing at `path` that holds a model.
    """
    path = Path(path)
    if (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is a Hugging Face folder; convert it first: python -m minitransformer.convert from={path} to=OUT"
        )
    if path.is_dir():
        return _load_newest(path, device, say)
    if not path.exists():
        hint = "; for the newest run write checkpoint=null" if path.name in ("None", "none") else ""
        raise CheckpointError(f"checkpoint={path} does not exist (looked in {Path.cwd()}){hint}")
    return _load_file(path, device)


def _load_newest(run: Path, device, say: Callable[[str], None]) -> tuple[Transformer, Tokenizer]:
    files = [path for path in (run / MODEL_FILE, *reversed(checkpoints(run))) if path.exists()]
    if not files:
        raise CheckpointError(f"{run} holds no checkpoint: neither {MODEL_FILE} nor checkpoints/step-*.ckpt")
    for path in files:
        try:
            return _load_file(path, device)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    raise CheckpointError(f"{run} holds no checkpoint that can be read")


def read_model(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor], Tokenizer]:
    """Config, weights as they are stored, and tokenizer of a run directory's `model.safetensors`, or of a model file.

    Raises:
        CheckpointError: there is nothing at `path` that holds a model.
    """
    if path.is_dir():
        path = path / MODEL_FILE
    if not path.exists():
        raise CheckpointError(f"{path} does not exist (looked in {Path.cwd()})")
    if path.suffix == ".safetensors":
        header, state = _read_safetensors(path)
    else:
        saved = read_checkpoint(path)
        if "lora" in saved:
            raise CheckpointError(f"{path} holds adapters alone; {MODEL_FILE} of its run has them merged")
        header = saved[HEADER]
        state = {name.removeprefix("model."): tensor for name, tensor in saved["state_dict"].items()}
    if "model" not in header or "tokenizer" not in header:
        raise CheckpointError(f"{path} does not describe a minitransformer model")
    tokenizer = Tokenizer.from_json(header["tokenizer"], json.loads(header.get("end_ids", "[]")))
    return ModelConfig.from_dict(json.loads(header["model"])), state, tokenizer


def _load_file(path: Path, device) -> tuple[Transformer, Tokenizer]:
    config, state, tokenizer = read_model(path)
    model = Transformer(config)
    if config.tie_embeddings:
        state.setdefault("head.weight", state["embedding.weight"])
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its own config: {' '.join(str(error).split())}") from None
    return model.to(device).eval(), tokenizer


def _read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error})") from None


def use_file(source: Path) -> Path | None:
    """The files that describe the use of a model, in an archive; None where it was not converted.

    source: a run directory, or one of its model files.
    """
    run = source if source.is_dir() else source.parent.parent if source.suffix == ".ckpt" else source.parent
    return run / USE_FILE if (run / USE_FILE).is_file() else None


def keep_use(source: Path, run: Path) -> None:
    """Give these files to a run that goes on from the model `source`."""
    if found := use_file(source):
        shutil.copyfile(found, run / USE_FILE)


def same_weights(one: Path, other: Path) -> bool:
    """Do two model files hold equal weights? (The order of entries in a header is left to chance.)"""
    (_, a), (_, b) = _read_safetensors(one), _read_safetensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_checkpoint(path: Path) -> dict:
    """The plain values and tensors of a training checkpoint, on the CPU.

    Raises:
        CheckpointError: the file is cut short, damaged, or holds more than plain values.
    """
    saved = read_plain(path)
    if not isinstance(saved, dict) or HEADER not in saved or "state_dict" not in saved:
        raise CheckpointError(f"{path} is not a checkpoint of minitransformer")
    return saved


def read_plain(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU, if it is nothing but tensors and plain values: no code is run.

    Raises:
        CheckpointError: it is something else, or the file is cut short or damaged.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch would have it reported where it is no file of its own
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        if isinstance(error, UnpicklingError):  # whose words advise to run the code
            why = "it is none, or holds more than plain values"
        elif isinstance(error, EOFError) or "PytorchStreamReader" in str(error):
            why = "it is cut short or damaged"
        else:
            why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({why})") from None


def checkpoints(run: Path) -> list[Path]:
    """The training checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*.ckpt"))


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.ckpt"


def check_run(run: Path) -> None:
    """Refuse a folder that is no run directory. One that a kill left empty is one.

    Raises:
        CheckpointError: it has no config.yaml.
    """
    if not run.is_dir():
        raise CheckpointError(f"{run} is a file, not a run directory")
    if not (run / CONFIG_FILE).is_file() and any(not path.name.endswith(".part") for path in run.iterdir()):
        raise CheckpointError(f"{run} is not a run directory: it has no {CONFIG_FILE}")


def checkpoint_in_place(path: Path) -> Path:
    """The run directory of a checkpoint that lies in its place there.

    Raises:
        CheckpointError: it is another file, such as a copy.
    """
    run = path.parent.parent
    if path not in checkpoints(run) or not (run / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"resume={path} is not RUN/checkpoints/step-*.ckpt beside a RUN/{CONFIG_FILE}; "
            f"resume=RUN goes on with a run, and init_from={path} starts another with these weights"
        )
    return run


def newest_readable(run: Path, say: Callable[[str], None]) -> tuple[Path, dict] | None:
    """The newest checkpoint that can be read, passing over broken ones with a word; None where there is none.

    Raises:
        CheckpointError: there are checkpoints, and none can be read.
    """
    found = checkpoints(run)
    for path in reversed(found):
        try:
            return path, read_checkpoint(path)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    if found:
        raise CheckpointError(f"{run / 'checkpoints'} holds no checkpoint that can be read")
    return None


# The config ------------------------------------------------------------------------------------------------------


def save_config(run: Path, config: dict[str, Any]) -> None:
    with atomic_write(run / CONFIG_FILE) as file:
        file.write(OmegaConf.to_yaml(config).encode())


def read_settings(run: Path) -> dict[str, Any]:
    """Dotted names and values of the settings in a run's config.yaml.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        settings = OmegaConf.to_container(OmegaConf.load(run / CONFIG_FILE))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise CheckpointError(f"{run / CONFIG_FILE} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{run / CONFIG_FILE} holds no settings")
    return flat(settings)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of all settings."""
    found = {}
    for name, value in config.items():
        inside = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return found


# What was logged -------------------------------------------------------------------------------------------------


def add_metrics(run: Path, step: int, metrics: dict[str, float]) -> None:
    """Append a line to the metrics; numbers that are not finite become null, as JSON knows none."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with open(run / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")


def read_metrics(run: Path) -> list[dict[str, float | None]]:
    """The logged moments of a run, in order; training and validation log the same step apart. Empty without any."""
    return _objects(run / METRICS_FILE)


class BestValidation(NamedTuple):
    """The lowest validation loss, its step, and the training loss that was logged last before (inf: none was)."""

    loss: float
    step: int
    train_loss: float


def best_validation(moments: list[dict[str, float | None]]) -> BestValidation | None:
    """Of what `read_metrics` gives, the first of equal ones; None where no validation was logged."""
    best, train_loss = None, math.inf
    for moment in moments:
        if moment.get("train/loss") is not None:
            train_loss = moment["train/loss"]
        loss = moment.get("val/loss")
        if loss is not None and (best is None or loss < best.loss):
            best = BestValidation(loss, moment["step"], train_loss)
    return best


def validated(run: Path, step: int) -> bool:
    """Was the loss on held-out text logged after `step`?"""
    return any(moment["step"] == step and "val/loss" in moment for moment in read_metrics(run))


def _objects(path: Path) -> list[dict]:
    """Of a file with an object a line, which names its step; half a line that a kill left at the end is passed over.

    Raises:
        CheckpointError: a whole line is something else.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else []):
        if line.endswith(b"\n"):
            try:
                found.append(json.loads(line))
                operator.index(found[-1]["step"])
            except (ValueError, TypeError, KeyError):
                raise CheckpointError(f"{path} is damaged: line {number + 1} is no object with a step") from None
    return found


def add_sample(run: Path, step: int, text: str) -> None:
    """Append a sample, indented so that no text can be taken for the line that names the step.

    It appears whole or not at all: a run that goes on asks whether the step has its sample.
    """
    path = run / SAMPLES_FILE
    before = path.read_bytes() if path.exists() else b""
    indented = text.replace("\n", "\n    ")
    with atomic_write(path) as file:
        file.write(before + f"--- step {step} ---\n    {indented}\n".encode())


def read_samples(run: Path) -> list[tuple[int, str]]:
    """(step, text) of each sample, in order. Empty without any."""
    path = run / SAMPLES_FILE
    written = path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""
    parts = re.split(r"^--- step (\d+) ---\n", written, flags=re.M)
    texts = ("\n".join(line[4:] for line in part.removesuffix("\n").split("\n")) for part in parts[2::2])
    return [(int(step), text) for step, text in zip(parts[1::2], texts, strict=True)]


def add_attention(run: Path, step: int, png: bytes) -> None:
    with atomic_write(_attention_path(run, step)) as file:
        file.write(png)


def read_attention(run: Path) -> list[tuple[int, bytes]]:
    """(step, PNG file) of each picture of attention weights, in order. Empty without any."""
    return [(int(path.stem.removeprefix("step-")), path.read_bytes()) for path in _attention(run)]


def _attention(run: Path) -> list[Path]:
    return sorted((run / "attention").glob("step-*.png"))


def _attention_path(run: Path, step: int) -> Path:
    return run / "attention" / f"step-{step:08d}.png"


# What the report needs beside that -------------------------------------------------------------------------------


def add_start(run: Path, step: int, start: dict) -> None:
    """Append what there is to know of a start, or of going on after `step`: the command, the device and so on."""
    with open(run / STARTS_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **start}) + "\n")


def read_starts(run: Path) -> list[dict]:
    """How the run was started and went on, in order; of two starts after one step the later. Empty without any."""
    return list({start["step"]: start for start in _objects(run / STARTS_FILE)}.values())


def save_held_out(run: Path, documents: list[tuple[str, str]]) -> None:
    """Keep the beginnings of some held-out documents, (prefix, text) each."""
    with atomic_write(run / HELD_OUT_FILE) as file:
        file.write(json.dumps(documents, ensure_ascii=False, indent=0).encode())


def read_held_out(run: Path) -> list[tuple[str, str]]:
    """What `save_held_out` kept; empty without any."""
    path = run / HELD_OUT_FILE
    try:
        return [(prefix, text) for prefix, text in json.loads(path.read_bytes())] if path.exists() else []
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


# Going on from an earlier step -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rewind:
    """What a run has that is later than the step from which it is to go on: found first, taken away by `apply`.

    sizes: bytes of each log up to that step, without half a line that a kill left. aside: later checkpoints, and the
    best weights if they are later. pictures: later ones. leftovers: of files that a kill left half-written.
    """

    run: Path
    step: int
    sizes: dict[Path, int]
    aside: list[Path]
    pictures: list[Path]
    leftovers: list[Path]

    @classmethod
    def find(cls, run: Path, step: int) -> "Rewind":
        """Raises CheckpointError when a log is damaged."""
        read_starts(run)
        best = best_validation(read_metrics(run))
        step_of = {METRICS_FILE: _step_of_line, STARTS_FILE: _step_of_line, SAMPLES_FILE: _step_of_sample}
        sizes = {run / name: _size_until(step, run / name, of) for name, of in step_of.items() if (run / name).exists()}
        aside = [path for path in checkpoints(run) if path > checkpoint_path(run, step)]
        if best is not None and best.step > step and (run / BEST_FILE).exists():
            aside.append(run / BEST_FILE)
        pictures = [path for path in _attention(run) if path > _attention_path(run, step)]
        leftovers = [path for inside in (".", "checkpoints", "attention") for path in (run / inside).glob(".*.part")]
        return cls(run, step, sizes, aside, pictures, leftovers)

    def apply(self) -> None:
        # The logs come last: a kill before that leaves no checkpoint that is later than they are.
        for path in self.aside:
            path.replace(_aside(path))
        if not (self.run / BEST_FILE).exists():
            self._restore_best()
        for path in (*self.pictures, *self.leftovers):
            path.unlink()
        for path, size in self.sizes.items():
            os.truncate(path, size)

    def _restore_best(self) -> None:
        """Take the best weights until now from their step's checkpoint, if that is still there and holds them."""
        best = best_validation([moment for moment in read_metrics(self.run) if moment["step"] <= self.step])
        if best is not None and (path := checkpoint_path(self.run, best.step)).exists():
            with suppress(CheckpointError):  # it holds adapters alone
                save_model(self.run / BEST_FILE, *read_model(path))


def forget_later(run: Path, step: int) -> None:
    """Remove what `Rewind` set aside, as far as the run has come again."""
    later = list((run / "checkpoints").glob("step-*.ckpt.later"))
    passed = [path for path in later if path <= _aside(checkpoint_path(run, step))]
    for path in passed:
        path.unlink()
    if passed == later:
        _aside(run / BEST_FILE).unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.later")


def _size_until(step: int, path: Path, step_of: Callable[[bytes], float]) -> int:
    """Bytes of the lines before the first one that is later."""
    size = 0
    with open(path, "rb") as file:
        for line in file:
            if step_of(line) > step:
                break
            size += len(line)
    return size


def _step_of_line(line: bytes) -> float:
    return json.loads(line)["step"] if line.endswith(b"\n") else math.inf


def _step_of_sample(line: bytes) -> float:
    found = re.fullmatch(rb"--- step (\d+) ---\n", line)
    if found:
        return int(found[1])
    # Other lines are text of the step named before; half a line may have been about to name a step.
    return 0 if line.startswith(b"    ") or line.endswith(b"\n") else math.inf


# Runs ------------------------------------------------------------------------------------------------------------


def new_run(runs_dir: Path, name: str) -> Path:
    """Make the directory of a run; a name that is taken gets a number behind it."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise CheckpointError(f"{runs_dir} has too many runs called {name}")


def point_latest(run: Path, runs_dir: Path) -> None:
    """Let `runs/latest` be `run`."""
    link = runs_dir / "latest"
    beside = link.with_name(f".latest.{os.getpid()}")
    try:
        beside.symlink_to(os.path.relpath(run, runs_dir), target_is_directory=True)
        os.replace(beside, link)
    except OSError:  # no links here, or a folder has that name: `latest_run` looks at times instead
        with suppress(OSError):
            beside.unlink()


def latest_run(runs_dir: Path) -> Path:
    """The run that started last.

    Raises:
        CheckpointError: there is none.
    """
    link = runs_dir / "latest"
    if link.is_symlink() and link.is_dir():
        return runs_dir / os.readlink(link)
    runs = [path.parent for path in runs_dir.glob(f"**/{CONFIG_FILE}")]
    if not runs:
        raise CheckpointError(f"no run in {runs_dir.absolute()}; train one first: python train.py")
    return max(runs, key=lambda run: (run / CONFIG_FILE).stat().st_mtime)
