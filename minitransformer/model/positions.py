"""Positional encodings under one contract.

An encoding has three places where it may act; each does nothing unless an encoding overrides it:

- `embed(x, positions)` adds to the token embeddings (sinusoidal, learned);
- `rotation(positions)` gives what turns queries and keys (rotary);
- `bias(query_positions, key_positions)` adds to the attention scores.

Positions are counted inside a document: they restart at 0 where one starts, and are -1 on padding.
"""

import torch
from torch import Tensor, nn

from minitransformer.model.config import ModelConfig


class PositionalEncoding(nn.Module):
    """No encoding at all, and the base of the others (`position=none`, Haviv et al. 2022)."""

    #: may positions go past the length that the model was built for?
    extends = True

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, d_model), (B or 1, T) -> (B, T, d_model)."""
        return x

    def rotation(self, positions: Tensor) -> Tensor | None:
        """(B or 1, T) -> complex (B or 1, T, 1, d_head / 2) of modulus 1, or None."""
        return None

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """(B, Tq), (B, Tk) -> (B or 1, H or 1, Tq, Tk) to add to the scores, or None."""
        return None


def sinusoidal_encoding(length: int, d_model: int) -> Tensor:
    """Sines and cosines of geometrically falling frequency (Vaswani et al. 2017, section 3.5).

    Returns (length, d_model): even columns hold sin(p / 10000^(i / d_model)), odd ones the cosine.
    """
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    frequencies = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = positions * frequencies  # (length, d_model / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


class SinusoidalEncoding(PositionalEncoding):
    """A fixed table of sines added to the embeddings, which are scaled by sqrt(d_model) as in the paper."""

    extends = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.scale = config.d_model**0.5
        self.register_buffer("table", sinusoidal_encoding(config.max_seq_len, config.d_model), persistent=False)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * self.scale + self.table[positions.clamp(min=0)].to(x.dtype)


class LearnedEncoding(PositionalEncoding):
    """A trained vector for each position, added to the embeddings (Gehring et al. 2017, GPT-2)."""

    extends = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.max_seq_len, config.d_model)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.embedding(positions.clamp(min=0))


class RotaryEncoding(PositionalEncoding):
    """Turn pairs of query and key dimensions by an angle proportional to position (Su et al. 2021).

    Dimensions (2i, 2i + 1) are one complex number, so a turn is one multiplication, in fp32.
    """

    extends = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        exponents = torch.arange(0, config.head_width, 2, dtype=torch.float64, device="cpu") / config.head_width
        angles = (
            torch.arange(config.max_seq_len, dtype=torch.float64, device="cpu")[:, None]
            * config.rotary_base**-exponents
        )
        # Not a buffer: a module cast to bf16 would round the angles.
        self.turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)  # (max_seq_len, d_head / 2)

    def rotation(self, positions: Tensor) -> Tensor:
        if self.turns.device != positions.device:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be trained with later
                self.turns = self.turns.to(positions.device)
        return self.turns[positions.clamp(min=0)].unsqueeze(-2)  # (B, T, 1, d_head / 2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn (B, T, H, D) by complex (B or 1, T, 1, D / 2), in fp32 whatever the dtype of x."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


ENCODINGS = {
    "none": lambda config: PositionalEncoding(),
    "sinusoidal": SinusoidalEncoding,
    "learned": LearnedEncoding,
    "rotary": RotaryEncoding,
}
