"""`python -m minitransformer.explain` as a user types it, and its advice."""

import json
import math
import os
import re
import resource
import subprocess
import sys

import pytest

from minitransformer import Tokenizer
from minitransformer.cli import options
from tests.conftest import ROOT, SMALL, sentences


@pytest.fixture
def explained(command):
    def run(*words: str) -> dict:
        result = command("explain", *words, "output=json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    return run


def test_it_is_fast_and_imports_nothing_large(workdir):
    """Under three seconds of CPU with the interpreter's start, and the first use of each module."""
    code = "import sys, runpy; sys.argv[1:] = ['model=gpt2-xl', 'data=text', 'data.files=[book.txt]']; " \
        "runpy.run_module('minitransformer.explain', run_name='__main__', alter_sys=True); " \
        "assert not {'lightning', 'datasets', 'wandb', 'transformers'} & set(sys.modules)"  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "d_model 1600" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_it_says_what_train_then_trains(command, explained, workdir):
    words = ["data=text", "data.files=[book.txt]", "tokenizer=byte", *SMALL]
    found = explained(*words)
    said = command("train", *words, "name=run")
    assert said.code == 0, said.err
    assert f"{found['parameters']['total']:,} parameters" in said.out
    assert found["model"]["vocab_size"] == 257
    assert found["tokens"] == 6 * 4 * 32
    tokens = re.search(r"training  6 steps of 4 rows, ([\d,]+) tokens", said.out)[1]
    assert found["tokens"] == pytest.approx(int(tokens.replace(",", "")), rel=0.01)  # but for places left empty
    epochs = float(re.search(r"([\d.]+) epochs", said.out)[1])
    assert found["epochs"] == pytest.approx(epochs, abs=0.06)
    assert found["text_bytes"] == pytest.approx((workdir / "book.txt").stat().st_size * 0.9, abs=2)


def test_the_numbers_of_gpt2(explained, workdir):
    """By hand from the published size, 124,439,808 parameters: per token six for each in a product, and attention."""
    words = ["model=gpt2", "model.vocab_size=50257", "data=text", "data.files=[book.txt]", "optimizer=adamw"]
    found = explained(*words, "data.batch_size=32", "trainer.accumulate=8", "trainer.max_steps=100", "throughput=1000")
    n = 124_439_808
    assert found["parameters"]["total"] == n
    multiplied = n - 1024 * 768 - 12 * (2 * 2 * 768 + 9 * 768) - 2 * 768 + 0
    assert found["flops_per_token"]["training"] == 6 * multiplied + 3 * 12 * 4 * 768 * 1024
    memory = found["memory"]
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (4 * n, 4 * n, 8 * n)
    assert memory["rows"] == 4
    assert found["cache"] == 12 * 2 * 768 * 1024 * 4
    assert found["tokens"] == 100 * 32 * 1024
    assert found["tokens_per_parameter"] == pytest.approx(100 * 32 * 1024 / n)
    assert found["flops"] == found["tokens"] * found["flops_per_token"]["training"]
    assert found["seconds"] == found["tokens"] / 1000
    h100 = found["devices"]["h100"]
    assert h100["seconds"] == pytest.approx(found["flops"] / (0.4 * 989e12))
    assert (h100["precision"], found["devices"]["t4"]["precision"]) == ("bf16-mixed", "32")
    assert found["devices"]["t4"]["seconds"] == pytest.approx(found["flops"] / (0.4 * 8.1e12))
    assert found["devices"]["t4"]["needs"] > h100["needs"]
    # Recomputation costs time, and is not called useful.
    again = explained(*words, "data.batch_size=32", "trainer.max_steps=100", "trainer.gradient_checkpointing=full")
    assert again["flops"] == found["flops"]
    assert 1.1 < again["devices"]["h100"]["seconds"] / h100["seconds"] < 4 / 3


def test_what_it_advises_fits(explained, workdir):
    words = ["model=gpt2-medium", "model.vocab_size=50304", "data=text", "data.files=[book.txt]", "data.batch_size=128"]
    found = explained(*words)
    kinds = set()
    for name in ("laptop-cpu", "a10", "mi300x"):
        device = found["devices"][name]
        then = explained(*words, *device["with"], f"gpu={name}")
        assert then["devices"][name]["fits"] == device["fits"]
        assert then["devices"][name]["with"] == []
        usable = 0.6 if name == "laptop-cpu" else 0.9
        assert (then["memory"]["peak"] <= usable * device["memory"]) == device["fits"]
        warned = [w for w in explained(*words, f"gpu={name}")["warnings"] if name in w]
        assert bool(warned) == bool(device["with"])
        kinds.add(bool(device["with"]))
    assert kinds == {True, False}
    xl = explained("model=gpt2-xl", "data=text", "data.files=[book.txt]", "optimizer=adamw", "gpu=t4")
    assert not xl["devices"]["t4"]["fits"]
    assert "even for one row at a time" in xl["warnings"][-1]


def test_settings_of_train_change_what_they_change(explained, workdir):
    words = ["model=small", "data=text", "data.files=[book.txt]", "data.batch_size=16"]
    base = explained(*words)
    assert explained(*words, "callbacks.ema=0.99")["memory"]["average"] == base["memory"]["weights"]
    assert explained(*words, "trainer.precision=bf16-true")["memory"]["weights"] == base["memory"]["weights"] // 2
    assert explained(*words, "optimizer=adamw")["memory"]["optimizer"] > base["memory"]["optimizer"]
    assert explained(*words, "trainer.accumulate=4")["memory"]["rows"] == 4
    ddp = explained(*words, "trainer=ddp", "trainer.devices=4")
    assert ddp["devices"]["h100"]["seconds"] == pytest.approx(base["devices"]["h100"]["seconds"] / 4)
    assert (ddp["memory"]["rows"], ddp["memory"]["gradients"]) == (4, base["memory"]["gradients"])
    sharded = explained(*words, "trainer=fsdp")["memory"]
    assert sharded["optimizer"] == pytest.approx(base["memory"]["optimizer"] / 8, abs=1)
    assert sharded["peak"] < ddp["memory"]["peak"]
    kept = base["activations"]
    assert kept["full"] < kept["selective"] < kept["none"]


def test_fine_tuning(explained, command, workdir):
    """The model is that of init_from; gradients and optimizer state are those of the adapters alone."""
    text = ["data=text", "data.files=[book.txt]"]
    assert command("train", *text, "tokenizer=byte", "name=base", *SMALL).code == 0
    tuned = [*text, "init_from=runs/base", "lora.rank=2", "optimizer=adamw"]
    found = explained(*tuned)
    assert (found["model"]["d_model"], found["model"]["vocab_size"]) == (32, 257)
    each = 2 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)  # rank * (in + out) of the four matrices
    assert found["adapters"] == 2 * each
    assert (found["memory"]["gradients"], found["memory"]["optimizer"]) == (4 * 2 * each, 8 * 2 * each)
    assert not any("compute-optimal" in line for line in found["warnings"])
    result = command("explain", *tuned, "model.d_model=64")
    assert "model.d_model=64 contradicts init_from=runs/base, which has 32" in result.err
    assert "nowhere" in command("explain", *text, "init_from=nowhere").err


def test_rows_may_be_shorter_than_the_model_holds(explained, command, workdir):
    words = ["model=small", "data=text", "data.files=[book.txt]", "optimizer=adamw"]
    whole, short = explained(*words), explained(*words, "data.row_length=128")
    assert (short["tokens"], short["parameters"]) == (whole["tokens"] // 4, whole["parameters"])
    assert short["activations"]["none"] < whole["activations"]["none"] / 4 * 1.01
    assert short["flops_per_token"]["forward"] < whole["flops_per_token"]["forward"]
    refused = command("explain", *words, "data.row_length=1024").err
    assert refused == "error: data.row_length=1024 is more than model.max_seq_len=512\n"


def test_where_the_vocabulary_comes_from(explained, command, workdir):
    text = ["data=text", "data.files=[book.txt]"]
    assert explained(*text, "tokenizer.vocab_size=999")["model"]["vocab_size"] == 999
    characters = len(set((workdir / "book.txt").read_text(encoding="utf-8")))
    assert explained(*text, "tokenizer=char")["model"]["vocab_size"] == characters + 1
    (workdir / "tokenizer.json").write_text(Tokenizer.train_bpe([sentences(300)], 290).to_json(), encoding="utf-8")
    pretrained = ["tokenizer=pretrained", "tokenizer.name=tokenizer.json"]
    assert explained(*text, *pretrained)["model"]["vocab_size"] == 290
    assert explained(*text, *pretrained, "model.vocab_size=320")["vocabulary_from"] == "model.vocab_size"
    hub = ["data=hub", "data.name=somewhere/unknown"]
    assert explained(*hub)["epochs"] is None
    result = command("explain", *hub, "tokenizer=char")
    assert (
        result.err
        == "error: tokenizer=char: the characters of this data are known when it is read; set model.vocab_size\n"
    )


@pytest.mark.parametrize(("words", "warning"), [
    ("model.vocab_size=50257", "a vocabulary of 50,257 is no multiple of 64, slower on GPUs: model.vocab_size=50304"),
    ("model.d_model=104 model.n_heads=4", "model.d_model=104 is no multiple of 64"),
    ("model.d_ff=1000", "model.d_ff=1000 is no multiple of 64, slower on GPUs: 1024"),
    ("model.d_model=256 model.n_heads=4 model.d_head=36", "heads of width 36"),
    ("model.d_head=320", "heads of width 320"),
    ("trainer.max_steps=10", "tokens per parameter, where about 20 are compute-optimal: trainer.max_steps="),
    ("trainer.max_steps=100000", "the text is read about"),
], ids=str)  # fmt: skip
def test_warnings(explained, workdir, words, warning):
    common = ["model=small", "data=text", "data.files=[book.txt]", "tokenizer.vocab_size=512"]
    found = explained(*common, *words.split())["warnings"]
    assert any(warning in line for line in found), found
    assert sum("is no multiple" in line or "heads of width" in line for line in found) == (
        0 if "max_steps" in words else 1 if "d_model=104" not in words else 3
    )


def test_as_many_steps_as_it_advises_are_enough(explained, workdir):
    words = ["data=text", "data.files=[book.txt]"]
    line = next(w for w in explained(*words)["warnings"] if "compute-optimal" in w)
    steps = int(re.search(r"max_steps=(\d+)", line)[1])
    assert not any("compute-optimal" in w for w in explained(*words, f"trainer.max_steps={steps}")["warnings"])
    assert any("compute-optimal" in w for w in explained(*words, f"trainer.max_steps={steps - 1}")["warnings"])


@pytest.mark.parametrize("columns", [40, 80])
def test_tables_fit_terminals(command, workdir, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = command("explain", "data=text", "data.files=[book.txt]", "model=gpt2-xl", "data.batch_size=512")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= columns
    for word in ("parameters", "operations", "memory", "activations", "tokens per parameter", "a100-80gb"):
        assert any(line.lstrip().startswith(word) for line in lines), word
    assert "trainer.accumulate=" in result.out.replace("\n", "")


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_is_explained(explained, workdir, experiment):
    own = {"shakespeare_char": ["data.files=[book.txt]"], "names": ["data.files=[book.txt]"]}
    found = explained(f"experiment={experiment}", *own.get(experiment, []))
    assert math.isfinite(found["memory"]["peak"])


def test_mistakes_end_in_one_line(command, workdir):
    for words, parts in [
        ("gpu=abacus", ["gpu='abacus'", "h100"]),
        ("throughput=0", ["throughput=0"]),
        ("mfu=1.5", ["mfu=1.5"]),
        ("output=xml", ["output='xml'"]),
        ("data=text data.files=[gone.txt]", ["data.files: gone.txt does not exist"]),
        ("data=text data.files=[book.txt] data.val_files=[gone.txt]", ["data.val_files: gone.txt does not exist"]),
        ("tokenizer=pretrained tokenizer.name=gpt2", ["tokenizer.name=gpt2 is not on this machine", "vocab_size"]),
        ("model.n_heads=3 model.d_model=64", ["d_model=64"]),
        ("trainer.accumulate=9", ["trainer.accumulate=9"]),
        ("throughpt=3", ["did you mean throughput?"]),
    ]:
        result = command("explain", *words.split())
        assert result.code == 1
        assert len(result.err.splitlines()) == 1, result.err
        assert result.err.startswith("error: ")
        assert all(part in result.err for part in parts), result.err
