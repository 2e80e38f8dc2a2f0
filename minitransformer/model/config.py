"""The shape of a model: one dataclass that checks itself and names the wrong field."""

from dataclasses import dataclass, field, fields
from typing import Any

POSITIONS = ("none", "sinusoidal", "learned", "rotary")
NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "swiglu")
INITS = ("zero_residual", "gpt2")
KERNELS = ("auto", "reference", "sdpa")


def choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError when `value` is not one of `allowed`, naming the field and what would work."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError when `value` is below `least` (or NaN), naming the field and both numbers."""
    if not value >= least:
        raise ValueError(f"{name}={value} is too small; it must be at least {least}")


def fraction(name: str, value: float) -> None:
    """Raise ValueError when `value` is outside [0, 1), naming the field."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} is out of range; it must be at least 0 and below 1")


@dataclass
class AttentionConfig:
    """How attention is computed inside every block.

    kernel: `auto` takes the fastest kernel that is exact, `reference` the written-out equation,
        `sdpa` torch's fused `F.scaled_dot_product_attention`.
    qk_norm: normalise queries and keys per head before they meet, with the model's kind of norm and no gain
        (Henry et al. 2020).
    """

    kernel: str = "auto"
    qk_norm: bool = False


@dataclass
class ModelConfig:
    """Everything that decides a model's parameters and its function.

    vocab_size: number of token ids; None in a training config means "as large as the tokenizer".
    d_model: width of the residual stream.
    n_layers, n_heads: blocks, and query heads in each.
    n_kv_heads: key and value heads (None: n_heads). Fewer is grouped-query attention (Ainslie et al. 2023).
    d_head: width of a head (None: d_model / n_heads).
    d_ff: inner width of the feed-forward (None: 4 * d_model, or 8/3 * d_model rounded up to 32 for swiglu).
    max_seq_len: longest sequence in tokens.
    position: none | sinusoidal | learned | rotary.
    rotary_base: the base of rotary frequencies (Su et al. 2021).
    norm: rmsnorm (Zhang and Sennrich 2019) | layernorm (Ba et al. 2016).
    activation: gelu | gelu_tanh | relu2 (So et al. 2021) | swiglu (Shazeer 2020).
    bias: biases in the linear layers and in layernorm.
    dropout: probability of zeroing attention weights, branch outputs and embeddings in training.
    tie_embeddings: one matrix is both the embedding and the head (Press and Wolf 2017).
    logit_soft_cap: logits pass through cap * tanh(logits / cap); 0 leaves them (Gemma 2, 2024).
    init: zero_residual (output projections start at 0) | gpt2 (normal 0.02, residual ones scaled by depth).
    """

    vocab_size: int | None = None
    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_ff: int | None = None
    max_seq_len: int = 256
    position: str = "rotary"
    rotary_base: float = 10_000.0
    norm: str = "rmsnorm"
    activation: str = "gelu"
    bias: bool = False
    dropout: float = 0.0
    tie_embeddings: bool = False
    logit_soft_cap: float = 0.0
    init: str = "zero_residual"
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "max_seq_len"):
            at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("vocab_size", "n_kv_heads", "d_head", "d_ff"):
            if getattr(self, name) is not None:
                at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.logit_soft_cap", self.logit_soft_cap, 0)
        at_least("model.rotary_base", self.rotary_base, 1)
        fraction("model.dropout", self.dropout)
        choose("model.position", self.position, POSITIONS)
        choose("model.norm", self.norm, NORMS)
        choose("model.activation", self.activation, ACTIVATIONS)
        choose("model.init", self.init, INITS)
        choose("model.attention.kernel", self.attention.kernel, KERNELS)
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}; "
                f"choose a multiple, or set model.d_head"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.kv_heads}; "
                f"each key and value head serves the same number of query heads"
            )
        if self.position == "rotary" and self.head_width % 2:
            raise ValueError(f"model.d_head={self.head_width} is odd; model.position=rotary turns pairs of dimensions")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"model.d_model={self.d_model} is odd; model.position=sinusoidal needs an even width")

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def ff_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        if self.activation == "swiglu":
            return -(-8 * self.d_model // (3 * 32)) * 32
        return 4 * self.d_model

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Rebuild a config from plain nested values, as a checkpoint holds them.

        Raises:
            ValueError: a key is not a field of ModelConfig (the checkpoint is from another version).
        """
        values = dict(values)
        attention = values.pop("attention", {})
        for owner, given in ((cls, values), (AttentionConfig, attention)):
            unknown = sorted(set(given) - {f.name for f in fields(owner)})
            if unknown:
                raise ValueError(f"the saved model config has unknown fields: {', '.join(unknown)}")
        return cls(**values, attention=AttentionConfig(**attention))
