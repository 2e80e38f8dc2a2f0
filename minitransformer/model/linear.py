"""Linear attention: a feature map in place of the softmax, so that the past is a state of constant size."""

import torch
from torch import Tensor, nn

from minitransformer.model.attention import MultiHeadAttention, repeat_heads
from minitransformer.model.cache import KVCache
from minitransformer.model.config import ModelConfig
from minitransformer.model.masks import AttentionMask
from minitransformer.model.positions import PositionalEncoding

CHUNK = 64  # tokens whose weights are written out; between chunks only the state is carried


class LinearAttention(MultiHeadAttention):
    """Causal attention with weights phi(q) . phi(k) / sum, in place of a softmax of q . k.

    elu: phi(x) = elu(x) + 1 (Katharopoulos et al. 2020). performer: positive random features whose products have
    exp(q . k / sqrt(d)) as their mean (Choromanski et al. 2021, FAVOR+), drawn once and kept with the weights.
    Everything is in fp32. Dropout acts on the branch alone: there are no weights to drop.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.kind = config.attention.kind
        if self.kind == "performer":
            n = config.attention.features or 2 * self.d_head
            self.register_buffer("directions", orthogonal_directions(n, self.d_head))

    def feature_map(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., F), all above 0."""
        x = x.float()
        if self.kind == "elu":
            return nn.functional.elu(x) + 1
        x = x / self.d_head**0.25
        exponent = x @ self.directions.float().T - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() / len(self.directions) ** 0.5 + 1e-6

    def forward(
        self,
        x: Tensor,
        attention_mask: AttentionMask | None = None,
        position: PositionalEncoding | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, d_model) -> (B, T, d_model), and the weights (B, H, T, T) if asked for (without a cache)."""
        if attention_mask is None:
            attention_mask = AttentionMask.of_rows(x)
        q, k, v = self.project(x, None if position is None else attention_mask.rotation(position))
        k, v = repeat_heads(k, self.n_heads), repeat_heads(v, self.n_heads)
        state = None if cache is None else cache.states[layer]
        if return_weights and cache is not None:
            raise ValueError("linear attention keeps no keys: its weights cannot be shown with a cache")
        weights = None
        with torch.autocast(x.device.type, enabled=False):  # which would cast the products
            q, k, v = self.feature_map(q), self.feature_map(k), v.float()
            output, state = causal_linear_attention(q, k, v, attention_mask.query_positions, state)
            if return_weights:
                weights = (q @ k.mT) * attention_mask.dense
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if cache is not None:
            cache.states[layer] = state
        return self.output(output.to(x.dtype).transpose(1, 2).flatten(2)), weights


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """sum_j (q_i . k_j) v_j / sum_j q_i . k_j over the keys j <= i of one document, in chunks.

    Args:
        q, k: (B, H, T, F), above 0; v: (B, H, T, D). positions: (B or 1, T), 0 where a document starts, -1 on padding.
        state: (B, H, F, D + 1) of the tokens before, of the document that the first token goes on.

    Returns:
        (B, H, T, D), zeros on padding, and the state after the last token.
    """
    batch, heads, _, width = q.shape
    positions = positions.expand(batch, -1)
    v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # the last column sums the weights
    if state is None:
        state = q.new_zeros(batch, heads, width, v.shape[-1])
    outputs = []
    for qs, ks, vs, at in zip(*(x.split(CHUNK, dim=2) for x in (q, k, v)), positions.split(CHUNK, dim=1), strict=True):
        text = at >= 0
        number = (at == 0).cumsum(-1)  # 0: the document that was open when the chunk began
        same = (number[:, :, None] == number[:, None, :]) & text[:, :, None] & text[:, None, :]
        same = same.tril()[:, None]
        first, last = ((number == n) & text for n in (0, number[:, -1:]))
        sums = ((qs @ ks.mT) * same) @ vs + (qs @ state) * first[:, None, :, None]
        outputs.append(sums[..., :-1] / sums[..., -1:].clamp(min=1e-20))
        open_still = (number[:, -1] == 0)[:, None, None, None]
        state = state * open_still + (ks * last[:, None, :, None]).mT @ vs
    return torch.cat(outputs, dim=2), state


def orthogonal_directions(n: int, width: int) -> Tensor:
    """Random directions, orthogonal in blocks of `width`, with the lengths of normal vectors: (n, width)."""
    blocks = [nn.init.orthogonal_(torch.empty(width, width)) for _ in range(-(-n // width))]
    return torch.cat(blocks)[:n] * torch.randn(n, width).norm(dim=-1, keepdim=True)
