"""Cached generation equals the uncached model, and rows do not disturb each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer import (
    ModelConfig,
    Tokenizer,
    Transformer,
    beam_search,
    generate,
    generate_all,
    pack_weights,
    score,
)
from minitransformer.generation.config import Sampling
from minitransformer.generation.decode import PREFILL_TOKENS, Row, prefill
from minitransformer.generation.generate import stream
from minitransformer.generation.speculative import speculate
from minitransformer.model import product
from minitransformer.model.config import KINDS, PATTERNS, POSITIONS, AttentionConfig
from tests.conftest import sentences
from tests.model.models import patterned

TOKENIZER = Tokenizer.train_bpe([sentences(300)], 300)
BYTES = Tokenizer.bytes()


def make(position="rotary", vocab_size=TOKENIZER.vocab_size, **settings) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=vocab_size, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, position=position,
        **dict(attention=AttentionConfig(qk_norm=True)) | settings,
    )  # fmt: skip
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def greedy_by_hand(model, prompt: str, n: int) -> str:
    ids = [TOKENIZER.eos_id, *TOKENIZER.encode(prompt)]
    start = len(ids)
    for _ in range(n):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        if ids[-1] == TOKENIZER.eos_id:
            break
    return TOKENIZER.decode(ids[start:])


PROMPTS = ["Ann", "", "Zoë sees the owl 🦉.\nBob "]


@pytest.mark.parametrize("position", POSITIONS)
def test_greedy_equals_the_uncached_model(position):
    model = make(position)
    expected = [greedy_by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, TOKENIZER, PROMPTS, 20, temperature=0) == expected
    assert [generate(model, TOKENIZER, [p], 20, temperature=0)[0] for p in PROMPTS] == expected
    assert ["".join(stream(model, TOKENIZER, p, 20, temperature=0.0)) for p in PROMPTS] == expected


@pytest.mark.parametrize("least", [0, 2**62], ids=["in blocks", "in slices or as they are"])
@pytest.mark.parametrize("position", POSITIONS)
def test_packed_weights_write_what_the_uncached_model_does(position, least, monkeypatch):
    monkeypatch.setattr(product, "LEAST_PACKED", {"row": least, "rows": least})
    expected = [greedy_by_hand(make(position), prompt, 10) for prompt in PROMPTS]
    for rows in (1, len(PROMPTS)):
        model = make(position)
        pack_weights(model, rows)
        batches = [PROMPTS[i : i + rows] for i in range(0, len(PROMPTS), rows)]
        assert [t for batch in batches for t in generate(model, TOKENIZER, batch, 10, temperature=0)] == expected


ATTENTIONS = [
    *(patterned(name, window=5, block=4, stride=4, summary=2) for name in PATTERNS),
    *({"kind": kind} for kind in KINDS if kind != "softmax"),
]


@pytest.mark.parametrize(
    ("position", "attention"), [*((p, {}) for p in POSITIONS), *(("rotary", a) for a in ATTENTIONS)], ids=str
)
def test_prompts_are_read_in_pieces(position, attention, monkeypatch):
    """Pieces of two tokens, so that short rows begin with pieces that are padding alone."""
    model = make(position, attention=AttentionConfig(**attention))
    rows = [[TOKENIZER.eos_id, *TOKENIZER.encode(prompt)] for prompt in PROMPTS]
    with torch.inference_mode():
        alone = [model.hidden_states(torch.tensor([ids]))[0][0, -1] for ids in rows]
        monkeypatch.setitem(PREFILL_TOKENS, "cpu", 7)
        found = prefill(model, rows, TOKENIZER.eos_id, 64)[1]
    torch.testing.assert_close(found, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours():
    model = make()
    alone = generate(model, TOKENIZER, ["Ann"], 15, temperature=1.0, seed=7)
    assert generate(model, TOKENIZER, ["Ann", *PROMPTS], 15, temperature=1.0, seed=7)[0] == alone[0]
    assert generate(model, TOKENIZER, ["Ann"], 15, temperature=1.0, seed=7) == alone
    assert generate(model, TOKENIZER, ["Ann"], 15, temperature=1.0, seed=8) != alone
    assert (
        generate(model, TOKENIZER, ["Ann", "Ann"], 15, seed=7)[0]
        != generate(model, TOKENIZER, ["Ann"] * 2, 15, seed=7)[1]
    )
    assert generate(model, TOKENIZER, []) == []


def test_a_text_ends_where_the_model_ends_the_document():
    model = make()
    with torch.no_grad():
        model.head.weight[TOKENIZER.eos_id] = 50 * model.hidden_states(torch.tensor([[TOKENIZER.eos_id]]))[0][0, 0]
    assert generate(model, TOKENIZER, ["", "Ann"], 15, temperature=0)[0] == ""


def chat_tokenizer() -> Tokenizer:
    """Bytes and three special tokens, <eot> and <call> of which end a text as EOS does."""
    backend = type(BYTES.backend).from_str(BYTES.to_json())
    backend.add_special_tokens(["<eot>", "<call>", "<user>"])
    return Tokenizer(backend, end_ids=[257, 258])


CHAT = chat_tokenizer()
WAYS = {
    "drawn": lambda model, **settings: generate_all(model, CHAT, ["Ann", ""], 5, num_samples=2, seed=0, **settings),
    "slid": lambda model, **settings: generate_all(model, CHAT, ["Ann"], 5, overflow="slide", seed=0, **settings),
    "drafted": lambda model, **settings: generate_all(model, CHAT, ["Ann", ""], 5, draft=model, seed=0, **settings),
    "searched": lambda model, **settings: beam_search(model, CHAT, "Ann", 5, **settings),
}


@pytest.mark.parametrize(("token", "stop", "finish"), [
    ("<|endoftext|>", [], "end"), ("<eot>", [], "end"), ("<call>", [], "end"), ("<user>", [], "length"),
    ("<user>", ["<user>"], "stop"), ("<user>", ["x", "<eot>"], "length"), ("<eot>", ["zz", "<eot>"], "stop"),
])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_any_end_token_ends_a_text_and_a_special_one_that_is_named_stops_it(way, token, stop, finish):
    """Other special tokens are banned, so that nothing else ends a text."""
    model = make(vocab_size=CHAT.vocab_size)
    end = CHAT.special[token]
    others = [i for i in CHAT.special.values() if i != end]
    for found in WAYS[way](model, forced={0: CHAT.encode("a")[0], 1: end}, banned=others, stop=stop):
        assert (found.finish, found.tokens[1]) == (finish, end)
        assert len(found.tokens) == (5 if finish == "length" else 2)
        assert finish == "length" or found.text == "a"


@pytest.mark.parametrize("token", CHAT.special)
def test_a_stream_holds_back_no_text_when_a_special_token_ends_it(token):
    model = make(vocab_size=CHAT.vocab_size)
    forced = {0: CHAT.encode("<")[0], 1: CHAT.encode("u")[0], 2: CHAT.special[token]}
    assert "".join(stream(model, CHAT, "Ann", 5, forced=forced, stop=["<user>"])) == "<u"


def test_ids_past_the_tokenizer_are_never_drawn():
    model = make(vocab_size=TOKENIZER.vocab_size + 40)
    with torch.no_grad():
        model.head.weight[TOKENIZER.vocab_size :] *= 100
    generate(model, TOKENIZER, PROMPTS, 20, temperature=2.0, seed=0)  # `decode` raises on such an id


def test_a_model_writes_until_it_is_full():
    model = make()
    ids = TOKENIZER.encode("Ann")
    full = 64 - len(ids)  # with its start token the prompt takes one more; the last token is never read
    assert generate(model, TOKENIZER, ["Ann"], full, seed=0)
    with pytest.raises(ValueError, match=rf"max_new_tokens={full + 1}.*max_seq_len=64; at most {full} fit"):
        generate(model, TOKENIZER, ["Ann"], full + 1)
    with pytest.raises(ValueError, match=r"prompt has .* tokens with its start token; the model holds 64"):
        generate(model, TOKENIZER, ["Ann sees the cat.\n" * 40])


@pytest.mark.parametrize(("settings", "words"), [
    (dict(temperature=-1), "temperature=-1"), (dict(temperature=float("nan")), "temperature=nan"),
    (dict(min_p=2), "min_p=2"), (dict(repetition_penalty=0), "repetition_penalty=0"), (dict(banned=[999]), "id 999"),
    (dict(no_repeat_ngram=-1), "no_repeat_ngram=-1"), (dict(banned=range(300)), "no token is left"),
    (dict(overflow="extend"), "rotary|max_seq_len"), (dict(top_p=0), "top_p=0"),
    (dict(top_p=1.5), "top_p=1.5"),
    (dict(top_k=-1), "top_k=-1"),
], ids=str)  # fmt: skip
def test_wrong_sampling_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        generate(make("learned"), TOKENIZER, ["Ann"], 5, **settings)


@pytest.mark.parametrize("position", ["rotary", "learned", "alibi"])
def test_samples_of_a_prompt_share_a_prefill_and_are_those_of_rows_of_their_own(position):
    model = make(position)
    shared = generate(model, TOKENIZER, PROMPTS, 12, seed=3, num_samples=2)
    apart = generate(model, TOKENIZER, [p for p in PROMPTS for _ in range(2)], 12, seed=3)
    assert shared == apart
    assert len(set(shared)) > 3


def test_tokens_and_log_probabilities_are_those_of_the_model():
    model = make()
    found = generate_all(model, TOKENIZER, PROMPTS, 15, temperature=1.3, top_k=20, seed=0)
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = [TOKENIZER.eos_id, *TOKENIZER.encode(prompt), *row.tokens]
        log_probs = model(torch.tensor([ids]))[0].log_softmax(-1)
        start = len(ids) - len(row.tokens)
        expected = [log_probs[i - 1, ids[i]].item() for i in range(start, len(ids))]
        assert row.log_probs == pytest.approx(expected, abs=1e-4)
        assert row.prompt == prompt
        assert row.text == TOKENIZER.decode(row.tokens)
        assert row.finish == ("end" if row.tokens[-1] == TOKENIZER.eos_id else "length")


def test_a_score_is_the_log_probability_of_a_whole_document():
    model = make()
    found = score(model, TOKENIZER, "Ann sees the owl 🦉.")
    ids = [TOKENIZER.eos_id, *TOKENIZER.encode("Ann sees the owl 🦉."), TOKENIZER.eos_id]
    log_probs = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    assert found.tokens == ids[1:]
    assert found.log_probs == pytest.approx([log_probs[i, t].item() for i, t in enumerate(ids[1:])], abs=1e-5)
    with pytest.raises(ValueError, match="max_seq_len=64"):
        score(model, TOKENIZER, "Ann sees the cat.\n" * 40)


TEXT = st.text(alphabet="ab李🦉 é", max_size=30)


@settings(max_examples=500, deadline=None)
@given(TEXT, st.lists(st.text(alphabet="ab李🦉", min_size=1, max_size=4), max_size=3), st.booleans())
def test_stop_texts_are_found_across_tokens_and_nothing_is_shown_twice_or_too_soon(text, stop, ends):
    """One byte a token: every border that there can be."""
    row = Row("", [], BYTES, stop)
    shown = []
    for token in [*BYTES.encode(text), *([BYTES.eos_id] if ends else [])]:
        row.add(token, 0.0)
        shown.append(row.fresh())
        if row.finish:
            break
    row.end("length")
    shown.append(row.fresh())
    places = [text.find(s) for s in stop if s in text]
    expected = text[: min(places)] if places else text
    # Where two stop texts overlap, the one that is complete first ends the text.
    first = min((text.find(s) + len(s), text.find(s)) for s in stop if s in text)[1] if places else None
    assert row.text in (expected, text[:first])
    assert "".join(shown) == row.text
    assert row.finish == ("stop" if places else "end" if ends else "length")


@pytest.mark.parametrize("position", POSITIONS)
def test_sliding_goes_on_past_the_end(position):
    model = make(position)
    found = generate_all(model, TOKENIZER, PROMPTS, 150, temperature=0, overflow="slide", banned=[TOKENIZER.eos_id])
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert len(row.tokens) == 150
        ids = [TOKENIZER.eos_id, *TOKENIZER.encode(prompt)]
    # By hand, for the longest prompt, whose row has no padding: from the newest half when 64 are full.
    ids = [TOKENIZER.eos_id, *TOKENIZER.encode(PROMPTS[-1])]
    seen = list(ids)
    for token in found[-1].tokens:
        logits = model(torch.tensor([seen]))[0, -1, : TOKENIZER.vocab_size]
        logits[TOKENIZER.eos_id] = float("-inf")
        assert logits.argmax() == token
        ids.append(token)
        seen = [*seen, token] if len(seen) < 64 else ids[-32:]


def test_encodings_that_reach_further_go_on():
    model = make("alibi")
    found = generate_all(model, TOKENIZER, ["Ann"], 100, temperature=0, overflow="extend", banned=[TOKENIZER.eos_id])
    ids = [TOKENIZER.eos_id, *TOKENIZER.encode("Ann")]
    for token in found[0].tokens:
        logits = model(torch.tensor([ids]))[0, -1, : TOKENIZER.vocab_size]
        logits[TOKENIZER.eos_id] = float("-inf")
        assert logits.argmax() == token
        ids.append(token)


def test_a_time_limit_ends_every_row():
    found = generate_all(
        make(), TOKENIZER, PROMPTS, 10**6, overflow="slide", max_seconds=0.2, banned=[TOKENIZER.eos_id]
    )
    assert {row.finish for row in found} == {"time"}
    assert all(row.tokens for row in found)


def every_continuation(model, tokenizer, prompt: str, n: int) -> dict[tuple[int, ...], float]:
    """All texts of at most n tokens, ended or n long, and their log-probabilities, one by one."""
    found = {}

    def go(tokens: list[int], total: float) -> None:
        if len(tokens) == n or (tokens and tokens[-1] == tokenizer.eos_id):
            found[tuple(tokens)] = total
            return
        ids = [tokenizer.eos_id, *tokenizer.encode(prompt), *tokens]
        log_probs = model(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size].log_softmax(-1)
        for token, log_prob in enumerate(log_probs.tolist()):
            go([*tokens, token], total + log_prob)

    with torch.no_grad():
        go([], 0.0)
    return found


@pytest.mark.parametrize("position", ["rotary", "t5"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_all_texts_finds_the_best(position, length_penalty):
    tokenizer = Tokenizer.train_characters(["abc"])
    model = make(position, vocab_size=4)
    texts = every_continuation(model, tokenizer, "ab", 4)
    ranks = {tokens: total / len(tokens) ** length_penalty for tokens, total in texts.items()}
    found = beam_search(model, tokenizer, "ab", 4, beams=300, length_penalty=length_penalty)
    expected = sorted(ranks.values(), reverse=True)[: len(found)]
    assert [sum(f.log_probs) / len(f.tokens) ** length_penalty for f in found] == pytest.approx(expected, abs=1e-4)
    for f in found:
        assert sum(f.log_probs) == pytest.approx(texts[tuple(f.tokens)], abs=1e-4)
        assert f.text == tokenizer.decode(f.tokens)
        assert f.finish == ("end" if f.tokens[-1] == tokenizer.eos_id else "length")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_one_beam_is_greedy_and_more_find_what_is_likelier(prompt):
    model = make()
    greedy = generate_all(model, TOKENIZER, [prompt], 12, temperature=0)[0]
    assert beam_search(model, TOKENIZER, prompt, 12, beams=1)[0].tokens == greedy.tokens
    rank = [sum(f.log_probs) / len(f.tokens) for f in beam_search(model, TOKENIZER, prompt, 12, beams=8)]
    assert rank == sorted(rank, reverse=True)
    assert rank[0] >= sum(greedy.log_probs) / len(greedy.tokens) - 1e-5


@pytest.mark.parametrize("job", [
    lambda model: generate(model, TOKENIZER, ["Ann", ""], 12, seed=0),
    lambda model: generate(model, TOKENIZER, ["Ann"], 12, seed=0, draft=make(dropout=0.5).train()),
    lambda model: list(stream(model, TOKENIZER, "Ann", 12, seed=0)),
    lambda model: score(model, TOKENIZER, "Ann sees the cat.").log_probs,
    lambda model: beam_search(model, TOKENIZER, "Ann", 12)[0].text,
], ids=["generate", "draft", "stream", "score", "beams"])  # fmt: skip
def test_dropout_of_a_model_that_is_being_trained_is_off_and_then_on_again(job):
    model = make(dropout=0.5).train()
    found = [job(model) for _ in range(3)]
    assert found == [job(make(dropout=0.5))] * 3
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_never_a_token(bad):
    broken, sound = make(), make()
    with torch.no_grad():
        broken.head.weight[3] = bad
    tokens = dict(max_new_tokens=3)
    for way in (
        lambda: generate(broken, TOKENIZER, ["Ann"], **tokens, temperature=0),
        lambda: generate(broken, TOKENIZER, ["Ann", "Bob"], **tokens, seed=0),
        lambda: beam_search(broken, TOKENIZER, "Ann", **tokens),
        lambda: score(broken, TOKENIZER, "Ann"),
        lambda: list(speculate(broken, sound, TOKENIZER, ["Ann"], 3, Sampling())),
        lambda: list(speculate(sound, broken, TOKENIZER, ["Ann"], 3, Sampling())),
    ):
        with pytest.raises(ValueError, match="logits are not finite"):
            way()
