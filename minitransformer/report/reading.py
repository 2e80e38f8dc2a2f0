"""How a model reads a little held-out text: the loss of each token, and where its heads look."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minitransformer.data.documents import Document
from minitransformer.data.packing import IGNORE, Documents, TokenStream, fill, pack
from minitransformer.data.store import token_stream
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.lab.page import visible
from minitransformer.lab.trace import head_measures
from minitransformer.model.transformer import Transformer

ATTENDED = 20  # tokens of text under the attention maps
MAPS = 6
ROWS = 8  # that are read at once


@dataclass
class Piece:
    """Some text and its loss: a token, or the tokens whose bytes make up one character.

    nats: None where no loss is taken. guess: the token that was likeliest instead, and its probability.
    """

    text: str
    nats: float | None
    guess: str = ""
    probability: float = 0.0


@dataclass
class Map:
    """The weights (n, n) of one head, rows are queries; and their mean on some places, see `head_measures`."""

    layer: int
    head: int
    weights: Tensor
    means: dict[str, float]


@torch.inference_mode()
def read(model: Transformer, tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> list[list[Piece]]:
    """The pieces of each (prefix, text), read as validation reads them: cut at `max_seq_len`, no loss on the prefix.

    Raises:
        FloatingPointError: the model has come to numbers that are none.
    """
    stream, documents = _laid_out(tokenizer, texts)
    size, length = len(stream.ids), model.config.max_seq_len
    rows = pack(documents, length, "sequential")
    places = TokenStream(np.arange(size), eos_id=-1, bos_id=-1)  # where in the stream each id stands
    nats, likeliest, probability = np.full(size, np.nan), np.zeros(size, int), np.zeros(size)
    for start in range(0, len(rows), ROWS):
        index = np.arange(start, min(start + ROWS, len(rows)))
        tokens, positions, targets = map(torch.from_numpy, fill(stream, rows, index, length))
        at = fill(places, rows, index, length)[2]
        taken = targets != IGNORE
        features = model.hidden_states(tokens, positions)[0][taken]  # (n, d_model)
        log_probs = model.logits(features)[:, : tokenizer.vocab_size].float().log_softmax(-1)  # (n, V)
        if not log_probs.isfinite().all():
            raise FloatingPointError("The model's outputs on held-out text are not finite.")
        best, guess = log_probs.max(-1)
        at = at[taken.numpy()]
        nats[at] = -log_probs.gather(-1, targets[taken][:, None])[:, 0].numpy()
        likeliest[at], probability[at] = guess.numpy(), best.exp().numpy()
    inside = [slice(o + 1, o + 1 + n) for o, n in zip(documents.offset, documents.length, strict=True)]
    return [list(_pieces(tokenizer, *(x[part] for x in (stream.ids, nats, likeliest, probability)))) for part in inside]


def _laid_out(tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> tuple[TokenStream, Documents]:
    return token_stream((Document([text], prefix) for prefix, text in texts), tokenizer)


def _pieces(tokenizer: Tokenizer, ids, nats, likeliest, probability) -> Iterator[Piece]:
    """Whole characters: the tokens of one share a piece and add their losses."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    loss, first = 0.0, True
    for i, n, guess, p in zip(ids.tolist(), nats.tolist(), likeliest.tolist(), probability.tolist(), strict=True):
        text = decoder.decode(tokenizer.token_bytes[i])
        loss += n
        if text:
            alone = first and not np.isnan(n)
            yield Piece(text, None if np.isnan(loss) else loss, shown(tokenizer, guess) if alone else "", p)
            loss, first = 0.0, True
        else:
            first = False


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token on one line: spaces, ends of lines and lone bytes can be seen."""
    if token == tokenizer.eos_id:
        return "⟨end⟩"
    return visible(tokenizer.token_bytes[token])


@torch.inference_mode()
def attention(model: Transformer, tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> tuple[list[str], list[Map]]:
    """The first tokens of the longest text, and the maps of `MAPS` heads over them: the most focused of each layer.

    Layers are taken evenly over the depth, from each the heads whose weights have the lowest entropy.
    """
    stream, documents = _laid_out(tokenizer, texts)
    longest = documents.length.argmax()
    n = min(ATTENDED, model.config.max_seq_len, int(documents.length[longest]) + 1)
    tokens = torch.from_numpy(stream.inputs(documents.offset[longest] + np.arange(n)))
    weights = torch.stack(model(tokens[None], return_attention=True)[1])[:, 0].float()  # (L, H, n, n)
    n_layers, n_heads = weights.shape[:2]
    found = head_measures(weights, tokens)  # (L, H) each
    layers = np.unique(np.linspace(0, n_layers - 1, min(n_layers, MAPS // 2)).round().astype(int)).tolist()
    each = min(n_heads, MAPS // len(layers))
    chosen = [(layer, head) for layer in layers for head in sorted(found["entropy"][layer].argsort()[:each].tolist())]
    names = ["⟨start⟩", *(shown(tokenizer, i) for i in tokens[1:].tolist())]
    shares = {"before": "previous", "itself": "itself", "first": "first"}
    return names, [
        Map(layer, head, weights[layer, head], {word: found[name][layer, head].item() for word, name in shares.items()})
        for layer, head in chosen
    ]
