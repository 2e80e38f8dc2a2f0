"""The order of rows is a function of (seed, step); tokenised text is kept and never half kept."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.data import datamodule
from minitransformer.data.config import BPEConfig, TextConfig, TokenizerConfig
from minitransformer.data.datamodule import StepNumbers, TextData, TrainingSteps, ValidationSteps
from minitransformer.data.packing import pack


def steps_of(n_documents, batch_size, seed=0, rank=0, ranks=1) -> TrainingSteps:
    lengths = np.full(n_documents, 3)  # four targets, one row each
    stream = np.concatenate([[0, 3 * d + 1, 3 * d + 2, 3 * d + 3] for d in range(n_documents)] + [[0]])
    return TrainingSteps(stream, pack(lengths, 4), 4, batch_size, seed, rank, ranks)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_every_row_comes_once_an_epoch(rows, batch_size, seed):
    steps = steps_of(rows, batch_size, seed)
    needed = -(-3 * rows // batch_size)
    order = np.concatenate([steps.row_numbers(s) for s in range(needed)])
    for epoch in range(3):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_epochs_and_seeds_have_their_own_order():
    orders = [steps_of(50, 50, seed).row_numbers(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 3), st.integers(0, 40))
def test_ranks_share_a_step_without_overlap_or_gap(rows, per_rank, ranks, step):
    whole = steps_of(rows, per_rank * ranks)[step]
    shares = [steps_of(rows, per_rank * ranks, rank=r, ranks=ranks)[step] for r in range(ranks)]
    assert torch.equal(torch.cat([s.tokens for s in shares]), whole.tokens)
    assert {s.step_targets for s in shares} == {whole.step_targets} == {int((whole.targets >= 0).sum())}


def test_a_step_does_not_depend_on_what_was_read_before():
    steps = steps_of(13, 5)
    forwards = [steps[s].tokens for s in range(9)]
    backwards = [steps[s].tokens for s in reversed(range(9))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert torch.equal(steps_of(13, 5)[7].tokens, forwards[7])


def test_step_numbers_go_on_without_end():
    numbers = iter(StepNumbers(5))
    assert [next(numbers) for _ in range(3)] == [5, 6, 7]


def test_validation_reads_each_row_once():
    steps = ValidationSteps(steps_of(10, 1).stream, pack(np.full(10, 3), 4), 4, 4)
    batches = [steps[i] for i in range(len(steps))]
    assert [len(b.tokens) for b in batches] == [4, 4, 2]
    assert sorted(torch.cat([b.tokens for b in batches])[:, 1].tolist()) == [3 * d + 1 for d in range(10)]
    with pytest.raises(IndexError):
        steps[3]


def test_ranks_that_do_not_divide_a_batch_are_refused():
    with pytest.raises(ValueError, match="batch_size=4 rows do not divide into 3"):
        steps_of(10, 4, ranks=3)


@pytest.fixture
def data(workdir):
    def make(tokenizer=None, row_length=32, **settings):
        config = TextConfig(files=["book.txt"], cache_dir="cache", **settings)
        return TextData(config, tokenizer or BPEConfig(kind="bpe", vocab_size=300), row_length, seed=0)

    return make


def test_a_second_run_tokenises_nothing(data, workdir, monkeypatch):
    said = []
    first = data()
    first.prepare(said.append)
    assert len(said) == 1
    monkeypatch.setattr(datamodule, "make_tokenizer", lambda *_: pytest.fail("tokenised again"))
    second = data()
    second.prepare(said.append)
    assert len(said) == 1
    assert np.array_equal(first.train.stream, second.train.stream)
    assert second.tokenizer.decode(second.train.stream.tolist()) == first.tokenizer.decode(first.train.stream.tolist())
    (workdir / "book.txt").write_text((workdir / "book.txt").read_text() + "One more line.\n")
    with pytest.raises(BaseException, match="tokenised again"):
        data().prepare()


def test_the_stream_is_the_text(data, workdir):
    for tokenizer in (None, TokenizerConfig("byte"), TokenizerConfig("char")):
        made = data(tokenizer)
        made.prepare()
        text = made.tokenizer.decode(made.train.stream.tolist()) + made.tokenizer.decode(
            made.validation.stream.tolist()
        )
        assert text == (workdir / "book.txt").read_text(encoding="utf-8")
        assert made.train.n_bytes + made.validation.n_bytes == (workdir / "book.txt").stat().st_size


def test_a_build_that_dies_leaves_no_entry(data, workdir, monkeypatch):
    def die(folder, *_):
        (folder / "train.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(datamodule, "_build", die)
        with pytest.raises(KeyboardInterrupt):
            data().prepare()
    assert list((workdir / "cache").iterdir()) == []
    data().prepare()
    assert len(list((workdir / "cache").iterdir())) == 1


def test_another_run_that_builds_first_is_no_error(data, workdir, monkeypatch):
    build = datamodule._build

    def race(folder, *arguments):
        build(folder, *arguments)
        monkeypatch.setattr(datamodule, "_build", build)
        data().prepare()  # wins

    monkeypatch.setattr(datamodule, "_build", race)
    data().prepare()
    assert len(list((workdir / "cache").iterdir())) == 1


def test_too_little_text_names_both_numbers(data, workdir):
    (workdir / "book.txt").write_text("too short\n" * 4)
    with pytest.raises(ValueError, match=r"has 37 tokens.*max_seq_len=64 and a target need 65"):
        data(TokenizerConfig("byte"), row_length=64).prepare()


def test_a_cache_that_cannot_be_written_is_named(data, workdir):
    (workdir / "cache").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"data\.cache_dir=cache"):
        data().prepare()


def test_a_full_disk_while_tokenising_is_named_and_leaves_nothing(data, workdir, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match=r"data\.cache_dir=cache cannot be written: No space left on device"):
        data().prepare()
    assert list((workdir / "cache").iterdir()) == []


def test_resuming_on_other_data_is_refused(data):
    one, other = data(), data(row_length=16)
    one.prepare()
    other.prepare()
    state = one.state_dict()
    one.load_state_dict(state)
    with pytest.raises(ValueError, match=r"rows=\d+, this run has \d+"):
        other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_starts_at_the_step_of_the_trainer(data, workers):
    from types import SimpleNamespace

    made = data(batch_size=4, workers=workers)
    made.prepare()
    made.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0)
    whole = iter(made.train_dataloader())
    batches = [next(whole) for _ in range(6)]
    made.trainer.global_step = 4
    resumed = iter(made.train_dataloader())
    assert torch.equal(next(resumed).tokens, batches[4].tokens)
    assert torch.equal(next(resumed).targets, batches[5].targets)
