"""What a model remembers of tokens already read, so that a new token costs one step and not a whole pass."""

import torch
from torch import Tensor

from minitransformer.model.config import ModelConfig
from minitransformer.model.masks import Mask


class Buffer:
    """The newest entries along dimension 2 of (B, H, capacity, D), allocated once.

    rolling: the oldest make room for new ones; otherwise the buffer is filled once from the front.
    """

    def __init__(self, shape: tuple[int, int, int, int], rolling: bool, fill: float = 0, device=None, dtype=None):
        self.data = torch.full(shape, fill, device=device, dtype=dtype)
        self.rolling, self.length = rolling, 0

    def append(self, new: Tensor) -> Tensor:
        """Store (B, H, T, D) and return all that the new ones may look at, themselves last."""
        if not self.rolling:
            start, self.length = self.length, self.length + new.shape[2]
            self.data.narrow(2, start, new.shape[2]).copy_(new)
            return self.data.narrow(2, 0, self.length)
        seen = torch.cat((self.data[:, :, : self.length], new), dim=2)
        kept = seen[:, :, -self.data.shape[2] :]
        self.length = kept.shape[2]
        self.data[:, :, : self.length] = kept
        return seen


class KVCache:
    """Keys and values of every layer, allocated once (Pope et al. 2022, section 3.3).

    A layer whose mask reaches back a limited number of tokens keeps only those (Mistral's rolling buffer, Jiang et al.
    2023); a layer of linear attention keeps its state. Only filled entries are read.

    masks: of each layer. length: tokens read so far. max_length: tokens that may be read.
    rolling: False keeps all tokens in every layer, so that the newest may be taken back.
    """

    def __init__(
        self,
        config: ModelConfig,
        masks: list[Mask],
        batch_size: int,
        max_length: int,
        device=None,
        dtype=None,
        rolling: bool = True,
    ):
        self.max_length, self.length = max_length, 0
        self.plain = True  # no padding and one document a row, so far
        linear = config.attention.kind != "softmax"
        reaches = [mask.reach if rolling and mask.reach else max_length for mask in masks]
        self.capacity = [1 if linear else min(reach, max_length) for reach in reaches]
        like = dict(device=device, dtype=dtype)

        def buffer(capacity: int) -> Buffer:
            shape = (batch_size, config.kv_heads, capacity, config.head_width)
            return Buffer(shape, rolling=capacity < max_length, **like)

        self.keys = [] if linear else [buffer(capacity) for capacity in self.capacity]
        self.values = [] if linear else [buffer(capacity) for capacity in self.capacity]
        self.states: list[Tensor | None] = [None] * (config.n_layers if linear else 0)
        self.positions = {
            capacity: Buffer((batch_size, 1, capacity, 1), capacity < max_length, -1, device, torch.long)
            for capacity in set(self.capacity)
        }
        self.last = torch.full((batch_size, 1), -1, device=device)  # the newest position of each row

    @property
    def nbytes(self) -> int:
        """Bytes held, filled or not."""
        buffers = [*self.keys, *self.values, *self.positions.values()]
        return sum(b.data.nbytes for b in buffers) + sum(s.nbytes for s in self.states if s is not None)

    def repeat(self, times: int) -> None:
        """Let each row be followed by copies of itself, `times` in all, for several continuations of one prompt."""
        for buffer in (*self.keys, *self.values, *self.positions.values()):
            buffer.data = buffer.data.repeat_interleave(times, 0)
        self.states = [None if state is None else state.repeat_interleave(times, 0) for state in self.states]
        self.last = self.last.repeat_interleave(times, 0)

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was, for beams that die and fork."""
        for buffer in (*self.keys, *self.values, *self.positions.values()):
            filled = buffer.data[:, :, : buffer.length]
            filled.copy_(filled.index_select(0, rows))
        self.states = [None if state is None else state.index_select(0, rows) for state in self.states]
        self.last = self.last.index_select(0, rows)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: some layer no longer has them as they were: it rolls, or keeps a state alone.
        """
        if any(capacity < self.max_length for capacity in self.capacity):
            raise ValueError("a cache that rolls, or of linear attention, cannot forget its newest tokens")
        for buffer in (*self.keys, *self.values, *self.positions.values()):
            buffer.length = length
        self.length = length
        newest = self.positions[self.max_length].data[:, 0, length - 1]
        self.last = newest if length else torch.full_like(newest, -1)

    def append_positions(self, positions: Tensor | None, n_tokens: int) -> dict[int, Tensor]:
        """Note the positions of the coming tokens, (B, T) (None: each row goes on by one).

        Returns what the layers of each capacity will look at, (B, Tk) positions.

        Raises:
            ValueError: the tokens do not fit.
        """
        if self.length + n_tokens > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} tokens; {self.length} + {n_tokens} do not fit")
        if positions is None:
            positions = self.last + torch.arange(1, n_tokens + 1, device=self.last.device)
        else:
            expected = torch.arange(self.length, self.length + n_tokens, device=positions.device)
            self.plain = self.plain and bool((positions == expected).all())
            positions = positions.expand(len(self.last), -1)
        self.length += n_tokens
        self.last = positions[:, -1:]
        return {capacity: b.append(positions[:, None, :, None])[:, 0, :, 0] for capacity, b in self.positions.items()}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, D) of the newest tokens and return all that they may look at, (B, H, Tk, D)."""
        return self.keys[layer].append(keys), self.values[layer].append(values)
