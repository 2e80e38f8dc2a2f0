"""What a run directory holds: its layout, config and logs. They are read without torch.

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
"""

import errno
import json
import math
import operator
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

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


class CheckpointError(ValueError):
    """A checkpoint is missing, broken, or not one."""


# Whole files ---------------------------------------------------------------------------------------------------------


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


# Checkpoints ---------------------------------------------------------------------------------------------------------


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


# The config ----------------------------------------------------------------------------------------------------------


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


# What was logged -----------------------------------------------------------------------------------------------------


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
    with atomic_write(attention_path(run, step)) as file:
        file.write(png)


def read_attention(run: Path) -> list[tuple[int, bytes]]:
    """(step, PNG file) of each picture of attention weights, in order. Empty without any."""
    return [(int(path.stem.removeprefix("step-")), path.read_bytes()) for path in attention_paths(run)]


def attention_paths(run: Path) -> list[Path]:
    return sorted((run / "attention").glob("step-*.png"))


def attention_path(run: Path, step: int) -> Path:
    return run / "attention" / f"step-{step:08d}.png"


# What the report needs beside that -----------------------------------------------------------------------------------


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
