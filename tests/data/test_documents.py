"""Which documents there are, and which of them are held out."""

import json
import sysconfig
from pathlib import Path

import pytest

from minitransformer.data.config import FilesConfig, HubConfig, StdlibConfig
from minitransformer.data.documents import Document, load_corpus, stdlib_documents
from minitransformer.data.store import look_through

TEXTS = [f"document {i}: {'word ' * i}" for i in range(60)]


class NoBar:
    """A progress bar that shows nothing."""

    def add_task(self, *_, **__):
        return 0

    def advance(self, *_):
        pass

    remove_task = update = advance


def read(corpus, val_fraction=0.1):
    """Training and validation texts."""
    held_out = look_through(corpus, val_fraction, NoBar()).held_out
    texts = ["".join(d.text) for d in corpus.read() if not d.blank]
    return [[text for text, held in zip(texts, held_out, strict=True) if held == which] for which in (False, True)]


def write_jsonl(path: Path, texts=TEXTS, field="text") -> str:
    path.write_text("".join(json.dumps({field: t, "n": i}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
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


def test_held_out_documents_are_never_trained_on():
    train, validation = read(load_corpus(StdlibConfig()), 0.05)
    assert not set(train) & set(validation)
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.09
    assert all(text.strip() for text in train + validation)


def test_a_hash_split_moves_no_document_when_others_come(tmp_path):
    def split(texts, fraction=0.2):
        config = FilesConfig(files=[write_jsonl(tmp_path / "a.jsonl", texts)])
        return read(load_corpus(config), fraction)

    train, validation = split(TEXTS)
    assert 3 < len(validation) < 25
    again, validation_again = split(["new one", *reversed(TEXTS), "another"])
    assert set(validation) <= set(validation_again)
    assert set(train) <= set(again)
    assert not set(again) & set(validation_again)
    assert len(split(["a", "b"], 1e-9)[1]) == 1  # one at least, however small the fraction


def test_the_key_is_that_of_the_text_however_it_is_cut():
    assert Document(["one two"]).key() == Document(["one", " two"]).key() == Document([" two"], prefix="one").key()
    assert Document(["one two"]).key() != Document(["one twO"]).key()
    keys = sorted(Document([text]).key() for text in TEXTS)
    assert keys[0] < 0.2
    assert keys[-1] > 0.8


def test_a_single_text_gives_its_tail_and_many_whole_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{i} 李\n\n" for i in range(500)))
    text = (tmp_path / "a.txt").read_text()
    cut = int(len(text) * 0.9)
    assert read(load_corpus(FilesConfig(files=["a.txt"]))) == [[text[:cut]], [text[cut:]]]
    two = read(load_corpus(FilesConfig(files=["a.txt", "b.txt"])))
    assert [len(part) for part in two] == [1, 1]
    tails = read(load_corpus(FilesConfig(files=["a.txt", "b.txt"], split="tail")))
    assert ["".join(pair) for pair in zip(*tails, strict=True)] == [text, (tmp_path / "b.txt").read_text()]
    for documents, end in (("line", ""), ("blank_line", ""), ("\\n\\n", "")):
        parts = read(load_corpus(FilesConfig(files=["a.txt"], documents=documents)))
        assert sorted(parts[0] + parts[1]) == sorted(f"a{i} 李{end}" for i in range(500))
        assert 20 < len(parts[1]) < 90


def test_given_validation_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held out")
    write_jsonl(tmp_path / "c.jsonl", ["more"])
    assert read(load_corpus(FilesConfig(files=["a.txt", "c.jsonl"], val_files=["b.*"]))) == [
        ["train", "more"],
        ["held out"],
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hub(streaming, tmp_path):
    """A folder stands for one: the same `load_dataset` call reads it."""
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl")
    config = HubConfig(name=str(tmp_path / "set"), streaming=streaming)
    train, validation = read(load_corpus(config), 0.1)
    assert sorted(train + validation) == sorted(TEXTS)
    assert validation
    assert load_corpus(config).fingerprint == load_corpus(config).fingerprint
    write_jsonl(tmp_path / "set" / "test.jsonl", ["held out"])
    assert read(load_corpus(HubConfig(name=str(tmp_path / "set"), val_split="test", streaming=streaming))) == [
        TEXTS, ["held out"],
    ]  # fmt: skip
    few = HubConfig(name=str(tmp_path / "set"), streaming=True, buffer=7)
    assert sum(map(len, read(load_corpus(few)))) == 7
    with pytest.raises(ValueError, match=r"data\.text_field=body is not in .*set \(train\); it has .*text"):
        load_corpus(HubConfig(name=str(tmp_path / "set"), text_field="body", streaming=streaming))
    with pytest.raises(ValueError, match=r"data\.text_field=n of .*set holds int, not text"):
        list(load_corpus(HubConfig(name=str(tmp_path / "set"), text_field="n", streaming=streaming)).read())
    with pytest.raises(ValueError, match=r"cannot load data\.name="):
        load_corpus(HubConfig(name=str(tmp_path / "nowhere"), streaming=streaming))


def test_changed_text_and_another_way_to_read_it_change_the_fingerprint(tmp_path):
    def fingerprint(path, **settings):
        return load_corpus(FilesConfig(files=[str(path)], **settings)).fingerprint

    for name in ("a.txt", "same.txt"):
        (tmp_path / name).write_text("one\ntwo")
    (tmp_path / "other.txt").write_text("one\ntwO")
    first = fingerprint(tmp_path / "a.txt")
    assert first == fingerprint(tmp_path / "same.txt")
    assert first != fingerprint(tmp_path / "other.txt")
    assert first != fingerprint(tmp_path / "a.txt", documents="line")
    lines = write_jsonl(tmp_path / "a.jsonl")
    assert fingerprint(lines) != fingerprint(lines, text_field="n")


@pytest.mark.parametrize(("texts", "message"), [
    (["", " \n", "\t"], r"a\.jsonl holds no text: 3 documents, all of them white space or empty"),
    (["only one", ""], r"no text to validate on in .*a\.jsonl: 1 documents, 1 more are blank"),
    (["fine", "half \ud83d"], r"a\.jsonl: document 1 holds half a character, '\\ud83d'"),
], ids=["blank", "one", "surrogate"])  # fmt: skip
def test_documents_that_cannot_be_used_are_named(texts, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(load_corpus(FilesConfig(files=[write_jsonl(tmp_path / "a.jsonl", texts)])), 1e-9)


def test_fields_of_plain_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data\.text_field=body is for \.jsonl, \.csv, \.parquet"):
        load_corpus(FilesConfig(files=[str(tmp_path / "a.txt")], text_field="body"))


@pytest.mark.parametrize(("settings", "message"), [
    (dict(documents="lines"), "did you mean line"), (dict(documents=""), "data.documents is empty"),
    (dict(packing="best"), "data.packing='best' is not known"), (dict(files=[]), "data.files is empty"),
])  # fmt: skip
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FilesConfig(**dict(files=["a.txt"]) | settings)
