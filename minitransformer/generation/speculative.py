"""Speculative decoding: a small model guesses some tokens ahead, and the large one checks them all in one pass."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.config import Sampling
from minitransformer.generation.decode import Row, fitting, prefill, start_rows
from minitransformer.generation.sampling import adjust, distribution, draw, refuse_nan, refuse_nothing
from minitransformer.model.cache import KVCache
from minitransformer.model.transformer import Transformer


@dataclass
class Guesses:
    """How many tokens the draft proposed, and how many of them the model took."""

    proposed: int = 0
    taken: int = 0


@torch.inference_mode()
def speculate(
    model: Transformer,
    draft: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int | None,
    sampling: Sampling,
    seed: int | None = None,
    num_samples: int = 1,
    stop: list[str] | None = None,
    max_seconds: float | None = None,
    ahead: int = 4,
    guesses: Guesses | None = None,
) -> Iterator[list[Row]]:
    """As `generate_rows`, row after row: yield all of them whenever some tokens came.

    Tokens have the distribution that they have without the draft, greedy ones are the same (Leviathan et al. 2023;
    Chen et al. 2023): a guess x stays with probability min(1, p(x) / q(x)), p and q being what the model and the draft
    would draw from; the first that does not is replaced by a draw from max(0, p - q), and where all stay, one more is
    drawn from p.

    Args:
        ahead: tokens that the draft, which shares the tokenizer, guesses at a time.
        guesses: counts what became of them.

    Raises:
        ValueError: a prompt is too long, or a model keeps a state that cannot take tokens back.
    """
    for name, one in (("checkpoint", model), ("draft", draft)):
        if one.config.attention.kind != "softmax":
            raise ValueError(f"{name}: a model with model.attention.kind={one.config.attention.kind} cannot step back")
    sampling.check(tokenizer.vocab_size)
    deadline = time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
    guesses = guesses or Guesses()
    rows, generators = start_rows(tokenizer, prompts, num_samples, stop, seed)
    n_new = fitting(model, max(len(row.prompt_ids) for row in rows), max_new_tokens)
    assert n_new is not None
    device = model.embedding.weight.device

    for number, (row, generator) in enumerate(zip(rows, generators, strict=True)):
        if number % num_samples == 0:  # the prompt is read once for all of its samples
            length = len(row.prompt_ids) + n_new
            readable = [(one, row.prompt_ids[: one.config.max_seq_len]) for one in (model, draft)]
            caches = [prefill(one, [ids], tokenizer.eos_id, length, rolling=False)[0] for one, ids in readable]
        for cache in caches:
            cache.truncate(min(cache.length, len(row.prompt_ids) - 1))  # the next pass begins with the last token

        def chances(one: Transformer, cache: KVCache, guessed: list[int], n: int, row=row):
            """Logits of the last n places after the row and the guesses, and what would be drawn from there: (n, V)."""
            made = row.tokens + guessed
            fresh = (row.prompt_ids + made)[cache.length :]
            x = one.hidden_states(torch.tensor([fresh], device=device), cache=cache)[0][0, -n:]
            logits = one.logits(x)[:, : tokenizer.vocab_size].float()
            refuse_nan(logits)
            so_far = [made[: len(made) - i] for i in reversed(range(n))]
            adjusted = adjust(logits, sampling, [row.prompt_ids] * n, so_far)
            if sampling.forbids:
                refuse_nothing(adjusted)
            return logits, distribution(adjusted, sampling).cpu()

        def drawn(probabilities: torch.Tensor, generator=generator) -> int:
            return int(draw(probabilities[None], torch.rand(1, generator=generator)))

        while not row.finish:
            length = len(row.prompt_ids) + len(row.tokens)
            room = min(n_new - len(row.tokens) - 1, draft.config.max_seq_len - length + 1)
            new: list[int] = []
            q = []
            for _ in range(min(ahead, room)):
                q.append(chances(draft, caches[1], new, 1)[1][0])
                new.append(drawn(q[-1]))
            logits, p = chances(model, caches[0], new, len(new) + 1)
            stays = [float(torch.rand(1, generator=generator)) * q[i][x] < p[i, x] for i, x in enumerate(new)]
            taken = stays.index(False) if False in stays else len(new)
            guesses.proposed, guesses.taken = guesses.proposed + len(new), guesses.taken + taken
            rest = p[taken] if taken == len(q) else (p[taken] - q[taken]).clamp(min=0)
            new[taken:] = [drawn(rest if rest.any() else p[taken])]  # rounding may leave nothing
            log_probs = -F.cross_entropy(logits[: len(new)], torch.tensor(new, device=device), reduction="none")
            for token, log_prob in zip(new, log_probs.tolist(), strict=True):
                if not row.finish:
                    row.add(token, log_prob)
            if len(row.tokens) == n_new:
                row.end("length")
            elif time.monotonic() > deadline:
                row.end("time")
            for cache in caches:
                cache.truncate(min(cache.length, length + taken))
            yield rows
