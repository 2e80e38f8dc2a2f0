"""What generate.py does: text to standard output as it is made, all else to standard error."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from minitransformer.data.files import FileText, decoded, split_documents
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import choose_device, keep_freed_memory
from minitransformer.generation.beam import DRAWING, beam_search
from minitransformer.generation.config import GenerateConfig, Sampling
from minitransformer.generation.decode import Continuation, Row, generate_rows
from minitransformer.generation.generate import score
from minitransformer.generation.speculative import Guesses, speculate
from minitransformer.model.product import pack_weights
from minitransformer.model.quantize import quantize_int8
from minitransformer.model.transformer import Transformer
from minitransformer.run.models import load
from minitransformer.run.names import latest_run
from minitransformer.words import perplexity, to_json


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(config: GenerateConfig) -> None:
    """Generate, or score, as `config` says.

    Raises:
        ValueError: the checkpoint, a prompt or a setting is wrong.
    """
    prompts = [config.prompt] if config.prompt_file is None else read_prompts(config.prompt_file)
    path = latest_run(Path(config.runs_dir)) if config.checkpoint is None else config.checkpoint
    device = choose_device(config.device)
    model, tokenizer = load(path, device, say=say)
    if config.quantize == "int8":
        quantize_int8(model)
    draft = None
    if config.draft is not None:
        if not Path(config.draft).exists():
            raise ValueError(f"draft={config.draft} does not exist (looked in {Path.cwd()})")
        draft, its_tokenizer = load(config.draft, device, say=say)
        if its_tokenizer.to_json() != tokenizer.to_json():
            raise ValueError(f"draft={config.draft} has another tokenizer than {path}")
    if not config.score:  # which reads each weight once
        rows = config.beams if config.beams > 1 else config.num_samples * (1 if config.interactive else len(prompts))
        if draft is not None:  # rows are taken one after the other
            pack_weights(draft, 1)
            rows = config.draft_tokens + 1
        pack_weights(model, rows)
    keep_freed_memory()  # from now on: not what loading and packing leave
    if config.beams > 1:
        settings = {name: value for name, value in _sampling(config).items() if name not in DRAWING}
        several, number = config.num_samples * len(prompts) > 1, 0
        for prompt in asked() if config.interactive else prompts:
            found = beam_search(
                model, tokenizer, prompt, config.max_new_tokens, config.beams, config.length_penalty, config.stop,
                config.max_seconds, **settings,
            )  # fmt: skip
            for one in found[: config.num_samples]:
                number += 1
                show_one(config, number if several else 0, one)
    elif config.interactive:
        for prompt in asked():
            show(config, model, draft, tokenizer, [prompt])
    elif config.score:
        for prompt in prompts:
            show_score(score(model, tokenizer, prompt), tokenizer, config.output)
    else:
        show(config, model, draft, tokenizer, prompts, f"{path}: ")


def _sampling(config: GenerateConfig) -> dict[str, object]:
    return {f.name: getattr(config, f.name) for f in fields(Sampling)}


def read_prompts(name: str) -> list[str]:
    """One prompt a line of a file, or of standard input for `-`; the file is read as those of data=text are."""
    if name == "-":
        text = decoded(sys.stdin.buffer, "standard input")
    elif not Path(name).exists():
        raise ValueError(f"prompt_file={name} does not exist (looked in {Path.cwd()})")
    else:
        text = FileText(Path(name))
    prompts = list(split_documents(text, "line"))
    if not prompts:
        raise ValueError(f"prompt_file={name} holds no prompt")
    return prompts


def asked() -> Iterator[str]:
    """Prompts from the terminal, with the arrow keys' history, until an empty line or its end."""
    with contextlib.suppress(ImportError):  # on Windows
        import readline  # noqa: F401  gives `input` its history
    while True:
        try:
            prompt = input("prompt> ")
        except EOFError:
            return
        if not prompt:
            return
        yield prompt


def show(
    config: GenerateConfig,
    model: Transformer,
    draft: Transformer | None,
    tokenizer: Tokenizer,
    prompts: list[str],
    source: str = "",
) -> None:
    """Print the continuations: one as it grows, many when they are done; then, from what and how fast."""
    sampling = Sampling(**_sampling(config))
    begin, guesses = time.perf_counter(), Guesses()
    if draft is None:
        steps = generate_rows(
            model, tokenizer, prompts, config.max_new_tokens, sampling, config.seed, config.num_samples, config.stop,
            config.max_seconds, config.overflow,
        )  # fmt: skip
    else:
        steps = speculate(
            model, draft, tokenizer, prompts, config.max_new_tokens, sampling, config.seed, config.num_samples,
            config.stop, config.max_seconds, config.draft_tokens, guesses,
        )  # fmt: skip
    single = len(prompts) * config.num_samples == 1 and config.output == "text"
    rows: list[Row] = []
    begun = False
    try:
        for rows in steps:
            if single:
                before, begun = ("" if begun else rows[0].prompt), True
                print(before + rows[0].fresh(), end="", flush=True)
    except KeyboardInterrupt:
        for row in rows:
            row.end("interrupted")
        if single:
            print(rows[0].fresh() if rows else "", flush=True)
        else:
            show_all(config, rows)
        raise
    if single:
        print(flush=True)
    else:
        show_all(config, rows)
    made, seconds = sum(len(row.tokens) for row in rows), time.perf_counter() - begin
    guessed = f"; {guesses.taken} of {guesses.proposed} guesses of the draft taken" if guesses.proposed else ""
    say(f"{source}{made} tokens, {made / seconds:,.0f} a second{guessed}")


def show_all(config: GenerateConfig, rows: list[Row]) -> None:
    for number, row in enumerate(rows):
        show_one(config, number + 1, row.result())


def show_one(config: GenerateConfig, number: int, found: Continuation) -> None:
    """As an object, or as text below its number if it has one."""
    if config.output == "json":
        print(to_json(asdict(found)), flush=True)
        return
    head = f"--- {number} ---\n" if number else ""
    print(f"{chr(10) if number > 1 else ''}{head}{found.prompt}{found.text}", flush=True)


def show_score(found: Continuation, tokenizer: Tokenizer, output: str) -> None:
    total, n_bytes = sum(found.log_probs), len(found.text.encode())
    summary = {
        "log_prob": total,
        "perplexity": perplexity(-total / len(found.tokens)),
        "bits_per_byte": -total / math.log(2) / n_bytes if n_bytes else None,
    }
    if output == "json":
        print(to_json({"text": found.text, "tokens": found.tokens, "log_probs": found.log_probs} | summary))
        return
    for token, log_prob in zip(found.tokens, found.log_probs, strict=True):
        print(
            f"{log_prob:9.4f}  {tokenizer.token_bytes[token].decode('utf-8', 'replace')!r}"
            if token != tokenizer.eos_id
            else f"{log_prob:9.4f}  end"
        )
    print("  ".join(f"{name} {value:.4f}" for name, value in summary.items() if value is not None))
