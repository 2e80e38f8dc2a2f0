"""Two ranks train as one does: the same losses, one voice, and either may go on where the other stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from minitransformer.checkpoint import BEST_FILE, read_samples
from tests.conftest import ROOT, SMALL
from tests.training.test_training import TEXT, metrics, same, weights

TWO = ["trainer.devices=2", "trainer.device=cpu", "trainer.threads=1", "callbacks.sample_every=0"]


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TEXT, *SMALL, *TWO, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip


def finished(process: subprocess.Popen, code: int = 0) -> str:
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, out
    return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(strategy, workdir):
    """With accumulation, leftover validation rows and a last step that no interval divides."""
    settings = ["data.batch_size=6", "trainer.accumulate=3", "trainer.max_steps=5", "trainer.val_every=2"]
    settings += ["callbacks.sample_every=3", "callbacks.sample_tokens=10"]
    finished(start(*settings, "name=one", "trainer.devices=1"))
    out = finished(start(*settings, "name=two", f"trainer.strategy={strategy}"))
    assert out.count("step 4/5") == 1  # rank 0 alone speaks
    assert len(list((workdir / "runs").iterdir())) == 3  # one, two and latest
    one, two = (metrics(workdir / "runs" / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert [s for s, _ in one[name]] == [s for s, _ in two[name]], name
        assert [v for _, v in two[name]] == pytest.approx([v for _, v in one[name]], rel=1e-4), name
    same(*(weights(workdir / "runs" / name) for name in ("one", "two")), atol=1e-5, rtol=1e-3)
    same(*(load_file(workdir / "runs" / name / BEST_FILE) for name in ("one", "two")), atol=1e-5, rtol=1e-3)
    one, two = (read_samples(workdir / "runs" / name) for name in ("one", "two"))
    assert [step for step, _ in one] == [3, 5]
    assert one == two
    # One rank goes on where two stopped, as it would have from its own checkpoint.
    for name in ("one", "two"):
        finished(start(*settings, f"name={name}", "trainer.devices=1", "resume=auto", "trainer.max_steps=7"))
    same(*(weights(workdir / "runs" / name) for name in ("one", "two")), atol=1e-5, rtol=1e-3)


def test_all_ranks_stop_when_one_gets_a_signal(workdir):
    process = start("name=stopped", "trainer.max_steps=100000", "trainer.val_every=100000", "trainer.strategy=ddp")
    saved = workdir / "runs" / "stopped" / "checkpoints"
    deadline = time.monotonic() + 60
    while not list(saved.glob("*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    out = finished(process, 128 + signal.SIGTERM)
    assert "stopped by SIGTERM after step" in out
    assert "resume=runs/stopped" in out
    assert list(saved.glob("*.ckpt"))


def test_more_ranks_than_devices_or_rows_are_refused(command):
    result = command("train", *TEXT, *SMALL, "trainer.devices=3")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "data.batch_size=4 rows of a step do not divide into 3 ranks" in result.err
    if torch.cuda.is_available():
        assert "are more than the" in command("train", *TEXT, *SMALL, "trainer.devices=64", "data.batch_size=64").err
    result = command("train", *TEXT, *SMALL, "trainer.strategy=fsdp", "callbacks.ema=0.9")
    assert "trainer.strategy=fsdp cannot go with callbacks.ema=0.9" in result.err
