"""Text to ids and back without loss, also in pieces."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer import Tokenizer
from minitransformer.data.tokenizer import EOS_TOKEN, cut
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
    assert tokenizer.eos_id not in ids
    assert "".join(tokenizer.decode_stream(ids)) == text
    assert [d.tolist() for d in tokenizer.encode_batch([text, "", text])] == [ids, [], ids]


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_every_text_of_its_characters_survives(text):
    tokenizer = Tokenizer.train_characters([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(set(text)) + 1
    assert [d.tolist() for d in tokenizer.encode_batch([text, "", text])] == [
        tokenizer.encode(text),
        [],
        tokenizer.encode(text),
    ]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=30))
def test_any_ids_stream_to_what_they_decode_to(ids):
    """Ids that a model drew need not be UTF-8."""
    pieces = list(BYTES.decode_stream(ids))
    assert "".join(pieces) == BYTES.decode(ids)
    assert "" not in pieces


@pytest.mark.parametrize("make", [lambda: BPE, lambda: BYTES, lambda: Tokenizer.train_characters([EOS_TOKEN])])
def test_text_that_looks_like_the_boundary_stays_text(make):
    ids = make().encode(EOS_TOKEN)
    assert make().eos_id not in ids
    assert make().decode(ids) == EOS_TOKEN


def test_the_boundary_decodes_to_nothing():
    assert BPE.decode([BPE.eos_id, *BPE.encode("Ann"), BPE.eos_id]) == "Ann"


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


def test_text_that_is_not_utf8_is_named():
    """Python makes lone surrogates of such bytes on a command line."""
    for tokenizer in (BPE, BYTES, Tokenizer.train_characters(["ab"])):
        with pytest.raises(ValueError, match="not UTF-8 at character 2"):
            tokenizer.encode("ab\udcff")


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
    for encode in (Tokenizer.train_characters(["abc"]).encode_batch, Tokenizer.train_characters(["ac"]).encode_batch):
        with pytest.raises(ValueError, match="does not know"):
            encode(["ab", "ä"])


# What the families that people take from the hub cut text with: GPT-2, and Llama 3 and its successors.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def other(pattern: str, eos: str = EOS_TOKEN, **changes) -> Tokenizer:
    """A tokenizer with another pattern, as a tokenizer.json would bring it."""
    pre = tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = pre.Split(tokenizers.Regex(pattern), "isolated")
    backend.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[eos, "<|user|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([sentences(300)], trainer)
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


WORDS = st.lists(
    st.sampled_from(["It's", "naïve", "李", " ", "  ", "\n", "\r\n", "\t", "42", "...", '"', "_", "🦉", "a"]),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(WORDS, st.integers(20, 40), st.integers(1, 7))
@pytest.mark.parametrize("pattern", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
def test_pieces_encode_to_the_ids_of_the_whole(pattern, words, size, step):
    text = " a".join(words)  # there is a place to cut within any twenty characters
    tokenizer = TOKENIZERS[pattern]
    pieces = list(cut([text[i : i + step] for i in range(0, len(text), step)], size))
    assert "".join(pieces) == text
    assert all(len(piece) <= 2 * size for piece in pieces)
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


TOKENIZERS = {pattern: Tokenizer(other(pattern)) for pattern in (GPT2, LLAMA3)}


def test_text_without_a_place_to_cut_is_cut_all_the_same():
    pieces = list(cut(["李" * 100], 10))
    assert "".join(pieces) == "李" * 100
    assert max(map(len, pieces)) <= 20


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
@pytest.mark.parametrize("eos", ["<|end_of_text|>", "</s>"])
def test_pretrained_tokenizers_lose_nothing(eos, text, tmp_path_factory):
    """Even one that came with a normalizer, padding and truncation; text that spells its special tokens stays text."""
    folder = tmp_path_factory.getbasetemp() / f"pretrained-{len(eos)}"
    if not folder.exists():
        folder.mkdir()
        backend = other(LLAMA3, eos, normalizer=tokenizers.normalizers.NFKC())
        backend.enable_truncation(3)
        backend.enable_padding(length=50)
        backend.add_tokens(["plain added"])
        backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.pretrained(str(folder))
    for given_text in (text, text + eos + "<|user|> plain added"):
        ids = tokenizer.encode(given_text)
        assert tokenizer.decode(ids) == given_text
        assert tokenizer.eos_id not in ids
    assert tokenizer.token_bytes[tokenizer.eos_id] == b""
    assert Tokenizer.from_json(tokenizer.to_json()).fingerprint == tokenizer.fingerprint


def chat() -> tokenizers.Tokenizer:
    """With three tokens that might start or end a text, of which the last is not special."""
    backend = other(GPT2, "</s>")
    backend.add_special_tokens(["<begin>", "<eos>"])
    backend.add_tokens(["<turn>"])
    return backend


B, E, S, T = ({"content": token} for token in ("<begin>", "<eos>", "</s>", "<turn>"))
BEGIN, EOS, TURN = map(chat().token_to_id, ("<begin>", "<eos>", "<turn>"))


@pytest.mark.parametrize(("files", "start", "end"), [
    ({}, "</s>", "</s>"),
    ({"tokenizer_config": dict(bos_token=B, eos_token=E)}, "<begin>", "<eos>"),
    ({"tokenizer_config": dict(bos_token="<begin>", eos_token="<turn>")}, "<begin>", "<turn>"),
    ({"tokenizer_config": dict(bos_token=None, eos_token="<eos>")}, "<eos>", "<eos>"),
    ({"special_tokens_map": dict(bos_token=B, eos_token=S), "tokenizer_config": dict(eos_token=E)}, "<begin>", "<eos>"),
    ({"config": dict(bos_token_id=BEGIN, eos_token_id=EOS), "tokenizer_config": dict(eos_token=T)}, "<begin>", "<eos>"),
    ({"config": dict(eos_token_id=EOS), "generation_config": dict(eos_token_id=[TURN, EOS])}, "<turn>", "<turn>"),
    ({"config": dict(eos_token_id=EOS), "tokenizer_config": dict(bos_token=B)}, "<eos>", "<eos>"),
    ({"config": dict(eos_token_id=EOS), "tokenizer_config": dict(bos_token=B, add_bos_token=True)}, "<begin>", "<eos>"),
    # Defaults of transformers' classes, which are ids of other tokens here, and tokens that are not there.
    ({"config": dict(bos_token_id=7, eos_token_id=9), "tokenizer_config": dict(eos_token=E)}, "<eos>", "<eos>"),
    ({"config": dict(eos_token_id=-1), "generation_config": dict(eos_token_id=10**20)}, "</s>", "</s>"),
    ({"tokenizer_config": dict(bos_token="<no>", eos_token="<no>")}, "</s>", "</s>"),
], ids=str)  # fmt: skip
def test_the_files_beside_it_say_what_starts_and_ends_a_text(tmp_path, files, start, end):
    backend = chat()
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.pretrained(str(tmp_path))
    assert [backend.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id)] == [start, end]
    assert tokenizer.end_ids == {tokenizer.eos_id}
    assert tokenizer.token_bytes[tokenizer.eos_id] == b""
    for token in ("<begin>", "<eos>", "<turn>", "</s>"):  # text does not start or end anything
        ids = tokenizer.encode(f"a {token}")
        assert tokenizer.decode(ids) == f"a {token}"
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    again = Tokenizer.from_json(tokenizer.to_json())
    assert (again.bos_id, again.eos_id, again.fingerprint) == (
        tokenizer.bos_id, tokenizer.eos_id, tokenizer.fingerprint,
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds list, not an object"):
        Tokenizer.pretrained(str(tmp_path))


def test_a_repository_of_the_hub_is_read_as_a_folder_is(tmp_path, monkeypatch):
    """From the cache of earlier downloads, as the hub lays it out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--chat"
    folder = repository / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    chat().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<begin>", eos_token="<eos>")))
    tokenizer = Tokenizer.pretrained("someone/chat")
    assert tokenizer.fingerprint == Tokenizer.pretrained(str(folder)).fingerprint
    assert tokenizer.bos_id == tokenizer.special["<begin>"]


def test_a_character_tokenizer_of_ours_is_taken_back(tmp_path):
    ours = Tokenizer.train_characters(["Ann, 李\n"])
    (tmp_path / "tokenizer.json").write_text(ours.to_json(), encoding="utf-8")
    assert Tokenizer.pretrained(str(tmp_path)).fingerprint == ours.fingerprint


def test_pretrained_tokenizers_that_lose_text_are_refused(tmp_path):
    def refused(backend, message):
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=rf"cannot use tokenizer\.name=.*{message}"):
            Tokenizer.pretrained(str(tmp_path))

    refused(other(GPT2, "[END]"), r"has none of <\|endoftext\|>, .*</s>")
    for strips in ({"lstrip": True}, {"rstrip": True}):
        spaced = other(GPT2)
        spaced.add_tokens(["<a>", tokenizers.AddedToken("<think>", **strips)])
        refused(spaced, "its added token '<think>' takes in the spaces beside it")
        spaced.add_special_tokens([tokenizers.AddedToken("<think>", special=True, **strips)])  # text cannot name it
        assert Tokenizer.adopt(spaced).decode(Tokenizer.adopt(spaced).encode("a <think>  b")) == "a <think>  b"
    refused(other(GPT2, pre_tokenizer=tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)), "it changes text")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "</s>": 1, "##ing": 2, "▁the": 3}, unk_token="[UNK]")
    )
    refused(words, "does not stand for bytes")
    spaced = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1, "b": 2, " ": 3}))
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # drops what it splits at
    refused(spaced, r"it cannot encode every text \(WordLevel error: Missing \[UNK\]")
    spaced.model = tokenizers.models.WordLevel({"</s>": 0, "a": 1, "b": 2, " ": 3, "?": 4}, unk_token="?")
    refused(spaced, "it changes text")
    for wrong, data in ((tmp_path / "none.json", None), (tmp_path / "bad.json", "{}")):
        if data:
            wrong.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"cannot load tokenizer\.name="):
            Tokenizer.pretrained(str(wrong))
