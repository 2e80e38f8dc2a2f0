"""Text to ids and back, without loss, on the `tokenizers` library."""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Regex, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from minitransformer.data.sentencepiece import SPACE, bytes_of, is_sentencepiece, without_prefix

EOS_TOKEN = "<|endoftext|>"  # stands before each document and after the last; its id starts and ends a text
# What others call it; of those that a pretrained tokenizer has, the first special token is taken.
EOS_TOKENS = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
PIECE = 2**14  # characters that are encoded at once; a longer text is cut
PROBE = '  It\'s naïve, 李 said:\r\n\t"🦉"...\n\n 42\u2028\x00\ufeff e\u0301 '  # text that lossy tokenizers change


def _byte_of() -> dict[str, int]:
    """The byte behind each of the 256 printable characters that byte-level BPE writes in its place (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def template(backend: Backend) -> tuple[str | None, str | None]:
    """The special tokens that a tokenizer.json's post-processor puts before and after a text."""
    if backend.post_processor is None:
        return None, None
    state = json.loads(backend.post_processor.__getstate__())
    for processor in state.get("processors", [state]):
        if processor["type"] == "TemplateProcessing":
            pieces = [next(iter(piece.items())) for piece in processor["single"]]
            text = [kind for kind, _ in pieces].index("Sequence")
            before, after = ([piece["id"] for _, piece in part] for part in (pieces[:text], pieces[text + 1 :]))
            return (before[0] if before else None), (after[0] if after else None)
    return None, None


def set_template(backend: Backend, start: str, end: str | None = None) -> None:
    """Let the post-processor put these tokens around a text."""
    pieces = [start, "$A", *([] if end is None else [end])]
    ids = [(token, backend.token_to_id(token)) for token in {start, end} - {None}]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def special_tokens(backend: Backend) -> dict[str, int]:
    """The special tokens, which stand for no text, and their ids."""
    return {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def document_tokens(backend: Backend) -> tuple[str | None, str | None]:
    """The tokens that start and end a document: the post-processor's, or the first of EOS_TOKENS that is there.

    Special tokens go before others: Gemma's </s> is a tag of HTML.
    """
    start, end = template(backend)
    special = special_tokens(backend)
    known = [name for name in EOS_TOKENS if backend.token_to_id(name) is not None]
    known = [name for name in known if name in special] or known
    end = end or next(iter(known), None)
    return start or end, end


# The files of a Hugging Face folder that name what starts and ends a text. Of two, the later counts.
BY_ID, BY_NAME = ("config.json", "generation_config.json"), ("special_tokens_map.json", "tokenizer_config.json")


def named_tokens(folder: Path, backend: Backend) -> tuple[str | None, list[str]]:
    """The token that starts a text and all that end one, as the files of a Hugging Face folder say.

    Ids count before names, because `transformers` generates by them. A start token that tokenizer_config.json lets it
    put before every text (`add_bos_token`) counts before both.

    Raises:
        ValueError: one of these files is no JSON object.
    """
    ids, names = _merged(folder, BY_ID), _merged(folder, BY_NAME)
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}

    def tokens(value) -> list[str]:
        """Of an id, a list of ids, a name, or an object that holds a name."""
        values = value if isinstance(value, list) else [value]
        found = [v.get("content") if isinstance(v, dict) else added.get(v, v) for v in values]
        return [name for name in found if isinstance(name, str) and backend.token_to_id(name) is not None]

    starts, ends = tokens(ids.get("bos_token_id")), tokens(ids.get("eos_token_id"))
    if names.get("add_bos_token") or not (starts or ends):
        starts = tokens(names.get("bos_token")) or starts
    return next(iter(starts), None), ends or tokens(names.get("eos_token"))


def _merged(folder: Path, names: Iterable[str]) -> dict:
    found: dict = {}
    for name in names:
        if (folder / name).is_file():
            found |= json_object(folder / name)
    return found


def json_object(path: Path) -> dict:
    """What a file holds; raises ValueError when that is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not an object")
    return found


def _of_the_hub(name: str) -> Path:
    """The folder that holds the files of a repository's tokenizer."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["tokenizer.json", *BY_ID, *BY_NAME]))


class Tokenizer:
    """Ids of text; `decode(encode(text)) == text` for every text that can be encoded.

    eos_id: the id of the token that ends documents. No text encodes to it.
    bos_id: the id of the token that starts documents. It is the one that the post-processor of tokenizer.json puts
        before a text, such as Llama 3's <|begin_of_text|>; otherwise it is eos_id.
    end_ids: all ids that end a text in generation, eos_id among them. A chat model has several.
    special: the special tokens by name. No text encodes to one.
    token_bytes: the bytes that each id stands for, none for special tokens.
    prefix: what a tokenizer of SentencePiece's kind reads before a text, a space, or nothing.
    """

    def __init__(self, backend: Backend, end_ids: Iterable[int] = ()):
        self.prefix, self._json, self._space = "", None, None
        if sentencepiece := is_sentencepiece(backend):
            self._json = backend.to_str()
            backend, self.prefix = without_prefix(backend)
            self._space = [backend.token_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        backend.encode_special_tokens = True  # text that looks like EOS stays text
        self.backend = backend
        vocabulary = backend.get_vocab()
        bos, eos = document_tokens(backend)
        if bos is None or eos is None:
            raise ValueError(f"the tokenizer has none of {', '.join(EOS_TOKENS)}, which start and end documents")
        self.bos_id, self.eos_id = vocabulary[bos], vocabulary[eos]
        self.end_ids = frozenset({self.eos_id, *end_ids})
        self.special = special_tokens(backend)
        self.characters = set(vocabulary) - set(self.special) if isinstance(backend.model, WordLevel) else None
        added = backend.get_added_tokens_decoder()
        byte_of = _byte_of()
        self.token_bytes = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            if token in self.special:
                continue
            if sentencepiece:
                self.token_bytes[i] = bytes_of(token)
            elif i in added or self.characters:
                self.token_bytes[i] = token.encode()
            elif set(token) <= byte_of.keys():
                self.token_bytes[i] = bytes(byte_of[c] for c in token)
            else:
                raise ValueError(f"its token {token!r} does not stand for bytes; only tokenizers of bytes lose no text")

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def fingerprint(self) -> str:
        """Names the vocabulary: equal for tokenizers that give equal ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    # Making one ------------------------------------------------------------------------------------------------

    @classmethod
    def pretrained(cls, name: str) -> "Tokenizer":
        """A tokenizer.json that can spell every byte: a file, a folder that holds one, or a repository of the hub.

        Of a folder or repository, `named_tokens` says what starts and ends a text.

        Raises:
            ValueError: there is none, or it would lose some text.
        """
        path = Path(name)
        try:
            folder = path if path.exists() else _of_the_hub(name)
            file = folder / "tokenizer.json" if folder.is_dir() else folder
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            found = "" if path.exists() else f", nor is there a file {path}"
            raise ValueError(f"cannot load tokenizer.name={name}: {' '.join(str(error).split())}{found}") from None
        try:
            start, ends = named_tokens(folder, backend) if folder.is_dir() else (None, [])
            return cls.adopt(backend, start, ends[:1])  # a new model learns one
        except ValueError as error:
            raise ValueError(f"cannot use tokenizer.name={name}: {error}") from None

    @classmethod
    def adopt(cls, backend: Backend, start: str | None = None, ends: Sequence[str] = ()) -> "Tokenizer":
        """A tokenizer of others, made lossless.

        start: the token that starts a document, where its own post-processor puts none before a text.
        ends: the tokens that end a text, first the one that ends documents (none: found by name, see EOS_TOKENS).

        Raises:
            ValueError: it would lose some text, or no token ends documents.
        """
        if not is_sentencepiece(backend):
            backend.normalizer = None  # so that every text comes back as it was
        backend.no_padding()
        backend.no_truncation()
        found = document_tokens(backend)
        end = ends[0] if ends else found[1]
        around = template(backend)[0] or start or end, end
        if end is not None and around != found:
            set_template(backend, *around)
        # No text may encode to these.
        backend.add_special_tokens(sorted({*around, *ends} - {None} - set(special_tokens(backend))))
        tokenizer = cls(backend, map(backend.token_to_id, ends))
        tokenizer._check_lossless()
        return tokenizer

    def _check_lossless(self) -> None:
        """Raise ValueError, saying why, when some text would not come back."""
        lossy = "it changes text; only tokenizers of bytes lose none"
        probes = [(PROBE, lossy), (PROBE.strip(), lossy)]
        if self.characters is not None:
            probes = [("".join(sorted(self.characters)), lossy)]
        for token in self.backend.get_added_tokens_decoder().values():
            if not token.special:
                what = "takes in the spaces beside it" if token.lstrip or token.rstrip else "changes text"
                probes.append((f"a {token.content}  b{token.content}", f"its added token {token.content!r} {what}"))
        for probe, why in probes:
            try:
                kept = self.decode(self.encode(probe)) == probe
            except Exception as error:  # tokenizers raises bare Exception
                raise ValueError(f"it cannot encode every text ({error}); only tokenizers of bytes can") from None
            if not kept:
                raise ValueError(why)

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), at most `vocab_size` ids with EOS.

        Raises:
            ValueError: `vocab_size` cannot hold the 256 bytes and the EOS token.
        """
        if vocab_size < 257:
            raise ValueError(f"tokenizer.vocab_size={vocab_size} is too small; 256 bytes and EOS need 257")
        backend = Backend(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """One id a byte of UTF-8, and EOS:"""
        return cls.train_bpe([], vocab_size=257)

    @classmethod
    def train_characters(cls, texts: Iterable[str]) -> "Tokenizer":
        """One id a character of `texts`, in code-point order after EOS. Others are refused by `encode`."""
        found = set()
        for text in texts:
            found.update(text)
        backend = Backend(WordLevel({EOS_TOKEN: 0} | {c: i for i, c in enumerate(sorted(found), start=1)}))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.add_special_tokens([EOS_TOKEN])
        return cls(backend)

    # Storing it ------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The tokenizer.json of the `tokenizers` library."""
        return self._json or self.backend.to_str()

    @classmethod
    def from_json(cls, text: str, end_ids: Iterable[int] = ()) -> "Tokenizer":
        """Raises ValueError when `text` is not a tokenizer."""
        try:
            backend = Backend.from_str(text)
        except Exception as error:
            raise ValueError(f"not a tokenizer: {error}") from None
        return cls(backend, end_ids)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    # Using it --------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without BOS and EOS.

        Raises:
            ValueError: the text cannot be written as UTF-8, or has characters that a character tokenizer does not know
                (they are named).
        """
        self._check(text)
        return self._encode(self.prefix + text) if text else []

    def encode_document(self, text: str, end: bool = False) -> list[int]:
        """Ids of a text that is read from its start, such as a prompt: the start token, those of the text, and the
        EOS if the text ends there.

        Raises:
            ValueError: as `encode`.
        """
        return [self.bos_id, *self.encode(text), *([self.eos_id] if end else [])]

    def _encode(self, text: str) -> list[int]:
        """Ids of any stretch of text."""
        if self._space is None or SPACE not in text:
            return self.backend.encode(text, add_special_tokens=False).ids
        ids: list[int] = []  # a ▁ of the text itself is spelled in bytes, or it would come back as a space
        for number, part in enumerate(text.split(SPACE)):
            ids += (self._space if number else []) + self._encode(part)
        return ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each stretch of text, (n,) each, on all cores. The `prefix` belongs before the first of a document.

        Raises:
            ValueError: as `encode`.
        """
        if self._table is None:
            found = [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
            if self._space is not None:
                found = [self._encode(t) if SPACE in t else ids for t, ids in zip(texts, found, strict=True)]
            return [np.asarray(ids, dtype=np.uint32) for ids in found]
        # One id a unit: looking them up at once is faster than any tokenizer.
        if self.characters is None:
            lengths, units = [len(text.encode()) for text in texts], np.frombuffer("".join(texts).encode(), np.uint8)
        else:
            lengths, units = list(map(len, texts)), np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
            if len(units) and (units.max() >= len(self._table) or (self._table[units] < 0).any()):
                self._check("".join(texts))
        ids = self._table[units].astype(np.uint32)
        return np.split(ids, np.cumsum(lengths)[:-1]) if texts else []

    @cached_property
    def _table(self) -> np.ndarray | None:
        """The id of each byte, or of each character (-1: none); None where tokens are longer than these."""
        if self.characters is not None:
            table = np.full(max(map(ord, self.characters), default=0) + 1, -1, np.int64)
            for character in self.characters:
                table[ord(character)] = self.backend.token_to_id(character)
            return table
        if sorted(self.token_bytes) != [b"", *(bytes([byte]) for byte in range(256))]:
            return None
        return np.array([self.token_bytes.index(bytes([byte])) for byte in range(256)])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids from a text's start; special tokens vanish, bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        return b"".join(map(self._bytes, ids)).decode("utf-8", "replace").removeprefix(self.prefix)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come, in whole characters; joined it equals `decode` of all."""
        decoder, prefix = codecs.getincrementaldecoder("utf-8")("replace"), self.prefix
        for i in ids:
            if text := decoder.decode(self._bytes(i)):
                text, prefix = text.removeprefix(prefix), ""
                if text:
                    yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def _bytes(self, i: int) -> bytes:
        if not 0 <= i < len(self.token_bytes):
            raise ValueError(f"token id {i} is outside the vocabulary of {len(self.token_bytes)}")
        return self.token_bytes[i]

    def _check(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # what a command line makes of bytes that are not UTF-8
            raise ValueError(f"the text is not UTF-8 at character {error.start}: {text[:20]!r}") from None
        if self.characters and (unknown := sorted(set(text) - self.characters)):
            shown = ", ".join(repr(c) for c in unknown[:10])
            raise ValueError(f"the character tokenizer does not know {shown}; it knows those of its training text")


def cut(text: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Pieces of a text that encode to the same ids as the whole: cut before a space, or between letter and line end.

    There every byte-level pattern cuts too (GPT-2's and its successors'). Where no such place is found within `size`
    characters, as in scripts without spaces, a piece ends after `size` of them, and a token may differ there.
    """
    rest = ""
    for piece in text:
        rest += piece
        start = 0
        while len(rest) - start > 2 * size:
            end = start + size
            place = next((m.start() + 1 for m in _SAFE.finditer(rest, end, end + size)), end)
            yield rest[start:place]
            start = place
        rest = rest[start:]
    if rest:
        yield rest


_SAFE = re.compile(r"\S(?= )|[^\W_](?=[\r\n])")


def printable(text: str) -> str:
    """The text with control characters shown as escapes: a model may write any of them."""
    return "".join(c if c.isprintable() else " " * 4 if c == "\t" else ascii(c)[1:-1] for c in text)
