"""The page: numbers and drawings of runs, put into templates that escape them all."""

import re
import sys
from dataclasses import MISSING, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf
from torch import Tensor

import minitransformer
from minitransformer.data.tokenizer import printable
from minitransformer.model.config import ModelConfig
from minitransformer.model.cost import (
    TrainingMemory,
    adapter_parameters,
    flops_per_token,
    parameter_count,
    training_memory,
)
from minitransformer.model.transformer import Transformer
from minitransformer.report.charts import Chart, Line, attention_map, chart
from minitransformer.report.reading import Map, Piece, attention, read
from minitransformer.report.record import Record, read_all
from minitransformer.run.directory import OWN, REPORT_FILE, CheckpointError, best_validation, read_held_out, write_page
from minitransformer.run.models import load
from minitransformer.run.names import latest_run
from minitransformer.words import duration, short

SAMPLES = 8  # that are shown of a run, evenly over its steps
CHARACTERS = 3000  # that are shown of a sample
CURVES = {  # metric: title, is its axis logarithmic?
    "optim/lr": ("Learning rate", False),
    "optim/grad_norm": ("Gradient norm", True),
    "speed/tokens_per_s": ("Tokens per second", False),
}


def write(runs: list[Path], defaults: dict[str, Any], out: Path | None = None, runs_dir: Path = Path("runs")) -> Path:
    """Draw a run, or several in comparison, and return the file.

    Args:
        runs: run directories, or folders of them; none takes the newest run in `runs_dir`.
        defaults: dotted names and values of the settings of `python train.py` alone.
        out: the file (None: `report.html` in the run; `comparison.html` beside the first of several; in the working
            directory where that place is read-only).

    Raises:
        CheckpointError: a run does not exist, or holds no metrics; or the file cannot be written.
    """
    records = read_all(runs or [latest_run(runs_dir)])
    first = records[0].path
    if len(records) == 1:
        name, page, default = "run.html", alone(records[0], defaults), first / REPORT_FILE
    else:
        name, page, default = "comparison.html", compared(records), first.parent / "comparison.html"
    environment = Environment(
        loader=PackageLoader("minitransformer.report"),
        autoescape=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for word in (short, plain, visible, breakable, tip, rounded):
        environment.filters[word.__name__] = word
    text = environment.get_template(name).render(page=page, version=minitransformer.__version__)
    return write_page(text, out, default)


# Words -----------------------------------------------------------------------------------------------------------


def visible(text: str) -> Markup:
    """Text on its lines, whose ends are drawn."""
    return Markup("<i>↵</i>\n").join(clean(text).split("\n"))


def breakable(name: str) -> Markup:
    """A dotted name that may go on in the next line after a dot."""
    return Markup(".<wbr>").join(name.split("."))


def tip(piece: Piece) -> str:
    """What there is to say of a piece of held-out text."""
    found = f"{piece.nats:.2f} nats, probability {np.exp(-piece.nats):.2%}"
    return found + (f"\nlikeliest: {piece.guess} ({piece.probability:.0%})" if piece.guess else "")


def rounded(weights: Tensor) -> list[list[float]]:
    return [[round(x, 3) for x in row] for row in weights.tolist()]


def plain(value: Any) -> str:
    """A setting as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return {None: "null", MISSING: ""}.get(value, str(value)) if not isinstance(value, dict) else str(value)


def clean(text: str) -> str:
    """Text on its lines, control characters as escapes."""
    return "\n".join(map(printable, text.split("\n")))


def clipped(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} …"


# One run ---------------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """Held-out text as the model read it: pieces and the strength of their colour (0 to 1), and attention maps.

    why_not, no_maps: the sentence that stands in place of what cannot be shown.
    """

    texts: list[list[tuple[Piece, float]]] = field(default_factory=list)
    nats: float = 0.0
    uniform: float = 0.0
    names: list[str] = field(default_factory=list)
    maps: list[tuple[Map, str]] = field(default_factory=list)
    why_not: str = ""
    no_maps: str = ""


def alone(record: Record, defaults: dict[str, Any]) -> dict[str, Any]:
    """What the page of one run shows."""
    try:
        model, tokenizer = load(record.path, say=lambda line: print(line, file=sys.stderr))
        model.requires_grad_(False)
    except CheckpointError as error:
        model, reading = None, Reading(why_not=f"{error}.")
    else:
        reading = look(model, tokenizer, read_held_out(record.path))
    train, val = (Line(name, *record.curve(f"{name}/loss"), i, i == 1) for i, name in enumerate(("train", "val")))
    charts = [chart("Loss in nats per token", [train, val])]
    charts += [chart(title, [Line(title.lower(), *record.curve(m), 2)], log=log) for m, (title, log) in CURVES.items()]
    texts = [clipped(text) for _, text in record.samples]
    shown = np.unique(np.linspace(0, len(texts) - 1, min(SAMPLES, len(texts))).round().astype(int)).tolist()
    shared = common(texts)
    start = record.starts[0] if record.starts else {}
    return {
        "name": record.name,
        "about": {k: start[k] for k in ("model", "data", "tokens", "rows", "training", "device", "code") if k in start},
        "status": status(record),
        "tiles": tiles(record),
        "charts": [c for c in charts if c.lines],
        "samples": [(record.samples[i][0], texts[i][:shared], texts[i][shared:]) for i in reversed(shown)],
        "n_samples": len(texts),
        "reading": reading,
        "costs": [] if model is None else costs(record, model),
        "changed": record.changed(defaults),
        "config": OmegaConf.to_yaml(OmegaConf.load(record.path / "config.yaml")),
        "starts": [start for start in record.starts if "command" in start],
    }


def common(texts: list[str]) -> int:
    """How many first characters all texts share, up to white space: their prompt, if there are several."""
    alike = (len(set(column)) == 1 for column in zip(*texts, strict=False))
    shared = texts[0][: sum(takewhile(bool, alike))] if len(texts) > 1 else ""
    return len(re.sub(r"\S+\Z", "", shared))


def status(record: Record) -> str:
    done, planned = record.steps, record.starts[-1].get("max_steps", 0) if record.starts else 0
    return f"{done:,} steps" if done >= planned else f"stopped after {done:,} of {planned:,} steps"


def tiles(record: Record) -> list[tuple[str, str, str]]:
    """Headline numbers: what, in short, and exactly."""
    loss, bits, tokens, speed = (
        record.last("val/loss"), record.last("val/bits_per_byte"), record.last("tokens"), record.tokens_per_s
    )  # fmt: skip
    parameters = record.starts[0].get("parameters") if record.starts else None
    best = best_validation(record.metrics)
    found = [
        ("validation loss", loss and f"{loss:.4f}", f"{loss} nats per token"),
    ]
    if best is not None and best.loss < loss:
        found.append((f"the best, after step {best.step:,}", f"{best.loss:.4f}", f"{best.loss} nats per token"))
    found += [
        ("bits per byte", bits and f"{bits:.4f}", f"{bits}"),
        ("parameters", parameters and short(parameters), f"{parameters:,}" if parameters else ""),
        ("tokens", tokens and short(tokens), f"{tokens:,.0f}" if tokens else ""),
        ("time of stepping", duration(record.seconds) if record.seconds else None, f"{record.seconds:.1f} s"),
        ("tokens/s", speed and f"{speed:,.0f}", f"{speed}"),
    ]
    return [tile for tile in found if tile[1]]


def look(model: Transformer, tokenizer, texts: list[tuple[str, str]]) -> Reading:
    """Let the model read."""
    if not texts:
        return Reading(why_not="This run kept no held-out text, as runs of older versions did not.")
    try:
        documents = read(model, tokenizer, texts)
    except FloatingPointError as error:
        return Reading(why_not=str(error))
    nats = [piece.nats for document in documents for piece in document if piece.nats is not None]
    reading = Reading(nats=sum(nats) / max(1, len(nats)), uniform=float(np.log(tokenizer.vocab_size)))
    reading.texts = [[(p, min(1.0, (p.nats or 0) / reading.uniform)) for p in document] for document in documents]
    if model.config.attention.kind != "softmax":
        reading.no_maps = (
            f"This model's attention is linear (model.attention.kind={model.config.attention.kind}): it sums over keys "
            "before it meets a query, and has no weights to draw."
        )
    else:
        reading.names, maps = attention(model, tokenizer, texts)
        reading.maps = [(found, attention_map(found, reading.names)) for found in maps]
    return reading


def costs(record: Record, model: Transformer) -> list[tuple[str, str, str]]:
    """What, as the cost model has it, and as it was."""
    config = model.config
    built, numbers = sum(p.numel() for p in model.parameters()), parameter_count(config)
    per_token, tokens = flops_per_token(config, training=True), record.last("tokens") or 0
    rows, memory = memory_of(record, config)
    kept = memory.weights + memory.gradients + memory.optimizer + memory.average
    speed, peak, mfu = record.tokens_per_s, record.most("speed/peak_memory_gb"), record.last("speed/mfu")
    on_cpu = record.device_type == "cpu"
    return [
        ("parameters", f"{numbers:,}", f"{built:,} in the model file"),
        (
            "work",
            f"{short(per_token, 'FLOP')} a token, {short(per_token * tokens, 'FLOP')} in all",
            (f"{short(per_token * speed, 'FLOP/s')} over {duration(record.seconds)}" if speed else "")
            + (f", {mfu:.1%} of what the device can do" if mfu else ""),
        ),
        (
            "memory",
            f"{short(memory.peak, 'B')} at most: {short(kept, 'B')} of weights, gradients and optimizer, "
            f"{short(memory.activations + memory.recomputed, 'B')} of activations of {rows} rows",
            f"{short(peak * 1e9, 'B')} at most{', Python and torch among it' * on_cpu}" if peak else "",
        ),
    ]


def memory_of(record: Record, config: ModelConfig) -> tuple[int, TrainingMemory]:
    """Rows at once in one process of the run, and what it needed by the cost model."""
    of = record.settings.get  # an older run may lack a setting
    accumulate, ranks = of("trainer.accumulate", 1), of("trainer.devices", 1) * of("trainer.nodes", 1)
    rows = -(-of("data.batch_size") // ranks // accumulate)
    return rows, training_memory(
        config,
        rows,
        of("optimizer", "muon"),
        of("trainer.gradient_checkpointing", "none"),
        of("trainer.checkpoint_blocks", 1),
        record.precision,
        accumulate > 1,
        of("callbacks.ema", 0) > 0,
        record.device_type == "cuda",
        ranks if of("trainer.strategy") == "fsdp" else 1,
        adapter_parameters(config, of("lora.rank", 0), of("lora.targets", [])),
        of("data.row_length"),
    )


# Several runs ----------------------------------------------------------------------------------------------------


def compared(records: list[Record]) -> dict[str, Any]:
    """What the page of several runs shows; the best comes first."""
    records = sorted(records, key=lambda r: (r.last("val/bits_per_byte") is None, r.last("val/bits_per_byte") or 0))
    names = labels(records)
    losses = {
        "val/bits_per_byte": ("Bits per byte of held-out text", False),
        "val/loss": ("Validation loss in nats per token", False),
        "train/loss": ("Training loss in nats per token", False),
    }
    charts: list[Chart] = []
    for metric, (title, log) in (losses | CURVES).items():
        lines = [
            Line(name, *record.curve(metric, "tokens"), i, metric.startswith("val/"))
            for i, (name, record) in enumerate(zip(names, records, strict=True))
        ]
        charts.append(chart(title, lines, "tokens", log))
    settings = [record.settings for record in records]
    every = dict.fromkeys(name for one in settings for name in one)
    values = {name: [plain(one.get(name, MISSING)) for one in settings] for name in every}
    return {
        "names": names,
        "runs": [
            {
                "name": name,
                "path": str(record.path),
                "loss": record.last("val/loss"),
                "bits": record.last("val/bits_per_byte"),
                "parameters": record.starts[0].get("parameters") if record.starts else None,
                "steps": record.steps,
                "tokens": record.last("tokens"),
                "seconds": duration(record.seconds),
                "speed": record.tokens_per_s,
                "sample": clipped(record.samples[-1][1]) if record.samples else "",
                "command": record.starts[0].get("command", "") if record.starts else "",
            }
            for name, record in zip(names, records, strict=True)
        ],
        "charts": [c for c in charts if c.lines],
        "differing": {k: v for k, v in values.items() if len(set(v)) > 1 and k not in OWN},
    }


def labels(records: list[Record]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [record.path.resolve().parts for record in records]
    depth = next(n for n in range(1, 100) if len({p[-n:] for p in parts}) == len(parts) or n >= max(map(len, parts)))
    return [clean("/".join(p[-depth:])) for p in parts]
