"""The command `python -m minitransformer.explain`: what a run of train.py would cost, before it is paid.

Everything is worked out from the config by `model.cost`; no model is built and no text is tokenised.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from minitransformer.data.config import BPEConfig, ByteConfig, FilesConfig, PretrainedConfig, StdlibConfig
from minitransformer.data.documents import file_documents, files_of, stdlib_documents
from minitransformer.data.files import COMPRESSED
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import DEVICES
from minitransformer.model.checks import choose
from minitransformer.model.config import ModelConfig
from minitransformer.model.cost import (
    TrainingMemory,
    adapter_parameters,
    cache_bytes,
    flops_per_token,
    parameter_count,
    parameters_by_part,
    training_memory,
)
from minitransformer.run.models import read_model
from minitransformer.training.config import ExplainConfig, inherit
from minitransformer.words import duration, short, to_json

OPTIMAL = 20  # tokens a parameter for the least loss at given operations (Hoffmann et al. 2022)
EPOCHS = 4  # that are about as good as new text (Muennighoff et al. 2023)
# Of a device's memory: torch itself needs some, and some is lost between blocks, on a CPU a third (glibc's malloc).
USABLE = {True: 0.9, False: 0.6}
SAMPLE = 2**20  # characters among which those of a character tokenizer are counted


def run(config: ExplainConfig, given: Sequence[str] = ()) -> None:
    """Print what the run would cost. given: names of the settings that the user gave, see `inherit`.

    Raises:
        ValueError: a setting or a file is wrong.
    """
    if config.init_from is not None:
        config = inherit(config, read_model(Path(config.init_from))[0], given)
    found = explain(config)
    if config.output == "json":
        print(to_json(found))
    else:
        show(config, found)


def explain(config: ExplainConfig) -> dict:
    """The whole account, as plain values: bytes, operations, seconds.

    Raises:
        ValueError: as `run`.
    """
    if config.gpu is not None:
        choose("gpu", config.gpu, tuple(DEVICES))
    size, origin = vocabulary(config)
    model = replace(config.model, vocab_size=size)
    on_gpu = config.gpu != "laptop-cpu" if config.gpu else config.trainer.device == "cuda" or (
        config.trainer.device == "auto" and torch.cuda.is_available()
    )  # fmt: skip
    precision = precision_on(config, DEVICES[config.gpu].bf16 if config.gpu else on_gpu)
    settings = config.trainer
    parameters, n_bytes = parameter_count(model), text_bytes(config)
    length, adapters = row_length(config), adapter_parameters(model, config.lora.rank, config.lora.targets)
    tokens = settings.max_steps * config.data.batch_size * length
    recompute = settings.checkpoint_blocks if settings.gradient_checkpointing == "full" else 0
    rows = rows_at_once(config, settings.accumulate)
    flops = {
        "forward": flops_per_token(model, length, rows=rows, adapters=adapters),
        "training": flops_per_token(model, length, True, rows, adapters=adapters),
        "computed": flops_per_token(model, length, True, rows, recompute, adapters),
    }
    memory = memory_of(config, model, precision, on_gpu)
    other = {
        how: memory_of(config, model, precision, on_gpu, checkpointing=how) for how in ("none", "selective", "full")
    }
    devices = {}
    for name in DEVICES if config.gpu is None else (config.gpu,):
        devices[name] = fit(config, model, name)
        at_peak = devices[name].pop("peak_flops") * config.mfu * settings.ranks
        devices[name]["seconds"] = tokens * flops["computed"] / at_peak
    found = {
        "model": asdict(model),
        "vocabulary_from": origin,
        "parameters": parameters_by_part(model) | {"total": parameters},
        "adapters": adapters,
        "flops_per_token": flops,
        "memory": {"precision": precision, "rows": rows} | asdict(memory),
        "activations": {how: m.activations + m.recomputed for how, m in other.items()},
        "cache": cache_bytes(model),
        "steps": settings.max_steps,
        "tokens_per_step": tokens // settings.max_steps,
        "tokens": tokens,
        "text_bytes": n_bytes,
        "epochs": None if not n_bytes else tokens * bytes_per_token(config, size) / n_bytes,
        "tokens_per_parameter": tokens / parameters,
        "flops": tokens * flops["training"],
        "seconds": None if config.throughput is None else tokens / config.throughput,
        "devices": devices,
    }
    return found | {"warnings": list(warnings(config, model, found))}


# Tokens ----------------------------------------------------------------------------------------------------------


def vocabulary(config: ExplainConfig) -> tuple[int, str]:
    """How many ids the model will have, as far as that is known before the tokenizer is trained; and what says so.

    Raises:
        ValueError: nothing on this machine says it.
    """
    tokenizer = config.tokenizer
    if config.model.vocab_size is not None:
        return config.model.vocab_size, "model.vocab_size"
    if isinstance(tokenizer, BPEConfig):
        return tokenizer.vocab_size, "tokenizer.vocab_size; a small text may fill fewer"
    if isinstance(tokenizer, PretrainedConfig):
        name = tokenizer.name
        if not Path(name).exists():
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(name, "tokenizer.json")
            if not isinstance(file, str):
                raise ValueError(f"tokenizer.name={tokenizer.name} is not on this machine; set model.vocab_size")
            name = str(Path(file).parent)
        return Tokenizer.pretrained(name).vocab_size, f"tokenizer.name={tokenizer.name}"
    if isinstance(tokenizer, ByteConfig):
        return 257, "tokenizer=byte"
    characters, seen = set(), 0
    for text in texts(config):
        characters.update(text)
        if (seen := seen + len(text)) > SAMPLE:
            break
    if not characters:
        raise ValueError("tokenizer=char: the characters of this data are known when it is read; set model.vocab_size")
    return len(characters) + 1, f"tokenizer=char, in the first {min(seen, SAMPLE):,} characters"


def texts(config: ExplainConfig) -> Iterator[str]:
    """The text of the training data, as far as it lies in files."""
    if isinstance(config.data, StdlibConfig):
        yield from stdlib_documents()
    elif isinstance(config.data, FilesConfig):
        for path in files_of(config.data)[0]:
            for document in file_documents(path, config.data):
                yield document.prefix
                yield from document.text


def text_bytes(config: ExplainConfig) -> int | None:
    """Bytes of the training text; None where a look at the sizes of files does not tell it.

    Raises:
        ValueError: a file is missing.
    """
    if isinstance(config.data, StdlibConfig):
        return round(sum(len(text.encode()) for text in texts(config)) * (1 - config.data.val_fraction))
    if not isinstance(config.data, FilesConfig):
        return None
    files, val_files, _ = files_of(config.data)
    if config.data.kind != "text" or any(path.suffix.lower() in COMPRESSED for path in files):
        return None
    held_out = 0 if val_files else config.data.val_fraction
    return round(sum(path.stat().st_size for path in files) * (1 - held_out))


def bytes_per_token(config: ExplainConfig, size: int) -> float:
    """About how much text a token stands for: 3.1 bytes with 2,048 ids of BPE, 4.5 with GPT-2's, in English or code."""
    return math.log2(size) / 3.5 if isinstance(config.tokenizer, BPEConfig | PretrainedConfig) else 1.0


# Devices ---------------------------------------------------------------------------------------------------------


def precision_on(config: ExplainConfig, bf16: bool) -> str:
    """What `trainer.precision` stands for on a device that computes in bf16, or on another."""
    if config.trainer.precision == "auto":
        return "bf16-mixed" if bf16 else "32"
    return config.trainer.precision


def row_length(config: ExplainConfig) -> int:
    """Tokens in a training row.

    Raises:
        ValueError: the model holds fewer.
    """
    length, most = config.data.row_length or config.model.max_seq_len, config.model.max_seq_len
    if length > most:
        raise ValueError(f"data.row_length={length} is more than model.max_seq_len={most}")
    return length


def rows_at_once(config: ExplainConfig, accumulate: int) -> int:
    """Rows of a micro-batch in one process."""
    return -(-config.data.batch_size // config.trainer.ranks // accumulate)


def memory_of(
    config: ExplainConfig,
    model: ModelConfig,
    precision: str,
    on_gpu: bool,
    accumulate: int | None = None,
    checkpointing: str | None = None,
) -> TrainingMemory:
    """Of one process; `accumulate` and `checkpointing` (None: as the config has them)."""
    settings = config.trainer
    accumulate = accumulate or settings.accumulate
    return training_memory(
        model,
        rows_at_once(config, accumulate),
        config.optimizer.kind,
        checkpointing or settings.gradient_checkpointing,
        settings.checkpoint_blocks,
        precision,
        accumulate > 1,
        config.callbacks.ema > 0,
        on_gpu,
        settings.ranks if settings.strategy == "fsdp" else 1,
        adapter_parameters(model, config.lora.rank, config.lora.targets),
        row_length(config),
    )


def fit(config: ExplainConfig, model: ModelConfig, name: str) -> dict:
    """Does a process of the run fit on a device, or by which settings, that change no result, would it?"""
    device, settings = DEVICES[name], config.trainer
    precision, on_gpu = precision_on(config, device.bf16), name != "laptop-cpu"
    room = device.memory * 1e9 * USABLE[on_gpu]
    each = config.data.batch_size // settings.ranks
    steps = [settings.accumulate] + [n for n in range(settings.accumulate + 1, each + 1) if each % n == 0]
    checkpointing = list(dict.fromkeys((settings.gradient_checkpointing, "full")))
    needs = None
    for how in checkpointing:
        for accumulate in steps:
            peak = memory_of(config, model, precision, on_gpu, accumulate, how).peak
            needs = needs or peak
            if peak <= room:
                break
        if peak <= room:
            break
    changes = [f"trainer.accumulate={accumulate}"] if accumulate != settings.accumulate else []
    changes += [f"trainer.gradient_checkpointing={how}"] if how != settings.gradient_checkpointing else []
    return {
        "memory": device.memory * 1e9,
        "precision": precision,
        "needs": needs,
        "fits": peak <= room,
        "with": changes if peak <= room else [],
        "least": peak,
        "peak_flops": 1e12 * (device.full if precision == "32" else device.half),
    }


# Warnings --------------------------------------------------------------------------------------------------------


def warnings(config: ExplainConfig, model: ModelConfig, found: dict) -> Iterator[str]:
    """What costs money for nothing."""
    assert model.vocab_size is not None
    if model.vocab_size % 64:
        better = -(-model.vocab_size // 64) * 64
        yield f"a vocabulary of {model.vocab_size:,} is no multiple of 64, slower on GPUs: model.vocab_size={better}"
    for name, width in (("d_model", model.d_model), ("d_ff", model.ff_width)):
        if width % 64:
            yield f"model.{name}={width} is no multiple of 64, slower on GPUs: {-(-width // 64) * 64} is one"
    if model.attention.kind == "softmax" and (model.head_width % 8 or model.head_width > 256):
        better = min(256, -(-model.head_width // 8) * 8)
        yield (
            f"heads of width {model.head_width}: fused attention on GPUs takes multiples of 8 up to 256, and pad "
            f"or give up otherwise: model.d_head={better}"
        )
    if found["tokens_per_parameter"] < OPTIMAL and config.init_from is None:
        steps = math.ceil(OPTIMAL * found["parameters"]["total"] / found["tokens_per_step"])
        best = math.sqrt(found["flops"] / 6 / OPTIMAL)
        yield (
            f"{found['tokens_per_parameter']:.2g} tokens per parameter, where about {OPTIMAL} are compute-optimal: "
            f"trainer.max_steps={steps}, or a model of about {short(best)} parameters for the same operations"
        )
    if found["epochs"] is not None and found["epochs"] > EPOCHS:
        yield f"the text is read about {found['epochs']:,.0f} times; beyond {EPOCHS} new text is worth much more"
    for name, device in found["devices"].items():
        if config.gpu and device["with"]:
            yield f"the batch does not fit on {name}; it does with {' '.join(device['with'])}"
        if config.gpu and not device["fits"]:
            yield f"this does not fit on {name}: {decimal(device['least'])} are needed even for one row at a time"


# Showing ---------------------------------------------------------------------------------------------------------


def show(config: ExplainConfig, found: dict) -> None:
    console = Console(highlight=False, emoji=False)
    model, memory, settings = ModelConfig.from_dict(found["model"]), found["memory"], config.trainer
    total = found["parameters"]["total"]
    shape = f"{model.n_layers} layers, d_model {model.d_model}, {model.n_heads} heads, {model.position} positions"
    console.print(f"{shape}, max_seq_len {model.max_seq_len}")
    console.print(f"vocabulary {model.vocab_size:,} ({found['vocabulary_from']})\n")

    parts = table("parameters", "", "share")
    for name, n in found["parameters"].items():
        if n:
            parts.add_row(name, f"{n:,}", f"{n / total:.1%}", style="bold" if name == "total" else "")
    if found["adapters"]:
        parts.add_row("trained adapters", f"{found['adapters']:,}", f"{found['adapters'] / total:.1%}")
    console.print(parts, "")

    flops = table("operations", "per token")
    named = {"forward": "forward", "training": "forward and backward", "computed": "with recomputation"}
    for name, words in named.items():
        if name != "computed" or found["flops_per_token"]["computed"] != found["flops_per_token"]["training"]:
            flops.add_row(words, short(found["flops_per_token"][name]))
    console.print(flops, "")

    ranks = f" of {settings.ranks}" if settings.ranks > 1 else ""
    console.print(f"one process{ranks}, {memory['rows']} rows at once, precision {memory['precision']}:")
    sizes = table("memory", "")
    for name in ("weights", "gradients", "optimizer", "average", "casts"):
        if memory[name]:
            sizes.add_row(name, decimal(memory[name]))
    for how, n in found["activations"].items():
        words = "activations" if how == "none" else f"  checkpointing={how}"
        sizes.add_row(words, decimal(n), style="" if how == settings.gradient_checkpointing else "dim")
    sizes.add_row("logits", decimal(memory["logits"]))
    sizes.add_row("at most at once", decimal(memory["peak"]), style="bold")
    sizes.add_row("cache to generate a row", decimal(found["cache"]), style="dim")
    console.print(sizes, "")

    plan = table("run", "")
    plan.add_row("steps", f"{found['steps']:,}")
    plan.add_row("tokens a step", f"{found['tokens_per_step']:,}")
    plan.add_row("tokens", f"{found['tokens']:,}")
    if found["epochs"] is not None:
        plan.add_row("epochs, about", f"{found['epochs']:,.1f}")
    plan.add_row("tokens per parameter", f"{found['tokens_per_parameter']:.3g}")
    plan.add_row(f"  {OPTIMAL} are optimal", f"{OPTIMAL * total:,}", style="dim")
    plan.add_row("operations", short(found["flops"]))
    if found["seconds"] is not None:
        plan.add_row(f"time at {config.throughput:,.0f} tokens/s", duration(found["seconds"]), style="bold")
    console.print(plan, "")

    devices = table("device", "memory", "needs", "time")
    devices.add_column("fits")
    for name, device in found["devices"].items():
        fits = "yes" if device["fits"] and not device["with"] else "with " + " ".join(device["with"])
        fits, style = (fits, "") if device["fits"] else ("no", "dim")
        memory, needs = f"{device['memory'] / 1e9:.0f} GB", decimal(device["needs"])
        time = duration(device["seconds"])
        devices.add_row(name, memory, needs, time, fits, style=style)
        if console.width < 70:  # no room for a table
            console.print(f"{name}: needs {needs} of {memory}, {time}, fits: {fits}", style=style)
    if console.width >= 70:
        console.print(devices)
    console.print(
        f"Times are at {config.mfu:.0%} of what a device can do; small models reach less on a GPU. Measure it and give "
        "throughput=TOKENS_PER_SECOND.",
        style="dim",
    )
    for line in found["warnings"]:
        console.print(f"! {line}", style="yellow")


def table(first: str, *others: str) -> Table:
    made = Table(first, box=None, pad_edge=False)
    for name in others:
        made.add_column(name, justify="right")
    return made


if __name__ == "__main__":
    from minitransformer import cli

    cli.explain()
