"""Linear attention against its formula, and the softmax that the performer approximates."""

import pytest
import torch

from minitransformer.model.linear import causal_linear_attention, orthogonal_directions
from tests.model.models import make


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_chunks_equal_the_formula(length):
    """sum_j (q_i . k_j) v_j / sum_j q_i . k_j over j <= i of one document, in float64 loops."""
    torch.manual_seed(length)
    q, k = torch.rand(2, 1, 1, length, 3, dtype=torch.float64) + 0.1
    v = torch.randn(1, 1, length, 2, dtype=torch.float64)
    starts = torch.rand(length) < 0.03
    starts[0] = True
    positions = torch.arange(length) - torch.where(starts, torch.arange(length), 0).cummax(0).values
    positions[length * 9 // 10 + 1 :] = -1
    output, _ = causal_linear_attention(q, k, v, positions[None])
    for i in range(length):
        expected = torch.zeros(2, dtype=torch.float64)
        if positions[i] >= 0:
            j = range(i - int(positions[i]), i + 1)
            w = torch.stack([q[0, 0, i] @ k[0, 0, n] for n in j])
            expected = (w[:, None] * v[0, 0, j.start : i + 1]).sum(0) / w.sum()
        torch.testing.assert_close(output[0, 0, i], expected)


def test_performer_features_have_the_softmax_kernel_as_their_mean():
    torch.manual_seed(0)
    layer = make("none", kind="performer", features=4096).blocks[0].attention
    layer.directions = orthogonal_directions(4096, 8)
    q, k = torch.randn(2, 200, 8) / 2
    expected = (q * k).sum(-1).div(8**0.5).exp()
    found = (layer.feature_map(q) * layer.feature_map(k)).sum(-1)
    assert ((found - expected) / expected).abs().median() < 0.05


@pytest.mark.parametrize("kind", ["elu", "performer"])
def test_the_state_does_not_grow(kind):
    model = make("none", kind=kind)
    cache = model.new_cache(2)
    sizes = []
    for part in torch.randint(50, (2, 60)).split([1, 20, 1, 38], dim=1):
        model(part, cache=cache)
        sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("kind", ["elu", "performer"])
def test_weights_give_the_output(kind):
    layer = make("none", kind=kind).blocks[0].attention
    x = torch.randn(1, 80, 32)
    output, weights = layer(x, return_weights=True)
    _, _, v = layer.project(x, None)
    expected = layer.output((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="weights cannot be shown with a cache"):
        layer(x, cache=make("none", kind=kind).new_cache(1), return_weights=True)


def test_performer_directions_travel_with_the_model():
    assert "blocks.0.attention.directions" in make("none", kind="performer").state_dict()


@pytest.mark.parametrize("kind", ["elu", "performer"])
def test_only_the_projections_are_narrow_under_autocast(kind):
    """Features, sums and quotients are in fp32, as its docstring says."""
    layer = make("none", kind=kind).blocks[0].attention
    x = torch.randn(2, 70, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = layer(x)
        q, k, v = layer.project(x, None)
    assert q.dtype == torch.bfloat16
    expected, _ = causal_linear_attention(layer.feature_map(q), layer.feature_map(k), v.float(), torch.arange(70)[None])
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer.output(expected.to(x.dtype).transpose(1, 2).flatten(2))
    assert torch.equal(found, expected)
