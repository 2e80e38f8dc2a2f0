"""Tokenizers of SentencePiece's kind in a tokenizer.json: spaces are written ▁, and what has no token in bytes.

Such are those of Llama 1 and 2, Mistral and Gemma (Kudo and Richardson 2018).
"""

import json
import re

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

SPACE = "▁"
WRITES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def is_sentencepiece(backend: Backend) -> bool:
    return isinstance(backend.model, BPE) and backend.model.byte_fallback


def without_prefix(backend: Backend) -> tuple[Backend, str]:
    """The tokenizer without what puts a space before a text, and that space (empty if it puts none).

    Raises:
        ValueError: it does more to a text than to write its spaces as ▁, or has not a token for every byte.
    """
    state = json.loads(backend.to_str())
    normalizer, splitter = state["normalizer"] or {}, state["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    prepend = {"type": "Prepend", "prepend": SPACE}
    if other := [step["type"] for step in steps if step not in (prepend, WRITES_SPACES)]:
        raise ValueError(f"its normalizer {other[0]} changes text")
    metaspace = splitter.get("type") == "Metaspace"
    # Gemma's splits at spaces, of which none are left.
    if splitter and not metaspace and splitter.get("pattern") != {"String": " "}:
        raise ValueError(
            f"its pre-tokenizer {splitter.get('type')} is not known for a tokenizer of SentencePiece's kind"
        )
    if not metaspace and WRITES_SPACES not in steps:
        raise ValueError(f"it does not write spaces as {SPACE}")
    if any(backend.token_to_id(f"<0x{byte:02X}>") is None for byte in range(256)):
        raise ValueError("it has not a token for every byte")
    prefix = prepend in steps or splitter.get("prepend_scheme", "never") != "never"
    state["normalizer"] = WRITES_SPACES
    state["pre_tokenizer"] = splitter | {"prepend_scheme": "never"} if splitter.get("split") else None
    return Backend.from_str(json.dumps(state)), " " if prefix else ""


def bytes_of(token: str) -> bytes:
    """What a token stands for."""
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()
