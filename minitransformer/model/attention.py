"""Attention: the equation written out, the kernels behind one call, and the layers around them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitransformer.model.cache import KVCache
from minitransformer.model.config import ModelConfig
from minitransformer.model.masks import AttentionMask
from minitransformer.model.positions import PositionalEncoding, ShawEncoding, rotate
from minitransformer.model.product import Linear

# cuDNN's backward pass gives NaN where a mask hides all keys from a query, as it does from padding, in rows of 64, 192,
# ... tokens on H100 (pytorch issue 196678). torch then takes its memory-efficient kernel.
torch.backends.cuda.enable_cudnn_sdp(False)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k) + bias) V, written out (Vaswani et al. 2017, equation 1).

    Args:
        query: (..., Tq, d_k); key: (..., Tk, d_k); value: (..., Tk, d_v).
        mask: bool, broadcasts to (..., Tq, Tk); True where a query may see a key.
        bias: broadcasts to (..., Tq, Tk) and is added to the scaled scores.
        softcap: scaled scores pass through cap * tanh(scores / cap) first; 0 leaves them (Gemma 2, 2024).

    Returns:
        the output (..., Tq, d_v) and the weights (..., Tq, Tk). A query that sees no key gets zeros.
    """
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (..., Tq, Tk)
    scores = scores.float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is None:
        weights = scores.softmax(-1)
    else:
        # The lowest number, not -inf: a row of -inf alone would turn into NaN.
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0)
    weights = weights.to(value.dtype)
    return weights @ value, weights


class SelfAttention(nn.Module):
    """One head, to read first: three projections, and the equation."""

    def __init__(self, d_model: int, d_head: int):
        super().__init__()
        self.query = nn.Linear(d_model, d_head, bias=False)
        self.key = nn.Linear(d_model, d_head, bias=False)
        self.value = nn.Linear(d_model, d_head, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, T, d_model) -> (B, T, d_head), and the weights (B, T, T). mask: True where a query may see a key."""
        return scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), mask)


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """Let each key or value head of (B, n_kv_heads, T, D) serve its query heads: (B, n_heads, T, D)."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)


# Kernels ---------------------------------------------------------------------------------------------------------


def _attend_sliced(q: Tensor, k: Tensor, v: Tensor, attention_mask: AttentionMask, dropout: float) -> Tensor:
    """Attention document by document: (B, H, T, D) -> (B, H, T, D), no T x T mask anywhere."""
    batch, _, length, _ = q.shape
    runs = attention_mask.slices
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


def _attend_banded(q: Tensor, k: Tensor, v: Tensor, attention_mask: AttentionMask, dropout: float) -> Tensor:
    """Attention in bands as wide as the mask reaches: (B, H, T, D) -> (B, H, T, D), work linear in T."""
    reach, length = attention_mask.mask.reach, q.shape[2]
    allowed = attention_mask.bands  # (B, n, reach, 2 * reach)
    padding = -length % reach
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, reach)) for x in (q, k, v))  # (B, H, n, reach, D)
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), dim=3) for x in (k, v))
    # Bands become rows of the batch: (B, n, H, ...) with one mask for all heads of a band.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    mask = allowed.expand(q.shape[0] // allowed.shape[1], -1, -1, -1).flatten(0, 1).unsqueeze(1)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return output.unflatten(0, (-1, allowed.shape[1])).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _attend_flex(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: AttentionMask, bias: Tensor | None, cap: float
) -> Tensor:
    """`flex_attention` with a block mask: blocks that nobody sees cost nothing (Dong et al. 2024)."""
    from torch.nn.attention.flex_attention import flex_attention

    def score(s, b, h, qi, ki):
        s = cap * torch.tanh(s / cap) if cap else s
        if bias is None:
            return s
        return s + bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, qi, ki]

    flex = torch.compile(flex_attention) if q.is_cuda else flex_attention
    return flex(q, k, v, score_mod=score if bias is not None or cap else None, block_mask=attention_mask.block_mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: AttentionMask,
    bias: Tensor | None = None,
    kernel: str = "auto",
    dropout: float = 0.0,
    softcap: float = 0.0,
    values_of: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the chosen kernel: all kernels give the same numbers.

    Args:
        q: (B, H, Tq, D); k, v: (B, n_kv_heads, Tk, D).
        bias: (B or 1, H, Tq, Tk), added to the scaled scores.
        values_of: weights (B, H, Tq, Tk) -> (B, H, Tq, D), added to the output (Shaw). Needs the weights, as only the
            reference kernel has them.

    Returns:
        (B, H, Tq, D), and the weights where the kernel is `reference`.

    Raises:
        ValueError: `flex` is asked for gradients on a CPU, where it has none.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    if kernel == "reference" or (kernel == "auto" and (softcap or values_of is not None)):
        output, weights = scaled_dot_product_attention(q, k, v, attention_mask.dense, bias, softcap)
        if dropout:
            dropped = F.dropout(weights, dropout)
            output = dropped @ v
        if values_of is not None:
            output = output + values_of(dropped if dropout else weights)
        return output, weights
    if kernel == "flex":
        if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
            raise ValueError(
                "model.attention.kernel=flex has no gradients on a CPU; train with kernel=auto, or on a GPU"
            )
        return _attend_flex(q, k, v, attention_mask, bias, softcap), None
    if bias is None:
        if attention_mask.is_causal:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), None
        if attention_mask.sees_all:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout), None
        if attention_mask.worth_slicing(q.device):
            return _attend_sliced(q, k, v, attention_mask, dropout), None
        if attention_mask.worth_banding:
            return _attend_banded(q, k, v, attention_mask, dropout), None
    mask = attention_mask.dense
    if bias is not None:
        mask = torch.where(mask, bias.to(q.dtype), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None


class MultiHeadAttention(nn.Module):
    """Queries, keys, values, attention per head, and the output projection (Vaswani et al. 2017, 3.2.2).

    The three input projections are one matrix, `qkv`; with fewer key and value heads than query heads this is
    grouped-query attention (Ainslie et al. 2023), with one multi-query attention (Shazeer 2019).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        attention = config.attention
        self.n_heads, self.n_kv_heads, self.d_head = config.n_heads, config.kv_heads, config.head_width
        self.kernel, self.softcap, self.dropout = attention.kernel, attention.softcap, config.dropout
        self.qkv = Linear(
            config.d_model,
            (self.n_heads + 2 * self.n_kv_heads) * self.d_head,
            bias=config.bias if attention.qkv_bias is None else attention.qkv_bias,
        )
        self.output = Linear(
            self.n_heads * self.d_head,
            config.d_model,
            bias=config.bias if attention.output_bias is None else attention.output_bias,
        )
        normalise = F.layer_norm if config.norm == "layernorm" else F.rms_norm
        self.qk_norm, self.norm_eps = normalise if attention.qk_norm else None, config.norm_eps
        self.q_gain = nn.Parameter(torch.ones(self.d_head)) if attention.qk_gain else None
        self.k_gain = nn.Parameter(torch.ones(self.d_head)) if attention.qk_gain else None
        # Every kernel divides by sqrt(d_head): what is wanted beside that, queries bring with them.
        self.query_scale = (self.d_head / (attention.score_width or self.d_head)) ** 0.5

    def forward(
        self,
        x: Tensor,
        attention_mask: AttentionMask | None = None,
        position: PositionalEncoding | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        return_weights: bool = False,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, d_model) -> (B, T, d_model), and the weights (B, H, T, Tk) if asked for.

        Args:
            attention_mask: who may see whom (None: one causal document a row).
            position: turns queries and keys, and biases the scores, as layer number `layer`.
            context: (B, Tc, d_model), another sequence that gives the keys and values; all of it is seen.
        """
        if context is not None:
            return self._cross(x, context, return_weights)
        if attention_mask is None:
            attention_mask = AttentionMask.of_rows(x)
        q, k, v = self.project(x, None if position is None else attention_mask.rotation(position))
        if cache is not None:
            k, v = cache.append(layer, k, v)
        bias = values_of = None
        if position is not None and position.biased:
            at = attention_mask.query_positions, attention_mask.key_positions
            bias = position.bias(layer, q, *at)
            q = position.shift_query(layer, q)
            if isinstance(position, ShawEncoding):
                values_of = lambda weights: position.values_of(layer, weights, *at)  # noqa: E731
        kernel = "reference" if return_weights else self.kernel
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(q, k, v, attention_mask, bias, kernel, dropout, self.softcap, values_of)
        return self.output(output.transpose(1, 2).flatten(2)), weights

    def project(self, x: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, d_model) -> queries (B, H, T, D), keys and values (B, n_kv_heads, T, D), normed and turned."""
        heads = self.qkv(x).view(*x.shape[:2], -1, self.d_head)  # (B, T, H + 2 * H_kv, D)
        qk, v = heads.split_with_sizes((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk, (self.d_head,), eps=self.norm_eps)
        if self.q_gain is not None:
            gains = self.q_gain.expand(self.n_heads, -1), self.k_gain.expand(self.n_kv_heads, -1)
            qk = qk * torch.cat(gains)
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k = qk.split_with_sizes((self.n_heads, self.n_kv_heads), dim=2)
        if self.query_scale != 1:
            q = q * self.query_scale
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _cross(self, x: Tensor, context: Tensor, return_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Cross-attention: queries of x, keys and values of the context, no positions and no mask."""
        q, (_, k, v) = self.project(x, None)[0], self.project(context, None)
        k, v = repeat_heads(k, self.n_heads), repeat_heads(v, self.n_heads)
        if return_weights or self.kernel == "reference" or self.softcap:
            output, weights = scaled_dot_product_attention(q, k, v, softcap=self.softcap)
        else:
            output, weights = F.scaled_dot_product_attention(q, k, v), None
        return self.output(output.transpose(1, 2).flatten(2)), weights
