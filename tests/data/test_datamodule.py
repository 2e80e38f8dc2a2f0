"""From a config to batches: what a run knows of its data, and what it refuses to go on with."""

import json
from collections import Counter
from types import SimpleNamespace

import pyarrow
import pytest
import torch
from pyarrow import parquet
from rich.console import Console

from minitransformer.data.config import BPEConfig, ByteConfig, CharConfig, HubConfig, JSONLinesConfig, TextConfig
from minitransformer.data.datamodule import TextData
from minitransformer.data.documents import Document
from minitransformer.data.streaming import StreamingSteps

QUIET = Console(quiet=True)


@pytest.fixture
def data(workdir):
    def make(tokenizer=None, row_length=32, **settings):
        config = TextConfig(files=["book.txt"], cache_dir="cache", **settings)
        made = TextData(config, tokenizer or BPEConfig(vocab_size=300), row_length, seed=0)
        made.prepare(QUIET)
        return made

    return make


def test_too_little_text_names_both_numbers(data, workdir):
    (workdir / "book.txt").write_text("too short\n" * 4)
    with pytest.raises(ValueError, match=r"has 37 tokens, and a row of 64 .* needs 65; .* data\.row_length=36$"):
        data(ByteConfig(), row_length=64)
    data(ByteConfig(), row_length=36)


@pytest.mark.parametrize("row_length", [8, 9, 10, 11, 400])
def test_prefixes_that_do_not_share_a_row_with_their_text_are_counted(workdir, row_length):
    rows = [{"q": "?" * (i % 5), "text": f"{i:04}" + "." * (i % 3)} for i in range(60)]
    (workdir / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = JSONLinesConfig(files=["qa.jsonl"], prefix_field="q", cache_dir="cache")
    made = TextData(config, ByteConfig(), row_length, seed=0)
    made.prepare(QUIET)
    # With the start token; the last token is no input.
    found = [(prefix, prefix + text + 1) for prefix, text in _lengths(made)]
    expected = sum(prefix > 0 and inputs > row_length for prefix, inputs in found), sum(p > 0 for p, _ in found)
    assert made.cut_prefixes == expected
    assert (expected[0] > 0) == (row_length < 11)


def _lengths(made) -> list[tuple[int, int]]:
    """Of each training document its prefix and its text, in bytes."""
    tokens, documents = made.tokens.ids, made.train.documents
    whole = [bytes(made.tokenizer.decode(tokens[o + 1 : o + 1 + n].tolist()), "ascii") for o, n in zip(
        documents.offset, documents.length, strict=True
    )]  # fmt: skip
    return [(each.count(b"?"), len(each) - each.count(b"?")) for each in whole]


def test_resuming_on_other_data_is_refused_unless_allowed(data, workdir):
    one = data()
    state = one.state_dict()
    one.load_state_dict(state)
    with pytest.raises(ValueError, match=r"rows=\d+, this run has \d+"):
        data(row_length=16).load_state_dict(state)
    with pytest.raises(ValueError, match="packing=best_fit, this run has pad"):
        data(packing="pad").load_state_dict(state)
    (workdir / "book.txt").write_text("Bob sees another text.\n" * 400)
    with pytest.raises(ValueError, match=rf"fingerprint={one.fingerprint}, this run has \w+; data.allow_changed=true"):
        data().load_state_dict(state)
    data(allow_changed=True).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_starts_at_the_step_of_the_trainer(data, workers):
    made = data(batch_size=4, workers=workers)
    made.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0)
    whole = iter(made.train_dataloader())
    batches = [next(whole) for _ in range(6)]
    made.trainer.global_step = 4
    resumed = iter(made.train_dataloader())
    assert torch.equal(next(resumed).tokens, batches[4].tokens)
    assert torch.equal(next(resumed).targets, batches[5].targets)


def test_a_resumed_run_may_have_another_number_of_ranks(data):
    made = data(batch_size=4)

    def batches(ranks, start, n):
        shares = []
        for rank in range(ranks):
            made.trainer = SimpleNamespace(global_rank=rank, world_size=ranks, global_step=start)
            loader = iter(made.train_dataloader())
            shares.append([next(loader) for _ in range(n)])
        return [torch.cat([share[i].tokens for share in shares]) for i in range(n)]

    whole = batches(1, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(batches(2, 0, 2) + batches(4, 2, 3), whole, strict=True))


def test_held_out_text_is_whole_characters(data):
    made = data(ByteConfig())
    text = "".join(d for d in made.held_out_text(1000))
    for n in range(1, 60):
        assert text.startswith(made.held_out_text(n))
        assert n - 4 < len(made.held_out_text(n).encode()) <= n


def test_held_out_documents_come_with_their_prefixes_up_to_a_number_of_tokens(workdir):
    documents = [{"q": f"{i}? ä", "text": f"It is {i}, Zoë."} for i in range(50)]
    for name, some in (("train", documents[:40]), ("val", documents[40:])):
        (workdir / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    config = JSONLinesConfig(files=["train.jsonl"], val_files=["val.jsonl"], prefix_field="q", cache_dir="cache")
    made = TextData(config, ByteConfig(), 16, seed=0)
    made.prepare(QUIET)
    whole = [(document["q"], document["text"]) for document in documents[40:]]
    assert made.held_out(10_000) == whole
    sizes = [len((q + text).encode()) for q, text in whole]
    for n in range(1, 60):
        found = made.held_out(n)
        assert len(found) == sum(sum(sizes[:k]) + k < n for k in range(len(whole)))
        assert found[:-1] == whole[: len(found) - 1]
        (q, text), last = found[-1], whole[len(found) - 1]
        assert last[0].startswith(q)
        assert last[1].startswith(text)
        assert q == last[0] or not text
        left = n - sum(sizes[: len(found) - 1]) - len(found) + 1
        assert len((q + text).encode()) in (min(left, sizes[len(found) - 1]), left - 1)


# Streaming ---------------------------------------------------------------------------------------------------------


TEXTS = [f"document {i}: {'word ' * (i % 9)}李" for i in range(100)]


@pytest.fixture
def stream(workdir, monkeypatch):
    """stream(**settings): a streaming TextData over two files of 50 documents."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(workdir / "hf"))
    for part in range(2):
        rows = [{"text": text} for text in TEXTS[50 * part : 50 * part + 50]]
        for form in ("jsonl", "parquet"):
            (workdir / f"set-{form}").mkdir(exist_ok=True)
        (workdir / "set-jsonl" / f"train-{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        parquet.write_table(pyarrow.Table.from_pylist(rows), workdir / "set-parquet" / f"train-{part}.parquet")

    def make(tokenizer=None, form="jsonl", **settings):
        config = HubConfig(
            **dict(name=f"set-{form}", streaming=True, buffer=30, cache_dir="cache", batch_size=3) | settings
        )
        made = TextData(config, tokenizer or ByteConfig(), 24, seed=0)
        made.prepare(QUIET)
        return made

    return make


def steps_of(made, state=None, rank=0, ranks=1) -> StreamingSteps:
    return StreamingSteps(made.config, made.tokenizer, made.limit, made.row_length, made.seed, state, rank, ranks)


def taken(steps, n):
    iterator = iter(steps)
    return [next(iterator) for _ in range(n)]


@pytest.mark.parametrize("packing", ["best_fit", "sequential", "pad"])
def test_a_stream_gives_every_target_once_an_epoch(packing, stream):
    made = stream(packing=packing)
    batches = taken(steps_of(made), 200)
    pairs = []  # of each token and its target, in the order of training
    for batch in batches:
        used = batch.positions >= 0
        pairs += zip(batch.tokens[used].tolist(), batch.targets[used].tolist(), strict=True)
    kept = [text for text in TEXTS if Document([text]).key() > made.limit]
    assert 80 < len(kept) < 100
    ids, eos = map(made.tokenizer.encode, kept), made.tokenizer.eos_id
    expected = Counter(pair for d in ids for pair in zip([eos, *d], [*d, eos], strict=True))
    for epoch in range(2):
        assert Counter(pairs[epoch * expected.total() : (epoch + 1) * expected.total()]) == expected
    assert batches[-1].state["epoch"] > 1


def resumed(made, before, n):
    """The `n` steps that come after a batch, from its state as a checkpoint keeps it."""
    return taken(steps_of(made, json.loads(json.dumps(before.state))), n)


def assert_same(found, expected):
    """Without `source`: `datasets` writes the same place in several ways. What it leads to is compared."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.targets, other.targets)
        assert one.state | {"source": None} == other.state | {"source": None}


@pytest.mark.parametrize("packing", ["best_fit", "sequential"])
def test_a_stream_goes_on_exactly_where_it_stopped(packing, stream):
    made = stream(packing=packing)
    whole = taken(steps_of(made), 120)
    assert whole[-1].state["epoch"] > 0
    for stop in (1, 2, 9, 17, 40, 80, 111):
        assert_same(resumed(made, whole[stop - 1], 8), whole[stop:][:8])


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_stream_that_is_resumed_again_and_again_goes_on_where_it_stopped(form, stream):
    """A second resume begins in a state that a resumed stream gave, and a third in one of a second."""
    made = stream(form=form, buffer=7)
    whole = taken(steps_of(made), 60)
    assert whole[-1].state["epoch"] > 0
    found = whole[:5]
    for n in (1, 9, 6, 13, 3, 23):
        found = found + resumed(made, found[-1], n)
    assert_same(found, whole)


def test_ranks_share_a_stream(stream):
    made = stream(batch_size=4)
    whole, left, right = (taken(steps_of(made, rank=r, ranks=n), 9) for r, n in ((0, 1), (0, 2), (1, 2)))
    for a, b, c in zip(whole, left, right, strict=True):
        assert torch.equal(a.tokens, torch.cat((b.tokens, c.tokens)))
        assert a.step_targets == b.step_targets == c.step_targets


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_loaded_and_remembered(workers, stream):
    made = stream(workers=workers)
    made.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=0)
    expected = taken(steps_of(made), 6)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(expected, made.train_dataloader(), strict=False))
    made.stream_state = expected[3].state
    again = stream(workers=workers)
    again.load_state_dict(made.state_dict())
    again.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=4)
    assert torch.equal(next(iter(again.train_dataloader())).tokens, expected[4].tokens)


def test_a_stream_without_text_and_settings_that_do_not_fit_are_named(stream, workdir):
    made = stream()
    with pytest.raises(ValueError, match="tokenizer=char needs all characters"):
        stream(CharConfig())
    made.limit = 1.0
    with pytest.raises(ValueError, match=r"set-jsonl \(train\) holds no text to train on"):
        taken(steps_of(made), 1)
    for settings, message in ((dict(packing="concat"), "data.packing=concat"), (dict(split="tail"), "data.split=tail"),
                              (dict(workers=2), "data.workers=2")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            stream(**settings)
