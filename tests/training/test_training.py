"""Exactness: accumulation and checkpointing change nothing, a resumed run is the run that never stopped."""

import json
import math
import os
import re
import shlex
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
import wandb
from omegaconf import OmegaConf
from safetensors.torch import load_file

from minitransformer.model.cost import flops_per_token
from minitransformer.model.transformer import Transformer
from minitransformer.run.directory import checkpoints, read_attention, read_metrics, read_samples, read_starts
from minitransformer.run.models import load, read_checkpoint
from minitransformer.training import callbacks
from minitransformer.training.module import LanguageModel
from minitransformer.training.optimizers import Muon
from tests.conftest import SMALL, sentences

TEXT = ["data=text", "data.files=[book.txt]", "tokenizer.vocab_size=300"]


def weights(run):
    return load_file(run / "model.safetensors")


def metrics(run) -> dict[str, list[tuple[int, float]]]:
    """Every metric of a run as (step, value), leaving out those that measure time."""
    found: dict[str, list[tuple[int, float]]] = {}
    for moment in read_metrics(run):
        step = moment.pop("step")
        for name, value in moment.items():
            if name != "time" and not name.startswith("speed/"):
                found.setdefault(name, []).append((step, math.nan if value is None else value))
    return found


@pytest.fixture
def train(command, workdir):
    def run(name, *overrides):
        text = [s for s in TEXT if "data=hub" not in overrides or not s.startswith("data")]
        result = command("train", *text, *SMALL, f"name={name}", *overrides)
        assert result.code == 0, result.err
        return workdir / "runs" / name

    return run


def same(a: dict, b: dict, **tolerance) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("overrides", [
    ["trainer.accumulate=2"], ["trainer.accumulate=3"], ["trainer.accumulate=4"],
    ["trainer.gradient_checkpointing=full"], ["trainer.gradient_checkpointing=selective"],
    ["trainer.gradient_checkpointing=full", "trainer.checkpoint_blocks=2", "trainer.accumulate=2"],
    ["model.attention.kernel=reference"], ["data.workers=2"],
], ids=str)  # fmt: skip
def test_micro_batches_checkpointing_and_kernels_do_not_change_the_result(train, overrides):
    plain, other = train("plain", "optimizer=adamw"), train("other", "optimizer=adamw", *overrides)
    same(weights(plain), weights(other), atol=2e-4, rtol=1e-3)
    for name, values in metrics(plain).items():
        assert metrics(other)[name] == [(step, pytest.approx(value, rel=1e-3)) for step, value in values], name


STREAM = ["data=hub", "data.name=set", "data.streaming=true", "data.buffer=20"]


@pytest.mark.parametrize("settings", [
    ["optimizer=adamw"], ["optimizer=muon", "data.workers=2"], ["data.packing=concat", "data.batch_size=200"],
    ["data.packing=sequential", "data.documents=line"], STREAM, [*STREAM, "data.workers=1"],
], ids=" ".join)  # fmt: skip
def test_a_resumed_run_is_bit_identical(train, workdir, settings):
    """Dropout, order of rows, optimizer state, logged losses; stopped in the middle and at a validation step."""
    (workdir / "set").mkdir()
    lines = [json.dumps({"text": sentences(3, seed=i)}) for i in range(60)]
    (workdir / "set" / "train.jsonl").write_text("\n".join(lines))
    settings = [*settings, "model.dropout=0.1", "trainer.max_steps=8", "callbacks.keep_checkpoints=9"]
    whole = train("whole", *settings)
    for step in (2, 4, 6):
        stopped = train(f"stopped{step}", *settings)
        for path in checkpoints(stopped):
            if path.name > f"step-{step:08d}.ckpt":
                path.unlink()
        train(f"stopped{step}", *settings, "resume=auto")
        same(weights(whole), weights(stopped))
        assert metrics(stopped) == metrics(whole)
        assert (stopped / "samples.txt").read_bytes() == (whole / "samples.txt").read_bytes()
        one, other = (read_checkpoint(checkpoints(run)[-1]) for run in (whole, stopped))
        for a, b in zip(
            one["optimizer_states"][0]["state"].values(), other["optimizer_states"][0]["state"].values(), strict=True
        ):
            same(a, b)


def test_a_run_can_be_extended_and_says_when_it_is_done(train, command, workdir):
    run = train("mine", "schedule.decay_fraction=0", "trainer.max_steps=4")
    longer = train("longer", "schedule.decay_fraction=0", "trainer.max_steps=8")
    done = command(
        "train", *TEXT, *SMALL, "name=mine", "resume=auto", "schedule.decay_fraction=0", "trainer.max_steps=4"
    )
    assert done.code == 0
    assert "already trained: 4 of trainer.max_steps=4" in done.out
    train("mine", "resume=auto", "schedule.decay_fraction=0", "trainer.max_steps=8")
    same(weights(run), weights(longer))


def lowest_at(monkeypatch, **factors: float) -> None:
    """Let validation after these steps find so much of its loss."""
    loss_sums = LanguageModel.loss_sums

    def scaled(self, *arguments):
        objective, nats = loss_sums(self, *arguments)
        return objective, nats if self.trainer.training else nats * factors[f"step{self.global_step}"]

    monkeypatch.setattr(LanguageModel, "loss_sums", scaled)


def test_an_extended_run_is_the_longer_one_and_keeps_what_its_first_end_found(train, monkeypatch):
    """Neither end is a step at which anything is due; the loss after the first is the lowest."""
    lowest_at(monkeypatch, step3=1.0, step4=0.1, step6=0.5, step8=0.6)
    settings = ["schedule=constant", "trainer.log_every=3", "trainer.val_every=3", "callbacks.sample_every=3"]
    longer = train("longer", *settings, "trainer.max_steps=8")
    run = train("mine", *settings, "trainer.max_steps=4")
    best, first = (run / "best.safetensors").read_bytes(), metrics(run)
    train("mine", *settings, "trainer.max_steps=8", "resume=auto")
    found = metrics(run)
    assert [step for step, _ in found["val/loss"]] == [3, 4, 6, 8]
    assert [step for step, _ in found["train/loss"]] == [3, 4, 6, 8]
    for name, values in metrics(longer).items():
        assert [value for value in found[name] if value[0] != 4] == values, name
        assert [value for value in found[name] if value[0] <= 4] == first[name], name
    assert (run / "best.safetensors").read_bytes() == best
    samples = read_samples(run)
    assert [step for step, _ in samples] == [3, 4, 6, 8]
    assert [sample for sample in samples if sample[0] != 4] == read_samples(longer)


@pytest.mark.parametrize("name", ["model.safetensors", "best.safetensors"])
@pytest.mark.parametrize("every", [3, 4])
def test_a_kill_before_a_model_is_written(train, monkeypatch, every, name):
    """At the last time that it is; every=3: in the last step's validation, every=4: in one after the last save."""
    lowest_at(monkeypatch, step3=1.0, step4=1.0, step6=0.5)
    whole = train("whole", f"trainer.val_every={every}")
    run, save, times = whole.with_name("mine"), callbacks.save_model, []

    def killed(path, *arguments):
        times.extend([path] if path.name == name else [])
        if path.name == name and len(times) == (3 if name == "model.safetensors" else 2):
            raise RuntimeError("stopped here")
        save(path, *arguments)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped here"):
        patch.setattr(callbacks, "save_model", killed)
        train("mine", f"trainer.val_every={every}", "callbacks.checkpoint_every=2")
    train("mine", f"trainer.val_every={every}", "resume=auto")
    for found in ("model.safetensors", "best.safetensors"):
        same(load_file(run / found), load_file(whole / found))
    assert metrics(run) == metrics(whole)


@pytest.mark.parametrize("settings", [[], ["callbacks.ema=0.5", "optimizer=adamw"]], ids=["plain", "average"])
def test_a_run_that_was_stopped_before_its_last_validation_makes_it_up(train, command, monkeypatch, settings):
    settings = [*settings, "trainer.val_every=4"]
    whole = train("whole", *settings)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped here"):
        patch.setattr(pl.Trainer, "validate", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("stopped here")))
        train("mine", *settings)
    run = whole.with_name("mine")
    assert [step for step, _ in metrics(run)["val/loss"]] == [4]
    resume = [*TEXT, *SMALL, *settings, "name=mine", "resume=auto"]
    result = command("train", *resume)
    assert result.code == 0, result.err
    for words in ("resuming runs/mine after step 6", "step 6  validation loss", "peak memory", "generate from it"):
        assert words in result.out
    assert metrics(run) == metrics(whole)
    assert read_samples(run) == read_samples(whole)
    for name in ("best.safetensors", "model.safetensors"):
        same(load_file(run / name), load_file(whole / name))
    assert "runs/mine is already trained: 6 of trainer.max_steps=6 steps" in command("train", *resume).out
    assert metrics(run) == metrics(whole)
    for name in ("whole", "mine"):
        train(name, *settings, "trainer.max_steps=8", "resume=auto")
    same(weights(run), weights(whole))
    assert metrics(run) == metrics(whole)


def test_a_run_that_was_stopped_early_can_be_ended_there(train, command):
    settings = ["schedule=constant", "callbacks.keep_checkpoints=9"]
    short, run = train("short", *settings, "trainer.max_steps=4"), train("mine", *settings, "trainer.max_steps=6")
    for path in checkpoints(run)[2:]:
        path.unlink()
    result = command("train", *TEXT, *SMALL, *settings, "name=mine", "resume=auto", "trainer.max_steps=4")
    assert result.code == 0, result.err
    assert metrics(run) == metrics(short)
    assert read_samples(run) == read_samples(short)
    for name in ("best.safetensors", "model.safetensors"):
        same(load_file(run / name), load_file(short / name))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_given_on_resume_hold_and_are_those_logged(train, optimizer):
    run = train("mine", f"optimizer={optimizer}", "trainer.max_steps=2")
    before = weights(run)
    rates = ["optimizer.lr=1e-30"]
    rates += ["optimizer.adamw_lr=1e-30", "optimizer.embedding_lr=1e-30"] if optimizer == "muon" else []
    train("mine", f"optimizer={optimizer}", *rates, "resume=auto")
    same(before, weights(run))
    found = [value for name, values in metrics(run).items() for step, value in values
             if name.startswith("optim/lr/") and step > 2]  # fmt: skip
    assert found
    assert max(found) <= 1e-30


def test_another_optimizer_is_refused_on_resume(train, command):
    run = train("mine", "optimizer=adamw", "trainer.max_steps=2")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = command("train", *TEXT, *SMALL, "name=mine", "resume=auto", "optimizer=muon")
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert "cannot resume runs/mine: it was trained with optimizer=adamw, not muon" in result.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_resumed_window_has_the_time_of_all_its_steps(train, monkeypatch):
    """Stopped in the middle of a window, by a clock on which a step takes a second and all else nothing."""
    loss_sums, now = LanguageModel.loss_sums, [0.0]

    def second(self, *arguments):
        now[0] += self.trainer.training
        return loss_sums(self, *arguments)

    monkeypatch.setattr(LanguageModel, "loss_sums", second)
    monkeypatch.setattr("minitransformer.training.module.time.perf_counter", lambda: now[0])
    settings = ["trainer.log_every=6", "callbacks.keep_checkpoints=9", "callbacks.sample_every=0"]
    run = train("mine", *settings)
    for path in checkpoints(run)[1:]:
        path.unlink()
    train("mine", *settings, "resume=auto")
    assert [m["speed/step_ms"] for m in read_metrics(run) if "speed/step_ms" in m] == [1000.0]


def test_resume_finds_its_run(train, command, workdir):
    first = train("first", "trainer.max_steps=2")
    result = command("train", *TEXT, *SMALL, "trainer.max_steps=4", "resume=auto")  # the newest run
    assert "resuming runs/first after step 2" in result.out
    result = command("train", *TEXT, *SMALL, "trainer.max_steps=6", f"resume={first}")
    assert f"resuming {first} after step 4" in result.out
    result = command("train", *TEXT, *SMALL, "name=fresh", "resume=auto", "trainer.max_steps=2")
    assert result.code == 0
    assert (workdir / "runs" / "fresh" / "model.safetensors").exists()


def test_a_truncated_checkpoint_falls_back_to_the_one_before(train, command, workdir):
    run = train("mine")
    newest = checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1000])
    result = command("train", *TEXT, *SMALL, "name=mine", "resume=auto", "trainer.max_steps=8")
    assert result.code == 0
    assert f"runs/mine/checkpoints/{newest.name} cannot be read" in result.out
    assert "trying the one before it" in result.out
    assert "resuming runs/mine after step 4" in result.out
    for path in checkpoints(run):
        path.write_bytes(b"nothing")
    result = command("train", *TEXT, *SMALL, "name=mine", "resume=auto", "trainer.max_steps=9")
    assert result.code == 1
    assert "no checkpoint that can be read" in result.err


def contents(folder) -> dict[str, bytes | str]:
    """Everything in a folder, whatever its name: what each file holds, where each link points."""
    paths = sorted(folder.rglob("*"))
    return {str(p): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "" for p in paths}


def refused(command, workdir, *overrides) -> str:
    """The line with which going on is refused, after a check that it has touched nothing."""
    given = {override.split("=")[0] for override in overrides}  # settings, or groups of them
    before = contents(workdir)
    settings = [s for s in (*TEXT, *SMALL) if s.split("=")[0] not in given and s.split(".")[0] not in given]
    result = command("train", *settings, *overrides)
    assert result.code == 1, result.out
    assert len(result.err.splitlines()) == 1, result.err
    assert contents(workdir) == before
    return result.err


def test_resuming_something_else_is_refused_and_touches_nothing(train, command, workdir, monkeypatch):
    """From a checkpoint that has later ones, and logs, samples and pictures, behind it."""
    train("mine", "callbacks.keep_checkpoints=9")
    train("newest", "trainer.max_steps=2")  # runs/latest
    resume = "resume=runs/mine/checkpoints/step-00000002.ckpt"
    (workdir / "other.txt").write_text(sentences(400, seed=1), encoding="utf-8")
    cases = {
        "model.d_model=64": "model.d_model=32, not 64",
        "model.attention.qk_norm=false": "model.attention",
        "tokenizer.vocab_size=280": "model.vocab_size",
        "data.files=[other.txt]": "another tokenizer or other text",
        "seed=1": "seed=0, this run has 1",
        "data.batch_size=2": "batch_size=4, this run has 2",
        "data.packing=pad": "packing=best_fit, this run has pad",
        "data.row_length=16": "row",
        "tokenizer=char": "model.vocab_size",
        "optimizer=adamw": "optimizer=muon, not adamw",
        "init_from=nowhere": "init_from=nowhere does not exist",
        "callbacks.sample_prompt=" + 40 * "long ": "callbacks.sample_prompt",
    }
    for override, words in cases.items():
        assert words in refused(command, workdir, resume, override), override
    wandb.teardown()  # which reads its environment once in a process
    monkeypatch.setenv("WANDB_MODE", "nowhere")
    assert "nowhere" in refused(command, workdir, resume, "logger=wandb")


def test_a_damaged_run_is_not_gone_on_with(train, command, workdir):
    run = train("mine", "callbacks.keep_checkpoints=9")
    for name, text in (
        ("metrics.jsonl", '{"step": 1\n'), ("metrics.jsonl", '{"step": "1"}\n'), ("starts.jsonl", "no object\n"),
        ("config.yaml", "a: ["), ("config.yaml", "- a list"),
    ):  # fmt: skip
        whole = (run / name).read_text()
        (run / name).write_text(text if name == "config.yaml" else text + whole)
        words = refused(command, workdir, "resume=runs/mine/checkpoints/step-00000002.ckpt")
        assert f"runs/mine/{name}" in words
        (run / name).write_text(whole)


def test_only_a_checkpoint_in_its_place_is_resumed(train, command, workdir):
    """A copy would make the folder above it the run directory, and the user's own files there its logs."""
    run = train("mine")
    for name in ("metrics.jsonl", "samples.txt"):
        (workdir / name).write_text("my own\n")
    for place in ("step-00000002.ckpt", "backup/step-00000002.ckpt", "own/checkpoints/step-00000002.ckpt"):
        (workdir / place).parent.mkdir(parents=True, exist_ok=True)
        (workdir / place).write_bytes(checkpoints(run)[0].read_bytes())
        line = refused(command, workdir, f"resume={place}")
        assert f"resume={place} is not RUN/checkpoints/step-*.ckpt beside a RUN/config.yaml" in line
        assert f"init_from={place} starts another" in line
    aside = checkpoints(run)[-1].with_name("step-00000002.ckpt.later")
    aside.write_bytes(b"")
    for other in (aside, run / "model.safetensors"):
        assert "is not RUN/checkpoints/step-*.ckpt" in refused(command, workdir, f"resume={other}")
    (workdir / "runs" / "notes").mkdir()
    (workdir / "runs" / "notes" / "metrics.jsonl").write_text("my own\n")
    for settings in (["resume=."], ["resume=own"], ["resume=runs/notes"], ["name=notes", "resume=auto"]):
        assert "is not a run directory: it has no config.yaml" in refused(command, workdir, *settings)
    assert "a file, not a run directory" in refused(command, workdir, "runs_dir=.", "name=book.txt", "resume=auto")
    assert "nowhere is neither a run directory" in refused(command, workdir, "resume=nowhere")
    # What the line advises works.
    result = command("train", *TEXT[:-1], *SMALL, "name=from", "init_from=backup/step-00000002.ckpt")
    assert result.code == 0, result.err


@pytest.mark.parametrize(("name", "words"), [
    ("latest", "link to the newest run"), ("latest/x", "link to the newest run"), ("Latest", "link to the newest run"),
    ("../x", "no name inside runs_dir"), ("a/../../x", "no name inside runs_dir"), ("/x", "no name inside runs_dir"),
    (".", "no name inside runs_dir"), ("", "no name inside runs_dir"), ("a" * 300, "longer than 200 bytes"),
])  # fmt: skip
def test_a_name_stays_in_runs_dir(command, workdir, name, words):
    assert words in refused(command, workdir, f"name={name}")


def test_a_runs_dir_that_cannot_be_is_said_before_work(command, workdir):
    assert "book.txt is a file; choose another runs_dir" in refused(command, workdir, "runs_dir=book.txt")
    assert "book.txt is a file; choose another runs_dir" in refused(command, workdir, "runs_dir=book.txt/runs")


def test_a_name_that_is_taken_is_said_with_the_command_that_resumes(train, command, workdir):
    train("mine", "trainer.max_steps=2")
    result = command("train", *TEXT, *SMALL, "name=mine", "trainer.max_steps=4")
    line = next(line for line in result.out.splitlines() if "is there already" in line)
    assert line.startswith("runs/mine is there already, so this is runs/mine-2; to go on with that: python ")
    result = command("train", *shlex.split(line.partition("train.py ")[2]))
    assert "resuming runs/mine after step 2" in result.out
    assert "is there already" not in command("train", *TEXT, *SMALL, "name=other").out


def test_a_checkpoint_is_read_once(train, monkeypatch):
    run = train("mine", "trainer.max_steps=2")
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **settings: read.append(str(path)) or load(path, **settings))
    train("mine", "resume=auto")
    assert [path for path in read if path.endswith(".ckpt")] == ["runs/mine/checkpoints/step-00000002.ckpt"]
    assert checkpoints(run)[-1].name == "step-00000006.ckpt"


def test_going_on_with_other_settings_is_said_and_kept(train, command, workdir):
    """config.yaml holds those of now, starts.jsonl what they were, and a jump of the learning rate is named."""
    cosine = ["schedule=cosine", "trainer.log_every=1"]
    run = train("mine", *cosine, "trainer.max_steps=4")
    first = OmegaConf.load(run / "config.yaml")
    more = [*cosine, "trainer.max_steps=12", "trainer.gradient_clip=0.5", "trainer.val_every=6"]
    result = command("train", *TEXT, *SMALL, *more, "resume=runs/mine")
    assert result.code == 0, result.err
    changed = ["trainer.max_steps=12 (was 4)", "trainer.gradient_clip=0.5 (was 1.0)", "trainer.val_every=6 (was 3)"]
    assert f"with other settings: {', '.join(changed)}" in result.out
    factors = dict(metrics(run)["optim/lr_factor"])
    assert (
        f"the learning rate was {factors[4]:.3g} of its peak in step 4; it goes on with {factors[5]:.3g}" in result.out
    )
    assert read_starts(run)[-1]["changed"] == {
        "trainer.max_steps": [4, 12], "trainer.gradient_clip": [1.0, 0.5], "trainer.val_every": [3, 6]
    }  # fmt: skip
    now = OmegaConf.load(run / "config.yaml")
    assert (now.trainer.max_steps, now.trainer.gradient_clip, now.name, now.resume) == (12, 0.5, "mine", None)
    first.trainer.update({"max_steps": 12, "gradient_clip": 0.5, "val_every": 6})
    assert now == first
    again = command("train", *TEXT, *SMALL, *more, "resume=runs/mine", "trainer.max_steps=14")
    assert "with other settings: trainer.max_steps=14 (was 12)\n" in again.out


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(command, workdir, signum, code):
    settings = [*TEXT, *SMALL, "name=mine", "trainer.max_steps=100000", "callbacks.checkpoint_every=0"]

    def stop_in_the_middle():
        for _ in range(600):  # a minute at most, until the first sample shows that training is under way
            if (workdir / "runs" / "mine" / "samples.txt").exists():
                break
            time.sleep(0.1)
        signal.raise_signal(signum)

    threading.Thread(target=stop_in_the_middle).start()
    before = signal.getsignal(signum)
    result = command("train", *settings)
    assert result.code == code
    assert signal.getsignal(signum) == before
    step = int(re.search(r"stopped by \w+ after step (\d+)", result.out)[1])
    run = workdir / "runs" / "mine"
    assert read_checkpoint(checkpoints(run)[0])["global_step"] == step
    resume = re.search(r"go on with: python \S*train\.py (.*)", result.out)[1]
    assert resume.endswith(" resume=runs/mine")
    assert "name=mine" not in resume
    arguments = shlex.split(resume.replace("max_steps=100000", f"max_steps={step + 2}"))
    result = command("train", *arguments)
    assert f"resuming runs/mine after step {step}" in result.out
    assert read_checkpoint(checkpoints(run)[-1])["global_step"] == step + 2


@pytest.mark.parametrize(("room", "name"), [(0, "config.yaml"), (1, "model.safetensors")])
def test_a_full_disk_is_named_and_leaves_what_was_there(train, command, workdir, monkeypatch, room, name):
    import errno

    synced = []

    run = train("mine", "trainer.max_steps=2")
    before = sorted(p.name for p in run.rglob("*") if p.is_file())
    model = (run / "model.safetensors").read_bytes()

    def full(fd):
        synced.append(fd)
        if len(synced) > room:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    small = [*SMALL, "callbacks.sample_every=0", "trainer.val_every=6"]
    result = command("train", *TEXT, *small, "name=mine", "resume=auto")
    assert result.code == 1
    assert f"no space left on the disk for runs/mine/{name}" in result.err
    assert len(result.err.splitlines()) == 1
    assert sorted(p.name for p in run.rglob("*") if p.is_file()) == before
    assert (run / "model.safetensors").read_bytes() == model


def test_a_run_directory_explains_itself(trained, command):
    assert sorted(p.name for p in trained.iterdir()) == [
        "attention", "best.safetensors", "checkpoints", "config.yaml", "held_out.json", "metrics.jsonl",
        "model.safetensors", "samples.txt", "starts.jsonl", "tokenizer.json",
    ]  # fmt: skip
    assert [p.name for p in checkpoints(trained)] == ["step-00000002.ckpt", "step-00000004.ckpt", "step-00000006.ckpt"]
    assert (trained.parent / "latest").resolve() == trained
    config = OmegaConf.load(trained / "config.yaml")
    assert config.model.d_model == 32
    assert config.data.files == ["book.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in trained.rglob("*") if path.is_file()} == {0o666 & ~umask}
    text = (trained / "samples.txt").read_text(encoding="utf-8")
    assert re.findall(r"--- step (\d+) ---", text) == ["3", "6"]
    saved = torch.load(checkpoints(trained)[-1], weights_only=True)
    assert json.loads(saved["minitransformer"]["model"])["vocab_size"] == 300


def test_a_step_counts_every_target_once(train, workdir):
    """Tokens logged are those of the rows; validation runs at its steps and at the end."""
    run = train("mine", "trainer.max_steps=7", "trainer.val_every=3")
    found = metrics(run)
    assert [step for step, _ in found["val/loss"]] == [3, 6, 7]
    assert [step for step, _ in found["train/loss"]] == [2, 4, 6, 7]
    assert found["tokens"][-1][1] <= 7 * 4 * 32
    assert found["tokens"][-1][1] > 0.9 * 7 * 4 * 32


@pytest.mark.parametrize("precision", ["auto", "32", "bf16-mixed", "bf16-true"])
def test_precisions_train_and_say_what_is_used(command, precision):
    result = command("train", *TEXT, *SMALL, f"trainer.precision={precision}", "trainer.device=cpu")
    assert result.code == 0, result.err
    used = "32-true" if precision in ("auto", "32") else precision
    assert f"device    cpu (2 threads), precision {used}" in result.out.replace(
        f"{torch.get_num_threads()} threads", "2 threads"
    )


def test_a_batch_larger_than_the_data_trains(train):
    run = train("mine", "data.batch_size=1000", "trainer.max_steps=2")
    assert [step for step, _ in metrics(run)["train/loss"]] == [2]


def test_validation_loss_is_that_of_the_documents(train, workdir):
    """Logged bits per byte, from the saved model and the text of the held-out tail alone."""
    import math

    from minitransformer import load

    run = train("mine", "model.max_seq_len=64")
    model, tokenizer = load(run)
    text = (workdir / "book.txt").read_text(encoding="utf-8")
    tail = text[int(len(text) * 0.9) :]
    ids = tokenizer.encode(tail)
    stream = [tokenizer.eos_id, *ids, tokenizer.eos_id]
    nats = 0.0
    for start in range(0, len(stream) - 1, 64):
        piece = torch.tensor(stream[start : start + 65])
        log_p = model(piece[None, :-1]).log_softmax(-1)[0]
        nats -= log_p.gather(-1, piece[1:, None]).sum().item()
    expected = nats / math.log(2) / len(tail.encode())
    assert metrics(run)["val/bits_per_byte"][-1][1] == pytest.approx(expected, rel=1e-4)
    assert metrics(run)["val/loss"][-1][1] == pytest.approx(nats / (len(stream) - 1), rel=1e-4)


def test_no_loss_is_taken_on_prefixes(command, workdir):
    """Questions are noise and answers are all the same: the loss falls to nothing only if questions do not count."""
    rows = [{"question": f"{hash((i, 'q'))} {hash((i, 'r'))}", "text": " yes"} for i in range(200)]
    (workdir / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = command(
        "train", "data=jsonl", "data.files=[qa.jsonl]", "data.prefix_field=question", "tokenizer=byte", "name=qa",
        *SMALL, "model.max_seq_len=64", "trainer.max_steps=60", "callbacks.sample_every=0",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert float(re.findall(r"validation loss ([\d.]+)", result.out)[-1]) < 0.2
    assert "prefixes" not in result.out
    rows = [{"question": f"{i} " * 30, "text": " yes"} for i in range(40)]
    (workdir / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["data=jsonl", "data.files=[qa.jsonl]", "data.prefix_field=question", "tokenizer=byte", "name=long", *SMALL]
    result = command("train", *words)
    (told,) = re.findall(r"; (\d+) of (\d+) prefixes are longer than a row with their text", result.out)
    assert told[0] == told[1] != "0"


def not_finite_at(monkeypatch, steps: list[int], what: str = "both") -> None:
    """Let the loss, its gradient, or both be infinite in these steps."""
    loss_sums = LanguageModel.loss_sums

    def broken(self, *arguments):
        objective, nats = loss_sums(self, *arguments)
        if not self.trainer.training or self.global_step not in steps:
            return objective, nats
        if what == "loss":
            return objective + math.inf, nats + math.inf
        if what == "gradient":
            objective.register_hook(lambda grad: grad * math.inf)
            return objective, nats
        return objective * math.inf, nats * math.nan

    monkeypatch.setattr(LanguageModel, "loss_sums", broken)


@pytest.mark.parametrize("what", ["loss", "gradient", "both"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing_and_moves_no_schedule(train, monkeypatch, optimizer, what):
    """The weights are those of a run whose bad step never was: its data left out, its rates one step later."""
    settings = [f"optimizer={optimizer}", "trainer.log_every=1", "schedule=linear", "schedule.warmup_steps=3"]
    not_finite_at(monkeypatch, [2], what)
    run = train("bad", *settings)
    found = metrics(run)
    assert [count for _, count in found["optim/skipped_steps"]] == [0, 0, 1, 1, 1, 1]
    finite = {name for name, values in found.items() if all(math.isfinite(v) for _, v in values)}
    assert all(name.startswith(("optim/grad_norm", "train/loss")) for name in found.keys() - finite)
    losses = [loss for _, loss in found["train/loss"]]
    assert [math.isnan(loss) for loss in losses] == [False, False, True, False, False, False]  # there is none of it
    assert min(losses[:2] + losses[3:]) > 1
    factors = [1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3]  # the third step is taken back and its rate used again
    assert [f for _, f in found["optim/lr_factor"]] == pytest.approx(factors)
    resumed = train("bad2", *settings, "trainer.max_steps=5")
    assert read_checkpoint(checkpoints(resumed)[-1])["counts"]["skipped"] == 1
    train("bad2", *settings, "resume=auto")
    assert metrics(resumed)["optim/skipped_steps"][-1] == (6, 1.0)


def test_a_run_that_diverges_stops_with_its_state_and_names_the_last_good_one(command, workdir, monkeypatch):
    steps = list(range(3, 100))
    not_finite_at(monkeypatch, steps)
    small = [*SMALL, "trainer.max_steps=50", "trainer.max_skipped=4", "callbacks.keep_checkpoints=9"]
    result = command("train", *TEXT, *small, "name=mine")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    assert "not finite in the last 4 steps" in result.err
    assert "runs/mine/checkpoints/step-00000007.ckpt" in result.err
    assert "the last checkpoint before that is runs/mine/checkpoints/step-00000002.ckpt" in result.err
    saved = read_checkpoint(workdir / "runs/mine/checkpoints/step-00000007.ckpt")
    assert all(w.isfinite().all() for w in saved["state_dict"].values())
    # From there it has all its attempts again, and with what has made it better it goes on.
    again = command("train", *TEXT, *small, "name=mine", "resume=auto")
    assert "the state after step 11 is in" in again.err
    steps.clear()
    result = command("train", *TEXT, *small, "name=mine", "resume=auto", "trainer.max_steps=13")
    assert result.code == 0, result.err


@pytest.mark.parametrize("every", [3, 4])  # the last validation is a step's, or comes after all steps
def test_a_run_that_ends_badly_is_no_success(command, workdir, monkeypatch, every):
    small = [*TEXT, *SMALL, f"trainer.val_every={every}"]
    with monkeypatch.context() as patch:
        not_finite_at(patch, [5])
        result = command("train", *small, "name=step")
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert "not finite in the last 1 steps" in result.err
    with monkeypatch.context() as patch:
        lowest_at(patch, **{f"step{step}": math.nan if step == 6 else 1.0 for step in (3, 4, 6)})
        result = command("train", *small, "name=validation")
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert "the validation loss is nan" in result.err
    for name in ("step", "validation"):
        assert read_checkpoint(workdir / f"runs/{name}/checkpoints/step-00000006.ckpt")["global_step"] == 6


def test_autocast_is_for_the_forward_pass_alone(train, monkeypatch):
    """Under it the fp32 products of linear attention's backward pass and of Newton-Schulz would run in bf16."""
    seen: dict[str, set[bool]] = {"forward": set(), "backward": set(), "step": set()}

    def see(where):
        seen[where].add(torch.is_autocast_enabled("cpu"))

    def loss_sums(self, *arguments, real=LanguageModel.loss_sums):
        objective, nats = real(self, *arguments)
        see("forward")
        if objective.requires_grad:
            objective.register_hook(lambda _: see("backward"))
        return objective, nats

    monkeypatch.setattr(LanguageModel, "loss_sums", loss_sums)
    step = Muon.step
    monkeypatch.setattr(Muon, "step", lambda self, closure=None: step(self, lambda: (closure(), see("step"))[0]))
    train("mine", "trainer.precision=bf16-mixed", "optimizer=muon", "trainer.max_steps=1", "callbacks.sample_every=0")
    assert seen == {"forward": {True}, "backward": {False}, "step": {False}}


def test_validation_reads_as_many_rows_at_once_as_training(train, monkeypatch):
    whole, rows = train("whole", "trainer.max_steps=3"), {True: [], False: []}
    hidden_states = Transformer.hidden_states

    def see(self, tokens, *arguments, **keywords):
        rows[self.training].append(len(tokens))
        return hidden_states(self, tokens, *arguments, **keywords)

    monkeypatch.setattr(Transformer, "hidden_states", see)
    parts = train("parts", "trainer.max_steps=3", "trainer.accumulate=3", "callbacks.sample_every=0")
    assert max(rows[True]) == max(rows[False]) == 2
    for a, b in zip(metrics(whole)["val/loss"], metrics(parts)["val/loss"], strict=True):
        assert a == (b[0], pytest.approx(b[1], rel=1e-4))


def test_mfu_is_of_the_rows_that_are_trained_on(train, monkeypatch):
    monkeypatch.setattr(LanguageModel, "peak_flops", lambda self: 1e9)
    run = train("mine", "data.row_length=16", "trainer.max_steps=2")
    moment = next(moment for moment in read_metrics(run) if "speed/mfu" in moment)
    operations = flops_per_token(load(run)[0].config, 16, training=True)
    assert moment["speed/mfu"] == pytest.approx(operations * moment["speed/tokens_per_s"] / 1e9)


def test_a_time_limit_saves_and_says_how_to_go_on(command, workdir, monkeypatch):
    small = [*SMALL, "trainer.max_steps=100000", "trainer.max_time=00:00:01", "callbacks.sample_every=0"]
    result = command("train", *TEXT, *small, "trainer.val_every=100000", "name=mine")
    assert result.code == 0, result.err
    step = int(re.search(r"stopped by trainer\.max_time after step (\d+)", result.out)[1])
    assert read_checkpoint(checkpoints(workdir / "runs/mine")[-1])["global_step"] == step
    assert "trainer.max_time=00:00:01 name" not in result.out  # a resumed run has another hour
    assert "resume=runs/mine" in result.out


@pytest.mark.parametrize("why", ["signal", "divergence"])
def test_the_report_of_a_run_that_was_stopped_comes_after_all_that_matters(command, workdir, monkeypatch, why):
    """Whoever sent the signal may not wait for it: state, last lines and loggers first."""
    order = []
    monkeypatch.setattr("minitransformer.report.page.write", lambda runs, defaults: order.append("report"))
    monkeypatch.setattr("minitransformer.training.logging.RunFiles.close", lambda self, code: order.append("closed"))
    if why == "divergence":
        not_finite_at(monkeypatch, range(100))
    else:
        monkeypatch.setattr(callbacks.Sampler, "show", lambda *_: signal.raise_signal(signal.SIGTERM))
    small = [setting for setting in SMALL if setting != "callbacks.report=false"]
    result = command("train", *TEXT, *small, "name=mine", "trainer.max_skipped=2")
    assert result.code == (1 if why == "divergence" else 143)
    assert order == ["closed", "report"]


def test_the_best_weights_are_kept(train, command):
    """A rate that ruins the model after a good start."""
    schedule = ["schedule=constant", "schedule.warmup_steps=0", "optimizer=adamw", "trainer.val_every=1"]
    run = train("mine", *schedule, "optimizer.lr=0.5")
    losses = [loss for _, loss in metrics(run)["val/loss"]]
    assert min(losses) < losses[-1]
    best = int(torch.tensor(losses).argmin()) + 1
    alone = train("alone", *schedule, "optimizer.lr=0.5", f"trainer.max_steps={best}")
    same(load_file(run / "best.safetensors"), weights(alone))
    result = command("generate", f"checkpoint={run / 'best.safetensors'}", "max_new_tokens=3")
    assert result.code == 0, result.err


def test_the_moving_average_is_validated_and_saved_and_training_keeps_its_own(train, workdir):
    settings = ["optimizer=adamw", "schedule=constant", "callbacks.checkpoint_every=1", "callbacks.keep_checkpoints=9"]
    settings.append("callbacks.ema=0.5")
    plain = train("plain", *settings, "callbacks.ema=0")
    run = train("mine", *settings)
    raw = [load_file_of(checkpoints(plain)[i], "state_dict") for i in range(6)]
    assert len(raw) == 6
    average = raw[0]
    for w in raw[1:]:
        average = {name: 0.5 * average[name] + 0.5 * w[name] for name in w}
    same({n.removeprefix("model."): w for n, w in average.items()}, weights(run), atol=1e-6, rtol=1e-5)
    same(raw[-1], load_file_of(checkpoints(run)[-1], "current_model_state"))
    # It goes on exactly, further than it was to go at first too.
    longer = train("longer", *settings, "trainer.max_steps=8")
    train("mine", *settings, "trainer.max_steps=8", "resume=auto")
    same(weights(run), weights(longer))
    assert metrics(run)["val/loss"][0] != metrics(plain)["val/loss"][0]


def test_samples_of_a_moving_average_are_its_own(train, command):
    """The last is what the model file writes, and training goes on with the weights that it had."""
    settings = ["optimizer=adamw", "schedule=constant", "callbacks.ema=0.9", "optimizer.lr=0.01"]
    settings += ["callbacks.sample_temperature=0", "callbacks.sample_prompt=Ann"]
    run = train("mine", *settings)
    result = command("generate", f"checkpoint={run}", "prompt=Ann", "temperature=0", "max_new_tokens=8")
    assert read_samples(run)[-1] == (6, result.out.removesuffix("\n"))
    raw = train("raw", *settings, "callbacks.ema=0")
    assert read_samples(run) != read_samples(raw)
    same(load_file_of(checkpoints(run)[-1], "current_model_state"), load_file_of(checkpoints(raw)[-1], "state_dict"))


@pytest.mark.parametrize("part", ["stream", "attention_picture"])
def test_a_sample_that_fails_is_said_and_stops_nothing(train, command, monkeypatch, part):
    whole = train("whole")
    real, calls = getattr(callbacks, part), []

    def fails_at_first(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("no\nmemory")
        return real(*arguments, **settings)

    monkeypatch.setattr(callbacks, part, fails_at_first)
    result = command("train", *TEXT, *SMALL, "name=mine")
    assert result.code == 0, result.err
    assert "no sample after step 3, training goes on (RuntimeError: no memory)\n" in result.out
    run = whole.with_name("mine")
    same(weights(run), weights(whole))
    assert metrics(run) == metrics(whole)
    assert read_samples(run) == read_samples(whole)[1:]
    assert [step for step, _ in read_attention(run)] == [6]


@pytest.mark.parametrize(("at", "val_every"), [(1, 3), (2, 4)])
def test_the_state_is_saved_before_a_sample_which_is_made_up_for(train, monkeypatch, at, val_every):
    """A kill while the sample of a step is drawn at which a checkpoint is due: at the third step, and at the last."""
    settings = ["callbacks.checkpoint_every=3", f"trainer.val_every={val_every}"]
    whole = train("whole", *settings)
    run, pictures, real = whole.with_name("mine"), [], callbacks.attention_picture

    class Killed(BaseException):
        pass

    def killed(weights):
        pictures.append(weights)
        if len(pictures) == at:
            raise Killed
        return real(weights)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(callbacks, "attention_picture", killed)
        train("mine", *settings)
    assert read_checkpoint(checkpoints(run)[-1])["global_step"] == 3 * at
    assert len(read_samples(run)) == at - 1
    train("mine", *settings, "resume=auto")
    same(weights(run), weights(whole))
    assert metrics(run) == metrics(whole)
    assert read_samples(run) == read_samples(whole)
    assert read_attention(run) == read_attention(whole)


def load_file_of(path, key) -> dict:
    return read_checkpoint(path)[key]


def test_one_checkpoint_can_be_resumed(train):
    settings = ["callbacks.keep_checkpoints=9"]
    run = train("mine", *settings)
    end = weights(run)
    first, *later = checkpoints(run)
    train("mine", *settings, f"resume={first}", "trainer.max_steps=3", "schedule=constant")
    # What was given up stands aside, and is not gone on from by mistake.
    assert [read_checkpoint(path)["global_step"] for path in checkpoints(run)] == [2, 3]
    assert all(path.with_name(f"{path.name}.later").exists() for path in later)
    train("mine", *settings, f"resume={first}")
    same(end, weights(run))


def test_the_best_weights_are_not_those_of_a_future_that_was_given_up(train, monkeypatch):
    """Each validation finds less than the one before; set aside, the weights come from the step's checkpoint."""
    lowest_at(monkeypatch, step2=1.0, step4=0.8, step6=0.6)
    settings = ["callbacks.keep_checkpoints=9", "trainer.val_every=2", "schedule=constant"]
    run = train("mine", *settings)
    assert read_checkpoint(checkpoints(run)[-1])["global_step"] == 6
    until = weights(train("until", *settings, "trainer.max_steps=2"))
    lowest_at(monkeypatch, step2=1.0, step4=2.0, step6=2.0)
    train("mine", *settings, f"resume={checkpoints(run)[0]}", "trainer.max_steps=4")
    same(load_file(run / "best.safetensors"), until)
    assert (run / "best.safetensors.later").exists()
    train("mine", *settings, "resume=auto")
    same(load_file(run / "best.safetensors"), until)
    assert not list(run.rglob("*.later"))  # the run has come as far again


def test_what_kills_left_half_written_goes_when_the_run_goes_on(train):
    run = train("mine", "trainer.max_steps=4")
    leftovers = [run / ".model.safetensors.1.part", run / "checkpoints" / ".step-00000004.ckpt.1.part"]
    for path in leftovers:
        path.write_bytes(b"half")
    train("mine", "resume=auto")
    assert not any(path.exists() for path in leftovers)


def test_a_kill_on_the_way_back_to_one_checkpoint(train, monkeypatch):
    """`resume=auto` never finds a checkpoint that is later than what the logs hold."""
    settings = ["callbacks.keep_checkpoints=9"]
    run = train("mine", *settings)
    whole, end = metrics(run), weights(run)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed here"):
        real = os.truncate
        patch.setattr(os, "truncate", lambda *a: (real(*a), (_ for _ in ()).throw(RuntimeError("killed here")))[0])
        train("mine", *settings, f"resume={checkpoints(run)[0]}")
    train("mine", *settings, "resume=auto")
    assert metrics(run) == whole
    same(end, weights(run))


@pytest.fixture(scope="module")
def plain_losses():
    return {}


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_way_to_make_a_step_makes_the_same_step(
    train, plain_losses, precision, checkpointing, accumulate, compiled
):
    """Losses of four steps against the plain ones in fp32; ranks are in test_ranks."""
    if compiled and (accumulate > 1 or (precision != "32" and checkpointing != "selective")):
        return  # compiling takes long: each setting is asserted with it once
    settings = ["optimizer=adamw", "trainer.log_every=1", "trainer.max_steps=4", "data.batch_size=6"]
    settings += ["callbacks.sample_every=0", "callbacks.checkpoint_every=0"]
    if not plain_losses:
        plain_losses.update(metrics(train("plain", *settings)))
    run = train(
        "other", *settings, f"trainer.precision={precision}", f"trainer.gradient_checkpointing={checkpointing}",
        f"trainer.accumulate={accumulate}", f"trainer.compile={compiled}".lower(),
    )  # fmt: skip
    tolerance = {"32": 1e-4, "bf16-mixed": 3e-3, "bf16-true": 2e-2}[precision]
    for name in ("train/loss", "val/loss"):
        found = [value for _, value in metrics(run)[name]]
        assert found == pytest.approx([value for _, value in plain_losses[name]], rel=tolerance), name


def test_a_compiled_run_loads_and_goes_on_uncompiled_and_the_other_way_round(train):
    settings = ["optimizer=adamw", "schedule=constant", "callbacks.sample_every=0"]
    plain = train("plain", *settings, "trainer.max_steps=8")
    for name, first, then in (("one", "true", "false"), ("other", "false", "true")):
        run = train(name, *settings, f"trainer.compile={first}")
        model, _ = load(run)
        same(dict(model.state_dict()), weights(run))
        train(name, *settings, f"trainer.compile={then}", "trainer.max_steps=8", "resume=auto")
        same(weights(run), weights(plain), atol=2e-4, rtol=1e-3)
