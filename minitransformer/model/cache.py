"""The keys and values of tokens already read, so that a new token costs one step and not a whole pass."""

import torch
from torch import Tensor

from minitransformer.model.config import ModelConfig


class KVCache:
    """Keys and values of every layer, allocated once (Pope et al. 2022, section 3.3).

    keys, values: (n_layers, B, n_kv_heads, max_length, d_head). Only the first `length` columns are filled,
    and only those are read. positions: (B, max_length), -1 on padding.
    """

    def __init__(self, config: ModelConfig, batch_size: int, max_length: int, device=None, dtype=None):
        shape = (config.n_layers, batch_size, config.kv_heads, max_length, config.head_width)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.positions = torch.full((batch_size, max_length), -1, device=device)
        self.max_length = max_length
        self.length = 0
        self.plain = True  # no padding and one document a row, so far

    @property
    def nbytes(self) -> int:
        """Bytes held, filled or not."""
        return self.keys.nbytes + self.values.nbytes + self.positions.nbytes

    def append_positions(self, positions: Tensor | None, n_tokens: int) -> Tensor:
        """Note the positions of the coming tokens (None: each row goes on by one) and return all, (B, length).

        Raises:
            ValueError: the tokens do not fit.
        """
        end = self.length + n_tokens
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} tokens; {self.length} + {n_tokens} do not fit")
        if positions is None:
            last = self.positions[:, self.length - 1 : self.length] if self.length else self.positions[:, :1]
            positions = last + torch.arange(1, n_tokens + 1, device=last.device)
        else:
            expected = torch.arange(self.length, end, device=positions.device)
            self.plain = self.plain and bool((positions == expected).all())
        self.positions[:, self.length : end] = positions
        self.length = end
        return self.positions[:, :end]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, D) of the newest tokens and return all, (B, H, length, D)."""
        start = self.length - keys.shape[2]
        self.keys[layer, :, :, start : self.length] = keys
        self.values[layer, :, :, start : self.length] = values
        return self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]
