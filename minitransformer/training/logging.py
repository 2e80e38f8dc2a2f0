"""Where metrics, samples and attention maps go: into the run directory, always, and to W&B.

W&B is fed again from the run directory when a run goes on, so that its steps have neither a gap nor a double.
"""

import os
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
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
from minitransformer.training.config import TrainConfig, WandbConfig

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
        add_metrics(self.run, step, metrics)

    def log_sample(self, text: str, step: int) -> None:
        add_sample(self.run, step, text)

    def log_attention(self, png: bytes, step: int) -> None:
        add_attention(self.run, step, png)


class WandbRun(RunLogger):
    """A run of W&B whose step is the optimizer step.

    W&B keeps what it has of a step and cannot be turned back. So what it lacks is first given to it from the run
    directory, and what it has already (a run that was stopped after its last checkpoint makes the same steps again)
    is left out.

    If W&B itself fails, training goes on: the run directory has everything, and `resume` or the next run sends it.
    """

    def __init__(self, experiment: Any, run: Path, console: Console, log_model: bool):
        super().__init__()
        import wandb

        self.wandb, self.experiment, self.run, self.console, self.log_model = wandb, experiment, run, console, log_model
        self.first = experiment.step  # that W&B lacks
        self.samples = wandb.Table(columns=["step", "text"], log_mode="INCREMENTAL")
        self.failed = False
        again = [(moment.pop("step"), self.log_metrics, (moment,)) for moment in read_metrics(run)]
        again += [(step, self.log_sample, (text,)) for step, text in read_samples(run)]
        again += [(step, self.log_attention, (png,)) for step, png in read_attention(run)]
        for step, log, what in sorted(again, key=lambda entry: entry[0]):
            log(*what, step=step)

    def _log(self, what: dict[str, Any], step: int) -> None:
        if step >= self.first and not self.failed:
            try:
                self.experiment.log(what, step=step)
            except Exception as error:  # whatever it is, it must not end the training
                self.failed = True
                self.console.print(f"wandb failed ({_line(error)}); metrics go on in {self.run / METRICS_FILE}")

    def log_metrics(self, metrics: dict[str, float | None], step: int) -> None:
        self._log({name: float("nan") if value is None else value for name, value in metrics.items()}, step)

    def log_sample(self, text: str, step: int) -> None:
        if step >= self.first:
            self.samples.add_data(step, text)
            self._log({"samples": self.samples}, step)

    def log_attention(self, png: bytes, step: int) -> None:
        from io import BytesIO

        from PIL import Image

        self._log({"attention": self.wandb.Image(Image.open(BytesIO(png)))}, step)

    def log_results(self) -> None:
        """The model as an artifact, `latest` and `best`, and the report. Offline they are named, not copied."""
        newest, best, report = (self.run / name for name in (MODEL_FILE, BEST_FILE, REPORT_FILE))
        files = []
        if self.log_model:
            same = not best.exists() or same_weights(newest, best)
            files = [(newest, ["latest", "best"])] if same else [(best, ["best"]), (newest, ["latest"])]
        for path, aliases in files:
            self._artifact("model", path, MODEL_FILE, aliases)
        if report.exists():
            self._artifact("report", report, REPORT_FILE, ["latest"])

    def _artifact(self, kind: str, path: Path, name: str, aliases: list[str]) -> None:
        artifact = self.wandb.Artifact(f"{kind}-{self.experiment.id}", type=kind)
        artifact.add_file(str(path.absolute()), name=name, policy="immutable")  # no copy
        self.experiment.log_artifact(artifact, aliases=aliases)

    def close(self, code: int) -> None:
        try:
            self.experiment.finish(exit_code=code)
        except Exception as error:  # the run itself is saved
            self.console.print(f"wandb could not upload everything ({_line(error)}); {upload_hint(self.run)}")


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
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            mode, why = "offline", f" ({_line(error)})"
    if mode != "online":
        experiment = wandb.init(mode=mode, **settings)
    if mode == "offline":
        # The new file begins with all that was logged before. Uploaded too, the old ones would undo each other.
        for path in before:
            if path.name.startswith("offline-"):
                shutil.rmtree(path)
    lines = {
        "online": f"wandb online: {experiment.url if mode == 'online' else ''}",
        "offline": f"wandb offline{why}; {upload_hint(run)}",
    }
    return WandbRun(experiment, run, console, config.logger.log_model), lines.get(mode, f"wandb {mode}")


def upload_hint(run: Path) -> str:
    return f"upload with: wandb sync {shlex.quote(str(run))}/wandb/*run-*"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
