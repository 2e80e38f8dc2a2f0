"""Positional encodings under one contract.

An encoding has three places where it may act; each does nothing unless an encoding overrides it:

- `embed(x, positions)` adds to the token embeddings (sinusoidal, learned);
- `rotation(positions)` gives what turns queries and keys (rotary);
- `bias(layer, query, query_positions, key_positions)` adds to the attention scores (ALiBi, T5, Shaw, Transformer-XL).

Positions are counted inside a document: they restart at 0 where one starts, and are -1 on padding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitransformer.model.config import ModelConfig


class PositionalEncoding(nn.Module):
    """No encoding at all, and the base of the others (`position=none`, Haviv et al. 2022)."""

    #: may positions go past the `max_seq_len` that the model was built for?
    extends = True
    #: does `rotation` turn queries and keys?
    rotates = False
    #: does `bias` add to the scores?
    biased = False

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, T, d_model), (B or 1, T) -> (B, T, d_model)."""
        return x

    def rotation(self, positions: Tensor) -> Tensor:
        """(B or 1, T) -> complex (B or 1, T, 1, rotated / 2)."""
        raise NotImplementedError

    def shift_query(self, layer: int, query: Tensor) -> Tensor:
        """(B, H, Tq, D) -> the same: what meets the keys in the scores (Transformer-XL adds its u)."""
        return query

    def bias(self, layer: int, query: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """(B, H, Tq, D), (B or 1, Tq), (B or 1, Tk) -> (B or 1, H, Tq, Tk) to add to the scaled scores."""
        raise NotImplementedError


# Added to the embeddings -----------------------------------------------------------------------------------------


def sinusoidal_encoding(length: int, d_model: int) -> Tensor:
    """Sines and cosines of geometrically falling frequency (Vaswani et al. 2017, section 3.5).

    Returns (length, d_model): even columns hold sin(p / 10000^(i / d_model)), odd ones the cosine.
    """
    # In float64, which not every device has, so on the CPU.
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * 10_000.0**-exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()  # (length, d_model)


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


# Turning queries and keys ----------------------------------------------------------------------------------------


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians a token for each pair of dimensions, float64 (rotated / 2,), and a factor on the turned vectors.

    With `rotary.scaling` and `rotary.factor` s, positions up to s * `rotary.original_length` are meant to be read:
    linear divides every frequency by s (Chen et al. 2023), ntk raises the base by s^(d / (d - 2)) (bloc97 2023),
    yarn divides the frequencies that turn less than once in the original length, keeps those that turn more than
    32 times, blends between, and scales the vectors by 0.1 ln s + 1 (Peng et al. 2023); llama3 does the same to those
    that turn less than once and more than four times, blending in turns and not in dimensions (Llama Team 2024).
    """
    rotary = config.rotary
    width = config.turned
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    base, s = rotary.base, rotary.factor
    if rotary.scaling == "ntk":
        base = base * s ** (width / (width - 2))
    frequencies = base**-exponents
    if rotary.scaling == "linear":
        return frequencies / s, 1.0
    original, slow, fast = rotary.original_length or config.max_seq_len / s, rotary.slow_turns, rotary.fast_turns
    if rotary.scaling == "llama3":
        kept = ((original * frequencies / (2 * math.pi) - slow) / (fast - slow)).clamp(0, 1)
        return frequencies * kept + frequencies / s * (1 - kept), 1.0
    if rotary.scaling == "yarn":

        def dimension(n: float) -> float:  # the pair, not whole, that turns n times in the original length
            return width * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base))

        low = min(max(math.floor(dimension(fast)), 0), width - 1)
        high = min(math.ceil(dimension(slow)), width - 1)
        divided = ((torch.arange(width // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 0.001)).clamp(
            0, 1
        )
        factor = 0.1 * math.log(s) + 1 if rotary.attention_factor is None else rotary.attention_factor
        return frequencies * (1 - divided) + frequencies / s * divided, factor
    return frequencies, 1.0


class RotaryEncoding(PositionalEncoding):
    """Turn pairs of query and key dimensions by an angle proportional to position (Su et al. 2021).

    Dimensions (2i, 2i + 1) are one complex number, so a turn is one multiplication, in fp32.
    """

    extends = False
    rotates = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        frequencies, scale = rotary_frequencies(config)
        angles = torch.arange(config.max_seq_len, dtype=torch.float64, device="cpu")[:, None] * frequencies
        # Not a buffer: a module cast to bf16 would round the angles.
        self.turns = torch.polar(torch.full_like(angles, scale), angles).to(torch.complex64)  # (max_seq_len, pairs)

    def rotation(self, positions: Tensor) -> Tensor:
        if self.turns.device != positions.device:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be trained with later
                self.turns = self.turns.to(positions.device)
        return self.turns[positions.clamp(min=0)].unsqueeze(-2)  # (B, T, 1, pairs)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the first dimensions of (B, T, H, D) by complex (B or 1, T, 1, pairs), in fp32 whatever the dtype of x."""
    rotated = 2 * rotation.shape[-1]
    pairs = x[..., :rotated].float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # which fuses the real arithmetic, and cannot the complex
        (a, b), (cos, sin) = pairs.unbind(-1), (rotation.real, rotation.imag)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * rotation)
    turned = turned.flatten(-2).to(x.dtype)
    return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)


# Biasing the scores ----------------------------------------------------------------------------------------------


def _distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """How far each key lies before each query, (B or 1, Tq, Tk); below 0 for keys after it."""
    return query_positions[:, :, None] - key_positions[:, None, :]


def alibi_slopes(n_heads: int) -> list[float]:
    """One slope a head, a geometric sequence; other counts than powers of two are filled up as in the paper's code."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]


class AlibiEncoding(PositionalEncoding):
    """Scores fall linearly with distance, at a rate of each head's own (Press et al. 2022)."""

    biased = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(config.n_heads)), persistent=False)

    def bias(self, layer: int, query: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return -self.slopes[:, None, None] * _distances(query_positions, key_positions)[:, None].abs()


def t5_bucket(distance: Tensor, n_buckets: int, max_distance: int) -> Tensor:
    """Exact buckets for near keys, logarithmic ones to `max_distance`, the last for all beyond (Raffel et al. 2020)."""
    distance = distance.clamp(min=0)
    exact = n_buckets // 2
    growth = torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact)
    far = exact + (growth * (n_buckets - exact)).to(torch.long)
    return torch.where(distance < exact, distance, far.clamp(max=n_buckets - 1))


class T5Encoding(PositionalEncoding):
    """A trained scalar for each head and bucket of distances, shared by all layers (Raffel et al. 2020)."""

    biased = True
    n_buckets, max_distance = 32, 128

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(self.n_buckets, config.n_heads)

    def bias(self, layer: int, query: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        buckets = t5_bucket(_distances(query_positions, key_positions), self.n_buckets, self.max_distance)
        return self.embedding(buckets).permute(0, 3, 1, 2)  # (B, H, Tq, Tk)


class ShawEncoding(PositionalEncoding):
    """Trained vectors for clipped distances, added to keys and to values (Shaw et al. 2018).

    Keys and values of a layer have 2 * clip + 1 vectors each, for distances -clip ... clip, shared by its heads.
    """

    biased = True
    clip = 16

    def __init__(self, config: ModelConfig):
        super().__init__()
        shape = (config.n_layers, 2 * self.clip + 1, config.head_width)
        self.keys, self.values = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))

    def index(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Which vector belongs to each pair, (B or 1, Tq, Tk)."""
        return _distances(query_positions, key_positions).clamp(-self.clip, self.clip) + self.clip

    def bias(self, layer: int, query: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        scores = query @ self.keys[layer].T / query.shape[-1] ** 0.5  # (B, H, Tq, 2 * clip + 1)
        index = self.index(query_positions, key_positions)[:, None]
        return scores.gather(-1, index.expand(*scores.shape[:2], -1, -1))

    def values_of(self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """What the weights (B, H, Tq, Tk) gather from the vectors for values, (B, H, Tq, D)."""
        index = self.index(query_positions, key_positions)[:, None].expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:-1], 2 * self.clip + 1).scatter_add(-1, index, weights)
        return by_distance @ self.values[layer].to(weights.dtype)


class TransformerXLEncoding(PositionalEncoding):
    """Sinusoids of the distance, projected by each layer, meet the query plus v; keys meet it plus u (Dai et al. 2019).

    u and v are vectors of each head, shared by all layers, as in the paper.
    """

    biased = True

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.d_model, self.n_heads = config.d_model, config.n_heads
        self.u = nn.Parameter(torch.zeros(config.n_heads, config.head_width))
        self.v = nn.Parameter(torch.zeros(config.n_heads, config.head_width))
        width = config.n_heads * config.head_width
        self.projections = nn.Parameter(torch.empty(config.n_layers, width, config.d_model))

    def shift_query(self, layer: int, query: Tensor) -> Tensor:
        return query + self.u[:, None]

    def bias(self, layer: int, query: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = _distances(query_positions, key_positions).clamp(min=0)
        farthest = key_positions.shape[1]  # an unseen key may seem further
        distance = distance.clamp(max=farthest - 1)
        table = sinusoidal_encoding(farthest, self.d_model).to(query)
        table = F.linear(table, self.projections[layer]).unflatten(-1, (self.n_heads, -1))  # (distance, H, D)
        scores = torch.einsum("bhtd,nhd->bhtn", query + self.v[:, None], table) / query.shape[-1] ** 0.5
        return scores.gather(-1, distance[:, None].expand(*scores.shape[:2], -1, -1))


ENCODINGS = {
    "none": lambda config: PositionalEncoding(),
    "sinusoidal": SinusoidalEncoding,
    "learned": LearnedEncoding,
    "rotary": RotaryEncoding,
    "alibi": AlibiEncoding,
    "t5": T5Encoding,
    "shaw": ShawEncoding,
    "transformer_xl": TransformerXLEncoding,
}
