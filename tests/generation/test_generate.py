"""Cached generation equals the uncached model, and rows do not disturb each other."""

import pytest
import torch

from minitransformer import ModelConfig, Tokenizer, Transformer, generate
from minitransformer.generation.generate import stream
from minitransformer.generation.sampling import keep_top_k, keep_top_p, sample
from minitransformer.model.config import POSITIONS, AttentionConfig
from tests.conftest import sentences

TOKENIZER = Tokenizer.train_bpe([sentences(300)], 300)


def make(position="rotary", vocab_size=TOKENIZER.vocab_size, **settings) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=vocab_size, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, position=position,
        attention=AttentionConfig(qk_norm=True), **settings,
    )  # fmt: skip
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def greedy_by_hand(model, prompt: str, n: int) -> str:
    ids = [TOKENIZER.boundary, *TOKENIZER.encode(prompt)]
    start = len(ids)
    for _ in range(n):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        if ids[-1] == TOKENIZER.boundary:
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
        model.head.weight[TOKENIZER.boundary] = 50 * model.features(torch.tensor([[TOKENIZER.boundary]]))[0][0, 0]
    assert generate(model, TOKENIZER, ["", "Ann"], 15, temperature=0)[0] == ""


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
    (dict(top_p=0), "top_p=0"), (dict(top_p=1.5), "top_p=1.5"), (dict(top_k=-1), "top_k=-1"),
], ids=str)  # fmt: skip
def test_wrong_sampling_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        generate(make(), TOKENIZER, ["Ann"], 5, **settings)


@pytest.mark.parametrize("k", [1, 3, 7, 20, 50])
def test_top_k_equals_transformers(k):
    from transformers import TopKLogitsWarper

    logits = torch.randn(4, 20)
    assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits))
    assert torch.equal(keep_top_k(logits, 0), logits)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999, 1.0])
def test_top_p_equals_transformers(p):
    from transformers import TopPLogitsWarper

    logits = torch.randn(4, 20) * 3
    expected = logits if p == 1 else TopPLogitsWarper(p)(None, logits)
    assert torch.equal(keep_top_p(logits, p), expected)


def test_samples_follow_the_distribution():
    """Chi-square over 6 tokens at temperature 0.5: below the 0.1 % point of 5 degrees of freedom, 20.5."""
    logits = torch.tensor([0.0, 0.5, 1.0, -1.0, 0.2, float("-inf")])
    n = 5000
    draws = sample(logits.expand(n, -1), 0.5, 0, 1.0, [torch.Generator().manual_seed(0)] * n)
    expected = (logits / 0.5).softmax(-1) * n
    counts = draws.bincount(minlength=6)
    assert counts[5] == 0
    assert ((counts - expected)[:5].square() / expected[:5]).sum() < 20.5
