"""`python -m minitransformer.evaluate` as a user types it."""

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from minitransformer import Tokenizer, load, score
from minitransformer.data.config import (
    CSVConfig,
    DataConfig,
    HubConfig,
    JSONLinesConfig,
    ParquetConfig,
    StdlibConfig,
    TextConfig,
)
from minitransformer.evaluation.run import data_of_run
from minitransformer.model.quantize import quantize_int8
from minitransformer.report.reading import read
from minitransformer.run.directory import checkpoints, read_held_out, read_metrics
from minitransformer.run.models import save_model
from tests.conftest import ROOT, SMALL, sentences, with_start


@pytest.fixture
def lines(command, workdir):
    """A run on documents of a line each, and what it said."""
    words = ["data=text", "data.files=[book.txt]", "data.documents=line", "tokenizer.vocab_size=300", "name=lines"]
    result = command("train", *words, *SMALL)
    assert result.code == 0, result.err
    return result


def test_without_data_it_is_the_held_out_text_of_the_run(command, lines):
    """Documents that fit into a row have the loss that training measured."""
    result = command("evaluate", "output=json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["data"] == "held-out text of book.txt"
    trained = [metrics for metrics in read_metrics(Path("runs/lines")) if "val/loss" in metrics][-1]
    assert found["loss"] == pytest.approx(trained["val/loss"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(trained["val/bits_per_byte"], rel=1e-5)
    assert found["checkpoint"] == "runs/lines"
    newest = checkpoints(Path("runs/lines"))[-1]
    assert json.loads(command("evaluate", f"checkpoint={newest}", "output=json").out)["loss"] == found["loss"]


def test_the_data_of_a_run_of_an_older_version(command, lines):
    """Its config does not name the choice."""
    found = command("evaluate", "output=json").out
    config = Path("runs/lines/config.yaml")
    text = config.read_text()
    assert text.count("  kind: text\n") == 1
    config.write_text(text.replace("  kind: text\n", ""))
    assert command("evaluate", "output=json").out == found


@torch.no_grad()
def plain_nats(model, ids: list[int]) -> list[float]:
    """Of each id but the first, given all before it, in float64."""
    log_probs = model.double()(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return (-log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]).tolist()


@pytest.mark.parametrize("start", ["eos", "another"])
def test_all_that_reads_a_document_starts_it_as_training_does(command, workdir, start):
    words = Tokenizer.bytes() if start == "eos" else with_start(Tokenizer.bytes())
    (workdir / "words.json").write_text(words.to_json(), encoding="utf-8")
    settings = [s for s in SMALL if not s.startswith(("trainer.max_steps", "trainer.val_every"))]
    result = command(
        "train", "data=text", "data.files=[book.txt]", "data.documents=line", "tokenizer=pretrained",
        "tokenizer.name=words.json", "name=run", *settings, "trainer.max_steps=20", "trainer.val_every=20",
    )  # fmt: skip
    assert result.code == 0, result.err
    texts = [text for _, text in read_held_out(Path("runs/run"))]
    evaluated = json.loads(command("evaluate", "output=json").out)
    assert evaluated["documents"] == len(texts) > 3
    model, words = load("runs/run")
    each = [plain_nats(model, [words.bos_id, *words.encode(text), words.eos_id]) for text in texts]
    loss = sum(map(sum, each)) / sum(map(len, each))
    other = [plain_nats(model, [words.encode("e")[0], *words.encode(text), words.eos_id]) for text in texts]
    assert abs(sum(map(sum, other)) / sum(map(len, other)) - loss) > 1e-3  # what starts a text is seen in its loss

    (logged,) = [metrics["val/loss"] for metrics in read_metrics(Path("runs/run")) if "val/loss" in metrics]
    assert logged == pytest.approx(loss, abs=1e-4)
    assert evaluated["loss"] == pytest.approx(loss, abs=1e-4)
    model, words = load("runs/run")
    found = [-p for text in texts for p in score(model, words, text).log_probs]
    assert sum(found) / len(found) == pytest.approx(loss, abs=1e-4)
    for pieces, nats in zip(read(model, words, [("", text) for text in texts]), each, strict=True):
        assert sum(piece.nats for piece in pieces) == pytest.approx(sum(nats[:-1]), abs=1e-4 * len(nats))
    shortest = min(map(len, each))
    words_of_it = ["evaluate", "output=json", "by_position=true", f"length={shortest}"]
    by_position = json.loads(command(*words_of_it).out)["loss_by_position"]
    assert by_position[0] == pytest.approx(sum(nats[0] for nats in each) / len(each), abs=1e-4)


SHARED = dict(
    batch_size=8, row_length=None, packing="best_fit", val_fraction=0.05, split="auto", workers=0, cache_dir=None,
    limit_rows=None, allow_changed=False,
)  # fmt: skip
FILES = SHARED | dict(val_files=[], documents="file", text_field=None, prefix_field=None)
HUB = SHARED | dict(name="set", config=None, train_split="train", val_split=None, text_field=None, prefix_field=None,
                    streaming=False, buffer=10_000)  # fmt: skip


@pytest.mark.parametrize(("saved", "expected"), [
    (SHARED, StdlibConfig()),
    (HUB, HubConfig(name="set")),
    (HUB | dict(val_split="test", val_fraction=0.2, buffer=7), HubConfig(name="set", val_split="test")),
    (HUB | dict(streaming=True, buffer=7), HubConfig(name="set", streaming=True, buffer=7)),
    (FILES | dict(files=["a.txt"], val_fraction=0.1, documents="line"), TextConfig(files=["a.txt"], documents="line")),
    (FILES | dict(files=["a.txt"], val_files=["b.md"], split="hash"), TextConfig(files=["a.txt"], val_files=["b.md"])),
    (FILES | dict(files=["texts"]), TextConfig(files=["texts"], val_fraction=0.05)),
    (FILES | dict(files=["a.jsonl"], documents="line"), JSONLinesConfig(files=["a.jsonl"])),
    (FILES | dict(files=["*.csv"], text_field="body"), CSVConfig(files=["*.csv"], text_field="body")),
    (FILES | dict(files=["tables"], val_fraction=0.3), ParquetConfig(files=["tables"], val_fraction=0.3)),
], ids=lambda value: "" if isinstance(value, dict) else type(value).__name__)  # fmt: skip
def test_data_settings_without_a_kind_are_those_of_an_older_run(saved, expected, workdir):
    for name in ("a.txt", "b.md", "a.jsonl", "a.csv", "texts/a.txt", "tables/a.parquet"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("text")
    for data in (saved, asdict(expected)):
        Path("config.yaml").write_text(OmegaConf.to_yaml({"data": data}))
        assert data_of_run(workdir) == expected


@pytest.mark.parametrize(("saved", "message"), [
    (None, "does not say what the data of the run were"), ({}, "does not say"), ({"kind": "new"}, "does not say"),
    ({"kind": "text", "name": "a"}, "does not say"), (FILES | dict(files=["gone.txt"]), "gone.txt does not exist"),
    (FILES | dict(files=["a.csv", "a.jsonl"]), "a.csv is no text by its ending; choose data=csv"),
], ids=str)  # fmt: skip
def test_data_settings_that_say_nothing_are_refused(saved, message, workdir):
    for name in ("a.jsonl", "a.csv"):
        Path(name).write_text("text")
    Path("config.yaml").write_text(OmegaConf.to_yaml({"data": saved}))
    with pytest.raises(ValueError, match=message):
        data_of_run(workdir)


def test_given_data_it_is_all_documents(command, trained, workdir):
    texts = [sentences(1, seed=i).strip() for i in range(5)]
    (workdir / "other.txt").write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    words = ["evaluate", f"checkpoint={trained}", "data=text", "data.files=[other.txt]", "data.documents=line"]
    result = command(*words)
    assert result.code == 0, result.err
    model, tokenizer = load(trained)
    log_probs = [p for text in texts for p in score(model, tokenizer, text).log_probs]
    loss = -sum(log_probs) / len(log_probs)
    assert f"loss           {loss:.4f} nats per token\n" in result.out
    n_bytes = sum(len(text.encode()) for text in texts)
    assert f"scored         {len(log_probs)} tokens of {n_bytes} bytes in 5 documents\n" in result.out
    assert "other.txt: 5 documents" in result.err
    both = [json.loads(command(*words, "output=json", f"batch_size={n}").out) for n in (1, 5)]
    assert both[0]["loss"] == pytest.approx(both[1]["loss"], rel=1e-7)
    # A single file is one document, whole, although training would cut its tail off.
    whole = json.loads(command("evaluate", "data=text", "data.files=[book.txt]", "output=json", "stride=8").out)
    assert whole["bytes"] == (workdir / "book.txt").stat().st_size
    assert (whole["documents"], whole["length"], whole["stride"]) == (1, 32, 8)


def test_loss_by_position(command, trained, workdir):
    words = ["evaluate", "data=text", "data.files=[book.txt]", "by_position=true", "length=4x"]
    result = command(*words, "plot=losses.png", "scaling=linear")
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[1][0] == "0-3"
    assert rows[32][0] == "124-127"
    assert (workdir / "losses.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(command(*words, "output=json", "scaling=linear").out)
    assert len(found["loss_by_position"]) == 128
    assert sum(found["loss_by_position"][:4]) / 4 == pytest.approx(float(rows[1][1]), abs=1e-4)
    assert (found["max_seq_len"], found["scaling"]) == (32, "linear")


def test_a_picture_for_which_no_room_is_left(command, trained, workdir, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    (workdir / "losses.png").write_bytes(b"the one before")
    monkeypatch.setattr(os, "fsync", full)
    words = ["evaluate", "data=text", "data.files=[book.txt]", "by_position=true", "length=2x", "plot=losses.png"]
    result = command(*words)
    assert result.code == 1
    assert result.err.splitlines()[-1] == "error: no space left on the disk for losses.png; it was not written"
    assert (workdir / "losses.png").read_bytes() == b"the one before"
    assert not list(workdir.glob(".losses.png*"))


def test_eight_bits_are_a_little_less_exact(command, trained, workdir):
    """The loss is that of the quantised model, at any length."""
    (workdir / "line.txt").write_text("Ann sees the cat.", encoding="utf-8")
    words = ["evaluate", "data=text", "data.files=[line.txt]", "output=json"]
    found = json.loads(command(*words, "quantize=int8").out)
    model, tokenizer = load(trained)
    quantize_int8(model)
    log_probs = score(model, tokenizer, "Ann sees the cat.").log_probs
    assert found["loss"] == pytest.approx(-sum(log_probs) / len(log_probs), rel=1e-4)
    exact = json.loads(command(*words).out)
    assert exact["loss"] != found["loss"] == pytest.approx(exact["loss"], abs=0.05)
    assert (exact["quantize"], found["quantize"]) == ("none", "int8")
    positions = ["evaluate", "data=text", "data.files=[book.txt]", "by_position=true", "length=2x", "output=json"]
    exact, found = (json.loads(command(*positions, f"quantize={q}").out) for q in ("none", "int8"))
    assert exact["loss_by_position"] != found["loss_by_position"]
    assert found["loss_by_position"] == pytest.approx(exact["loss_by_position"], abs=0.1)
    assert (exact["quantize"], found["quantize"]) == ("none", "int8")


MISTAKES = [
    ("checkpoint=nowhere", ["checkpoint=nowhere does not exist"]),
    ("data=text data.files=[gone.txt]", ["data.files: gone.txt does not exist"]),
    ("data=text", ["data.files is empty"]),
    ("data=nope", ["data=nope is not known", "jsonl"]),
    ("data=text data.files=[blank.txt]", ["blank.txt holds no text"]),
    ("data=text data.files=[book.txt] data.val_files=[book.txt]", ["data.val_files is for training"]),
    ("data=hub data.name=here data.streaming=true", ["data.streaming is for training", "all documents"]),
    ("data=hub data.name=here data.val_split=test", ["data.val_split is for training"]),
    ("stride=0", ["stride=0 is too small", "at least 1"]),
    ("stride=33", ["stride=33 is beyond the window of length=32"]),
    ("length=8 stride=9", ["stride=9 is beyond the window of length=8"]),
    ("length=long", ["length=long is no number of tokens"]),
    ("length=0", ["length=0"]),
    ("length=0.001x", ["length=0.001x", "less than a token"]),
    ("length=9000 by_position=true", ["length=9000: the longest document has"]),
    ("by_position=true stride=3", ["stride=3 cannot go with by_position=true"]),
    ("plot=a.png", ["plot=a.png is for by_position=true"]),
    ("by_position=true plot=a.gif", ["plot=a.gif is neither a .png nor an .svg"]),
    ("scaling=more", ["scaling='more'", "yarn"]),
    ("output=xml", ["output='xml'"]),
    ("quantize=int4", ["quantize='int4'", "int8"]),
    ("device=tpu", ["device='tpu'"]),
    ("batch_size=0", ["batch_size=0"]),
    ("strid=3", ["did you mean stride?"]),
    ("checkpoint=alone.safetensors", ["alone.safetensors has no config.yaml", "data=text data.files=FILE"]),
]  # fmt: skip


# A value for every setting that a source of documents shares, other than its default.
SHARED = dict(
    batch_size=3, row_length=16, packing="pad", val_fraction=0.3, split="tail", workers=1, cache_dir="there",
    limit_rows=1, allow_changed="true",
)  # fmt: skip


def test_settings_of_the_data_that_only_training_heeds_are_refused_by_name(command, trained):
    assert set(SHARED) == {field.name for field in fields(DataConfig)} - {"kind"}
    for name, value in SHARED.items():
        result = command("evaluate", "data=text", "data.files=[book.txt]", f"data.{name}={value}")
        assert result.code == 1
        assert f"error: data.{name} is for training" in result.err, result.err


@pytest.mark.parametrize("change", ["shorter", "longer", "another way to read it"])
def test_text_that_is_no_longer_the_run_s_is_noticed(command, lines, workdir, change):
    assert "warning" not in command("evaluate").err
    text = (workdir / "book.txt").read_text(encoding="utf-8")
    if change == "another way to read it":
        config = Path("runs/lines/config.yaml")
        config.write_text(config.read_text().replace("documents: line", "documents: blank_line\n  split: tail"))
        config.write_text(config.read_text().replace("  split: auto\n", ""))
    else:
        (workdir / "book.txt").write_text(text[: len(text) // 2] if change == "shorter" else text + "Bob sees.\n")
    for checkpoint in ("runs/lines", "runs/lines/model.safetensors", str(checkpoints(Path("runs/lines"))[-1])):
        result = command("evaluate", f"checkpoint={checkpoint}")
        assert result.code == 0, result.err
        (warning,) = [line for line in result.err.splitlines() if "warning" in line]
        assert warning.startswith("warning: book.txt is not the text of runs/lines any more"), warning


def test_json_has_null_where_a_number_is_none(command, trained, workdir):
    """The loss of a model whose weights are not finite, and a perplexity beyond all numbers."""
    model, words = load(trained)
    state = model.state_dict()
    for value, key in ((math.nan, "loss"), (1e6, "perplexity")):
        head = torch.full_like(state["head.weight"], value)
        head[::2] *= -1
        save_model(workdir / "odd.safetensors", model.config, state | {"head.weight": head}, words)
        result = command("evaluate", "checkpoint=odd.safetensors", "data=text", "data.files=[book.txt]", "output=json")
        assert result.code == 0, result.err
        assert json.loads(result.out, parse_constant=pytest.fail)[key] is None
        result = command("generate", "checkpoint=odd.safetensors", "prompt=Ann", "score=true", "output=json")
        if math.isnan(value):
            assert result.code == 1
            assert "the model's logits are not finite" in result.err
            continue
        assert result.code == 0, result.err
        assert json.loads(result.out, parse_constant=pytest.fail)["perplexity"] is None


def test_mistakes_end_in_one_line(command, trained, workdir):
    (workdir / "blank.txt").write_text(" \n")
    (workdir / "alone.safetensors").write_bytes((trained / "model.safetensors").read_bytes())
    for arguments, words in MISTAKES:
        result = command("evaluate", *arguments.split())
        assert result.code == 1, (arguments, result.out)
        *before, error = result.err.splitlines()
        assert error.startswith("error: "), result.err
        assert not any(line.startswith(("error", "Traceback")) for line in before), result.err
        assert all(word in error for word in words), error


def test_learned_positions_end_where_they_end(command, workdir):
    words = ["data=text", "data.files=[book.txt]", "tokenizer=byte", "model.position=learned", "name=learned"]
    assert command("train", *words, *SMALL).code == 0
    result = command("evaluate", "length=2x", "by_position=true")
    assert result.code == 1
    assert "length=64: the model learned max_seq_len=32 positions" in result.err
    assert command("evaluate", "length=1x", "by_position=true").code == 0


def test_it_needs_neither_lightning_nor_datasets_nor_wandb(trained, workdir):
    code = "import sys, runpy; sys.argv[1:] = ['output=json']; " \
        "runpy.run_module('minitransformer.evaluate', run_name='__main__', alter_sys=True); " \
        "assert not {'lightning', 'datasets', 'wandb', 'matplotlib'} & set(sys.modules)"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=workdir, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint"] == "runs/small"
