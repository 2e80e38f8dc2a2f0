"""Text out of files, piece by piece, so that a file of any size is read in little memory."""

import codecs
import csv
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEXTS = (".txt", ".md", ".py")
TABLES = (".jsonl", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
PIECE = 2**20  # bytes read at once
BOM = b"\xef\xbb\xbf"


def kind(path: Path) -> str:
    """The ending that says how a file is read, below a .gz or .zst."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def expand(setting: str, names: list[str]) -> list[Path]:
    """The files that paths, folders (all text below them) and globs stand for, each once.

    Raises:
        ValueError: a name stands for nothing that can be read; the message gives `setting` and the name.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            below = [p for p in sorted(path.rglob("*")) if p.is_file() and kind(p) in TEXTS + TABLES]
            if not below:
                raise ValueError(f"{setting}: {name} holds no text: no file ends in {', '.join(TEXTS + TABLES)}")
        elif path.exists() or not glob.has_magic(name):
            below = [path]
        else:
            below = [p for p in map(Path, sorted(glob.glob(name, recursive=True))) if p.is_file()]
            if not below:
                raise ValueError(f"{setting}: {name} matches no file (looked in {Path.cwd()})")
        for file in below:
            if not file.is_file():
                what = "is not a file" if file.exists() else f"does not exist (looked in {Path.cwd()})"
                raise ValueError(f"{setting}: {file} {what}")
            if not os.access(file, os.R_OK):
                raise ValueError(f"{setting}: {file} may not be read")
            if not file.stat().st_size and file == path:
                raise ValueError(f"{setting}: {file} is empty")
            found[file] = None
    return list(found)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """The bytes of a file, decompressed.

    Raises:
        ValueError: they cannot be read to the end.
    """
    import pyarrow

    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                yield file
        elif path.suffix.lower() == ".zst":
            with pyarrow.input_stream(path, compression="zstd") as file:
                yield file
        else:
            with open(path, "rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:  # pyarrow raises OSError
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def digest(paths: Iterable[Path]) -> str:
    """A hash of what the files hold, in their order."""
    whole = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
        whole.update(kind(path).encode())
    return whole.hexdigest()


def has_bom(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(len(BOM)) == BOM


class FileText:
    """The characters `start` to `end` of a UTF-8 file, in pieces; line ends stay, a leading byte-order mark does not.

    Iterating raises ValueError where the file is not UTF-8, with the offset of the first wrong byte.
    """

    def __init__(self, path: Path, start: int = 0, end: int | None = None):
        self.path, self.start, self.end = path, start, end

    def __iter__(self) -> Iterator[str]:
        place = 0
        for piece in self._decoded():
            if self.end is not None and place >= self.end:
                return
            if text := piece[max(0, self.start - place) : None if self.end is None else self.end - place]:
                yield text
            place += len(piece)

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _opened(self.path) as file:
            data, offset = bytes(file.read(len(BOM))), 0
            if data == BOM:
                data, offset = bytes(file.read(PIECE)), len(BOM)
            while True:
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    where, byte = offset - held + error.start, error.object[error.start]
                    raise ValueError(f"{self.path} is not UTF-8: byte {byte:#04x} at offset {where}") from None
                if not data:
                    return
                yield text
                offset += len(data)
                data = bytes(file.read(PIECE))


def split_documents(pieces: Iterable[str], documents: str) -> Iterator[str]:
    """The documents of a text: its lines, its paragraphs, or what stands between a separator.

    documents: `line` (ended by LF or CRLF, which is left out), `blank_line` (ended by lines of white space), or the
        separator itself, in which \\n and \\t stand for line end and tab.
    """
    if documents == "line":
        pattern = re.compile(r"\r?\n")
    elif documents == "blank_line":
        pattern = re.compile(r"\r?\n(?:[ \t]*\r?\n)+")
    else:
        pattern = re.compile(re.escape(documents.replace("\\n", "\n").replace("\\t", "\t")))
    rest, searched = "", 0
    for piece in pieces:
        rest += piece
        start = 0
        for match in pattern.finditer(rest, searched):
            if match.end() == len(rest):  # the separator may go on in the next piece
                break
            yield rest[start : match.start()]
            start = match.end()
        # A separator of white space may begin anywhere in the white space at the end.
        rest = rest[start:]
        searched = max(0, min(len(rest.rstrip()), len(rest) - len(documents)))
    if (match := list(pattern.finditer(rest, searched))) and match[-1].end() == len(rest):
        rest = rest[: match[-1].start()]
    elif documents == "blank_line":
        rest = re.sub(r"\r?\n\Z", "", rest)
    if rest:
        yield rest


def table_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """The texts of each row of a .jsonl, .csv or .parquet file; a missing value is an empty text.

    names: from a setting, such as data.text_field, to the name of the field that it gives.

    Raises:
        ValueError: the file is broken, has no such field, or holds something else there.
    """
    readers = {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    for where, row in readers[kind(path)](path, names):
        yield row_texts(row, names, where)


def row_texts(row: dict, names: dict[str, str], where: str) -> tuple[str, ...]:
    """The texts of one row, see `table_rows`; `where` names it in messages."""
    texts = []
    for setting, name in names.items():
        if name not in row:
            raise ValueError(f"{setting}={name} is not in {where}; it has {', '.join(map(str, row))}")
        if not isinstance(row[name], str | None):
            raise ValueError(f"{setting}={name} of {where} holds {type(row[name]).__name__}, not text")
        texts.append(row[name] or "")
    return tuple(texts)


def _json_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(split_documents(FileText(path), "line"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds {type(row).__name__}, not an object with fields")
        yield where, row


def _csv_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[str, dict]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(_lines(FileText(path)))
    try:
        for row in reader:
            yield f"{path} line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num} is not CSV: {error}") from None


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Lines with their ends."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def _parquet_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[str, dict]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with _opened(path) as file:
            # Compressed once more from outside it has to be read whole: its table of contents stands at the end.
            table = ParquetFile(pyarrow.BufferReader(file.read()) if path.suffix.lower() in COMPRESSED else path)
        there = table.schema_arrow.names
        if not set(names.values()) <= set(there):
            yield str(path), dict.fromkeys(there)
            return
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=list(dict.fromkeys(names.values()))):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None
