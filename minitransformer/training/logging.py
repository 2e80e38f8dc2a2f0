"""Where metrics, samples and attention maps go: into the run directory, always, and to W&B.

W&B is fed again from the run directory when a run goes on, so that its steps have neither a gap nor a double.
"""

import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from PIL import Image
from pydantic import ValidationError
from rich.console import Console

from minitransformer.model.checks import choose
from minitransformer.model.config import ModelConfig
from minitransformer.run.directory import (
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
    read_starts,
)
from minitransformer.run.models import same_weights
from minitransformer.training.config import WANDB_MODES, TrainConfig, WandbConfig

LAST_STEP_FILE = "last-step.txt"  # beside W&B's file of a run that ended well
FINISH_SECONDS = 300  # to wait for the last uploads, where WANDB_FINISH_TIMEOUT does not say otherwise


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

    def __init__(self, experiment: Any, run: Path, console: Console, log_model: bool, first: int):
        """first: the first step that W&B lacks."""
        super().__init__()
        import wandb

        self.wandb, self.experiment, self.run, self.console, self.log_model = wandb, experiment, run, console, log_model
        self.first, self.last = first, first - 1  # steps that W&B lacks, and has
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
            self.last = max(self.last, step)
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
        self.thread.join(5)
        if self.thread.is_alive():
            seconds = self.experiment.settings.finish_timeout
            self.console.print(f"waiting for wandb to upload, at most {seconds:g} s")
            self.thread.join(seconds)
        if self.thread.is_alive():
            self.failed = True
            sync = f"wandb sync --include-online {shlex.quote(os.path.relpath(self.experiment.settings.sync_dir))}"
            self.console.print(f"wandb cannot be reached; nothing is lost: upload the rest with: {sync}")
        if self.experiment.offline and not self.failed:
            (Path(self.experiment.settings.sync_dir) / LAST_STEP_FILE).write_text(f"{self.last}\n")


def check_wandb(config: TrainConfig, given: Sequence[str]) -> Any:
    """What W&B will be told (wandb.Settings), or None for a run without W&B. Nothing is written or sent.

    What the user gave for the run wins over what W&B itself finds (environment variables, its settings files), and
    that wins over defaults.

    given: names of the settings that the user gave.

    Raises:
        ValueError: W&B does not take one of its settings or the key, or it is to be online and has no key.
    """
    if not isinstance(config.logger, WandbConfig) or rank_zero_only.rank:
        return None
    asked, usual, mode = config.logger, WandbConfig(), config.logger.mode
    if mode == "auto" and os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        mode = "disabled"  # W&B itself does not read this variable any more
    if mode == "disabled":
        return None
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        found = wandb.setup().settings
        theirs = found.model_fields_set
        defaults = {
            "project": usual.project, "console": "off", "init_timeout": 30, "finish_timeout": FINISH_SECONDS,
        }  # fmt: skip
        chosen = {name: value for name, value in defaults.items() if name not in theirs}
        for name, its_name in {"project": "project", "entity": "entity", "tags": "run_tags"}.items():
            value = getattr(asked, name)
            if f"logger.{name}" in given or value != getattr(usual, name):
                chosen[its_name] = value
        if "name" not in given and "run_name" in theirs:
            chosen["run_name"] = found.run_name
        chosen |= {name: getattr(found, name) for name in ("root_dir", "run_id") if name in theirs}
        if mode == "auto" and "mode" in theirs:
            mode = {"run": "online", "dryrun": "offline"}.get(found.mode, found.mode)
            choose("WANDB_MODE", mode, WANDB_MODES)
        if mode in ("auto", "online"):
            has_key = wandb.login(prompt=False, verify=False)
            if mode == "online" and not has_key:
                raise ValueError("wandb is to be online and has no key; write wandb login, or logger.mode=offline")
            mode = "online" if has_key else "offline"
        settings = wandb.Settings(**chosen, mode=mode, finish_timeout_raises=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"wandb does not take {wrong['loc'][0]}={wrong['input']!r}: {wrong['msg']}") from None
    except wandb.Error as error:
        raise ValueError(f"wandb: {one_line(error)} (logger=none trains without it)") from None
    return None if mode == "disabled" else settings


def make_loggers(
    config: TrainConfig, run: Path, about: dict, settings: Any, console: Console
) -> tuple[list[RunLogger], dict[str, str]]:
    """The loggers, and for starts.jsonl: `logging`, which says where metrics go, and `wandb`, the id of W&B's run.

    about: what W&B is told of the run. settings: from `check_wandb`.
    """
    files = RunFiles(run)
    if settings is None:
        return [files], {"logging": str(run / METRICS_FILE)}
    wandb_run, line = make_wandb(config, run, about, settings, console)
    return [files, wandb_run], {"logging": line, "wandb": wandb_run.experiment.id}


def make_wandb(config: TrainConfig, run: Path, about: dict, settings: Any, console: Console) -> tuple[WandbRun, str]:
    """Start a run of W&B, or go on with the one that this directory has; offline where it cannot be reached."""
    import wandb

    settings = settings.model_copy()
    if settings.run_name is None:
        settings.run_name = run.name if config.name in (None, run.name) else f"{config.name}-{run.name}"
    inside = "root_dir" not in settings.model_fields_set
    if inside:
        settings.root_dir = str(run.absolute())
    known = known_id(run)
    settings.run_id = known or settings.run_id or secrets.token_hex(4)
    folder = Path(settings.wandb_dir)
    pieces = offline_pieces(folder, settings.run_id)
    done = last_step(pieces[-1]) if pieces else None
    goes_on = done is not None and done == last_logged(run)
    first, why = None, ""
    if settings.mode == "online":
        online = set(folder.glob("run-*"))
        try:
            experiment = wandb.init(settings=settings.model_copy(), config=about, resume="allow" if known else None)
            first = experiment.starting_step
        except Exception as error:  # the network has many ways to fail
            why = f" ({one_line(error)})"
            wandb.teardown()  # which remembers the id as one in use
            for path in set(folder.glob("run-*")) - online:
                shutil.rmtree(path)
    if first is None:
        settings.mode, first = "offline", done + 1 if goes_on else 0
        experiment = wandb.init(settings=settings.model_copy(), config=about, resume="allow" if goes_on else None)
    logger = WandbRun(experiment, run, console, config.logger.log_model, first)
    if not experiment.offline or not goes_on:
        for path in pieces:  # all that they hold is given again: uploaded too, they would undo it
            shutil.rmtree(path)
    if not experiment.offline:
        return logger, f"wandb online: {experiment.url}"
    if inside:
        upload = f"{shlex.quote(str(run))}/wandb/offline-run-*"
    else:
        upload = f"{shlex.quote(settings.wandb_dir)}/offline-run-*-{settings.run_id}"
    return logger, f"wandb offline{why}; upload with: wandb sync {upload}"


def known_id(run: Path) -> str | None:
    """The id of the run of W&B that a run directory has; runs of older versions kept it in the name of a file alone."""
    recorded = [start["wandb"] for start in read_starts(run) if "wandb" in start]
    files = sorted((run / "wandb").glob("*run-*/run-*.wandb"), key=lambda file: file.parent.name.split("run-", 1)[1])
    ids = recorded or [file.stem.removeprefix("run-") for file in files]
    return ids[-1] if ids else None


def offline_pieces(folder: Path, run_id: str) -> list[Path]:
    """What W&B wrote offline each time that a run was started or went on, oldest first."""
    return sorted(file.parent for file in folder.glob(f"offline-run-*/run-{run_id}.wandb"))


def last_step(piece: Path) -> int | None:
    """The last step in a piece that ended well; None where the end is missing, as after a kill."""
    file = piece / LAST_STEP_FILE
    return int(file.read_text()) if file.exists() else None


def last_logged(run: Path) -> int:
    """The last step of what lies in the run directory; -1 where nothing does."""
    return max([moment["step"] for moment in read_metrics(run)] + [step for step, _ in read_samples(run)], default=-1)


def resolved(config: TrainConfig, model: ModelConfig, row_length: int) -> dict[str, Any]:
    """The config with the sizes that None stands for, of the model that is built and of the rows that are packed."""
    found = asdict(config)
    for name, value in model.flat().items():
        *group, name = name.split(".")
        (found["model"][group[0]] if group else found["model"])[name] = value
    found["data"]["row_length"] = row_length
    return found


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
