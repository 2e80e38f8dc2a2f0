"""Where metrics go: a file in the run directory, always, and W&B."""

import os
import shlex
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from lightning.pytorch.loggers import Logger

from minitransformer.checkpoint import METRICS_FILE, add_metrics
from minitransformer.training.config import TrainConfig, WandbConfig


class MetricsFile(Logger):
    """`metrics.jsonl` of the run directory, complete after every line; `checkpoint.read_metrics` reads it."""

    name, version = METRICS_FILE, None

    def __init__(self, run: Path):
        super().__init__()
        self.run = run

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        add_metrics(self.run, step, metrics)

    def log_hyperparams(self, params, *_, **__) -> None:
        """They are in config.yaml."""


def make_loggers(config: TrainConfig, run: Path) -> tuple[list[Logger], str]:
    """The Lightning loggers, and a line that says where metrics go."""
    file = MetricsFile(run)
    if not isinstance(config.logger, WandbConfig):
        return [file], str(run / METRICS_FILE)
    logger, line = make_wandb(config, run)
    return [file, logger], line


def make_wandb(config: TrainConfig, run: Path) -> tuple[Logger, str]:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = config.logger.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    name = run.name if config.name is None or run.name == config.name else f"{config.name}-{run.name}"
    settings = dict(
        name=name,
        id=name,
        resume="allow",
        project=config.logger.project,
        entity=config.logger.entity,
        tags=config.logger.tags,
        dir=run.absolute(),
        config=asdict(config),
        settings=wandb.Settings(silent=True, console="off", init_timeout=30),
    )
    try:
        experiment, why = wandb.init(mode=mode, **settings), ""
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        mode, why = "offline", f" ({str(error).splitlines()[0]})"
        experiment = wandb.init(mode=mode, **settings)
    experiment.define_metric("trainer/global_step")
    experiment.define_metric("*", step_metric="trainer/global_step")
    lines = {
        "online": f"wandb online: {experiment.url if mode == 'online' else ''}",
        "offline": f"wandb offline{why}; upload with: wandb sync {shlex.quote(str(run))}/wandb/offline-run-*",
    }
    return WandbLogger(experiment=experiment), lines.get(mode, f"wandb {mode}")


def close(loggers: list[Logger]) -> None:
    """End the W&B run, also after a failure."""
    for logger in loggers:
        if not isinstance(logger, MetricsFile):
            with suppress(Exception):  # the run itself is saved; its upload may fail
                logger.experiment.finish()
