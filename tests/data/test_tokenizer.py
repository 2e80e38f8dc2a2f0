"""Text to ids and back without loss, also in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer import Tokenizer
from minitransformer.data.tokenizer import BOUNDARY
from tests.conftest import sentences

BPE = Tokenizer.train_bpe([sentences(300)], 400)
BYTES = Tokenizer.bytes()
TEXT = st.text(max_size=200) | st.text(alphabet="aé李🦉\r\n\t\x00\u2028\ufeff ", max_size=50)


@settings(max_examples=300, deadline=None)
@given(TEXT)
@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "byte"])
def test_every_text_survives(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.boundary not in ids
    assert "".join(tokenizer.decode_stream(ids)) == text
    assert [d.tolist() for d in tokenizer.encode_documents([text])] == [ids]


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_every_text_of_its_characters_survives(text):
    tokenizer = Tokenizer.train_characters([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(set(text)) + 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=30))
def test_any_ids_stream_to_what_they_decode_to(ids):
    """Ids that a model drew need not be UTF-8."""
    pieces = list(BYTES.decode_stream(ids))
    assert "".join(pieces) == BYTES.decode(ids)
    assert "" not in pieces


@pytest.mark.parametrize("make", [lambda: BPE, lambda: BYTES, lambda: Tokenizer.train_characters([BOUNDARY])])
def test_text_that_looks_like_the_boundary_stays_text(make):
    ids = make().encode(BOUNDARY)
    assert make().boundary not in ids
    assert make().decode(ids) == BOUNDARY


def test_the_boundary_decodes_to_nothing():
    assert BPE.decode([BPE.boundary, *BPE.encode("Ann"), BPE.boundary]) == "Ann"


def test_sizes():
    assert BYTES.vocab_size == 257
    assert 257 < BPE.vocab_size <= 400
    assert max(BPE.encode(sentences(50, seed=1))) < BPE.vocab_size
    assert Tokenizer.train_bpe(["ab"], 1000).vocab_size < 300  # a small text has few merges


def test_saving_keeps_ids_and_fingerprint():
    for tokenizer in (BPE, BYTES, Tokenizer.train_characters(["häß"])):
        again = Tokenizer.from_json(tokenizer.to_json())
        assert again.fingerprint == tokenizer.fingerprint
        assert again.token_bytes == tokenizer.token_bytes
        assert again.encode("hä") == tokenizer.encode("hä")
    assert BPE.fingerprint != BYTES.fingerprint


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"'x', 'y'"):
        Tokenizer.train_characters(["abc"]).encode("axby")
    for wrong in (-1, 257):
        with pytest.raises(ValueError, match=rf"{wrong} is outside the vocabulary of 257"):
            BYTES.decode([wrong])
    with pytest.raises(ValueError, match="257"):
        Tokenizer.train_bpe(["abc"], 256)
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer.from_json("{}")
