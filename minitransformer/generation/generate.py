"""Text from a model, from Python: `generate` and its kin choose how the tokens are made, and take settings by name."""

from collections.abc import Iterator

import torch

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.config import Sampling
from minitransformer.generation.decode import Continuation, Row, evaluating, generate_rows
from minitransformer.generation.sampling import refuse_nan
from minitransformer.generation.speculative import speculate
from minitransformer.model.transformer import Transformer


def stream(
    model: Transformer, tokenizer: Tokenizer, prompt: str, max_new_tokens: int | None = None, **settings
) -> Iterator[str]:
    """The continuation of one prompt as it is made, in whole characters. `settings` as in `generate`."""
    for (row,) in _rows(model, tokenizer, [prompt], max_new_tokens, **settings):
        if piece := row.fresh():
            yield piece


def _rows(model, tokenizer, prompts, max_new_tokens, **settings) -> Iterator[list[Row]]:
    names = Sampling.__dataclass_fields__
    sampling = Sampling(**{name: settings.pop(name) for name in list(settings) if name in names})
    if (draft := settings.pop("draft", None)) is None:
        with evaluating(model):
            yield from generate_rows(model, tokenizer, prompts, max_new_tokens, sampling, **settings)
        return
    with evaluating(model, draft):
        yield from speculate(model, draft, tokenizer, prompts, max_new_tokens, sampling, **settings)


def generate_all(
    model: Transformer, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int | None = None, **settings
) -> list[Continuation]:
    """As `generate`, with tokens, log-probabilities and the reason of each text's end."""
    if not prompts:
        return []
    *_, rows = _rows(model, tokenizer, prompts, max_new_tokens, **settings)
    return [row.result() for row in rows]


def generate(
    model: Transformer, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int | None = None, **settings
) -> list[str]:
    """Continue each prompt; returns the texts without their prompts, `num_samples` for each in turn.

    On a CPU `pack_weights(model, rows)` makes it faster beforehand, as generate.py does.

    Args:
        max_new_tokens: tokens for each at most; a text also ends where the model ends the document.
            None: as many as the model still holds after the longest prompt.
        settings: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            no_repeat_ngram, logit_bias, banned, forced (see `Sampling`); stop, num_samples, max_seconds, overflow, seed
            (see `GenerateConfig`); draft, a smaller `Transformer` of the same tokenizer (see `speculate`). The same
            seed makes the same texts, whatever other prompts are in the batch behind it.

    Raises:
        ValueError: a setting is out of range, or a prompt is too long for the model.
    """
    return [found.text for found in generate_all(model, tokenizer, prompts, max_new_tokens, **settings)]


@torch.inference_mode()
def score(model: Transformer, tokenizer: Tokenizer, text: str) -> Continuation:
    """How likely a text is as a whole document, its end among it: its tokens and the log-probability of each.

    Raises:
        ValueError: it is longer than the model holds.
    """
    ids = tokenizer.encode_document(text, end=True)
    tokens = torch.tensor([ids], device=model.embedding.weight.device)
    with evaluating(model):
        logits = model(tokens[:, :-1])[0, :, : tokenizer.vocab_size]
    log_probs = logits.float().log_softmax(-1)
    found = log_probs.gather(-1, tokens[0, 1:, None])[:, 0]
    refuse_nan(found)
    return Continuation("", text, ids[1:], found.tolist(), "end")
