"""Kernels, encodings and caches agree with each other and with references from outside."""

import math

import pytest
import torch
import torch.nn.functional as F

from minitransformer import SelfAttention, get_attention_weights, scaled_dot_product_attention, sinusoidal_encoding
from minitransformer.model.attention import attend
from minitransformer.model.masks import AttentionMask, causal, documents
from tests.model.models import make, with_gradients


def test_textbook_example():
    """Scores 0, 6, 0, 0, 9 of "flies" in "time flies like an arrow", d_k = 4."""
    query = torch.tensor([[1.0, 0, 0, 0]])
    key = torch.tensor([0.0, 6, 0, 0, 9])[:, None] * query
    _, weights = scaled_dot_product_attention(query, key, torch.eye(5))
    assert [f"{w:.2f}" for w in weights[0]] == ["0.01", "0.18", "0.01", "0.01", "0.80"]
    unscaled = (query @ key.T).softmax(-1)
    assert [f"{w:.2f}" for w in unscaled[0]] == ["0.00", "0.05", "0.00", "0.00", "0.95"]


def test_equation_in_float64_loops():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, dtype=torch.float64)
    bias, mask = torch.randn(5, 5, dtype=torch.float64), torch.rand(5, 5) < 0.6
    mask[2] = False  # sees nothing
    output, weights = scaled_dot_product_attention(q, k, v, mask, bias)
    for i in range(5):
        scores = {j: math.exp(sum(q[i] * k[j]).item() / 2 + bias[i, j].item()) for j in range(5) if mask[i, j]}
        expected = sum((s / sum(scores.values()) * v[j] for j, s in scores.items()), torch.zeros(4))
        torch.testing.assert_close(output[i], expected.double(), atol=1e-6, rtol=1e-5)
    assert output[2].eq(0).all()
    assert weights[2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex"])
def test_rows_that_see_nothing_give_zero_and_finite_gradients(kernel, dtype):
    positions = torch.tensor([[-1, -1, 0, 1], [-1, -1, -1, -1]])
    q, k, v = (torch.randn(2, 2, 4, 8, dtype=dtype, requires_grad=kernel != "flex") for _ in range(3))
    output, _ = attend(q, k, v, AttentionMask(positions, 4), kernel=kernel)
    assert output.transpose(1, 2)[positions < 0].eq(0).all()
    if kernel == "flex":
        return  # no gradients on a CPU
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_multi_head_attention_equals_torch():
    model = make("none", n_heads=4)
    ours = model.blocks[0].attention
    theirs = torch.nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    theirs.load_state_dict({"in_proj_weight": ours.qkv.weight, "out_proj.weight": ours.output.weight})
    x = torch.randn(2, 9, 32)
    hidden = torch.ones(9, 9).triu(1).bool()
    expected, expected_weights = theirs(x, x, x, attn_mask=hidden, average_attn_weights=False)
    output, weights = ours(x, AttentionMask(torch.arange(9)[None], 9), return_weights=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights.expand_as(expected_weights), expected_weights, atol=1e-6, rtol=1e-4)


def test_slices_by_document_are_used_and_equal_one_mask():
    """Documents long enough for slicing: the same output and gradients as a dense mask."""
    positions = torch.cat([torch.arange(n) for n in (40, 60, 80, 20)] + [torch.full((56,), -1), torch.arange(256)])
    positions = positions.view(2, 256)
    attention_mask = AttentionMask(positions, 256)
    assert attention_mask.slices == [
        (1, 40, True),
        (1, 60, True),
        (1, 80, True),
        (1, 20, True),
        (1, 56, False),
        (1, 256, True),
    ]
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 4, 256, 16)
    results = [with_gradients(kernel, attention_mask, qkv) for kernel in ("reference", "sdpa")]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_masks_compose_and_documents_are_counted():
    q, k = torch.arange(5)[:, None], torch.arange(5)[None]
    window = type(causal)(lambda q, k: q - k < 2)
    assert (causal & window)(q, k).sum(-1).tolist() == [1, 2, 2, 2, 2]
    assert (causal | window)(q, k).all()
    assert documents(torch.tensor([[0, 1, 0, 0, 1, -1]])).tolist() == [[1, 1, 2, 3, 3, -1]]


def test_sinusoidal_values():
    torch.testing.assert_close(
        sinusoidal_encoding(2, 4)[1], torch.tensor([0.84147, 0.54030, 0.0100, 0.99995]), atol=1e-5, rtol=0
    )


def test_rotary_scores_depend_on_distance_alone():
    model = make("rotary")
    from minitransformer.model.positions import rotate

    q, k = torch.randn(2, 1, 1, 1, 8)
    at = lambda p: model.position.rotation(torch.tensor([[p]]))  # noqa: E731
    scores = [(rotate(q, at(p + 3)) * rotate(k, at(p))).sum().item() for p in (0, 7, 50)]
    assert max(scores) - min(scores) < 1e-5
    assert abs(scores[0] - (q * k).sum().item()) > 1e-3


def test_one_head_is_the_equation():
    torch.manual_seed(0)
    head, x = SelfAttention(16, 4), torch.randn(2, 5, 16)
    mask = torch.ones(5, 5).tril().bool()
    output, weights = head(x, mask)
    expected = F.scaled_dot_product_attention(head.query(x), head.key(x), head.value(x), is_causal=True)
    torch.testing.assert_close(output, expected)
    assert weights.triu(1).eq(0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("return_weights", [False, True])
def test_cross_attention_equals_torch(kernel, return_weights):
    ours = make("none", kernel=kernel).blocks[0].attention
    theirs = torch.nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    theirs.load_state_dict({"in_proj_weight": ours.qkv.weight, "out_proj.weight": ours.output.weight})
    x, context = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    expected, weights = theirs(x, context, context, average_attn_weights=False)
    output, found = ours(x, context=context, return_weights=return_weights)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    if return_weights:
        torch.testing.assert_close(found, weights, atol=1e-5, rtol=1e-4)


def test_weights_of_one_head():
    model, tokens = make(), torch.randint(50, (2, 7))
    weights = get_attention_weights(model, tokens, layer=1, head=2)
    assert weights.shape == (2, 7, 7)
    torch.testing.assert_close(weights, model(tokens, return_attention=True)[1][1][:, 2])
    for wrong in (dict(layer=2, head=0), dict(layer=0, head=4), dict(layer=-1, head=0)):
        with pytest.raises(ValueError, match=r"(layer|head)=-?\d does not exist; the model has \w+s 0 to \d"):
            get_attention_weights(model, tokens, **wrong)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
def test_too_long_names_both_numbers(position):
    with pytest.raises(ValueError, match=r"65 tokens.*max_seq_len=64"):
        make(position)(torch.zeros(1, 65, dtype=torch.long))


def test_shapes_that_disagree():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(1, 3\)"):
        make()(torch.zeros(1, 3, dtype=torch.long), positions=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="batch, time"):
        make()(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="token id 50 is outside the vocabulary of 50"):
        make()(torch.tensor([[0, 50]]))
    for wrong in ([[1, 2, 3]], [[0, 2, 3]], [[0, 1, 1]], [[0, -2, 0]]):
        with pytest.raises(ValueError, match=r"restart at 0 and go on by one.*row 0 has"):
            make()(torch.zeros(1, 3, dtype=torch.long), positions=torch.tensor(wrong))
    cache = make().new_cache(1, 4)
    with pytest.raises(ValueError, match="holds 4 tokens; 0 \\+ 5"):
        make()(torch.zeros(1, 5, dtype=torch.long), cache=cache)


def test_no_kernel_of_cudnn_is_taken():
    """Its gradients are NaN where padding sees nothing, in rows of 64, 192, ... tokens."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()
