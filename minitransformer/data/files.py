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
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from minitransformer.words import with_line_ends

# What the files of each kind end in, below a .gz or .zst.
ENDINGS = {
    "text": (".txt", ".md", ".py"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}
TABLES = ("jsonl", "csv", "parquet")
COMPRESSED = (".gz", ".zst")
PIECE = 2**20  # bytes read at once
BOM = b"\xef\xbb\xbf"
TABS = ".tsv"  # the ending of CSV files with tabs for commas


def ending(path: Path) -> str:
    """The ending that says what a file holds, below a .gz or .zst."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def expand(setting: str, names: list[str], kind: str) -> list[Path]:
    """The files that paths, folders and globs stand for, each once, whatever names and links lead to it.

    Below a folder these are the files that end as those of `kind` do. A file that is named is read as `kind` whatever
    its ending, unless that is the ending of another kind of table.

    Raises:
        ValueError: a name stands for nothing that can be read; the message gives `setting` and the name.
    """
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            files = _files_below(setting, path, kind)
        elif path.exists() or not glob.has_magic(name):
            files = [path]
        else:
            files = [p for p in map(Path, sorted(glob.glob(name, recursive=True))) if p.is_file()]
            if not files:
                raise ValueError(f"{setting}: {name} matches no file (looked in {Path.cwd()})")
        for file in files:
            if not file.is_file():
                what = "is not a file" if file.exists() else f"does not exist (looked in {Path.cwd()})"
                raise ValueError(f"{setting}: {file} {what}")
            if not os.access(file, os.R_OK):
                raise ValueError(f"{setting}: {file} may not be read")
            if not file.stat().st_size and file == path:
                raise ValueError(f"{setting}: {file} is empty")
            if (its := _kind_of_table(file)) not in (None, kind):
                raise ValueError(f"{setting}: {file} is no {kind} by its ending; choose data={its}, or rename it")
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _kind_of_table(path: Path) -> str | None:
    """The kind of table that a file holds by its ending; None where it may be any kind."""
    return next((kind for kind in TABLES if ending(path) in ENDINGS[kind]), None)


def _files_below(setting: str, folder: Path, kind: str) -> list[Path]:
    """The files of `kind` in a folder and below it. Hidden files and folders are left out, links are followed."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{setting}: {error.filename} may not be read")

    there: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        # A link may lead back to a folder above it.
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        there += [] if real in seen else [Path(place, name) for name in names if not name.startswith(".")]
        seen.add(real)
    if found := sorted(path for path in there if ending(path) in ENDINGS[kind]):
        return found
    others = sorted({its for path in there for its in ENDINGS if ending(path) in ENDINGS[its]})
    choose = f"; choose data={' or data='.join(others)} for what it holds" if others else ""
    raise ValueError(f"{setting}: {folder} holds no {kind}: no file ends in {', '.join(ENDINGS[kind])}{choose}")


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


def digest(paths: Iterable[Path], kind: str) -> str:
    """A hash of what the files hold, in their order, and of how they are read."""
    whole = hashlib.blake2b(digest_size=16)
    for path in paths:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest())
        whole.update((ending(path) if kind == "text" or ending(path) == TABS else f".{kind}").encode())
    return whole.hexdigest()


def has_bom(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(len(BOM)) == BOM


def decoded(file: io.BufferedIOBase, name: str) -> Iterator[str]:
    """The text of an open UTF-8 file in pieces; line ends stay, a leading byte-order mark does not.

    Raises:
        ValueError: it is not UTF-8; the message gives `name` and the offset of the first wrong byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    data, offset = bytes(file.read(len(BOM))), 0
    if data == BOM:
        data, offset = bytes(file.read(PIECE)), len(BOM)
    while True:
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            where, byte = offset - held + error.start, error.object[error.start]
            raise ValueError(f"{name} is not UTF-8: byte {byte:#04x} at offset {where}") from None
        if not data:
            return
        yield text
        offset += len(data)
        data = bytes(file.read(PIECE))


class FileText:
    """The characters `start` to `end` of a file, in pieces, see `decoded`."""

    def __init__(self, path: Path, start: int = 0, end: int | None = None):
        self.path, self.start, self.end = path, start, end

    def __iter__(self) -> Iterator[str]:
        place = 0
        with _opened(self.path) as file:
            for piece in decoded(file, str(self.path)):
                if self.end is not None and place >= self.end:
                    return
                if text := piece[max(0, self.start - place) : None if self.end is None else self.end - place]:
                    yield text
                place += len(piece)


def split_documents(pieces: Iterable[str], documents: str) -> Iterator[str]:
    """The documents of a text: its lines, its paragraphs, or what stands between a separator.

    documents: `line` (ended by LF or CRLF, which is left out), `blank_line` (ended by lines of white space), or the
        separator itself, in which \\n and \\t stand for line end and tab.
    """
    separator = with_line_ends(documents)
    pattern, length = re.compile(re.escape(separator)), len(separator)
    if documents == "line":
        pattern, length = re.compile(r"\r?\n"), len("\r\n")
    elif documents == "blank_line":
        pattern, length = re.compile(r"\r?\n(?:[ \t]*\r?\n)+"), len("\n")
    rest, searched = "", 0
    for piece in chain(pieces, (None,)):
        rest += piece or ""
        # Blank lines at the end of a piece may go on in the next.
        known = len(rest.rstrip(" \t\r\n")) if documents == "blank_line" and piece is not None else len(rest)
        start = 0
        for match in pattern.finditer(rest, searched):
            if match.start() >= known:
                break
            yield rest[start : match.start()]
            start = match.end()
        rest = rest[start:]
        searched = max(0, known - start - length + 1)  # a separator may have begun
    if documents == "blank_line":
        rest = re.sub(r"\r?\n\Z", "", rest)
    if rest:
        yield rest


def table_rows(path: Path, kind: str, names: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """The texts of each row of a file with JSON lines, CSV or Parquet; a missing value is an empty text.

    names: from a setting, such as data.text_field, to the name of the field that it gives.

    Raises:
        ValueError: the file is broken, has no such field or has it twice, or holds something else there.
    """
    readers = {"jsonl": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    for where, row in readers[kind](path, names):
        yield row_texts(row, names, where)


def row_texts(row: dict, names: dict[str, str], where: str) -> tuple[str, ...]:
    """The texts of one row, see `table_rows`; `where` names it in messages."""
    texts = []
    for setting, name in names.items():
        if name not in row:
            there = (other if other == other.strip() else repr(other) for other in row)
            raise ValueError(f"{setting}={name} is not in {where}; it has {', '.join(there)}")
        if not isinstance(row[name], str | None):
            raise ValueError(f"{setting}={name} of {where} holds {type(row[name]).__name__}, not text")
        text = row[name] or ""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{setting}={name} of {where} holds half a character, {half!r}") from None
        texts.append(text)
    return tuple(texts)


def _refuse_twice(there: list[str], names: dict[str, str], where: str) -> None:
    """Raise ValueError if a field that is asked for is there more than once."""
    for setting, name in names.items():
        if there.count(name) > 1:
            raise ValueError(f"{setting}={name} is in {where} {there.count(name)} times")


class Object(list):
    """The pairs of name and value in a JSON object."""


_JSON = json.JSONDecoder(object_pairs_hook=Object)


def _json_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """The objects of a file: one in each line, or all in one array."""
    if _begins_array(path):
        array = _json("".join(FileText(path)), path, 1)
        rows = ((f"{path} object {number}", value) for number, value in enumerate(array, start=1))
    else:
        lines = enumerate(split_documents(FileText(path), "line"), start=1)
        rows = ((f"{path} line {number}", _json(line, path, number)) for number, line in lines if line.strip())
    for where, row in rows:
        if not isinstance(row, Object):
            raise ValueError(f"{where} holds {type(row).__name__}, not an object with fields")
        _refuse_twice([name for name, _ in row], names, where)
        yield where, dict(row)


def _begins_array(path: Path) -> bool:
    begin = next((text for piece in FileText(path) if (text := piece.lstrip())), "")
    return begin.startswith("[")


def _json(text: str, path: Path, line: int) -> Any:
    """The value that a text, which begins in a line of a file, stands for."""
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        where = f"{path} line {line + error.lineno - 1}"
        needed = "one object a line, or all in one array, is needed"
        raise ValueError(f"{where} is not JSON: {error.msg} at character {error.colno}; {needed}") from None
    except (ValueError, RecursionError) as error:  # too long a number, too deep a nesting
        raise ValueError(f"{path} line {line} cannot be read: {error}") from None


def _csv_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[str, dict]]:
    records = _csv_records(path)
    _, header = next(records, (1, []))
    _refuse_twice(header, names, str(path))
    for line, record in records:
        where = f"{path} line {line}"
        if len(record) != len(header):
            quotes = "a field that holds the delimiter needs quotes"
            raise ValueError(f"{where} has {len(record)} fields, the header has {len(header)}; {quotes}")
        yield where, dict(zip(header, record, strict=True))


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The records of a CSV file but for blank lines, each with the number of its first line."""
    csv.field_size_limit(2**31 - 1)  # the most that C's long holds on every system
    lines = _lines(FileText(path))
    reader = csv.reader(lines, delimiter="\t" if ending(path) == TABS else ",", strict=True)
    line = 1
    try:
        for record in reader:
            if record:
                yield line, record
            line = reader.line_num + 1
    except csv.Error as error:
        why = str(error).replace("unexpected end of data", "a quote is opened and never closed")
        raise ValueError(f"{path} line {line} is not CSV: {why}") from None


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

    number = 0
    try:
        with _opened(path) as file:
            # Compressed once more from outside it has to be read whole: its table of contents stands at the end.
            table = ParquetFile(pyarrow.BufferReader(file.read()) if path.suffix.lower() in COMPRESSED else path)
        there = table.schema_arrow.names
        _refuse_twice(there, names, str(path))
        if not set(names.values()) <= set(there):
            yield str(path), dict.fromkeys(there)
            return
        for batch in table.iter_batches(batch_size=1024, columns=list(dict.fromkeys(names.values()))):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except UnicodeDecodeError:
        raise ValueError(f"{path} holds text that is not UTF-8 in the 1,024 rows from row {number} on") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None
