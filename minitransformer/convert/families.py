"""The model families of Hugging Face that ours can be, one table each, read in both directions (see `mapping`)."""

from dataclasses import replace
from typing import Any

from minitransformer.convert.mapping import (
    REQUIRED,
    Family,
    NoCounterpart,
    Part,
    cap,
    dropout,
    ignored,
    layers,
    only,
    rotary,
    same,
)
from minitransformer.model.config import ModelConfig

# How `transformers` samples from a model: these keys, if any, are in generation_config.json too.
GENERATION = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
# What else describes the use of a model, and is kept for when it leaves again.
USE = (*GENERATION, "tokenizer_class", "unk_token_id", "sep_token_id", "prefix", "task_specific_params")
# Of no consequence to what a model computes: who wrote it, how it was trained, how `transformers` runs it.
ANYWHERE = ignored(
    *USE, "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache",
    "initializer_range", "attention_dropout", "hidden_dropout", "classifier_dropout", "gradient_checkpointing",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "output_attentions",
    "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores", "torchscript", "pruned_heads",
    "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task",
    "tf_legacy_loss", "use_bfloat16", "pretraining_tp", "output_past", "auto_map", "unsloth_fixed", "unsloth_version",
)  # fmt: skip
EVERYWHERE = [ANYWHERE, only(is_encoder_decoder=False, add_cross_attention=False, cross_attention_hidden_size=None)]

GATED = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip
UNGATED = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip

ATTENTION_BIAS = same("attention_bias", "attention.qkv_bias attention.output_bias", False)
MLP_BIAS = same("mlp_bias", "bias", False)


def hidden_act(default: str | None = "silu", names: dict[Any, str] = GATED, key: str = "hidden_act") -> Part:
    return same(key, "activation", default, names)


def llama_parts(
    kv_heads: Any = REQUIRED, head_dim: Any = None, tied: bool = False, rope: dict[str, Any] | None = None
) -> list[Part]:
    """What all families that come from Llama share, with the defaults in which they differ."""
    return [
        *EVERYWHERE,
        same("vocab_size", "vocab_size"),
        same("hidden_size", "d_model"),
        same("intermediate_size", "d_ff"),
        same("num_hidden_layers", "n_layers"),
        same("num_attention_heads", "n_heads"),
        same("num_key_value_heads", "n_kv_heads", kv_heads),
        same("head_dim", "d_head", head_dim),
        same("max_position_embeddings", "max_seq_len"),
        same("rms_norm_eps", "norm_eps"),
        same("tie_word_embeddings", "tie_embeddings", tied),
        rotary(default=rope),
    ]


LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm",
    "blocks.*.attention.qkv": " ".join(f"model.layers.*.self_attn.{x}_proj" for x in "qkv"),
    "blocks.*.attention.q_gain": "model.layers.*.self_attn.q_norm.weight",
    "blocks.*.attention.k_gain": "model.layers.*.self_attn.k_norm.weight",
    "blocks.*.attention.output": "model.layers.*.self_attn.o_proj",
    "blocks.*.feed_forward_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.feed_forward.input": "model.layers.*.mlp.gate_proj model.layers.*.mlp.up_proj",
    "blocks.*.feed_forward.output": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
GAINS = {"attention.qk_norm": True, "attention.qk_gain": True}

LLAMA = Family(  # and SmolLM, TinyLlama
    "llama",
    "LlamaForCausalLM",
    fixed={},
    parts=[
        *llama_parts(kv_heads=None),
        hidden_act(),
        ATTENTION_BIAS,
        MLP_BIAS,
        only(rope_interleaved=False),
        ignored("is_llama_config", "transformers.js_config"),
    ],
    names=LLAMA_NAMES,
    whole_heads=True,
)

MISTRAL = Family("mistral", "MistralForCausalLM", {}, [*llama_parts(), hidden_act(), layers()], LLAMA_NAMES)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    fixed={"attention.qkv_bias": True},
    parts=[*llama_parts(), hidden_act(), layers(switch=True), only(use_mrope=False)],
    names=LLAMA_NAMES,
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    fixed=GAINS,
    parts=[*llama_parts(head_dim=REQUIRED), hidden_act(), ATTENTION_BIAS, layers(switch=True)],
    names=LLAMA_NAMES,
)

# Llama without a gate in its feed-forward
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    fixed={},
    parts=[*llama_parts(kv_heads=None), hidden_act("relu2", UNGATED), ATTENTION_BIAS, MLP_BIAS],
    names=LLAMA_NAMES | {"blocks.*.feed_forward.input": "model.layers.*.mlp.up_proj"},
    whole_heads=True,
)

# The same with QK-norm
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    fixed=GAINS,
    parts=[
        *llama_parts(
            kv_heads=None,
            rope={
                "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        ),
        hidden_act("xielu", UNGATED),
        ATTENTION_BIAS,
    ],
    names=ARCEE.names
    | {
        "blocks.*.attention_norm": "model.layers.*.attention_layernorm",
        "blocks.*.feed_forward_norm": "model.layers.*.feedforward_layernorm",
    },
)  # fmt: skip

GEMMA_FIXED = {"norm": "rmsnorm_zero", "scale_embedding": True}

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    fixed=GEMMA_FIXED,
    parts=[
        *llama_parts(head_dim=REQUIRED, tied=True),
        # Its files say gelu, and mean the approximation.
        hidden_act("gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}),
        hidden_act(None, {"gelu_pytorch_tanh": "geglu_tanh", None: "geglu_tanh"}, "hidden_activation"),
        ATTENTION_BIAS,
        only(use_bidirectional_attention=None),
    ],
    names=LLAMA_NAMES,
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    fixed={**GEMMA_FIXED, "norm_placement": "sandwich"},
    parts=[
        *llama_parts(head_dim=REQUIRED, tied=True),
        hidden_act("gelu_pytorch_tanh", key="hidden_activation"),
        ATTENTION_BIAS,
        same("query_pre_attn_scalar", "attention.score_width", 256),
        cap("attn_logit_softcapping", "attention.softcap", 50.0),
        cap("final_logit_softcapping", "logit_softcap", 30.0),
        layers(alternate=True),
        only(use_bidirectional_attention=None),
        ignored("hidden_act", "cache_implementation"),
    ],
    names=LLAMA_NAMES
    | {
        "blocks.*.attention_out_norm": "model.layers.*.post_attention_layernorm",
        "blocks.*.feed_forward_norm": "model.layers.*.pre_feedforward_layernorm",
        "blocks.*.feed_forward_out_norm": "model.layers.*.post_feedforward_layernorm",
    },
    whole_heads=True,
)

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    fixed={"position": "learned", "norm": "layernorm", "bias": True, "attention.qkv_bias": True,
           "attention.output_bias": True},
    parts=[
        *EVERYWHERE,
        same("vocab_size", "vocab_size"),
        same("n_positions", "max_seq_len"),
        same("n_embd", "d_model"),
        same("n_layer", "n_layers"),
        same("n_head", "n_heads"),
        same("n_inner", "d_ff", None),
        same("activation_function", "activation", "gelu_new", {"gelu_new": "gelu_tanh"} | UNGATED),
        same("layer_norm_epsilon", "norm_eps", 1e-5),
        same("tie_word_embeddings", "tie_embeddings", True),
        dropout("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
        only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        ignored(
            "n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
            "summary_proj_to_labels", "summary_first_dropout", "n_special", "predict_special_tokens",
        ),
    ],
    names={
        "embedding": "transformer.wte",
        "position.embedding": "transformer.wpe",
        "blocks.*.attention_norm": "transformer.h.*.ln_1",
        "blocks.*.attention.qkv": "transformer.h.*.attn.c_attn",
        "blocks.*.attention.output": "transformer.h.*.attn.c_proj",
        "blocks.*.feed_forward_norm": "transformer.h.*.ln_2",
        "blocks.*.feed_forward.input": "transformer.h.*.mlp.c_fc",
        "blocks.*.feed_forward.output": "transformer.h.*.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=True,
    whole_heads=True,
)  # fmt: skip

GPT_NEOX = Family(  # and Pythia
    "gpt_neox",
    "GPTNeoXForCausalLM",
    fixed={"norm": "layernorm", "bias": True},
    parts=[
        *EVERYWHERE,
        same("vocab_size", "vocab_size"),
        same("hidden_size", "d_model"),
        same("intermediate_size", "d_ff"),
        same("num_hidden_layers", "n_layers"),
        same("num_attention_heads", "n_heads"),
        same("max_position_embeddings", "max_seq_len"),
        same("layer_norm_eps", "norm_eps", 1e-5),
        same("tie_word_embeddings", "tie_embeddings", False),
        same("use_parallel_residual", "parallel", True),
        same("attention_bias", "attention.qkv_bias attention.output_bias", True),
        hidden_act("gelu", UNGATED),
        rotary("rotary_emb_base", "rotary_pct", 0.25),
        dropout("hidden_dropout", "attention_dropout", default=0.0),
        only(is_decoder=False),
        ignored("rope_theta", "partial_rotary_factor"),  # transformers 4 repeats in them what the others say
    ],
    names={
        "embedding": "gpt_neox.embed_in",
        "blocks.*.attention_norm": "gpt_neox.layers.*.input_layernorm",
        "blocks.*.attention.qkv": "gpt_neox.layers.*.attention.query_key_value",
        "blocks.*.attention.output": "gpt_neox.layers.*.attention.dense",
        "blocks.*.feed_forward_norm": "gpt_neox.layers.*.post_attention_layernorm",
        "blocks.*.feed_forward.input": "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "blocks.*.feed_forward.output": "gpt_neox.layers.*.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    interleaved=True,
    whole_heads=True,
)

# In the order in which a model of ours looks for one that it can be.
FAMILIES = {
    family.model_type: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, GEMMA, GEMMA2, ARCEE, APERTUS)
}


def find_family(config: ModelConfig) -> tuple[Family, ModelConfig]:
    """A family that our config can be, and that config with the gains and biases which the family has and it has not:
    ones and zeros in their place change nothing.

    Raises:
        NoCounterpart: naming what the nearest families lack.
    """
    gains = replace(config.attention, qk_gain=config.attention.qk_norm)
    qkv_bias = replace(gains, qkv_bias=True, output_bias=config.flat()["attention.output_bias"])
    biases = replace(gains, qkv_bias=True, output_bias=True)
    why: dict[str, str] = {}
    for candidate in (
        replace(config, attention=gains),
        replace(config, attention=qkv_bias),
        replace(config, bias=True, attention=biases),
    ):
        for name, family in FAMILIES.items():
            try:
                family.write_config(candidate)
                return family, candidate
            except NoCounterpart as error:
                why[name] = min(str(error), why.get(name, str(error)), key=lambda text: text.count("model."))
    nearest = sorted(why, key=lambda name: why[name].count("model."))[:3]
    raise NoCounterpart("; ".join(f"{name} has no {why[name]}" for name in nearest))
