"""Norms, the feed-forward, and the block that joins them to attention."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from minitransformer.model.attention import MultiHeadAttention
from minitransformer.model.config import ModelConfig
from minitransformer.model.linear import LinearAttention
from minitransformer.model.masks import AttentionMask
from minitransformer.model.product import ONEDNN, Linear


class ZeroCentredRMSNorm(nn.RMSNorm):
    """RMSNorm whose gain is 1 + weight, so that decay pulls it to 1 and not to 0 (Gemma 2024)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm over the last dimension, (..., d_model) -> (..., d_model)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    if config.norm == "rmsnorm_zero":
        return ZeroCentredRMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATION = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu_squared,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class FeedForward(nn.Module):
    """Two matrices around an activation; in swiglu and geglu a third gates it (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated, self.kind = config.gated, config.activation
        self.input = Linear(config.d_model, config.ff_width * (2 if self.gated else 1), bias=config.bias)
        self.output = Linear(config.ff_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        x = self.input(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.output(ACTIVATION[self.kind](gate) * x)
        return self.output(ACTIVATION[self.kind](x))


# What `selective` checkpointing keeps: the results of matrix products; the rest is cheap to do again.
aten = torch.ops.aten
KEPT = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default]
KEPT += [getattr(aten, name).default for name in (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)]  # fmt: skip
KEPT += [ONEDNN.default, torch.ops.minitransformer.linear.default] if ONEDNN is not None else []


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream x.

    pre: x + f(norm(x)). post: norm(x + f(x)). sandwich: x + norm(f(norm(x))).
    parallel: x + attention(norm(x)) + feed_forward(norm(x)).

    recompute: what the backward pass works out again instead of keeping it (Chen et al. 2016): none, full (all), or
        selective (all but matrix products, Korthikanti et al. 2022). It changes memory and time, never the result.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.placement, self.parallel = config.norm_placement, config.parallel
        self.attention_norm = make_norm(config)
        self.attention = (MultiHeadAttention if config.attention.kind == "softmax" else LinearAttention)(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        sandwich = self.placement == "sandwich"
        self.attention_out_norm = make_norm(config) if sandwich else None
        self.feed_forward_out_norm = make_norm(config) if sandwich else None
        self.dropout = nn.Dropout(config.dropout)
        self.recompute = "none"

    def forward(self, x: Tensor, attention_mask: AttentionMask, **attention) -> tuple[Tensor, Tensor | None]:
        """(B, T, d_model) -> (B, T, d_model), and the attention weights if asked for."""
        if self.recompute == "none" or not self.training:
            return self._forward(x, attention_mask, **attention)
        if self.recompute == "full":
            return checkpoint(self._forward, x, attention_mask, use_reentrant=False, **attention)
        keep = partial(create_selective_checkpoint_contexts, KEPT)
        return checkpoint(self._forward, x, attention_mask, use_reentrant=False, context_fn=keep, **attention)

    def _forward(self, x: Tensor, attention_mask: AttentionMask, **attention) -> tuple[Tensor, Tensor | None]:
        if self.placement == "post":
            mixed, weights = self.attention(x, attention_mask, **attention)
            x = self.attention_norm(x + self._written(mixed))
            return self.feed_forward_norm(x + self._written(self.feed_forward(x))), weights
        mixed, weights = self.attention(self.attention_norm(x), attention_mask, **attention)
        mixed = self._written(mixed, self.attention_out_norm)
        if self.parallel:
            fed = self.feed_forward(self.feed_forward_norm(x))
            return x + mixed + self._written(fed, self.feed_forward_out_norm), weights
        x = x + mixed
        fed = self.feed_forward(self.feed_forward_norm(x))
        return x + self._written(fed, self.feed_forward_out_norm), weights

    def _written(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """What a part adds to the stream. Modules that do nothing are not called: a token would wait for each."""
        if norm is not None:
            x = norm(x)
        return self.dropout(x) if self.training else x
