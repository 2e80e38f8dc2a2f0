"""What is drawn and what is written beside training."""

import contextlib
import io
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from minitransformer.data.tokenizer import printable
from minitransformer.run.directory import add_metrics, read_metrics
from minitransformer.training.callbacks import Bar, ValidationWatch, steepest
from tests.conftest import ROOT, SMALL


@pytest.mark.parametrize("end", ["on_train_end", "on_exception"])
def test_the_bar_gives_the_cursor_back(end):
    file = io.StringIO()
    bar = Bar(Console(file=file, force_terminal=True, width=80), log_every=1)
    trainer = SimpleNamespace(is_global_zero=True, max_steps=10, global_step=0)
    module = SimpleNamespace(metrics={"train/loss": 2.5, "speed/tokens_per_s": 1234.0}, seconds=1.0)
    bar.on_train_start(trainer, module)
    trainer.global_step = 3
    bar.on_train_batch_end(trainer, module, None, None, 2)
    getattr(bar, end)(trainer, module, *([KeyboardInterrupt()] if end == "on_exception" else []))
    shown = file.getvalue()
    assert "3/10" in shown
    assert "train 2.500  1,234 tokens/s" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_elsewhere_there_are_lines_without_control_characters():
    file = io.StringIO()
    bar = Bar(Console(file=file, highlight=False), log_every=2)
    trainer = SimpleNamespace(is_global_zero=True, max_steps=10, global_step=0)
    module = SimpleNamespace(metrics={"train/loss": 2.5, "speed/tokens_per_s": 1234.0}, seconds=4.0)
    bar.on_train_start(trainer, module)
    for trainer.global_step in (1, 2):
        bar.on_train_batch_end(trainer, module, None, None, 0)
    assert file.getvalue() == "step 2/10  train 2.500  1,234 tokens/s  16 s left\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_the_bar_fits_its_terminal(width):
    """Whole words in one line, the more the wider."""
    file = io.StringIO()
    bar = Bar(Console(file=file, force_terminal=True, width=width, color_system=None), log_every=1)
    trainer = SimpleNamespace(is_global_zero=True, max_steps=1000, global_step=0)
    metrics = {"train/loss": 2.5, "val/loss": 3.1, "speed/tokens_per_s": 17583.0, "speed/mfu": 0.314}
    module = SimpleNamespace(metrics=metrics, seconds=1.0)
    bar.on_train_start(trainer, module)
    bar.validated = 250
    trainer.global_step = 300
    bar.on_train_batch_end(trainer, module, None, None, 0)
    bar.on_train_end(trainer, module)
    line = file.getvalue().rstrip("\n\x1b[?25h").split("\x1b[2K")[-1]
    assert len(line) <= width
    shown = ["train 2.500", "val 3.100 at 250", "17,583 tokens/s", "MFU 31%"]
    room = {20: 0, 40: 0, 60: 2, 80: 3, 120: 4}[width]
    assert [text for text in shown if text in line] == shown[:room]
    assert "…" not in line or width == 20


def test_a_log_has_no_control_characters_even_in_colour(command, monkeypatch):
    """FORCE_COLOR, which CI services set, gives colours and no moving cursor."""
    text = ["data=text", "data.files=[book.txt]", "tokenizer.vocab_size=300", *SMALL]
    plain = command("train", *text, "name=plain")
    assert plain.code == 0, plain.err
    assert not set(plain.out) & {"\x1b", "\r", "\x08"}
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = command("train", *text, "tokenizer.vocab_size=301", "name=color")  # another one, made anew
    assert "tokenising" in coloured.out
    assert "\x1b[1m" in coloured.out
    assert set(re.findall(r"\x1b\[[^a-zA-Z]*([a-zA-Z])", coloured.out)) == {"m"}
    assert "\r" not in coloured.out


def test_a_terminal_has_a_bar_and_no_colour_if_asked(workdir):
    """In a pseudo-terminal, with NO_COLOR."""
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        ROOT / "train.py",
        "data=text",
        "data.files=[book.txt]",
        "tokenizer.vocab_size=300",
        *SMALL,
    ]
    environment = os.environ | {"NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    out = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(ours, 65536):
            out += part
    os.close(ours)
    assert process.wait() == 0, out
    assert b"\x1b[?25l" in out
    assert b"\x1b[?25h" in out
    assert re.search(rb"\r\x1b\[2Kstep 6/6 \S+ +train [\d.]+  val [\d.]+ at 3 ", out), out
    assert not re.search(rb"\x1b\[[\d;]*\b[349]\d", out)
    assert "╭".encode() in out


def watched(run, losses):
    """What is said of (step, training loss, validation loss) in turn."""
    file = io.StringIO()
    watch = ValidationWatch(SimpleNamespace(path=run), Console(file=file, soft_wrap=True))
    for step, train, val in losses:
        add_metrics(run, step, {"train/loss": train})
        trainer = SimpleNamespace(is_global_zero=True, global_step=step)
        metrics = {"train/loss": train, "val/loss": val}
        module = SimpleNamespace(metrics=metrics, tokenizer=SimpleNamespace(vocab_size=100))
        watch.on_validation_end(trainer, module)
        add_metrics(run, step, {"val/loss": val})
    return file.getvalue().splitlines()


def test_overfitting_is_said_once_while_there_is_time(tmp_path):
    (line,) = watched(tmp_path, [(10, 4.0, 4.1), (20, 3.0, 3.5), (30, 2.0, 3.6), (40, 1.0, 3.9), (50, 0.5, 4.4)])
    assert line.startswith("step 40  overfitting: validation loss 3.9000 has risen from its best, 3.5000 after step 20")
    assert all(word in line for word in ("best.safetensors", "trainer.max_steps", "more text", "model.dropout=0.1"))


@pytest.mark.parametrize("losses", [
    [(10, 4.0, 4.1), (20, 3.9, 4.2), (30, 3.8, 4.1)],  # up and down
    [(10, 3.0, 3.1), (20, 3.8, 4.0)],  # training rises too
    [(10, 3.0, 3.1), (20, float("nan"), float("nan"))],
    [(10, 4.0, 4.6), (20, 3.0, 3.0)],  # ln 100 = 4.605
])  # fmt: skip
def test_nothing_is_said_of_a_run_that_learns(tmp_path, losses):
    assert watched(tmp_path, losses) == []


def test_a_loss_worse_than_a_uniform_guess_is_said_once(tmp_path):
    lines = watched(tmp_path, [(10, 1.0, 4.7), (20, 0.5, 4.8)])
    assert lines == [
        "step 10  validation loss 4.7000 is worse than 4.6052, a uniform guess among 100 ids, while training loss is "
        "1.0000; what helps: fewer trainer.max_steps, more text, model.dropout=0.1"
    ]
    (tmp_path / "diverged").mkdir()
    assert watched(tmp_path / "diverged", [(10, 9.0, 8.0)])[0].endswith("a uniform guess among 100 ids")


def test_a_run_that_learns_by_heart_says_so_and_offers_its_best(command, workdir):
    """Letters by chance: there is nothing to learn but the text itself."""
    (workdir / "book.txt").write_text("".join(random.Random(0).choices("abcdefgh", k=1500)))
    settings = ["model.d_model=64", "data.batch_size=8", "trainer.max_steps=200", "trainer.val_every=40"]
    settings += ["trainer.log_every=40", "callbacks.sample_every=0", "callbacks.checkpoint_every=0"]
    result = command("train", "data=text", "data.files=[book.txt]", "tokenizer=byte", *SMALL, *settings, "name=mine")
    assert result.code == 0, result.err
    losses = {m["step"]: m["val/loss"] for m in read_metrics(workdir / "runs/mine") if "val/loss" in m}
    best = min(losses, key=losses.get)
    warned = int(re.search(r"^step (\d+)  overfitting: ", result.out, re.M)[1])
    assert best < warned < 200
    assert losses[warned] > 1.1 * losses[best]
    assert f"its best, {losses[best]:.4f} after step {best}, " in result.out
    assert (result.out.count("overfitting: "), result.out.count("is worse than 5.5491")) == (1, 1)
    assert re.search(rf"│ validation loss   │ {losses[200]:.4f} nats per token ", result.out)
    assert re.search(rf"│ best validation   │ {losses[best]:.4f} after step {best} ", result.out)
    assert 'checkpoint=runs/mine/best.safetensors prompt=""' in result.out


def test_a_log_that_is_not_utf_8_can_be_read(command, workdir, monkeypatch):
    with open("log", "w", encoding="cp1252") as log:
        monkeypatch.setattr(sys, "stdout", log)
        settings = ["data=text", "data.files=[book.txt]", "tokenizer=byte", *SMALL, "callbacks.sample_prompt=é λ"]
        assert command("train", *settings).code == 0
    shown = (workdir / "log").read_text(encoding="cp1252")
    assert shown.count("  | é ?") == 2
    assert "| peak memory" in shown


def test_control_characters_of_a_sample_are_shown():
    assert printable("a\tb\x1b[31mc\x00é🦉") == "a    b\\x1b[31mc\\x00é🦉"


def test_the_rate_finder_names_the_steepest_fall():
    """A loss that falls around 10^-2.5 of a rate that goes from 10^-4 to 1, and explodes at the end."""
    rates = torch.logspace(-4, 0, 200)
    losses = 4 - 2 * torch.sigmoid((rates.log10() + 2.5) * 6) + torch.sin(torch.arange(200.0)) * 0.02
    losses[180:] = float("nan")
    assert steepest(rates, losses) == pytest.approx(10**-2.5, rel=0.15)
    assert steepest(rates, torch.arange(200.0)) is None
    assert steepest(rates[:9], losses[:9]) is None


def test_find_lr_prints_a_rate(command):
    result = command("train", "data=text", "data.files=[book.txt]", "tokenizer=byte", "debug=find_lr", "logger=none",
                     "model.d_model=32", "model.max_seq_len=32", "data.batch_size=4")  # fmt: skip
    assert result.code == 0, result.err
    rate = float(re.search(r"fell most steeply around optimizer\.lr=([\d.e-]+)", result.out)[1])
    assert 1e-4 < rate < 1
