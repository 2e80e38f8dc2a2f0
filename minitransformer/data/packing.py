"""Documents into rows of fixed length: pure functions on arrays.

All documents lie end to end in one token stream, each with the boundary token before it and one more at the
very end: `0 5 6 7 0 8 9 0`. Reading the inputs of a document at its offset and its targets one further on
gives start token + tokens against tokens + end token, with nothing stored twice.
"""

from dataclasses import dataclass

import numpy as np

IGNORE = -100  # the target of a place that holds no token; `F.cross_entropy` skips it


@dataclass
class Rows:
    """Which stretch of the stream lies where: piece i is `stream[start[i] : start[i] + length[i]]`.

    The pieces of row r are `first[r] : first[r + 1]`.
    """

    start: np.ndarray  # (n_pieces,) int64, offset in the stream
    length: np.ndarray  # (n_pieces,) int32, targets in the piece
    first: np.ndarray  # (n_rows + 1,) int64

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def targets(self) -> np.ndarray:
        """(n_rows,) target tokens in each row."""
        return np.add.reduceat(self.length, self.first[:-1]) if len(self) else np.zeros(0, np.int64)


def cut(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most `row_length` targets, the short rest last.

    lengths: (n_documents,) tokens in each, without the boundary token. Every token and the end token is a target
    exactly once. Returns the offset of each piece in the stream and its length, (n_pieces,) each.
    """
    targets = np.asarray(lengths, np.int64) + 1
    pieces = -(-targets // row_length)
    offsets = np.concatenate(([0], np.cumsum(targets)[:-1])) if len(targets) else targets
    document = np.repeat(np.arange(len(targets)), pieces)
    index = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = offsets[document] + index * row_length
    return start, np.minimum(targets[document] - index * row_length, row_length).astype(np.int32)


def pack(lengths: np.ndarray, row_length: int) -> Rows:
    """Fill rows by best fit, longest piece first (Ding et al. 2024, Fewer Truncations Improve Language Modeling).

    A piece goes into the fullest row that still has room. Rows with the same room are alike, so whole groups of
    equal pieces are placed at once: the work grows with `row_length` squared, hardly with the number of documents.
    """
    start, length = cut(lengths, row_length)
    if not len(start):
        return Rows(start, length, np.zeros(1, np.int64))
    order = np.argsort(-length, kind="stable")
    row_of = np.empty(len(length), np.int64)
    room: list[list[np.ndarray]] = [[] for _ in range(row_length + 1)]  # rows by what still fits in them
    n_rows = placed = 0
    sizes, counts = np.unique(length, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces, placed = order[placed : placed + count], placed + count
        space = size
        while len(pieces):
            while space <= row_length and not room[space]:
                space += 1
            if space <= row_length:
                rows = room[space].pop()
            else:  # nothing open has room: open rows for all that is left
                space = row_length
                rows = np.arange(n_rows, n_rows - (-len(pieces) // (space // size)))
                n_rows += len(rows)
            # A row that has taken a piece is the fullest one with room, until the next does not fit.
            each = space // size
            taken = min(len(pieces), each * len(rows))
            row_of[pieces[:taken]] = np.repeat(rows, each)[:taken]
            pieces = pieces[taken:]
            full, rest = divmod(taken, each)
            room[space - each * size].append(rows[:full])
            if rest:
                room[space - rest * size].append(rows[full : full + 1])
            if len(left := rows[full + (rest > 0) :]):
                room[space].append(left)
    by_row = np.argsort(row_of, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=n_rows))))
    return Rows(start[by_row], length[by_row], first)


def fill(stream: np.ndarray, rows: Rows, index: np.ndarray, row_length: int) -> tuple[np.ndarray, ...]:
    """Lay out the rows `index`: tokens, positions and targets, (len(index), row_length) int64 each.

    Places without a token hold id 0, position -1 and target IGNORE.
    """
    shape = (len(index), row_length)
    tokens, positions, targets = np.zeros(shape, np.int64), np.full(shape, -1), np.full(shape, IGNORE)
    steps = np.arange(row_length)
    for row, chosen in enumerate(index):
        place = 0
        for piece in range(rows.first[chosen], rows.first[chosen + 1]):
            start, length = rows.start[piece], rows.length[piece]
            end = place + length
            tokens[row, place:end] = stream[start : start + length]
            targets[row, place:end] = stream[start + 1 : start + length + 1]
            positions[row, place:end] = steps[:length]
            place = end
    return tokens, positions, targets
