"""Products by either of torch's libraries are those of the equation in float64, and so are their gradients."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minitransformer.model import product as module
from minitransformer.model.product import (
    LEAST,
    ONEDNN,
    Linear,
    PackedLinear,
    SlicedLinear,
    pack_weights,
    product,
)
from minitransformer.model.quantize import quantize_int8
from tests.model.models import make

if ONEDNN is None:
    pytest.skip("this CPU or this torch has no oneDNN to take fp32 products", allow_module_level=True)


@pytest.mark.parametrize("least", [0, LEAST, 2**62], ids=["oneDNN", "as it is", "MKL"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 5, 3), (2, 7, 33, 17), (3, 50, 128, 96), (1, 1, 768, 3072)], ids=str)
def test_values_and_gradients(shape, bias, least, monkeypatch):
    monkeypatch.setattr(module, "LEAST", least)
    torch.manual_seed(0)
    rows, time, d_in, d_out = shape
    layer, x = Linear(d_in, d_out, bias=bias), torch.randn(rows, time, d_in, requires_grad=True)
    wanted = torch.randn(rows, time, d_out)
    (layer(x) * wanted).sum().backward()

    weight, doubled = layer.weight.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    expected = doubled @ weight.T + (layer.bias.detach().double() if bias else 0)
    (expected * wanted).sum().backward()
    close = dict(atol=1e-5 * d_in**0.5, rtol=1e-5)
    torch.testing.assert_close(layer(x).double(), expected, **close)
    torch.testing.assert_close(x.grad.double(), doubled.grad, **close)
    torch.testing.assert_close(layer.weight.grad.double(), weight.grad, atol=1e-5 * (rows * time) ** 0.5, rtol=1e-5)
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), wanted.double().sum((0, 1)), **close)


def test_which_products_are_taken_by_it(monkeypatch):
    """Large ones in fp32 on a CPU; it is exact, and deterministic."""
    taken = []
    monkeypatch.setattr(
        module._Product, "apply", lambda x, w, b: taken.append(1) or module.ONEDNN(x, w, b, "none", [], "")
    )
    x, weight = torch.randn(200, 256), torch.randn(64, 256)
    first = product(x, weight)
    assert taken == [1]
    assert torch.equal(first, product(x, weight))
    assert torch.equal(first, product(x, weight.t().contiguous().t()))  # whatever the layout
    taken.clear()
    product(x[:10], weight), product(x.double(), weight.double()), product(x.bfloat16(), weight.bfloat16())
    product(x[:0], weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(x, weight).dtype == torch.bfloat16
    assert not taken


def test_its_operations_are_counted():
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(200, 256, requires_grad=True)
        Linear(256, 64)(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 200 * 256 * 64


def test_second_derivatives(monkeypatch):
    monkeypatch.setattr(module, "LEAST", 0)
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(product(x, weight).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), weight)
    monkeypatch.setattr(module, "LEAST", 2**62)
    (grad,) = torch.autograd.grad(product(x, weight).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(grad.square().sum(), weight)
    torch.testing.assert_close(second, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kind", [PackedLinear, SlicedLinear])
@pytest.mark.parametrize("threads", [1, 2, 6])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 200])
@pytest.mark.parametrize(("d_in", "d_out"), [(256, 256), (65, 7), (64, 4098), (1024, 256)])
def test_products_with_weights_in_another_order(d_in, d_out, rows, bias, threads, kind, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(module, "LEAST_SLICE", 2**6)
    torch.manual_seed(0)
    linear, x = Linear(d_in, d_out, bias=bias), torch.randn(rows, 1, d_in)
    expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    with torch.inference_mode():
        found = kind(linear)(x)
        row = kind(linear)(x[0])  # without a batch
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * d_in**0.5, rtol=1e-5)
    torch.testing.assert_close(row.double(), expected[0], atol=1e-5 * d_in**0.5, rtol=1e-5)


SMALL = {"attention.qkv", "attention.output", "feed_forward.input", "feed_forward.output"}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(("rows", "packed", "sliced"), [
    (1, {"head"}, {f"blocks.0.{name}" for name in SMALL}), (2, {"head"}, set()), (64, {"head"}, set()),
])  # fmt: skip
def test_a_packed_model_gives_the_same_logits(rows, packed, sliced, tie, monkeypatch):
    """64 x 2,048 weights are enough for several rows, 64 x 256 are not."""
    monkeypatch.setitem(module.LEAST_PACKED, "row", 2**17)
    model = make(tie_embeddings=tie, bias=True, n_layers=1, d_model=64, vocab_size=2048)
    tokens, table = torch.randint(2048, (rows, 12)), model.embedding.weight.clone()
    with torch.inference_mode():
        expected = model(tokens)
        pack_weights(model, rows)
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.embedding.weight, table)
    for kind, names in ((PackedLinear, packed), (SlicedLinear, sliced)):
        assert {name for name, part in model.named_modules() if isinstance(part, kind)} == names


def test_what_is_packed_stays_as_it_is_elsewhere():
    """Where the numbers are not fp32, or lie in eight bits already."""
    model = make(n_layers=1, d_model=64, vocab_size=2048).bfloat16()
    for change in (lambda model: None, quantize_int8):
        change(model)
        names = [type(part) for part in model.modules()]
        for rows in (1, 64):
            pack_weights(model, rows)
            assert [type(part) for part in model.modules()] == names
