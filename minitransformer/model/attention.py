"""Attention: the equation written out, the fused kernels behind one call, and the layers around them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitransformer.model.cache import KVCache
from minitransformer.model.config import ModelConfig
from minitransformer.model.masks import Visibility
from minitransformer.model.positions import rotate


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k) + bias) V, written out (Vaswani et al. 2017, equation 1).

    Args:
        query: (..., Tq, d_k); key: (..., Tk, d_k); value: (..., Tk, d_v).
        mask: bool, broadcasts to (..., Tq, Tk); True where a query may see a key.
        bias: broadcasts to (..., Tq, Tk) and is added to the scaled scores.

    Returns:
        the output (..., Tq, d_v) and the weights (..., Tq, Tk). A query that sees no key gets zeros.
    """
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (..., Tq, Tk)
    scores = scores.float()
    if bias is not None:
        scores = scores + bias
    if mask is None:
        weights = scores.softmax(-1)
    else:
        # The lowest number, not -inf: a row of -inf alone would turn into NaN.
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0)
    weights = weights.to(value.dtype)
    return weights @ value, weights


def _repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)


def _attend_sliced(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float) -> Tensor:
    """Attention document by document: (B, H, T, D) -> (B, H, T, D), no T x T mask anywhere."""
    batch, _, length, _ = q.shape
    runs = visibility.slices
    sizes = [pieces * size for pieces, size, _ in runs]
    # One split and one cat: their backwards are a cat and a split, where slicing would fill a zero tensor each.
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1).split(sizes) for x in (q, k, v))
    outputs = []
    for (pieces, size, is_text), qs, ks, vs in zip(runs, queries, keys, values, strict=True):
        if is_text:
            qs, ks, vs = (x.unflatten(0, (pieces, size)).transpose(1, 2) for x in (qs, ks, vs))
            output = F.scaled_dot_product_attention(qs, ks, vs, dropout_p=dropout, is_causal=True)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        else:
            outputs.append(torch.zeros_like(qs))
    return torch.cat(outputs).unflatten(0, (batch, length)).transpose(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    bias: Tensor | None = None,
    kernel: str = "auto",
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the chosen kernel: all kernels give the same numbers.

    q: (B, H, Tq, D); k, v: (B, n_kv_heads, Tk, D). Returns (B, H, Tq, D), and the weights (B, H, Tq, Tk)
    where the kernel is `reference`.
    """
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    if kernel == "reference":
        output, weights = scaled_dot_product_attention(q, k, v, visibility.dense, bias)
        if dropout:
            output = F.dropout(weights, dropout) @ v
        return output, weights
    if bias is None and visibility.is_causal:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), None
    if bias is None and visibility.sees_all:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout), None
    if bias is None and visibility.worth_slicing(q.device):
        return _attend_sliced(q, k, v, visibility, dropout), None
    mask = visibility.dense
    if bias is not None:
        mask = torch.where(mask, bias.to(q.dtype), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None


class MultiHeadAttention(nn.Module):
    """Queries, keys, values, attention per head, and the output projection (Vaswani et al. 2017, 3.2.2).

    The three input projections are one matrix, `qkv`; with fewer key and value heads than query heads this is
    grouped-query attention.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = config.n_heads, config.kv_heads, config.head_width
        self.kernel = config.attention.kernel
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.d_model, (self.n_heads + 2 * self.n_kv_heads) * self.d_head, bias=config.bias)
        self.output = nn.Linear(self.n_heads * self.d_head, config.d_model, bias=config.bias)
        normalise = F.rms_norm if config.norm == "rmsnorm" else F.layer_norm
        self.qk_norm = normalise if config.attention.qk_norm else None

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        rotation: Tensor | None = None,
        bias: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, d_model) -> (B, T, d_model), and the weights (B, H, T, Tk) if asked for."""
        heads = self.qkv(x).unflatten(-1, (-1, self.d_head))  # (B, T, H + 2 * H_kv, D)
        qk, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk, (self.d_head,), eps=1e-6)
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k = qk.split((self.n_heads, self.n_kv_heads), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        kernel = "reference" if return_weights else self.kernel
        output, weights = attend(q, k, v, visibility, bias, kernel, self.dropout if self.training else 0.0)
        return self.output(output.transpose(1, 2).flatten(2)), weights
