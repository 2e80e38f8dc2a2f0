"""From logits to the next token: small pure functions on (B, V), in the order in which `sample` applies them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minitransformer.model.config import at_least


@dataclass
class Sampling:
    """How the next token is chosen; the functions below say what each setting does.

    temperature: 0 takes the likeliest token, 1 the model's own distribution.
    top_k: sample among the k likeliest tokens (0: all). top_p: among the likeliest that together have this probability.
    min_p: among those that have at least this part of the likeliest token's probability (0: all).
    repetition_penalty: above 1, tokens of the prompt and the text so far become less likely (1: none).
    presence_penalty, frequency_penalty: taken from the logits of tokens made so far, once and for each time (0: none).
    no_repeat_ngram: no run of so many tokens comes twice (0: none).
    logit_bias: added to the logits of these ids. banned: ids that never come.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number, 0 or above")
        at_least("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is out of range; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is out of range; it must lie between 0 and 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number")
        at_least("no_repeat_ngram", self.no_repeat_ngram, 0)

    @property
    def looks_back(self) -> bool:
        """Does the choice depend on the tokens so far?"""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.no_repeat_ngram)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError when ids of `logit_bias` or `banned` are outside the vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned", self.banned)):
            for i in ids:
                if not 0 <= i < vocab_size:
                    raise ValueError(f"{name}: id {i} is outside the vocabulary of {vocab_size}")


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
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= p)
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
    return logits


def sample(logits: Tensor, config: Sampling, uniform: Tensor) -> Tensor:
    """Draw one token a row: (B, V) -> (B,).

    uniform: (B,) numbers in [0, 1), one for each row, which decide alone; so rows do not disturb each other.

    Raises:
        ValueError: nothing is left to choose from in some row.
    """
    if bool((logits.amax(-1) == float("-inf")).any()):
        raise ValueError("no token is left to choose from; ban fewer of them")
    if config.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / config.temperature
    index = None
    if 0 < config.top_k < logits.shape[-1]:  # the rest needs to look at the k alone
        logits, index = logits.topk(config.top_k)
    logits = keep_min_p(keep_top_p(logits, config.top_p), config.min_p)
    cumulative = logits.softmax(-1).double().cumsum(-1)
    place = torch.searchsorted(cumulative, uniform.double()[:, None] * cumulative[:, -1:], right=True)
    place = place.clamp(max=logits.shape[-1] - 1)
    return (place if index is None else index.gather(-1, place)).squeeze(-1)
