"""Which rows make up a step: an order that is a function of (seed, step)."""

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from minitransformer.data.packing import IGNORE, Documents, Rows, TokenStream, fill, pack


class Batch(NamedTuple):
    """Rows of one optimizer step, or of one validation step.

    tokens, positions, targets: (B, T) int64; positions restart at 0 where a document starts and are -1 on padding,
    where targets are IGNORE. step_targets: target tokens of the whole step, over all ranks.
    state: of a stream, where the step after this one begins.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    step_targets: int
    state: dict[str, Any] | None = None


def make_batch(arrays: tuple[np.ndarray, ...], rank: int = 0, ranks: int = 1, state: dict | None = None) -> Batch:
    """The rows of one rank out of those of a step, given as tokens, positions and targets."""
    mine = (torch.from_numpy(np.array_split(x, ranks)[rank]) for x in arrays)
    return Batch(*mine, int((arrays[2] >= 0).sum()), state)


class TrainingSteps(Dataset):
    """Item s is what this rank trains on in optimizer step s, a pure function of (seed, s).

    Rows are drawn without replacement, in a new order each epoch; a step that reaches past an epoch's end goes on
    into the next, so every row comes exactly once an epoch and every step is full. `sequential` rows keep their order;
    `concat` cuts its rows elsewhere in each epoch. limit: rows in use (None: all).

    Raises:
        ValueError: there are fewer rows than ranks, or a step's rows do not divide into them.
    """

    def __init__(
        self,
        tokens: TokenStream,
        documents: Documents,
        row_length: int,
        batch_size: int,
        seed: int,
        packing: str = "best_fit",
        limit: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.tokens, self.documents, self.row_length, self.packing = tokens, documents, row_length, packing
        self.batch_size, self.seed, self.rank, self.ranks = batch_size, seed, rank, ranks
        self._epoch, self._rows, self._order = -1, pack(documents, row_length, packing), np.zeros(0, np.int64)
        self.n_rows = min(len(self._rows), limit or len(self._rows))
        if batch_size % ranks:
            raise ValueError(f"data.batch_size={batch_size} rows do not divide into {ranks} ranks")
        if self.n_rows < ranks:
            raise ValueError(f"the training text fills {self.n_rows} rows, fewer than there are ranks: {ranks}")

    def rows(self, epoch: int) -> tuple[Rows, np.ndarray]:
        """The rows of an epoch and their order."""
        if self._epoch != epoch:
            random = np.random.default_rng((self.seed, epoch))
            self._epoch, self._order = epoch, np.arange(self.n_rows)
            if self.packing != "sequential":
                self._order = random.permutation(self.n_rows)
            if self.packing == "concat":
                turn = int(random.integers(int(self.documents.length.sum()) + len(self.documents)))
                self._rows = pack(self.documents, self.row_length, "concat", turn)
        return self._rows, self._order

    def __getitem__(self, step: int) -> Batch:
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = np.divmod(places, self.n_rows)
        parts = []
        for epoch in np.unique(epochs).tolist():
            rows, order = self.rows(epoch)
            parts.append(fill(self.tokens, rows, order[places[epochs == epoch]], self.row_length))
        return make_batch(tuple(map(np.concatenate, zip(*parts, strict=True))), self.rank, self.ranks)


class StepNumbers(Sampler):
    """start, start + 1, ... without end: training stops at max_steps, never at the end of an epoch."""

    def __init__(self, start: int):
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return count(self.start)


class ValidationSteps(Dataset):
    """All validation rows in order, `batch_size` at a time, of which this rank reads its share.

    Every rank has as many steps, with as many rows: where rows do not divide, empty ones fill the last step up.
    """

    def __init__(
        self, tokens: TokenStream, rows: Rows, row_length: int, batch_size: int, rank: int = 0, ranks: int = 1
    ):
        self.tokens, self.rows, self.row_length, self.batch_size = tokens, rows, row_length, batch_size
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        if step >= len(self):
            raise IndexError(step)
        numbers = np.arange(step * self.batch_size, min((step + 1) * self.batch_size, len(self.rows)))
        arrays = fill(self.tokens, self.rows, numbers, self.row_length)
        padding = ((0, -len(numbers) % self.ranks), (0, 0))
        arrays = (np.pad(x, padding, constant_values=v) for x, v in zip(arrays, (0, -1, IGNORE), strict=True))
        return make_batch(tuple(arrays), self.rank, self.ranks)
