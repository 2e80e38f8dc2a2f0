"""Tokenised text is kept, shared and never half kept; the ids are those of the whole text."""

import multiprocessing
import time

import numpy as np
import pytest
from rich.console import Console

from minitransformer.data import store
from minitransformer.data.config import BPEConfig, ByteConfig, CharConfig, JSONLinesConfig, PretrainedConfig, TextConfig
from minitransformer.data.documents import load_corpus
from minitransformer.data.store import open_store
from tests.conftest import sentences

QUIET = Console(quiet=True)
BPE = BPEConfig(vocab_size=300)


def opened(tokenizer=BPE, files=("book.txt",), console=QUIET, source=TextConfig, **settings):
    config = source(files=list(files), cache_dir="cache", **settings)
    return open_store(config, tokenizer, load_corpus(config), console)


def texts_of(made, split) -> list[str]:
    documents = split.documents
    pairs = zip(documents.offset.tolist(), documents.length.tolist(), strict=True)
    return [made.tokenizer.decode(made.tokens.ids[o + 1 : o + 1 + n].tolist()) for o, n in pairs]


@pytest.mark.parametrize("tokenizer", [BPE, ByteConfig(), CharConfig()], ids=lambda c: c.kind)
@pytest.mark.parametrize("batch", [1, 50, 2**22])
def test_the_tokens_are_the_text(tokenizer, batch, workdir, monkeypatch):
    monkeypatch.setattr(store, "BATCH", batch)
    text = (workdir / "book.txt").read_text(encoding="utf-8")
    made = opened(tokenizer, documents="line")
    train, validation = texts_of(made, made.train), texts_of(made, made.validation)
    assert sorted(train + validation) == sorted(text.splitlines())
    assert made.train.n_bytes == sum(len(t.encode()) for t in train)
    assert made.validation.n_bytes == sum(len(t.encode()) for t in validation)
    boundaries = np.flatnonzero(made.tokens.ids == made.tokenizer.eos_id)
    offsets = np.concatenate([made.train.documents.offset, made.validation.documents.offset])
    assert sorted(boundaries) == [*sorted(offsets), len(made.tokens.ids) - 1]
    whole = opened(tokenizer)
    assert texts_of(whole, whole.train)[0] + texts_of(whole, whole.validation)[0] == text
    ids = whole.tokenizer.encode(texts_of(whole, whole.train)[0])
    assert whole.tokens.ids[1 : 1 + len(ids)].tolist() == ids


def test_prefixes_are_read_and_not_counted(workdir):
    import json

    rows = [{"text": f" answer {i}", "q": "why?" * (i % 3)} for i in range(50)]
    (workdir / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = opened(files=["qa.jsonl"], source=JSONLinesConfig, prefix_field="q")
    documents = made.train.documents
    for text, prefix in zip(texts_of(made, made.train), documents.prefix.tolist(), strict=True):
        question = text.split(" answer")[0]
        assert prefix == len(made.tokenizer.encode(question))
    assert made.train.n_tokens == int(documents.length.sum() - documents.prefix.sum())
    assert made.train.n_bytes + made.validation.n_bytes == sum(len(row["text"]) for row in rows)


def test_a_second_run_tokenises_nothing_and_changed_text_is_noticed(workdir, monkeypatch):
    console = Console(record=True, width=200)
    first = opened(console=console)
    assert "tokenising the corpus" in console.export_text()
    monkeypatch.setattr(store, "make_tokenizer", lambda *_: pytest.fail("tokenised again"))
    second = opened(console=console)
    assert console.export_text() == ""
    assert np.array_equal(first.tokens.ids, second.tokens.ids)
    assert second.limit == first.limit
    (workdir / "book.txt").write_text((workdir / "book.txt").read_text() + "One more line.\n")
    for settings in ({}, dict(documents="line")):
        with pytest.raises(BaseException, match="tokenised again"):
            opened(**settings)


def test_blank_documents_and_byte_order_marks_are_counted(workdir):
    (workdir / "lines.txt").write_bytes(b"\xef\xbb\xbfone\n\n  \ntwo\nthree\n")
    made = opened(files=["lines.txt"], documents="line")
    assert (made.skipped, made.boms) == (2, 1)
    assert sorted(texts_of(made, made.train) + texts_of(made, made.validation)) == ["one", "three", "two"]


def test_merges_come_from_training_text_alone(workdir):
    (workdir / "val.txt").write_text("zqzqzq " * 500)
    made = opened(val_files=["val.txt"])
    assert b"zq" not in made.tokenizer.token_bytes
    assert b" zqzqzq" in opened(files=["val.txt"]).tokenizer.token_bytes


def test_the_tokenizer_sees_no_more_than_its_sample(workdir):
    (workdir / "long.txt").write_text(sentences(2000) + "zqzqzq " * 5000)
    assert b" zqzqzq" in opened(files=["long.txt"]).tokenizer.token_bytes
    assert b" zqzqzq" not in opened(BPEConfig(vocab_size=300, sample_bytes=20_000), ["long.txt"]).tokenizer.token_bytes


def test_a_pretrained_tokenizer_is_taken_and_its_change_noticed(workdir):
    (workdir / "tok").mkdir()
    mine = opened().tokenizer
    (workdir / "tok" / "tokenizer.json").write_text(mine.to_json(), encoding="utf-8")
    made = opened(PretrainedConfig(name="tok"))
    assert made.tokenizer.fingerprint == mine.fingerprint
    other = opened(BPEConfig(vocab_size=270)).tokenizer
    (workdir / "tok" / "tokenizer.json").write_text(other.to_json(), encoding="utf-8")
    assert opened(PretrainedConfig(name="tok")).tokenizer.vocab_size == other.vocab_size


def entries(workdir) -> list[str]:
    return [path.name for path in (workdir / "cache").iterdir() if path.suffix != ".lock"]


def test_a_build_that_dies_leaves_no_entry(workdir, monkeypatch):
    def die(folder, *_):
        (folder / "tokens.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", die)
        with pytest.raises(KeyboardInterrupt):
            opened()
    assert entries(workdir) == []
    opened()
    assert len(entries(workdir)) == 1


def _build_slowly(folder, times):
    write = store._write

    def slow(*arguments):
        times.append(time.time())
        time.sleep(0.5)
        write(*arguments)

    store._write = slow
    opened()


def test_a_killed_build_is_never_taken_for_whole_and_a_second_run_waits(workdir):
    context = multiprocessing.get_context("fork")
    with multiprocessing.Manager() as manager:
        times = manager.list()
        first = context.Process(target=_build_slowly, args=(workdir, times))
        first.start()
        while not times:
            time.sleep(0.01)
        first.kill()
        first.join()
        assert any(name.endswith(".building") for name in entries(workdir))
        both = [context.Process(target=_build_slowly, args=(workdir, times)) for _ in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        assert [process.exitcode for process in both] == [0, 0]
        assert len(times) == 2  # the killed one, and one of the two
    assert len(entries(workdir)) == 1


def test_a_cache_that_cannot_be_written_is_named(workdir):
    (workdir / "cache").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"data\.cache_dir=cache cannot be written"):
        opened()


def test_a_full_disk_while_tokenising_is_named_and_leaves_nothing(workdir, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match=r"data\.cache_dir=cache cannot be written: No space left on device"):
        opened()
    assert entries(workdir) == []


def test_a_file_of_any_size_is_read_in_little_memory(workdir, monkeypatch):
    """Ten million characters as one document; at no time are more than two million bytes of Python objects alive."""
    import tracemalloc

    from minitransformer.data import files

    monkeypatch.setattr(files, "PIECE", 2**16)
    monkeypatch.setattr(store, "BATCH", 2**17)
    with open(workdir / "large.txt", "w") as file:
        for _ in range(20):
            file.write(sentences(25_000))
    assert (workdir / "large.txt").stat().st_size > 10_000_000
    tracemalloc.start()
    try:
        made = opened(ByteConfig(), files=["large.txt"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.train.n_bytes > 9_000_000
    assert peak < 4_000_000, peak
