"""Files of every kind, configs as the hub has them, models of ours that leave, and what is refused in one line."""

import json
import os
import pickle
import shutil
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file

from minitransformer import Tokenizer, load
from minitransformer.convert.config import ConvertConfig
from minitransformer.convert.families import FAMILIES
from minitransformer.convert.files import unpack_use
from minitransformer.convert.mapping import ConvertError
from minitransformer.convert.run import run
from minitransformer.model.config import AttentionConfig, RotaryConfig
from minitransformer.run.models import save_model
from tests.model.models import make

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=257, hidden_size=16, intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, rms_norm_eps=1e-5,
    hidden_act="silu", tie_word_embeddings=False, rope_theta=10000.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


LAYERNORM = dict(norm="layernorm", bias=True)


def convert(source, to, **settings) -> None:
    run(ConvertConfig(source=str(source), to=str(to), **settings))


def saved(path, tokenizer=None, position="rotary", **settings):
    """A model of ours with random parameters, and its file."""
    model = make(position, **dict(vocab_size=257, d_model=32, n_heads=4, max_seq_len=48) | settings)
    save_model(path, model.config, model.state_dict(), tokenizer or Tokenizer.bytes())
    return model


@pytest.fixture
def folder(tmp_path):
    """A small Llama in a Hugging Face folder."""
    model = make(
        "rotary", vocab_size=257, d_model=16, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=32, activation="swiglu",
        norm_eps=1e-5,
    )  # fmt: skip
    save_model(tmp_path / "m.safetensors", model.config, model.state_dict(), Tokenizer.bytes())
    convert(tmp_path / "m.safetensors", tmp_path / "llama")
    return tmp_path / "llama"


# Files -----------------------------------------------------------------------------------------------------------


def state(path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("form", ["shards", "pickle", "pickled shards", "half", "bare model", "with constants"])
def test_weights_of_every_form_are_read(folder, tmp_path, form):
    convert(folder, tmp_path / "whole")
    expected, tensors = state(tmp_path / "whole"), state(folder)
    (folder / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])]
    if form == "pickle":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form in ("shards", "pickled shards"):
        name, end, write = (
            ("pytorch_model", "bin", torch.save) if form != "shards" else ("model", "safetensors", save_file)
        )
        files = [f"{name}-0000{i}-of-00002.{end}" for i in (1, 2)]
        for part, file in zip(parts, files, strict=True):
            write(part, folder / file)
        places = {tensor: file for part, file in zip(parts, files, strict=True) for tensor in part}
        (folder / f"{name}.{end}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    else:
        if form == "half":
            tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
            expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
        elif form == "bare model":
            tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        else:
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "again")
    same(state(tmp_path / "again"), expected)
    convert(tmp_path / "again", tmp_path / "back")
    if form == "half":
        same(state(tmp_path / "back"), tensors)
        assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
        model, _ = load(tmp_path / "again")
        assert model.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o000], ids=oct)
def test_files_have_the_mode_that_the_umask_says(folder, tmp_path, umask):
    before = os.umask(umask)
    try:
        convert(folder, tmp_path / "ours")
        convert(tmp_path / "ours", tmp_path / "whole")
        convert(tmp_path / "ours", tmp_path / "shards", shard_gb=5e-6)
    finally:
        os.umask(before)
    files = [path for name in ("ours", "whole", "shards") for path in (tmp_path / name).iterdir()]
    assert len(files) > 10
    assert {path: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(files, oct(0o666 & ~umask))


def test_weights_are_written_in_shards(folder, tmp_path):
    convert(folder, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", shard_gb=5e-6)
    files = sorted(p.name for p in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        part = load_file(tmp_path / "back" / file)
        assert sum(t.nbytes for t in part.values()) <= 5000 or len(part) == 1
        found |= part
    same(found, state(folder))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert index["weight_map"].keys() == found.keys()
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    same(dict(model.state_dict()), state(folder))


def test_files_of_gpt2_as_they_were_first_published(tmp_path):
    """Names without the model's, and masks among them."""
    saved(tmp_path / "m.safetensors", position="learned", norm="layernorm", activation="gelu_tanh", bias=True,
          tie_embeddings=True)  # fmt: skip
    convert(tmp_path / "m.safetensors", tmp_path / "gpt2")
    tensors = {name.removeprefix("transformer."): t for name, t in state(tmp_path / "gpt2").items()}
    for layer in (0, 1):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 48, 48).tril()
    save_file(tensors, tmp_path / "gpt2" / "model.safetensors")
    convert(tmp_path / "gpt2", tmp_path / "ours")
    same(state(tmp_path / "ours"), load_file(tmp_path / "m.safetensors"))


# Configs of the hub, as transformers 4 wrote them ----------------------------------------------------------------

HUB = {
    "gpt2": (
        dict(activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256,
             embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2",
             n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1, summary_activation=None,
             summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
             task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}}, vocab_size=50257),
        {"d_model": 768, "position": "learned", "tie_embeddings": True, "activation": "gelu_tanh", "d_ff": 3072,
         "attention.qkv_bias": True, "norm_eps": 1e-5, "max_seq_len": 1024, "dropout": 0.1},
    ),
    "pythia-70m": (
        dict(architectures=["GPTNeoXForCausalLM"], bos_token_id=0, eos_token_id=0, hidden_act="gelu", hidden_size=512,
             initializer_range=0.02, intermediate_size=2048, layer_norm_eps=1e-05, max_position_embeddings=2048,
             model_type="gpt_neox", num_attention_heads=8, num_hidden_layers=6, rotary_emb_base=10000, rotary_pct=0.25,
             tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.24.0", use_cache=True,
             use_parallel_residual=True, vocab_size=50304),
        {"parallel": True, "rotary.fraction": 0.25, "rotary.base": 10000, "activation": "gelu", "bias": True},
    ),
    "SmolLM2-135M": (
        dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0,
             eos_token_id=0, hidden_act="silu", hidden_size=576, initializer_range=0.041666666666666664,
             intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, model_type="llama",
             num_attention_heads=9, num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05,
             rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
             torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True, vocab_size=49152),
        {"n_kv_heads": 3, "d_head": 64, "rotary.base": 100000, "rotary.scaling": "none", "tie_embeddings": True},
    ),
    "Llama-3.2-1B": (
        dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
             eos_token_id=128001, head_dim=64, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
             intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, model_type="llama",
             num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
             rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3",
                               original_max_position_embeddings=8192),
             rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.45.0.dev0",
             use_cache=True, vocab_size=128256),
        {"rotary.scaling": "llama3", "rotary.factor": 32.0, "rotary.original_length": 8192, "rotary.fast": 4.0},
    ),
    "Mistral-7B-v0.1": (
        dict(architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096,
             initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768, model_type="mistral",
             num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-05,
             rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16",
             transformers_version="4.34.0.dev0", use_cache=True, vocab_size=32000),
        {"attention.pattern": ["window"], "attention.window": 4096, "d_ff": 14336, "activation": "swiglu"},
    ),
    "Qwen2.5-0.5B": (
        dict(architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643,
             hidden_act="silu", hidden_size=896, initializer_range=0.02, intermediate_size=4864,
             max_position_embeddings=32768, max_window_layers=24, model_type="qwen2", num_attention_heads=14,
             num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=1000000.0,
             sliding_window=32768, tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.40.1",
             use_cache=True, use_mrope=False, use_sliding_window=False, vocab_size=151936),
        {"attention.qkv_bias": True, "attention.output_bias": False, "bias": False, "attention.pattern": ["full"]},
    ),
    "Qwen3-0.6B": (
        dict(architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
             eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=1024, initializer_range=0.02,
             intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28, model_type="qwen3",
             num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None,
             rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, torch_dtype="bfloat16",
             transformers_version="4.51.0", use_cache=True, use_sliding_window=False, vocab_size=151936),
        {"attention.qk_norm": True, "attention.qk_gain": True, "d_head": 128, "n_heads": 16},
    ),
    "gemma-2-2b": (
        dict(architectures=["Gemma2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
             attn_logit_softcapping=50.0, bos_token_id=2, cache_implementation="hybrid", eos_token_id=1,
             final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
             hidden_activation="gelu_pytorch_tanh", hidden_size=2304, initializer_range=0.02, intermediate_size=9216,
             max_position_embeddings=8192, model_type="gemma2", num_attention_heads=8, num_hidden_layers=26,
             num_key_value_heads=4, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10000.0,
             sliding_window=4096, torch_dtype="float32", transformers_version="4.42.4", use_cache=True,
             vocab_size=256000),
        {"attention.pattern": ["window", "full"], "attention.softcap": 50.0, "logit_softcap": 30.0,
         "norm": "rmsnorm_zero", "norm_placement": "sandwich", "scale_embedding": True, "tie_embeddings": True,
         "activation": "geglu_tanh", "attention.score_width": 256},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_published_configs_are_read_and_written_again(name):
    given, expected = HUB[name]
    family = FAMILIES[given["model_type"]]
    config = family.read_config(given)
    settings = config.flat()
    assert {key: settings[key] for key in expected} == expected
    written = family.write_config(config)
    assert family.read_config(written).flat() == settings
    for key, value in written.items():
        if given.get(key) is not None and key not in ("max_window_layers", "sliding_window"):
            assert given[key] == value, key
    # Of transformers 5, which says the same of rotary positions in one place.
    if "rope_theta" in given:
        rope = (given.get("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": given["rope_theta"]}
        newer = {k: v for k, v in given.items() if not k.startswith("rope_")} | {"rope_parameters": rope}
        assert family.read_config(newer).flat() == settings


HARMLESS = dict(
    _num_labels=1, output_past=True, unsloth_fixed=True, unsloth_version="2024.9", auto_map={"AutoConfig": "x.Y"},
    quantization_config=None, key_of_the_future=None,
)  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_keys_that_change_nothing_are_read_over(name):
    given, _ = HUB[name]
    family = FAMILIES[given["model_type"]]
    more = dict(n_special=0, predict_special_tokens=True) if name == "gpt2" else {}
    assert family.read_config(given | HARMLESS | more) == family.read_config(given)
    for key, value in (("key_of_the_future", False), ("key_of_the_future", 0), ("quantization_config", {"bits": 4})):
        with pytest.raises(ConvertError, match=rf"{key}=.* is not known for model_type={family.model_type}"):
            family.read_config(given | {key: value})


GPT2 = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
NEOX = ("hidden_dropout", "attention_dropout")


@pytest.mark.parametrize(("position", "keys", "given", "dropout", "left_out"), [
    ("learned", GPT2, [0.2, 0.2, 0.2], 0.2, ""), ("learned", GPT2, [None, None, None], 0.1, ""),
    ("learned", GPT2, [0.0, 0, 0.0], 0.0, ""), ("learned", GPT2, [0.1, 0.0, None], 0.0, "resid_pdrop=0.1, attn_pdrop"),
    ("rotary", NEOX, [0.3, 0.3], 0.3, ""), ("rotary", NEOX, [None, 0.1], 0.0, "attention_dropout=0.1 "),
], ids=str)  # fmt: skip
def test_dropouts_are_read_and_written_where_there_is_one_for_all(
    tmp_path, capsys, position, keys, given, dropout, left_out
):
    saved(tmp_path / "m.safetensors", position=position, dropout=0.05, parallel=position == "rotary", **LAYERNORM)
    convert(tmp_path / "m.safetensors", tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert [written[key] for key in keys] == [0.05] * len(keys)
    values = ["gone" if value is None else value for value in given]
    edit(**dict(zip(keys, values, strict=True)))(tmp_path / "theirs")
    capsys.readouterr()
    convert(tmp_path / "theirs", tmp_path / "ours")
    said = [line for line in capsys.readouterr().out.splitlines() if "is left out" in line]
    assert load(tmp_path / "ours")[0].config.dropout == dropout
    assert len(said) == bool(left_out)
    assert left_out in "".join(said)


def test_a_family_without_dropout_says_what_it_leaves_out(folder, tmp_path, capsys):
    saved(tmp_path / "dropped.safetensors", activation="swiglu", dropout=0.2)
    for name, line in (("dropped", "model.dropout=0.2 is left out: LlamaForCausalLM has no such dropout\n"), ("m", "")):
        capsys.readouterr()
        convert(tmp_path / f"{name}.safetensors", tmp_path / name)
        assert capsys.readouterr().out.startswith(line + str(tmp_path / name))
        assert "dropout" not in (tmp_path / name / "config.json").read_text()
    edit(attention_dropout=0.1)(folder)
    convert(folder, tmp_path / "ours")
    assert "attention_dropout=0.1 is left out: " in capsys.readouterr().out
    assert load(tmp_path / "ours")[0].config.dropout == 0


# Models of ours --------------------------------------------------------------------------------------------------

A = AttentionConfig


@pytest.mark.parametrize(("settings", "model_type"), [
    (dict(qk_norm=True), "apertus"),  # the default run
    (dict(), "arcee"), (dict(activation="relu2", bias=True), "arcee"),
    (dict(activation="swiglu"), "llama"), (dict(activation="geglu", tie_embeddings=True, n_kv_heads=1), "llama"),
    (dict(activation="swiglu", rotary=RotaryConfig(scaling="ntk", factor=2.0)), "llama"),
    (dict(activation="swiglu", rotary=RotaryConfig(scaling="yarn", factor=2.0)), "llama"),
    (dict(activation="swiglu", rotary=RotaryConfig(scaling="llama3", factor=2.0, base=100.0)), "llama"),
    (dict(activation="swiglu", pattern=["window"], window=5), "mistral"),
    (dict(activation="swiglu", qkv_bias=True), "qwen2"),
    (dict(activation="swiglu", pattern=["window", "full"], window=5), "qwen2"),
    (dict(activation="swiglu", qk_norm=True), "qwen3"),
    (dict(activation="swiglu", qk_norm=True, qk_gain=True, pattern=["window", "full"], window=5), "qwen3"),
    (dict(position="learned", **LAYERNORM), "gpt2"), (dict(position="learned", norm="layernorm"), "gpt2"),
    (dict(position="learned", activation="gelu_tanh", tie_embeddings=True, **LAYERNORM), "gpt2"),
    (dict(rotary=RotaryConfig(fraction=0.5), **LAYERNORM), "gpt_neox"),
    (dict(norm="layernorm", parallel=True), "gpt_neox"),
    (dict(norm="rmsnorm_zero", scale_embedding=True, activation="geglu_tanh"), "gemma"),
    (dict(norm="rmsnorm_zero", norm_placement="sandwich", scale_embedding=True, activation="geglu_tanh", softcap=3.0),
     "gemma2"),
], ids=str)  # fmt: skip
def test_a_model_of_ours_leaves_as_the_family_that_it_is(tmp_path, settings, model_type):
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path / "m.safetensors", **dict(position="rotary") | settings)
    convert(tmp_path / "m.safetensors", tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager").eval()
    assert theirs.config.model_type == model_type
    tokens = torch.randint(257, (2, 30), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-4, rtol=1e-4)
    # And comes back with the same function.
    convert(tmp_path / "theirs", tmp_path / "back")
    torch.testing.assert_close(load(tmp_path / "back")[0](tokens), model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("settings", "words"), [
    (dict(position="alibi"), ["model.position=alibi"]),
    (dict(position="sinusoidal", norm_placement="post"), ["model.position=sinusoidal", "model.norm_placement=post"]),
    (dict(kind="elu"), ["model.attention.kind=elu"]),
    (dict(pattern=["bigbird"]), ["model.attention.pattern=[bigbird]"]),
    (dict(activation="swiglu", parallel=True), ["llama has no model.parallel=true"]),
    (dict(softcap=5.0), ["model.attention.softcap=5.0"]), (dict(logit_softcap=5.0), ["model.logit_softcap=5.0"]),
    (dict(activation="swiglu", rotary=RotaryConfig(fraction=0.5)), ["model.rotary.fraction=0.5"]),
], ids=str)  # fmt: skip
def test_a_model_that_is_no_family_is_refused_by_name(tmp_path, settings, words):
    saved(tmp_path / "m.safetensors", **dict(position="rotary") | settings)
    with pytest.raises(ConvertError) as caught:
        convert(tmp_path / "m.safetensors", tmp_path / "theirs")
    for word in words:
        assert word in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors"]


def test_a_run_leaves_with_its_tokenizer(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    convert(trained, tmp_path / "theirs")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    _, tokenizer = load(trained)
    for text in ("Ann sees the owl 🦉.\n", "", "  naïve\t<|endoftext|>"):
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs("Ann sees").input_ids == [tokenizer.eos_id, *tokenizer.encode("Ann sees")]
    assert (theirs.bos_token, theirs.eos_token, theirs.model_max_length) == ("<|endoftext|>", "<|endoftext|>", 32)


# Tokenizers ------------------------------------------------------------------------------------------------------


def special(tokenizer: Tokenizer, *names: str):
    """The backend with more special tokens and without EOS_TOKEN's meaning."""
    backend = type(tokenizer.backend).from_str(tokenizer.to_json())
    backend.add_special_tokens(list(names))
    return backend


@pytest.mark.parametrize(("bos", "eos", "template", "expected"), [
    (0, 0, None, (0, 0)), (257, 258, None, (257, 258)), (257, [258, 0], None, (257, 258)),
    (None, 258, None, (258, 258)), (None, None, None, (0, 0)), (0, 258, 257, (257, 258)), (257, 0, 257, (257, 0)),
])  # fmt: skip
def test_config_json_says_what_starts_and_ends_documents(folder, tmp_path, bos, eos, template, expected):
    """The post-processor of tokenizer.json goes before it: it is what makes prompts."""
    from minitransformer.data.tokenizer import set_template

    backend = special(Tokenizer.bytes(), "<begin>", "<end>")
    if template is not None:
        set_template(backend, backend.id_to_token(template))
    backend.save(str(folder / "tokenizer.json"))
    given = json.loads((folder / "config.json").read_text()) | {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "vocab_size": 259,
    }
    (folder / "config.json").write_text(json.dumps(given))
    (folder / "generation_config.json").unlink()
    tensors = state(folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], torch.zeros(2, 16)))
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "ours")
    model, tokenizer = load(tmp_path / "ours")
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected
    assert Tokenizer.pretrained(str(tmp_path / "ours")).bos_id == expected[0]
    convert(tmp_path / "ours", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == expected
    # Text ends with the one and starts with the other, in training and in generation.
    with torch.no_grad():
        model.head.weight.zero_()
    from minitransformer.generation.generate import generate_all, score

    assert score(model, tokenizer, "ab").tokens[-1] == expected[1]
    ended = generate_all(model, tokenizer, [""], 3, temperature=0, banned=[i for i in range(259) if i != expected[1]])
    assert (ended[0].tokens, ended[0].finish) == ([expected[1]], "end")


# Wrong input -----------------------------------------------------------------------------------------------------


def edit(**values):
    """A change to config.json; None takes a key out."""

    def change(folder):
        given = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps({k: v for k, v in given.items() if v != "gone"}))

    return change


def tensors(change):
    def edit(folder):
        found = state(folder)
        change(found)
        save_file(found, folder / "model.safetensors")

    return edit


def index(places):
    def edit(folder):
        found = dict.fromkeys(state(folder), "model-1.safetensors") | places
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))

    return edit


class Evil:
    def __reduce__(self):
        return print, ("ran",)


def pickled(what):
    def edit(folder):
        (folder / "model.safetensors").unlink()
        path = folder / "pytorch_model.bin"
        if isinstance(what, dict):
            torch.save(what, path)
        else:
            path.write_bytes(what if isinstance(what, bytes) else pickle.dumps(what))

    return edit


NORM = "model.layers.1.input_layernorm.weight"
WRONG = {
    "no config": (lambda f: (f / "config.json").unlink(), ["is no Hugging Face folder"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["holds no weights", "model.safetensors"]),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ["has no tokenizer.json", "tokenizer_path=PATH"]),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ["config.json is not JSON"]),
    "broken weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 50), ["cannot be read as safetensors"]),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), ["cannot be read as a tokenizer"]),
    "broken tokens' names": (lambda f: (f / "tokenizer_config.json").write_text("{"), ["tokenizer_config.json is not"]),
    "missing shard": (index({NORM: "model-2.safetensors"}), ["lacks the shard model-2.safetensors"]),
    "index outside": (index({NORM: "../m.safetensors"}), ["'../m.safetensors'", "not a file of its own folder"]),
    "index absolute": (index({NORM: "/etc/passwd"}), ["'/etc/passwd'", "not a file of its own folder"]),
    "index of more": (index({"model.more": "model-1.safetensors"}), ["lacks the tensor model.more"]),
    "shape": (tensors(lambda t: t.update({NORM: torch.zeros(12)})), [NORM, "[12]", "[16]"]),
    "missing tensor": (tensors(lambda t: t.pop(NORM)), ["has no tensor", NORM]),
    "left-over tensor": (tensors(lambda t: t.update({"model.x": torch.zeros(1)})), ["1 tensors", "model.x"]),
    "more layers": (edit(num_hidden_layers=1), ["tensors that a LlamaForCausalLM", "model.layers.1."]),
    "ties what differs": (edit(tie_word_embeddings=True), ["ties the embedding and the head", "differ"]),
    "code in a pickle": (pickled(Evil()), ["none, or holds more than plain values"]),
    "empty pickle": (pickled(b""), ["pytorch_model.bin cannot be read", "cut short or damaged"]),
    "no tensors in a pickle": (pickled({"a": 1}), ["more than tensors by name"]),
    "other family": (edit(model_type="t5"), ["model_type='t5'", "llama, mistral"]),
    "other task": (edit(architectures=["LlamaForSequenceClassification"]), ["LlamaForSequenceClassification"]),
    "unknown key": (edit(attn_temperature=3), ["attn_temperature=3 is not known", "llama"]),
    "quantised": (edit(quantization_config={"bits": 4}), ["quantization_config"]),
    "unknown value": (edit(hidden_act="xielu"), ["hidden_act='xielu'", "silu"]),
    "fixed value": (edit(rope_interleaved=True), ["rope_interleaved=True"]),
    "missing key": (edit(hidden_size="gone"), ["config.json has no hidden_size"]),
    "wrong type": (edit(hidden_size="sixteen"), ["config.json"]),
    "impossible": (edit(num_key_value_heads=3), ["n_kv_heads=3"]),
    "scaling": (edit(rope_scaling={"type": "longrope"}), ["rope_type='longrope'", "yarn"]),
    "scaling's key": (edit(rope_scaling={"type": "yarn", "factor": 2.0, "mscale": 0.7}), ["mscale=0.7"]),
    "scaling's factor": (edit(rope_scaling={"type": "linear"}), ["linear has no factor"]),
    "partial": (edit(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5"]),
    "small embedding": (edit(vocab_size=200), ["the tokenizer has 257 ids", "200"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders_are_refused_in_one_line(folder, tmp_path, capsys, case):
    change, words = WRONG[case]
    change(folder)
    capsys.readouterr()
    with pytest.raises(ConvertError) as caught:
        convert(folder, tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    for word in words:
        assert word in str(caught.value)
    assert "ran" not in capsys.readouterr().out
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


def test_wrong_commands_are_refused_in_one_line(command, folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    for arguments, words in (
        (["from=nowhere", "to=out"], ["from=nowhere", "does not exist"]), (["to=out"], ["from is not given"]),
        ([f"from={folder}"], ["to is not given"]), ([f"from={folder}", "to=full"], ["to=full is there already"]),
        ([f"from={folder}", "to=out", "tokenizer_path=nowhere"], ["tokenizer_path=nowhere does not exist"]),
        ([f"from={folder.parent}/m.safetensors", "to=out", "tokenizer_path=book.txt"], ["is for Hugging Face folders"]),
        ([f"from={folder}/config.json", "to=out"], ["a file of a Hugging Face folder", f"from={folder}"]),
        ([f"from={folder}/model.safetensors", "to=out"], ["name the folder"]),
        ([f"from={folder}", "to=out", "shard_gb=0"], ["shard_gb=0"]),
        ([f"from={folder}", "to=out", "shard_gb=2"], ["shard_gb=2 is for Hugging Face folders"]),
        (["form=nowhere", "to=out"], ["form is not a setting; did you mean from?"]),
        (["folder=nowhere", "to=out"], ["there are from, to, tokenizer_path, shard_gb"]),
        (["from=[a]", "to=out"], ["from=[a] is no"]), (["from=a,b", "to=out"], ["from=a,b is no"]),
    ):  # fmt: skip
        result = command("convert", *arguments)
        assert result.code == 1
        assert len(result.err.splitlines()) == 1
        assert all(word in result.err for word in words), result.err
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["x"]
    result = command("generate", f"checkpoint={folder}", "prompt=a")
    assert "convert it first" in result.err
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "other.json")
    (folder / "tokenizer.json").unlink()
    result = command("convert", f"from={folder}", "to=empty", "tokenizer_path=other.json")
    assert result.code == 0, result.err
    assert command("generate", "checkpoint=empty", "prompt=a", "max_new_tokens=3").code == 0


def test_only_files_that_describe_a_use_are_taken_out_of_an_archive(tmp_path):
    archive, out = tmp_path / "hugging_face.zip", tmp_path / "out"
    with ZipFile(archive, "w") as file:
        for name in ("config.json", "tokenizer.json", "modeling_own.py", "pytorch_model.bin", "../LICENSE"):
            file.writestr(name, "{}")
    unpack_use(archive, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "tokenizer.json"}
    assert not (tmp_path / "LICENSE").exists()
    archive.write_bytes(b"none")
    with pytest.raises(ConvertError, match=r"hugging_face\.zip is damaged"):
        unpack_use(archive, out)
