"""What `python -m minitransformer.evaluate` does: the result to standard output, all else to standard error."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from minitransformer.data.config import SOURCES, DataConfig
from minitransformer.data.documents import Corpus, Document, load_corpus
from minitransformer.data.files import TABLES, expand
from minitransformer.data.packing import Documents, TokenStream
from minitransformer.data.store import look_through, token_stream
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import choose_device
from minitransformer.evaluation.config import EvaluateConfig
from minitransformer.evaluation.scoring import evaluate, lengthened, loss_by_position
from minitransformer.model.quantize import quantize_int8
from minitransformer.run.directory import atomic_write, read_starts
from minitransformer.run.models import load
from minitransformer.run.names import latest_run
from minitransformer.words import to_json

TABLE_ROWS = 32  # of losses by position, at most


def run(config: EvaluateConfig) -> None:
    """Evaluate as `config` says, and print what was found.

    Raises:
        ValueError: the checkpoint, the data or a setting is wrong.
    """
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    path = latest_run(Path(config.runs_dir)) if config.checkpoint is None else Path(config.checkpoint)
    model, tokenizer = load(path, choose_device(config.device), say=console.print)
    trained = model.config.max_seq_len
    length = config.window(trained)
    stride = config.stride or max(1, length // 2)
    if not length:
        raise ValueError(f"length={config.length} of the model's max_seq_len={trained} is less than a token")
    if stride > length:
        raise ValueError(f"stride={stride} is beyond the window of length={length}: tokens between would not be scored")
    model = lengthened(model, length, config.scaling)
    if config.quantize == "int8":
        quantize_int8(model)
    console.print(f"{path}: {model.config.position} positions, max_seq_len {trained}")

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        what, stream, documents = tokens_of(config, path, tokenizer, bar)
        total = int((documents.length - documents.prefix + 1).sum())
        console.print(f"{what}: {len(documents):,} documents, {total:,} tokens with their ends")
        task = bar.add_task("scoring", total=total)
        reading = (model, tokenizer, stream, documents, length)
        if config.by_position:
            found, tokens = loss_by_position(*reading, config.batch_size, lambda n: bar.advance(task, n))
        else:
            result = evaluate(*reading, stride, config.batch_size, lambda n: bar.advance(task, n))

    about = {"checkpoint": str(path), "data": what, "quantize": config.quantize, "length": length}
    if not config.by_position:
        summary = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
        summary |= {"tokens": result.tokens, "bytes": result.n_bytes, "documents": result.documents}
        show(config, about | {"stride": stride} | summary)
        return
    if config.plot:
        draw(Path(config.plot), {str(path): found}, trained)
        console.print(f"drawn in {config.plot}")
    if config.output == "json":
        summary = {"max_seq_len": trained, "position": model.config.position, "scaling": model.config.rotary.scaling}
        summary |= {"tokens": tokens.tolist(), "loss_by_position": found.tolist()}
        print(to_json(about | summary))
    else:
        show_by_position(found, tokens, trained)


def tokens_of(
    config: EvaluateConfig, path: Path, tokenizer: Tokenizer, bar: Progress
) -> tuple[str, TokenStream, Documents]:
    """What is evaluated, in words; its token stream, and where the documents lie in it.

    Raises:
        ValueError: there is no text, or no data are given and those of the run cannot be found.
    """
    if config.data is not None:
        corpus = load_corpus(replace(config.data, split="hash"))  # so that documents stay whole
        what, documents = corpus.what, (document for document in corpus.read() if not document.blank)
    else:
        corpus, documents = held_out_of(run_of(path), bar)
        what = f"held-out text of {corpus.what}"
    task = bar.add_task("tokenising", total=None)
    stream, found = token_stream(_first(documents, corpus.what), tokenizer)
    bar.remove_task(task)
    return what, stream, found


def _first(documents: Iterator[Document], what: str) -> Iterator[Document]:
    """The documents, of which there must be one."""
    first = next(documents, None)
    if first is None:
        raise ValueError(f"{what} holds no text")
    return chain((first,), documents)


def run_of(path: Path) -> Path:
    """The run directory that a path is, or that a model file or checkpoint lies in.

    Raises:
        ValueError: there is none.
    """
    folders = [path] if path.is_dir() else [path.parent, path.parent.parent]  # a file may lie in checkpoints/
    run = next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
    if run is None:
        raise ValueError(f"{path} has no config.yaml that says what it held out; choose data=text data.files=FILE")
    return run


def held_out_of(run: Path, bar: Progress) -> tuple[Corpus, Iterator[Document]]:
    """The corpus of a run, and the documents in it that the run held out; says so where the corpus has changed."""
    data = data_of_run(run)
    corpus = load_corpus(data)
    trained_on = [start["fingerprints"]["data"] for start in read_starts(run) if "fingerprints" in start]
    if trained_on and corpus.fingerprint != trained_on[-1]:
        bar.console.print(
            f"warning: {corpus.what} is not the text of {run} any more; some of what is scored may have been trained on"
        )
    held_out = look_through(corpus, data.val_fraction, bar).held_out
    documents = (document for document in corpus.read() if not document.blank)
    return corpus, (document for document, held in zip(documents, held_out, strict=True) if held)


def data_of_run(run: Path) -> DataConfig:
    """The data settings of a run.

    Raises:
        ValueError: its config.yaml does not say what the data were.
    """
    file = run / "config.yaml"
    values = OmegaConf.to_container(OmegaConf.load(file))
    data = values.get("data") if isinstance(values, dict) else None
    if isinstance(data, dict) and data:
        data = data if "kind" in data else _with_kind(data)
        choice = SOURCES.get(data["kind"])
        if choice is not None and set(data) <= {field.name for field in fields(choice)}:
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(choice), data))  # its types are checked
    raise ValueError(f"{file} does not say what the data of the run were; choose data=text data.files=FILE")


def _with_kind(data: dict) -> dict:
    """The data settings of a run from before there was data.kind, as they are written now.

    Files were read by their endings then, and settings without effect were not refused.
    """
    unused = {"val_fraction", "split"} if data.get("val_files") or data.get("val_split") else set()
    unused |= set() if data.get("streaming") else {"buffer"}
    if "files" not in data:
        kind = "hub" if "name" in data else "stdlib"
    else:
        has_fields = data.get("text_field") is not None or data.get("prefix_field") is not None
        kind = _kind_of([str(name) for name in data["files"] or []], ["text", *TABLES][has_fields:])
        unused |= {"text_field", "prefix_field"} if kind == "text" else {"documents"}
    return {name: value for name, value in data.items() if name not in unused} | {"kind": kind}


def _kind_of(files: list[str], kinds: list[str]) -> str:
    """The first kind as which all files can be read.

    Raises:
        ValueError: there is none.
    """
    refused = None
    for kind in kinds:
        try:
            expand("data.files", files, kind)
            return kind
        except ValueError as error:
            refused = refused or error
    raise refused


# Showing ---------------------------------------------------------------------------------------------------------


def show(config: EvaluateConfig, found: dict) -> None:
    if config.output == "json":
        print(to_json(found))
        return
    each = "" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}"
    for name, value in {
        "loss": f"{found['loss']:.4f} nats per token",
        "perplexity": f"{found['perplexity']:.3f}",
        "bits per byte": each,
        "scored": f"{found['tokens']:,} tokens of {found['bytes']:,} bytes in {found['documents']:,} documents",
        "window": f"{found['length']} tokens, stride {found['stride']}",
    }.items():
        print(f"{name:14} {value}")


def show_by_position(losses: np.ndarray, tokens: np.ndarray, trained: int) -> None:
    """A table of mean losses over stretches of positions, and how far each is from the last one trained on."""
    size = max(1, trained // 8, -(-len(losses) // TABLE_ROWS))
    first = range(0, len(losses), size)
    means = [float(np.average(losses[i : i + size], weights=tokens[i : i + size])) for i in first]
    known = means[max(0, min(trained, len(losses)) // size - 1)]
    table = Table("positions", box=None, pad_edge=False)
    table.add_column("loss", justify="right")
    table.add_column("against the last trained on" if len(losses) > trained else "against the last", justify="right")
    for begin, mean in zip(first, means, strict=True):
        last = min(begin + size, len(losses)) - 1
        table.add_row(f"{begin}-{last}", f"{mean:.4f}", f"{mean - known:+.4f}", style="bold" if last >= trained else "")
    Console(highlight=False).print(table)
    print(f"{tokens.max():,} stretches of {len(losses)} tokens; the model was trained on {trained}")


def draw(path: Path, losses: dict[str, np.ndarray], trained: int) -> None:
    """Losses by position of one or more models, as means over stretches of an eighth of the training length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = max(1, trained // 8)
    means = {name: x[: len(x) // size * size].reshape(-1, size).mean(1) for name, x in losses.items()}
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for number, name in enumerate(sorted(means, key=lambda name: -means[name][-1])):  # as the lines end, from the top
        style = "-" if number < 10 else "--"
        axes.plot((np.arange(len(means[name])) + 0.5) * size, means[name], style, color=f"C{number % 10}", label=name)
    axes.axvline(trained, color="grey", linestyle=":")
    axes.annotate(" trained up to here", (trained, 1), xycoords=("data", "axes fraction"), va="top", color="grey")
    axes.set(
        xlabel="position in the text, tokens", ylabel="loss, nats per token", xlim=(0, max(map(len, losses.values())))
    )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=100, format=path.suffix[1:])
    pyplot.close(figure)
