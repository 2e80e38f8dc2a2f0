"""Going on from an earlier step: what a run has that is later is found first, then taken away."""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from minitransformer.run.directory import (
    BEST_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    STARTS_FILE,
    CheckpointError,
    attention_path,
    attention_paths,
    best_validation,
    checkpoint_path,
    checkpoints,
    read_metrics,
    read_starts,
)
from minitransformer.run.models import read_model, save_model


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
        pictures = [path for path in attention_paths(run) if path > attention_path(run, step)]
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
