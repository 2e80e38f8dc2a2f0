"""Where metrics, samples and attention maps go: into the run directory, always, and to W&B.

W&B is fed again from the run directory when a run goes on, so that its steps have neither a gap nor a double.
"""

import os
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import Logger
from PIL import Image
from rich.console import Console

from minitransformer.checkpoint import (
    BEST_FILE,
    METRICS_FILE,
    MODEL_FILE,
    REPORT_FILE,
    add_attention,
    add_metrics,
    add_sample,
    read_attention,
    read_metrics,
    read_samples,
    same_weights,
)
from minitransformer.model.checks import choose
from minitransformer.training.config import WANDB_MODES, TrainConfig, WandbConfig

FINISH_SECONDS = 300  # to wait for the last uploads


class RunLogger(Logger):
    """What the parts of a run call, on rank 0 alone; it does nothing."""

    name, version = "", None

    def log_hyperparams(self, params, *_, **__) -> None:
        """They are in config.yaml, and given to W&B as it starts."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Numbers of one moment."""

    def log_sample(self, text: str, step: int) -> None:
        """A text that the model wrote."""

    def log_attention(self, png: bytes, step: int) -> None:
        """A picture of attention weights."""

    def log_results(self) -> None:
        """What lies in the run directory when all is done."""

    def close(self, code: int) -> None:
        """code: what the process will exit with."""


class RunFiles(RunLogger):
    """metrics.jsonl, samples.txt and attention/ of the run directory, complete after every line."""

    def __init__(self, run: Path):
        super().__init__()
        self.run = run

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        add_metrics(self.run, step, {"time": time.time()} | metrics)

    def log_sample(self, text: str, step: int) -> None:
        add_sample(self.run, step, text)

    def log_attention(self, png: bytes, step: int) -> None:
        add_attention(self.run, step, png)


class WandbRun(RunLogger):
    """A run of W&B whose step is the optimizer step.

    W&B keeps what it has of a step and cannot be turned back. So what it lacks is first given to it from the run
    directory, and what it has already (a run that was killed after its last checkpoint makes the same steps again)
    is left out.

    A thread of its own talks to W&B: some calls wait for the network, and what fails there must not stop the training.
    """

    def __init__(self, experiment: Any, run: Path, console: Console, log_model: bool):
        super().__init__()
        import wandb

        self.wandb, self.experiment, self.run, self.console, self.log_model = wandb, experiment, run, console, log_model
        self.first = experiment.starting_step  # that W&B lacks
        self.samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
        self.failed = False  # said so already
        self.when: float | None = None  # what is logged was made, if that was before
        self.calls: Queue[Callable[[], None] | None] = Queue()
        self.thread = Thread(target=self._work, daemon=True)
        self.thread.start()
        again = [(moment.pop("step"), self.log_metrics, moment) for moment in read_metrics(run)]
        again += [(step, self.log_sample, text) for step, text in read_samples(run)]
        again += [(step, self.log_attention, png) for step, png in read_attention(run)]
        for step, log, what in sorted(again, key=lambda entry: entry[0]):
            if log == self.log_metrics:
                self.when = what.pop("time", None)
            log(what, step)
        self.when = None

    def _work(self) -> None:
        for call in iter(self.calls.get, None):
            try:
                call()
            except Exception as error:  # whatever it is
                if not self.failed:
                    self.console.print(f"wandb: {one_line(error)}; {METRICS_FILE} has everything")
                self.failed = True

    def _log(self, make: Callable[[], dict[str, Any]], step: int) -> None:
        if step >= self.first:
            time_of_row = {} if self.when is None else {"_timestamp": self.when}
            self.calls.put(lambda: self.experiment.log(make() | time_of_row, step=step))

    def log_metrics(self, metrics: dict[str, float | None], step: int) -> None:
        self._log(lambda: {name: float("nan") if value is None else value for name, value in metrics.items()}, step)

    def log_sample(self, text: str, step: int) -> None:
        def grown() -> dict[str, Any]:
            self.samples.add_data(step, text)
            return {"samples": self.samples}

        self._log(grown, step)

    def log_attention(self, png: bytes, step: int) -> None:
        self._log(lambda: {"attention": self.wandb.Image(Image.open(BytesIO(png)))}, step)

    def log_results(self) -> None:
        """The model as an artifact, `latest` and `best`, and the report. Offline they are named, not copied."""
        newest, best, report = (self.run / name for name in (MODEL_FILE, BEST_FILE, REPORT_FILE))
        if self.log_model:
            both = not best.exists() or same_weights(newest, best)
            if not both:
                self._log_file("model", best, MODEL_FILE, ["best"])
            self._log_file("model", newest, MODEL_FILE, ["latest", "best"] if both else ["latest"])
        if report.exists():
            self._log_file("report", report, REPORT_FILE, ["latest"])

    def _log_file(self, kind: str, path: Path, name: str, aliases: list[str]) -> None:
        def log() -> None:
            artifact = self.wandb.Artifact(f"{kind}-{self.experiment.id}", type=kind)
            artifact.add_file(str(path.absolute()), name=name, policy="immutable")  # no copy
            self.experiment.log_artifact(artifact, aliases=aliases)

        self.calls.put(log)

    def close(self, code: int) -> None:
        self.calls.put(lambda: self.experiment.finish(exit_code=code))
        self.calls.put(None)
        self.thread.join(min(5, FINISH_SECONDS))
        if self.thread.is_alive():
            self.console.print(f"waiting for wandb to upload, at most {FINISH_SECONDS} s")
            self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive():
            self.failed = True
            sync = f"wandb sync --include-online {shlex.quote(str(self.run))}/wandb/latest-run"
            self.console.print(f"wandb cannot be reached; nothing is lost: upload the rest with: {sync}")


def make_loggers(config: TrainConfig, run: Path, about: dict, console: Console) -> tuple[list[RunLogger], str]:
    """The loggers, and a line that says where metrics go. about: what W&B is told beside the config."""
    files = RunFiles(run)
    if not isinstance(config.logger, WandbConfig):
        return [files], str(run / METRICS_FILE)
    wandb_run, line = make_wandb(config, run, about, console)
    return [files, wandb_run], line


def make_wandb(config: TrainConfig, run: Path, about: dict, console: Console) -> tuple[WandbRun, str]:
    """Start a run of W&B, or go on with the one that this directory has; offline where it cannot be reached."""
    import wandb

    mode = config.logger.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        choose("WANDB_MODE", mode, WANDB_MODES)
    before = sorted((run / "wandb").glob("*run-*-*"), key=lambda path: path.name.removeprefix("offline-"))
    settings = dict(
        name=run.name if config.name is None or run.name == config.name else f"{config.name}-{run.name}",
        id=before[-1].name.rpartition("-")[2] if before else None,
        project=config.logger.project,
        entity=config.logger.entity,
        tags=config.logger.tags,
        dir=run.absolute(),
        config=asdict(config) | about,
        settings=wandb.Settings(
            silent=True, console="off", init_timeout=30, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True
        ),
    )
    why = ""
    if mode == "online":
        try:
            experiment = wandb.init(mode=mode, resume="allow" if before else None, **settings)
        except Exception as error:  # the network has many ways to fail
            mode, why = "offline", f" ({one_line(error)})"
    if mode != "online":
        experiment = wandb.init(mode=mode, **settings)
    logger = WandbRun(experiment, run, console, config.logger.log_model)
    if mode in ("online", "offline"):
        # The new one begins with all that was logged before. Uploaded too, the old ones would undo each other.
        for path in before:
            if path.name.startswith("offline-"):
                shutil.rmtree(path)
    lines = {
        "online": f"wandb online: {experiment.url if mode == 'online' else ''}",
        "offline": f"wandb offline{why}; upload with: wandb sync {shlex.quote(str(run))}/wandb/offline-run-*",
    }
    return logger, lines.get(mode, f"wandb {mode}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
