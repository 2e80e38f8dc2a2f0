"""Scores against a loop that reads each window alone, and against `score`."""

import math

import numpy as np
import pytest
import torch

from minitransformer import Tokenizer, score
from minitransformer.data.documents import Document
from minitransformer.data.store import token_stream
from minitransformer.evaluation.scoring import evaluate, lengthened, loss_by_position
from minitransformer.model.config import POSITIONS, SCALINGS
from tests.conftest import sentences, with_start
from tests.model.models import make

TOKENIZERS = {"BOS is EOS": Tokenizer.train_bpe([sentences(300)], 300)}
TOKENIZERS["BOS is another"] = with_start(TOKENIZERS["BOS is EOS"])
TEXTS = [sentences(n, seed=n) for n in (1, 9, 2, 30, 4)]


@pytest.fixture(params=list(TOKENIZERS))
def words(request) -> Tokenizer:
    return TOKENIZERS[request.param]


def laid_out(words, texts, prefixes=None):
    prefixes = prefixes or [""] * len(texts)
    return token_stream((Document([text], prefix) for text, prefix in zip(texts, prefixes, strict=True)), words)


@torch.no_grad()
def nats_alone(model, words, ids: list[int]) -> np.ndarray:
    """Of each id but the first, given all before it."""
    logits = model(torch.tensor([ids[:-1]]))[0, :, : words.vocab_size].double()
    return -logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def by_hand(model, words, ids: list[int], length: int, stride: int) -> float:
    """Each target in the first window, of those that begin at 0, stride, ... and at last at the end, that holds it."""
    n, total, done, begin = len(ids) - 1, 0.0, 0, 0
    while done < n:
        begin = min(begin, max(0, n - length))
        losses = nats_alone(model, words, ids[begin : begin + length + 1])
        total += losses[done - begin :].sum()
        done, begin = begin + len(losses), begin + stride
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize(("length", "stride"), [(32, 32), (32, 16), (32, 5), (20, 1), (64, 32)], ids=str)
def test_equals_a_loop_over_windows_whatever_the_batch(words, length, stride, batch_size):
    model = make(vocab_size=words.vocab_size + 20)  # an embedding that is padded
    stream, documents = laid_out(words, TEXTS)
    found = evaluate(model, words, stream, documents, length, stride, batch_size)
    ids = [[words.bos_id, *words.encode(text), words.eos_id] for text in TEXTS]
    expected = sum(by_hand(model, words, i, length, stride) for i in ids)
    assert found.nats == pytest.approx(expected, rel=1e-6)
    assert found.tokens == sum(len(i) - 1 for i in ids)
    assert found.n_bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.loss == pytest.approx(expected / found.tokens)
    assert found.perplexity == pytest.approx(math.exp(expected / found.tokens))
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / found.n_bytes)


@pytest.mark.parametrize("position", POSITIONS)
def test_documents_that_fit_score_as_score_says(words, position):
    model = make(position, vocab_size=words.vocab_size)
    short = TEXTS[:1] + TEXTS[2:3] + [""]
    stream, documents = laid_out(words, short)
    expected = -sum(sum(score(model, words, text).log_probs) for text in short)
    assert evaluate(model, words, stream, documents, 64, 32).nats == pytest.approx(expected, rel=1e-6)


def test_prefixes_are_read_and_not_scored(words):
    model = make(vocab_size=words.vocab_size)
    stream, documents = laid_out(words, ["Bob sees the cat.\n"], ["Ann draws the dog.\n"])
    ids = [words.bos_id, *words.encode("Ann draws the dog.\n"), *words.encode("Bob sees the cat.\n"), words.eos_id]
    n = len(words.encode("Bob sees the cat.\n")) + 1
    found = evaluate(model, words, stream, documents, 64, 64)
    assert found.nats == pytest.approx(nats_alone(model, words, ids)[-n:].sum(), rel=1e-6)
    assert (found.tokens, found.n_bytes) == (n, len("Bob sees the cat.\n"))


def test_loss_by_position_is_the_mean_over_whole_stretches(words):
    model = make(vocab_size=words.vocab_size)
    stream, documents = laid_out(words, TEXTS)
    losses, tokens = loss_by_position(model, words, stream, documents, 32, batch_size=2)
    stretches = []
    for text in TEXTS:
        ids = [words.bos_id, *words.encode(text), words.eos_id]
        stretches += [nats_alone(model, words, ids[i : i + 33]) for i in range(0, len(ids) - 32, 32)]
    assert tokens.tolist() == [len(stretches)] * 32
    np.testing.assert_allclose(losses, np.mean(stretches, axis=0), rtol=1e-5)
    with pytest.raises(ValueError, match="length=5000: the longest document has"):
        loss_by_position(model, words, stream, documents, 5000)


@pytest.mark.parametrize("position", [p for p in POSITIONS if p != "learned"])
def test_a_lengthened_model_is_the_same_up_to_its_length_and_reads_on(position):
    model = make(position)
    longer = lengthened(model, 256)
    tokens = torch.randint(50, (2, 256))
    torch.testing.assert_close(longer(tokens[:, :64]), model(tokens[:, :64]), atol=1e-5, rtol=1e-5)
    assert longer(tokens).isfinite().all()
    assert lengthened(model, 64) is model


def test_rotary_scaling_is_that_of_a_model_built_so():
    model, tokens = make(max_seq_len=32), torch.randint(50, (1, 128))
    logits = {}
    for scaling in SCALINGS:
        longer = lengthened(model, 128, scaling)
        rotary = longer.config.rotary
        assert (rotary.scaling, rotary.factor) == (scaling, 1.0 if scaling == "none" else 4.0)
        logits[scaling] = longer(tokens)
    # Linear positions are those of a model whose tokens lie a quarter apart: position 4 turns as 1 did.
    turns = lengthened(model, 128, "linear").position.turns
    torch.testing.assert_close(turns[::4], model.position.turns, atol=1e-6, rtol=0)
    assert len({tuple(x[0, -1].tolist()) for x in logits.values()}) == len(SCALINGS)
    # One that was trained with a scaling keeps what its original length was.
    scaled = lengthened(lengthened(model, 128, "yarn"), 256)
    assert (scaled.config.rotary.factor, scaled.config.rotary.original_length) == (4.0, 32)


def test_what_a_model_cannot_be_lengthened_to_is_refused():
    with pytest.raises(ValueError, match=r"length=65: the model learned max_seq_len=64 positions .*at most 64"):
        lengthened(make("learned"), 65)
    with pytest.raises(ValueError, match=r"scaling=yarn is for rotary positions; the model has model.position=alibi"):
        lengthened(make("alibi"), 256, "yarn")
