"""From logits to the next token: small pure functions on (B, V)."""

import torch
from torch import Tensor


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest of each row become -inf (Fan et al. 2018). k = 0 keeps all."""
    if not 0 < k < logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens until they have probability p together (nucleus, Holtzman et al. 2020)."""
    if p >= 1:
        return logits
    ordered, order = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(drop, float("-inf"))


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generators: list[torch.Generator]) -> Tensor:
    """Draw one token a row, (B, V) -> (B,), each row from its own generator, so that rows do not disturb each other."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = keep_top_p(keep_top_k(logits.float() / temperature, top_k), top_p)
    probabilities = logits.softmax(-1)
    rows = zip(probabilities, generators, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
