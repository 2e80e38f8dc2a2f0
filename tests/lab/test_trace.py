"""Every number that the attention lab shows, against the equations written out again."""

import math

import pytest
import torch

from minitransformer.lab import trace as look
from tests.model.models import make

KINDS = {
    "rotary": dict(),
    "rotary_qk_norm_grouped": dict(position="rotary", qk_norm=True, n_kv_heads=2),
    "none_multi_query": dict(position="none", n_kv_heads=1),
    "sinusoidal_post_norm": dict(position="sinusoidal", norm_placement="post", norm="layernorm", bias=True),
    "learned_bigbird": dict(position="learned", pattern=["bigbird"], window=2, global_tokens=1, block=2),
    "alibi_window": dict(position="alibi", pattern=["window", "full"], window=3),
    "t5_cap": dict(position="t5", softcap=0.3, norm_placement="sandwich"),
    "shaw_strided": dict(position="shaw", pattern=["strided"], stride=3, n_kv_heads=2),
    "transformer_xl_fixed": dict(position="transformer_xl", pattern=["fixed"], stride=4, summary=1),
    "rotary_wide_heads_parallel": dict(position="rotary", d_head=12, parallel=True, tie_embeddings=True),
}
LINEAR = {"elu": dict(kind="elu"), "performer_grouped": dict(kind="performer", n_kv_heads=2, position="none")}
TOKENS = torch.tensor([0, 7, 3, 7, 3, 9, 9, 1, 4, 7, 3])


def built(kind: str):
    """A model of this kind that attends sharply, and its trace."""
    model = make(**(KINDS | LINEAR)[kind])
    for block in model.blocks:
        block.attention.qkv.weight.data *= 3
    return model, look.trace(model, TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_lead_to_the_weights_and_outputs_of_the_model(kind):
    model, seen = built(kind)
    with torch.no_grad():
        _, weights = model(TOKENS[None], return_attention=True)
        plain = model(TOKENS[None])  # by the kernel that the model uses else
    torch.testing.assert_close(seen.logits, plain[0], atol=1e-4, rtol=1e-4)
    n, cap, group = len(TOKENS), model.config.attention.softcap, model.config.n_heads // model.config.kv_heads
    for number, layer in enumerate(seen.layers):
        for head in range(model.config.n_heads):
            q, k, v = (x.double() for x in (layer.q[head], layer.k[head // group], layer.v[head // group]))
            for i in range(n):
                z = [float(q[i] @ k[j]) / math.sqrt(q.shape[1]) for j in range(n)]
                z = [cap * math.tanh(s / cap) if cap else s for s in z]
                z = [s + (0 if layer.bias is None else float(layer.bias[head, i, j])) for j, s in enumerate(z)]
                powers = [math.exp(s) if layer.allowed[i, j] else 0.0 for j, s in enumerate(z)]
                found = torch.tensor([p / sum(powers) for p in powers])
                torch.testing.assert_close(found, weights[number][0, head, i], atol=1e-5, rtol=1e-4)
                values = v
                if kind.startswith("shaw"):
                    values = v + torch.stack(
                        [model.position.values[number][max(-16, min(16, i - j)) + 16] for j in range(n)]
                    )
                torch.testing.assert_close(
                    (found.double() @ values).float(), layer.output[head, i], atol=1e-4, rtol=1e-3
                )
    torch.testing.assert_close(seen.weights, torch.stack(weights)[:, 0])
    assert (seen.layers[0].bias is None) == (model.config.position not in ("alibi", "t5", "shaw", "transformer_xl"))


@pytest.mark.parametrize("kind", LINEAR)
def test_linear_attention_divides_products_by_their_sum(kind):
    model, seen = built(kind)
    with torch.no_grad():
        _, weights = model(TOKENS[None], return_attention=True)
    for layer, expected in zip(seen.layers, weights, strict=True):
        k = layer.k.repeat_interleave(4 // len(layer.k), 0)
        products = (layer.q @ k.mT).tril()
        torch.testing.assert_close(products / products.sum(-1, keepdim=True), expected[0], atol=1e-5, rtol=1e-4)


def test_queries_are_the_stream_times_a_matrix_turned_by_position():
    model, seen = built("rotary")
    with torch.no_grad():
        normed = model.blocks[1].attention_norm(seen.streams[1])
    rows = model.blocks[1].attention.qkv.weight
    head, i, width = 2, 5, 8
    plain = rows[head * width : (head + 1) * width] @ normed[i]
    turned = []
    for pair in range(width // 2):
        a, b = plain[2 * pair : 2 * pair + 2].tolist()
        angle = i * 10_000 ** (-2 * pair / width)
        turned += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    torch.testing.assert_close(seen.layers[1].q[head, i], torch.tensor(turned), atol=1e-5, rtol=1e-4)
    first_value = (4 + 4) * width  # after four heads of queries and four of keys
    torch.testing.assert_close(seen.layers[1].v[0, i], rows[first_value : first_value + width] @ normed[i])


def test_streams_are_what_the_blocks_read_and_write_and_no_hook_is_left():
    model, seen = built("sinusoidal_post_norm")
    with torch.no_grad():
        expected = model.embedding(TOKENS) * math.sqrt(32) + model.position.table[: len(TOKENS)]
        torch.testing.assert_close(seen.streams[0], expected)
        lens = look.logit_lens(model, seen.streams)
    torch.testing.assert_close(lens[-1], seen.logits)
    torch.testing.assert_close(lens[0], expected @ model.head.weight.T)  # post-norm: nothing stands before the head
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", [*KINDS, *LINEAR])
def test_the_lens_after_the_last_layer_is_the_model(kind):
    model, seen = built(kind)
    assert len(seen.streams) == 3
    torch.testing.assert_close(look.logit_lens(model, seen.streams)[-1], seen.logits)


def test_rollout_of_two_layers_by_hand():
    first = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])  # mean: 1 0 / .5 .5
    second = torch.tensor([[[1.0, 0.0], [0.4, 0.6]], [[1.0, 0.0], [0.0, 1.0]]])  # mean: 1 0 / .2 .8
    # With the residual path 1 0 / .25 .75 and 1 0 / .1 .9; their product's second row: .1 + .9 * .25, .9 * .75.
    found = look.rollout(torch.stack((first, second)))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0], [0.325, 0.675]]))


def test_measures_of_hand_made_heads():
    tokens = torch.tensor([0, 5, 6, 5, 6])  # start a b a b
    n = len(tokens)
    previous = torch.eye(n).roll(1, 0)
    previous[0] = torch.eye(n)[0]
    itself, first = torch.eye(n), torch.zeros(n, n)
    first[:, 0] = 1
    uniform = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    induction = torch.eye(n)  # a (3) looks at the b after the first a (2); b (4) at the a after the first b (3)
    induction[3] = torch.eye(n)[2]
    induction[4] = torch.eye(n)[3]
    repeated = torch.eye(n)
    repeated[3] = torch.eye(n)[1]
    repeated[4] = torch.eye(n)[2]
    heads = torch.stack((previous, itself, first, uniform, induction, repeated))[None]
    found = look.head_measures(heads, tokens)
    mean = lambda *values: sum(values) / len(values)  # noqa: E731
    expected = {
        "previous": [1, 0, 1 / 4, mean(1 / 2, 1 / 3, 1 / 4, 1 / 5), 2 / 4, 0],
        "itself": [0, 1, 0, mean(1 / 2, 1 / 3, 1 / 4, 1 / 5), 2 / 4, 2 / 4],
        "first": [1 / 4, 0, 1, mean(1 / 2, 1 / 3, 1 / 4, 1 / 5), 0, 0],
        "repeated": [0, 0, 0, mean(1 / 4, 1 / 5), 0, 1],
        "induction": [1, 0, 0, mean(1 / 4, 1 / 5), 1, 0],
        "distance": [1, 0, mean(1, 2, 3, 4), mean(0.5, 1, 1.5, 2), 2 / 4, mean(0, 0, 2, 2)],
        "entropy": [0, 0, 0, mean(1, math.log2(3), 2, math.log2(5)), 0, 0],
    }
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name][0], torch.tensor(values, dtype=torch.float), msg=name)


def test_measures_without_repeats_say_so():
    found = look.head_measures(torch.eye(4)[None, None], torch.tensor([0, 1, 2, 3]))
    assert math.isnan(found["repeated"])
    assert math.isnan(found["induction"])
    # A token said twice in a row is followed by the query itself, which is no continuation.
    twice = look.head_measures(torch.eye(3)[None, None], torch.tensor([0, 1, 1]))
    assert twice["repeated"] == 0
    assert math.isnan(twice["induction"])


def test_induction_on_noise_of_uniform_attention():
    model = make(vocab_size=500)
    for block in model.blocks:
        block.attention.qkv.weight.data.zero_()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = look.induction_on_noise(model, bos_id=0, vocab_size=500, length=10)
    assert torch.equal(torch.get_rng_state(), before)
    said = torch.randint(500, (10,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(set(said)) == 10
    # Query i, one of the last ten, gives 1 / (i + 1) to what followed its token.
    torch.testing.assert_close(found, torch.full((2, 4), sum(1 / (i + 1) for i in range(11, 21)) / 10))
    assert look.induction_on_noise(make(max_seq_len=8), 0, 50) is None


@pytest.mark.parametrize("kind", [*KINDS, *LINEAR])
def test_attributions_sum_to_the_difference_of_logits(kind):
    model, seen = built(kind)
    targets = torch.tensor([3, 8])
    found, at, start = look.integrated_gradients(model, TOKENS, targets, baseline=0, n_steps=64)
    assert found.shape == (2, len(TOKENS))
    torch.testing.assert_close(at, seen.logits[-1, targets], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(start, model(torch.zeros_like(TOKENS)[None])[0, -1, targets], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.sum(-1), at - start, atol=2e-2, rtol=2e-2)
    assert (found[:, 0] == 0).all()  # the start token is the baseline's own


def test_attributions_equal_a_fine_sum_of_gradients():
    model, _ = built("alibi_window")
    found, *_ = look.integrated_gradients(model, TOKENS, torch.tensor([3]), baseline=0)
    end, begin = model.embedding(TOKENS).detach(), model.embedding(torch.zeros_like(TOKENS)).detach()
    total, steps = torch.zeros_like(end), 400
    for step in range(steps):
        point = (begin + (step + 0.5) / steps * (end - begin)).requires_grad_()
        handle = model.embedding.register_forward_hook(lambda module, args, result, point=point: point[None])
        model(TOKENS[None])[0, -1, 3].backward()
        handle.remove()
        total += point.grad / steps
    torch.testing.assert_close(found[0], (total * (end - begin)).sum(-1), atol=1e-3, rtol=1e-2)


def test_what_no_layer_sees_has_no_part():
    model = make(position="none", n_layers=1, pattern=["window"], window=3)
    found, *_ = look.integrated_gradients(model, TOKENS, torch.tensor([3]), baseline=0)
    assert (found[0, :-3] == 0).all()
    assert (found[0, -3:] != 0).all()
    assert (look.rollout(look.trace(model, TOKENS).weights)[-1, :-3] == 0).all()


def test_more_tokens_than_the_model_holds():
    with pytest.raises(ValueError, match="max_seq_len=8"):
        look.trace(make(max_seq_len=8), TOKENS)
