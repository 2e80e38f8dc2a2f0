"""Each function against transformers' own, and draws against their distribution."""

import pytest
import torch
import transformers

from minitransformer.generation import sampling
from minitransformer.generation.config import Sampling
from minitransformer.generation.sampling import adjust, keep_min_p, keep_top_k, keep_top_p, sample


@pytest.fixture
def logits():
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(0)) * 3


HISTORY = torch.tensor(
    [[1, 2, 3, 1, 2, 3, 1, 2], [5, 5, 5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5, 6, 7], [9, 8, 9, 8, 7, 9, 8, 0]]
)


@pytest.mark.parametrize("k", [1, 3, 7, 20, 50])
def test_top_k(k, logits):
    assert torch.equal(keep_top_k(logits, k), transformers.TopKLogitsWarper(k)(None, logits))
    assert torch.equal(keep_top_k(logits, 0), logits)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999, 1.0])
def test_top_p(p, logits):
    expected = logits if p == 1 else transformers.TopPLogitsWarper(p)(None, logits)
    assert torch.equal(keep_top_p(logits, p), expected)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 1.0])
def test_min_p(p, logits):
    expected = transformers.MinPLogitsWarper(p)(None, logits) if p else logits
    assert torch.equal(keep_min_p(logits, p), expected)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngrams(n, logits):
    expected = transformers.NoRepeatNGramLogitsProcessor(n)(HISTORY, logits.clone())
    assert torch.equal(sampling.forbid_ngrams(logits, HISTORY.tolist(), n), expected)


@pytest.mark.parametrize("split", [0, 3, 8])
@pytest.mark.parametrize("config", [
    Sampling(repetition_penalty=1.3), Sampling(repetition_penalty=0.8), Sampling(no_repeat_ngram=3),
    Sampling(repetition_penalty=1.3, no_repeat_ngram=2, logit_bias={3: 5.0, 7: -2.0}, banned=[0, 9]),
    Sampling(repetition_penalty=1.1, no_repeat_ngram=2, temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, banned=[4]),
], ids=str)  # fmt: skip
def test_all_together_in_the_order_of_transformers(config, split, logits):
    """What is left to draw from, and with which probability; history divides into prompt and text anywhere."""
    theirs = transformers.LogitsProcessorList()
    if config.repetition_penalty != 1:
        theirs.append(transformers.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram:
        theirs.append(transformers.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram))
    if config.logit_bias:
        theirs.append(transformers.SequenceBiasLogitsProcessor({(i,): b for i, b in config.logit_bias.items()}))
    if config.banned:
        theirs.append(transformers.NoBadWordsLogitsProcessor([[i] for i in config.banned], eos_token_id=19))
    if config.temperature != 1:
        theirs.append(transformers.TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        theirs.append(transformers.TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        theirs.append(transformers.TopPLogitsWarper(config.top_p))
    if config.min_p:
        theirs.append(transformers.MinPLogitsWarper(config.min_p))
    expected = theirs(HISTORY, logits.clone()).softmax(-1)
    adjusted = adjust(logits, config, HISTORY[:, :split].tolist(), HISTORY[:, split:].tolist())
    # `sample` turns evenly spaced numbers into as many of each token as its probability says.
    n = 4000
    uniform = (torch.arange(n) + 0.5) / n
    for row in range(4):
        counts = sample(adjusted[row].expand(n, -1), config, uniform).bincount(minlength=20)
        torch.testing.assert_close(counts / n, expected[row], atol=1.01 / n, rtol=0)


def test_presence_and_frequency_count_what_was_made(logits):
    """OpenAI's formula, by hand."""
    config = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    found = adjust(logits[:1], config, [[7, 7]], [[3, 3, 3, 4]])
    expected = logits[:1].clone()
    expected[0, 3] -= 0.5 + 3 * 0.25
    expected[0, 4] -= 0.5 + 0.25
    torch.testing.assert_close(found, expected)


def test_samples_follow_the_distribution():
    """Chi-square over 5 tokens at temperature 0.5: below the 0.1 % point of 4 degrees of freedom, 18.5."""
    logits = torch.tensor([0.0, 0.5, 1.0, -1.0, 0.2, float("-inf")])
    n = 5000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    draws = sample(logits.expand(n, -1), Sampling(temperature=0.5), uniform)
    expected = (logits / 0.5).softmax(-1) * n
    counts = draws.bincount(minlength=6)
    assert counts[5] == 0
    assert ((counts - expected)[:5].square() / expected[:5]).sum() < 18.5


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_interval_give_tokens_that_can_come(uniform):
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    assert sample(logits, Sampling(), torch.tensor([uniform])).item() == (1 if uniform == 0 else 3)


def test_greedy_takes_the_first_of_the_likeliest():
    assert sample(torch.tensor([[0.0, 2.0, 2.0]]), Sampling(temperature=0), torch.zeros(1)).item() == 1


class OnMPS(torch.Tensor):
    """Pretends to lie on a Mac's GPU, which has no float64."""

    device = property(lambda self: torch.device("mps"))

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def double(self) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64")


def test_a_mac_draws_what_a_cpu_draws(monkeypatch):
    torch.manual_seed(0)
    logits, uniform, config = torch.randn(50, 30), torch.rand(50), Sampling(temperature=0.9, top_p=0.9)
    expected, to = sample(logits, config, uniform), torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, where: x if where == torch.device("mps") else to(x, where))
    assert torch.equal(sample(logits.as_subclass(OnMPS), config, uniform).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("scale", [1.0, 1e4, -1e4])
def test_a_temperature_near_0_takes_the_likeliest(temperature, scale, logits):
    uniform = torch.tensor([0.0, 0.3, 0.7, 0.999])
    chosen = sample(logits * scale, Sampling(temperature=temperature, top_p=1e-12), uniform)
    assert torch.equal(chosen, (logits * scale).argmax(-1))
    assert torch.equal(sample(logits * scale, Sampling(temperature=temperature), uniform), chosen)
