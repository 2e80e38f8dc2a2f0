"""How well a model predicts documents: every token scored once, whatever the windows and the batches."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minitransformer.data.packing import IGNORE, Documents, Rows, TokenStream, cut, fill, slide
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.model.config import RotaryConfig
from minitransformer.model.cost import LEAST_ROWS, LOGITS
from minitransformer.model.transformer import Transformer
from minitransformer.words import perplexity


@dataclass
class Evaluation:
    """nats: of all targets together. tokens: targets, the end of each document among them. n_bytes: of their text."""

    documents: int
    tokens: int
    n_bytes: int
    nats: float

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """None where no target stands for any text."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else None


def score_targets(model: Transformer, x: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of features x (N, d_model) and targets (N,): nats (N,) in fp32, and is each target the likeliest token (N,).

    An embedding may be padded past the tokenizer: ids from `vocab_size` on are never predicted.
    """
    nats, likeliest = [], []
    size = max(LEAST_ROWS, LOGITS // vocab_size)
    for features, target in zip(x.split(size), targets.split(size), strict=True):
        logits = model.logits(features)[:, :vocab_size].float()
        nats.append(F.cross_entropy(logits, target, reduction="none"))
        likeliest.append(logits.argmax(-1) == target)
    return torch.cat(nats), torch.cat(likeliest)


@torch.inference_mode()
def score_rows(
    model: Transformer, vocab_size: int, stream: TokenStream, rows: Rows, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Read rows of one piece each, the longest first.

    Yields for each batch the numbers of its rows (B,), and of every place which count (B, T), their nats in float64
    and whether the target is the likeliest token; 0 where they do not count.
    """
    device = model.embedding.weight.device
    order = np.argsort(-rows.length, kind="stable")
    for first in range(0, len(order), batch_size):
        index = order[first : first + batch_size]
        arrays = fill(stream, rows, index, int(rows.length[index[0]]))
        tokens, positions, targets = (torch.from_numpy(array).to(device) for array in arrays)
        counted = targets != IGNORE
        found = score_targets(model, model.hidden_states(tokens, positions)[0][counted], targets[counted], vocab_size)
        where = counted.cpu().numpy()
        nats, likeliest = np.zeros(where.shape), np.zeros(where.shape, bool)
        nats[where], likeliest[where] = (values.cpu().numpy() for values in found)
        yield index, where, nats, likeliest


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    stream: TokenStream,
    documents: Documents,
    length: int,
    stride: int,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Score every token of the documents of a token stream (see `packing`) once, in windows of `length` tokens.

    The sum is in float64 over losses in fp32, so batches do not show in it. `progress` is told of tokens as they are
    scored.
    """
    rows = slide(documents, length, stride)
    nats, tokens = 0.0, 0
    for _, counted, found, _ in score_rows(model, tokenizer.vocab_size, stream, rows, batch_size):
        nats += float(found.sum())
        tokens += (new := int(counted.sum()))
        progress(new)
    n_bytes = np.array(list(map(len, tokenizer.token_bytes)))
    own = sum(int(n_bytes[stream.ids[o + 1 + p : o + 1 + n]].sum()) for o, n, p in zip(
        documents.offset.tolist(), documents.length.tolist(), documents.prefix.tolist(), strict=True
    ))  # fmt: skip
    return Evaluation(len(documents), tokens, own, nats)


def loss_by_position(
    model: Transformer,
    tokenizer: Tokenizer,
    stream: TokenStream,
    documents: Documents,
    length: int,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean nats of the targets with 0, 1, ... length - 1 tokens between them and the first one, and their number.

    Documents are cut into stretches of `length` tokens and each is read from position 0, so every position is measured
    on the same stretches; shorter rests are left out.

    Raises:
        ValueError: no document is as long.
    """
    rows = cut(documents, length)
    whole = rows.length == length
    if not whole.any():
        longest = int(documents.length.max())
        raise ValueError(f"length={length}: the longest document has {longest + 1} tokens, its end among them")
    rows = Rows(rows.start[whole], rows.length[whole], rows.ignored[whole], np.arange(whole.sum() + 1))
    nats, tokens = np.zeros(length), np.zeros(length, np.int64)
    for _, counted, found, _ in score_rows(model, tokenizer.vocab_size, stream, rows, batch_size):
        nats += found.sum(0)
        tokens += counted.sum(0)
        progress(int(counted.sum()))
    return nats / np.maximum(tokens, 1), tokens


def lengthened(model: Transformer, length: int, scaling: str | None = None) -> Transformer:
    """The same weights, to be read up to `length` tokens; rotary positions scaled by how much longer that is.

    scaling: none | linear | ntk | yarn | llama3 (None: as the model was trained).

    Raises:
        ValueError: its positions have no meaning there.
    """
    config = model.config
    trained, position = config.max_seq_len, config.position
    if scaling is not None and position != "rotary":
        raise ValueError(f"scaling={scaling} is for rotary positions; the model has model.position={position}")
    if length <= trained and scaling is None:
        return model
    if scaling not in (None, "none") and length <= trained:
        raise ValueError(
            f"scaling={scaling} is for more tokens than the model's max_seq_len={trained}; set length, as length=4x"
        )
    if position == "learned" and length > trained:
        raise ValueError(
            f"length={length}: the model learned max_seq_len={trained} positions (model.position=learned) and has none "
            f"beyond; at most {trained}"
        )
    rotary = config.rotary
    if scaling is not None:
        factor = max(1.0, length / trained) if scaling != "none" else 1.0
        original = trained if scaling in ("yarn", "llama3") else None
        rotary = RotaryConfig(rotary.base, rotary.fraction, scaling, factor, original)
    elif rotary.scaling in ("yarn", "llama3") and rotary.original_length is None:
        rotary = replace(rotary, original_length=round(trained / rotary.factor))
    longer = Transformer(replace(config, max_seq_len=max(length, trained), rotary=rotary))
    longer.load_state_dict(model.state_dict())
    return longer.to(model.embedding.weight.device).eval()
