"""Printing to what cannot show it, or takes nothing more."""

import io
import os
import subprocess
import sys

import pytest

from minitransformer.streams import printing_never_fails, replace_what_cannot_be_shown
from tests.conftest import ROOT, SMALL

SHOWN = "  │ Zoë sees 李 🦉 λ\udcff"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-8", "shift-jis"])
def test_what_cannot_be_shown_is_replaced(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    replace_what_cannot_be_shown()
    print(SHOWN, flush=True)
    shown = stream.buffer.getvalue().decode(encoding)
    assert shown == SHOWN.encode(encoding, "replace").decode(encoding) + "\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("broken", ["full disk", "no reader", "closed"])
def test_printing_stops_nothing(monkeypatch, name, broken):
    if broken == "closed":
        stream = None
    elif broken == "full disk":
        stream = open("/dev/full", "w")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, name, stream)
    with printing_never_fails():
        for _ in range(3):
            print("x" * 100_000, file=getattr(sys, name), flush=True)
    assert getattr(sys, name) is stream
    if stream is not None:
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):
            print("x", file=stream, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_what_can_be_written_is(capfd):
    with printing_never_fails():
        print("all of it")
    assert capfd.readouterr().out == "all of it\n"


def test_training_outlives_its_log_and_other_commands_name_it(workdir):
    """A log in ASCII on a full disk does not stop a run; a text that cannot be written is an error, in one line."""
    ascii_log = {"env": os.environ | {"PYTHONIOENCODING": "ascii"}, "text": True}
    settings = ["data=text", "data.files=book.txt", "tokenizer=byte", "name=mine", *SMALL]
    with open("/dev/full", "w") as full:
        train = [sys.executable, ROOT / "train.py", *settings]
        result = subprocess.run(train, stdout=full, stderr=subprocess.PIPE, **ascii_log)
        assert (result.returncode, result.stderr) == (0, "")
        assert (workdir / "runs/mine/model.safetensors").exists()
        generate = [sys.executable, ROOT / "generate.py", "prompt=Zoë λ", "max_new_tokens=3", "output=json"]
        result = subprocess.run(generate, stdout=full, stderr=subprocess.PIPE, **ascii_log)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "error: the system: No space left on device")
    result = subprocess.run(generate, capture_output=True, **ascii_log)
    assert result.returncode == 0
    assert result.stdout.startswith('{"prompt": "Zo? ?"')
