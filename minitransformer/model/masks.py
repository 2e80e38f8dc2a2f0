"""Which keys a query may see: functions of positions that compose, and their view of one forward pass.

`allow(q, k)` takes query and key positions that broadcast and says where attention is permitted.
Masks compose with `&` and `|`. Positions say the rest: two tokens belong to one document when no
position 0 stands between them, and -1 is padding, which sees nothing and is seen by nothing.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from minitransformer.model.positions import PositionalEncoding


class Mask:
    """A function of indices with `&` and `|`.

    reach: no query sees a key this many positions before it, or further; None where some may.
    contiguous: a query sees itself and all keys before it within reach, and nothing else.
    """

    def __init__(self, allow: Callable[[Tensor, Tensor], Tensor], reach: int | None = None, contiguous: bool = False):
        self.allow, self.reach, self.contiguous = allow, reach, contiguous

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        return self.allow(q, k)

    def __and__(self, other: "Mask") -> "Mask":
        reaches = [r for r in (self.reach, other.reach) if r is not None]
        return Mask(lambda q, k: self(q, k) & other(q, k), min(reaches, default=None))

    def __or__(self, other: "Mask") -> "Mask":
        reach = None if self.reach is None or other.reach is None else max(self.reach, other.reach)
        return Mask(lambda q, k: self(q, k) | other(q, k), reach)


causal = Mask(lambda q, k: k <= q, contiguous=True)


def window(size: int) -> Mask:
    """The `size` newest tokens, itself among them (Beltagy et al. 2020, Longformer; Jiang et al. 2023, Mistral)."""
    return Mask(lambda q, k: (k <= q) & (q - k < size), reach=size, contiguous=True)


def first(n: int) -> Mask:
    """The first `n` tokens of the document are seen by all that follow (global tokens of Longformer and BigBird)."""
    return Mask(lambda q, k: (k <= q) & (k < n))


def random_blocks(block: int, per_query: int, seed: int = 0) -> Mask:
    """Each block of queries sees `per_query` earlier blocks, the same ones every time (Zaheer et al. 2020, BigBird).

    Which ones is a hash of the block's number, so no table bounds the length.
    """

    def allow(q: Tensor, k: Tensor) -> Tensor:
        q_block, k_block = q.clamp(min=0) // block, k.clamp(min=0) // block
        seen = torch.zeros((), dtype=torch.bool, device=q.device)
        for i in range(per_query):
            mixed = (q_block * 2654435761 + (i + 1) * 40503 + seed * 97) & 0x7FFFFFFF
            mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0x7FFFFFFF
            seen = seen | (k_block == mixed % q_block.clamp(min=1))
        return (k <= q) & seen

    return Mask(allow)


def strided(stride: int) -> Mask:
    """The `stride` newest tokens, and every `stride`-th before them (Child et al. 2019, Sparse Transformer)."""
    return Mask(lambda q, k: (k <= q) & ((q - k < stride) | ((q - k) % stride == 0)))


def fixed(stride: int, summary: int) -> Mask:
    """The query's own block of `stride`, and the last `summary` places of every block (Child et al. 2019)."""
    return Mask(lambda q, k: (k <= q) & ((q // stride == k // stride) | (k % stride >= stride - summary)))


def prefix(length: Tensor | int) -> Mask:
    """Any query sees the first `length` tokens of its document (Raffel et al. 2020, prefix LM); or it to causal."""
    return Mask(lambda q, k: (k >= 0) & (k < length))


def documents(positions: Tensor) -> Tensor:
    """Number the documents of each row: (B, T) positions -> (B, T), -1 on padding.

    A document whose start lies before the row, as in a rolling cache, has number 0.
    """
    return torch.where(positions < 0, -1, (positions == 0).cumsum(-1))


# Below this many tokens a document, one dense mask is faster than a call for each document.
SLICE_TOKENS = 32


class AttentionMask:
    """What each query of one forward pass may see, worked out once and shared by the layers with the same mask.

    key_positions: (B, Tk), cached keys first; the queries are its last `n_queries` columns.
    plain: True when the caller knows that every row is one document without padding, which spares
        looking at the positions; None looks (it costs a synchronisation on a GPU).
    fixed_shapes: no shape may depend on where documents lie, as a compiled graph would be made anew for each.
    """

    def __init__(
        self,
        key_positions: Tensor,
        n_queries: int,
        plain: bool | None = None,
        mask: Mask = causal,
        fixed_shapes: bool = False,
    ):
        self.key_positions = key_positions
        self.n_queries = n_queries
        self.mask = mask
        self._plain = plain
        self.fixed_shapes = fixed_shapes
        self._rotation: Tensor | None = None

    @classmethod
    def of_rows(cls, x: Tensor) -> "AttentionMask":
        """For (B, T, ...) where every row is one causal document."""
        return cls(torch.arange(x.shape[1], device=x.device)[None], x.shape[1], plain=True)

    def rotation(self, position: "PositionalEncoding") -> Tensor | None:
        """How the encoding turns the queries, and the keys that come with them; None where it does not."""
        if self._rotation is None and position.rotates:
            self._rotation = position.rotation(self.query_positions)
        return self._rotation

    def prepare(self, position: "PositionalEncoding", kernel: str) -> None:
        """Work out now what the layers will ask for, so that none of it becomes part of their graph."""
        self.rotation(position)
        pairs = "block_mask" if kernel == "flex" else "bands" if self.worth_banding else "dense"
        for name in ("query_positions", "is_causal", "sees_all", pairs):
            getattr(self, name)

    @cached_property
    def query_positions(self) -> Tensor:
        return self.key_positions[:, -self.n_queries :]

    @cached_property
    def plain(self) -> bool:
        """Is every row a stretch of one document, without padding?"""
        if self._plain is not None:
            return self._plain
        expected = torch.arange(self.key_positions.shape[1], device=self.key_positions.device)
        return bool((self.key_positions == expected).all())

    @property
    def whole(self) -> bool:
        """Are the queries all the keys, so that nothing comes from a cache?"""
        return self.n_queries == self.key_positions.shape[1]

    @property
    def _reaches_all(self) -> bool:
        """Does every query see all that lies before it in its document?"""
        return self.mask.contiguous and (self.mask.reach is None or self.key_positions.shape[1] <= self.mask.reach)

    @cached_property
    def is_causal(self) -> bool:
        """Is this exactly the lower triangle?"""
        return self.plain and self.whole and self._reaches_all

    @cached_property
    def sees_all(self) -> bool:
        """May every query see every key? So it is when one new token follows a cached document."""
        return self.plain and self.n_queries == 1 and self._reaches_all

    def allowed(self, q_columns: Tensor, k_columns: Tensor) -> Tensor:
        """(..., q), (..., k) columns of the row -> (B, ..., q, k), True where attention is permitted."""
        positions, numbers = self.key_positions, self.documents
        q, k = positions[:, q_columns].unsqueeze(-1), positions[:, k_columns].unsqueeze(-2)
        q_document, k_document = numbers[:, q_columns].unsqueeze(-1), numbers[:, k_columns].unsqueeze(-2)
        return (q_document == k_document) & (q_document >= 0) & self.mask(q, k)

    @cached_property
    def documents(self) -> Tensor:
        """(B, Tk), see `documents`."""
        return documents(self.key_positions)

    @cached_property
    def dense(self) -> Tensor:
        """(B, 1, Tq, Tk), True where attention is permitted."""
        columns = torch.arange(self.key_positions.shape[1], device=self.key_positions.device)
        return self.allowed(columns[-self.n_queries :], columns).unsqueeze(1)

    @cached_property
    def block_mask(self) -> "BlockMask":
        """For `flex_attention`: which blocks of queries and keys have anything to do with each other."""
        from torch.nn.attention.flex_attention import create_block_mask

        positions, numbers, offset = self.key_positions, self.documents, self.key_positions.shape[1] - self.n_queries
        one_row = len(positions) == 1

        def allow(b, h, qi, ki):
            b, qi = (0 if one_row else b), qi + offset
            same = (numbers[b, qi] == numbers[b, ki]) & (numbers[b, qi] >= 0)
            return same & self.mask(positions[b, qi], positions[b, ki])

        rows = None if one_row else len(positions)
        return create_block_mask(allow, rows, None, self.n_queries, positions.shape[1], device=positions.device)

    @cached_property
    def worth_banding(self) -> bool:
        """Does a short reach make attention in bands of that width cheaper than over whole rows?"""
        return self.whole and self.mask.reach is not None and self.n_queries >= 4 * self.mask.reach

    @cached_property
    def bands(self) -> Tensor:
        """Rows cut into bands of `reach` queries, which meet their own keys and those of the band before.

        (B, n, reach, 2 * reach), True where attention is permitted; queries past the row's end see nothing.
        """
        length, reach = self.n_queries, self.mask.reach
        n = -(-length // reach)
        columns = torch.arange(n * reach, device=self.key_positions.device).view(n, reach)
        keys = torch.cat((columns - reach, columns), dim=1)
        inside = (columns < length).unsqueeze(-1) & ((keys >= 0) & (keys < length)).unsqueeze(-2)
        allowed = self.allowed(columns.clamp(max=length - 1), keys.clamp(0, length - 1))
        return allowed & inside

    def worth_slicing(self, device: torch.device) -> bool:
        """Is attention document by document possible and faster? On a GPU many small calls are not."""
        if device.type != "cpu" or self.fixed_shapes or not self.whole or not self.mask.contiguous:
            return False
        if self.mask.reach is not None and max(size for _, size, _ in self.slices) > self.mask.reach:
            return False  # a document longer than the window
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
