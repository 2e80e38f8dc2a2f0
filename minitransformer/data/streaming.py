"""Rows out of a stream of documents that is never kept: tokenised, shuffled and packed a buffer at a time."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from minitransformer.data.config import HubConfig
from minitransformer.data.documents import hub_documents, load_hub
from minitransformer.data.packing import Rows, TokenStream, fill, pack
from minitransformer.data.rows import Batch, make_batch
from minitransformer.data.store import token_stream
from minitransformer.data.tokenizer import Tokenizer


class StreamingSteps(IterableDataset):
    """What this rank trains on, one optimizer step after another.

    `buffer` documents at a time are packed together and their rows put in a random order. Where a step stands in the
    stream is told by four plain values, its `state`: the epoch, the number of the buffer, where the data set stood when
    the buffer was filled, and how many of its rows are used. Every batch carries the state of the step after it.

    limit: documents whose hash is no larger are held out.
    """

    def __init__(
        self,
        config: HubConfig,
        tokenizer: Tokenizer,
        limit: float | None,
        row_length: int,
        seed: int,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.config, self.tokenizer, self.limit, self.row_length, self.seed = config, tokenizer, limit, row_length, seed
        self.state = state or {"epoch": 0, "buffer": 0, "source": None, "used": 0}
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Batch]:
        parts: list[tuple[np.ndarray, ...]] = []  # of the coming step, from one buffer or more
        missing = self.config.batch_size
        for stream, rows, order, begin in self._buffers():
            used = begin["used"]
            while used < len(order):
                numbers = order[used : used + missing]
                parts.append(fill(stream, rows, numbers, self.row_length))
                used, missing = used + len(numbers), missing - len(numbers)
                if not missing:
                    arrays = tuple(map(np.concatenate, zip(*parts, strict=True)))
                    yield make_batch(arrays, self.rank, self.ranks, begin | {"used": used})
                    parts, missing = [], self.config.batch_size

    def _buffers(self) -> Iterator[tuple[TokenStream, Rows, np.ndarray, dict]]:
        """Token streams with their rows, the order of these, and the state in which each begins."""
        table = load_hub(self.config, self.config.train_split)
        epoch, number, source, used = (self.state[name] for name in ("epoch", "buffer", "source", "used"))
        if source is not None:
            table.load_state_dict(source)
        while True:
            empty = source is None
            documents = hub_documents(self.config, table)
            while chunk := list(islice(documents, self.config.buffer)):
                following = table.state_dict()
                stream, rows = self._pack(chunk)
                if len(rows):
                    empty = False
                    kept = self.config.packing == "sequential"
                    random = np.random.default_rng((self.seed, epoch, number))
                    order = np.arange(len(rows)) if kept else random.permutation(len(rows))
                    yield stream, rows, order, dict(epoch=epoch, buffer=number, source=source, used=used)
                    used = 0
                source, number = following, number + 1
            if empty:
                raise ValueError(f"{self.config.name} ({self.config.train_split}) holds no text to train on")
            # From the start again: a state that is at its end would stay there.
            table, source = load_hub(self.config, self.config.train_split), None
            epoch, number = epoch + 1, 0

    def _pack(self, chunk: list) -> tuple[TokenStream, Rows]:
        kept = [d for d in chunk if not d.blank and (self.limit is None or d.key() > self.limit)]
        stream, documents = token_stream(kept, self.tokenizer)
        return stream, pack(documents, self.row_length, self.config.packing)
