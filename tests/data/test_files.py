"""Text comes out of files as it is, and what is wrong with one is said with its name and place."""

import csv
import gzip
import io
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitransformer.data import files
from minitransformer.data.files import FileText, expand, split_documents, table_rows
from tests.conftest import as_a_user_without_rights

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


def parquet(names: list[str], *columns) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(list(columns), names=names), sink)
    return sink.getvalue().to_pybytes()


def latin_text(row: int, rows: int = 2000) -> pyarrow.Array:
    """A column of texts, of which one is no UTF-8."""
    ends = pyarrow.array(range(rows + 1), pyarrow.int32())
    data = b"a" * row + b"\xe9" + b"a" * (rows - row - 1)
    return pyarrow.Array.from_buffers(pyarrow.string(), rows, [None, ends.buffers()[1], pyarrow.py_buffer(data)])


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


PIECES = st.lists(st.text(alphabet="ab \t\r\n-|\f\u2028", max_size=8), max_size=12)


@settings(max_examples=500, deadline=None)
@given(PIECES, st.sampled_from(["line", "blank_line", "--", "\\n-\\n", " \\t", "aba"]))
@example(["x\n\n\r", "\nb"], "blank_line")
@example(["x\n\n ", " \nb"], "blank_line")
def test_documents_are_the_same_wherever_the_pieces_end(pieces, documents):
    assert list(split_documents(pieces, documents)) == list(split_documents(["".join(pieces)], documents))


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
    assert list(table_rows(path, kind, FIELDS)) == ROWS
    with pytest.raises(ValueError, match=rf"data\.text_field=body is not in .*a\.{kind}.*it has .*text"):
        list(table_rows(path, kind, {"data.text_field": "body"}))


CELLS = st.text(st.characters(codec="utf-8"), max_size=6) | st.text(alphabet='a ,"\t\r\n', max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=6), st.sampled_from(["excel", "unix", "excel-tab"]),
    st.integers(1, 9),
)  # fmt: skip
def test_what_pythons_csv_writes_is_read_back(tmp_path_factory, rows, dialect, piece):
    path = tmp_path_factory.getbasetemp() / ("a.tsv" if dialect == "excel-tab" else "a.csv")
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, dialect).writerows([("text", "n", "question"), *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE", piece)
        assert list(table_rows(path, "csv", FIELDS)) == [(text, question) for text, _, question in rows]


def test_csv_is_read_where_a_long_has_32_bits(tmp_path, monkeypatch):
    def of_32_bits(limit):
        if limit >= 2**31:
            raise OverflowError("Python int too large to convert to C long")

    monkeypatch.setattr(csv, "field_size_limit", of_32_bits)
    (tmp_path / "a.csv").write_bytes(table("csv"))
    assert list(table_rows(tmp_path / "a.csv", "csv", FIELDS)) == ROWS


@pytest.mark.parametrize(("name", "kind"), [
    ("a.json", "jsonl"), ("a.ndjson", "jsonl"), ("a.txt", "jsonl"), ("a", "jsonl"), ("a.jsonl.txt", "jsonl"),
    ("a.JSON.gz", "jsonl"), ("a.gz", "jsonl"), ("a.txt", "csv"), ("a.dat", "csv"), ("a.pq", "parquet"),
])  # fmt: skip
def test_a_named_file_is_read_as_its_kind_whatever_its_ending(name, kind, tmp_path):
    data = table(kind)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert list(table_rows(expand("data.files", [str(tmp_path / name)], kind)[0], kind, FIELDS)) == ROWS


@pytest.mark.parametrize("indent", [None, 2])
def test_objects_in_one_array_are_rows(indent, tmp_path):
    rows = [{"text": text, "question": question} for text, question in ROWS]
    (tmp_path / "a.json").write_text("\n " + json.dumps(rows, indent=indent))
    assert list(table_rows(tmp_path / "a.json", "jsonl", FIELDS)) == ROWS


def test_tabs_separate_the_columns_of_tsv(tmp_path):
    (tmp_path / "a.tsv").write_text('question\ttext\nq, 1\t"a\tb"\n')
    assert list(table_rows(tmp_path / "a.tsv", "csv", FIELDS)) == [("a\tb", "q, 1")]


def test_a_missing_value_is_an_empty_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        files.BOM + b'{"text": "a", "question": null}\n\n{"text": null, "question": "b"}'
    )
    assert list(table_rows(tmp_path / "a.jsonl", "jsonl", FIELDS)) == [("a", ""), ("", "b")]


@pytest.mark.parametrize(("name", "data", "message"), [
    ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl line 2 is not JSON: Expecting value at character 10"),
    ("a.jsonl", b'["text"]\n', r"a\.jsonl object 1 holds str, not an object"),
    ("a.jsonl", b'{"text": "a"}\n["text"]\n', r"a\.jsonl line 2 holds list, not an object"),
    ("a.json", b'{\n  "text": "a"\n}\n', r"a\.json line 1 is not JSON: .*; one object a line, or all in one array"),
    ("a.json", b'[{"text": "a"},\n {"text": }]', r"a\.json line 2 is not JSON: Expecting value at character 11"),
    ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 99_999, r"a\.jsonl line 2 cannot be read: .*recursion"),
    ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"a\.jsonl line 1 cannot be read: .*4300 digits"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "half \\ud83d"}', r"text of .*a\.jsonl line 2 holds half a char.*'\\ud83d'"),
    ("a.jsonl", b'{"text": "a", "n": 1, "text": "b"}', r"data\.text_field=text is in .*a\.jsonl line 1 2 times"),
    ("a.csv", b"text,text\na,b\n", r"data\.text_field=text is in .*a\.csv 2 times"),
    ("a.csv", b"id, text\n1,b\n", r"data\.text_field=text is not in .*a\.csv line 2; it has id, ' text'$"),
    ("a.csv", b'text,n\na,1\n"open,2\n' + b"b,3\n" * 99, r"a\.csv line 3 is not CSV: a quote is opened and never clo"),
    ("a.csv", b'text,n\n"a"b,1\n', r"a\.csv line 2 is not CSV: ',' expected after '\"'"),
    ("a.csv", b'text\n"two\nlines"\nhello, world\n', r"a\.csv line 4 has 2 fields, the header has 1; .* needs quotes"),
    ("a.csv", b"text,n\na,1\nb\n", r"a\.csv line 3 has 1 fields, the header has 2"),
    ("a.csv", b"text\ra\rb\r", r"a\.csv line 1 is not CSV: new-line character seen in unquoted field"),
    ("a.parquet", parquet(["text", "text"], ["a"], ["b"]), r"data\.text_field=text is in .*a\.parquet 2 times"),
    ("a.parquet", parquet(["text"], latin_text(1500)), r"a\.parquet holds text that is not UTF-8 .* from row 1024 on"),
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
        kind = next(kind for kind in files.ENDINGS if files.ending(path) in files.ENDINGS[kind])
        list(FileText(path) if ".txt" in name else table_rows(path, kind, {"data.text_field": "text"}))


def names(*given, kind="text"):
    return [str(path) for path in expand("data.files", list(given), kind)]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """tree(*names) makes files in the working directory, each with its own text."""
    monkeypatch.chdir(tmp_path)

    def make(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("" if "empty" in name else f"text of {name}")

    return make


def test_paths_folders_and_globs(tmp_path, tree):
    tree("a.txt", "b.md", "notes.log", "in/c.py", "in/deep/d.txt.gz", "in/e.bin", "in/empty.txt", "in/f.jsonl")
    tree("tables/g.tsv")
    (tmp_path / "nothing").mkdir()
    assert names("b.md", "notes.log", "a.txt") == ["b.md", "notes.log", "a.txt"]
    assert names("in") == ["in/c.py", "in/deep/d.txt.gz", "in/empty.txt"]
    assert names("in", kind="jsonl") == ["in/f.jsonl"]
    assert names("*.txt", "**/*.gz", "a.txt") == ["a.txt", "in/deep/d.txt.gz"]
    for wrong, message in {
        "*.rst": r"data\.files: \*\.rst matches no file \(looked in ",
        "nothing": r"data\.files: nothing holds no text: no file ends in \.txt, \.md, \.py$",
        "tables": r"data\.files: tables holds no text: no file ends in .*; choose data=csv for what it holds$",
        "gone.txt": r"data\.files: gone\.txt does not exist",
        "in/empty.txt": r"data\.files: in/empty\.txt is empty",
    }.items():
        with pytest.raises(ValueError, match=message):
            names(wrong)


@pytest.mark.parametrize("kind", files.ENDINGS)
def test_a_file_that_ends_as_another_table_is_refused_with_the_choice_that_works(kind, tree):
    tree(*(f"a{ending}{packed}" for ending in sum(files.ENDINGS.values(), ()) for packed in ("", ".GZ", ".zst")))
    for other, endings in files.ENDINGS.items():
        for name in (f"a{ending}{packed}" for ending in endings for packed in ("", ".GZ", ".zst")):
            if other in (kind, "text"):
                assert names(name, kind=kind) == [name]
            else:
                with pytest.raises(ValueError, match=rf"{name} is no {kind} by its ending; choose data={other}"):
                    names(name, kind=kind)


def test_hidden_files_are_left_out_unless_named(tree):
    tree("in/a.txt", "in/.git/x.txt", "in/.ipynb_checkpoints/a.txt", "in/._a.txt", "in/b/.c.txt", ".d/e.txt")
    assert names("in") == ["in/a.txt"]
    assert names(".d", "in/._a.txt") == [".d/e.txt", "in/._a.txt"]
    assert names(".") == ["in/a.txt"]


def test_links_are_followed_and_a_file_counts_once(tmp_path, tree):
    tree("in/a.txt", "real/b.txt", "c.txt")
    (tmp_path / "in" / "more").symlink_to("../real")
    (tmp_path / "in" / "back").symlink_to("../in")
    (tmp_path / "real" / "up").symlink_to("..")
    (tmp_path / "in" / "again.txt").symlink_to("a.txt")
    assert {Path(name).resolve().name for name in names("in")} == {"a.txt", "b.txt", "c.txt"}
    assert len(names("in")) == 3
    assert names("c.txt", "./c.txt", str(tmp_path / "c.txt"), "in/../c.txt") == ["c.txt"]
    (tmp_path / "in" / "gone.txt").symlink_to("nowhere.txt")
    with pytest.raises(ValueError, match=r"in/gone\.txt does not exist"):
        names("in")


def test_a_folder_that_may_not_be_read_is_named(tmp_path, tree):
    tree("in/a.txt", "in/locked/b.txt")
    (tmp_path / "in" / "locked").chmod(0)
    errors = as_a_user_without_rights(lambda: names("in"))
    (tmp_path / "in" / "locked").chmod(0o700)
    assert [str(error) for error in errors] == ["data.files: in/locked may not be read"]
