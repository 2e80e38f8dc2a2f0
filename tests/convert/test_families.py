"""Every family, made with random weights by `transformers`: logits, gradients, texts and bytes, in both directions."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from minitransformer import Tokenizer, load
from minitransformer.convert.config import ConvertConfig
from minitransformer.convert.run import run
from minitransformer.generation.generate import generate_all

VOCABULARY = 257
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
ROPE = dict(rope_theta=5000.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, **ROPE)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ROPE)
GPT2 = dict(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
NEOX = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}

# Name of the case: architecture, settings.
CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied, other activation and width": (
        "GPT2", GPT2 | dict(n_inner=72, activation_function="relu", tie_word_embeddings=False, layer_norm_epsilon=1e-3)
    ),
    "llama": ("Llama", SHAPE),
    "llama, tied, one head each, odd width": (
        "Llama", SHAPE | dict(num_key_value_heads=4, head_dim=12, tie_word_embeddings=True)
    ),
    "llama, biases": ("Llama", SHAPE | dict(attention_bias=True, mlp_bias=True, hidden_act="gelu")),
    "llama, attention biases": ("Llama", SHAPE | dict(attention_bias=True, rms_norm_eps=1e-3)),
    "llama, linear": ("Llama", SHAPE | dict(rope_parameters=dict(rope_type="linear", factor=2.0, **ROPE))),
    "llama, dynamic": ("Llama", SHAPE | dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, **ROPE))),
    "llama, yarn": ("Llama", SHAPE | dict(rope_parameters=YARN)),
    "llama, yarn of other turns": (
        "Llama", SHAPE | dict(rope_parameters=YARN | dict(beta_fast=4.0, beta_slow=0.5, attention_factor=1.3))
    ),
    "llama, llama3": ("Llama", SHAPE | dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=32))),
    "mistral": ("Mistral", SHAPE | dict(sliding_window=7)),
    "mistral, no window": ("Mistral", SHAPE | dict(sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", SHAPE),
    "qwen2, windows": ("Qwen2", SHAPE | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", SHAPE | dict(head_dim=16)),
    "qwen3, biases and windows": (
        "Qwen3", SHAPE | dict(head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    ),
    "pythia": ("GPTNeoX", NEOX),
    "gpt_neox, sequential, tied": (
        "GPTNeoX", NEOX | dict(use_parallel_residual=False, tie_word_embeddings=True, hidden_act="gelu_new",
        rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5, **ROPE))
    ),
    "gpt_neox, no attention bias": (
        "GPTNeoX", NEOX | dict(attention_bias=False,
        rope_parameters=dict(rope_type="linear", factor=2.0, partial_rotary_factor=1.0, **ROPE))
    ),
    "gemma": ("Gemma", SHAPE | dict(head_dim=16)),
    "gemma2": (
        "Gemma2", SHAPE | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=5, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0)
    ),
    "gemma2, no caps": (
        "Gemma2", SHAPE | dict(head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=None,
        final_logit_softcapping=None, layer_types=["full_attention"] * 3, tie_word_embeddings=False)
    ),
    "arcee": ("Arcee", SHAPE),
    "apertus": ("Apertus", SHAPE | dict(hidden_act="gelu")),
    "apertus, default scaling off": (
        "Apertus", SHAPE | dict(hidden_act="relu2", rope_parameters=dict(rope_type="default", **ROPE))
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")  # here, where not every process of the suite imports it


def make_theirs(transformers, case: str):
    """A model of `transformers` whose parameters are all random: ones and zeros would hide what a part does."""
    kind, settings = CASES[case]
    model_class = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.bytes()


def folder_of(model, tokenizer: Tokenizer, path) -> None:
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")


def tensors_of(folder) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


TOKENS = torch.randint(1, 257, (2, 40), generator=torch.Generator().manual_seed(1))


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_family_in_and_out(transformers, case, tokenizer, tmp_path):
    theirs = make_theirs(transformers, case)
    folder_of(theirs, tokenizer, tmp_path / "theirs")
    run(ConvertConfig(source=str(tmp_path / "theirs"), to=str(tmp_path / "ours")))
    ours, found = load(tmp_path / "ours")
    expected = theirs(TOKENS).logits
    logits = ours(TOKENS)
    same(logits, expected)

    # Gradients of the embedding say that those of all behind it are right.
    for output in (expected, logits):
        cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    same(ours.embedding.weight.grad, theirs.get_input_embeddings().weight.grad)

    prompt = "def f(x):"
    ids = torch.tensor([[found.bos_id, *found.encode(prompt)]])
    settings = dict(max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
    (said,) = generate_all(ours, found, [prompt], 20, temperature=0)
    assert said.tokens == theirs.generate(ids, **settings)[0, ids.shape[1] :].tolist()

    run(ConvertConfig(source=str(tmp_path / "ours"), to=str(tmp_path / "back")))
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    # A Mistral without a window is a Llama.
    assert again.config.model_type == ("llama" if case == "mistral, no window" else theirs.config.model_type)
    same(again(TOKENS).logits, expected)
