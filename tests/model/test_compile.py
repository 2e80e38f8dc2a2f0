"""Compiled blocks: one graph for changing documents, and the numbers of the plain ones."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from minitransformer.model import product
from minitransformer.model.config import POSITIONS, AttentionConfig, ModelConfig
from minitransformer.model.transformer import Transformer

A = AttentionConfig
SHAPE = dict(vocab_size=61, d_model=32, n_layers=3, n_heads=4, max_seq_len=48, init="gpt2")


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()


def with_gradients(model: Transformer, tokens, positions):
    model.zero_grad()
    logits = model(tokens, positions)
    (logits * (positions >= 0).unsqueeze(-1)).square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def batches(n: int):
    """Tokens and the positions of random documents, (4, 48) each; the last row of every other one ends in padding."""
    generator = torch.Generator().manual_seed(0)
    for i in range(n):
        starts = torch.rand(4, 48, generator=generator) < 0.15
        starts[:, 0] = True
        place = torch.arange(48)
        positions = place - torch.where(starts, place, 0).cummax(-1).values
        if i % 2:
            positions[-1, 40:] = -1
        yield torch.randint(61, (4, 48), generator=generator), positions


@pytest.mark.parametrize("settings", [
    *[dict(position=name) for name in POSITIONS], dict(n_kv_heads=1), dict(dropout=0.1), dict(norm_placement="post"),
    dict(attention=A(pattern=["window", "full"], window=8)), dict(attention=A(pattern=["bigbird", "strided", "fixed"])),
    dict(attention=A(kind="elu")), dict(attention=A(kind="performer")), dict(attention=A(kernel="reference")),
    dict(attention=A(kernel="sdpa", qk_norm=True)), dict(attention=A(softcap=5.0)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_few_graphs_serve_twenty_steps_with_changing_documents(settings, checkpointing):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE | settings))
    model.checkpoint_gradients(checkpointing)
    plain = [with_gradients(model, tokens, positions) for tokens, positions in batches(2)]
    counter = CompileCounterWithBackend("eager")
    model.compile_blocks(backend=counter)
    for step, (tokens, positions) in enumerate(batches(20)):
        logits, gradients = with_gradients(model, tokens, positions)
        if step < 2 and not model.config.dropout:
            torch.testing.assert_close(logits, plain[step][0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(gradients, plain[step][1], atol=1e-4, rtol=1e-4)
    # One for each kind of layer; a second where a layer's own table is looked up.
    assert counter.frame_count <= max(2, len(set(model.config.attention.pattern)))


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("least", [0, 2**62], ids=["oneDNN", "MKL"])
def test_compiled_for_real_reads_trains_and_generates_alike(least, checkpointing, monkeypatch):
    monkeypatch.setattr(product, "LEAST", least)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE))
    model.checkpoint_gradients(checkpointing)
    ((tokens, positions),) = batches(1)
    names = list(model.state_dict())
    logits, gradients = with_gradients(model, tokens, positions)
    model.compile_blocks()
    assert list(model.state_dict()) == names
    compiled = with_gradients(model, tokens, positions)
    torch.testing.assert_close(compiled[0], logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(compiled[1], gradients, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        cache, whole = model.new_cache(4), model(tokens)
        parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 20), (20, 21), (21, 48))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
