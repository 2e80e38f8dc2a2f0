"""The promise over every setting: it acts, or is refused by its name."""

import json
import re

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from minitransformer.cli import compose
from minitransformer.run.directory import read_metrics
from tests.conftest import ROOT, SMALL, sentences

# Another value of every setting of train.py. Those that by promise change no result name the test that sees them act.
BASE = ["data=text", "data.files=book.txt", "tokenizer.vocab_size=300", "schedule.warmup_steps=2", *SMALL]
TURNED = {
    "name": "other", "runs_dir": "elsewhere", "seed": "1", "resume": "nowhere", "init_from": "nowhere",
    "model.vocab_size": "320", "model.d_model": "16", "model.n_layers": "1", "model.n_heads": "2",
    "model.n_kv_heads": "2", "model.d_head": "4", "model.d_ff": "64", "model.max_seq_len": "16",
    "model.position": "alibi", "model.norm": "layernorm", "model.norm_placement": "post", "model.norm_eps": "0.01",
    "model.parallel": "true", "model.activation": "swiglu", "model.bias": "true", "model.dropout": "0.5",
    "model.tie_embeddings": "true", "model.scale_embedding": "true", "model.logit_softcap": "2",
    "model.init": "gpt2", "model.attention.kind": "elu", "model.attention.pattern": "window model.attention.window=4",
    "model.attention.window": "4", "model.attention.global_tokens": "2", "model.attention.block": "4",
    "model.attention.random_blocks": "1", "model.attention.stride": "4", "model.attention.summary": "2",
    "model.attention.qk_norm": "false", "model.attention.qk_gain": "true", "model.attention.score_width": "3",
    "model.attention.softcap": "1", "model.attention.qkv_bias": "true", "model.attention.output_bias": "true",
    "model.attention.features": "4", "model.rotary.base": "10", "model.rotary.fraction": "0.5",
    "model.rotary.scaling": "linear model.rotary.factor=2", "model.rotary.factor": "2",
    "model.rotary.original_length": "16",
    "model.rotary.slow": "2", "model.rotary.fast": "16", "model.rotary.attention_factor": "2",
    "data.kind": "csv", "data.batch_size": "2", "data.row_length": "16", "data.packing": "concat",
    "data.val_fraction": "0.3", "data.split": "hash", "data.cache_dir": "cache", "data.limit_rows": "2",
    "data.files": "other.txt", "data.val_files": "other.txt", "data.documents": "line",
    "tokenizer.kind": "char", "tokenizer.vocab_size": "280",
    "optimizer.kind": "adamw", "optimizer.lr": "0.001", "optimizer.betas": "[0.5,0.5]", "optimizer.eps": "0.1",
    "optimizer.weight_decay": "0.5", "optimizer.groups": '[{pattern: "*", lr: 0.1}]',
    "optimizer.embedding_lr": "0.01", "optimizer.adamw_lr": "0.1", "optimizer.momentum": "0.5",
    "optimizer.ns_steps": "1", "schedule.kind": "linear", "schedule.warmup_steps": "3", "schedule.min_ratio": "0.9",
    "schedule.decay_fraction": "1", "trainer.max_steps": "4", "trainer.max_time": "0:00:00",
    "trainer.precision": "bf16-mixed", "trainer.device": "tpu", "trainer.devices": "3", "trainer.nodes": "3",
    "trainer.strategy": "ddp", "trainer.gradient_clip": "0.01", "trainer.checkpoint_blocks": "2",
    "trainer.z_loss": "0.1", "trainer.label_smoothing": "0.1", "trainer.val_every": "2", "trainer.log_every": "1",
    "trainer.threads": "2", "trainer.find_batch": "true", "trainer.profile": "true", "lora.rank": "2",
    "lora.alpha": "2", "lora.targets": "blocks.*.output", "logger.kind": "wandb", "callbacks.checkpoint_every": "3",
    "callbacks.keep_checkpoints": "1", "callbacks.sample_every": "2", "callbacks.sample_prompt": "Ann",
    "callbacks.sample_tokens": "4", "callbacks.sample_temperature": "0", "callbacks.progress": "false",
    "callbacks.ema": "0.5", "callbacks.report": "true",
}  # fmt: skip
SEEN_BY = {
    "model.attention.kernel": "tests/model/test_matrix.py",
    "data.workers": "tests/data/test_datamodule.py",
    "data.allow_changed": "tests/data/test_datamodule.py",
    "tokenizer.sample_bytes": "tests/data/test_store.py",
    "trainer.accumulate": "tests/training/test_training.py",
    "trainer.compile": "tests/training/test_training.py",
    "trainer.gradient_checkpointing": "tests/training/test_training.py",
    "trainer.max_skipped": "tests/training/test_training.py",
}
SAID = {"trainer.threads", "callbacks.progress", "trainer.find_batch"}  # seen in what is printed


def settings_of(name: str, overrides: list[str]) -> set[str]:
    def leaves(values: dict, prefix: str = "") -> set[str]:
        inner = [leaves(v, f"{prefix}{k}.") if isinstance(v, dict) and v else {prefix + k} for k, v in values.items()]
        return set().union(*inner)

    return leaves(OmegaConf.to_container(compose(name, overrides), resolve=False))


def test_every_setting_of_training_is_turned():
    there = settings_of("train", ["data=text", "data.files=[a.txt]", "logger=none"])
    assert there == TURNED.keys() | SEEN_BY.keys()
    for name, file in SEEN_BY.items():
        assert name.rpartition(".")[2] in (ROOT / file).read_text(encoding="utf-8")


def turned(name: str) -> list[str]:
    """The words that turn a setting: it alone, or with what gives it a meaning in so small a model."""
    first, *more = TURNED[name].split(" model.")
    return [f"{name}={first}", *(f"model.{word}" for word in more)]


def outcome(workdir, result, said: bool):
    """All that a run leaves and that is not a time: files, metrics, samples, weights; else what it said."""
    if said:
        return re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", "NAME", result.out)
    run = next(path.parent for path in workdir.glob("*/*/starts.jsonl"))
    lines = read_metrics(run)
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time", "speed"))} for line in lines]
    files = sorted(str(path.relative_to(workdir)) for path in workdir.rglob("*") if "-" not in path.parts[-1])
    kept = sorted(path.name for path in run.glob("checkpoints/*"))
    samples = (run / "samples.txt").read_text(encoding="utf-8") if (run / "samples.txt").exists() else ""
    path = run / "model.safetensors"
    weights = {n: w.double().sum().item() for n, w in load_file(path).items()} if path.exists() else {}
    return metrics, files, kept, samples, weights


@pytest.fixture(scope="module")
def plain() -> dict:
    return {}


@pytest.mark.parametrize("name", sorted(TURNED))
def test_a_setting_of_training_acts_or_is_refused_by_name(command, workdir, tmp_path_factory, monkeypatch, plain, name):
    def run(*more):
        place = tmp_path_factory.mktemp("run")
        (place / "book.txt").write_text(sentences(60), encoding="utf-8")
        (place / "other.txt").write_text(sentences(60, seed=1), encoding="utf-8")
        monkeypatch.chdir(place)
        arguments = [*BASE, *([] if name == "name" else ["name=run"]), *more]
        return place, command("train", *arguments)

    said = name in SAID
    if said not in plain:
        place, result = run(*(["name=run"] if name == "name" else []))
        assert result.code == 0, result.err
        plain[said] = outcome(place, result, said)
    place, result = run(*turned(name))
    if result.code == 1:
        assert name.rpartition(".")[2] in result.err, result.err
        assert len(result.err.splitlines()) == 1
    else:
        assert result.code == 0, result.err
        assert outcome(place, result, said) != plain[said]


# The same for generate.py and evaluate; None: of no effect on the result, see the test that is named.
GENERATE = {
    "temperature": "2", "top_k": "1", "top_p": "0.01", "min_p": "1", "repetition_penalty": "9",
    "presence_penalty": "9", "frequency_penalty": "9", "no_repeat_ngram": "1", "logit_bias": "{70: 50}",
    "banned": "[0]", "forced": "{0: 70}", "checkpoint": "nowhere", "runs_dir": "elsewhere", "prompt": "Bob ",
    "prompt_file": "book.txt", "num_samples": "2", "beams": "2", "length_penalty": "0.5", "draft": "nowhere",
    "draft_tokens": "2", "quantize": "int8", "max_new_tokens": "3", "max_seconds": "1e-9", "stop": "a",
    "overflow": "extend", "output": "text", "interactive": "true", "score": "true", "seed": "2", "device": "tpu",
}  # fmt: skip
EVALUATE = {
    "checkpoint": "nowhere", "runs_dir": "elsewhere", "data": "text", "length": "8", "stride": "2",
    "by_position": "true", "scaling": "yarn", "quantize": "int8", "plot": "a.png", "output": "text", "device": "tpu",
}  # fmt: skip
NO_RESULT = {"batch_size": "tests/evaluation/test_scoring.py"}


def test_every_setting_of_generation_and_evaluation_is_turned():
    assert settings_of("generate", []) == GENERATE.keys()
    assert settings_of("evaluate", []) == EVALUATE.keys() | NO_RESULT.keys()
    for name, file in NO_RESULT.items():
        assert name in (ROOT / file).read_text(encoding="utf-8")


def test_a_setting_of_reading_commands_acts_or_is_refused_by_name(command, trained):
    generating = [f"checkpoint={trained}", "prompt=Ann ", "seed=1", "output=json", "max_new_tokens=20"]
    evaluating = [f"checkpoint={trained}", "output=json"]
    for script, base, turned in (("generate", generating, GENERATE), ("evaluate", evaluating, EVALUATE)):
        plain = command(script, *base)
        assert plain.code == 0, plain.err
        for name, value in turned.items():
            if name == "banned":  # what came
                value = f"[{json.loads(plain.out)['tokens'][0]}]"
            if name == "stop":
                value = re.search("[a-z]", json.loads(plain.out)["text"])[0]
            result = command(script, *(word for word in base if not word.startswith(f"{name}=")), f"{name}={value}")
            if result.code == 1:
                assert name in result.err, (name, result.err)
            else:
                assert result.code == 0, (name, result.err)
                assert result.out != plain.out, name
