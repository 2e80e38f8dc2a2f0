"""A run that is killed at any instant, again and again, ends with the weights of the run that never was."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

from minitransformer.run.directory import checkpoints
from minitransformer.run.models import read_checkpoint
from tests.conftest import ROOT, SMALL
from tests.training.test_training import TEXT, metrics, same, weights

KILLS = 20

# One process imports everything once; each attempt is a fork of it, so that most of its life is training.
ZYGOTE = """
import os, sys
import lightning, torch, omegaconf, hydra, datasets  # noqa
from minitransformer import cli
import minitransformer.training.run
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = line.split()
        code = 0
        try:
            cli.train()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_run_killed_twenty_times_ends_bit_identical(workdir):
    draw = random.Random(0)
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    small = [s for s in SMALL if not s.startswith(("callbacks.sample", "callbacks.check"))]
    settings = [str(ROOT / "train.py"), *TEXT, *small, "trainer.max_steps=100", "callbacks.sample_every=0"]
    settings += [
        "callbacks.checkpoint_every=1",
        "callbacks.progress=false",
        "trainer.val_every=20",
        "model.dropout=0.1",
    ]

    def attempt(name: str, seconds: float | None) -> int:
        print(*settings, f"name={name}", "resume=auto", file=zygote.stdin, flush=True)
        child = int(zygote.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            with suppress(ProcessLookupError):  # it was done before
                os.kill(child, signal.SIGKILL)
        return int(zygote.stdout.readline())

    runs, steps, kills = [], [], 0
    try:
        assert attempt("whole", None) == 0
        begin = time.monotonic()
        assert attempt("again", None) == 0
        took = time.monotonic() - begin
        while kills < KILLS:
            runs.append(workdir / "runs" / f"killed-{len(runs)}")
            while attempt(runs[-1].name, draw.uniform(0.2, 0.8) * took if kills < KILLS else None):
                kills += 1
                # Whatever lies there is whole.
                there = checkpoints(runs[-1])
                steps.append(read_checkpoint(there[-1])["global_step"] if there else 0)
    finally:
        zygote.kill()
        zygote.wait()
    assert len(set(steps)) > KILLS / 3, steps  # at many moments
    for run in runs:
        same(weights(workdir / "runs" / "whole"), weights(run))
        assert metrics(run) == metrics(workdir / "runs" / "whole")
