"""Text comes out of files as it is, and what is wrong with one is said with its name and place."""

import csv
import gzip
import io
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitransformer.data import files
from minitransformer.data.files import FileText, expand, split_documents, table_rows

TEXT = "line\r\nnext\rlast\u2028\x00 end 李🦉\n\nno newline"
FIELDS = {"data.text_field": "text", "data.prefix_field": "question"}
ROWS = [("one\r\ntwo", "q1"), ('"quoted", 李', ""), ("", "q3"), ("a" * 200_000, "q4")]


def compress(data: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(data)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def table(kind: str, rows=ROWS) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps({"question": q, "n": 1, "text": t}) + "\n" for t, q in rows).encode()
    if kind == "csv":
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, ["question", "text"])
        writer.writeheader()
        writer.writerows({"question": q, "text": t} for t, q in rows)
        return out.getvalue().encode()
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": [t for t, _ in rows], "question": [q for _, q in rows]}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 2**20])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("bom", [b"", files.BOM])
def test_text_stays_as_it_is(piece, ending, bom, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", piece)
    path = tmp_path / f"a.txt{ending}"
    data = bom + TEXT.encode()
    path.write_bytes(compress(data, ending) if ending else data)
    assert "".join(FileText(path)) == TEXT
    assert files.has_bom(path) == bool(bom)
    for start, end in ((0, 5), (3, 25), (7, None), (0, 0), (40, 100)):
        assert "".join(FileText(path, start, end)) == TEXT[start:end]


@pytest.mark.parametrize("piece", [4, 2**20])
@pytest.mark.parametrize(("data", "byte", "offset"), [
    (b"good \xff bad", "0xff", 5), ("é".encode() * 5 + b"\xc3(", "0xc3", 10), (files.BOM + b"ab\x80", "0x80", 5),
    (b"cut off \xf0\x9f", "0xf0", 8),
])  # fmt: skip
def test_a_wrong_byte_is_named_with_its_place(piece, data, byte, offset, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", piece)
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.txt is not UTF-8: byte {byte} at offset {offset}$"):
        list(FileText(tmp_path / "a.txt"))


PIECES = st.lists(st.text(alphabet="ab \t\r\n-|", max_size=8), max_size=12)


@settings(max_examples=500, deadline=None)
@given(PIECES)
@example(["a\r", "\nb\n", "\n", "c"])
def test_lines_are_lines_wherever_the_pieces_end(pieces):
    lines = re.split(r"\r?\n", "".join(pieces))
    assert [*filter(None, split_documents(pieces, "line"))] == [*filter(None, lines)]


@settings(max_examples=500, deadline=None)
@given(PIECES)
@example(["a-", "-", "-", "b---"])
def test_separators_separate_wherever_the_pieces_end(pieces):
    text = "".join(pieces)
    for given_separator, separator in (("--", "--"), ("|", "|"), ("\\n-\\n", "\n-\n"), (" \\t", " \t")):
        found = split_documents(pieces, given_separator)
        assert [*filter(None, found)] == [*filter(None, text.split(separator))]


@settings(max_examples=500, deadline=None)
@given(PIECES)
@example(["a\n", "\n", "\n", "b\n"])
@example(["a\n \t\n", " \n", "  b"])
def test_blank_lines_separate_paragraphs_wherever_the_pieces_end(pieces):
    """By lines: a paragraph is a run of lines that are not white space."""
    expected, paragraph = [], []
    for line in [*re.split(r"\r?\n", "".join(pieces)), ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph and not line.strip(" \t"):
            expected.append(paragraph)
            paragraph = []
    found = [document for document in split_documents(pieces, "blank_line") if document.strip()]
    lines = [[line for line in re.split(r"\r?\n", document) if line.strip()] for document in found]
    assert lines == expected


def test_paragraphs_keep_what_is_inside():
    text = "\n\none\r\ntwo\n\n\n  three \n \t\nfour\n"
    assert list(split_documents([text], "blank_line")) == ["", "one\r\ntwo", "  three ", "four"]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_give_every_row(kind, ending, tmp_path):
    path = tmp_path / f"a.{kind}{ending}"
    path.write_bytes(compress(table(kind), ending) if ending else table(kind))
    assert list(table_rows(path, FIELDS)) == ROWS
    with pytest.raises(ValueError, match=rf"data\.text_field=body is not in .*a\.{kind}.*it has .*text"):
        list(table_rows(path, {"data.text_field": "body"}))


def test_a_missing_value_is_an_empty_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        files.BOM + b'{"text": "a", "question": null}\n\n{"text": null, "question": "b"}'
    )
    assert list(table_rows(tmp_path / "a.jsonl", FIELDS)) == [("a", ""), ("", "b")]


@pytest.mark.parametrize(("name", "data", "message"), [
    ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl line 2 is not JSON: Expecting value at character 10"),
    ("a.jsonl", b'["text"]\n', r"a\.jsonl line 1 holds list, not an object"),
    ("a.jsonl", b'{"text": 3}\n', r"data\.text_field=text of .*a\.jsonl line 1 holds int, not text"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl is not UTF-8: byte 0xff at offset 24"),
    ("a.csv", b"text,n\na,1\nb,\xe9\n", r"a\.csv is not UTF-8: byte 0xe9 at offset 13"),
    ("a.parquet", b"PAR1 not really", r"a\.parquet cannot be read as Parquet"),
    ("a.parquet.gz", gzip.compress(b"PAR1 not really"), r"a\.parquet\.gz cannot be read as Parquet"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9999)[:-20], r"a\.jsonl\.gz cannot be read: "),
    ("a.txt.gz", b"not gzip at all", r"a\.txt\.gz cannot be read: Not a gzipped file"),
    ("a.txt.gz", gzip.compress(b"text " * 9999)[:60], r"a\.txt\.gz cannot be read: Compressed file ended"),
    ("a.txt.zst", b"not zstd at all", r"a\.txt\.zst cannot be read: "),
    ("a.txt.zst", compress(bytes(range(128)) * 999, ".zst")[:-9], r"a\.txt\.zst cannot be read: "),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_broken_files_are_named(name, data, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(FileText(path) if ".txt" in name else table_rows(path, {"data.text_field": "text"}))


def test_paths_folders_and_globs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.md", "notes.log", "in/c.py", "in/deep/d.jsonl.gz", "in/e.bin", "in/empty.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else "text")
    (tmp_path / "nothing").mkdir()

    def names(*given):
        return [str(path) for path in expand("data.files", list(given))]

    assert names("b.md", "notes.log", "a.txt") == ["b.md", "notes.log", "a.txt"]
    assert names("in") == ["in/c.py", "in/deep/d.jsonl.gz", "in/empty.txt"]
    assert names("*.txt", "**/*.gz", "a.txt") == ["a.txt", "in/deep/d.jsonl.gz"]
    for wrong, message in {
        "*.rst": r"data\.files: \*\.rst matches no file \(looked in ",
        "nothing": r"data\.files: nothing holds no text: no file ends in \.txt, \.md",
        "gone.txt": r"data\.files: gone\.txt does not exist",
        "in/empty.txt": r"data\.files: in/empty\.txt is empty",
    }.items():
        with pytest.raises(ValueError, match=message):
            names(wrong)
