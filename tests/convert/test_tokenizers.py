"""A Hugging Face folder with a tokenizer of each kind, in and out: ids, texts and all that describes its use stay."""

import json
import shutil

import pytest
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from minitransformer import Tokenizer, load
from minitransformer.convert.config import ConvertConfig
from minitransformer.convert.run import run
from tests.conftest import sentences
from tests.data.test_sentencepiece import make, make_gemma
from tests.data.test_tokenizer import LLAMA3

SHAPE = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64,
)  # fmt: skip
TEXTS = [
    "", "Ann sees the owl.", " Ann", "Ann  sees   the    owl", "a\n\nb\n\n\nc", "\n", "\t\tx", "It's naïve", "李 🦉",
    "e\u0301", "def f(x):\n    return x", "42 1999", "a<b>c</b></s>", "<table>  </table>", "  ", "ANN!? ...", "ñandú",
    "x = {1: 'a'}", "see the <think> here </think>", "Zoë hears the dog.\nBob",
]  # fmt: skip


def byte_level(special: list[str], pattern: str | None = LLAMA3, **changes) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [sentences(200)], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(special)
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def llama3() -> Backend:
    backend = byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    start = backend.token_to_id("<|begin_of_text|>")
    before = processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", start)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), before])
    return backend


CHAT = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
BOS, EOS = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"  # with full-width bars
named = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
SAMPLED = dict(do_sample=True, temperature=0.6, top_p=0.9)

# Kind: class of the model, tokenizer, tokenizer_config.json, names of its start, its ends and what pads, other files.
KINDS = {
    "gpt2": ("GPT2", lambda: byte_level(["<|endoftext|>"], None),
             dict(tokenizer_class="GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>"),
             "<|endoftext|>", ["<|endoftext|>"], None),
    "llama 3": ("Llama", llama3,
                dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
                     chat_template=CHAT),
                "<|begin_of_text|>", ["<|end_of_text|>", "<|eot_id|>"], None),
    "llama 2": ("Llama", lambda: make("llama"),
                dict(tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                     add_bos_token=True, add_eos_token=False, legacy=False),
                "<s>", ["</s>"], None),
    "mistral": ("Mistral", lambda: make("llama"),
                dict(tokenizer_class="LlamaTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                     add_bos_token=True, add_eos_token=False),
                "<s>", ["</s>"], "<unk>"),
    "gemma": ("Gemma", make_gemma,
              dict(tokenizer_class="GemmaTokenizer", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
                   unk_token="<unk>", add_bos_token=True, add_eos_token=False),
              "<bos>", ["<eos>", "<end_of_turn>"], "<pad>"),
    "qwen": ("Qwen2", lambda: byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC()),
             dict(tokenizer_class="Qwen2Tokenizer", bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                  add_bos_token=False),
             None, ["<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
    "smollm": ("Llama", lambda: byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None),
               dict(tokenizer_class="GPT2Tokenizer", bos_token="<|im_start|>", eos_token="<|im_end|>",
                    pad_token="<|im_end|>"),
               "<|im_start|>", ["<|im_end|>"], "<|im_end|>"),
    "deepseek": ("Llama", lambda: byte_level([BOS, EOS]),
                 dict(tokenizer_class="LlamaTokenizerFast", add_bos_token=True, add_eos_token=False,
                      bos_token=named | {"content": BOS}, eos_token=named | {"content": EOS},
                      pad_token=named | {"content": EOS}),
                 BOS, [EOS], None),
}  # fmt: skip


# What theirs would change has ids of its own here: a space before a text, Unicode's other forms, and a special token's
# name in a text.
CHANGED = {"llama 2": [" Ann", "  ", "a<b>c</b></s>"], "mistral": ["a<b>c</b></s>"], "qwen": ["e\u0301"]}


def convert(source, to) -> None:
    run(ConvertConfig(source=str(source), to=str(to)))


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=KINDS)
def converted(request, transformers, tmp_path_factory):
    """A folder of a kind, what it becomes here and what that becomes there."""
    family, backend, settings, start, ends, pad = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", ""))
    backend = backend()
    shape = SHAPE if family != "GPT2" else dict(n_embd=16, n_layer=1, n_head=2, n_positions=64)
    shape |= {"Mistral": dict(sliding_window=None)}.get(family, {})
    ids = dict(bos_token_id=start and backend.token_to_id(start), pad_token_id=pad and backend.token_to_id(pad))
    ids["eos_token_id"] = [backend.token_to_id(name) for name in ends]
    if len(ends) == 1:
        ids["eos_token_id"] = ids["eos_token_id"][0]
    if request.param == "deepseek":
        ids = dict.fromkeys(ids)
    config = getattr(transformers, f"{family}Config")(vocab_size=backend.get_vocab_size() + 3, **shape, **ids)
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config)
    model.save_pretrained(folder / "theirs")
    backend.save(str(folder / "theirs" / "tokenizer.json"))
    files = {"tokenizer_config.json": settings}
    files["generation_config.json"] = {k: v for k, v in ids.items() if v is not None} | SAMPLED
    for file, value in files.items():
        (folder / "theirs" / file).write_text(json.dumps(value, ensure_ascii=False, indent=1))
    (folder / "theirs" / "chat_template.jinja").write_text(CHAT)
    (folder / "theirs" / "LICENSE").write_text("Do as you like.")
    convert(folder / "theirs", folder / "ours")
    convert(folder / "ours", folder / "back")
    return request.param, folder


def test_ids_of_texts_stay(converted, transformers):
    _, folder = converted
    before, after = (transformers.AutoTokenizer.from_pretrained(folder / name) for name in ("theirs", "back"))
    special = before.all_special_tokens
    for text in [*TEXTS, *special, "Ann".join(special), " ".join(special)]:
        for add in (True, False):
            ids = before(text, add_special_tokens=add).input_ids
            assert after(text, add_special_tokens=add).input_ids == ids, text
            assert after.decode(ids) == before.decode(ids)
    said = [{"role": "user", "content": "Ann sees"}]
    assert after.apply_chat_template(said) == before.apply_chat_template(said)


def test_files_that_describe_its_use_stay(converted, transformers):
    kind, folder = converted
    for path in (folder / "theirs").iterdir():
        # Without a window it leaves as a Llama, whose class of tokenizer is another.
        told_of_its_class = kind == "mistral" and path.name == "tokenizer_config.json"
        if path.name not in ("config.json", "model.safetensors") and not told_of_its_class:
            assert (folder / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    before, after = (transformers.AutoConfig.from_pretrained(folder / name) for name in ("theirs", "back"))
    assert after.pad_token_id == before.pad_token_id


def test_texts_have_the_ids_starts_and_ends_of_theirs(converted, transformers):
    kind, folder = converted
    tokenizer = load(folder / "ours")[1]
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "theirs")
    _, _, _, start, ends, _ = KINDS[kind]
    id_of = tokenizer.backend.token_to_id
    assert (tokenizer.bos_id, tokenizer.eos_id) == (id_of(start or ends[0]), id_of(ends[0]))
    assert tokenizer.end_ids == set(map(id_of, ends))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if text not in CHANGED.get(kind, ()):
            assert theirs(text, add_special_tokens=False).input_ids == ids, text
    in_a_new_run = Tokenizer.pretrained(str(folder / "theirs"))
    assert (in_a_new_run.bos_id, in_a_new_run.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)


def test_a_folder_without_generation_config_keeps_what_config_json_says(converted, transformers, tmp_path):
    """As folders of old versions have it."""
    _, folder = converted
    shutil.copytree(folder / "theirs", tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").unlink()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    tasks = {"text-generation": {"max_length": 50}}
    config |= SAMPLED | {"no_repeat_ngram_size": 3, "task_specific_params": tasks}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    written, generation = (
        json.loads((tmp_path / "back" / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert written["task_specific_params"] == tasks
    for key in ("no_repeat_ngram_size", "pad_token_id", *SAMPLED):
        assert generation.get(key) == written.get(key) == config.get(key)
    tokenizer = load(tmp_path / "ours")[1]
    ends = generation["eos_token_id"]
    assert set(ends if isinstance(ends, list) else [ends]) == tokenizer.end_ids
