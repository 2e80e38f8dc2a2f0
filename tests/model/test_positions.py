"""Each encoding against loops in float64 written from its paper, or against `transformers`."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minitransformer import ModelConfig, scaled_dot_product_attention
from minitransformer.model.config import POSITIONS, RotaryConfig
from minitransformer.model.positions import (
    ENCODINGS,
    RotaryEncoding,
    alibi_slopes,
    rotary_frequencies,
    rotate,
    sinusoidal_encoding,
    t5_bucket,
)
from tests.model.models import make


def test_sinusoidal_values():
    expected = torch.tensor([0.84147, 0.54030, 0.0100, 0.99995])
    torch.testing.assert_close(sinusoidal_encoding(2, 4)[1], expected, atol=1e-5, rtol=0)


def test_rotary_is_a_turn_of_pairs():
    config = ModelConfig(d_model=8, n_heads=1, max_seq_len=50, rotary=RotaryConfig(base=100.0))
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    turned = rotate(x, RotaryEncoding(config).rotation(torch.tensor([[37]])))[0, 0, 0]
    for i in range(4):
        angle = 37 * 100.0 ** (-2 * i / 8)
        a, b = x[0, 0, 0, 2 * i].item(), x[0, 0, 0, 2 * i + 1].item()
        assert turned[2 * i].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)
        assert turned[2 * i + 1].item() == pytest.approx(a * math.sin(angle) + b * math.cos(angle), abs=1e-5)


def test_a_fraction_of_each_head_is_turned():
    config = ModelConfig(d_model=16, n_heads=1, max_seq_len=9, rotary=RotaryConfig(fraction=0.5))
    x = torch.randn(1, 9, 1, 16)
    turned = rotate(x, RotaryEncoding(config).rotation(torch.arange(9)[None]))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.equal(turned[..., :8], x[..., :8])


@pytest.mark.parametrize("scaling", ["linear", "yarn", "llama3"])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_scaled_frequencies_equal_transformers(scaling, factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": scaling, "factor": factor, "rope_theta": 10_000.0}
    if scaling == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if scaling != "linear":
        parameters["original_max_position_embeddings"] = 128
    theirs = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=int(128 * factor), rope_parameters=parameters
    )
    expected, scale = ROPE_INIT_FUNCTIONS[scaling](theirs, "cpu")
    original = None if scaling == "linear" else 128
    rotary = RotaryConfig(scaling=scaling, factor=factor, original_length=original)
    ours, our_scale = rotary_frequencies(ModelConfig(d_model=256, n_heads=4, rotary=rotary))
    torch.testing.assert_close(ours.float(), expected, rtol=1e-5, atol=0)
    assert our_scale == pytest.approx(scale)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest():
    plain, _ = rotary_frequencies(ModelConfig(d_model=64, n_heads=1))
    scaled, _ = rotary_frequencies(ModelConfig(d_model=64, n_heads=1, rotary=RotaryConfig(scaling="ntk", factor=8.0)))
    assert scaled[0] == plain[0]
    assert (plain[-1] / scaled[-1]).item() == pytest.approx(8.0)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes_equal_bloom(n_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)  # slope * position
    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads)), theirs[:, 0, 1])


def test_t5_buckets_equal_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(0, 400)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(t5_bucket(distance, 32, 128), theirs)


def heads_of(model, x):
    """Queries, keys, values of layer 0 as float64, (H, T, D)."""
    q, k, v = model.blocks[0].attention.project(x, None)
    return q[0].double(), k[0].double(), v[0].double()


def check(model, x, scores):
    """The weights of layer 0 against the softmax of scores(q_i, k_j, head, i, j) over j <= i."""
    attention = model.blocks[0].attention
    _, weights = attention(x, position=model.position, return_weights=True)
    q, k, _ = heads_of(model, x)
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            e = [math.exp(scores(q[h, i], k[h, j], h, i, j)) for j in range(i + 1)]
            for j in range(i + 1):
                assert weights[0, h, i, j].item() == pytest.approx(e[j] / sum(e), abs=1e-5)


X = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0))


def test_alibi_by_its_formula():
    model = make("alibi")
    check(model, X, lambda q, k, h, i, j: (q @ k).item() / 8**0.5 - 2.0 ** (-8 * (h + 1) / 4) * (i - j))


def test_t5_by_its_formula():
    model = make("t5")
    table = model.position.embedding.weight.double()

    def bucket(d):
        return d if d < 16 else min(31, 16 + int(math.log(d / 16) / math.log(128 / 16) * 16))

    check(model, X, lambda q, k, h, i, j: (q @ k).item() / 8**0.5 + table[bucket(i - j), h].item())


def test_shaw_by_its_formula():
    """e_ij = q_i (k_j + a^K_{j-i}) / sqrt(d); z_i = sum_j w_ij (v_j + a^V_{j-i}) (equations 3 and 4)."""
    model = make("shaw")
    clip, keys, values = 16, model.position.keys[0].double(), model.position.values[0].double()

    def at(i, j):
        return max(-clip, min(clip, i - j)) + clip

    check(model, X, lambda q, k, h, i, j: (q @ (k + keys[at(i, j)])).item() / 8**0.5)
    attention = model.blocks[0].attention
    attention.output = torch.nn.Identity()
    output, weights = attention(X, position=model.position, return_weights=True)
    _, _, v = heads_of(model, X)
    for h, i in ((0, 0), (1, 5), (3, 23)):
        expected = sum(weights[0, h, i, j].double() * (v[h, j] + values[at(i, j)]) for j in range(i + 1))
        torch.testing.assert_close(output[0, i, 8 * h : 8 * h + 8].double(), expected, atol=1e-5, rtol=1e-4)


def test_transformer_xl_by_its_formula():
    """A_ij = (q_i + u) . k_j + (q_i + v) . W R_{i-j}, over sqrt(d) (Dai et al. 2019, section 3.3)."""
    model = make("transformer_xl")
    position = model.position
    u, v, w = position.u.double(), position.v.double(), position.projections[0].double()

    def r(distance, h):
        angles = [distance / 10_000 ** (2 * i / 32) for i in range(16)]
        vector = [f(a) for a in angles for f in (math.sin, math.cos)]
        return (w @ torch.tensor(vector, dtype=torch.float64))[8 * h : 8 * h + 8]

    check(model, X, lambda q, k, h, i, j: (((q + u[h]) @ k + (q + v[h]) @ r(i - j, h)) / 8**0.5).item())


@pytest.mark.parametrize("position", ["none", "rotary", "alibi", "t5", "shaw", "transformer_xl"])
def test_relative_encodings_depend_on_distance_alone(position):
    """The same text later in a longer stretch of positions has the same weights."""
    model = make(position, n_layers=1)
    attention = model.blocks[0].attention
    results = []
    for shift in (0, 9, 40):
        at = torch.arange(shift, shift + 24)[None]
        rotation = model.position.rotation(at) if model.position.rotates else None
        q, k, v = attention.project(X, rotation)
        bias = model.position.bias(0, q, at, at) if model.position.biased else None
        q = model.position.shift_query(0, q)
        results.append(scaled_dot_product_attention(q, k, v, torch.ones(24, 24).tril().bool(), bias)[1])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-5, rtol=1e-3)


def test_which_encodings_reach_past_their_training_length():
    config = ModelConfig(vocab_size=9, max_seq_len=8, d_model=16, n_heads=2)
    reach = {name for name, make_encoding in ENCODINGS.items() if make_encoding(config).extends}
    assert reach == {"none", "alibi", "t5", "shaw", "transformer_xl"}
    tokens = torch.randint(50, (1, 100))
    for name in ENCODINGS:
        if name in reach:
            make(name)(tokens)
        else:
            with pytest.raises(ValueError, match="100 tokens are more than the model's max_seq_len=64"):
                make(name)(tokens)


class NoDoubles(TorchDispatchMode):
    """A device without float64, as MPS is one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.dtype == torch.float64:
                raise TypeError(f"{function} makes float64 on the device")
        return result


@pytest.mark.parametrize("position", POSITIONS)
def test_no_step_needs_float64(position):
    model, tokens = make(position).to("meta"), torch.zeros(2, 12, dtype=torch.long, device="meta")
    positions = torch.zeros_like(tokens)
    with NoDoubles():
        model(tokens, positions=positions).sum().backward()
        model(tokens[:, :1], cache=model.new_cache(2))
    with pytest.raises(TypeError, match="makes float64"), NoDoubles():
        tokens.double()
