"""From logits to the next token: small pure functions on (B, V), in the order in which `sample` applies them."""

import torch
from torch import Tensor

from minitransformer.generation.config import Sampling
from minitransformer.model.checks import SMALL


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores of tokens that were seen (bool, (B, V)) are divided by the penalty where positive, else multiplied by it
    (Keskar et al. 2019, CTRL)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalise_counts(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Take `presence` from the logits of tokens with counts (B, V) above 0, and `frequency` for each time they came."""
    return logits - presence * (counts > 0) - frequency * counts


def forbid_ngrams(logits: Tensor, history: list[list[int]], n: int) -> Tensor:
    """A token that would complete a run of n tokens which a row's history has already is impossible (Paulus et al.
    2018)."""
    logits = logits.clone()
    for row, ids in enumerate(history):
        end = ids[len(ids) - n + 1 :]
        again = [ids[i + n - 1] for i in range(len(ids) - n + 1) if ids[i : i + n - 1] == end]
        logits[row, again] = float("-inf")
    return logits


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest of each row become -inf (Fan et al. 2018). k = 0, or above V, keeps all."""
    if not 0 < k < logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens until they have probability p together (nucleus, Holtzman et al. 2020)."""
    if p >= 1:
        return logits
    ordered, order = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    unlikely = before >= p
    unlikely[:, 0] = False  # however small p is
    drop = torch.zeros_like(unlikely).scatter(-1, order, unlikely)
    return logits.masked_fill(drop, float("-inf"))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens with at least p times the probability of the likeliest (Nguyen et al. 2024)."""
    if not p:
        return logits
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), float("-inf"))


def adjust(logits: Tensor, config: Sampling, prompts: list[list[int]], made: list[list[int]]) -> Tensor:
    """Penalties and bans: (B, V) -> (B, V) float32. prompts, made: the ids of each row before and since its start."""
    logits = logits.float()
    if config.looks_back:
        counts = torch.zeros_like(logits)
        for row, ids in enumerate(made):
            counts[row] += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=logits.shape[1]).to(counts)
        if config.repetition_penalty != 1:
            seen = counts > 0
            for row, ids in enumerate(prompts):
                seen[row, ids] = True
            logits = penalise_repetition(logits, seen, config.repetition_penalty)
        logits = penalise_counts(logits, counts, config.presence_penalty, config.frequency_penalty)
        if config.no_repeat_ngram:
            history = [before + after for before, after in zip(prompts, made, strict=True)]
            logits = forbid_ngrams(logits, history, config.no_repeat_ngram)
    if config.logit_bias:
        bias = torch.zeros(logits.shape[1], device=logits.device)
        bias[list(config.logit_bias)] = torch.tensor(list(config.logit_bias.values()), device=logits.device)
        logits = logits + bias
    if config.banned:
        logits = logits.index_fill(1, torch.tensor(config.banned, device=logits.device), float("-inf"))
    if config.forced:
        logits = logits.clone()
        for row, ids in enumerate(made):
            if (only := config.forced.get(len(ids))) is not None:
                logits[row, :only] = logits[row, only + 1 :] = float("-inf")
    return logits


def refuse_nothing(logits: Tensor) -> None:
    """Raise ValueError where nothing is left to choose from in some row of (B, V)."""
    if bool((logits.amax(-1) == float("-inf")).any()):
        raise ValueError("no token is left to choose from; ban fewer of them")


def refuse_nan(log_probs: Tensor) -> None:
    """Raise ValueError where log-probabilities of the model itself, of any shape, are not finite."""
    if not bool(log_probs.isfinite().all()):
        raise ValueError("the model's logits are not finite: it diverged in training, or its file is damaged")


def narrow(logits: Tensor, config: Sampling) -> tuple[Tensor, Tensor | None]:
    """Temperature (above 0) and filters: (B, V) -> logits (B, K), and the ids (B, K) that they are of (None: all)."""
    index = None
    if 0 < config.top_k < logits.shape[-1]:  # the rest needs to look at the k alone
        logits, index = logits.topk(config.top_k)
    if config.temperature != 1:  # the likeliest stays at 0, whatever it is divided by
        logits = (logits - logits.amax(-1, keepdim=True)) / max(config.temperature, SMALL)
    return keep_min_p(keep_top_p(logits, config.top_p), config.min_p), index


def distribution(logits: Tensor, config: Sampling) -> Tensor:
    """The probability of each token to be drawn, (B, V) -> (B, V)."""
    if config.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1)
    narrowed, index = narrow(logits, config)
    probabilities = narrowed.softmax(-1)
    return probabilities if index is None else torch.zeros_like(logits).scatter(-1, index, probabilities)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The place at which the sum of (B, K) probabilities, which may have any sum, passes that part of it: (B,).

    uniform: (B,) numbers in [0, 1), one for each row, which decide alone; so rows do not disturb each other.
    """
    # In float64, which MPS lacks: there the CPU draws.
    exact = (probabilities.cpu() if probabilities.device.type == "mps" else probabilities).double()
    cumulative = exact.cumsum(-1)
    part = uniform.to(cumulative)[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, part, right=True).to(probabilities.device)
    return place.clamp_(max=probabilities.shape[-1] - 1).squeeze(-1)


def sample(logits: Tensor, config: Sampling, uniform: Tensor) -> Tensor:
    """Draw one token a row by `distribution`: (B, V), (B,) numbers in [0, 1) -> (B,)."""
    if config.temperature == 0:
        return logits.argmax(-1)
    narrowed, index = narrow(logits, config)
    place = draw(narrowed.softmax(-1), uniform)
    return place if index is None else index.gather(-1, place[:, None]).squeeze(-1)
