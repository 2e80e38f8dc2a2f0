"""Where documents come from: the embedded corpus, files, the hub."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minitransformer.data.config import (
    DataConfig,
    FilesConfig,
    HubConfig,
    JsonlConfig,
    StdlibConfig,
    TextConfig,
)

# Folders of the standard library that are tests, or not the library's own text.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class Corpus:
    """Documents for training and for validation, and a name for exactly this text."""

    train: list[str]
    validation: list[str]
    fingerprint: str
    skipped: int  # empty or white-space documents left out


def load_corpus(config: DataConfig) -> Corpus:
    """Read and split the documents that `config` names.

    Raises:
        ValueError: a file is missing, empty or not UTF-8, a field is not there, or no text is left; the message
            names the file or field.
    """
    if isinstance(config, StdlibConfig):
        train, validation = stdlib_documents(), None
        what = "the standard library"
    elif isinstance(config, HubConfig):
        train, validation = _hub_documents(config)
        what = config.name
    elif isinstance(config, FilesConfig):
        train = _file_documents(config, config.files)
        validation = _file_documents(config, config.val_files) if config.val_files else None
        what = ", ".join(config.files)
    else:
        raise AssertionError(f"no reader for {type(config).__name__}")
    if validation is None:
        train, validation = split(train, config.split, config.val_fraction)
    kept_train, kept_validation = ([t for t in texts if not _blank(t)] for texts in (train, validation))
    skipped = len(train) + len(validation) - len(kept_train) - len(kept_validation)
    for name, kept in (("train on", kept_train), ("validate on", kept_validation)):
        if not kept:
            raise ValueError(f"no text to {name} in {what}: {len(train) + len(validation)} documents, {skipped} blank")
    return Corpus(kept_train, kept_validation, fingerprint((kept_train, kept_validation)), skipped)


def _blank(text: str) -> bool:
    return not text or text.isspace()


def fingerprint(parts: Iterable[Iterable[str]]) -> str:
    """A hash of the text itself: changed, added or reordered documents change it."""
    digest = hashlib.blake2b(digest_size=16)
    for texts in parts:
        for text in texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        digest.update(b"part")
    return digest.hexdigest()


def split(texts: list[str], how: str, val_fraction: float) -> tuple[list[str], list[str]]:
    """Hold out `val_fraction` of the text.

    hash: documents whose hash falls below the fraction (equal documents stay together); at least the one with the
        lowest hash where there are several.
    tail: the last characters of every document.
    """
    if how == "tail":
        cuts = [int(len(text) * (1 - val_fraction)) for text in texts]
        pairs = list(zip(texts, cuts, strict=True))
        return [text[:end] for text, end in pairs], [text[end:] for text, end in pairs]
    keys = [_hash(text) for text in texts]
    limit = max(val_fraction, min(keys, default=0)) if len(texts) > 1 else val_fraction
    train = [text for text, key in zip(texts, keys, strict=True) if key > limit]
    return train, [text for text, key in zip(texts, keys, strict=True) if key <= limit]


def _hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


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
        raise ValueError(f"data=stdlib found no .py file in {root}; train on your own with data=text data.files=[...]")
    return sorted(texts, key=lambda text: (_hash(text), text))


def read_text(path: str) -> str:
    """A UTF-8 file as it is, line ends included; a leading byte-order mark is dropped.

    Raises:
        ValueError: the file is missing, empty or not UTF-8 (with the offset of the first wrong byte).
    """
    data = _existing(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from None
    if _blank(text):
        raise ValueError(
            f"{path} holds no text: {len(data)} bytes, all of them white space" if data else f"{path} is empty"
        )
    return text


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise ValueError(f"data.files: {path} does not exist (looked in {Path.cwd()})")
    if not Path(path).is_file():
        raise ValueError(f"data.files: {path} is not a file")
    if not os.access(path, os.R_OK):
        raise ValueError(f"data.files: {path} may not be read")
    return Path(path)


def _file_documents(config: FilesConfig, paths: list[str]) -> list[str]:
    if isinstance(config, TextConfig):
        return [read_text(path) for path in paths]
    for path in paths:
        if not _existing(path).stat().st_size:
            raise ValueError(f"{path} is empty")
    import datasets

    kind = "json" if isinstance(config, JsonlConfig) else "parquet"
    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(kind, data_files=paths, split="train")
    except Exception as error:
        cause = error.__cause__ or error
        raise ValueError(f"cannot read {', '.join(paths)} as {kind}: {' '.join(str(cause).split())}") from None
    return _column(table, config.text_field, ", ".join(paths))


def _hub_documents(config: HubConfig) -> tuple[list[str], list[str] | None]:
    import datasets

    def load(split: str) -> list[str]:
        try:
            table = datasets.load_dataset(config.name, config.config, split=split)
        except Exception as error:
            raise ValueError(f"cannot load data.name={config.name}: {' '.join(str(error).split())}") from None
        return _column(table, config.text_field, f"{config.name} ({split})")

    return load(config.train_split), load(config.val_split) if config.val_split else None


def _column(table, name: str, where: str) -> list[str]:
    if name not in table.column_names:
        raise ValueError(f"data.text_field={name} is not in {where}; it has {', '.join(table.column_names)}")
    texts = table[name][:]
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"data.text_field={name} of {where} holds {type(text).__name__} in row {row}, not text")
    return texts
