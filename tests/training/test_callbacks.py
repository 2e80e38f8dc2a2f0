"""What is drawn and what is written beside training."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from minitransformer.training.callbacks import Bar, printable, steepest


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
    assert "loss 2.500  1,234 tokens/s" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_elsewhere_there_are_lines_without_control_characters():
    file = io.StringIO()
    bar = Bar(Console(file=file, highlight=False), log_every=2)
    trainer = SimpleNamespace(is_global_zero=True, max_steps=10, global_step=0)
    module = SimpleNamespace(metrics={"train/loss": 2.5, "speed/tokens_per_s": 1234.0}, seconds=4.0)
    bar.on_train_start(trainer, module)
    for trainer.global_step in (1, 2):
        bar.on_train_batch_end(trainer, module, None, None, 0)
    assert file.getvalue() == "step 2/10  loss 2.500  1,234 tokens/s  16 s left\n"


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
