"""Where documents come from, and which are held out."""

import json
import sysconfig
from pathlib import Path

import pytest

from minitransformer.data.config import HubConfig, JsonlConfig, ParquetConfig, StdlibConfig, TextConfig
from minitransformer.data.documents import load_corpus, split, stdlib_documents

TEXTS = [f"document {i}: {'word ' * i}" for i in range(60)]


def write_jsonl(path: Path, texts=TEXTS, field="text") -> str:
    path.write_text("".join(json.dumps({field: t, "n": i}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, texts=TEXTS) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    return str(path)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def test_the_standard_library_is_ordered_by_its_text_and_has_no_tests():
    texts = stdlib_documents()
    root = Path(sysconfig.get_path("stdlib"))
    assert texts == stdlib_documents()
    assert (root / "argparse.py").read_bytes().decode() in texts
    assert (root / "json" / "decoder.py").read_bytes().decode() in texts
    test_file = next((root / "test").glob("test_*.py"), None) if (root / "test").is_dir() else None
    assert test_file is None or test_file.read_bytes().decode() not in texts
    assert all(Path(pytest.__file__).read_text() != text for text in texts)


def test_validation_files_are_never_trained_on():
    corpus = load_corpus(StdlibConfig())
    assert not set(corpus.train) & set(corpus.validation)
    assert 0.02 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.09
    assert all(text.strip() for text in corpus.train + corpus.validation)


def test_a_hash_split_moves_no_document_when_others_come():
    train, held_out = split(TEXTS, "hash", 0.2)
    assert held_out
    again, held_out_again = split(["new one", *reversed(TEXTS), "another"], "hash", 0.2)
    assert set(held_out) <= set(held_out_again)
    assert set(train) <= set(again)
    assert not set(again) & set(held_out_again)
    assert split(["a", "b"], "hash", 1e-9)[1]  # one at least, however small the fraction


def test_a_tail_split_takes_the_last_part_of_each_document():
    train, held_out = split(["abcdefghij", "0123456789"], "tail", 0.2)
    assert (train, held_out) == (["abcdefgh", "01234567"], ["ij", "89"])


def test_text_files_stay_as_they_are(tmp_path):
    text = "line\r\nnext\rlast\u2028\x00 end\n\n" + "x" * 100
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    corpus = load_corpus(TextConfig(files=[str(tmp_path / "a.txt")]))
    assert corpus.train[0] + corpus.validation[0] == text


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_tables_give_every_document(kind, tmp_path):
    if kind == "jsonl":
        config = JsonlConfig(files=[write_jsonl(tmp_path / "a.jsonl")])
    elif kind == "parquet":
        config = ParquetConfig(files=[write_parquet(tmp_path / "a.parquet")])
    else:  # a folder stands for a data set of the hub: the same `load_dataset` call reads it
        (tmp_path / "set").mkdir()
        write_jsonl(tmp_path / "set" / "train.jsonl")
        config = HubConfig(name=str(tmp_path / "set"))
    corpus = load_corpus(config)
    assert sorted(corpus.train + corpus.validation) == sorted(TEXTS)


def test_a_validation_split_of_the_hub_and_validation_files(tmp_path):
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl")
    write_jsonl(tmp_path / "set" / "test.jsonl", ["held out"])
    corpus = load_corpus(HubConfig(name=str(tmp_path / "set"), val_split="test"))
    assert (corpus.train, corpus.validation) == (TEXTS, ["held out"])
    files = [write_jsonl(tmp_path / "a.jsonl")]
    held_out = [write_jsonl(tmp_path / "b.jsonl", ["b"])]
    assert load_corpus(JsonlConfig(files=files, val_files=held_out)).validation == ["b"]


def test_blank_documents_are_skipped_and_counted(tmp_path):
    corpus = load_corpus(JsonlConfig(files=[write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "", " \n\t"])]))
    assert corpus.skipped == 2
    assert len(corpus.train) + len(corpus.validation) == len(TEXTS)


def test_changed_text_changes_the_fingerprint(tmp_path):
    one = load_corpus(JsonlConfig(files=[write_jsonl(tmp_path / "a.jsonl")])).fingerprint
    assert one == load_corpus(JsonlConfig(files=[write_jsonl(tmp_path / "b.jsonl")])).fingerprint
    assert one != load_corpus(JsonlConfig(files=[write_jsonl(tmp_path / "c.jsonl", [*TEXTS[:-1], "new"])])).fingerprint


@pytest.mark.parametrize(("data", "words"), [
    (None, ["does not exist"]), (b"", ["is empty"]), (b" \n\t\n", ["no text", "white space"]),
    (b"good \xff bad", ["not UTF-8", "0xff", "offset 5"]),
], ids=["missing", "empty", "blank", "latin-1"])  # fmt: skip
def test_wrong_text_files_are_named(data, words, tmp_path):
    path = tmp_path / "a.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.txt") as error:
        load_corpus(TextConfig(files=[str(path)]))
    assert all(word in str(error.value) for word in words)


def test_wrong_tables_are_named(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", field="body")
    with pytest.raises(ValueError, match=r"text_field=text.*body, n"):
        load_corpus(JsonlConfig(files=[good]))
    with pytest.raises(ValueError, match=r"text_field=n.*int in row 0"):
        load_corpus(JsonlConfig(files=[good], text_field="n"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(ValueError, match=r"cannot read .*bad\.jsonl"):
        load_corpus(JsonlConfig(files=[str(tmp_path / "bad.jsonl")]))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"cannot read .*bad\.parquet"):
        load_corpus(ParquetConfig(files=[str(tmp_path / "bad.parquet")]))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        load_corpus(JsonlConfig(files=[str(tmp_path / "empty.jsonl")]))
    with pytest.raises(ValueError, match=r"cannot load data\.name="):
        load_corpus(HubConfig(name=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="not a file"):
        load_corpus(TextConfig(files=[str(tmp_path)]))
