"""The order of rows is a function of (seed, step), whatever the ranks and the workers."""

import multiprocessing
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from minitransformer.data.packing import Documents, TokenStream, pack
from minitransformer.data.rows import StepNumbers, TrainingSteps, ValidationSteps
from minitransformer.data.store import TokenFile

HOW = st.sampled_from(["best_fit", "sequential", "concat", "pad"])


def documents_of(lengths) -> tuple[TokenStream, Documents]:
    """Every token of every document is another number; EOS is 0."""
    numbers = iter(range(1, sum(lengths) + 1))
    ids = np.array([t for n in lengths for t in [0, *(next(numbers) for _ in range(n))]] + [0])
    return TokenStream(ids, eos_id=0, bos_id=0), Documents.of(lengths)


def steps_of(n_documents, batch_size, seed=0, rank=0, ranks=1) -> TrainingSteps:
    """Documents of three tokens, four targets, one row each."""
    return TrainingSteps(*documents_of([3] * n_documents), 4, batch_size, seed, rank=rank, ranks=ranks)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(1, 8), st.integers(1, 9), HOW, st.integers(0, 5)
)
def test_every_target_comes_once_an_epoch(lengths, row_length, batch_size, how, seed):
    steps = TrainingSteps(*documents_of(lengths), row_length, batch_size, seed, how)
    # Three epochs' rows, taken apart into epochs again.
    rows = [row for s in range(-(-3 * steps.n_rows // batch_size)) for row in steps[s].targets]
    expected = Counter([*range(1, sum(lengths) + 1)] + [0] * len(lengths))
    for epoch in range(3):
        own = torch.cat(rows[epoch * steps.n_rows : (epoch + 1) * steps.n_rows])
        assert Counter(own[own >= 0].tolist()) == expected


def test_epochs_and_seeds_have_their_own_order():
    orders = [steps_of(50, 50, seed)[epoch].tokens.flatten().tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4


def test_sequential_rows_come_in_order_and_concat_is_cut_elsewhere_each_epoch():
    tokens, documents = documents_of([3] * 50)
    kept = TrainingSteps(tokens, documents, 4, 50, 0, "sequential")
    assert kept[0].tokens[:, 1].tolist() == [3 * d + 1 for d in range(50)]
    assert torch.equal(kept[0].tokens, kept[1].tokens)
    ring = TrainingSteps(tokens, documents, 4, 50, 0, "concat")
    cuts = [set(map(tuple, ring[epoch].tokens.tolist())) for epoch in range(6)]
    assert len(set(map(frozenset, cuts))) > 2


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 30), st.integers(1, 6), st.integers(1, 3), st.integers(0, 40))
def test_ranks_share_a_step_without_overlap_or_gap(rows, per_rank, ranks, step):
    whole = steps_of(rows, per_rank * ranks)[step]
    shares = [steps_of(rows, per_rank * ranks, rank=r, ranks=ranks)[step] for r in range(ranks)]
    assert {len(s.tokens) for s in shares} == {per_rank}
    assert torch.equal(torch.cat([s.tokens for s in shares]), whole.tokens)
    assert {s.step_targets for s in shares} == {whole.step_targets} == {int((whole.targets >= 0).sum())}


@pytest.mark.parametrize("how", ["best_fit", "sequential", "concat", "pad"])
def test_a_step_does_not_depend_on_what_was_read_before(how):
    def make():
        return TrainingSteps(*documents_of([3, 7, 0, 12, 5]), 4, 5, 0, how)

    steps = make()
    forwards = [steps[s].tokens for s in range(9)]
    backwards = [steps[s].tokens for s in reversed(range(9))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert torch.equal(make()[7].tokens, forwards[7])


@pytest.fixture
def on_disk(tmp_path):
    tokens, documents = documents_of(list(range(2, 40)))
    tokens.ids.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    return TokenFile(tmp_path / "tokens.bin", "uint16", eos_id=0, bos_id=0), documents


# Inside the first epoch, at its end, and later.
CASES = [*((workers, stop) for workers in (0, 1, 2) for stop in (0, 3, 38, 50)), ("spawn", 3)]


@pytest.mark.parametrize(("workers", "stop"), CASES)
def test_a_loader_that_starts_again_goes_on_with_any_number_of_workers(workers, stop, on_disk):
    start, workers = ("spawn", 2) if workers == "spawn" else ("fork" if workers else None, workers)
    rows = TrainingSteps(*on_disk, 20, 4, seed=3)
    context = multiprocessing.get_context(start) if start else None
    resumed = DataLoader(
        TrainingSteps(*on_disk, 20, 4, seed=3),
        batch_size=None,
        sampler=StepNumbers(stop),
        num_workers=workers,
        multiprocessing_context=context,
    )
    for step, batch in zip(range(stop, stop + 5), resumed, strict=False):
        assert torch.equal(batch.tokens, rows[step].tokens)
        assert torch.equal(batch.targets, rows[step].targets)
        assert batch.state is None


def test_a_batch_larger_than_the_data_is_full():
    batch = steps_of(3, 8)[0]
    assert batch.tokens.shape == (8, 4)
    assert sorted(batch.tokens[:3, 1].tolist()) == sorted(batch.tokens[3:6, 1].tolist()) == [1, 4, 7]


def test_validation_reads_each_row_once_whatever_the_ranks():
    tokens, documents = documents_of([3] * 10)
    steps = ValidationSteps(tokens, pack(documents, 4), 4, 4)
    batches = [steps[i] for i in range(len(steps))]
    assert [len(b.tokens) for b in batches] == [4, 4, 2]
    assert sorted(torch.cat([b.tokens for b in batches])[:, 1].tolist()) == [3 * d + 1 for d in range(10)]
    for ranks in (2, 3, 4):
        shares = [ValidationSteps(tokens, pack(documents, 4), 4, 4, rank, ranks) for rank in range(ranks)]
        assert {len(share) for share in shares} == {3}
        for i, whole in enumerate(batches):
            parts = [share[i] for share in shares]
            assert len({len(part.tokens) for part in parts}) == 1
            rows = [torch.cat([part[x] for part in parts]) for x in range(3)]
            assert all(torch.equal(found[: len(whole.tokens)], whole[x]) for x, found in enumerate(rows))
            assert (rows[2][len(whole.tokens) :] < 0).all()
    with pytest.raises(IndexError):
        steps[3]


def test_ranks_that_cannot_share_are_refused():
    with pytest.raises(ValueError, match="batch_size=4 rows do not divide into 3"):
        steps_of(10, 4, ranks=3)
    with pytest.raises(ValueError, match="2 rows, fewer than there are ranks: 4"):
        steps_of(2, 4, ranks=4)
