"""Beam search against that of `transformers`, on one model that both run."""

import pytest
import torch

from minitransformer import Tokenizer, beam_search, generate, load
from minitransformer.convert.config import ConvertConfig
from minitransformer.convert.run import run

TOKENIZER = Tokenizer.train_characters(["abcdefgh"])  # few, so that texts often end


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("beams")
    config = transformers.LlamaConfig(
        vocab_size=TOKENIZER.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
        bos_token_id=TOKENIZER.eos_id, eos_token_id=TOKENIZER.eos_id, pad_token_id=TOKENIZER.eos_id,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(folder / "theirs")
    (folder / "theirs" / "tokenizer.json").write_text(TOKENIZER.to_json(), encoding="utf-8")
    run(ConvertConfig(source=str(folder / "theirs"), to=str(folder / "ours")))
    return load(folder / "ours")[0], theirs


def best_of(theirs, ids: torch.Tensor, beams: int, **settings) -> tuple[list[list[int]], list[float]]:
    """The texts that transformers finds after a prompt, up to their ends, and their ranks."""
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=beams, num_return_sequences=beams, do_sample=False,
        max_new_tokens=12, output_scores=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip
    texts = []
    for row in expected.sequences[:, ids.shape[1] :].tolist():
        end = row.index(TOKENIZER.eos_id) + 1 if TOKENIZER.eos_id in row else len(row)
        texts.append(row[:end])
    return texts, expected.sequences_scores.tolist()


def asked(prompt: str) -> torch.Tensor:
    return torch.tensor([[TOKENIZER.eos_id, *TOKENIZER.encode(prompt)]])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize("prompt", ["a", "face", "dead"])
def test_beams_are_those_of_transformers(models, prompt, beams, length_penalty):
    ours, theirs = models
    texts, expected = best_of(theirs, asked(prompt), beams, length_penalty=length_penalty)
    found = beam_search(ours, TOKENIZER, prompt, 12, beams=beams, length_penalty=length_penalty)
    assert [f.tokens for f in found] == texts
    ranks = [sum(f.log_probs) / len(f.tokens) ** length_penalty for f in found]
    assert ranks == pytest.approx(expected, abs=1e-4)
    if (prompt, beams, length_penalty) == ("a", 5, 1.0):
        assert len({len(f.tokens) for f in found}) > 1  # texts of several lengths competed


A, B, C = TOKENIZER.encode("abc")


@pytest.mark.parametrize(("ours_say", "they_say"), [
    ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"banned": [A, C]}, {"bad_words_ids": [[A], [C]]}),
    ({"logit_bias": {B: 3.0}}, {"sequence_bias": {(B,): 3.0}}),
    ({"no_repeat_ngram": 3, "repetition_penalty": 0.8, "banned": [B]},
     {"no_repeat_ngram_size": 3, "repetition_penalty": 0.8, "bad_words_ids": [[B]]}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("prompt", ["a", "face"])
def test_beams_with_penalties_are_those_of_transformers(models, prompt, ours_say, they_say):
    ours, theirs = models
    texts, _ = best_of(theirs, asked(prompt), 4, **they_say)
    found = beam_search(ours, TOKENIZER, prompt, 12, beams=4, **ours_say)
    assert [f.tokens for f in found] == texts
    for f in found:  # how likely the model itself found them
        logits = ours(torch.tensor([[*asked(prompt)[0].tolist(), *f.tokens]]))[0].log_softmax(-1)
        own = [logits[len(prompt) + i, token].item() for i, token in enumerate(f.tokens)]
        assert f.log_probs == pytest.approx(own, abs=1e-4)


def test_beams_end_at_stop_texts_and_at_the_clock(models):
    model, _ = models
    plain = beam_search(model, TOKENIZER, "a", 12, beams=4)
    stop = plain[0].text[2:4]
    found = beam_search(model, TOKENIZER, "a", 12, beams=4, stop=[stop])
    assert any(f.finish == "stop" for f in found)
    assert not any(stop in f.text for f in found)
    assert {f.finish for f in beam_search(model, TOKENIZER, "a", 12, beams=4, max_seconds=1e-9)} <= {"time", "end"}
    assert all(len(f.tokens) == 1 for f in beam_search(model, TOKENIZER, "a", 12, beams=4, max_seconds=1e-9))
    forced = beam_search(model, TOKENIZER, "a", 5, beams=3, forced={0: B})
    assert [f.tokens[0] for f in forced] == [B] * 3
    with pytest.raises(ValueError, match="beam_search draws no tokens: top_k cannot be set"):
        beam_search(model, TOKENIZER, "a", 5, top_k=3)


def test_what_has_nothing_left_to_choose_does_not_stop_others(models):
    """Each token comes once: after "abcdef" there are g and h alone, as the end is the start token too."""
    model, _ = models
    found = beam_search(model, TOKENIZER, "abcdef", 5, beams=4, no_repeat_ngram=1, stop=["gh"])
    assert [f.tokens for f in found] == [TOKENIZER.encode("gh")]
    with pytest.raises(ValueError, match="no token is left to choose from"):
        beam_search(model, TOKENIZER, "abcdef", 5, beams=4, no_repeat_ngram=1)
    first, second = generate(model, TOKENIZER, ["abcdefg", "h"], 4, no_repeat_ngram=1, stop=["h"], seed=0)
    assert first == ""
    assert len(second) == len(set(second)) == 4
    with pytest.raises(ValueError, match="no token is left to choose from"):
        generate(model, TOKENIZER, ["abcdefg", "h"], 4, no_repeat_ngram=1)
