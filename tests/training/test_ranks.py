"""Two ranks train as one does: the same losses, one voice, and either may go on where the other stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minitransformer.run.directory import BEST_FILE, read_samples
from tests.conftest import ROOT, SMALL
from tests.training.test_training import TEXT, metrics, same, weights

TWO = ["trainer.devices=2", "trainer.device=cpu", "trainer.threads=1", "callbacks.sample_every=0"]


def start(*arguments: str, by: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    """`by`: the module that starts train.py, and its arguments."""
    return subprocess.Popen(
        [sys.executable, *by, str(ROOT / "train.py"), *TEXT, *SMALL, *TWO, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
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
    if strategy == "fsdp":  # and the other way round
        finished(start(*settings, "name=one", "resume=auto", "trainer.max_steps=9", "trainer.strategy=fsdp"))
        finished(start(*settings, "name=two", "trainer.devices=1", "resume=auto", "trainer.max_steps=9"))
        same(*(weights(workdir / "runs" / name) for name in ("one", "two")), atol=1e-5, rtol=1e-3)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def slurm(rank: int, ranks: int = 2) -> dict[str, str]:
    """What SLURM tells a task of a job on one machine."""
    job = dict(JOB_ID="4242", JOB_NAME="train", NTASKS=ranks, NTASKS_PER_NODE=ranks, NNODES=1, NODEID=0)
    job |= dict(PROCID=rank, LOCALID=rank, NODELIST="127.0.0.1", JOB_NODELIST="127.0.0.1")
    return {f"SLURM_{name}": str(value) for name, value in job.items()} | {"MASTER_ADDR": "127.0.0.1"}


def test_whoever_starts_the_ranks(workdir):
    """torchrun for one machine and, with fsdp, for two; SLURM: losses of one rank each time, and one voice."""
    torchrun, port = ("-m", "torch.distributed.run", "--nproc-per-node"), free_port()
    finished(start("name=alone", "trainer.devices=1"))
    expected = [value for _, value in metrics(workdir / "runs" / "alone")["val/loss"]]

    def see(name: str, processes: list[subprocess.Popen]) -> None:
        out = "".join([finished(process) for process in processes])
        assert out.count("generate from it") == 1
        found = [value for _, value in metrics(workdir / "runs" / name)["val/loss"]]
        assert found == pytest.approx(expected, rel=1e-4), name

    see("one", [start("name=one", "trainer.strategy=ddp", by=(*torchrun, "2"))])
    see(
        "slurm",
        [start("name=slurm", "trainer=slurm", "trainer.devices=2", **slurm(r), MASTER_PORT=port) for r in (0, 1)],
    )
    settings = ["name=apart", "trainer.strategy=fsdp", "trainer.devices=1", "trainer.nodes=2"]
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank"]
    see("apart", [start(*settings, by=(*torchrun, "1", *nodes, str(node))) for node in (0, 1)])


def test_slurm_asks_a_job_to_stop(workdir):
    """Lightning would save it in runs/, where every later run would find it and go on from there."""
    alone, long = ["trainer=slurm", "trainer.devices=1"], ["trainer.max_steps=100000", "trainer.val_every=100000"]
    process = start(*alone, *long, "name=night", **slurm(0, 1))
    stop_when_it_saves(process, workdir / "runs" / "night" / "checkpoints", signal.SIGUSR1)
    assert sorted(path.name for path in (workdir / "runs").iterdir()) == ["latest", "night"]
    out = finished(start(*alone, "trainer.max_steps=3", "trainer.val_every=3", "name=next", **slurm(0, 1)))
    assert [step for step, _ in metrics(workdir / "runs" / "next")["val/loss"]] == [3], out
    tasks = {name: value for name, value in slurm(0).items() if name != "SLURM_NTASKS_PER_NODE"}
    out = finished(start("trainer=slurm", **tasks), 1)
    assert out == "error: SLURM was given --ntasks=2; give it --ntasks-per-node, and --nodes, instead\n"


def stop_when_it_saves(process: subprocess.Popen, saved: Path, number: int) -> None:
    """Send a signal after the first checkpoint, and see it stop with the state saved."""
    deadline = time.monotonic() + 60
    while not list(saved.glob("*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    out = finished(process, 128 + number)
    assert f"stopped by {signal.Signals(number).name} after step" in out
    assert f"resume=runs/{saved.parent.name}" in out
    assert list(saved.glob("*.ckpt"))


def test_all_ranks_stop_when_one_gets_a_signal(workdir):
    process = start("name=stopped", "trainer.max_steps=100000", "trainer.val_every=100000", "trainer.strategy=ddp")
    stop_when_it_saves(process, workdir / "runs" / "stopped" / "checkpoints", signal.SIGTERM)


def test_more_ranks_than_devices_or_rows_are_refused(command):
    result = command("train", *TEXT, *SMALL, "trainer.devices=3")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "data.batch_size=4 rows of a step do not divide into 3 ranks" in result.err
    if torch.cuda.is_available():
        assert "are more than the" in command("train", *TEXT, *SMALL, "trainer.devices=64", "data.batch_size=64").err
    result = command("train", *TEXT, *SMALL, "trainer.strategy=fsdp", "trainer.devices=2", "callbacks.ema=0.9")
    assert "trainer.strategy=fsdp cannot go with callbacks.ema=0.9" in result.err
