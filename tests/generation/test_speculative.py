"""A draft changes how soon tokens come, never which: the same greedy ones, and the same distribution."""

import pytest
import torch

from minitransformer import ModelConfig, Tokenizer, Transformer, generate, generate_all
from minitransformer.generation.config import Sampling
from minitransformer.generation.speculative import Guesses, speculate
from minitransformer.model.config import POSITIONS, AttentionConfig
from tests.generation.test_generate import PROMPTS, TOKENIZER, every_continuation
from tests.generation.test_generate import make as make_plain
from tests.model.models import make, patterned

VOCABULARY = TOKENIZER.vocab_size


def nearly(model: Transformer, noise: float) -> Transformer:
    """A draft that is often right."""
    draft = Transformer(model.config).eval()
    draft.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return draft


@pytest.mark.parametrize("pattern", [["full"], ["window"], ["window", "full"], ["bigbird"], ["strided"]], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_greedy_tokens_are_those_without_a_draft(position, pattern):
    model = make(
        position, vocab_size=VOCABULARY, qk_norm=True, **patterned(*pattern, window=7, block=4, stride=4, summary=2)
    )
    expected = generate_all(model, TOKENIZER, PROMPTS, 20, temperature=0)
    guesses = Guesses()
    *_, rows = speculate(
        model, nearly(model, 0.01), TOKENIZER, PROMPTS, 20, Sampling(temperature=0), guesses=guesses, ahead=3
    )
    for row, found in zip(rows, expected, strict=True):
        assert (row.text, row.tokens, row.finish) == (found.text, found.tokens, found.finish)
        assert row.log_probs == pytest.approx(found.log_probs, abs=1e-4)
    assert 0 < guesses.taken <= guesses.proposed


@pytest.mark.parametrize(("sampling", "noise"), [
    (Sampling(), 0.3), (Sampling(temperature=0.6, top_k=3), 0.05),
    (Sampling(top_p=0.8, repetition_penalty=1.3, presence_penalty=0.2), 0.05),
], ids=["plain", "top_k", "penalties"])  # fmt: skip
def test_texts_have_the_distribution_of_the_model(sampling, noise):
    """Chi-square over all texts of at most three tokens, against probabilities worked out text by text."""
    tokenizer = Tokenizer.train_characters(["abc"])
    model = make_plain(vocab_size=4)
    draft = nearly(model, noise)
    n = 1500
    *_, rows = speculate(model, draft, tokenizer, ["ab"], 3, sampling, seed=0, num_samples=n, ahead=2)
    found: dict[tuple[int, ...], int] = {}
    for row in rows:
        found[tuple(row.tokens)] = found.get(tuple(row.tokens), 0) + 1
    chances = probabilities_by_hand(model, tokenizer, "ab", 3, sampling)
    assert set(found) <= {tokens for tokens, p in chances.items() if p > 0}
    frequent = {tokens: n * p for tokens, p in chances.items() if n * p >= 5}
    rare = n - sum(frequent.values())
    statistic = sum((found.get(tokens, 0) - e) ** 2 / e for tokens, e in frequent.items())
    if rare >= 5:
        statistic += (n - sum(found.get(tokens, 0) for tokens in frequent) - rare) ** 2 / rare
    degrees = len(frequent) - (rare < 5)
    # The 0.1 % point of chi-square, by Wilson and Hilferty's approximation.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def probabilities_by_hand(model, tokenizer, prompt, n, sampling) -> dict[tuple[int, ...], float]:
    """Of every text of at most n tokens, by transformers' processors."""
    import transformers

    found: dict[tuple[int, ...], float] = {}

    def go(tokens: list[int], chance: float) -> None:
        if len(tokens) == n or (tokens and tokens[-1] == tokenizer.eos_id):
            found[tuple(tokens)] = chance
            return
        ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(prompt), *tokens]])
        logits = model(ids)[:, -1]
        if sampling.repetition_penalty != 1:
            logits = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, logits)
        for token in set(tokens):
            logits[0, token] -= sampling.presence_penalty
        logits = logits / sampling.temperature
        if sampling.top_k:
            logits = transformers.TopKLogitsWarper(sampling.top_k)(ids, logits)
        if sampling.top_p < 1:
            logits = transformers.TopPLogitsWarper(sampling.top_p)(ids, logits)
        for token, p in enumerate(logits.softmax(-1)[0].tolist()):
            go([*tokens, token], chance * p)

    with torch.no_grad():
        go([], 1.0)
    return found


def test_the_draft_itself_is_always_taken_and_an_unlike_one_hardly_ever():
    model = make_plain()
    for draft, least, most in ((model, 1.0, 1.0), (nearly(model, 3.0), 0.0, 0.3)):
        guesses = Guesses()
        list(speculate(model, draft, TOKENIZER, ["Ann"], 30, Sampling(banned=[TOKENIZER.eos_id]), 0, guesses=guesses))
        assert least <= guesses.taken / guesses.proposed <= most


def test_a_draft_that_holds_less_helps_as_far_as_it_reaches():
    model = make_plain("learned")
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCABULARY, d_model=16, n_layers=1, n_heads=2, max_seq_len=12, position="learned")
    expected = generate(model, TOKENIZER, PROMPTS, 30, temperature=0)
    assert generate(model, TOKENIZER, PROMPTS, 30, temperature=0, draft=Transformer(config).eval()) == expected


def test_several_samples_of_each_prompt_of_an_empty_one_too():
    model = make_plain()
    settings = dict(num_samples=3, seed=1, draft=nearly(model, 0.1))
    texts = generate(model, TOKENIZER, ["", "Ann"], 8, **settings)
    alone = [generate(model, TOKENIZER, [p], 8, **settings | {"seed": s}) for p, s in (("", 1), ("Ann", 4))]
    assert texts == alone[0] + alone[1]


def test_settings_reach_through():
    model = make_plain()
    settings = dict(temperature=0, draft=nearly(model, 0.01))
    whole = generate(model, TOKENIZER, ["Ann"], 25, **settings)[0]
    assert generate(model, TOKENIZER, ["Ann"], 25, stop=[whole[5:8]], **settings) == [whole[: whole.find(whole[5:8])]]
    forced = generate_all(model, TOKENIZER, ["Ann"], 5, forced={0: 7, 2: 9}, **settings)[0]
    assert (forced.tokens[0], forced.tokens[2]) == (7, 9)
    late = generate_all(model, TOKENIZER, ["Ann", "Bob"], 25, max_seconds=1e-9, **settings)
    assert [found.finish for found in late] == ["time", "time"]
    assert generate(model, TOKENIZER, ["Ann"], 15, seed=3, draft=settings["draft"]) == generate(
        model, TOKENIZER, ["Ann"], 15, seed=3, draft=settings["draft"]
    )


def test_a_model_that_cannot_step_back_is_named():
    config = ModelConfig(
        vocab_size=VOCABULARY, d_model=16, n_layers=1, n_heads=2, attention=AttentionConfig(kind="elu")
    )
    linear = Transformer(config).eval()
    with pytest.raises(ValueError, match=r"draft: a model with model.attention.kind=elu cannot step back"):
        generate(make_plain(), TOKENIZER, ["Ann"], 5, draft=linear)
    with pytest.raises(ValueError, match=r"checkpoint: a model with model.attention.kind=elu"):
        generate(linear, TOKENIZER, ["Ann"], 5, draft=make_plain())


def test_taken_back_and_read_again_equals_read_once():
    """KVCache.truncate, at any length, for a cache that keeps all; one that rolls refuses."""
    model = make(pattern=["window", "full"], window=5, vocab_size=VOCABULARY)
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)
    for kept in (0, 1, 4, 11):
        cache = model.new_cache(2, 30, rolling=False)
        if kept:
            model(tokens[:, :kept], cache=cache)
        model(tokens.flip(0)[:, kept:], cache=cache)
        cache.truncate(kept)
        torch.testing.assert_close(model(tokens[:, kept:], cache=cache), expected[:, kept:], atol=1e-4, rtol=0)
    cache = model.new_cache(2, 30)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.truncate(5)


def test_every_continuation_has_a_chance():
    """The reference of the distribution test sums to one."""
    tokenizer = Tokenizer.train_characters(["abc"])
    model = make_plain(vocab_size=4)
    chances = probabilities_by_hand(model, tokenizer, "ab", 3, Sampling())
    assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
    likelihoods = every_continuation(model, tokenizer, "ab", 3)
    assert {t: torch.tensor(p).log().item() for t, p in chances.items()} == pytest.approx(likelihoods, abs=1e-3)
