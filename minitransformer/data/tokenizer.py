"""Text to ids and back, without loss, on the `tokenizers` library."""

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Regex, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

BOUNDARY = "<|endoftext|>"  # stands before each document and after the last; its id starts and ends a text
# What others call it; the first that a pretrained tokenizer has is taken.
BOUNDARIES = (BOUNDARY, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
PIECE = 2**14  # characters that are encoded at once; a longer text is cut
PROBE = '  It\'s naïve, 李 said:\r\n\t"🦉"...\n\n 42\u2028\x00\ufeff e\u0301 '  # text that lossy tokenizers change


def _byte_of() -> dict[str, int]:
    """The byte behind each of the 256 printable characters that byte-level BPE writes in its place (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class Tokenizer:
    """Ids of text; `decode(encode(text)) == text` for every text that can be encoded.

    boundary: the id of the token that starts and ends documents; no text encodes to it.
    token_bytes: the bytes that each id stands for, none for the boundary.
    """

    def __init__(self, backend: Backend):
        backend.encode_special_tokens = True  # text that looks like the boundary token stays text
        self.backend = backend
        vocabulary = backend.get_vocab()
        boundary = next((name for name in BOUNDARIES if name in vocabulary), None)
        if boundary is None:
            raise ValueError(f"the tokenizer has none of {', '.join(BOUNDARIES)}, which start and end documents")
        self.boundary = vocabulary[boundary]
        self.characters = set(vocabulary) - {boundary} if isinstance(backend.model, WordLevel) else None
        added = backend.get_added_tokens_decoder()
        byte_of = _byte_of()
        self.token_bytes = [b""] * (max(vocabulary.values()) + 1)
        for token, i in vocabulary.items():
            if i in added or self.characters:
                self.token_bytes[i] = b"" if i in added and added[i].special else token.encode()
            elif set(token) <= byte_of.keys():
                self.token_bytes[i] = bytes(byte_of[c] for c in token)
            else:
                raise ValueError(
                    f"its token {token!r} does not stand for bytes; only byte-level tokenizers lose no text"
                )

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
        """A byte-level tokenizer.json: a file, a folder that holds one, or one of the hub.

        Raises:
            ValueError: there is none, or it would lose some text.
        """
        path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
        try:
            backend = Backend.from_file(str(path)) if path.exists() else Backend.from_pretrained(name)
        except Exception as error:  # tokenizers raises bare Exception
            found = "" if path.exists() else f", nor is there a file {path}"
            raise ValueError(f"cannot load tokenizer.name={name}: {' '.join(str(error).split())}{found}") from None
        backend.normalizer = None  # so that every text comes back as it was
        backend.no_padding()
        backend.no_truncation()
        try:
            tokenizer = cls(backend)
            if any(tokenizer.decode(tokenizer.encode(probe)) != probe for probe in (PROBE, PROBE.strip())):
                raise ValueError("it changes text; only byte-level tokenizers lose none")
        except ValueError as error:
            raise ValueError(f"cannot use tokenizer.name={name}: {error}") from None
        return tokenizer

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), at most `vocab_size` ids with the boundary.

        Raises:
            ValueError: `vocab_size` cannot hold the 256 bytes and the boundary token.
        """
        if vocab_size < 257:
            raise ValueError(f"tokenizer.vocab_size={vocab_size} is too small; 256 bytes and the boundary need 257")
        backend = Backend(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOUNDARY],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """One id a byte of UTF-8, and the boundary: 257 ids for any text."""
        return cls.train_bpe([], vocab_size=257)

    @classmethod
    def train_characters(cls, texts: Iterable[str]) -> "Tokenizer":
        """One id a character of `texts`, in code-point order after the boundary. Others are refused by `encode`."""
        found = set()
        for text in texts:
            found.update(text)
        backend = Backend(WordLevel({BOUNDARY: 0} | {c: i for i, c in enumerate(sorted(found), start=1)}))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.add_special_tokens([BOUNDARY])
        return cls(backend)

    # Storing it ------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The tokenizer.json of the `tokenizers` library."""
        return self.backend.to_str()

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Raises ValueError when `text` is not a tokenizer."""
        try:
            backend = Backend.from_str(text)
        except Exception as error:
            raise ValueError(f"not a tokenizer: {error}") from None
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    # Using it --------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without boundary.

        Raises:
            ValueError: the text cannot be written as UTF-8, or has characters that a character tokenizer does not know
                (they are named).
        """
        self._check(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, (n,) each, on all cores.

        Raises:
            ValueError: as `encode`.
        """
        if self._table is None:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]
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
        """The text of ids; boundaries vanish, bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        return b"".join(map(self._bytes, ids)).decode("utf-8", "replace")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids as they come, in whole characters; joined it equals `decode` of all."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            if text := decoder.decode(self._bytes(i)):
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
