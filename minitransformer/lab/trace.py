"""What a model does with one text: every number of its attention, and what follows from them. Pure torch."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minitransformer.model.linear import LinearAttention
from minitransformer.model.transformer import Transformer


@dataclass
class AttentionTrace:
    """One layer's attention over n tokens, in the order of its steps.

    q: (H, n, D), k and v: (H_kv, n, D), as they meet: normed, turned by rotary positions, shifted by Transformer-XL's
        u; for linear attention q and k have been through its feature map.
    allowed: bool (n, n), the mask. bias: (H, n, n), added to the scaled scores, or None.
    weights: (H, n, n), rows are queries. output: (H, n, D), what each head gathered, before the output projection.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    bias: Tensor | None
    weights: Tensor
    output: Tensor


@dataclass
class Trace:
    """tokens: (n,). layers: one for each block. streams: (n_layers + 1, n, d_model), the residual stream as embedded
    and after each block. logits: (n, vocab_size)."""

    tokens: Tensor
    layers: list[AttentionTrace]
    streams: Tensor
    logits: Tensor

    @property
    def weights(self) -> Tensor:
        """(n_layers, H, n, n)."""
        return torch.stack([layer.weights for layer in self.layers])


@torch.no_grad()
def trace(model: Transformer, tokens: Tensor) -> Trace:
    """One forward pass over tokens (n,), with hooks that keep what the blocks compute.

    Raises:
        ValueError: more tokens than the model holds.
    """
    streams: list[Tensor] = []
    mixed: list[Tensor] = []
    layers: list[AttentionTrace] = []

    def keep(attention, args, kwargs, result):
        (x, attention_mask), layer, position = args, kwargs["layer"], kwargs["position"]
        q, k, v = attention.project(x, attention_mask.rotation(position))
        bias = None
        if isinstance(attention, LinearAttention):
            q, k = attention.feature_map(q), attention.feature_map(k)
        elif position.biased:
            bias = position.bias(layer, q, attention_mask.query_positions, attention_mask.key_positions)[0]
            q = position.shift_query(layer, q)
        output = mixed[layer][0].unflatten(-1, (attention.n_heads, -1)).transpose(0, 1)
        layers.append(AttentionTrace(q[0], k[0], v[0], attention_mask.dense[0, 0], bias, result[1][0], output))

    hooks = [model.blocks[0].register_forward_pre_hook(lambda block, args: streams.append(args[0][0]))]
    for block in model.blocks:
        hooks += [
            block.attention.output.register_forward_pre_hook(lambda linear, args: mixed.append(args[0])),
            block.attention.register_forward_hook(keep, with_kwargs=True),
            block.register_forward_hook(lambda block, args, result: streams.append(result[0][0])),
        ]
    try:
        logits, _ = model(tokens[None], return_attention=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(tokens, layers, torch.stack(streams), logits[0])


def rollout(weights: Tensor) -> Tensor:
    """Attention rollout (Abnar and Zuidema 2020): how much of each token's stream comes from which input.

    Heads are averaged, half of each layer is the residual path, and the layers are multiplied:
    (n_layers, H, n, n) -> (n, n), rows sum to 1 where those of the weights do.
    """
    flow = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    for layer in weights.mean(1):
        flow = (layer / 2 + torch.eye(len(layer)).to(layer) / 2) @ flow
    return flow


N_STEPS = 32  # of integrated gradients: sums were within 0.003 of the logits' differences on a trained model


def integrated_gradients(
    model: Transformer, tokens: Tensor, targets: Tensor, baseline: int, n_steps: int = N_STEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """How much each token adds to the logits of `targets` after the last (Sundararajan et al. 2017), by captum.

    The path leads from the embedding of the token `baseline` at every place to those of `tokens`: a straight line that
    ends at zero would cross the place where the norms, which divide by length, are not smooth.

    Args:
        tokens: (n,). targets: (m,) ids that may come next.

    Returns:
        attributions (m, n), and the targets' logits (m,) for `tokens` and for the baseline; the attributions of a
        target sum to the difference, up to the error of `n_steps` points of Gauss-Legendre quadrature.
    """
    from captum.attr import LayerIntegratedGradients

    def forward(rows: Tensor, wanted: Tensor) -> Tensor:
        features, _ = model.hidden_states(rows, return_attention=True)  # by the reference kernel: flex has no gradients
        return model.logits(features[:, -1]).gather(-1, wanted[:, None])[:, 0]

    rows = tokens.expand(len(targets), -1)
    empty = torch.full_like(rows, baseline)
    method = LayerIntegratedGradients(forward, model.embedding)
    found = method.attribute(rows, empty, additional_forward_args=targets, n_steps=n_steps, internal_batch_size=n_steps)
    with torch.no_grad():
        return found.sum(-1).detach(), forward(rows, targets), forward(empty, targets)


MEASURES = ("previous", "itself", "first", "repeated", "induction", "distance", "entropy")


def head_measures(weights: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """What each head attends to, each (n_layers, H): means over all queries but the first, which sees itself alone.

    previous, itself, first: the weight on the token before, on the query's own place, and on the first token.
    repeated: on earlier places of the same token. induction: on the places just after those (Olsson et al. 2022).
        Both over the queries whose token came before; NaN where none did.
    distance: tokens between query and key, weighted. entropy: of the weights, in bits.

    Args:
        weights: (n_layers, H, n, n). tokens: (n,), at least 2.
    """
    n = len(tokens)
    at = torch.arange(n, device=tokens.device)
    earlier = (tokens[:, None] == tokens) & (at[:, None] > at)
    after = F.pad(earlier, (1, 0))[:, :-1] & (at[:, None] > at)  # the query's own place is no continuation
    distance = (at[:, None] - at).abs().to(weights.dtype)

    def mean(values: Tensor, rows: Tensor = at > 0) -> Tensor:
        return values[..., rows].mean(-1)  # (n_layers, H, n) -> (n_layers, H)

    return {
        "previous": weights.diagonal(-1, -2, -1).mean(-1),
        "itself": mean(weights.diagonal(0, -2, -1)),
        "first": mean(weights[..., 0]),
        "repeated": mean((weights * earlier).sum(-1), earlier.any(-1)),
        "induction": mean((weights * after).sum(-1), after.any(-1)),
        "distance": mean((weights * distance).sum(-1)),
        "entropy": mean(-torch.xlogy(weights, weights).sum(-1) / math.log(2)),
    }


@torch.no_grad()
def induction_on_noise(model: Transformer, bos_id: int, vocab_size: int, length: int = 24) -> Tensor | None:
    """The induction measure on random tokens said twice, where nothing else tells what comes next (Olsson et al. 2022).

    (n_layers, H); None where the model is too short for it.
    """
    length = min(length, (model.config.max_seq_len - 1) // 2)
    if length < 4:
        return None
    draw = torch.Generator().manual_seed(0)
    said = torch.randint(vocab_size, (length,), generator=draw)
    tokens = torch.cat((torch.tensor([bos_id]), said, said)).to(model.embedding.weight.device)
    _, weights = model(tokens[None], return_attention=True)
    return head_measures(torch.stack(weights)[:, 0], tokens)["induction"]


@torch.no_grad()
def logit_lens(model: Transformer, streams: Tensor) -> Tensor:
    """Read the residual stream of each depth as if it were the last (nostalgebraist 2020).

    (n_layers + 1, n, d_model) -> logits (n_layers + 1, n, vocab_size); the last are the model's own.
    """
    return model.logits(model.norm(streams))
