"""Tokenised documents on the disk: made once, mapped into memory by every run that needs them."""

import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from minitransformer.data.config import ByteConfig, CharConfig, DataConfig, PretrainedConfig, TokenizerConfig
from minitransformer.data.documents import Corpus, Document
from minitransformer.data.packing import Documents, TokenStream
from minitransformer.data.tokenizer import Tokenizer, cut

FORMAT = 3  # of an entry; a change of what is stored takes a new number
BATCH = 2**22  # characters that are encoded at once


class TokenFile(TokenStream):
    """A stream in a file, mapped into memory. It is opened where it is used: a worker process gets its path alone."""

    def __init__(self, path: Path, dtype: str, eos_id: int, bos_id: int):
        self.path, self.dtype, self.eos_id, self.bos_id = path, dtype, eos_id, bos_id

    @cached_property
    def ids(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, mode="r")

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "ids"}


@dataclass
class Split:
    """The documents of one split, and what they add up to. n_bytes: UTF-8 bytes of their text, without prefixes."""

    documents: Documents
    n_bytes: int

    @property
    def n_tokens(self) -> int:
        """Targets but for the end tokens."""
        return int((self.documents.length - self.documents.prefix).sum())


@dataclass
class Store:
    """What an entry of the cache holds.

    limit: documents whose key is no larger are held out. skipped: blank documents, and boms: byte-order marks left out.
    """

    tokenizer: Tokenizer
    tokens: TokenFile
    train: Split
    validation: Split
    limit: float
    skipped: int
    boms: int


@dataclass
class Survey:
    """What a first look at a corpus finds.

    held_out: for each document that is not blank, is it for validation? limit: those whose key is no larger are.
    """

    n_bytes: int
    limit: float
    held_out: np.ndarray


def cache_folder(config: DataConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minitransformer"


def open_store(
    config: DataConfig, tokenizer_config: TokenizerConfig | Tokenizer, corpus: Corpus, console: Console
) -> Store:
    """The tokenised corpus, from the cache if it was tokenised before.

    An entry is named by a hash of the text and the settings, and appears whole or not at all: it is built in a folder
    beside its place and renamed. Of two runs that need it at once the second waits for the first.

    Raises:
        ValueError: the text is wrong or the cache cannot be written.
    """
    given = isinstance(tokenizer_config, Tokenizer)
    settings = [config.split, config.val_fraction, tokenizer_config.fingerprint if given else asdict(tokenizer_config)]
    if isinstance(tokenizer_config, PretrainedConfig):
        settings.append(Tokenizer.pretrained(tokenizer_config.name).fingerprint)  # a file by that name may change
    what = json.dumps([FORMAT, corpus.fingerprint, settings], sort_keys=True)
    entry = cache_folder(config) / blake2b(what.encode(), digest_size=16).hexdigest()
    if not entry.is_dir():
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(entry.with_suffix(".lock")):
                if not entry.is_dir():
                    _build(entry, config, tokenizer_config, corpus, console)
        except OSError as error:
            raise ValueError(f"data.cache_dir={entry.parent} cannot be written: {error.strerror or error}") from None
    store = _read(entry)
    return replace(store, tokenizer=tokenizer_config) if given else store  # an entry does not keep all of it


def _read(entry: Path) -> Store:
    meta = json.loads((entry / "meta.json").read_text())
    length, prefix, n_bytes, held_out = (
        np.load(entry / f"{name}.npy", mmap_mode="r") for name in ("length", "prefix", "bytes", "held_out")
    )
    documents = Documents.of(length, prefix)
    splits = [Split(documents.take(which), int(n_bytes[which].sum())) for which in (~held_out, held_out)]
    tokenizer = Tokenizer.load(entry / "tokenizer.json")
    tokens = TokenFile(entry / "tokens.bin", meta["dtype"], tokenizer.eos_id, tokenizer.bos_id)
    return Store(tokenizer, tokens, *splits, meta["limit"], meta["skipped"], meta["boms"])


def _build(
    entry: Path, config: DataConfig, tokenizer_config: TokenizerConfig | Tokenizer, corpus: Corpus, console: Console
) -> None:
    console.print("tokenising the corpus (once; it is kept for the next run)")
    building = entry.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
    building.mkdir()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_interactive,
    )  # fmt: skip
    try:
        with bar:
            survey = look_through(corpus, config.val_fraction, bar)
            tokenizer = make_tokenizer(tokenizer_config, corpus, survey, bar)
            _write(building, corpus, survey, tokenizer, bar)
        building.rename(entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def look_through(corpus: Corpus, val_fraction: float, bar: Progress) -> Survey:
    """Read everything once: is it all text, how much, and which documents does a hash hold out?

    Raises:
        ValueError: some of it cannot be read, or one of the splits would be empty.
    """
    task = bar.add_task("reading", total=None)
    n_bytes, keys = 0, array("d")
    given = {True: -1.0, False: 1.0}  # below and above every limit
    for document in corpus.read():
        if document.blank:
            continue
        document.text = _Counted(document.text)
        key = document.key()
        keys.append(key if document.held_out is None else given[document.held_out])
        n_bytes += document.text.n_bytes
        bar.advance(task, document.text.n_bytes)
    bar.remove_task(task)
    if not keys:
        raise ValueError(f"{corpus.what} holds no text, only white space")
    hashed = np.unique([key for key in keys if 0 <= key < 1])
    if len(hashed) == 1:
        raise ValueError(
            f"{corpus.what} holds one text, and whole ones are held out; give more, or data.split=tail for its end"
        )
    # Some text is left on both sides, however few documents there are.
    limit = float(np.clip(val_fraction, hashed[0], hashed[-2])) if len(hashed) else val_fraction
    held_out = np.asarray(keys) <= limit
    for purpose, which, part in (("train on", ~held_out, "not held out"), ("validate on", held_out, "held out")):
        if not which.any():
            raise ValueError(
                f"no text to {purpose} in {corpus.what}: what is {part} is empty or white space; give more text"
            )
    return Survey(n_bytes, limit, held_out)


class _Counted:
    """Pieces of text whose UTF-8 bytes are counted as they are read."""

    def __init__(self, text):
        self.text, self.n_bytes = text, 0

    def __iter__(self) -> Iterator[str]:
        self.n_bytes = 0
        for piece in self.text:
            self.n_bytes += len(piece.encode())
            yield piece


def make_tokenizer(config: TokenizerConfig | Tokenizer, corpus: Corpus, survey: Survey, bar: Progress) -> Tokenizer:
    """The tokenizer that `config` names or is. Characters are those of the whole corpus, merges those of training."""
    if isinstance(config, Tokenizer):
        return config
    if isinstance(config, PretrainedConfig):
        return Tokenizer.pretrained(config.name)
    if isinstance(config, ByteConfig):
        return Tokenizer.bytes()
    documents = (document for document in corpus.read() if not document.blank)
    if isinstance(config, CharConfig):
        return Tokenizer.train_characters(p for document in documents for p in chain((document.prefix,), document.text))
    total = min(survey.n_bytes, config.sample_bytes)
    task = bar.add_task("training the tokenizer", total=total)

    def texts() -> Iterator[str]:
        left = config.sample_bytes
        for document, held_out in zip(documents, survey.held_out, strict=True):
            if held_out:
                continue
            for piece in chain((document.prefix,), cut(document.text)):
                yield piece
                left -= len(piece.encode())
                bar.update(task, completed=config.sample_bytes - left)
                if left <= 0:
                    return

    tokenizer = Tokenizer.train_bpe(texts(), config.vocab_size)
    bar.remove_task(task)
    return tokenizer


def end_to_end(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype, write: Callable[[np.ndarray], None]
) -> Documents:
    """Hand the token stream of the documents (see `packing`) to `write`, piece by piece; say where each lies in it."""

    def pieces() -> Iterator[tuple[bool, str]]:
        """Of each document its prefix, empty or not, and then its text."""
        for document in documents:
            first = tokenizer.prefix
            yield True, document.prefix and first + document.prefix
            first = "" if document.prefix else first
            for piece in cut(document.text):
                yield False, first + piece
                first = ""

    eos = np.array([tokenizer.eos_id], dtype)
    length, prefix, stream = array("q"), array("q"), pieces()
    while batch := list(_until(stream, BATCH)):  # many are encoded at once
        for (begins, _), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            if begins:
                write(eos)
                length.append(0)
                prefix.append(len(ids))
            length[-1] += len(ids)
            write(ids.astype(dtype))
    write(eos)
    return Documents.of(np.asarray(length), np.asarray(prefix))


def token_stream(documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[TokenStream, Documents]:
    """The documents as a token stream in memory, and where each lies in it."""
    parts: list[np.ndarray] = []
    found = end_to_end(documents, tokenizer, np.dtype(np.uint32), parts.append)
    return TokenStream(np.concatenate(parts), tokenizer.eos_id, tokenizer.bos_id), found


def _until(pieces: Iterator[tuple], size: int) -> Iterator[tuple]:
    """Pieces of text with `size` characters together, or a little more."""
    for piece in pieces:
        yield piece
        size -= len(piece[-1]) + 1
        if size <= 0:
            return


def _write(folder: Path, corpus: Corpus, survey: Survey, tokenizer: Tokenizer, bar: Progress) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    task = bar.add_task("tokenising", total=survey.n_bytes)
    skipped, n_bytes = 0, array("q")

    def read() -> Iterator[Document]:
        nonlocal skipped
        for document in corpus.read():
            if document.blank:
                skipped += 1
                continue
            document.text = _Counted(document.text)
            yield document
            n_bytes.append(document.text.n_bytes)  # the next is asked for when this one has been read
            bar.advance(task, document.text.n_bytes)

    with open(folder / "tokens.bin", "wb") as file:
        documents = end_to_end(read(), tokenizer, dtype, lambda ids: ids.tofile(file))
    columns = {"length": documents.length, "prefix": documents.prefix, "bytes": np.asarray(n_bytes)}
    for name, values in (columns | {"held_out": survey.held_out}).items():
        np.save(folder / f"{name}.npy", values)
    meta = {"dtype": dtype.name, "limit": survey.limit, "skipped": skipped, "boms": corpus.boms}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    bar.remove_task(task)
