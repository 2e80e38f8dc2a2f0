"""The model against `transformers`, its initialisation and its size."""

import pytest
import torch

from minitransformer import ModelConfig, Transformer
from minitransformer.model.config import ACTIVATIONS, INITS, NORMS, POSITIONS, AttentionConfig, RotaryConfig
from tests.model.models import make


@torch.no_grad()
def test_logits_equal_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = dict(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=40, initializer_range=0.2)
    theirs = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    for name, p in theirs.named_parameters():
        if name.endswith("bias"):
            p.normal_(std=0.2)
    ours = Transformer(
        ModelConfig(
            vocab_size=40, d_model=32, n_layers=2, n_heads=4, max_seq_len=16, position="learned", norm="layernorm",
            activation="gelu_tanh", bias=True, tie_embeddings=True, init="gpt2", norm_eps=1e-5,
        )
    ).eval()  # fmt: skip
    ours.embedding.weight.copy_(theirs.transformer.wte.weight)
    ours.position.embedding.weight.copy_(theirs.transformer.wpe.weight)
    pairs = [(ours.norm, theirs.transformer.ln_f)]
    for mine, their in zip(ours.blocks, theirs.transformer.h, strict=True):
        pairs += [
            (mine.attention_norm, their.ln_1), (mine.feed_forward_norm, their.ln_2),
            (mine.attention.qkv, their.attn.c_attn), (mine.attention.output, their.attn.c_proj),
            (mine.feed_forward.input, their.mlp.c_fc), (mine.feed_forward.output, their.mlp.c_proj),
        ]  # fmt: skip
    for mine, their in pairs:
        mine.weight.copy_(their.weight.T if their.weight.ndim == 2 else their.weight)
        mine.bias.copy_(their.bias)
    tokens = torch.randint(40, (3, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


LLAMAS = [
    dict(n_kv_heads=4), dict(n_kv_heads=2), dict(n_kv_heads=1), dict(scaling="linear", factor=4.0),
    dict(scaling="yarn", factor=4.0), dict(window=5),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", LLAMAS, ids=str)
def test_logits_equal_llama_and_mistral(kind):
    """Grouped-query heads, rotary scalings, and Mistral's sliding window."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    n_kv_heads, window = kind.get("n_kv_heads", 4), kind.get("window")

    torch.manual_seed(0)
    settings = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=40)
    settings |= dict(num_key_value_heads=n_kv_heads, initializer_range=0.2, max_position_embeddings=64)
    rotary = RotaryConfig()
    if scaling := kind.get("scaling"):
        rotary = RotaryConfig(scaling=scaling, factor=kind["factor"])
        parameters = {"rope_type": scaling, "factor": kind["factor"], "rope_theta": 10_000.0}
        settings["rope_parameters"] = parameters | {"original_max_position_embeddings": 16}
    if window:
        theirs = MistralForCausalLM(MistralConfig(sliding_window=window, **settings)).eval()
    else:
        theirs = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    attention = AttentionConfig(pattern=["window"], window=window) if window else AttentionConfig()
    ours = Transformer(
        ModelConfig(
            vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=n_kv_heads, d_ff=48, max_seq_len=64,
            activation="swiglu", rotary=rotary, attention=attention,
        )
    ).eval()  # fmt: skip

    def pair_up(weight):  # theirs turns dimension i with i + D/2, ours 2i with 2i + 1
        return weight.view(-1, 2, 4, 32).transpose(1, 2).reshape(weight.shape)

    ours.embedding.weight.copy_(theirs.model.embed_tokens.weight)
    ours.head.weight.copy_(theirs.lm_head.weight)
    for mine, their in zip(ours.blocks, theirs.model.layers, strict=True):
        a, m = their.self_attn, their.mlp
        q, k, v = pair_up(a.q_proj.weight), pair_up(a.k_proj.weight), a.v_proj.weight
        mine.attention.qkv.weight.copy_(torch.cat((q, k, v)))
        mine.attention.output.weight.copy_(a.o_proj.weight)
        mine.feed_forward.input.weight.copy_(torch.cat((m.gate_proj.weight, m.up_proj.weight)))
        mine.feed_forward.output.weight.copy_(m.down_proj.weight)
    tokens = torch.randint(40, (3, 40))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("tie", [False, True])
def test_initial_loss_is_that_of_a_uniform_guess(init, tie):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=100, d_model=64, n_layers=2, n_heads=4, init=init, tie_embeddings=tie, max_seq_len=32
    )
    tokens = torch.randint(100, (8, 33))
    logits = Transformer(config)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    # xavier and d_model begin with logits of variance 1, which cost half a nat.
    assert abs(loss.item() - 4.605 - (0 if init in ("zero_residual", "gpt2") else 0.5)) < 0.15


def test_gpt2_initialisation_scales_residual_matrices_by_depth():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=100, d_model=256, n_layers=8, n_heads=4, init="gpt2", tie_embeddings=True)
    )
    assert model.blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[0].feed_forward.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)


def test_dropout_acts_in_training_only_and_survives_checkpointing():
    config = ModelConfig(vocab_size=50, d_model=32, n_layers=3, n_heads=4, dropout=0.2, max_seq_len=16, init="gpt2")
    torch.manual_seed(0)
    model = Transformer(config)
    tokens = torch.randint(50, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    gradients = []
    for how, every in (("none", 1), ("full", 1), ("full", 2), ("selective", 1), ("selective", 3)):
        model.checkpoint_gradients(how, every)
        assert [block.recompute for block in model.blocks] == [how if i % every == 0 else "none" for i in range(3)]
        model.zero_grad()
        torch.manual_seed(1)
        model(tokens).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(("settings", "words"), [
    (dict(d_model=30, n_heads=4), ["d_model=30", "n_heads=4"]),
    (dict(n_kv_heads=3), ["n_heads=4", "n_kv_heads=3"]),
    (dict(position="magic"), ["model.position", *POSITIONS]),
    (dict(norm="magic"), ["model.norm", *NORMS]), (dict(norm_placement="magic"), ["model.norm_placement", "sandwich"]),
    (dict(parallel=True, norm_placement="post"), ["parallel", "post"]), (dict(norm_eps=0), ["norm_eps=0"]),
    (dict(position="alibi", rotary=RotaryConfig(base=5)), ["model.rotary", "position=alibi"]),
    (dict(dropout=0.1, attention=AttentionConfig(kernel="flex")), ["kernel=flex", "dropout=0.1"]),
    (dict(attention=AttentionConfig(features=9)), ["features", "performer"]),
    (dict(attention=AttentionConfig(kind="elu", features=9)), ["features", "performer"]),
    (dict(attention=AttentionConfig(kind="elu", pattern=["window"])), ["kind=elu", "window", "[full]"]),
    (dict(attention=AttentionConfig(kind="elu", softcap=2)), ["kind=elu", "softcap"]),
    (dict(activation="magic"), ["model.activation", *ACTIVATIONS]),
    (dict(init="magic"), ["model.init", *INITS]),
    (dict(d_head=7), ["d_head=7"]), (dict(n_layers=0), ["n_layers=0"]), (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(dropout=float("nan")), ["dropout"]), (dict(logit_softcap=-1), ["logit_softcap"]),
], ids=str)  # fmt: skip
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ModelConfig(**dict(d_model=64, n_heads=4) | settings)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("settings", "words"), [
    (dict(kernel="magic"), ["model.attention.kernel", "sdpa", "flex"]), (dict(kind="magic"), ["attention.kind", "elu"]),
    (dict(pattern=[]), ["attention.pattern is empty"]), (dict(pattern=["magic"]), ["attention.pattern", "bigbird"]),
    (dict(window=0), ["window=0"]), (dict(softcap=-1), ["softcap=-1"]),
    (dict(pattern=["fixed"], summary=9, stride=4), ["summary=9", "stride=4"]), (dict(score_width=0), ["score_width=0"]),
    (dict(qk_gain=True), ["qk_gain=true", "qk_norm=true"]),
], ids=str)  # fmt: skip
def test_wrong_attention_is_named(settings, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        AttentionConfig(**settings)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("settings", "words"), [
    (dict(scaling="magic"), ["rotary.scaling", "yarn"]), (dict(factor=2.0), ["factor=2.0", "scaling"]),
    (dict(fraction=0), ["fraction=0"]), (dict(base=0), ["base=0"]), (dict(scaling="ntk", factor=0.5), ["factor=0.5"]),
    (dict(slow=2), ["rotary.slow and fast", "yarn"]), (dict(scaling="llama3", slow=5), ["slow=5", "fast=4"]),
    (dict(scaling="llama3", factor=2.0, attention_factor=1.1), ["attention_factor=1.1", "scaling=yarn"]),
], ids=str)  # fmt: skip
def test_wrong_rotary_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        RotaryConfig(**settings)
    assert all(word in str(error.value) for word in words)


def test_a_config_survives_plain_values_and_refuses_unknown_ones():
    from dataclasses import asdict

    config = ModelConfig(vocab_size=9, attention=AttentionConfig(qk_norm=True), rotary=RotaryConfig(base=9.0))
    assert ModelConfig.from_dict(asdict(config)) == config
    with pytest.raises(ValueError, match="shape_shift"):
        ModelConfig.from_dict(asdict(config) | {"shape_shift": 1})


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex"])
def test_a_width_of_scores_scales_queries(kernel):
    """Scores over sqrt(2) with d_head 8 are those of queries twice as large."""
    narrow, plain = make(score_width=2.0, kernel=kernel), make(kernel=kernel)
    tokens = torch.randint(50, (2, 12))
    with torch.no_grad():
        assert not torch.allclose(narrow(tokens), plain(tokens), atol=1e-3)
        for block in plain.blocks:
            block.attention.qkv.weight[:32] *= 2
        torch.testing.assert_close(narrow(tokens), plain(tokens), atol=1e-5, rtol=1e-5)


def test_zero_centred_norms_and_scaled_embeddings_by_plain_ones():
    gemma, plain = make(norm="rmsnorm_zero", scale_embedding=True), make()
    fresh = Transformer(ModelConfig(vocab_size=9, d_model=8, n_heads=2, norm="rmsnorm_zero"))
    assert not fresh.norm.weight.any()  # a gain of one
    state = {n: 1 + w if "norm" in n else w for n, w in gemma.state_dict().items()}
    state["embedding.weight"] = state["embedding.weight"] * 32**0.5
    plain.load_state_dict(state)
    tokens = torch.randint(50, (2, 12))
    torch.testing.assert_close(gemma(tokens), plain(tokens), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="sinusoidal scales embeddings already"):
        ModelConfig(position="sinusoidal", scale_embedding=True)
    with pytest.raises(ValueError, match="score_width=4"):
        ModelConfig(attention=AttentionConfig(kind="elu", score_width=4))


def test_logit_soft_cap_bounds_logits():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=2, logit_softcap=5.0))
    torch.nn.init.normal_(model.head.weight, std=10)
    assert model(torch.randint(50, (1, 8))).abs().max() <= 5
