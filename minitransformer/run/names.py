"""Names of runs: a new one, and the one that started last."""

import os
from contextlib import suppress
from pathlib import Path

from minitransformer.run.directory import CONFIG_FILE, CheckpointError


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
