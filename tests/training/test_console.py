"""Printing never stops a run, whatever the stream is and can show."""

import io
import subprocess
import sys

import pytest

from minitransformer.checkpoint import read_metrics, read_samples
from tests.conftest import ROOT, SMALL

PROMPT = "é λ 李 🦉"
RUN = ["data=text", "data.files=[book.txt]", "tokenizer=byte", *SMALL, "name=mine"]
RUN += [f"callbacks.sample_prompt={PROMPT}", "callbacks.sample_tokens=1"]


@pytest.mark.parametrize(("encoding", "shown"), [
    ("utf-8", "  │ é λ 李 🦉"),
    ("cp1252", "  | é \\u03bb \\u674e \\U0001f989"),
    ("ascii", "  | \\xe9 \\u03bb \\u674e \\U0001f989"),
    ("cp932", "  | \\xe9 λ 李 \\U0001f989"),
])  # fmt: skip
def test_what_an_encoding_lacks_is_escaped(command, workdir, monkeypatch, encoding, shown):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert command("train", *RUN).code == 0
    sys.stdout.flush()
    out = written.getvalue().decode(encoding)
    assert out.count(shown) == 2
    assert ("│ peak memory" in out, "| peak memory" in out) == (encoding == "utf-8", encoding != "utf-8")
    assert "generate from it:" in out
    assert [text[: len(PROMPT)] for _, text in read_samples(workdir / "runs/mine")] == [PROMPT] * 2  # as they are


@pytest.mark.parametrize("missing", [True, False])
def test_a_stream_that_is_not_there_stops_nothing(command, workdir, monkeypatch, missing):
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stdout", None if missing else closed)
    result = command("train", *RUN)
    assert (result.code, result.err) == (0, "")
    assert [m["step"] for m in read_metrics(workdir / "runs/mine")][-1] == 6


def test_a_full_stream_stops_nothing(workdir):
    """In a process of its own, which writes out at its end what the stream still holds."""
    process = [sys.executable, ROOT / "train.py", *RUN]
    with open("/dev/full", "w") as full:
        result = subprocess.run(process, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (0, "standard output: No space left on device; training goes on\n")
    assert [m["step"] for m in read_metrics(workdir / "runs/mine")][-1] == 6
