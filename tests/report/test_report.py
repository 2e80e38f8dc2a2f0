"""The report: its numbers, what it says of settings, what it refuses, and the page itself in Chromium."""

import html
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from minitransformer import ModelConfig, Tokenizer, Transformer, get_attention_weights, score
from minitransformer.cli import compose, default_settings, options
from minitransformer.explain import explain
from minitransformer.report import page as pages
from minitransformer.report.reading import attention, read, shown
from minitransformer.report.record import Record
from minitransformer.run.directory import (
    MODEL_FILE,
    add_metrics,
    add_sample,
    add_start,
    read_held_out,
    read_metrics,
    read_starts,
    save_held_out,
)
from minitransformer.run.models import load, save_model
from minitransformer.words import short
from tests.conftest import SMALL, as_a_user_without_rights, sentences, with_start

HOSTILE = "</script><script>window.hit = 1</script><b>\"'&amp; `${1}` {{ 7*7 }} 🦉 \x1b[31m\x00 \u202eevil\n"
HOSTILE += "<img src=x onerror=hit()>"
HOSTILE_SHOWN = HOSTILE.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\u202e", "\\u202e")
KINDS = ("data", "tokenizer", "optimizer", "schedule")


def make_run(path: Path, overrides=(), steps=(10, 20, 30), scale=1.0, model=None, tokenizer=None, text="") -> Path:
    """A run directory as training leaves it, with numbers that are known: at step s the loss is 100 scale / s."""
    composed = compose("train", ["data=text", "data.files=[book.txt]", *overrides])
    path.mkdir(parents=True)
    settings = asdict(OmegaConf.to_object(composed))
    (path / "config.yaml").write_text(OmegaConf.to_yaml(settings), encoding="utf-8")
    start = {"command": f"python train.py {HOSTILE}", "max_steps": 30, "parameters": 12_345}
    add_start(path, 0, start | {"model": "a model", "device": "cpu (2 threads)", "data": HOSTILE})
    for step in steps:
        speed = {"speed/tokens_per_s": 500.0, "speed/step_ms": 200.0, "speed/peak_memory_gb": 0.75}
        optim = {"optim/lr": 0.01 / step, "optim/grad_norm": float(step)}
        tokens, one = {"tokens": step * 100}, scale / step
        add_metrics(path, step, tokens | {"train/loss": 100 * one, **optim, **speed})
        add_metrics(path, step, tokens | {"val/loss": 110 * one, "val/bits_per_byte": 55 * one})
        add_sample(path, step, f"Once upon {step}\n{HOSTILE}")
    if model is not None:
        save_model(path / MODEL_FILE, model.config, model.state_dict(), tokenizer)
        save_held_out(path, [("", text)])
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train_bpe([sentences(300)], 300)


@pytest.fixture(scope="module", params=["BOS is EOS", "BOS is another"])
def words(request, tokenizer) -> Tokenizer:
    return tokenizer if request.param == "BOS is EOS" else with_start(tokenizer)


def make_model(tokenizer: Tokenizer, **settings) -> Transformer:
    torch.manual_seed(0)
    shape = dict(vocab_size=tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, init="gpt2")
    model = Transformer(ModelConfig.from_dict(shape | settings)).eval()
    with torch.no_grad():  # weights large enough for attention and losses that differ from place to place
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer) -> Path:
    """A run with a model, hostile texts everywhere, and its report."""
    path = make_run(
        tmp_path_factory.mktemp("runs") / "a <b>run &amp;", model=make_model(tokenizer), tokenizer=tokenizer,
        text=sentences(4) + HOSTILE + sentences(9),
    )  # fmt: skip
    pages.write([path], default_settings())
    return path


@pytest.fixture(scope="module")
def others(run) -> list[Path]:
    """Three runs, given from worst to best."""
    worst = make_run(run.parent / "worst", ["optimizer=adamw", "model.d_model=64"], scale=3)
    middle = make_run(run.parent / "middle", ["seed=3"], steps=(10, 20), scale=1)
    return [worst, middle, run]


# Numbers ---------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_score(words):
    model, text = make_model(words), "Ann sees the cat.\n"
    (pieces,) = read(model, words, [("", text)])
    expected = score(model, words, text)
    assert [piece.text for piece in pieces] == [words.decode([i]) for i in expected.tokens[:-1]]
    assert [piece.nats for piece in pieces] == pytest.approx([-p for p in expected.log_probs[:-1]], rel=1e-4)


def test_the_bytes_of_a_character_are_one_piece():
    tokenizer = Tokenizer.bytes()
    model = make_model(tokenizer)
    (pieces,) = read(model, tokenizer, [("", "aé🦉b")])
    nats = [-p for p in score(model, tokenizer, "aé🦉b").log_probs]
    assert [piece.text for piece in pieces] == ["a", "é", "🦉", "b"]
    expected = [nats[0], sum(nats[1:3]), sum(nats[3:7]), nats[7]]
    assert [piece.nats for piece in pieces] == pytest.approx(expected, rel=1e-4)
    assert [bool(piece.guess) for piece in pieces] == [True, False, False, True]


def test_a_long_text_is_read_in_pieces_each_with_the_token_before_it(words):
    """Worked out piece by piece, from the definition: no token is left out, none read twice."""
    model, text = make_model(words, max_seq_len=16), "Ann sees the cat.\n" * 9
    ids = [words.bos_id, *words.encode(text)]
    expected = []
    for start in range(0, len(ids) - 1, 16):
        part = torch.tensor([ids[start : start + 17]])
        with torch.no_grad():
            log_probs = model(part[:, :-1]).double().log_softmax(-1)[0]
        expected += [-log_probs[i, target].item() for i, target in enumerate(part[0, 1:])]
    (pieces,) = read(model, words, [("", text)])
    assert [piece.nats for piece in pieces] == pytest.approx(expected, rel=1e-4)


def test_texts_do_not_see_each_other_and_prefixes_have_no_loss(words):
    model = make_model(words)
    alone = read(model, words, [("", "Ann sees the dog.")])[0]
    _, second, third = read(model, words, [("", "Bob."), ("", "Ann sees the dog."), ("What is it? ", "Ann draws.")])
    assert [piece.nats for piece in second] == pytest.approx([piece.nats for piece in alone], rel=1e-4)
    seen = [piece.text for piece in third if piece.nats is None]
    assert "".join(seen) == "What is it? "
    assert all(piece.nats > 0 for piece in third[len(seen) :])
    assert third[len(seen) - 1].guess == ""


def test_the_guess_is_the_likeliest_token(words):
    model = make_model(words)
    pieces = read(model, words, [("", "Ann sees")])[0]
    with torch.no_grad():
        p = model(torch.tensor([[words.bos_id]])).softmax(-1)[0, 0]
    assert pieces[0].guess == shown(words, int(p.argmax()))
    assert pieces[0].probability == pytest.approx(p.max().item(), rel=1e-4)


def test_maps_are_the_weights_of_the_heads_with_the_lowest_entropy(words):
    model, text = make_model(words, n_layers=3), sentences(5)
    names, maps = attention(model, words, [("", "Bob."), ("", text)])
    ids = torch.tensor([[words.bos_id, *words.encode(text)][: len(names)]])
    assert len(names) == 20
    assert [found.layer for found in maps] == [0, 0, 1, 1, 2, 2]
    for layer in range(3):
        entropy = []
        for head in range(4):
            w = get_attention_weights(model, ids, layer, head)[0].double()
            entropy.append(-(w * w.clamp(min=1e-30).log()).sum().item())
        chosen = [found for found in maps if found.layer == layer]
        assert {found.head for found in chosen} == set(np.argsort(entropy)[:2].tolist())
        for found in chosen:
            torch.testing.assert_close(found.weights, get_attention_weights(model, ids, layer, found.head)[0])


def test_numbers_of_a_record(run):
    record = Record.read(run)
    assert record.steps == 30
    assert record.seconds == pytest.approx(30 * 0.2)
    assert record.tokens_per_s == pytest.approx(3000 / 6)
    assert record.last("val/loss") == pytest.approx(110 / 30)
    assert record.most("train/loss") == 10
    x, y = record.curve("val/loss", "tokens")
    assert x.tolist() == [1000, 2000, 3000]
    assert y.tolist() == pytest.approx([11, 5.5, 110 / 30])
    assert record.last("nothing") is None


def test_the_best_stands_beside_the_last_where_it_is_another(tmp_path):
    path = make_run(tmp_path / "run")
    assert "the best, after step" not in str(pages.tiles(Record.read(path)))
    add_metrics(path, 40, {"tokens": 4000, "val/loss": 9.85, "val/bits_per_byte": 4.9})
    tiles = {name: value for name, value, _ in pages.tiles(Record.read(path))}
    assert (tiles["validation loss"], tiles["the best, after step 30"]) == ("9.8500", f"{110 / 30:.4f}")


def test_costs_by_hand(tmp_path, tokenizer):
    """A model small enough to count: d 4, one layer, one head, d_ff 8, 300 ids, rows of 2 tokens."""
    shape = dict(d_model=4, n_layers=1, n_heads=1, d_ff=8, max_seq_len=2, position="none")
    model = make_model(tokenizer, **shape)
    path = make_run(tmp_path / "run", ["optimizer=adamw"], model=model, tokenizer=tokenizer, text="Ann")
    matrices, norms, ids = 4 * 4 * 4 + 2 * 4 * 8, 3 * 4, tokenizer.vocab_size
    numbers = matrices + norms + 2 * 4 * ids
    per_token = 3 * (2 * (matrices + 4 * ids) + 4 * 4 * 2)
    parameters, work, memory = pages.costs(Record.read(path), model)
    assert parameters == ("parameters", f"{numbers:,}", f"{numbers:,} in the model file")
    assert work[1] == f"{per_token / 1000:.3g} kFLOP a token, {per_token * 3000 / 1e6:.3g} MFLOP in all"
    assert work[2] == f"{per_token * 500 / 1e6:.3g} MFLOP/s over 6 s"
    assert f" at most: {numbers * 4 * 4 / 1e3:.3g} kB of weights, gradients and optimizer" in memory[1]
    assert memory[2] == "750 MB at most, Python and torch among it"


@pytest.mark.parametrize("settings", [
    [], ["optimizer=adamw"], ["trainer.accumulate=4"], ["trainer.gradient_checkpointing=full"], ["callbacks.ema=0.9"],
    ["trainer.gradient_checkpointing=selective", "trainer.checkpoint_blocks=2"], ["trainer.precision=bf16-true"],
    ["trainer.precision=bf16-mixed", "data.row_length=32"], ["trainer=fsdp"], ["trainer=ddp", "trainer.devices=2"],
    ["init_from=.", "lora.rank=4"],
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("older", [False, True])
def test_memory_is_what_explain_says(tmp_path, settings, older):
    settings = [*settings, "data.batch_size=16", "trainer.device=cpu"]
    path = make_run(tmp_path / "run", settings)
    record = Record.read(path)
    precision, ranks = record.settings["trainer.precision"], record.settings["trainer.devices"]
    used = "32-true" if precision == "auto" else precision
    if older:
        record.starts[-1]["device"] = f"{f'{ranks} x ' * (ranks > 1)}cpu (2 threads), precision {used}, torch 2"
    else:
        record.starts[-1] |= {"device_type": "cpu", "precision": used, "device": "a device"}
    shape = ["model.vocab_size=300", "model.d_model=32", "model.n_layers=2", "model.n_heads=4", "model.max_seq_len=64"]
    asked = OmegaConf.to_object(compose("explain", ["data=stdlib", *settings, *shape]))
    expected, model = explain(asked)["memory"], Transformer(asked.model)
    rows, memory = pages.memory_of(record, model.config)
    assert {"rows": rows} | asdict(memory) == {name: n for name, n in expected.items() if name != "precision"}
    said = pages.costs(record, model)[2]
    assert said[1].startswith(f"{short(expected['peak'], 'B')} at most: ")
    assert f" of activations of {expected['rows']} rows" in said[1]
    assert said[2] == "750 MB at most, Python and torch among it"


@pytest.mark.parametrize(("value", "words"), [
    (None, "null"), (True, "true"), (0, "0"), (False, "false"), (1, "1"), (0.1, "0.1"), ("", ""), ({}, "{}"),
    (["a", None, [1]], "[a,null,[1]]"),
])  # fmt: skip
def test_settings_as_they_are_written(value, words):
    assert pages.plain(value) == words


@pytest.mark.parametrize(("texts", "shared"), [
    (["def a(", "def b("], "def "), (["one two", "one two"], "one "), (["ab", "cd"], ""), (["alone"], ""), ([], ""),
])  # fmt: skip
def test_what_samples_have_in_common(texts, shared):
    assert pages.common(texts) == len(shared)


# Settings --------------------------------------------------------------------------------------------------------

DATA = {"text": "data.files=[a.txt]", "jsonl": "data.files=[a]", "csv": "data.files=[a]", "parquet": "data.files=[a]",
        "hub": "data.name=x"}  # fmt: skip


def changed(path: Path, *overrides: str) -> dict[str, tuple]:
    """What the record of a run with these settings says, name by name."""
    composed = compose("train", list(overrides))
    (path / "config.yaml").write_text(OmegaConf.to_yaml(asdict(OmegaConf.to_object(composed))))
    add_metrics(path, 1, {"train/loss": 1.0})
    return {name: (value, default) for name, value, default in Record.read(path).changed(default_settings())}


def test_the_default_run_changes_nothing(tmp_path):
    assert changed(tmp_path) == {}


def test_what_was_set_is_what_is_shown(tmp_path):
    found = changed(tmp_path, "seed=3", "model.attention.pattern=[window,full]", "optimizer.lr=1e-4", "name=mine",
                    "logger=none", "callbacks.sample_prompt=\\${x}")  # fmt: skip
    assert found == {
        "seed": (3, 0),
        "model.attention.pattern": (["window", "full"], ["full"]),
        "optimizer.lr": (1e-4, 0.014),
        "callbacks.sample_prompt": ("${x}", None),
    }


@pytest.mark.parametrize("option", [
    f"{group}={name}" for group in KINDS for name in options(group) if (group, name) != ("tokenizer", "pretrained")
])  # fmt: skip
def test_another_choice_is_named_and_its_own_defaults_are_not(option, tmp_path):
    group, name = option.split("=")
    found = changed(tmp_path, option, *([DATA[name]] if name in DATA else []))
    usual = {"data": "stdlib", "tokenizer": "bpe", "optimizer": "muon", "schedule": "wsd"}[group]
    assert found.pop(group, None) == (None if name == usual else (name, usual))
    # What the option's own YAML file sets beside the defaults of its kind.
    yaml = {"data": {"data.val_fraction"}}
    assert set(found) <= yaml.get(group, set()) | {DATA.get(name, "").split("=")[0]}, found


def test_a_run_of_an_older_version_names_its_choices(tmp_path):
    """It wrote them beside its config, as words of its classes."""
    composed = OmegaConf.to_object(compose("train", ["data=text", "data.files=[a.txt]", "schedule=inverse_sqrt"]))
    settings = asdict(composed)
    for group in ("data", "optimizer", "schedule", "logger"):
        del settings[group]["kind"]
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(settings))
    kinds = {"data": "files", "tokenizer": "bpe", "optimizer": "muon", "schedule": "inversesqrt"}
    add_start(tmp_path, 0, {"kinds": kinds})
    add_metrics(tmp_path, 1, {"train/loss": 1.0})
    record = Record.read(tmp_path)
    assert {group: record.settings.get(group) for group in kinds} == kinds | {
        "data": "text", "schedule": "inverse_sqrt"
    }  # fmt: skip
    assert record.changed(default_settings()) == [
        ("data", "text", "stdlib"), ("schedule", "inverse_sqrt", "wsd"), ("data.files", ["a.txt"], [])
    ]  # fmt: skip


# Training --------------------------------------------------------------------------------------------------------


def with_report(*words: str) -> list[str]:
    small = [word for word in SMALL if not word.startswith("callbacks.report")]
    return ["data=text", "data.files=[book.txt]", "tokenizer.vocab_size=300", "name=small", *small, *words]


def test_training_ends_with_a_report_whose_numbers_are_those_of_the_metrics(command, workdir, browser_page):
    result = command("train", *with_report())
    assert result.code == 0, result.err
    run = workdir / "runs" / "small"
    assert "the run in one page" in result.out
    metrics = read_metrics(run)
    page = browser_page(run / "report.html")
    last = {name: value for line in metrics for name, value in line.items()}
    tiles = dict(reversed(tile.split("\n")) for tile in page.locator(".tile").all_inner_texts())
    assert tiles["validation loss"] == f"{last['val/loss']:.4f}"
    assert tiles["bits per byte"] == f"{last['val/bits_per_byte']:.4f}"
    assert tiles["tokens"] == str(last["tokens"])
    total = sum(p.numel() for p in load(run)[0].parameters())
    assert page.locator(".tile", has_text="parameters").get_attribute("data-tip") == f"{total:,}"
    drawn = {line["name"]: line for chart in charts(page) for line in chart["lines"]}
    for name, metric in {"train": "train/loss", "val": "val/loss", "gradient norm": "optim/grad_norm"}.items():
        logged = [(line["step"], line[metric]) for line in metrics if metric in line]
        assert list(zip(drawn[name]["x"], drawn[name]["y"], strict=True)) == [
            (step, pytest.approx(value, rel=1e-5)) for step, value in logged
        ]
    text = "".join(prefix + text for prefix, text in read_held_out(run))
    assert text in (workdir / "book.txt").read_text(encoding="utf-8")
    assert page.locator(".text").inner_text().replace("↵", "").strip() == text.strip()
    nats = [float(tip.split()[0]) for tip in page.locator(".t").evaluate_all("all => all.map(e => e.dataset.tip)")]
    assert np.mean(nats) > 1
    command_shown = page.locator(".command").inner_text()
    assert command_shown.startswith("python ")
    assert "name=" not in command_shown
    assert "model.d_model=32" in command_shown
    assert [(s["device_type"], s["precision"]) for s in read_starts(run)] == [("cpu", "32-true")]
    # Going on keeps both commands, and the report follows.
    assert command("train", *with_report("resume=auto", "trainer.max_steps=8")).code == 0
    page = browser_page(run / "report.html")
    assert "8 steps" in page.locator(".kind").inner_text()
    assert "After step 6 it went on with" in page.inner_text("main")
    assert page.locator(".command").count() == 2


def charts(page) -> list[dict]:
    return [json.loads(found) for found in page.locator(".chart").evaluate_all("all => all.map(e => e.dataset.hover)")]


def test_a_drawing_that_fails_loses_nothing(command, workdir, monkeypatch):
    def fail(*_):
        raise RuntimeError("no\nink")

    monkeypatch.setattr(pages, "write", fail)
    result = command("train", *with_report())
    assert result.code == 0, result.err
    assert result.out.count("no report was drawn: no ink\n") == 1
    assert load(workdir / "runs" / "small")
    assert not (workdir / "runs" / "small" / "report.html").exists()


def test_a_run_that_is_stopped_is_drawn_too(command, workdir, monkeypatch):
    from minitransformer.training.callbacks import Checkpointer

    def stop(self, trainer, *_):
        if trainer.global_step == 4:
            self.deadline = 0

    monkeypatch.setattr(Checkpointer, "on_train_batch_end", stop)
    result = command("train", *with_report())
    assert result.code == 0
    assert "go on with" in result.out
    assert "stopped after 4 of 6 steps" in (workdir / "runs" / "small" / "report.html").read_text(encoding="utf-8")


# The page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_fit_and_follow_the_scheme(width, scheme, run, others, browser_page):
    """No error, no request (the fixture's part), no scrolling sideways; ink and paper apart in both schemes."""
    for file in (run / "report.html", pages.write(others, default_settings())):
        assert file.stat().st_size < 5e6
        page = browser_page(file, width=width, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        outside = """[...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll, svg")
                     && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML)"""
        assert page.evaluate(outside) == []
        ink, paper = (
            sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3])) / 3
            for name in ("color", "backgroundColor")
        )
        assert (ink < 80 and paper > 200) if scheme == "light" else (ink > 200 and paper < 80)
        line = page.locator(".plot svg path[style*='--c']").first.evaluate("e => getComputedStyle(e).stroke")
        assert line.startswith("rgb("), "matplotlib's colours have become the page's"


def test_texts_stay_texts(run, browser_page):
    page = browser_page(run / "report.html")
    assert page.locator("article pre").first.inner_text() == f"Once upon 30\n{HOSTILE_SHOWN}"
    assert page.locator("h1").inner_text() == "a <b>run &amp;"
    assert HOSTILE_SHOWN.split("\n")[0] in page.locator(".text").inner_text()
    assert page.locator(".command").inner_text() == f"python train.py {HOSTILE_SHOWN}"
    assert " ".join(HOSTILE_SHOWN.split()) in page.locator("dl").inner_text()
    assert page.evaluate("[typeof window.hit, document.scripts.length]") == ["undefined", 1]
    assert page.locator("main b:not(.tile b):not(.note b), main img").count() == 0


def test_the_page_may_not_ask_for_anything(run, browser_page):
    """Were a text to become HTML all the same, the browser would still not send anything."""
    page = browser_page(run / "report.html")
    blocked = """() => new Promise(done => {
        addEventListener("securitypolicyviolation", e => done(e.blockedURI), {once: true});
        setTimeout(() => done("nothing was refused"), 2000);
        document.body.append(Object.assign(new Image(), {src: "http://localhost:9/x.png"}));
    })"""
    assert page.evaluate(blocked) == "http://localhost:9/x.png"
    browser_page.wrong.clear()  # the refusal is in the console


def test_pointing_at_a_curve_names_its_points(run, browser_page):
    """Where matplotlib drew the markers of the validation loss, its three points are named, and the cursor stands."""
    page = browser_page(run / "report.html")
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    middle = (
        "all => all.map(e => e.getBoundingClientRect()).map(box => [box.x + box.width / 2, box.y + box.height / 2])"
    )
    markers = sorted(plot.locator("svg use").evaluate_all(middle))
    for step, (x, y) in zip((10, 20, 30), markers, strict=True):
        page.mouse.move(x + 3, y)
        train, val = f"{100 / step:.5g}", f"{110 / step:.5g}"
        assert page.locator("#tip").inner_text() == f"train {train} at step {step}\nval {val} at step {step}"
        assert page.locator(".cursor").first.bounding_box()["x"] == pytest.approx(x, abs=1.5)
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_pointing_at_a_token_and_at_a_square(run, browser_page):
    model, tokenizer = load(run)
    page = browser_page(run / "report.html")
    token = page.locator(".t").nth(1)
    token.hover()
    expected = read(model, tokenizer, read_held_out(run))[0][1]
    said = page.locator("#tip").inner_text()
    assert said.startswith(f"{expected.nats:.2f} nats, probability {math.exp(-expected.nats):.2%}")
    assert said.endswith(f"likeliest: {expected.guess} ({expected.probability:.0%})")
    names, maps = attention(model, tokenizer, read_held_out(run))
    for number, found in enumerate(maps):
        assert page.locator(".maps h3").nth(number).inner_text() == f"layer {found.layer}, head {found.head}"
        before, itself = (found.weights.diagonal(-1).mean(), found.weights.diagonal()[1:].mean())
        means = page.locator(".maps .legend").nth(number).inner_text()
        assert means.startswith(f"before {before:.2f}\nitself {itself:.2f}\nfirst ")
        image = page.locator(".map").nth(number).locator("image")
        image.scroll_into_view_if_needed()
        box = image.bounding_box()
        for row, column in ((0, 0), (7, 3), (19, 18)):
            side = box["width"] / len(names)
            page.mouse.move(box["x"] + (column + 0.5) * side, box["y"] + (row + 0.5) * side)
            weight = f"{found.weights[row, column]:.3f}"
            assert page.locator("#tip").inner_text() == f"{names[row]} looks at {names[column]}: {weight}"


def test_linear_attention_has_no_maps_and_says_so(tmp_path, tokenizer):
    model = make_model(tokenizer, attention={"kind": "elu"})
    run = make_run(tmp_path / "run", model=model, tokenizer=tokenizer, text="Ann sees.")
    text = pages.write([run], default_settings()).read_text(encoding="utf-8")
    assert "attention is linear (model.attention.kind=elu)" in text
    assert 'class="map"' not in text
    assert text.count('class="t"') > 1


def test_tokens_under_maps_stay_what_they_are(tmp_path):
    """Dollars are no formula, nor is a colour's name a colour, nor a bracket a tag; labels show them in their order."""
    tokenizer = Tokenizer.bytes()
    run = make_run(tmp_path / "run", model=make_model(tokenizer), tokenizer=tokenizer, text='$\\frac<b>&"$ #0000f0')
    svg = pages.write([run], default_settings()).read_text(encoding="utf-8").split('class="map"')[1].split("</svg>")[0]
    labels = [html.unescape(found) for found in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]
    assert labels[1:20] == list('$\\frac<b>&"$␣#0000f')
    assert labels[1:20] == labels[21:40]


def test_a_model_that_came_to_nothing_is_said_so(tmp_path, tokenizer, browser_page):
    model = make_model(tokenizer)
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    run = make_run(tmp_path / "run", model=model, tokenizer=tokenizer, text="Ann sees.")
    page = browser_page(pages.write([run], default_settings()))
    assert "outputs on held-out text are not finite" in page.inner_text("main")
    assert page.locator(".t, .map").count() == 0


def test_a_comparison_sorts_and_shows_what_differs(others, browser_page):
    page = browser_page(pages.write(others, default_settings()))
    rows = [row.split("\t") for row in page.locator(".numbers tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["a <b>run &amp;", "middle", "worst"]
    assert [row[1] for row in rows] == [f"{55 / 30:.4f}", f"{55 / 20:.4f}", f"{55 * 3 / 30:.4f}"]
    assert [row[2] for row in rows] == [f"{110 / 30:.4f}", f"{110 / 20:.4f}", f"{110 * 3 / 30:.4f}"]
    assert rows[1][4:7] == ["2 k", "20", "4 s"]
    table = page.locator("section", has_text="What differs").locator("tbody tr").all_inner_texts()
    differing = dict(row.replace("\u200b", "").split("\t", 1) for row in table)
    assert differing["optimizer"] == "muon\tmuon\tadamw"
    assert differing["model.d_model"] == "144\t144\t64"
    assert differing["seed"] == "0\t3\t0"
    assert "trainer.max_steps" not in differing
    legend = page.locator(".chart").first.locator(".legend > span").all_inner_texts()
    assert legend == ["a <b>run &amp;", "middle", "worst"]
    assert charts(page)[0]["lines"][2]["y"] == pytest.approx([16.5, 8.25, 5.5])
    assert page.locator("article pre").first.inner_text() == f"Once upon 30\n{HOSTILE_SHOWN}"


def test_long_runs_stay_small(tmp_path):
    """Sixty thousand logged moments of three runs, with a spike that stays in the drawing."""
    runs = [make_run(tmp_path / f"{number}", steps=()) for number in range(3)]
    noise = np.random.default_rng(0).normal(3, 0.2, 20_000).tolist()
    noise[12_345] = 50.0
    for run in runs:
        lines = (
            json.dumps({"step": 10 * i + 10, "tokens": 1000 * i, "train/loss": x, "val/loss": x, "val/bits_per_byte": x,
                        "optim/lr": 0.01, "optim/grad_norm": x, "speed/tokens_per_s": 1000 * x, "speed/step_ms": 1.0})
            for i, x in enumerate(noise)
        )  # fmt: skip
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        for step in range(300):
            add_sample(run, step, sentences(300))
    assert pages.write(runs, default_settings()).stat().st_size < 5e6
    assert pages.write(runs[:1], default_settings()).stat().st_size < 5e6
    record = Record.read(runs[0])
    svg = pages.chart("loss", [pages.Line("train", *record.curve("train/loss"))]).svg
    path = max(re.findall(r'd="([^"]+)"[^>]*--c0', svg), key=len)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]
    assert min(heights) < 20 < 130 < np.median(heights)


# What is refused, and what is missing ----------------------------------------------------------------------------


def refused(result, *words):
    assert result.code == 1, result.out
    assert len(result.err.splitlines()) == 1, result.err
    assert all(word in result.err for word in words), result.err


def test_mistakes_end_in_one_line(command, workdir):
    refused(command("report"), "no run in", "python train.py")
    refused(command("report", "runs/none"), "runs=runs/none does not exist")
    (workdir / "notes").mkdir()
    refused(command("report", "notes"), "notes is not a run", "config.yaml")
    refused(command("report", "book.txt"), "runs=book.txt is not a run: it is a file")
    run = make_run(workdir / "runs" / "one", steps=())
    refused(command("report", "runs/one"), "metrics.jsonl holds no metrics", "resume")
    refused(command("report", "runs/one", "runs/none"), "metrics.jsonl holds no metrics")
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1}\n{"step": 2, "tr\n')
    refused(command("report", "runs/one"), "metrics.jsonl is damaged")
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1}\n{"step": 2, "tr')  # half a line of a kill
    assert command("report", "runs/one").code == 0
    refused(command("report", "runs/one", "out=/proc/report.html"), "cannot write /proc/report.html: ")
    refused(command("report", "runs/one", "out=notes"), "out=notes is a directory", "out=notes/report.html")
    refused(command("report", "runs/one", "outs=x"), "outs is not a setting; did you mean out?")
    (run / "config.yaml").write_text("a: [")
    refused(command("report", "runs/one"), "config.yaml cannot be read")


def test_a_read_only_run(workdir, capsys):
    """Its page goes to the working directory, unless its place was named."""
    run = make_run(workdir / "runs" / "one")
    run.chmod(0o555)
    try:
        assert as_a_user_without_rights(lambda: pages.write([run], default_settings())) == []
        assert f"{run} is read-only; the page goes to the working directory" in capsys.readouterr().out
        assert "training run" in Path("report.html").read_text(encoding="utf-8")
        (error,) = as_a_user_without_rights(lambda: pages.write([run], default_settings(), run / "other.html"))
        assert str(error) == f"cannot write {run / 'other.html'}: Permission denied"
    finally:
        run.chmod(0o755)


def test_an_old_run_shows_what_there_is(command, workdir):
    run = make_run(workdir / "runs" / "old")
    for name in ("starts.jsonl", "samples.txt"):
        (run / name).unlink()
    result = command("report")
    assert (result.code, result.out) == (0, "runs/old/report.html\n"), result.err
    text = (run / "report.html").read_text(encoding="utf-8")
    for words in ("holds no checkpoint", "Nothing was sampled", "did not keep its command"):
        assert words in text
    model = make_model(Tokenizer.bytes())
    save_model(run / MODEL_FILE, model.config, model.state_dict(), Tokenizer.bytes())
    assert command("report", "runs/old", "out=o.html").out == "o.html\n"
    assert "kept no held-out text" in Path("o.html").read_text(encoding="utf-8")


def test_runs_are_found(command, workdir):
    """By words, by a folder of runs, by what looks like a setting; each once."""
    for name in ("sweep/0", "sweep/1", "it's a=b [x],{y}"):
        make_run(workdir / "runs" / name)
    make_run(workdir / "runs" / "sweep" / "2", steps=())
    result = command("report", "runs/sweep")
    assert (result.code, result.out) == (0, "runs/sweep/comparison.html\n"), result.err
    assert result.err.count("\n") == 1
    assert "runs/sweep/2/metrics.jsonl holds no metrics" in result.err
    assert "2 training runs" in Path("runs/sweep/comparison.html").read_text(encoding="utf-8")
    result = command("report", "runs/it's a=b [x],{y}", "runs/sweep/0", "runs/sweep/../sweep/0", "out=c.html")
    assert (result.code, result.out) == (0, "c.html\n"), result.err
    assert "2 training runs" in Path("c.html").read_text(encoding="utf-8")
    assert command("report", "runs/sweep/0", "runs/sweep/1").out == "runs/sweep/comparison.html\n"


def test_a_report_needs_neither_lightning_nor_a_display():
    code = (
        "import sys; import minitransformer.report.page; "
        "print(sorted({'lightning', 'wandb', 'datasets', 'matplotlib.pyplot', 'pandas'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
