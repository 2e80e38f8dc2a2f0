"""Where documents come from: the embedded corpus, files, the hub; and which of them are held out."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from minitransformer.data.config import DataConfig, FilesConfig, HubConfig, StdlibConfig, TableConfig, TextConfig
from minitransformer.data.files import (
    FileText,
    digest,
    expand,
    has_bom,
    row_texts,
    split_documents,
    table_rows,
)

# Folders of the standard library that are tests, or not the library's own text.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class Document:
    """text: its pieces, which may be read again. prefix: what stands before it and is no target.

    held_out: for validation or not; None lets a hash of the text decide.
    """

    text: Iterable[str]
    prefix: str = ""
    held_out: bool | None = None

    def key(self) -> float:
        """A number in [0, 1) that depends on the text alone."""
        text = hashlib.blake2b(digest_size=7)
        for piece in chain((self.prefix,), self.text):
            text.update(piece.encode())
        return int.from_bytes(text.digest(), "big") / 2**56

    @property
    def blank(self) -> bool:
        return all(not piece or piece.isspace() for piece in self.text)


@dataclass
class Corpus:
    """Documents that can be read again and again.

    what: a name for messages. fingerprint: of exactly this text and the way that it is read. boms: byte-order marks
    left out. note: what the user is told before it is read.
    """

    what: str
    fingerprint: str
    read: Callable[[], Iterator[Document]]
    boms: int = 0
    note: str | None = None


def load_corpus(config: DataConfig) -> Corpus:
    """The documents that `config` names.

    Raises:
        ValueError: a file or data set is missing or cannot be read. What is wrong inside a file shows as it is read.
    """
    if isinstance(config, StdlibConfig):
        texts = stdlib_documents()
        return Corpus("the standard library", _hash_of(texts), lambda: _split(map(_whole, texts), config, "hash"))
    if isinstance(config, HubConfig):
        return _hub_corpus(config)
    assert isinstance(config, FilesConfig), f"no reader for {type(config).__name__}"
    return _files_corpus(config)


def _whole(text: str) -> Document:
    return Document([text])


def _hash_of(texts: Iterable[str]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def _split(documents: Iterable[Document], config: DataConfig, auto: str) -> Iterator[Document]:
    """Cut off the held-out tail of each document, where that is how they are split."""
    if (auto if config.split == "auto" else config.split) == "hash":
        yield from documents
        return
    for document in documents:
        length = sum(map(len, document.text))
        cut = int(length * (1 - config.val_fraction))
        yield Document(_characters(document.text, 0, cut), document.prefix, held_out=False)
        yield Document(_characters(document.text, cut, None), document.prefix, held_out=True)


def _characters(text: Iterable[str], start: int, end: int | None) -> Iterable[str]:
    return FileText(text.path, start, end) if isinstance(text, FileText) else ["".join(text)[start:end]]


# Sources ---------------------------------------------------------------------------------------------------------


def stdlib_documents() -> list[str]:
    """The .py files of the running interpreter's standard library, ordered by a hash of their text.

    Tests, site-packages and files that cannot be read as UTF-8 are left out.
    """
    root = sysconfig.get_path("stdlib")
    texts = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in names:
            if name.endswith(".py"):
                try:
                    texts.append(Path(folder, name).read_bytes().decode("utf-8"))
                except (OSError, UnicodeDecodeError):
                    continue
    if not texts:
        raise ValueError(f"data=stdlib found no .py file in {root}; train on your own with data=text data.files=FILE")
    return sorted(texts, key=lambda text: (_whole(text).key(), text))


def files_of(config: FilesConfig) -> tuple[list[Path], list[Path], int]:
    """The files to train on and those to validate on, and how many of these are named among the first as well.

    Raises:
        ValueError: a file is missing or cannot be read, or none is left to train on.
    """
    files = expand("data.files", config.files, config.kind)
    val_files = expand("data.val_files", config.val_files, config.kind)
    held_out = {path.resolve() for path in val_files}
    training = [path for path in files if path.resolve() not in held_out]
    if not training:
        raise ValueError("data.files: all of them are in data.val_files too, and none is left to train on")
    return training, val_files, len(files) - len(training)


def _files_corpus(config: FilesConfig) -> Corpus:
    files, val_files, both = files_of(config)
    single = len(files) == 1 and isinstance(config, TextConfig) and config.documents == "file"

    def read() -> Iterator[Document]:
        if val_files:
            for held_out, paths in ((False, files), (True, val_files)):
                for path in paths:
                    for document in file_documents(path, config):
                        document.held_out = held_out
                        yield document
        else:
            documents = (document for path in files for document in file_documents(path, config))
            yield from _split(documents, config, "tail" if single else "hash")

    if isinstance(config, TableConfig):
        way = ["file", config.text_field, config.prefix_field]
    else:
        way = [config.documents, None, None]
    fingerprint = _hash_of([digest(files, config.kind), digest(val_files, config.kind), *map(str, way)])
    boms = sum(map(has_bom, files + val_files))
    note = f"{both} of data.files are in data.val_files too: held out, not trained on" if both else None
    return Corpus(", ".join(config.files), fingerprint, read, boms, note)


def file_documents(path: Path, config: FilesConfig) -> Iterator[Document]:
    """The documents of one file, as `config` cuts them."""
    if isinstance(config, TableConfig):
        for text, *prefix in table_rows(path, config.kind, _fields(config)):
            yield Document([text], *prefix)
    elif config.documents == "file":
        yield Document(FileText(path))
    else:
        yield from map(_whole, split_documents(FileText(path), config.documents))


def _fields(config: TableConfig | HubConfig) -> dict[str, str]:
    names = {"data.text_field": "text" if config.text_field is None else config.text_field}
    return names | ({} if config.prefix_field is None else {"data.prefix_field": config.prefix_field})


def load_hub(config: HubConfig, split: str) -> Any:
    """One split of a data set of the hub, streamed if the config says so, its fields checked."""
    import datasets

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(config.name, config.config, split=split, streaming=config.streaming)
        columns = table.column_names or list(next(iter(table)))
    except Exception as error:
        raise ValueError(f"cannot load data.name={config.name}: {' '.join(str(error).split())}") from None
    for setting, name in _fields(config).items():
        if name not in columns:
            raise ValueError(f"{setting}={name} is not in {config.name} ({split}); it has {', '.join(columns)}")
    return table.select_columns(list(_fields(config).values()))


def hub_documents(config: HubConfig, table: Iterable[dict]) -> Iterator[Document]:
    """The documents of a data set that `load_hub` gave.

    Raises:
        ValueError: a row cannot be read, or holds no text where it should.
    """
    rows = iter(table)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of a file or a network, which `datasets` gets to only now
            raise ValueError(f"cannot read data.name={config.name}: {' '.join(str(error).split())}") from None
        if row is None:
            return
        text, *prefix = row_texts(row, _fields(config), config.name)
        yield Document([text], *prefix)


def _hub_corpus(config: HubConfig) -> Corpus:
    splits = {None: config.train_split}
    if config.val_split is not None:
        splits = {False: config.train_split, True: config.val_split}
    tables = {held_out: load_hub(config, split) for held_out, split in splits.items()}

    def documents() -> Iterator[Document]:
        for held_out, table in tables.items():
            # Of a stream the start is looked at; the rest is read while training.
            for document in hub_documents(config, table.take(config.buffer) if config.streaming else table):
                document.held_out = held_out
                yield document

    def read() -> Iterator[Document]:
        return documents() if config.val_split else _split(documents(), config, "hash")

    if config.streaming:
        fingerprint = _hash_of("\0".join((d.prefix, *d.text)) for d in read())
    else:
        fingerprint = _hash_of([*(t._fingerprint for t in tables.values()), *_fields(config).values()])
    return Corpus(config.name, fingerprint, read)
