"""Which keys a query may see: functions of positions that compose, and their view of one forward pass.

`allow(q, k)` takes query and key positions that broadcast and says where attention is permitted.
Masks compose with `&` and `|`. Positions say the rest: two tokens belong to one document when no
position 0 stands between them, and -1 is padding, which sees nothing and is seen by nothing.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor


class Mask:
    """A function of indices with `&` and `|`."""

    def __init__(self, allow: Callable[[Tensor, Tensor], Tensor]):
        self.allow = allow

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        return self.allow(q, k)

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(lambda q, k: self(q, k) & other(q, k))

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(lambda q, k: self(q, k) | other(q, k))


causal = Mask(lambda q, k: k <= q)


def documents(positions: Tensor) -> Tensor:
    """Number the documents of each row: (B, T) positions -> (B, T) document numbers from 1, or -1 on padding."""
    return torch.where(positions < 0, -1, (positions == 0).cumsum(-1))


# Below this many tokens a document, one dense mask is faster than a call for each document.
SLICE_TOKENS = 32


class Visibility:
    """What each query of one forward pass may see, worked out once and shared by all layers.

    key_positions: (B, Tk), cached keys first; the queries are its last `n_queries` columns.
    plain: True when the caller knows that every row is one document without padding, which spares
        looking at the positions; None looks (it costs a synchronisation on a GPU).
    """

    def __init__(self, key_positions: Tensor, n_queries: int, plain: bool | None = None, mask: Mask = causal):
        self.key_positions = key_positions
        self.n_queries = n_queries
        self.mask = mask
        self._plain = plain

    @property
    def query_positions(self) -> Tensor:
        return self.key_positions[:, -self.n_queries :]

    @cached_property
    def plain(self) -> bool:
        """Is every row one document from position 0 on, without padding?"""
        if self._plain is not None:
            return self._plain
        expected = torch.arange(self.key_positions.shape[1], device=self.key_positions.device)
        return bool((self.key_positions == expected).all())

    @property
    def is_causal(self) -> bool:
        """Is this exactly the lower triangle?"""
        return self.plain and self.mask is causal and self.n_queries == self.key_positions.shape[1]

    @property
    def sees_all(self) -> bool:
        """May every query see every key? So it is when one new token follows a cached document."""
        return self.plain and self.mask is causal and self.n_queries == 1

    @cached_property
    def dense(self) -> Tensor:
        """(B, 1, Tq, Tk), True where attention is permitted."""
        key_documents = documents(self.key_positions)
        query_documents = key_documents[:, -self.n_queries :]
        same = (query_documents[:, :, None] == key_documents[:, None, :]) & (query_documents[:, :, None] > 0)
        return (same & self.mask(self.query_positions[:, :, None], self.key_positions[:, None, :])).unsqueeze(1)

    def worth_slicing(self, device: torch.device) -> bool:
        """Is attention document by document possible and faster? On a GPU many small calls are not."""
        if device.type != "cpu" or self.mask is not causal or self.n_queries != self.key_positions.shape[1]:
            return False
        return sum(pieces for pieces, _, _ in self.slices) * SLICE_TOKENS <= self.key_positions.numel()

    @cached_property
    def slices(self) -> list[tuple[int, int, bool]]:
        """The batch laid end to end, as runs of (number of pieces, tokens in a piece, is it text?).

        Pieces are documents or stretches of padding; neighbours of one length form one run, so that
        whole rows of one document each are attended to in a single call.
        """
        rows, length = self.key_positions.shape
        flat = self.key_positions.flatten()
        padding = flat < 0
        starts = (flat == 0) | (torch.arange(rows * length, device=flat.device) % length == 0)
        starts[1:] |= padding[1:] != padding[:-1]
        edges = starts.nonzero().flatten()
        lengths = torch.diff(edges, append=edges.new_tensor([rows * length])).tolist()
        runs: list[tuple[int, int, bool]] = []
        for size, is_padding in zip(lengths, padding[edges].tolist(), strict=True):
            if runs and runs[-1][1:] == (size, not is_padding):
                runs[-1] = (runs[-1][0] + 1, size, not is_padding)
            else:
                runs.append((1, size, not is_padding))
        return runs
