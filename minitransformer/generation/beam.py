"""Beam search: the likeliest text instead of a drawn one."""

import time

import torch

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.config import DRAWING, Sampling
from minitransformer.generation.decode import Continuation, Row, evaluating, fitting, prefill
from minitransformer.generation.sampling import adjust, refuse_nan, refuse_nothing
from minitransformer.model.transformer import Transformer


@torch.inference_mode()
def beam_search(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int | None = None,
    beams: int = 4,
    length_penalty: float = 1.0,
    stop: list[str] | None = None,
    max_seconds: float | None = None,
    **settings,
) -> list[Continuation]:
    """The likeliest continuations that a beam of `beams` finds, best first.

    They are ranked by the sum of their log-probabilities over their length to the power of `length_penalty`: above 0
    favours long ones (Wu et al. 2016, in the form that transformers has). It ends when no open beam can still overtake
    what is finished, as long as its rank does not rise.

    Args:
        stop, max_seconds: as in `generate`.
        settings: penalties, no_repeat_ngram, logit_bias, banned, forced (see `Sampling`). As in transformers they
            change the log-probabilities that are ranked, not those of the result, which are the model's own.

    Raises:
        ValueError: a setting is out of range, or the prompt is too long for the model.
    """
    if drawing := settings.keys() & set(DRAWING):
        raise ValueError(f"beam_search draws no tokens: {min(drawing)} cannot be set")
    sampling = Sampling(**settings)
    sampling.check(tokenizer.vocab_size)
    deadline = time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
    ids = tokenizer.encode_document(prompt)
    n_new = fitting(model, len(ids), max_new_tokens)
    assert n_new is not None
    with evaluating(model):
        cache, last = prefill(model, [ids], tokenizer.eos_id, len(ids) + n_new - 1)
    cache.repeat(beams)
    last = last.repeat(beams, 1)
    # All beams are alike at first: one of them may speak.
    totals = torch.full((beams,), float("-inf"), device=last.device)
    totals[0] = 0
    open_rows = [Row(prompt, ids, tokenizer, stop or []) for _ in range(beams)]
    finished: list[tuple[float, Row]] = []

    def rank(total: float, row: Row) -> float:
        return total / len(row.tokens) ** length_penalty

    with evaluating(model):
        for made in range(1, n_new + 1):
            log_probs = model.logits(last)[:, : tokenizer.vocab_size].float().log_softmax(-1)
            refuse_nan(log_probs)
            scores = adjust(log_probs, sampling, [ids] * beams, [row.tokens for row in open_rows])
            sums = (totals[:, None] + scores).flatten()
            best, places = sums.topk(min(2 * beams, len(sums)))  # each beam can end once: enough stay open
            grown: list[tuple[float, int, Row]] = []
            for order, (total, place) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
                beam, token = divmod(place, tokenizer.vocab_size)
                if total == float("-inf") or len(grown) == beams:
                    break
                row = open_rows[beam].grown(token, log_probs[beam, token].item())
                if row.finish:
                    if order < beams:
                        finished.append((rank(total, row), row))
                else:
                    grown.append((total, beam, row))
            if not grown and not finished:
                refuse_nothing(scores)
            finished = sorted(finished, key=lambda pair: -pair[0])[:beams]
            if not grown or (len(finished) == beams and rank(*grown[0][::2]) <= finished[-1][0]):
                grown = []
                break
            grown += [(float("-inf"), *grown[0][1:])] * (beams - len(grown))  # a small vocabulary fills no beam
            totals = torch.tensor([total for total, _, _ in grown], device=last.device)
            open_rows = [row for _, _, row in grown]
            late = time.monotonic() > deadline
            if late:
                break
            if made < n_new:
                cache.reorder(torch.tensor([beam for _, beam, _ in grown], device=last.device))
                new = torch.tensor([[row.tokens[-1]] for row in open_rows], device=last.device)
                last = model.hidden_states(new, cache=cache)[0][:, -1]
    for total, _, row in grown:
        if total > float("-inf"):
            row.end("time" if late else "length")
            finished.append((rank(total, row), row))
    return [row.result() for _, row in sorted(finished, key=lambda pair: -pair[0])[:beams]]
