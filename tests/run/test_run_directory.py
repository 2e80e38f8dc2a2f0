"""Model files hold themselves whole, open anywhere, and run no code."""

import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minitransformer import ModelConfig, Tokenizer, Transformer, load
from minitransformer.run.directory import (
    METRICS_FILE,
    SAMPLES_FILE,
    CheckpointError,
    add_metrics,
    add_sample,
    add_start,
    atomic_write,
    checkpoints,
    read_held_out,
    read_metrics,
    read_samples,
    read_starts,
    save_held_out,
)
from minitransformer.run.models import read_checkpoint, save_model
from minitransformer.run.names import latest_run, new_run, point_latest
from minitransformer.run.rewind import Rewind


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_saved_model_is_the_model(tmp_path, tie, position):
    tokenizer = Tokenizer.bytes()
    config = ModelConfig(vocab_size=257, d_model=32, n_layers=2, n_heads=2, tie_embeddings=tie, position=position)
    model = Transformer(config).eval()
    torch.nn.init.normal_(model.head.weight)
    save_model(tmp_path / "model.safetensors", model.config, model.state_dict(), tokenizer)
    again, its_tokenizer = load(tmp_path / "model.safetensors")
    tokens = torch.tensor([its_tokenizer.encode("any text")])
    assert its_tokenizer.fingerprint == tokenizer.fingerprint
    assert again.config == config
    assert (again.head.weight is again.embedding.weight) == tie
    assert not again.training
    assert torch.equal(again(tokens), model(tokens))


def test_a_model_file_keeps_all_tokens_that_end_a_text(tmp_path):
    backend = type(Tokenizer.bytes().backend).from_str(Tokenizer.bytes().to_json())
    backend.add_special_tokens(["<eot>", "<call>"])
    model = Transformer(ModelConfig(vocab_size=259, d_model=8, n_layers=1, n_heads=1))
    for end_ids in ([], [0], [258, 257]):  # the first two as files of before have it
        tokenizer = Tokenizer(backend, end_ids)
        save_model(tmp_path / "m.safetensors", model.config, model.state_dict(), tokenizer)
        with safe_open(tmp_path / "m.safetensors", "pt") as file:
            assert set(file.metadata()) == {"model", "tokenizer", *(["end_ids"] if len(end_ids) > 1 else [])}
        again = load(tmp_path / "m.safetensors")[1]
        assert again.end_ids == {0, *end_ids}
        assert again.eos_id == 0


def test_run_directory_and_files_give_the_same_model(trained, tmp_path):
    tokens = torch.arange(20)[None]
    expected = load(trained)[0](tokens)
    newest = checkpoints(trained)[-1]
    for path in (trained / "model.safetensors", newest):
        moved = tmp_path / f"moved{path.suffix}"  # alone, away from the training config
        moved.write_bytes(path.read_bytes())
        assert torch.equal(load(moved)[0](tokens), expected)


def test_a_broken_model_falls_back_to_checkpoints(trained):
    said = []
    expected = load(trained)[0](torch.arange(20)[None])
    data = (trained / "model.safetensors").read_bytes()
    (trained / "model.safetensors").write_bytes(data[:-500])
    assert torch.equal(load(trained, say=said.append)[0](torch.arange(20)[None]), expected)
    assert len(said) == 1
    assert "model.safetensors cannot be read" in said[0]
    newest = checkpoints(trained)[-1]
    newest.write_bytes(newest.read_bytes()[:3000])
    load(trained, say=said.append)
    assert newest.name in said[-1]
    for path in (trained / "model.safetensors", *checkpoints(trained)):
        path.unlink()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(trained)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_checkpoint_never_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "minitransformer": Bomb()}, "bomb.ckpt")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.ckpt", "plain.ckpt"):
        with pytest.raises(CheckpointError, match=name):
            load(name)
    assert not (tmp_path / "exploded").exists()


def spoilt(path):
    torch.save({"state_dict": {"x": torch.ones(9)}, "minitransformer": {}}, path)
    return path.read_bytes()


@pytest.mark.parametrize(("make", "words"), [
    (lambda path: b"# A readme\n", "none, or holds more than plain values"),
    (lambda path: bytes(99), "none, or holds more than plain values"),
    (lambda path: pickle.dumps({"a": 1}), "none, or holds more than plain values"),
    (lambda path: torch.save(Bomb(), path), "none, or holds more than plain values"),
    (lambda path: b"", "cut short or damaged"), (lambda path: spoilt(path)[:-50], "cut short or damaged"),
    (lambda path: spoilt(path)[: len(spoilt(path)) // 2], "cut short or damaged"),
    (lambda path: spoilt(path).replace(b"data.pkl", b"dota.pkl"), "cut short or damaged"),
], ids=["text", "zeros", "pickle", "code", "empty", "cut", "half", "spoilt"])  # fmt: skip
def test_why_a_checkpoint_cannot_be_read_is_said_without_advice_to_run_its_code(tmp_path, recwarn, make, words):
    path = tmp_path / "other.ckpt"
    if data := make(path):
        path.write_bytes(data)
    elif not path.exists():
        path.touch()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert str(caught.value) == f"{path} cannot be read as a checkpoint (it is {words})"
    assert not recwarn.list


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"write checkpoint=null"):
        load("None")
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="does not describe"):
        load(tmp_path / "other.safetensors")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="not a checkpoint of minitransformer"):
        read_checkpoint(tmp_path / "other.ckpt")
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"no run in .*train one first"):
        latest_run(tmp_path / "runs")


def test_writing_is_all_or_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    for error in (KeyboardInterrupt, OSError(28, "No space left on device")):
        with pytest.raises((KeyboardInterrupt, CheckpointError)), atomic_write(path) as file:
            file.write(b"half of the ne")
            raise error
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert path.read_text() == "old"
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"


def test_runs_never_share_a_directory(tmp_path):
    names = [new_run(tmp_path / "runs", "mine").name for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]
    point_latest(tmp_path / "runs" / "mine-2", tmp_path / "runs")
    assert latest_run(tmp_path / "runs") == tmp_path / "runs" / "mine-2"
    point_latest(tmp_path / "runs" / "mine", tmp_path / "runs")
    assert latest_run(tmp_path / "runs") == tmp_path / "runs" / "mine"


def test_the_newest_run_is_found_where_latest_is_no_link(tmp_path):
    """A folder of that name, as `cp -rL` leaves it, a file, or a link to a run that is gone."""
    runs = tmp_path / "runs"
    for time, name in enumerate(("b", "a", "sweep/0")):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.yaml").touch()
        os.utime(runs / name / "config.yaml", (time, time))
    latest = runs / "latest"
    latest.symlink_to("gone")
    assert latest_run(runs) == runs / "sweep" / "0"
    latest.unlink()
    latest.mkdir()
    point_latest(runs / "b", runs)  # cannot, and leaves nothing behind
    assert latest_run(runs) == runs / "sweep" / "0"
    assert sorted(path.name for path in runs.iterdir()) == ["a", "b", "latest", "sweep"]
    latest.rmdir()
    latest.touch()
    assert latest_run(runs) == runs / "sweep" / "0"
    point_latest(runs / "b", tmp_path / "nowhere")


def test_what_was_logged_is_read_back(tmp_path):
    add_metrics(tmp_path, 10, {"tokens": 5, "train/loss": 2.5, "optim/grad_norm": float("inf")})
    add_metrics(tmp_path, 10, {"tokens": 5, "val/loss": float("nan")})
    assert read_metrics(tmp_path) == [
        {"step": 10, "tokens": 5, "train/loss": 2.5, "optim/grad_norm": None},
        {"step": 10, "tokens": 5, "val/loss": None},
    ]
    texts = ["plain", "", "a\n\n  b\r\nc\n", "--- step 3 ---\nnot a header", "\x00\x1b[31m\u2028🦉\x85\r--- step 4 ---"]
    for step, text in enumerate(texts):
        add_sample(tmp_path, step, text)
    assert read_samples(tmp_path) == list(enumerate(texts))
    assert read_metrics(tmp_path / "nothing") == read_samples(tmp_path / "nothing") == []


def test_starts_and_held_out_text_are_read_back(tmp_path):
    """Of two starts after one step the later counts; going back forgets those after it."""
    for step, command in ((0, "a"), (4, "b"), (4, "c 'ä'"), (6, "d")):
        add_start(tmp_path, step, {"command": command})
    assert [(start["step"], start["command"]) for start in read_starts(tmp_path)] == [(0, "a"), (4, "c 'ä'"), (6, "d")]
    Rewind.find(tmp_path, 5).apply()
    assert [start["step"] for start in read_starts(tmp_path)] == [0, 4]
    documents = [("", "a\r\n\x00🦉\u2028"), ("Q: é", "")]
    save_held_out(tmp_path, documents)
    assert read_held_out(tmp_path) == documents
    (tmp_path / "held_out.json").write_text('["a"]')
    with pytest.raises(CheckpointError, match=r"held_out\.json is damaged"):
        read_held_out(tmp_path)
    assert read_held_out(tmp_path / "nothing") == read_starts(tmp_path / "nothing") == []


@pytest.mark.parametrize("line", ["{", "3", "[1]", '{"train/loss": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    add_metrics(tmp_path, 1, {"train/loss": 1.0})
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is damaged: line 2 "):
        read_metrics(tmp_path)


def test_rewinding_cuts_what_was_logged_later_wherever_a_kill_left_it(tmp_path):
    """For every step to go back to and every byte at which writing may have stopped after it."""
    sizes = [(0, 0)]
    for step in (1, 2, 3):
        add_metrics(tmp_path, step, {"train/loss": float(step)})
        add_metrics(tmp_path, step, {"val/loss": 2.0 * step})
        add_sample(tmp_path, step, f"{step}\n--- step 9 ---\nä")
        sizes.append(tuple((tmp_path / name).stat().st_size for name in (METRICS_FILE, SAMPLES_FILE)))
    whole = [(tmp_path / name).read_bytes() for name in (METRICS_FILE, SAMPLES_FILE)]
    for step, kept in enumerate(sizes):
        for name, content, size in zip((METRICS_FILE, SAMPLES_FILE), whole, kept, strict=True):
            for end in range(size, len(content) + 1):
                (tmp_path / name).write_bytes(content[:end])
                Rewind.find(tmp_path, step).apply()
                assert (tmp_path / name).read_bytes() == content[:size]
