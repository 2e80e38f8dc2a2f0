"""What the page is made of, without a browser; and the command that writes it."""

import base64
import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from minitransformer import Tokenizer
from minitransformer.lab import run as lab
from minitransformer.lab.config import LabConfig
from minitransformer.lab.page import (
    BUDGET,
    MAX_BYTES,
    affordable,
    check_size,
    example,
    exhibit,
    page,
    page_bytes,
    visible,
)
from minitransformer.model.config import ModelConfig
from minitransformer.run.models import save_model
from tests.conftest import ROOT, as_a_user_without_rights, sentences
from tests.model.models import make

BYTES = Tokenizer.bytes()


def data_of(html: str) -> dict:
    """As a browser finds it: up to the first end of a script."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def numbers(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"flies", "flies"),
        (b" flies", "␣flies"),
        (b"\n\t\r", "↵⇥⟨0D⟩"),
        (b"\x00\x1b\x7f", "⟨00⟩⟨1B⟩⟨U+007F⟩"),
        ("李🦉".encode(), "李🦉"),
        ("🦉".encode()[:2], "⟨F0⟩⟨9F⟩"),
        (b" \xf0", "␣⟨F0⟩"),
        ("\u202e\u200b\xa0".encode(), "⟨U+202E⟩⟨U+200B⟩⟨U+00A0⟩"),
        ("\u0301".encode(), "◌\u0301"),
        (b"<b>&amp;\"'", "<b>&amp;\"'"),
    ],
)
def test_every_token_can_be_seen(raw, shown):
    assert visible(raw) == shown


def test_the_textbook_example_is_the_table_in_readme():
    one = example()
    layer = one["layers"][0]
    q, k, weights = (numbers(layer[name]) for name in ("q", "k", "weights"))
    scores = q[0, 1] @ k[0].T
    assert scores.tolist() == [0, 6, 0, 0, 9]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    line = re.search(r"^\| softmax\(scores / sqrt\(d_k\)\) \|(.*)\|$", readme, re.M)[1]
    assert [f"{w:.2f}" for w in weights[0, 1]] == [cell.strip() for cell in line.split("|")]
    assert one["tokens"] == ["time", "flies", "like", "an", "arrow"]


def test_nothing_in_a_prompt_ends_the_data():
    prompt = "</script><script>alert(1)</script><!-- ]]> \u2028 \\ \" ' 🦉 \x00"
    html = page([exhibit(make(vocab_size=257, max_seq_len=128), BYTES, prompt, "</title>", explain=0)])
    assert html.count("</script>") == 2
    one = data_of(html)["exhibits"][0]
    assert one["prompt"] == prompt
    assert one["name"] == "</title>"
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert "default-src 'none'" in html


@pytest.mark.parametrize("position", ["rotary", "shaw"])
@pytest.mark.parametrize("explain", [0, 2])
def test_the_size_of_a_page_is_known_before(position, explain):
    model = make(position, vocab_size=257, n_layers=3, n_kv_heads=2, d_head=24)
    one = exhibit(model, BYTES, "a" * 15, "x", explain=explain)
    held = sum(len(x) for x in re.findall(r'"data": "([^"]*)"', json.dumps(one)))
    assert page_bytes(model.config, 16, explain) == pytest.approx(held, rel=0.15)


def test_a_prompt_that_makes_too_large_a_page_names_the_length_that_fits():
    config = ModelConfig(vocab_size=257, d_model=768, n_layers=12, n_heads=12, max_seq_len=1024)
    with pytest.raises(
        ValueError, match=r"has 1000 tokens .* 12 layers of 12 heads would have .* MB; shorten it to"
    ) as e:
        check_size(config, 1000, 3)
    most = int(str(e.value).split()[-1])
    check_size(config, most, 3)
    assert page_bytes(config, most, 3) <= MAX_BYTES < page_bytes(config, most + 1, 3)


@pytest.mark.parametrize(
    ("prompt", "place", "said"),
    [
        ("", {}, "prompt is empty"),
        ("a" * 64, {}, "the prompt has 65 tokens with its start token; the model holds 64"),
        ("a", {"layer": 2}, "layer=2 does not exist; the model has layers 0 to 1"),
        ("a", {"head": -1}, "head=-1 does not exist; the model has heads 0 to 3"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(prompt, place, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        exhibit(make(vocab_size=257), BYTES, prompt, "x", **place)


def test_only_as_many_places_are_explained_as_half_a_minute_allows():
    small = ModelConfig(vocab_size=257, d_model=64, n_layers=2)
    assert affordable(small, 100, 3) == 100
    gpt2 = ModelConfig(vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_seq_len=1024)
    assert affordable(gpt2, 1000, 3) == 1
    # 12 layers of 12 * 768^2 parameters and a head of 50257 * 768: 2 operations each for a token forward, 2 backward,
    # for 4 targets at 32 points. So 63 tokens are read, enough for the last places of 20 + 19 + 18 tokens.
    assert BUDGET // (4 * (12 * 12 * 768**2 + 50257 * 768) * 4 * 32) == 63
    assert affordable(gpt2, 20, 3) == 3
    one = exhibit(make(vocab_size=257), BYTES, "abca", "x", explain=1, explain_places=2)
    assert [bool(found["targets"]) for found in one["explained"]] == [False, False, False, True, True]


def test_attributions_are_of_likely_tokens_and_of_the_one_that_came():
    one = exhibit(make(vocab_size=257), BYTES, "abca", "x", explain=2)
    lens = one["lens"]["ids"][-1]
    for i, found in enumerate(one["explained"]):
        came = one["ids"][i + 1 : i + 2]
        assert found["targets"] == list(dict.fromkeys(lens[i][:2] + came))
        assert numbers(found["values"]).shape == (len(found["targets"]), i + 1)
    assert len(one["explained"]) == 5


# The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(workdir):
    """A run directory with a small model in it."""
    model, tokenizer = make(vocab_size=300), Tokenizer.train_bpe([sentences(50)], 300)
    path = workdir / "runs" / "mine"
    save_model(path / "model.safetensors", model.config, model.state_dict(), tokenizer)
    return path


def test_help_names_the_command_as_it_is_typed(command):
    result = command("lab", "--help")
    assert "python -m minitransformer.lab prompt=" in result.out
    assert "explain_places: null" in command("lab", "--cfg", "job").out


def test_the_command_writes_beside_the_model_and_says_where(command, run_dir):
    result = command("lab", "checkpoint=runs/mine", 'prompt=Ann sees "it"', "explain=0", "layer=1", "head=3")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("runs/mine/lab.html: ")
    one, two = data_of((run_dir / "lab.html").read_text(encoding="utf-8"))["exhibits"]
    assert one["prompt"] == 'Ann sees "it"'
    assert one["first"] == {"layer": 1, "head": 3, "query": len(one["tokens"]) - 1}
    assert two["name"] == "Textbook example"
    file = command("lab", "checkpoint=runs/mine/model.safetensors", "explain=0", "out=here/page.html")
    assert file.out.startswith("here/page.html: ")
    example_only = command("lab", "example=true")
    assert example_only.out.startswith("lab.html: 5 tokens")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prompt="], "prompt is empty"),
        (["prompt=\udcff\udcfe"], "the text is not UTF-8 at character 0"),
        (["layer=7"], "layer=7 does not exist; the model has layers 0 to 1"),
        (["head=4"], "head=4 does not exist; the model has heads 0 to 3"),
        (["prompt=" + 80 * "word "], "the model holds 64"),
        (["checkpoint=runs/other"], "checkpoint=runs/other does not exist"),
        (["out=runs"], "out=runs is a directory"),
        (["explain=-1"], "explain=-1"),
        (["explain_places=0"], "explain_places=0"),
        (["explain_places=2"], "explain_places=2 cannot go with explain=0"),
        (["port=9000"], "port=9000 is for serve=true"),
        (["example=true"], "not checkpoint, explain"),
        (["port=70000"], "port=70000 is too large"),
        (["queri=1"], "queri is not a setting"),
    ],
)
def test_wrong_input_ends_in_one_line(command, run_dir, words, said):
    result = command("lab", "checkpoint=runs/mine", "explain=0", *words)
    assert result.code == 1
    assert said in result.err
    assert result.err.count("\n") == 1
    assert not (run_dir / "lab.html").exists()


def test_linear_attention_shows_all_but_the_softmax(command, workdir):
    model = make(vocab_size=257, kind="elu")
    save_model(workdir / "linear.safetensors", model.config, model.state_dict(), BYTES)
    assert command("lab", "checkpoint=linear.safetensors", "prompt=abab").code == 0
    one = data_of((workdir / "lab.html").read_text(encoding="utf-8"))["exhibits"][0]
    assert one["linear"]
    assert "Linear attention (elu) has no softmax" in one["notes"]["project"]
    assert {"rollout", "measures", "lens", "explained"} <= set(one)


def test_a_read_only_run_directory(run_dir, workdir, capsys):
    run_dir.chmod(0o555)
    try:
        config = LabConfig(checkpoint="runs/mine", prompt="Ann", explain=0)
        assert as_a_user_without_rights(lambda: lab.run(config)) == []
        said = capsys.readouterr().out
        assert said.startswith("runs/mine is read-only; the page goes to the working directory\nlab.html: ")
        assert (workdir / "lab.html").exists()
        config.out = "runs/mine/other.html"
        (error,) = as_a_user_without_rights(lambda: lab.run(config))
        assert str(error) == "cannot write runs/mine/other.html: Permission denied"
    finally:
        run_dir.chmod(0o755)
    assert [path.name for path in run_dir.iterdir()] == ["model.safetensors"]


def test_serving_answers_prompts_until_interrupted(command, run_dir, monkeypatch):
    got = SimpleNamespace()

    def visitor(address):
        assert address.startswith("http://localhost:")

        def ask(rest):
            with urllib.request.urlopen(address + rest) as answer:
                return data_of(answer.read().decode())

        def visit():
            try:
                got.first, got.other, got.wrong = ask(""), ask("?prompt=Bob+%3Cb%3E"), ask("?prompt=")
                try:
                    ask("model.safetensors")
                except urllib.error.HTTPError as error:
                    got.code = error.code
            finally:
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=visit).start()

    monkeypatch.setattr(lab.webbrowser, "open", visitor)
    result = command("lab", "checkpoint=runs/mine", "prompt=Ann", "explain=0", "port=0", "--serve")
    assert (result.code, result.err) == (0, "")
    assert got.first["exhibits"][0]["prompt"] == "Ann"
    assert got.first["served"]
    assert got.other["exhibits"][0]["prompt"] == "Bob <b>"
    assert got.wrong["exhibits"][0]["prompt"] == "Ann"
    assert got.wrong["error"].startswith("prompt is empty")
    assert got.code == 404


def test_a_port_that_is_taken_is_named():
    with lab.make_server(0, "", str) as server, pytest.raises(ValueError, match=f"port={server.server_port} cannot"):
        lab.make_server(server.server_port, "", str)
