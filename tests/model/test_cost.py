"""The closed forms of what a model costs, against the built model, torch's counter and the allocator."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from minitransformer.model import product
from minitransformer.model.config import POSITIONS, AttentionConfig, ModelConfig
from minitransformer.model.cost import (
    activation_bytes,
    adapter_parameters,
    cache_bytes,
    cache_bytes_per_token,
    flops_per_token,
    hidden_matrix_parameters,
    parameter_count,
    parameters_by_part,
    training_memory,
)
from minitransformer.model.transformer import Transformer
from minitransformer.training.config import AdamWConfig, LoRAConfig, MuonConfig
from minitransformer.training.lora import add_adapters
from minitransformer.training.loss import head_cross_entropy
from minitransformer.training.optimizers import make_optimizer
from tests.conftest import ROOT

A = AttentionConfig


@contextmanager
def allocator() -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that says how many bytes are held since the start, and how many were at most."""
    gc.disable()  # what other tests left would be given back in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda: (held[-1], max(held))
    gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [0]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held.append(held[-1] + event.nbytes())


def kept(config: ModelConfig, checkpointing: bool, rows: int = 2) -> float:
    """Bytes a row that the allocator still holds after a forward pass and its loss, without the head's gradient."""
    torch.manual_seed(0)
    model = Transformer(config)
    model.checkpoint_gradients("full" if checkpointing else "none")
    tokens = torch.randint(config.vocab_size, (rows, config.max_seq_len))
    positions = torch.arange(config.max_seq_len).expand_as(tokens)

    def loss():
        x, _ = model.hidden_states(tokens, positions)
        return head_cross_entropy(x.flatten(0, 1), model.head.weight, tokens.flatten())[0]

    loss()  # what is allocated once for all steps
    with allocator() as found:
        kept = loss()  # noqa: F841
    return (found()[0] - config.vocab_size * config.d_model * 4) / rows


@pytest.mark.parametrize("settings", [
    dict(), dict(activation="relu"), dict(activation="swiglu"), dict(norm="layernorm"), dict(norm_placement="post"),
    dict(norm_placement="sandwich"), dict(parallel=True), dict(position="none"), dict(d_head=32, n_kv_heads=1),
    dict(n_kv_heads=2, attention=A(qk_norm=True)), dict(position="none", norm="layernorm", attention=A(qk_norm=True)),
    dict(attention=A(qk_norm=True, qk_gain=True)), dict(norm="rmsnorm_zero", attention=A(score_width=30)),
    dict(n_kv_heads=2, attention=A(qk_norm=True, qk_gain=True)),
    dict(attention=A(kind="elu", qk_norm=True, qk_gain=True)),
    dict(position="alibi"), dict(position="t5"), dict(position="shaw"), dict(position="transformer_xl"),
    dict(attention=A(kernel="reference")), dict(attention=A(softcap=10.0)), dict(attention=A(pattern=["strided"])),
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
    assert activation_bytes(two, checkpointing="full") == pytest.approx(kept(two, True) + inside, rel=0.1)


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


def test_parameters_by_part_are_those_of_the_modules():
    config = ModelConfig(
        vocab_size=61, d_model=48, n_layers=3, n_heads=4, n_kv_heads=2, position="learned", norm="layernorm", bias=True
    )
    model = Transformer(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    parts = {"embedding": "embedding.", "positions": "position.", "attention": ".attention.", "norms": "norm."}
    parts |= {"feed-forward": ".feed_forward.", "head": "head."}
    for name, found in parameters_by_part(config).items():
        mine = sum(
            n
            for key, n in sizes.items()
            if parts[name] in f"{key}." and (name != "embedding" or key == "embedding.weight")
        )
        assert found == mine, name
    assert hidden_matrix_parameters(config) == sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)


SHAPES = [
    dict(), dict(max_seq_len=90), dict(activation="swiglu"), dict(n_kv_heads=1), dict(d_head=20),
    dict(tie_embeddings=True),
    *[dict(position=name) for name in POSITIONS if name != "rotary"], dict(norm_placement="post"),
    dict(norm_placement="sandwich"), dict(parallel=True), dict(dropout=0.1), dict(attention=A(softcap=5.0)),
    dict(attention=A(kernel="reference")), dict(attention=A(pattern=["strided"])), dict(attention=A(kind="elu")),
    dict(attention=A(kind="elu"), max_seq_len=160), dict(attention=A(kind="performer"), n_kv_heads=2),
    dict(attention=A(kind="performer", features=40), max_seq_len=50),
    dict(attention=A(pattern=["window", "full"], window=20)), dict(attention=A(pattern=["window"], window=70)),
]  # fmt: skip


@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_flops_are_within_two_percent_of_torchs_counter(settings, monkeypatch):
    """Which counts every product of matrices that runs; the fused kernel of the CPU is written out for it.

    oneDNN is left out: behind a function of ours, checkpointing works the last product of a block out once more.
    """
    monkeypatch.setattr(product, "ONEDNN", None)
    shape = dict(vocab_size=61, d_model=48, n_layers=3, n_heads=4, max_seq_len=96) | settings
    config, rows = ModelConfig(**shape), 2
    n = rows * config.max_seq_len
    for how, every in (("none", 0), ("full", 1)) if settings else (("full", 2), ("selective", 0)):
        model, tokens = Transformer(config), torch.randint(61, (rows, config.max_seq_len))
        model.checkpoint_gradients(how, every or 1)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                logits = model(tokens)
            with FlopCounterMode(display=False) as backward:
                logits.sum().backward()
        ahead, both = forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()
        assert flops_per_token(config, rows=rows) * n == pytest.approx(ahead, rel=0.02)
        mine = flops_per_token(config, training=True, rows=rows, recompute_every=every)
        assert mine * n == pytest.approx(both, rel=0.02), how


@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("settings", [
    dict(), dict(activation="swiglu", n_kv_heads=2), dict(norm="layernorm", bias=True, tie_embeddings=True),
], ids=str)  # fmt: skip
def test_adapters_alone(settings, how):
    """Their number, operations and memory, where everything else is frozen."""
    config = ModelConfig(**dict(vocab_size=503, d_model=64, n_layers=4, n_heads=4, max_seq_len=128) | settings)
    lora, tokens = LoRAConfig(rank=4), torch.randint(503, (4, 128))
    n = adapter_parameters(config, lora.rank, lora.targets)

    def trained():
        model = Transformer(config)
        add_adapters(model, lora)
        model.checkpoint_gradients(how)
        stepper = make_optimizer(AdamWConfig(), model)
        for _ in range(2):
            x = model.hidden_states(tokens)[0].flatten(0, 1)
            (head_cross_entropy(x, model.head.weight, tokens.flatten())[0] / 100).backward()
            del x
            stepper.step()
            stepper.zero_grad()
        return model, stepper

    with allocator() as found:
        model, stepper = trained()  # noqa: RUF059  its state is held
    mine = training_memory(config, 4, checkpointing=how, adapters=n)
    assert mine.peak == pytest.approx(found()[1], rel=0.1)
    assert mine.weights + mine.optimizer == pytest.approx(found()[0], rel=0.05)
    assert n == sum(p.numel() for p in model.parameters() if p.requires_grad)
    some = ["blocks.1.*", "blocks.*.attention.qkv"]
    assert adapter_parameters(config, 4, some) < n
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    flops = flops_per_token(config, training=True, recompute_every=how == "full", adapters=n)
    assert flops * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def train(config: ModelConfig, optimizer: AdamWConfig, rows: int, parts: int, how: str, precision: str):
    """Two steps as `LanguageModel` makes them, from nothing."""
    model = Transformer(config)
    if precision == "bf16-true":
        model.bfloat16()
    model.checkpoint_gradients(how)
    stepper = make_optimizer(optimizer, model)
    tokens = torch.randint(config.vocab_size, (rows, config.max_seq_len))
    positions = torch.arange(config.max_seq_len).expand_as(tokens)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            for part, at in zip(tokens.chunk(parts), positions.chunk(parts), strict=True):
                x = model.hidden_states(part, at)[0].flatten(0, 1)
                (head_cross_entropy(x, model.head.weight, part.flatten(), config.logit_softcap)[0] / 100).backward()
                del x
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        stepper.step()
        stepper.zero_grad()
    return model, stepper


PEAKS = [
    dict(), dict(rows=8, parts=2), dict(how="full"), dict(how="selective"), dict(optimizer=MuonConfig()),
    dict(vocab_size=5003, rows=8), dict(vocab_size=20011, tie_embeddings=True), 
    dict(logit_softcap=30.0, vocab_size=5003),
    dict(d_model=256, rows=1), dict(d_model=256, rows=1, optimizer=MuonConfig()), dict(max_seq_len=512, how="full"),
    dict(activation="swiglu", n_kv_heads=1, d_head=32, rows=8), dict(norm="layernorm", bias=True, position="learned"),
    dict(dropout=0.1, rows=4), *[dict(position=name, rows=4) for name in ("alibi", "t5", "shaw", "transformer_xl")],
    dict(attention=A(kind="elu"), rows=4), dict(attention=A(qk_norm=True), rows=4),
    dict(max_seq_len=512, attention=A(pattern=["window"], window=64)),
    dict(norm="rmsnorm_zero", activation="geglu_tanh"),
    dict(attention=A(qk_norm=True, qk_gain=True), rows=4), dict(attention=A(score_width=30), rows=4),
    dict(precision="bf16-true"), dict(precision="bf16-true", dropout=0.1), dict(precision="bf16-true", how="full"),
]  # fmt: skip


@pytest.mark.parametrize("settings", PEAKS + [dict(precision="bf16-mixed") | p for p in PEAKS[:-3]], ids=str)
def test_peak_memory_is_within_a_tenth_of_the_allocators(settings):
    settings = dict(rows=2, parts=1, how="none", optimizer=AdamWConfig(), precision="32") | settings
    names = ("rows", "parts", "how", "optimizer", "precision")
    rows, parts, how, optimizer, precision = (settings.pop(name) for name in names)
    config = ModelConfig(**dict(vocab_size=503, d_model=64, n_layers=4, n_heads=4, max_seq_len=128) | settings)
    with allocator() as found:
        kept = train(config, optimizer, rows, parts, how, precision)  # noqa: F841
    name = "muon" if isinstance(optimizer, MuonConfig) else "adamw"
    mine = training_memory(config, rows // parts, name, how, 1, precision, parts > 1)
    held, peak = found()
    assert mine.peak == pytest.approx(peak, rel=0.1)
    assert mine.weights + mine.optimizer == pytest.approx(held, rel=0.05)  # after the step


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and glibc's settings")
def test_peak_memory_is_within_15_percent_of_what_a_process_takes():
    """When freed blocks go back to the system at once; by default glibc keeps up to half as much again."""
    code = """if True:
        import re, pathlib
        from tests.model.test_cost import *
        configs = [ModelConfig(vocab_size=257, d_model=d, n_layers=8, n_heads=4, max_seq_len=256) for d in (32, 256)]
        taken = []
        for config in configs:
            kept = train(config, AdamWConfig(), 3, 1, "none", "32")
            taken.append(1024 * int(re.search("VmHWM:(.*) kB", pathlib.Path("/proc/self/status").read_text())[1]))
        peaks = [training_memory(config, 3).peak for config in configs]
        print((peaks[1] - peaks[0]) / (taken[1] - taken[0]))
    """
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("attention", [
    A(), A(pattern=["window", "full"], window=8), A(kind="elu"),
], ids=str)  # fmt: skip
def test_cache_bytes_are_those_of_the_cache(attention):
    config = ModelConfig(vocab_size=9, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, attention=attention)
    model = Transformer(config)
    sizes = [sum(b.data.nbytes for b in (*c.keys, *c.values)) for c in (model.new_cache(1, n) for n in (100, 150))]
    assert sizes[1] - sizes[0] == 50 * cache_bytes_per_token(config)


@pytest.mark.parametrize("attention", [
    A(), A(pattern=["window", "full"], window=8), A(pattern=["window"], window=90), A(kind="elu"), A(kind="performer"),
], ids=str)  # fmt: skip
def test_cache_bytes_are_those_of_a_row_that_was_read(attention):
    config = ModelConfig(
        vocab_size=9, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, max_seq_len=60, attention=attention
    )
    model = Transformer(config)
    cache = model.new_cache(1)
    model(torch.randint(9, (1, 60)), cache=cache)
    held = [*(b.data for b in (*cache.keys, *cache.values)), *(state for state in cache.states if state is not None)]
    assert cache_bytes(config) == sum(tensor.nbytes for tensor in held)


def test_gpt2_preset_has_its_published_size():
    config = ModelConfig(
        vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_seq_len=1024, position="learned", norm="layernorm",
        activation="gelu_tanh", bias=True, tie_embeddings=True,
    )  # fmt: skip
    assert parameter_count(config) == 124_439_808
