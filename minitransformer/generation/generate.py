"""Text from a model: one prefill of the prompt, then one cached step a token."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.config import GenerateConfig, check_sampling
from minitransformer.generation.sampling import sample
from minitransformer.model.transformer import Transformer


def fitting(model: Transformer, prompt_length: int, max_new_tokens: int | None) -> int:
    """How many tokens to make after a prompt of `prompt_length` ids, its start token among them."""
    limit = model.config.max_seq_len
    if prompt_length > limit:
        raise ValueError(f"the prompt has {prompt_length} tokens with its start token; the model holds {limit}")
    # The last token made is never read, so one more than the model holds can be written.
    room = limit - prompt_length + 1
    if max_new_tokens is None:
        return room
    if max_new_tokens > room:
        raise ValueError(
            f"a prompt of {prompt_length} tokens and max_new_tokens={max_new_tokens} are more than the model's "
            f"max_seq_len={limit}; at most {room} fit"
        )
    return max_new_tokens


@torch.inference_mode()
def generate_ids(
    model: Transformer,
    prompts: list[list[int]],
    n_new: int,
    boundary: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Yield (B,) ids, one column after another; a row that has ended goes on with `boundary`.

    prompts: ids of each row, its start token first; rows may differ in length. vocab_size: ids that may be drawn.
    seed: row i draws from a generator seeded with seed + i (None: from the clock).
    """
    device = model.embedding.weight.device
    generators = [torch.Generator(device) for _ in prompts]
    for row, generator in enumerate(generators):
        generator.seed() if seed is None else generator.manual_seed(seed + row)
    length = max(map(len, prompts))
    tokens = torch.tensor([[boundary] * (length - len(p)) + p for p in prompts], device=device)
    padding = torch.tensor([length - len(p) for p in prompts], device=device)
    positions = (torch.arange(length, device=device) - padding[:, None]).clamp(min=-1)
    cache = model.new_cache(len(prompts), length + n_new - 1)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    x = model.features(tokens, positions, cache)[0]
    for made in range(1, n_new + 1):
        logits = model.logits(x[:, -1])[:, :vocab_size]  # an embedding may be padded past the tokenizer
        new = sample(logits, temperature, top_k, top_p, generators).masked_fill(ended, boundary)
        ended |= new == boundary
        yield new
        if made == n_new or bool(ended.all()):
            return
        x = model.features(new[:, None], cache=cache)[0]


def stream(
    model: Transformer, tokenizer: Tokenizer, prompt: str, max_new_tokens: int | None = None, **sampling
) -> Iterator[str]:
    """The continuation of one prompt as it is made, in whole characters. `sampling` as in `generate_ids`."""
    ids = [tokenizer.boundary, *tokenizer.encode(prompt)]
    n_new = fitting(model, len(ids), max_new_tokens)
    columns = generate_ids(model, [ids], n_new, tokenizer.boundary, tokenizer.vocab_size, **sampling)
    return tokenizer.decode_stream(column.item() for column in columns)


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> list[str]:
    """Continue each prompt; returns the texts without their prompts.

    Args:
        max_new_tokens: tokens for each at most; a text also ends where the model ends the document.
            None: as many as the model still holds after the longest prompt.
        temperature, top_k, top_p: see `GenerateConfig`.
        seed: the same seed makes the same texts, whatever other prompts are in the batch behind it.

    Raises:
        ValueError: a setting is out of range, or a prompt is too long for the model.
    """
    check_sampling(temperature, top_k, top_p)
    if not prompts:
        return []
    ids = [[tokenizer.boundary, *tokenizer.encode(prompt)] for prompt in prompts]
    n_new = fitting(model, max(map(len, ids)), max_new_tokens)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    columns = generate_ids(model, ids, n_new, tokenizer.boundary, tokenizer.vocab_size, **sampling)
    return [tokenizer.decode(row) for row in torch.stack(list(columns), dim=1).tolist()]


def run(config: GenerateConfig) -> None:
    """What generate.py does: text to standard output as it is made, all else to standard error."""
    from minitransformer.checkpoint import latest_run, load
    from minitransformer.device import choose_device

    path = latest_run(Path(config.runs_dir)) if config.checkpoint is None else config.checkpoint
    model, tokenizer = load(path, choose_device(config.device), say=lambda line: print(line, file=sys.stderr))
    pieces = stream(
        model,
        tokenizer,
        config.prompt,
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    print(f"{path}:", file=sys.stderr, flush=True)
    print(config.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
