"""Fine-tuning: `init_from` goes on from a model, adapters train beside frozen weights, and merge without a trace."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from minitransformer.run.directory import checkpoints, read_metrics
from minitransformer.run.models import load, read_checkpoint
from minitransformer.training.config import LoRAConfig
from minitransformer.training.lora import LoRALinear, add_adapters, fingerprint, merged
from tests.conftest import SMALL, sentences
from tests.model.models import make

TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
STEPS = [s for s in SMALL if not s.startswith("model.")]
LORA = ["lora.rank=2", "optimizer=adamw"]


def adapted(config: LoRAConfig, **settings):
    """A model whose adapters are random, as after training."""
    model = make("rotary", **settings)
    add_adapters(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("targets", [["blocks.*"], ["blocks.*.attention.*", "blocks.1.feed_forward.input"]])
@pytest.mark.parametrize("settings", [dict(), dict(bias=True, activation="swiglu", n_kv_heads=2)], ids=str)
def test_merged_equals_applied(targets, settings):
    config = LoRAConfig(rank=3, alpha=5.0, targets=targets)
    model = adapted(config, **settings)
    plain = make("rotary", seed=9, **settings)
    plain.load_state_dict(merged(model.state_dict(), config))
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), atol=1e-5, rtol=1e-5)
    # And the equation by hand, of one layer.
    layer, x = model.blocks[1].feed_forward.input, torch.randn(4, 32)
    expected = x @ (layer.weight + 5 / 3 * layer.lora_up @ layer.lora_down).T + (
        0 if layer.bias is None else layer.bias
    )
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


def test_adapters_alone_are_trained_and_begin_as_the_base():
    base, model = make("rotary"), make("rotary")
    add_adapters(model, LoRAConfig(rank=2, targets=["blocks.*.attention.qkv"]))
    assert torch.equal(model(TOKENS), base(TOKENS))
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"blocks.{i}.attention.qkv.lora_{which}": size for i in (0, 1) for which, size in
                       (("down", 2 * 32), ("up", 2 * 96))}  # fmt: skip
    assert isinstance(model.blocks[0].attention.qkv, LoRALinear)
    before = fingerprint(model)
    with torch.no_grad():
        model.blocks[0].attention.qkv.lora_up.add_(1)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.norm.weight[3].add_(1e-6)
    assert fingerprint(model) != before


@pytest.fixture
def tune(command, workdir, trained):
    """tune(NAME, ...) fine-tunes the trained run on other text."""
    (workdir / "other.txt").write_text(sentences(300, seed=7).replace("the", "a"), encoding="utf-8")

    def run(name, *overrides):
        words = ["init_from=runs/small", "data=text", "data.files=[other.txt]", f"name={name}", *STEPS, *overrides]
        return command("train", *words), workdir / "runs" / name

    return run


def state(run):
    return load_file(run / "model.safetensors")


def test_training_goes_on_from_a_model_with_its_tokenizer(tune, trained, workdir):
    result, run = tune("more", "optimizer.lr=1e-30", "optimizer.adamw_lr=1e-30", "optimizer.embedding_lr=1e-30")
    assert result.code == 0, result.err
    assert "; from runs/small" in result.out
    # At a rate of nothing it is the model that it began from.
    for name, tensor in state(trained).items():
        torch.testing.assert_close(state(run)[name], tensor, atol=1e-6, rtol=0)
    assert (run / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    # From a model file too; the settings that leave it the same model may be given.
    result, run = tune(
        "file", f"init_from={trained}/best.safetensors", "model.dropout=0.1", "data.row_length=16", "model.d_model=32"
    )
    assert result.code == 0, result.err
    assert load(run)[0].config.dropout == 0.1
    assert load(run)[0].config.max_seq_len == 32


@pytest.mark.parametrize(("settings", "warned"), [
    ([], True), (["optimizer=adamw"], True), (["optimizer=adamw", "optimizer.lr=1e-4"], False), (LORA, False),
    (["optimizer.lr=0.014"], False),
])  # fmt: skip
def test_a_rate_for_fresh_weights_is_named_and_the_loss_before_it_is_seen(tune, trained, settings, warned):
    result, run = tune("tuned", *settings, "data.files=[book.txt]", "trainer.max_steps=1", "callbacks.sample_every=0")
    assert result.code == 0, result.err
    rate = "0.001" if "optimizer=adamw" in settings else "0.014"
    words = f"optimizer.lr={rate} is meant for a model that begins afresh; at that rate runs/small may lose"
    assert (words in result.out) == warned
    assert ("What works: optimizer=adamw optimizer.lr=1e-4" in result.out) == warned
    was = [m["val/loss"] for m in read_metrics(trained) if "val/loss" in m][-1]
    first = next(m for m in read_metrics(run) if "val/loss" in m)
    assert (first["step"], first["val/loss"]) == (0, pytest.approx(was, rel=1e-6))
    again = tune("tuned", *settings, "data.files=[book.txt]", "trainer.max_steps=2", "resume=auto")[0]
    assert again.code == 0, again.err
    assert "begins afresh" not in again.out
    assert [m["step"] for m in read_metrics(run) if "val/loss" in m] == [0, 1, 2]


def test_adapters_leave_small_checkpoints_and_a_plain_model(tune, trained, command):
    result, run = tune("tuned", *LORA, "callbacks.checkpoint_every=6", "optimizer.lr=0.01")
    assert result.code == 0, result.err
    saved = read_checkpoint(checkpoints(run)[-1])
    names = {name.rpartition(".")[2] for name in saved["state_dict"]}
    assert names == {"lora_down", "lora_up"}
    numbers = sum(t.numel() for t in saved["state_dict"].values())
    assert numbers == 2 * 2 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))  # layers, rank, in + out of each
    assert f"{numbers:,} in adapters of rank 2" in result.out
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"])
    # The model is a plain one: what it has learned is what the adapters add.
    base, tuned = state(trained), state(run)
    assert base.keys() == tuned.keys()
    for name, tensor in base.items():
        key = f"model.{name.removesuffix('.weight')}.lora_"
        if f"{key}up" in saved["state_dict"]:
            added = 8 * saved["state_dict"][f"{key}up"] @ saved["state_dict"][f"{key}down"]
            assert added.abs().max() > 1e-4
            torch.testing.assert_close(tuned[name], tensor + added, atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(tuned[name], tensor), name
    losses = [float(loss) for loss in re.findall(r"step \d+/\d+  train ([\d.]+)", result.out)]
    assert losses[-1] < losses[0]
    assert command("generate", f"checkpoint={run}", "prompt=Ann", "max_new_tokens=4").code == 0
    refused = command("generate", f"checkpoint={checkpoints(run)[-1]}", "prompt=Ann")
    assert "holds adapters alone; model.safetensors of its run has them merged" in refused.err


@pytest.mark.parametrize("settings", [
    LORA, ["lora.rank=2", "optimizer=muon"], ["optimizer=adamw"], [*LORA, "trainer.precision=bf16-true"],
], ids=" ".join)  # fmt: skip
def test_a_resumed_fine_tuning_is_bit_identical(tune, settings):
    settings = [*settings, "model.dropout=0.1", "trainer.max_steps=6", "callbacks.keep_checkpoints=9"]
    _, whole = tune("whole", *settings)
    _, stopped = tune("stopped", *settings)
    for path in checkpoints(stopped)[1:]:
        path.unlink()
    result, _ = tune("stopped", *settings, "resume=auto")
    assert "resuming runs/stopped after step 2" in result.out
    one, other = (read_checkpoint(checkpoints(run)[-1]) for run in (whole, stopped))
    for a, b in ((state(whole), state(stopped)), (one["state_dict"], other["state_dict"])):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    old, new = (saved["optimizer_states"][0]["state"] for saved in (one, other))
    assert all(torch.equal(old[i][k], new[i][k]) for i in old for k in old[i])


REFUSED = [
    (["model.d_model=64"], ["model.d_model=64 contradicts init_from=runs/small", "has 32"]),
    (["model.attention.qk_norm=false"], ["model.attention.qk_norm=False contradicts"]),
    (["model=small"], ["model cannot go with init_from=runs/small"]),
    (["tokenizer=char"], ["tokenizer cannot go with init_from"]),
    (["experiment=stdlib"], ["experiment cannot go with init_from"]),
    (["init_from=runs/nothing"], ["init_from=runs/nothing does not exist"]),
    (["data.row_length=64"], ["data.row_length=64 is more than model.max_seq_len=32"]),
    (["lora.rank=2", "init_from=null"], ["lora.rank=2 needs init_from"]),
    (["lora.rank=2", "lora.targets=[head]"], ["lora.targets: head matches no linear layer", "blocks.*.attention.qkv"]),
]  # fmt: skip


def test_what_contradicts_the_model_is_refused(tune):
    for overrides, words in REFUSED:
        result, run = tune("wrong", *overrides)
        assert result.code == 1
        assert len(result.err.splitlines()) == 1, result.err
        for word in words:
            assert word in result.err
        assert not run.exists()


@pytest.mark.parametrize(("settings", "words"), [
    (dict(rank=2, alpha=0), "lora.alpha=0"), (dict(alpha=2), "need a lora.rank above 0"),
    (dict(rank=-1), "lora.rank=-1"), (dict(rank=2, targets=[]), "lora.targets is empty"),
], ids=str)  # fmt: skip
def test_wrong_settings_of_adapters_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LoRAConfig(**settings)


def test_resuming_beside_other_weights_or_adapters_is_refused(tune, trained):
    tune("tuned", *LORA, "trainer.max_steps=2")
    result, _ = tune("tuned", "lora.rank=4", "optimizer=adamw", "resume=auto")
    assert "it was trained with lora.rank=2, not 4" in result.err
    result, _ = tune("tuned", "optimizer=adamw", "resume=auto")
    assert "it was trained with lora.rank=2, not 0" in result.err
    result, _ = tune("tuned", *LORA, f"init_from={trained}/checkpoints/step-00000002.ckpt", "resume=auto")
    assert result.code == 1
    assert "are no longer the same" in result.err


def test_a_converted_model_is_tuned_and_leaves_again(tune, command, trained, workdir):
    """Documents start and end with the tokens of its own, in training too."""
    assert command("convert", "from=runs/small", "to=theirs").code == 0
    given = json.loads((workdir / "theirs" / "tokenizer.json").read_text())
    for token, i in (("<begin>", 298), ("<end>", 299)):  # two that merges had made become special
        old = next(name for name, n in given["model"]["vocab"].items() if n == i)
        del given["model"]["vocab"][old]
        given["model"]["merges"] = [m for m in given["model"]["merges"] if "".join(m) != old and old not in m]
        given["added_tokens"].append(given["added_tokens"][0] | {"id": i, "content": token})
    given["post_processor"] = None
    (workdir / "theirs" / "tokenizer.json").write_text(json.dumps(given))
    for file in ("config.json", "generation_config.json"):
        values = json.loads((workdir / "theirs" / file).read_text()) | {"bos_token_id": 298, "eos_token_id": [299, 298]}
        (workdir / "theirs" / file).write_text(json.dumps(values))
    result = command("convert", "from=theirs", "to=ours")
    assert result.code == 0, result.err
    assert "documents start with <begin> and end with <end>" in result.out

    seen = []
    from minitransformer.model.transformer import Transformer

    hidden_states = Transformer.hidden_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Transformer,
            "hidden_states",
            lambda self, tokens, *a, **k: seen.append(tokens) or hidden_states(self, tokens, *a, **k),
        )
        result, run = tune("tuned", "init_from=ours", *LORA, "data.documents=line", "data.packing=pad",
                           "callbacks.sample_every=0")  # fmt: skip
    assert result.code == 0, result.err
    tokens = torch.cat([t.flatten() for t in seen])
    assert (tokens == 298).sum() > 20
    assert not (tokens == 299).any()
    for source in (run, run / "best.safetensors"):
        assert command("convert", f"from={source}", f"to=back-{source.stem}").code == 0
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            path = workdir / f"back-{source.stem}" / file
            assert path.read_bytes() == (workdir / "theirs" / file).read_bytes()
    assert load(run)[1].end_ids == load("ours")[1].end_ids == {298, 299}
