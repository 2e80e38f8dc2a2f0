"""Every token of every document is a target exactly once, and no target crosses a document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.data.packing import IGNORE, cut, fill, pack

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def make_stream(lengths):
    """Documents of distinct ids, each token named by (document, place) as one number; the boundary is 0."""
    documents = [[1000 * (d + 1) + i for i in range(n)] for d, n in enumerate(lengths)]
    return documents, np.array([t for d in documents for t in [0, *d]] + [0])


def test_the_worked_example():
    stream = np.array([0, 5, 6, 7, 0, 8, 9, 0])
    rows = pack(np.array([3, 2]), 8)
    tokens, positions, targets = fill(stream, rows, np.array([0]), 8)
    assert tokens.tolist() == [[0, 5, 6, 7, 0, 8, 9, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, -1]]
    assert targets.tolist() == [[5, 6, 7, 0, 8, 9, 0, IGNORE]]
    assert rows.targets.tolist() == [7]


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 24))
def test_nothing_is_lost_doubled_or_mixed(lengths, row_length):
    documents, stream = make_stream(lengths)
    rows = pack(np.array(lengths), row_length)
    tokens, positions, targets = fill(stream, rows, np.arange(len(rows)), row_length)
    assert tokens.shape == (len(rows), row_length)
    pairs = []
    for row in range(len(rows)):
        used = positions[row] >= 0
        assert (targets[row][~used] == IGNORE).all()
        assert used.sum() == rows.targets[row] > 0
        assert not (~used[:-1] & used[1:]).any()  # padding only at the end
        starts = np.flatnonzero(positions[row] == 0)
        for start, end in zip(starts, [*starts[1:], used.sum()], strict=True):
            assert positions[row, start:end].tolist() == list(range(end - start))
            assert tokens[row, start + 1 : end].tolist() == targets[row, start : end - 1].tolist()
        pairs += zip(tokens[row][used].tolist(), targets[row][used].tolist(), strict=True)
    expected = [pair for d in documents for pair in zip([0, *d], [*d, 0], strict=True)]
    assert sorted(pairs) == sorted(expected)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 24))
def test_packing_is_best_fit(lengths, row_length):
    """As full as the plain algorithm, one piece after another into the fullest row with room."""
    _, pieces = cut(np.array(lengths), row_length)
    room = []
    for size in sorted(pieces.tolist(), reverse=True):
        fitting = [r for r in room if r >= size]
        if fitting:
            room.remove(min(fitting))
            room.append(min(fitting) - size)
        else:
            room.append(row_length - size)
    filled = np.sort(row_length - np.array(room))
    assert np.sort(pack(np.array(lengths), row_length).targets).tolist() == filled.tolist()


def test_no_documents_make_no_rows():
    assert len(pack(np.zeros(0, np.int64), 8)) == 0


@pytest.mark.parametrize("row_length", [64, 256, 1024])
def test_natural_lengths_fill_99_percent(row_length):
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 20_000).astype(np.int64)
    rows = pack(lengths, row_length)
    assert rows.length.sum() / (len(rows) * row_length) > 0.99
