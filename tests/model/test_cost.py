"""The closed forms of what a model costs, against the built model, torch's counter and the allocator."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from minitransformer.model.config import POSITIONS, AttentionConfig, ModelConfig
from minitransformer.model.cost import activation_bytes, cache_bytes_per_token, flops_per_token, parameter_count
from minitransformer.model.transformer import Transformer
from minitransformer.training.loss import head_cross_entropy

A = AttentionConfig


def kept(config: ModelConfig, checkpointing: bool, rows: int = 2) -> float:
    """Bytes a row that the allocator still holds after a forward pass and its loss, without the head's gradient."""
    torch.manual_seed(0)
    model = Transformer(config)
    model.checkpoint_gradients("full" if checkpointing else "none")
    tokens = torch.randint(config.vocab_size, (rows, config.max_seq_len))
    positions = torch.arange(config.max_seq_len).expand_as(tokens)

    def loss():
        x, _ = model.features(tokens, positions)
        return head_cross_entropy(x.flatten(0, 1), model.head.weight, tokens.flatten())[0]

    loss()  # what is allocated once for all steps
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = loss()  # noqa: F841
    held = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    return (held - config.vocab_size * config.d_model * 4) / rows


@pytest.mark.parametrize("settings", [
    dict(), dict(activation="relu"), dict(activation="swiglu"), dict(norm="layernorm"), dict(norm_placement="post"),
    dict(norm_placement="sandwich"), dict(parallel=True), dict(position="none"), dict(d_head=32, n_kv_heads=1),
    dict(n_kv_heads=2, attention=A(qk_norm=True)), dict(position="none", norm="layernorm", attention=A(qk_norm=True)),
    dict(attention=A(qk_norm=True, qk_gain=True)), dict(norm="rmsnorm_zero", attention=A(score_width=30)),
    dict(n_kv_heads=2, attention=A(qk_norm=True, qk_gain=True)),
    dict(attention=A(kind="elu", qk_norm=True, qk_gain=True)),
    dict(position="alibi"), dict(position="t5"), dict(position="shaw"), dict(position="transformer_xl"),
    dict(attention=A(kernel="reference")), dict(attention=A(soft_cap=10.0)), dict(attention=A(pattern=["strided"])),
    dict(attention=A(pattern=["window"], window=16)), dict(attention=A(pattern=["window"], window=64)),
    dict(dropout=0.1), dict(dropout=0.1, attention=A(kernel="reference")), dict(attention=A(kind="elu")),
    dict(attention=A(kind="performer")), dict(position="none", n_kv_heads=2, attention=A(kind="elu", qk_norm=True)),
], ids=str)  # fmt: skip
def test_activation_bytes_are_within_a_tenth_of_the_allocators(settings):
    shape = dict(vocab_size=61, d_model=48, n_heads=4, max_seq_len=128) | settings
    two, three = (ModelConfig(n_layers=n, **shape) for n in (2, 3))
    whole = kept(two, False)
    assert activation_bytes(two) == pytest.approx(whole, rel=0.1)
    # Checkpointing: what is kept, and the inside of the one block that is being recomputed.
    inside = kept(three, False) - whole
    assert activation_bytes(two, checkpointing=True) == pytest.approx(kept(two, True) + inside, rel=0.1)


@pytest.mark.parametrize("settings", [
    {}, dict(bias=True), dict(norm="layernorm"), dict(norm="layernorm", bias=True), dict(tie_embeddings=True),
    dict(activation="swiglu", bias=True), dict(activation="geglu"), dict(n_kv_heads=2, d_head=24), dict(d_ff=100),
    dict(norm_placement="post"), dict(norm_placement="sandwich"), dict(parallel=True), dict(d_ff=100, bias=True),
    dict(norm="rmsnorm_zero"), dict(activation="geglu_tanh"), dict(attention=A(qk_norm=True, qk_gain=True), d_head=20),
    dict(attention=A(qkv_bias=True)), dict(bias=True, attention=A(output_bias=False)),
    dict(attention=A(kind="performer")), *[dict(position=name) for name in POSITIONS],
], ids=str)  # fmt: skip
def test_parameter_count_is_exact(settings):
    config = ModelConfig(vocab_size=61, d_model=48, n_layers=3, n_heads=4, max_seq_len=20, **settings)
    assert parameter_count(config) == sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize("settings", [{}, dict(activation="swiglu"), dict(n_kv_heads=1), dict(d_head=20)], ids=str)
def test_flops_equal_torchs_counter(settings):
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(
        vocab_size=61, d_model=48, n_layers=3, n_heads=4, max_seq_len=32, position="none",
        attention=A(kernel="reference"), **settings,
    )  # fmt: skip
    model, tokens = Transformer(config), torch.randint(61, (2, 32))
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward.get_total_flops() / 64 == flops_per_token(config)
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both / 64 == pytest.approx(flops_per_token(config, training=True), rel=0.02)


@pytest.mark.parametrize("attention", [
    A(), A(pattern=["window", "full"], window=8), A(kind="elu"),
], ids=str)  # fmt: skip
def test_cache_bytes_are_those_of_the_cache(attention):
    config = ModelConfig(vocab_size=9, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, attention=attention)
    model = Transformer(config)
    sizes = [sum(b.data.nbytes for b in (*c.keys, *c.values)) for c in (model.new_cache(1, n) for n in (100, 150))]
    assert sizes[1] - sizes[0] == 50 * cache_bytes_per_token(config)


def test_gpt2_preset_has_its_published_size():
    config = ModelConfig(
        vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_seq_len=1024, position="learned", norm="layernorm",
        activation="gelu_tanh", bias=True, tie_embeddings=True,
    )  # fmt: skip
    assert parameter_count(config) == 124_439_808
