"""What a run directory says of a run, without its model."""

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minitransformer.model.checks import Choice
from minitransformer.run.directory import (
    METRICS_FILE,
    OWN,
    CheckpointError,
    read_metrics,
    read_samples,
    read_settings,
    read_starts,
)
from minitransformer.training.config import GROUPS


@dataclass
class Record:
    """metrics: one dict for each logged step, in order. starts: see `add_start`.

    settings: dotted names and values; a group's choice stands under the group's name: {"optimizer": "muon", ...}.
    """

    path: Path
    settings: dict[str, Any]
    metrics: list[dict[str, float]]
    samples: list[tuple[int, str]]
    starts: list[dict[str, Any]]

    @classmethod
    def read(cls, run: Path) -> "Record":
        """Raises CheckpointError when `run` is no run directory, is damaged, or nothing was logged there."""
        if not run.exists():
            raise CheckpointError(f"runs={run} does not exist (looked in {Path.cwd()})")
        if not (run / "config.yaml").is_file():
            why = "it has no config.yaml" if run.is_dir() else "it is a file"
            raise CheckpointError(f"runs={run} is not a run: {why}")
        settings = read_settings(run)
        starts = read_starts(run)
        settings = chosen(settings, starts) | settings
        moments: dict[int, dict[str, float]] = {}  # training and validation log the same step apart
        for line in read_metrics(run):
            moments.setdefault(line["step"], {}).update({k: v for k, v in line.items() if v is not None})
        if not moments:
            raise CheckpointError(
                f"{run / METRICS_FILE} holds no metrics: the run stopped before its first log, or is of a version that "
                "kept none; resume it to get some"
            )
        return cls(run, settings, [moments[step] for step in sorted(moments)], read_samples(run), starts)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def curve(self, metric: str, over: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """(n,) steps or tokens, and what was logged at each."""
        points = [(moment[over], moment[metric]) for moment in self.metrics if metric in moment and over in moment]
        x, y = zip(*points, strict=True) if points else ((), ())
        return np.array(x, float), np.array(y, float)

    def last(self, metric: str) -> float | None:
        return next((moment[metric] for moment in reversed(self.metrics) if metric in moment), None)

    def most(self, metric: str) -> float | None:
        return max((moment[metric] for moment in self.metrics if metric in moment), default=None)

    @property
    def steps(self) -> int:
        return int(self.metrics[-1]["step"])

    @cached_property
    def seconds(self) -> float:
        """Spent in optimizer steps: validation, samples and checkpoints are not counted."""
        steps, milliseconds = self.curve("speed/step_ms")
        return float((np.diff(steps, prepend=0) * milliseconds).sum() / 1000)

    @property
    def tokens_per_s(self) -> float | None:
        """Over the whole run."""
        tokens = self.last("tokens")
        return tokens / self.seconds if tokens and self.seconds else None

    @property
    def device_type(self) -> str:
        """cpu, cuda or mps, on which it was last started; empty where that was not kept."""
        return self._of_last_start("device_type", r"(cpu|cuda|mps) \(")

    @property
    def precision(self) -> str:
        """In which it was last started, such as bf16-mixed; 32 where that was not kept."""
        return (self._of_last_start("precision", r"precision ([\w-]+)") or "32").replace("32-true", "32")

    def _of_last_start(self, field: str, pattern: str) -> str:
        """Older versions kept the line that was printed alone: 2 x cuda (NVIDIA H100), precision bf16-mixed, ..."""
        start = self.starts[-1] if self.starts else {}
        printed = re.search(pattern, str(start.get("device", "")))
        return start.get(field, printed[1] if printed else "")

    def changed(self, defaults: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """(setting, value, default) where the run has another value than `defaults`, dotted names and values.

        Where another choice was made, such as another optimizer, it is named, and the defaults are its own.
        """
        known = dict(defaults)
        known = chosen(known, []) | known
        choices = {(choice.group, choice.kind): choice for choice in all_choices()}
        for group in GROUPS:
            if (choice := choices.get((group, self.settings.get(group)))) and choice.kind != known[group]:
                known |= {f"{group}.{f.name}": default_of(f) for f in fields(choice) if f.name != "kind"}
        found = []
        for name, value in self.settings.items():
            if name not in OWN and not name.startswith("logger") and value != known.get(name, MISSING):
                found.append((name, value, known.get(name, MISSING)))
        return found


def read_all(paths: list[Path]) -> list[Record]:
    """The runs at `paths`, each once; a folder of runs, such as a sweep's, stands for all in it that logged anything.

    Raises:
        CheckpointError: there is no run, or one that was named logged nothing.
    """
    found: dict[Path, Record] = {}
    for path in paths:
        inside = sorted(file.parent for file in path.glob("*/config.yaml"))
        alone = (path / "config.yaml").exists() or not inside
        for run in [path] if alone else inside:
            try:
                found.setdefault(run.resolve(), Record.read(run))
            except CheckpointError as error:
                if alone:
                    raise
                print(f"{error}; passed over", file=sys.stderr)
    if not found:
        raise CheckpointError(f"no run with metrics in {', '.join(map(str, paths))}")
    return list(found.values())


# What older runs wrote of a choice, beside their config.
OLDER = {"files": "text", "inversesqrt": "inverse_sqrt"}


def chosen(settings: dict[str, Any], starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the `kind` of each group out of the settings: {"optimizer": "muon", ...}."""
    kinds = {group: settings.pop(f"{group}.kind", None) for group in GROUPS}
    older = starts[0].get("kinds", {}) if starts else {}
    kinds = {group: kind or OLDER.get(older.get(group), older.get(group)) for group, kind in kinds.items()}
    return {group: kind for group, kind in kinds.items() if kind is not None}


def all_choices(of: type[Choice] = Choice) -> Iterator[type[Choice]]:
    """The dataclasses of the choices of all groups."""
    for choice in of.__subclasses__():
        if choice.kind:
            yield choice
        yield from all_choices(choice)


def default_of(setting: Field) -> Any:
    """As a config file would hold it."""
    made = setting.default_factory() if setting.default is MISSING else setting.default
    return list(made) if isinstance(made, tuple) else made
