"""Which documents there are, and which of them are held out."""

import json
import sysconfig
from pathlib import Path

import pytest

from minitransformer.data.config import SOURCES, HubConfig, JSONLinesConfig, StdlibConfig, TextConfig
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
        config = JSONLinesConfig(files=[write_jsonl(tmp_path / "a.jsonl", texts)])
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
    assert read(load_corpus(TextConfig(files=["a.txt"]))) == [[text[:cut]], [text[cut:]]]
    two = read(load_corpus(TextConfig(files=["a.txt", "b.txt"])))
    assert [len(part) for part in two] == [1, 1]
    tails = read(load_corpus(TextConfig(files=["a.txt", "b.txt"], split="tail")))
    assert ["".join(pair) for pair in zip(*tails, strict=True)] == [text, (tmp_path / "b.txt").read_text()]
    for documents, end in (("line", ""), ("blank_line", ""), ("\\n\\n", "")):
        parts = read(load_corpus(TextConfig(files=["a.txt"], documents=documents)))
        assert sorted(parts[0] + parts[1]) == sorted(f"a{i} 李{end}" for i in range(500))
        assert 20 < len(parts[1]) < 90


def test_given_validation_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held out")
    (tmp_path / "c.md").write_text("more")
    assert read(load_corpus(TextConfig(files=["a.txt", "c.md"], val_files=["b.*"]))) == [
        ["train", "more"],
        ["held out"],
    ]


def test_a_validation_file_is_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    for name in "abc":
        (tmp_path / "set" / f"{name}.txt").write_text(name)
    (tmp_path / "link.txt").symlink_to("set/b.txt")
    for val_file in ("set/b.txt", str(tmp_path / "set" / "b.txt"), "link.txt", "set/../link.txt", "set/b.*"):
        corpus = load_corpus(TextConfig(files=["set"], val_files=[val_file]))
        assert read(corpus) == [["a", "c"], ["b"]]
        assert corpus.note == "1 of data.files are in data.val_files too: held out, not trained on"
    apart = load_corpus(TextConfig(files=["set/a.txt", "set/c.txt"], val_files=["set/b.txt"]))
    assert apart.note is None
    assert apart.fingerprint == corpus.fingerprint
    with pytest.raises(ValueError, match=r"data\.files: all of them are in data\.val_files too"):
        load_corpus(TextConfig(files=["set/a.txt"], val_files=["set"]))


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


def test_a_stream_that_breaks_off_names_its_data_set(tmp_path):
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train-0.jsonl")
    (tmp_path / "set" / "train-1.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(ValueError, match=r"^cannot read data\.name=.*set: "):
        load_corpus(HubConfig(name=str(tmp_path / "set"), streaming=True))  # looks at its start


def test_changed_text_and_another_way_to_read_it_change_the_fingerprint(tmp_path):
    def fingerprint(path, kind="text", **settings):
        return load_corpus(SOURCES[kind](files=[str(path)], **settings)).fingerprint

    for name in ("a.txt", "same.txt"):
        (tmp_path / name).write_text("one\ntwo")
    (tmp_path / "other.txt").write_text("one\ntwO")
    first = fingerprint(tmp_path / "a.txt")
    assert first == fingerprint(tmp_path / "same.txt")
    assert first != fingerprint(tmp_path / "other.txt")
    assert first != fingerprint(tmp_path / "a.txt", documents="line")
    lines = write_jsonl(tmp_path / "a.jsonl")
    assert fingerprint(lines, kind="jsonl") != fingerprint(lines, kind="jsonl", text_field="n")
    write_jsonl(tmp_path / "b.txt")
    assert fingerprint(lines, kind="jsonl") == fingerprint(tmp_path / "b.txt", kind="jsonl")
    assert fingerprint(tmp_path / "b.txt") != fingerprint(tmp_path / "b.txt", kind="jsonl")
    for name in ("t.csv", "t.tsv"):
        (tmp_path / name).write_text('"text"\na\n')
    assert fingerprint(tmp_path / "t.csv", kind="csv") != fingerprint(tmp_path / "t.tsv", kind="csv")


@pytest.mark.parametrize(("texts", "message"), [
    (["", " \n", "\t"], r"a\.jsonl holds no text, only white space"),
    (["only one", ""], r"a\.jsonl holds one text, and whole ones are held out; give more, or data\.split=tail"),
    (["the same"] * 9, r"a\.jsonl holds one text, and whole ones are held out"),
    (["fine", "half \ud83d"], r"data\.text_field=text of .*a\.jsonl line 2 holds half a character, '\\ud83d'"),
], ids=["blank", "one", "same", "surrogate"])  # fmt: skip
@pytest.mark.parametrize("val_fraction", [1e-9, 0.999])
def test_documents_that_cannot_be_used_are_named(texts, message, val_fraction, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(load_corpus(JSONLinesConfig(files=[write_jsonl(tmp_path / "a.jsonl", texts)])), val_fraction)


@pytest.mark.parametrize(("text", "message"), [
    ("x", r"no text to train on in a\.txt: what is not held out is empty or white space; give more text"),
    ("     \nx", r"no text to train on in a\.txt: what is not held out"),
    ("text" + "\n" * 9, r"no text to validate on in a\.txt: what is held out is empty or white space; give more text"),
    (" \n\t \n", r"a\.txt holds no text, only white space"),
])  # fmt: skip
def test_a_text_that_is_too_short_or_blank_is_named(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(load_corpus(TextConfig(files=["a.txt"])))


def test_files_without_text_on_one_side_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text(" \n")
    for files, purpose in ((["a.txt", "b.txt"], "validate on"), (["b.txt", "a.txt"], "train on")):
        with pytest.raises(ValueError, match=f"no text to {purpose} in "):
            read(load_corpus(TextConfig(files=files[:1], val_files=files[1:])))


@pytest.mark.parametrize("val_fraction", [1e-9, 0.5, 0.999])
def test_both_splits_have_a_text_whatever_the_fraction(val_fraction, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "one"])
    parts = read(load_corpus(JSONLinesConfig(files=[path])), val_fraction)
    assert set(parts[0] + parts[1]) == {"one", "two"}
    assert len(set(parts[0])) == len(set(parts[1])) == 1


@pytest.mark.parametrize(("settings", "message"), [
    (dict(documents="lines"), "did you mean line"), (dict(documents=""), "data.documents is empty"),
    (dict(packing="best"), "data.packing='best' is not known"), (dict(files=[]), "data.files is empty"),
    (dict(files=["a.txt", ""]), "data.files holds an empty name"), (dict(kind="csv"), "write data=csv instead"),
    (dict(val_files=[""]), "data.val_files holds an empty name"),
    (dict(val_files=["b.txt"], val_fraction=0.2), "data.val_fraction=0.2 cannot go with data.val_files"),
    (dict(val_files=["b.csv"], val_fraction=0.1, source="csv"), "data.val_fraction=0.1 cannot go with data.val_files"),
    (dict(val_files=["b.txt"], split="hash"), "data.split=hash cannot go with data.val_files"),
    (dict(val_fraction=1.0), "data.val_fraction=1.0 is out of range"),
])  # fmt: skip
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SOURCES[settings.pop("source", "text")](**dict(files=["a.txt"]) | settings)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(val_split="test", val_fraction=0.1), "data.val_fraction=0.1 cannot go with data.val_split"),
    (dict(val_split="test", split="hash"), "data.split=hash cannot go with data.val_split"),
    (dict(buffer=7), "data.buffer=7 is for data.streaming=true"),
    (dict(val_split="train"), "data.val_split=train holds out what data.train_split=train trains on"),
    (dict(val_split="train[:5%]"), r"data.val_split=train\[:5%\] holds out what"),
    (dict(val_split="test + train"), r"data.val_split=test \+ train holds out what"),
    (dict(train_split="train[5%:]", val_split="train"), "data.val_split=train holds out what"),
    (dict(train_split="train[:9]", val_split="train[:9]"), "holds out what"),
])  # fmt: skip
def test_wrong_settings_of_a_data_set_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        HubConfig(name="set", **settings)


def test_parts_of_a_split_may_be_held_out():
    HubConfig(name="set", train_split="train[5%:]", val_split="train[:5%]")
    HubConfig(name="set", train_split="train", val_split="training")
