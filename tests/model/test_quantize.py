"""Eight-bit weights: what is stored, what is computed, and how far a model moves."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minitransformer import generate
from minitransformer.model.config import POSITIONS
from minitransformer.model.quantize import Int8Linear, quantize_int8
from tests.generation.test_generate import PROMPTS, TOKENIZER
from tests.model.models import make


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d_in", "d_out"), [(32, 48), (65, 7), (8, 3), (256, 1024)])
def test_products_are_those_of_the_stored_weights(d_in, d_out, bias):
    """Against the equation in float64, within what bfloat16 inputs and outputs round away."""
    torch.manual_seed(0)
    linear = nn.Linear(d_in, d_out, bias=bias)
    quantized = Int8Linear(linear)
    weight = quantized.weight[:, :d_in].double() * quantized.scale.double()[:, None]
    step = quantized.scale.double()[:, None]
    assert ((weight - linear.weight.double()).abs() <= step * 0.51).all()  # to the nearest; the largest may be cut
    assert quantized.weight.abs().amax(1).min() >= 126  # the whole range is used
    assert quantized.weight.dtype == torch.int8
    x = torch.randn(2, 3, d_in)
    expected = x.bfloat16().double() @ weight.T + (linear.bias.double() if bias else 0)
    found = quantized(x)
    assert (found.shape, found.dtype) == ((2, 3, d_out), torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2**-7)


def test_a_gpu_takes_a_plain_product_of_the_same_numbers():
    """torch's int8 kernel for CUDA is many times slower. What is called is seen on `meta`; whole numbers are exact."""
    layer, x = Int8Linear(nn.Linear(65, 7)), torch.randn(2, 3, 65)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "int8pack" not in function.__name__
            return function(*args, **(kwargs or {}))

    with Seen():
        assert deepcopy(layer).to("meta")(x.to("meta")).shape == (2, 3, 7)
    with pytest.raises(AssertionError), Seen():
        layer(x)
    plain = F.linear(F.pad(x.bfloat16(), (0, layer.padding)), layer.weight.bfloat16()) * layer.scale
    torch.testing.assert_close(layer(x), plain + layer.bias, atol=1e-2, rtol=1e-2, check_dtype=False)


def test_a_row_of_zeros_stays_one():
    linear = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(linear.weight)
    assert torch.equal(Int8Linear(linear)(torch.randn(1, 8)), torch.zeros(1, 4))


@pytest.mark.parametrize("settings", [
    *(dict(position=position) for position in POSITIONS), dict(n_kv_heads=1, activation="swiglu"),
    dict(tie_embeddings=True), dict(kind="elu"), dict(parallel=True, bias=True),
], ids=str)  # fmt: skip
def test_a_model_moves_little(settings):
    model = make(**settings, vocab_size=TOKENIZER.vocab_size, qk_norm=True)
    tokens = torch.randint(TOKENIZER.vocab_size, (2, 30), generator=torch.Generator().manual_seed(0))
    expected, table = model(tokens).log_softmax(-1), model.embedding.weight.clone()
    quantize_int8(model)
    found = model(tokens).log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    assert 0 < kl < 0.02
    assert torch.equal(model.embedding.weight, table)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert all(generate(model, TOKENIZER, PROMPTS, 5, temperature=0, banned=[TOKENIZER.eos_id]))
