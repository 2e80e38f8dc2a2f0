"""Norms, the feed-forward, and the block that joins them to attention."""

import torch.nn.functional as F
from torch import Tensor, nn

from minitransformer.model.attention import MultiHeadAttention
from minitransformer.model.config import ModelConfig


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm over the last dimension, (..., d_model) -> (..., d_model)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=1e-6)
    return nn.LayerNorm(config.d_model, bias=config.bias)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATION = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": relu_squared,
    "swiglu": F.silu,
}


class FeedForward(nn.Module):
    """Two matrices around an activation; for swiglu a third gates it (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = ACTIVATION[config.activation]
        self.input = nn.Linear(config.d_model, config.ff_width * (2 if self.gated else 1), bias=config.bias)
        self.output = nn.Linear(config.ff_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        x = self.input(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.output(self.activation(gate) * x)
        return self.output(self.activation(x))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x)) (Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, visibility, **attention) -> tuple[Tensor, Tensor | None]:
        """(B, T, d_model) -> (B, T, d_model), and the attention weights if asked for."""
        mixed, weights = self.attention(self.attention_norm(x), visibility, **attention)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), weights
