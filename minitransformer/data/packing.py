"""Documents into rows of fixed length: pure functions on arrays.

All documents lie end to end in one token stream, each with the end token (EOS) before it and one more at the
very end: `0 5 6 7 0 8 9 0`. Reading the inputs of a document at its offset and its targets one further on
gives BOS + tokens against tokens + EOS, with nothing stored twice.
"""

from dataclasses import dataclass, replace

import numpy as np

IGNORE = -100  # the target of a place that holds no token, or that no loss is taken on; `F.cross_entropy` skips it


@dataclass
class TokenStream:
    """The ids of documents that lie end to end, (n,) of any integer type.

    eos_id: the id before each document and after the last, which ends a document as a target. bos_id: the id that
    starts a document as an input, where the stream holds EOS.
    """

    ids: np.ndarray
    eos_id: int
    bos_id: int

    def inputs(self, places: np.ndarray) -> np.ndarray:
        ids = self.ids[places].astype(np.int64)
        return np.where(ids == self.eos_id, self.bos_id, ids)

    def targets(self, places: np.ndarray) -> np.ndarray:
        """What follows each input."""
        return self.ids[places + 1].astype(np.int64)  # ids have no sign, IGNORE has


@dataclass
class Documents:
    """Some of the documents of a token stream, (n,) each.

    offset: of each document's EOS token before it. length: its tokens, without EOS. prefix: how many of them, from
    the start, are read and no target.
    """

    offset: np.ndarray  # int64
    length: np.ndarray  # int64
    prefix: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.length)

    def take(self, which: np.ndarray) -> "Documents":
        return Documents(self.offset[which], self.length[which], self.prefix[which])

    @classmethod
    def of(cls, length: np.ndarray, prefix: np.ndarray | None = None) -> "Documents":
        """All documents of a stream, from their lengths."""
        length = np.asarray(length, np.int64)
        offset = np.cumsum(length + 1) - (length + 1)
        return cls(offset, length, np.zeros_like(length) if prefix is None else np.asarray(prefix, np.int64))


@dataclass
class Rows:
    """Which stretch of the stream lies where: piece i is `stream[start[i] : start[i] + length[i]]`.

    The pieces of row r are `first[r] : first[r + 1]`. The first `ignored[i]` targets of a piece do not count.
    continuous: pieces are one text, whose positions run on through the row.
    """

    start: np.ndarray  # (n_pieces,) int64, offset in the stream
    length: np.ndarray  # (n_pieces,) int32
    ignored: np.ndarray  # (n_pieces,) int32
    first: np.ndarray  # (n_rows + 1,) int64
    continuous: bool = False

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def targets(self) -> np.ndarray:
        """(n_rows,) target tokens in each row."""
        counted = (self.length - self.ignored).astype(np.int64)
        return np.add.reduceat(counted, self.first[:-1]) if len(self) else counted


def cut(documents: Documents, row_length: int) -> Rows:
    """Cut documents into pieces of at most `row_length` targets, the short rest last; each piece is a row.

    Every token after the prefix, and the end token, is a target exactly once. A piece of prefix alone is left out.
    """
    targets = documents.length + 1
    pieces = -(-targets // row_length)
    document = np.repeat(np.arange(len(targets)), pieces)
    done = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * row_length
    length = np.minimum(targets[document] - done, row_length)
    ignored = np.clip(documents.prefix[document] - done, 0, length)
    kept = ignored < length
    start, length, ignored = (x[kept] for x in (documents.offset[document] + done, length, ignored))
    return Rows(start, length.astype(np.int32), ignored.astype(np.int32), np.arange(len(start) + 1))


def slide(documents: Documents, row_length: int, stride: int) -> Rows:
    """Windows of at most `row_length` targets over each document, each a row that counts what none before it counts.

    They begin `stride` apart, but the last ends with its document: whatever is not in a first window has at least
    `row_length - stride` tokens before it. Every token after the prefix, and the end token, counts exactly once.
    """
    targets = documents.length + 1
    windows = 1 + np.maximum(0, -(-(targets - row_length) // stride))
    document = np.repeat(np.arange(len(targets)), windows)
    number = np.arange(len(document)) - np.repeat(np.cumsum(windows) - windows, windows)
    length = np.minimum(targets, row_length)[document]
    begin = np.minimum(number * stride, targets[document] - length)
    counted = np.where(number, (number - 1) * stride + row_length, 0)  # by the windows before
    ignored = np.clip(np.maximum(counted, documents.prefix[document]) - begin, 0, length)
    kept = ignored < length
    start, length, ignored = (x[kept] for x in (documents.offset[document] + begin, length, ignored))
    return Rows(start, length.astype(np.int32), ignored.astype(np.int32), np.arange(len(start) + 1))


def pack(documents: Documents, row_length: int, how: str = "best_fit", turn: int = 0) -> Rows:
    """Rows of at most `row_length` targets.

    how:
        best_fit: the fullest row with room, longest piece first (Ding et al. 2024, Fewer Truncations Improve Language
            Modeling).
        sequential: pieces in order; a row ends before the piece that does not fit.
        pad: each piece is a row.
        concat: one stream cut at `row_length`, as GPT-2's; documents see each other. It is a ring, cut first after
            `turn` targets, so that another `turn` moves all cuts, and their number stays.
    """
    if how == "concat":
        return _concat(documents, row_length, turn)
    pieces = cut(documents, row_length)
    if how == "pad" or not len(pieces):
        return pieces
    place = {"best_fit": _best_fit, "sequential": _sequential}[how]
    row_of = place(pieces.length, row_length)
    order = np.argsort(row_of, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(row_of))))
    return Rows(pieces.start[order], pieces.length[order], pieces.ignored[order], first)


def _best_fit(length: np.ndarray, row_length: int) -> np.ndarray:
    """The row of each piece.

    Rows with the same room are alike, so whole groups of equal pieces are placed at once: the work grows with
    `row_length` squared, hardly with the number of pieces.
    """
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
    return row_of


def _sequential(length: np.ndarray, row_length: int) -> np.ndarray:
    """The row of each piece."""
    ends = np.cumsum(length, dtype=np.int64)
    # For every piece, the first that does not fit into a row which begins with it; the rows are a walk along these.
    after = np.searchsorted(ends, ends - length + row_length, side="right").tolist()
    starts_row = np.zeros(len(length), np.int64)
    piece = 0
    while piece < len(after):
        starts_row[piece] = 1
        piece = after[piece]
    return np.cumsum(starts_row) - 1


def _concat(documents: Documents, row_length: int, turn: int) -> Rows:
    """Rows of a ring of all documents, cut every `row_length` targets from `turn` on."""
    ends = np.cumsum(documents.length + 1)
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return replace(cut(documents, row_length), continuous=True)
    cuts = np.arange(turn % total, turn % total + total, row_length) % total
    # Pieces lie between neighbours among the ends of documents and the cuts of rows.
    edges = np.unique(np.concatenate((ends - documents.length - 1, cuts)))
    length = np.diff(edges, append=total)
    document = np.searchsorted(ends, edges, side="right")
    inside = edges - (ends - documents.length - 1)[document]
    ignored = np.clip(documents.prefix[document] - inside, 0, length)
    begin = np.searchsorted(edges, cuts[0])  # the ring is read from the first cut on
    start, length, ignored = (np.roll(x, -begin) for x in (documents.offset[document] + inside, length, ignored))
    done = np.cumsum(length) - length
    first = np.append(np.searchsorted(done, np.arange(0, total, row_length)), len(start))
    return Rows(start, length.astype(np.int32), ignored.astype(np.int32), first, continuous=True)


def fill(stream: TokenStream, rows: Rows, index: np.ndarray, row_length: int) -> tuple[np.ndarray, ...]:
    """Lay out the rows `index`: tokens, positions and targets, (len(index), row_length) int64 each.

    Places without a token hold id 0, position -1 and target IGNORE.
    """
    counts = rows.first[index + 1] - rows.first[index]
    row = np.repeat(np.arange(len(index)), counts)  # of each piece
    piece = _ranges(rows.first[index], counts)
    length = rows.length[piece].astype(np.int64)
    before = np.cumsum(length) - length
    place = before - before[np.cumsum(counts) - counts][row]  # of each piece in its row
    inside = _ranges(np.zeros_like(length), length)
    source = np.repeat(rows.start[piece], length) + inside
    target = np.repeat(row * row_length + place, length) + inside
    shape = (len(index), row_length)
    tokens, positions, targets = np.zeros(shape, np.int64), np.full(shape, -1), np.full(shape, IGNORE)
    tokens.reshape(-1)[target] = stream.inputs(source)
    ignored = inside < np.repeat(rows.ignored[piece], length)
    targets.reshape(-1)[target] = np.where(ignored, IGNORE, stream.targets(source))
    positions.reshape(-1)[target] = target % row_length if rows.continuous else inside
    return tokens, positions, targets


def _ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, ... (count[0] numbers), start[1], ..."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - count), count)
