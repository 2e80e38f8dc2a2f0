"""Beam search against that of `transformers`, on one model that both run."""

import pytest
import torch

from minitransformer import Tokenizer, beam_search, load
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
        bos_token_id=TOKENIZER.boundary, eos_token_id=TOKENIZER.boundary, pad_token_id=TOKENIZER.boundary,
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


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("beams", [2, 5])
@pytest.mark.parametrize("prompt", ["a", "face", "dead"])
def test_beams_are_those_of_transformers(models, prompt, beams, length_penalty):
    ours, theirs = models
    ids = torch.tensor([[TOKENIZER.boundary, *TOKENIZER.encode(prompt)]])
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=beams, num_return_sequences=beams, do_sample=False,
        max_new_tokens=12, length_penalty=length_penalty, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    found = beam_search(ours, TOKENIZER, prompt, 12, beams=beams, length_penalty=length_penalty)
    texts = []
    for row in expected.sequences[:, ids.shape[1] :].tolist():
        end = row.index(TOKENIZER.boundary) + 1 if TOKENIZER.boundary in row else len(row)
        texts.append(row[:end])
    assert [f.tokens for f in found] == texts
    ranks = [sum(f.log_probs) / len(f.tokens) ** length_penalty for f in found]
    assert ranks == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
    if (prompt, beams, length_penalty) == ("a", 5, 1.0):
        assert len({len(f.tokens) for f in found}) > 1  # texts of several lengths competed
