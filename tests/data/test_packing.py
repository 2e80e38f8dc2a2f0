"""Every token of every document is a target exactly once, and no target crosses a document."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.data.packing import IGNORE, Documents, TokenStream, cut, fill, pack, slide

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=40)
HOW = st.sampled_from(["best_fit", "sequential", "concat", "pad"])
STREAM = np.array([0, 5, 6, 7, 0, 8, 9, 0], np.uint16)


def make_stream(lengths):
    """Documents of distinct ids, each token named by (document, place) as one number; EOS is 0."""
    documents = [[1000 * (d + 1) + i for i in range(n)] for d, n in enumerate(lengths)]
    return documents, np.array([t for d in documents for t in [0, *d]] + [0], np.uint16)


def lay_out(stream, rows, row_length, start=0):
    return fill(TokenStream(stream, 0, start), rows, np.arange(len(rows)), row_length)


def test_the_worked_example():
    rows = pack(Documents.of([3, 2]), 8)
    tokens, positions, targets = lay_out(STREAM, rows, 8)
    assert tokens.tolist() == [[0, 5, 6, 7, 0, 8, 9, 0]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, -1]]
    assert targets.tolist() == [[5, 6, 7, 0, 8, 9, 0, IGNORE]]
    assert rows.targets.tolist() == [7]


def test_the_worked_example_with_prefixes():
    rows = pack(Documents.of([3, 2], prefix=[2, 1]), 8)
    tokens, _, targets = lay_out(STREAM, rows, 8)
    assert tokens.tolist() == [[0, 5, 6, 7, 0, 8, 9, 0]]
    assert targets.tolist() == [[IGNORE, IGNORE, 7, 0, IGNORE, 9, 0, IGNORE]]
    assert rows.targets.tolist() == [4]


def test_the_worked_example_as_a_ring():
    tokens, positions, targets = lay_out(STREAM, pack(Documents.of([3, 2]), 4, "concat", turn=2), 4)
    assert tokens.tolist() == [[6, 7, 0, 8], [9, 0, 5, 0]]
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]
    assert targets.tolist() == [[7, 0, 8, 9], [0, 5, 6, IGNORE]]


@pytest.mark.parametrize("how", ["best_fit", "sequential", "concat", "pad"])
def test_where_the_start_is_not_the_boundary_inputs_hold_one_and_targets_the_other(how):
    rows = pack(Documents.of([3, 2]), 5, how)
    (tokens, positions, targets), plain = lay_out(STREAM, rows, 5, start=1), lay_out(STREAM, rows, 5)
    used = positions >= 0
    assert tokens[used].tolist() == [i or 1 for i in plain[0][used].tolist()]
    assert (tokens[~used] == 0).all()
    assert np.array_equal(positions, plain[1])
    assert np.array_equal(targets, plain[2])


@settings(max_examples=400, deadline=None)
@given(LENGTHS, st.integers(1, 24), HOW, st.integers(0, 5000), st.randoms())
def test_nothing_is_lost_doubled_or_mixed(lengths, row_length, how, turn, random):
    prefixes = [random.randint(0, n) for n in lengths]
    documents, stream = make_stream(lengths)
    rows = pack(Documents.of(lengths, prefixes), row_length, how, turn)
    tokens, positions, targets = lay_out(stream, rows, row_length)
    assert tokens.shape == (len(rows), row_length)
    pairs = []
    for row in range(len(rows)):
        used = positions[row] >= 0
        assert (targets[row][~used] == IGNORE).all()
        assert (targets[row] >= 0).sum() == rows.targets[row]
        assert how == "concat" or rows.targets[row] > 0
        assert not (~used[:-1] & used[1:]).any()  # padding only at the end
        if how == "concat":
            assert positions[row][used].tolist() == list(range(used.sum()))
        else:
            starts = np.flatnonzero(positions[row] == 0)
            for start, end in zip(starts, [*starts[1:], used.sum()], strict=True):
                assert positions[row, start:end].tolist() == list(range(end - start))
                following, target = tokens[row, start + 1 : end], targets[row, start : end - 1]
                assert ((following == target) | (target == IGNORE)).all()
        counted = targets[row] >= 0
        pairs += zip(tokens[row][counted].tolist(), targets[row][counted].tolist(), strict=True)
    expected = [
        pair
        for d, prefix in zip(documents, prefixes, strict=True)
        for pair in list(zip([0, *d], [*d, 0], strict=True))[prefix:]
    ]
    assert Counter(pairs) == Counter(expected)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 24))
def test_packing_is_best_fit(lengths, row_length):
    """As full as the plain algorithm, one piece after another into the fullest row with room."""
    room = []
    for size in sorted(cut(Documents.of(lengths), row_length).length.tolist(), reverse=True):
        fitting = [r for r in room if r >= size]
        if fitting:
            room.remove(min(fitting))
            room.append(min(fitting) - size)
        else:
            room.append(row_length - size)
    filled = np.sort(row_length - np.array(room))
    assert np.sort(pack(Documents.of(lengths), row_length).targets).tolist() == filled.tolist()


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 24))
def test_sequential_keeps_the_order_and_opens_a_row_only_when_it_must(lengths, row_length):
    rows = pack(Documents.of(lengths), row_length, "sequential")
    assert (np.diff(rows.start) > 0).all()
    assert (rows.targets[:-1] + rows.length[rows.first[1:-1]] > row_length).all()


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 24), st.integers(0, 5000))
def test_a_ring_has_as_many_rows_wherever_it_is_cut(lengths, row_length, turn):
    total = sum(lengths) + len(lengths)
    rows = pack(Documents.of(lengths), row_length, "concat", turn)
    assert rows.targets.tolist() == [row_length] * (total // row_length) + [total % row_length] * bool(
        total % row_length
    )
    stream = make_stream(lengths)[1]
    tokens, positions, _ = lay_out(stream, rows, row_length)
    assert (
        tokens[positions >= 0].tolist() == np.roll(stream[:-1], -turn % total if turn else 0).tolist() or turn >= total
    )


def test_pad_gives_each_document_its_own_rows():
    rows = pack(Documents.of([3, 2, 9]), 8, "pad")
    assert rows.targets.tolist() == [4, 3, 8, 2]


@pytest.mark.parametrize("how", ["best_fit", "sequential", "concat", "pad"])
def test_no_documents_make_no_rows(how):
    assert len(pack(Documents.of(np.zeros(0, np.int64)), 8, how)) == 0


@pytest.mark.parametrize("row_length", [64, 256, 1024])
def test_natural_lengths_fill_99_percent(row_length):
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 20_000).astype(np.int64)
    rows = pack(Documents.of(lengths), row_length)
    assert rows.length.sum() / (len(rows) * row_length) > 0.99


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 24), st.data())
def test_windows_count_every_target_once_with_enough_before_it(lengths, row_length, data):
    stride = data.draw(st.integers(1, row_length))
    prefix = [data.draw(st.integers(0, length)) for length in lengths]
    documents = Documents.of(lengths, prefix)
    seen = []
    rows = slide(documents, row_length, stride)
    for start, length, ignored in zip(*(x.tolist() for x in (rows.start, rows.length, rows.ignored)), strict=True):
        assert 0 < length <= row_length
        document = int(np.searchsorted(documents.offset, start, side="right")) - 1
        begin = start - int(documents.offset[document])  # inside the document
        assert begin + length <= lengths[document] + 1
        for place in range(ignored, length):
            seen.append((document, begin + place))
            assert begin == 0 or place >= row_length - stride
    assert sorted(seen) == [
        (d, t) for d, (n, p) in enumerate(zip(lengths, prefix, strict=True)) for t in range(p, n + 1)
    ]
