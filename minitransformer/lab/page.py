"""From a model and a prompt to one HTML file that needs nothing else: no network, no server, no library."""

import base64
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from importlib.resources import files

import torch
from torch import Tensor

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.decode import fitting
from minitransformer.lab import trace as look
from minitransformer.model.attention import scaled_dot_product_attention
from minitransformer.model.config import BIASED_POSITIONS, ModelConfig
from minitransformer.model.cost import flops_per_token
from minitransformer.model.transformer import Transformer, check_head

MAX_BYTES = 32 * 2**20  # of a page's numbers; browsers are slow with more
BUDGET = 4e12  # floating-point operations for integrated gradients: about half a minute of one CPU core
SHOWN = 5  # likely next tokens listed at each place

POSITION_NOTES = {
    "none": "This model has no positional encoding: only the mask tells it the order.",
    "sinusoidal": "Positions were added to the embeddings as sines and cosines, before the first layer.",
    "learned": "Positions were added to the embeddings as learned vectors, before the first layer.",
    "rotary": "Queries and keys are shown after rotary positions have turned them.",
    "alibi": "Positions act on the scores: ALiBi lowers them with distance.",
    "t5": "Positions act on the scores: T5 adds a learned number for each distance.",
    "shaw": "Positions act on scores and values: each distance has learned vectors that join keys and values (Shaw).",
    "transformer_xl": "Positions act on the scores; queries are shown with Transformer-XL's vector u added.",
}
MASK_NOTES = {
    "full": "Each token sees itself and all before it.",
    "window": "Each token sees the {window} newest tokens, itself among them.",
    "bigbird": "Each token sees the {window} newest tokens, the first {global_tokens}, and random blocks (BigBird).",
    "strided": "Each token sees the {stride} newest tokens, and every {stride}th before them.",
    "fixed": "Each token sees its own block of {stride}, and the last {summary} places of every block.",
}
LINEAR_NOTE = (
    "Linear attention ({kind}) has no softmax and nothing to scale: queries and keys are shown after its feature map, "
    "and each weight is their product divided by the sum of all products."
)


# Text and numbers ------------------------------------------------------------------------------------------------


def visible(raw: bytes) -> str:
    """A token's bytes so that all of them can be seen: blanks, control characters, pieces of a character."""
    text = raw.decode("utf-8", "surrogateescape")
    return ("◌" if text and unicodedata.combining(text[0]) else "") + "".join(map(_visible, text))


def _visible(c: str) -> str:
    code = ord(c)
    if c in " \n\t":
        return {" ": "␣", "\n": "↵", "\t": "⇥"}[c]
    if code < 0x20 or 0xDC80 <= code < 0xDD00:  # a control character, or a byte that is no whole character
        return f"⟨{code & 0xFF:02X}⟩"
    return c if c.isprintable() else f"⟨U+{code:04X}⟩"


def packed(x: Tensor) -> dict:
    """A tensor as JSON holds it: its shape, and fp32 in base64."""
    return {"shape": list(x.shape), "data": base64.b64encode(x.detach().cpu().numpy().astype("<f4").tobytes()).decode()}


def page(exhibits: list[dict], served: bool = False, error: str = "") -> str:
    """The file: template, style, script and data in one. Nothing in the data can end its place and become HTML.

    served: with a field for another prompt. error: a line to show above.
    """
    data = json.dumps({"exhibits": exhibits, "served": served, "error": error}).replace("<", "\\u003c")
    here = files("minitransformer.lab")
    parts = {name: here.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "lab.css", "lab.js")}
    return re.sub(r"/\* (lab\.css|lab\.js|data) \*/", lambda m: (parts | {"data": data})[m[1]], parts["page.html"])


# Exhibits --------------------------------------------------------------------------------------------------------


def exhibit(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    name: str,
    layer: int = 0,
    head: int = 0,
    explain: int = 3,
    explain_places: int | None = None,
    track: Callable[[range], Iterable[int]] = iter,
) -> dict:
    """All that the page shows of a model reading a prompt. The settings are those of `LabConfig`.

    track: passes on the places whose next tokens are explained, which takes longest.

    Raises:
        ValueError: the prompt is empty, longer than the model or the page holds, or there is no such layer or head.
    """
    config = model.config
    check_head(config, layer, head)
    if not prompt:
        raise ValueError("prompt is empty; give a text to look at, such as prompt='time flies like an arrow'")
    ids = tokenizer.encode_document(prompt)
    fitting(model, len(ids), max_new_tokens=1)
    check_size(config, len(ids), explain)
    tokens = torch.tensor(ids, device=model.embedding.weight.device)
    seen = look.trace(model, tokens)
    lens = look.logit_lens(model, seen.streams)[..., : tokenizer.vocab_size].float().softmax(-1)
    places = affordable(config, len(ids), explain) if explain_places is None else explain_places
    first = max(0, len(ids) - places) if explain else len(ids)
    explained = [{"targets": []}] * first
    explained += [
        attributions(model, tokens[: i + 1], lens[-1, i], ids[i + 1 : i + 2], explain)
        for i in track(range(first, len(ids)))
    ]
    top = lens.topk(min(SHOWN, lens.shape[-1]))
    named = {*ids, *top.indices.flatten().tolist(), *(t for found in explained for t in found["targets"])}
    came = lens[:, :-1].gather(-1, tokens[1:].expand(len(lens), -1)[..., None])[..., 0]
    return {
        "name": name,
        "about": about(model),
        "tokens": ["⟨start⟩", *(visible(tokenizer.token_bytes[i]) for i in ids[1:])],
        "ids": ids,
        "first": {"layer": layer, "head": head, "query": len(ids) - 1},
        "prompt": prompt,
        "vocabulary": {i: visible(tokenizer.token_bytes[i]) if i != tokenizer.eos_id else "⟨end⟩" for i in named},
        "heads": config.n_heads,
        "kvHeads": config.kv_heads,
        "linear": config.attention.kind != "softmax",
        "softCap": config.attention.softcap,
        "notes": {"project": project_note(config), "masks": [mask_note(config, i) for i in range(config.n_layers)]},
        "layers": [shown_layer(one) for one in seen.layers],
        "rollout": packed(look.rollout(seen.weights)),
        "measures": measures(model, tokenizer, seen),
        "lens": {"ids": top.indices.tolist(), "p": packed(top.values), "came": packed(came)},
        "explained": explained,
    }


def attributions(model: Transformer, tokens: Tensor, probabilities: Tensor, came: list[int], explain: int) -> dict:
    """Integrated gradients of the `explain` likeliest next tokens after `tokens`, and of the one that came, if any."""
    targets = probabilities.topk(min(explain, len(probabilities))).indices.tolist()
    targets = list(dict.fromkeys(targets + came))
    found, at, start = look.integrated_gradients(
        model, tokens, torch.tensor(targets, device=tokens.device), baseline=int(tokens[0])
    )
    p = probabilities[targets]
    return {"targets": targets, "values": packed(found), "p": packed(p), "at": packed(at), "start": packed(start)}


def affordable(config: ModelConfig, n: int, explain: int) -> int:
    """At how many of the last of n places `explain` tokens and one more get integrated gradients within BUDGET."""
    spent = 0.0
    for count, length in enumerate(range(n, 0, -1)):
        # Backward to the embeddings alone costs as much as forward.
        spent += 2 * flops_per_token(config, length) * length * (explain + 1) * look.N_STEPS
        if spent > BUDGET:
            return max(count, 1)
    return n


def measures(model: Transformer, tokenizer: Tokenizer, seen: look.Trace) -> dict:
    """Columns of the table of heads, (n_layers, H) each."""
    found = look.head_measures(seen.weights, seen.tokens)
    noise = look.induction_on_noise(model, tokenizer.bos_id, tokenizer.vocab_size)
    return {name: packed(x) for name, x in found.items()} | ({} if noise is None else {"noise": packed(noise)})


def shown_layer(layer: look.AttentionTrace) -> dict:
    return {
        "q": packed(layer.q),
        "k": packed(layer.k),
        "v": packed(layer.v),
        "bias": None if layer.bias is None else packed(layer.bias),
        "allowed": ["".join("01"[x] for x in row) for row in layer.allowed.tolist()],
        "weights": packed(layer.weights),
        "output": packed(layer.output),
    }


def about(model: Transformer) -> str:
    config = model.config
    heads = f"{config.n_heads} head{'s' * (config.n_heads > 1)}"
    if config.kv_heads != config.n_heads:
        heads += f" (keys and values of {config.kv_heads})"
    return (
        f"{sum(p.numel() for p in model.parameters()):,} parameters: {config.n_layers} "
        f"layer{'s' * (config.n_layers > 1)} of {heads}, d_model {config.d_model}, d_k {config.head_width}"
    )


def project_note(config: ModelConfig) -> str:
    notes = [POSITION_NOTES[config.position]]
    if config.attention.qk_norm:
        notes.append("Queries and keys are normalised before they meet.")
    if config.kv_heads < config.n_heads:
        notes.append(f"Each key and value serves {config.n_heads // config.kv_heads} heads.")
    if config.attention.kind != "softmax":
        notes.append(LINEAR_NOTE.format(kind=config.attention.kind))
    return " ".join(notes)


def mask_note(config: ModelConfig, layer: int) -> str:
    pattern = config.attention.pattern
    return MASK_NOTES[pattern[layer % len(pattern)]].format(**vars(config.attention))


def page_bytes(config: ModelConfig, n: int, explain: int) -> int:
    """About how large the numbers of a prompt of n tokens are on the page."""
    width = config.head_width if config.attention.features is None else config.attention.features
    biased = config.position in BIASED_POSITIONS
    vectors = (config.n_heads + config.kv_heads) * n * (width + config.head_width)
    floats = config.n_layers * (vectors + config.n_heads * n * n * (1 + biased)) + (explain + 1) * n * n // 2
    return floats * 16 // 3


def check_size(config: ModelConfig, n: int, explain: int) -> None:
    """Raise ValueError for a prompt of n tokens, its start token among them, that would make too large a page."""
    if (size := page_bytes(config, n, explain)) <= MAX_BYTES:
        return
    most = next(m for m in range(n, 0, -1) if page_bytes(config, m, explain) <= MAX_BYTES or m == 1)
    raise ValueError(
        f"the prompt has {n} tokens with its start token, and a page of {config.n_layers} layers of {config.n_heads} "
        f"heads would have {size / 2**20:.0f} MB; shorten it to {most}"
    )


EXAMPLE = {  # token: its query, key and value
    "time": ((0, 3, 1, 0), (0, 2, 1, 0), (2, 0, 0, 1)),
    "flies": ((3, 0, 0, 0), (2, 1, 1, 0), (0, 2, 1, 0)),
    "like": ((0, 0, 2, 2), (0, 0, 2, 1), (0, 0, 1, 0)),
    "an": ((0, 0, 0, 3), (0, 0, 1, 2), (0, 1, 0, 0)),
    "arrow": ((2, 0, 0, 1), (3, 0, 0, 3), (4, 0, 1, 1)),
}


def example() -> dict:
    """The textbook's "time flies like an arrow", by hand: no model, no mask, and the scores of README's table."""
    q, k, v = (torch.tensor([vectors[i] for vectors in EXAMPLE.values()], dtype=torch.float)[None] for i in range(3))
    output, weights = scaled_dot_product_attention(q, k, v)
    allowed = torch.ones(len(EXAMPLE), len(EXAMPLE), dtype=torch.bool)
    return {
        "name": "Textbook example",
        "about": "One head by hand, d_k = 4, in which every token sees all: what does “flies” belong to?",
        "tokens": list(EXAMPLE),
        "first": {"layer": 0, "head": 0, "query": 1},
        "heads": 1,
        "kvHeads": 1,
        "linear": False,
        "softCap": 0,
        "notes": {"project": "Here they were chosen by hand.", "masks": ["Nothing is hidden: every token sees all."]},
        "layers": [shown_layer(look.AttentionTrace(q, k, v, allowed, None, weights, output))],
    }
