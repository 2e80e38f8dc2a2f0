"""One prefill of the prompts, then one cached step a token."""

import codecs
import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.config import Sampling
from minitransformer.generation.sampling import adjust, refuse_nan, refuse_nothing, sample
from minitransformer.model.cache import KVCache
from minitransformer.model.transformer import Transformer

# Tokens of all rows that are read at a time: what is worked out on their way takes memory, and each call takes time.
PREFILL_TOKENS = {"cpu": 256, "mps": 2048, "cuda": 8192}  # and on others as on the last


@dataclass
class Continuation:
    """What a prompt was continued with.

    tokens, log_probs: ids, the end token among them, and how likely the model itself found each.
    finish: end (one of the tokenizer's `end_ids` came) | stop (a stop text came) | length | time.
    """

    prompt: str
    text: str
    tokens: list[int]
    log_probs: list[float]
    finish: str


def fitting(model: Transformer, prompt_length: int, max_new_tokens: int | None, overflow: str = "error") -> int | None:
    """How many tokens to make after a prompt of `prompt_length` ids, its start token among them (None: without end).

    Raises:
        ValueError: more than the model holds, and `overflow` does not allow it.
    """
    limit = model.config.max_seq_len
    if overflow == "extend" and not model.position.extends:
        raise ValueError(
            f"overflow=extend: model.position={model.config.position} ends at max_seq_len={limit}; use slide"
        )
    if overflow != "error" and max_new_tokens is not None:
        return max_new_tokens
    if prompt_length > limit and overflow == "error":
        raise ValueError(f"the prompt has {prompt_length} tokens with its start token; the model holds {limit}")
    if overflow == "slide":
        return None
    # The last token made is never read, so one more than the model holds can be written.
    room = max(1, limit - prompt_length + 1)
    if max_new_tokens is None:
        return room
    if max_new_tokens > room:
        raise ValueError(
            f"a prompt of {prompt_length} tokens and max_new_tokens={max_new_tokens} are more than the model's "
            f"max_seq_len={limit}; at most {room} fit (overflow=slide goes on)"
        )
    return max_new_tokens


class Row:
    """One continuation as it grows: ids become text in whole characters, and stop texts are found across tokens.

    A stop text may also be the name of a special token, which stands for no text itself.
    """

    def __init__(self, prompt: str, ids: list[int], tokenizer: Tokenizer, stop: list[str]):
        self.prompt, self.prompt_ids, self.tokenizer, self.stop = prompt, ids, tokenizer, stop
        self._stop_ids = {tokenizer.special[name] for name in stop if name in tokenizer.special}
        self.text, self.tokens, self.log_probs, self.finish = "", [], [], ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = 0
        self._prefix = "" if prompt else tokenizer.prefix
        self._longest = max(map(len, stop), default=1)

    def add(self, token: int, log_prob: float) -> None:
        """Take a token in; sets `finish` where it ends the text."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self._stop_ids:
            self.end("stop")
        elif token in self.tokenizer.end_ids:
            self.end("end")
        else:
            self._write(self._decoder.decode(self.tokenizer.token_bytes[token]))

    def grown(self, token: int, log_prob: float) -> "Row":
        """A copy that goes on with a token."""
        row = copy.copy(self)
        row.tokens, row.log_probs = list(self.tokens), list(self.log_probs)
        row._decoder = copy.copy(self._decoder)
        row.add(token, log_prob)
        return row

    def end(self, why: str) -> None:
        """No token comes any more."""
        if not self.finish:
            self._write(self._decoder.decode(b"", final=True))
            self.finish = self.finish or why

    def _write(self, new: str) -> None:
        """Append text, and end it where the first stop text begins."""
        before = len(self.text)
        if new:
            new, self._prefix = new.removeprefix(self._prefix), ""
        self.text += new
        found = [self.text.find(stop, max(0, before - self._longest + 1)) for stop in self.stop]
        places = [place for place in found if place >= 0]
        if places:
            self.text, self.finish = self.text[: min(places)], "stop"

    def fresh(self) -> str:
        """What can be shown since it was asked last: not what may still turn out to begin a stop text."""
        end = len(self.text)
        if not self.finish:
            begun = (
                n for n in range(min(self._longest - 1, end), 0, -1) for s in self.stop if s.startswith(self.text[-n:])
            )
            end -= next(begun, 0)
        text, self._shown = self.text[self._shown : end], max(self._shown, end)
        return text

    def result(self) -> Continuation:
        return Continuation(self.prompt, self.text, self.tokens, self.log_probs, self.finish)


def start_rows(
    tokenizer: Tokenizer, prompts: list[str], num_samples: int, stop: list[str] | None, seed: int | None
) -> tuple[list[Row], list[torch.Generator]]:
    """`num_samples` rows for each prompt in turn, and what each draws from: seed + its number (None: the clock)."""
    ids = [tokenizer.encode_document(prompt) for prompt in prompts]
    rows = [Row(p, i, tokenizer, stop or []) for p, i in zip(prompts, ids, strict=True) for _ in range(num_samples)]
    generators = [torch.Generator() for _ in rows]
    for number, generator in enumerate(generators):
        generator.seed() if seed is None else generator.manual_seed(seed + number)
    return rows, generators


def prefill(
    model: Transformer, rows: list[list[int]], padding_id: int, length: int, rolling: bool = True
) -> tuple[KVCache, Tensor]:
    """A cache with room for `length` tokens that has read the rows, left-padded, and the features of their last."""
    device, longest = model.embedding.weight.device, max(map(len, rows))
    tokens = torch.tensor([[padding_id] * (longest - len(ids)) + ids for ids in rows], device=device)
    padding = torch.tensor([longest - len(ids) for ids in rows], device=device)
    positions = (torch.arange(longest, device=device) - padding[:, None]).clamp(min=-1)
    cache = model.new_cache(len(rows), length, rolling)
    at_once = max(1, PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cuda"]) // len(rows))
    for piece, places in zip(tokens.split(at_once, 1), positions.split(at_once, 1), strict=True):
        features = model.hidden_states(piece, places, cache)[0]
    return cache, features[:, -1]


@torch.inference_mode()
def generate_rows(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int | None,
    sampling: Sampling,
    seed: int | None = None,
    num_samples: int = 1,
    stop: list[str] | None = None,
    max_seconds: float | None = None,
    overflow: str = "error",
) -> Iterator[list[Row]]:
    """Yield all rows, `num_samples` for each prompt, after every token; they are finished when it ends.

    Row i draws from a generator seeded with seed + i (None: from the clock), so it does not depend on the others.

    Raises:
        ValueError: a prompt is too long, or has characters that the tokenizer does not know.
    """
    sampling.check(tokenizer.vocab_size)
    deadline = time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
    rows, generators = start_rows(tokenizer, prompts, num_samples, stop, seed)
    ids = [row.prompt_ids for row in rows[::num_samples]]
    n_new = fitting(model, max(map(len, ids)), max_new_tokens, overflow)
    limit = model.config.max_seq_len
    if overflow == "slide":
        ids = [i[-limit:] for i in ids]
    room = limit if overflow == "slide" else max(map(len, ids)) + (n_new or 1) - 1
    cache, last = prefill(model, ids, tokenizer.eos_id, room)
    if num_samples > 1:
        cache.repeat(num_samples)
        last = last.repeat_interleave(num_samples, 0)
    made = 0
    while True:
        logits = model.logits(last)[:, : tokenizer.vocab_size]  # an embedding may be padded past the tokenizer
        adjusted = adjust(logits, sampling, [row.prompt_ids for row in rows], [row.tokens for row in rows])
        if sampling.forbids:
            refuse_nothing(adjusted[[not row.finish for row in rows]])
        uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators]).to(logits.device)
        new = sample(adjusted, sampling, uniform)
        log_probs = -F.cross_entropy(logits.float(), new, reduction="none").cpu()  # checked there: a GPU waits once
        refuse_nan(log_probs)
        made += 1
        for row, token, log_prob in zip(rows, new.tolist(), log_probs.tolist(), strict=True):
            if not row.finish:
                row.add(token, log_prob)
                if made == n_new:
                    row.end("length")
                elif time.monotonic() > deadline:
                    row.end("time")
        yield rows
        if all(row.finish for row in rows):
            return
        if overflow == "slide" and cache.length == limit:
            # Full: the newest half of each row is read again, as if the text had begun there.
            kept = [(row.prompt_ids + row.tokens)[-max(1, limit // 2) :] for row in rows]
            cache, last = prefill(model, kept, tokenizer.eos_id, limit)
        else:
            last = model.hidden_states(new[:, None], cache=cache)[0][:, -1]


@contextmanager
def evaluating(*models: Transformer) -> Iterator[None]:
    """Inside, the models are in evaluation mode, without dropout; then as they were."""
    were = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, were, strict=True):
            model.train(training)
