"""generate.py as people use it: many prompts, JSON, scores, stop texts, a prompt loop."""

import gzip
import io
import json
import os
import re
from pathlib import Path
from threading import Thread

import pytest

from minitransformer import beam_search, load, score
from minitransformer.data.files import BOM
from minitransformer.generation.run import read_prompts
from tests.conftest import SMALL


@pytest.fixture
def generating(command, trained):
    """generating(...) runs generate.py on a small trained model, a few tokens long."""

    def run(*arguments: str):
        given = dict(argument.split("=", 1) for argument in arguments)
        usual = {} if "score" in given else {"max_new_tokens": "8", "seed": "0"}
        if "beams" in given or given.get("temperature") == "0":  # which draw nothing
            del usual["seed"]
        return command("generate", *[f"{name}={value}" for name, value in (usual | given).items()])

    return run


def test_prompts_from_a_file_and_samples_of_each(generating, workdir):
    (workdir / "prompts.txt").write_text("Ann \nBob \n", encoding="utf-8")
    result = generating("prompt_file=prompts.txt", "num_samples=2")
    assert result.code == 0, result.err
    assert [line for line in result.out.splitlines() if line.startswith("---")] == [
        f"--- {i} ---" for i in (1, 2, 3, 4)
    ]
    assert result.out.count("Ann ") >= 2
    assert "tokens," in result.err
    assert "tokens," not in result.out


PROMPTS = "Ann\x0c \u2028sees\x85\r\n\nZoë \rlikes\n\n"


@pytest.mark.parametrize("way", ["file", "gz", "fifo", "stdin"])
def test_prompts_are_read_as_data_are(way, workdir, monkeypatch):
    data = BOM + PROMPTS.encode()
    name = {"gz": "prompts.txt.gz", "stdin": "-"}.get(way, "prompts.txt")
    if way == "fifo":
        os.mkfifo(name)
        Thread(target=Path(name).write_bytes, args=(data,)).start()
    elif way == "stdin":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "latin-1"))
    else:
        Path(name).write_bytes(gzip.compress(data) if way == "gz" else data)
    assert read_prompts(name) == ["Ann\x0c \u2028sees\x85", "", "Zoë \rlikes", ""]


def test_prompts_from_standard_input_are_utf8(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Caf\xe9"), "latin-1"))
    with pytest.raises(ValueError, match="standard input is not UTF-8: byte 0xe9 at offset 3"):
        read_prompts("-")


def test_json_is_an_object_a_line(generating, workdir, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Ann \nZoë \n".encode())))
    result = generating("prompt_file=-", "output=json")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Ann ", "Zoë "]
    _, tokenizer = load(workdir / "runs" / "small")
    for row in rows:
        assert tokenizer.decode(row["tokens"]) == row["text"]
        assert len(row["log_probs"]) == len(row["tokens"])
        assert row["finish"] in ("length", "end")
        assert max(row["log_probs"]) <= 0


def test_a_score_adds_up(generating, workdir):
    result = generating("prompt='Ann sees the cat.'", "score=true")
    assert result.code == 0, result.err
    *lines, summary = result.out.splitlines()
    found = score(*load(workdir / "runs" / "small"), "Ann sees the cat.")
    assert len(lines) == len(found.tokens)
    assert sum(float(line.split()[0]) for line in lines) == pytest.approx(sum(found.log_probs), abs=0.01)
    assert f"log_prob {sum(found.log_probs):.4f}" in summary
    assert "bits_per_byte" in summary
    data = json.loads(generating("prompt='Ann'", "score=true", "output=json").out)
    assert data["log_prob"] == pytest.approx(sum(data["log_probs"]))


def test_stop_texts_and_penalties(generating):
    plain = generating("prompt='Ann '", "max_new_tokens=20", "temperature=0").out
    middle = plain[10:12]
    cut = generating("prompt='Ann '", "max_new_tokens=20", "temperature=0", f"stop=['{middle}']")
    assert cut.code == 0, cut.err
    assert cut.out.rstrip("\n") == plain[: plain.index(middle, 4)]
    other = generating(
        "prompt='Ann '", "max_new_tokens=20", "temperature=0", "repetition_penalty=5", "no_repeat_ngram=2"
    )
    assert other.code == 0
    assert other.out != plain
    longer = generating("prompt='Ann '", "max_new_tokens=60", "overflow=slide")
    assert longer.code == 0, longer.err


def test_beams(generating, workdir):
    found = json.loads(generating("prompt='Ann '", "beams=4", "output=json").out)
    best = beam_search(*load(workdir / "runs" / "small"), "Ann ", 8, beams=4)[0]
    assert (found["text"], found["tokens"]) == (best.text, best.tokens)
    assert generating("prompt='Ann '", "beams=4").out == f"Ann {found['text']}\n"
    several = generating("prompt='Ann '", "beams=4", "num_samples=2", "no_repeat_ngram=2", "stop=[zz]").out
    expected = beam_search(*load(workdir / "runs" / "small"), "Ann ", 8, beams=4, no_repeat_ngram=2, stop=["zz"])
    assert several == f"--- 1 ---\nAnn {expected[0].text}\n\n--- 2 ---\nAnn {expected[1].text}\n"


def test_a_draft_and_eight_bits(generating, command, workdir):
    plain = generating("prompt=Ann ", "temperature=0", "max_new_tokens=20").out
    sped = generating("prompt=Ann ", "temperature=0", "max_new_tokens=20", "draft=runs/small", "draft_tokens=3")
    assert sped.out == plain
    taken, proposed = map(int, re.search(r"(\d+) of (\d+) guesses of the draft taken", sped.err).groups())
    assert taken == proposed > 0  # the draft is the model itself
    (workdir / "prompts.txt").write_text("Ann \nBob \n")
    many = generating("prompt_file=prompts.txt", "draft=runs/small", "output=json")
    assert [json.loads(line)["prompt"] for line in many.out.splitlines()] == ["Ann ", "Bob "]
    assert generating("prompt=Ann ", "quantize=int8").code == 0
    assert json.loads(generating("prompt=A", "forced={0: 70, 2: 71}", "output=json").out)["tokens"][:3:2] == [70, 71]
    assert set(json.loads(generating("prompt=A", "logit_bias={70: 99}", "output=json").out)["tokens"]) == {70}
    exact, quantized = (
        json.loads(generating("prompt=Ann sees", "score=true", "output=json", f"quantize={q}").out)["bits_per_byte"]
        for q in ("none", "int8")
    )
    assert exact != quantized == pytest.approx(exact, abs=0.05)
    assert command("train", "data=text", "data.files=[book.txt]", "tokenizer=byte", "name=bytes", *SMALL).code == 0
    result = generating("checkpoint=runs/small", "draft=runs/bytes")
    assert (result.code, result.err.splitlines()[-1]) == (
        1, "error: draft=runs/bytes has another tokenizer than runs/small",
    )  # fmt: skip


def test_a_prompt_loop(generating, monkeypatch):
    asked = iter(["Ann ", "Bob ", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(asked))
    result = generating("interactive=true")
    assert result.code == 0, result.err
    assert [line[:4] for line in result.out.splitlines() if line.startswith(("Ann ", "Bob "))][:2] == ["Ann ", "Bob "]


def test_ctrl_c_ends_with_what_was_made(generating, monkeypatch):
    from minitransformer.generation import decode

    sample, drawn = decode.sample, []

    def interrupted(*arguments):
        drawn.append(1)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return sample(*arguments)

    monkeypatch.setattr(decode, "sample", interrupted)
    result = generating("prompt='Ann '", "output=json")
    assert result.code == 130
    assert len(json.loads(result.out)["tokens"]) == 3
    assert "interrupted" in result.err


@pytest.mark.parametrize(("arguments", "words"), [
    (["prompt_file=gone.txt"], "prompt_file=gone.txt does not exist"), (["prompt_file=empty.txt"], "holds no prompt"),
    (["prompt_file=latin.txt"], "latin.txt is not UTF-8: byte 0xe9 at offset 3"), (["num_samples=0"], "num_samples=0"),
    (["stop=['']"], "stop holds an empty text"), (["overflow=wrap"], "overflow='wrap'"), (["min_p=2"], "min_p=2"),
    (["overflow=slide", "max_new_tokens=null"], "overflow=slide has no end"), (["output=xml"], "output='xml'"),
    (["overflow=extend"], "model.position=rotary"), (["banned=[999]"], "id 999"), (["max_seconds=0"], "max_seconds=0"),
    (["beams=2", "top_k=5"], "beams=2 cannot go with top_k"), (["length_penalty=2"], "length_penalty=2"),
    (["beams=2", "num_samples=3"], "num_samples=3 are more texts than beams=2"),
    (["beams=0"], "beams=0"), (["quantize=int4"], "quantize='int4'"), (["draft=gone"], "gone does not exist"),
    (["draft=runs/small", "beams=2"], "beams=2 cannot go with draft"), (["draft_tokens=0"], "draft_tokens=0"),
    (["forced={-1: 3}"], "forced: the number of a new token=-1"), (["forced={0: 999}"], "forced: id 999"),
    (["prompt=a", "prompt_file=b"], "prompt and prompt_file"),
    (["interactive=true", "score=true"], "score=true cannot go with interactive"),
], ids=str)  # fmt: skip
def test_mistakes_are_named_in_one_line(generating, workdir, arguments, words):
    (workdir / "empty.txt").touch()
    (workdir / "latin.txt").write_bytes("Caf\xe9".encode("latin-1"))
    result = generating(*arguments)
    if arguments == ["overflow=extend"] and result.code == 0:
        return  # rotary positions reach further
    assert result.code == 1
    assert len(result.err.splitlines()) <= 2  # the checkpoint's name may stand before
    assert words in result.err
