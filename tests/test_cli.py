"""The commands as a user types them: choices, help, sweeps, and every mistake in one line."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf, open_dict

import minitransformer
from minitransformer import Tokenizer, cli
from minitransformer.cli import compose, config_dir, options
from minitransformer.overrides import quoted
from minitransformer.run.directory import checkpoints
from minitransformer.training.config import GROUPS
from tests.conftest import ROOT, SMALL, sentences

TEXT = ["data=text", "data.files=[book.txt]", "tokenizer.vocab_size=300"]


def refused(result, *words):
    """One line on standard error, no traceback, non-zero exit."""
    assert result.code == 1, result.out + result.err
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("error: ")
    assert all(word in result.err for word in words), result.err


@pytest.mark.parametrize(("overrides", "words"), [
    ("trainer.max_step=5", ["trainer.max_step ", "did you mean trainer.max_steps?"]),
    ("lr=0.1", ["did you mean optimizer.lr?"]),
    ("model.n_layer=3", ["did you mean model.n_layers?"]),
    ("data.batchsize=3", ["did you mean data.batch_size?"]),
    ("optimizer=adamw optimizer.momentum=0.9", ["optimizer.momentum is not a setting"]),
    ("data.text_field=a", ["data.text_field is not a setting"]),
    ("+foo=1", ["foo is not a setting"]),
    ("+trainer.foo=1", ["trainer.foo is not a setting"]),
    ("model=huge", ["model=huge", "gpt2, ", "small, tiny"]),
    ("experiment=nope", ["experiment=nope", "shakespeare_char"]),
    ("trainer.max_steps=many", ["trainer.max_steps", "many"]),
    ("trainer.max_steps=null", ["trainer.max_steps"]),
    ("schedule.warmup_steps=1.5", ["schedule.warmup_steps", "1.5"]),
    ("optimizer.lr=fast", ["optimizer.lr", "fast"]),
    ("optimizer.lr=-1", ["optimizer.lr=-1"]),
    ("optimizer.lr=nan", ["optimizer.lr=nan"]),
    ("optimizer.adamw_lr=0", ["optimizer.adamw_lr=0"]),
    ("optimizer.embedding_lr=inf", ["optimizer.embedding_lr=inf"]),
    ("optimizer.betas=[0.9]", ["optimizer.betas"]),
    ("optimizer.betas=[0.9,1.0]", ["optimizer.betas=1.0"]),
    ("optimizer.groups=0.1", ["optimizer.groups takes a list", '"optimizer.groups=[a,b]"']),
    ("optimizer.groups=[{patern:x}]", ["optimizer.groups: patern is not a setting", "pattern, lr, weight_decay"]),
    ("data.files=[a.txt]", ["data.files is not a setting of data=stdlib", "data=text"]),
    ("data.file=a.txt", ["did you mean data.files of", "data=text?"]),
    ("optimizer=adamw optimizer.momentun=0.9", ["did you mean optimizer.momentum of optimizer=muon?"]),
    ("+foo={}", ["foo is not a setting"]),
    ("+foo={a:1}", ["foo.a is not a setting"]),
    ("--data text", ["--data is not an option", "write data=VALUE"]),
    ("seed=1 --cfg", ["--cfg", "expected one argument"]),
    ("--cfg job trainer.max_step=5", ["did you mean trainer.max_steps?"]),
    ("debug=find_lr schedule=cosine", ["debug=find_lr chooses schedule=range", "leave schedule=cosine out"]),
    ("experiment=gpt2_124m data=stdlib", ["trainer.accumulate=32", "data.batch_size=8"]),
    ("data=text data.files=[book.txt", ["cannot read the override"]),
    ("data=text", ["data.files is empty"]),
    ("data=hub", ["data.name is empty"]),
    ("~data", ["data is not chosen"]),
    ("nonsense", ["cannot read the override 'nonsense'"]),
    ("model.d_model=130", ["d_model=130", "n_heads=4"]),
    ("model.position=magic", ["model.position='magic'", "rotary"]),
    ("model.attention.kernel=magic", ["model.attention.kernel='magic'", "sdpa"]),
    ("model.attention.pattern=[window,magic]", ["model.attention.pattern='magic'", "bigbird"]),
    ("model.position=shaw model.attention.kernel=sdpa", ["kernel=sdpa", "position=shaw", "use auto or reference"]),
    ("model.attention.kernel=flex trainer.device=cpu", ["kernel=flex", "no gradients on a CPU", "kernel=auto"]),
    ("trainer.precision=fp8", ["trainer.precision='fp8'", "bf16-mixed"]),
    ("trainer.device=tpu", ["trainer.device='tpu'", "cpu"]),
    ("trainer.max_steps=0", ["trainer.max_steps=0"]),
    ("trainer.accumulate=0", ["trainer.accumulate=0"]),
    ("trainer.accumulate=99", ["trainer.accumulate=99", "data.batch_size=8"]),
    ("data.val_fraction=1", ["data.val_fraction=1"]),
    ("data.split=middle", ["data.split='middle'", "tail"]),
    ("tokenizer.vocab_size=100", ["tokenizer.vocab_size=100", "257"]),
    ("logger.mode=loud", ["logger.mode='loud'", "offline"]),
    ("schedule.warmup_steps=-1", ["schedule.warmup_steps=-1"]),
    ("seed=-1", ["seed=-1"]),
    ("data=text data.files=[book.txt] data.text_field=a", ["data.text_field"]),
    ("data=text data.files=[book.txt] data.documents=lines", ["data.documents=lines", "did you mean line?"]),
    ("data=text data.files=[book.txt] data.packing=tight", ["data.packing='tight'", "best_fit"]),
    ("data=text data.files=[book.txt] data.val_files=[gone.txt]", ["data.val_files: gone.txt does not exist"]),
    ("data=text data.files=[qa.jsonl]", ["qa.jsonl is no text by its ending", "choose data=jsonl"]),
    ("data=csv data.files=[qa.jsonl]", ["qa.jsonl is no csv by its ending", "choose data=jsonl"]),
    ("data=jsonl data.files=[book.txt]", ["book.txt line 1 is not JSON", "one object a line"]),
    ("data=jsonl data.files=[qa.jsonl] data.documents=line", ["data.documents"]),
    ("data=text data.files=['']", ["data.files holds an empty name"]),
    ("data=text data.files=[book.txt] data.val_files=[book.txt]", ["all of them are in data.val_files too"]),
    ("data=text data.files=['*.rst']", ["data.files: *.rst matches no file"]),
    ("data=text data.files=[nothing]", ["data.files: nothing holds no text"]),
    ("data=text data.files=[broken.txt.gz]", ["broken.txt.gz cannot be read"]),
    ("data=jsonl data.files=[qa.jsonl] data.text_field=body", ["data.text_field=body is not in", "question, text"]),
    ("data=jsonl data.files=[qa.jsonl] data.prefix_field=q", ["data.prefix_field=q is not in", "question, text"]),
    ("data=text data.files=[book.txt] data.cache_dir=book.txt", ["data.cache_dir=book.txt cannot be written"]),
    ("data=hub data.name=nowhere", ["cannot load data.name=nowhere"]),
    ("data=hub data.name=x data.streaming=true data.packing=concat", ["data.packing=concat", "data.streaming"]),
    ("tokenizer=pretrained", ["tokenizer.name is empty"]),
    ("tokenizer=pretrained tokenizer.name=gone.json", ["cannot load tokenizer.name=gone.json", "nor is there a file"]),
    ("data=text data.files=[gone.txt]", ["gone.txt does not exist"]),
    ("data=text data.files=[empty.txt]", ["empty.txt is empty"]),
    ("data=text data.files=[blank.txt]", ["blank.txt holds no text"]),
    ("data=text data.files=[latin.txt]", ["latin.txt is not UTF-8", "0xe9", "offset 3"]),
    ("data=text data.files=[short.txt]", ["4 tokens", "a row of 256", "257", "data.row_length=3"]),
    ("data=text data.files=[book.txt] model.vocab_size=20 tokenizer=byte", ["model.vocab_size=20", "257"]),
    ("data=text data.files=[book.txt] tokenizer=char callbacks.sample_prompt=Query", 
     ["callbacks.sample_prompt", "'Q'"]),
    ("data=text data.files=[book.txt] tokenizer=byte model.max_seq_len=8 callbacks.sample_prompt=much_too_long",
     ["callbacks.sample_prompt", "14 tokens", "holds 8"]),
    ("resume=nowhere", ["resume=nowhere is neither a run directory nor a checkpoint"]),
    ("resume=auto", ["no run in", "train one first"]),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_mistakes_end_in_one_line_and_write_nothing(command, workdir, overrides, words):
    (workdir / "empty.txt").touch()
    (workdir / "blank.txt").write_text("\n \t\n")
    (workdir / "latin.txt").write_bytes("Caf\xe9".encode("latin-1"))
    (workdir / "short.txt").write_text("A few words.")
    (workdir / "nothing").mkdir()
    (workdir / "broken.txt.gz").write_bytes(b"text")
    (workdir / "qa.jsonl").write_text('{"question": "a", "text": "b"}\n' * 9)
    refused(command("train", *overrides.split(" ")), *words)
    assert not (workdir / "runs").exists()
    assert not (workdir / "outputs").exists()


def test_a_device_that_is_not_there(command):
    import torch

    missing = "cuda" if torch.backends.mps.is_available() else "mps"
    refused(command("train", f"trainer.device={missing}"), f"device={missing} is not available", "cpu")


@pytest.mark.parametrize(("arguments", "words"), [
    (["checkpoint=nowhere"], ["checkpoint=nowhere does not exist"]),
    (["checkpoint=None"], ["checkpoint=None does not exist", "checkpoint=null"]),
    ([], ["no run in"]),
    (["checkpoint=book.txt"], ["book.txt cannot be read as a checkpoint"]),
    (["checkpoint=."], ["holds no checkpoint"]),
    (["temperature=-1"], ["temperature=-1"]),
    (["top_p=0"], ["top_p=0"]),
    (["max_new_tokens=0"], ["max_new_tokens=0"]),
    (["tempature=1"], ["did you mean temperature?"]),
    (["device=tpu"], ["device='tpu'"]),
], ids=str)  # fmt: skip
def test_mistakes_of_generate(command, arguments, words):
    refused(command("generate", *arguments), *words)


def test_generate_from_a_run(command, trained):
    result = command("generate", "prompt='Ann '", "max_new_tokens=12", "seed=1")
    assert result.code == 0, result.err
    assert result.out.startswith("Ann ")
    assert len(result.out) > len("Ann \n")
    assert (
        command("generate", f"checkpoint={trained}", "prompt='Ann '", "max_new_tokens=12", "seed=1").out == result.out
    )
    newest = checkpoints(trained)[-1]
    assert command("generate", f"checkpoint={newest}", "prompt='Ann '", "max_new_tokens=12", "seed=1").out == result.out
    refused(command("generate", "max_new_tokens=100"), "max_new_tokens=100", "max_seq_len=32")
    refused(command("generate", f"prompt='{'Ann sees. ' * 30}'"), "the prompt has", "holds 32")


def test_a_word_source_stays_in_messages(command, workdir):
    refused(command("convert", "from=x", "sourc=1"), "sourc is not a setting", "there are from, to,")
    refused(command("generate", "checkpoint=my source"), "checkpoint=my source does not exist")
    refused(command("generate", "draft=gone", "checkpoint=book.txt"), "book.txt cannot be read")


def test_a_draft_that_is_missing_is_called_one(command, trained):
    refused(command("generate", "draft=gone"), "draft=gone does not exist")


@pytest.mark.parametrize("name", ["train", "generate", "convert"])
def test_version(command, name):
    result = command(name, "--version")
    assert (result.code, result.out) == (0, f"minitransformer {minitransformer.__version__}\n")


@pytest.mark.parametrize("name", ["train", "generate"])
def test_help_and_config(command, name):
    result = command(name, "--help")
    assert result.code == 0
    assert "Examples:" in result.out
    if name == "train":
        for group in (path.name for path in config_dir().iterdir() if path.is_dir()):
            for choice in options(group):
                line = next(line for line in result.out.splitlines() if line.strip(" *").startswith(f"{choice} "))
                assert len(line.split()) > 2, line  # says what it is
    result = command(name, "--cfg", "job")
    assert result.code == 0
    assert ("max_steps:" if name == "train" else "temperature:") in result.out


CHOICES = [f"{group}={name}" for group in GROUPS for name in options(group) if group != "data"]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_keeps_its_name_and_takes_no_other(command, choice):
    group, name = choice.split("=")
    needs = ["tokenizer.name=gpt2"] if choice == "tokenizer=pretrained" else []
    config = OmegaConf.to_object(compose("train", [choice, *needs]))
    assert getattr(config, group).kind == asdict(config)[group]["kind"] == name
    other = next(n for n in options(group) if n != name)
    refused(command("train", choice, *needs, f"{group}.kind={other}"), f"{group}.kind={other}", f"{group}={other} inst")
    refused(command("train", f"~{group}"), f"{group} is not chosen")


def test_schedules_are_told_apart_by_the_config_alone(command, workdir):
    choices = [name for name in options("schedule") if name != "range"]
    small = [*TEXT, *SMALL, "trainer.max_steps=1", "trainer.val_every=1", "callbacks.sample_every=0"]
    for name in choices:
        assert command("train", *small, f"schedule={name}", f"name={name}").code == 0
    assert [OmegaConf.load(f"runs/{name}/config.yaml").schedule.kind for name in choices] == choices


COMPOSED = ["model", "tokenizer", "optimizer", "schedule", "logger", "debug"]


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in COMPOSED for name in options(group)])
def test_every_choice_trains(command, workdir, choice):
    """With its own settings, made small where they make the model large."""
    small = [s for s in SMALL if not s.startswith("logger=")] + ["trainer.max_steps=2"]
    if choice.startswith("debug"):
        small = [s for s in small if s.startswith(("model", "data"))]
    tokenizer = [] if choice.startswith("tokenizer") else ["tokenizer.vocab_size=300"]
    if choice == "tokenizer=pretrained":
        (workdir / "tokenizer.json").write_text(Tokenizer.bytes().to_json(), encoding="utf-8")
        tokenizer = ["tokenizer.name=tokenizer.json"]
    if choice in ("tokenizer=bpe", "logger=wandb") or not choice.startswith(("tokenizer", "logger")):
        small.append("logger=none" if choice != "logger=wandb" else "logger.tags=[test]")
    result = command("train", "data=text", "data.files=[book.txt]", choice, *tokenizer, *small, "name=run")
    assert result.code == 0, result.err
    assert (workdir / "runs" / "run" / "model.safetensors").exists() == (choice != "debug=find_batch")


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_runs_two_steps(command, workdir, experiment):
    """On text that lies where each expects it: the hub's data sets and tokenizers are local folders here."""
    for name in ("roneneldan/TinyStories", "HuggingFaceFW/fineweb-edu"):
        (workdir / name).mkdir(parents=True)
        for part in ("train", "validation"):
            rows = [json.dumps({"text": sentences(5, seed=i)}) for i in range(60)]
            (workdir / name / f"{part}.jsonl").write_text("\n".join(rows))
    (workdir / "gpt2").mkdir()
    (workdir / "gpt2" / "tokenizer.json").write_text(Tokenizer.bytes().to_json(), encoding="utf-8")
    own = {
        "shakespeare_char": ["data.files=[book.txt]"],
        "names": ["data.files=[book.txt]"],
        "gpt2_124m": ["data.config=null", "trainer.accumulate=2", "trainer.compile=false"],
    }
    small = ["model.n_layers=1", "model.d_model=32", "model.n_heads=4", "model.max_seq_len=64", "data.batch_size=2"]
    small += ["trainer.max_steps=2", "logger=none", "callbacks.sample_tokens=5"]
    result = command("train", f"experiment={experiment}", *own.get(experiment, []), *small)
    assert result.code == 0, result.err
    assert re.search(r"bits per byte\s+│ [\d.]+ ", result.out)


NEEDED = {  # what a choice asks for
    "data=csv": ["data.files=a"], "data=jsonl": ["data.files=a"], "data=parquet": ["data.files=a"],
    "data=text": ["data.files=a"], "data=hub": ["data.name=a"], "tokenizer=pretrained": ["tokenizer.name=a"],
}  # fmt: skip
EXPERIMENTS = [f"experiment={name}" for name in options("experiment")]
DEBUG, SWEEPS = ([f"{group}={name}" for name in options(group)] for group in ("debug", "sweep"))
SWAPPED = ("model", "data", "tokenizer", "optimizer", "schedule", "logger", "callbacks", "trainer")


def composed(*words):
    """The typed config of a job of train.py, and what is said of it."""
    texts = cli._texts("train")
    config = cli.compose("train", [quoted(word, texts) for word in words], return_hydra_config=True)
    hydra = config.hydra
    with open_dict(config):
        del config.hydra
    lines = cli.leave_out(config, "train", hydra)
    cli.refuse_unknown(config, "train", hydra)
    return OmegaConf.to_object(config), lines


CROSSED = []  # every choice of every group, several groups at a time
for number in range(max(len(options(group)) for group in SWAPPED)):
    CROSSED.append({group: options(group)[number % len(options(group))] for group in SWAPPED})


def words_of(chosen):
    choices = [f"{group}={name}" for group, name in chosen.items()]
    return [*choices, *(setting for choice in choices for setting in NEEDED.get(choice, []))]


@pytest.fixture(scope="module")
def plain():
    return [composed(*words_of(chosen))[0] for chosen in CROSSED]


@pytest.mark.parametrize("overlay", [*EXPERIMENTS, *DEBUG])
def test_every_overlay_composes_with_every_choice(overlay, plain):
    """Where the overlay was written for another choice, what the user chose is as it is alone."""
    group, name = overlay.split("=")
    written_for = dict(re.findall(r"override /(\w+): (\w+)", (config_dir() / group / f"{name}.yaml").read_text()))
    more = {
        "experiment=gpt2_124m": ["trainer.accumulate=1"],
        "debug=find_batch": ["trainer.devices=1", "trainer.strategy=auto"],
    }
    for chosen, alone, sweep in zip(CROSSED, plain, itertools.cycle(SWEEPS), strict=False):
        chosen = {g: choice for g, choice in chosen.items() if (overlay, g) != ("debug=find_lr", "schedule")}
        words = [overlay, sweep, *words_of(chosen), *more.get(overlay, [])]
        if overlay == "experiment=shakespeare_char" and alone.model.tie_embeddings and alone.optimizer.kind == "muon":
            with pytest.raises(ValueError, match=r"optimizer\.embedding_lr=0\.3 is used by no parameter"):
                composed(*words)
            continue
        config, lines = composed(*words)
        replaced = {g for g, choice in chosen.items() if written_for.get(g, choice) != choice}
        for g in replaced:
            assert getattr(config, g) == getattr(alone, g), (overlay, chosen)
        assert {re.match(rf"{overlay} was written for (\w+)=", line)[1] for line in lines} <= replaced


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_with_every_debug_overlay(experiment):
    needed = ["data.files=a"] if experiment in ("experiment=names", "experiment=shakespeare_char") else []
    rate = composed(experiment, *needed)[0].optimizer.lr
    for debug in options("debug"):
        if (experiment, debug) == ("experiment=gpt2_124m", "overfit"):
            with pytest.raises(ValueError, match=r"limit_rows=512 cannot go with data\.streaming=true"):
                composed(experiment, f"debug={debug}")
            continue
        config, _ = composed(experiment, f"debug={debug}", *needed)
        assert type(config.schedule).__name__ == ("RangeConfig" if debug == "find_lr" else "WSDConfig")
        assert config.optimizer.lr == (1.0 if debug == "find_lr" else rate)


def test_what_drops_out_is_said_and_what_the_user_sets_stays(command):
    words = ["experiment=shakespeare_char", "data.files=book.txt", "optimizer=adamw", "optimizer.weight_decay=0.5"]
    result = command("train", "--cfg", "job", *words)
    assert result.code == 0
    line = "experiment=shakespeare_char was written for optimizer=muon: "
    assert result.err == f"{line}optimizer.lr, optimizer.embedding_lr, optimizer.momentum left out\n"
    shown = OmegaConf.create(result.out)
    assert (shown.optimizer.lr, shown.optimizer.weight_decay, shown.model.max_seq_len) == (1e-3, 0.5, 64)
    assert "embedding_lr" not in shown.optimizer
    assert composed(*words, "debug=find_lr")[0].optimizer.lr == 1.0  # of the overlay that is about any optimizer
    refused(command("train", *words, "optimizer.embedding_lr=0.3"), "embedding_lr is not a setting of optimizer=adamw")
    refused(command("train", "-m", "--cfg=job", *words), "Only one of --run, --multirun, --cfg")


def test_an_overlay_with_a_setting_that_is_none_is_named(command, workdir):
    (workdir / "more" / "experiment").mkdir(parents=True)
    own = "# @package _global_\n# one's own\noptimizer: {embedding_lr: 0.2, lr: 0.5}\n"
    (workdir / "more" / "experiment" / "mine.yaml").write_text(own)
    asked = ["--config-dir", "more", "experiment=mine", "--cfg", "job"]
    assert "embedding_lr: 0.2" in command("train", *asked).out
    line = "experiment=mine: optimizer.embedding_lr is not a setting of optimizer=adamw; choose optimizer=muon"
    refused(command("train", *asked, "optimizer=adamw"), line)


def test_options_stand_anywhere(command, workdir):
    assert (
        command("train", "seed=3", "--cfg", "job", "name=a").out
        == command("train", "--cfg=job", "seed=3", "name=a").out
    )
    assert command("train", "seed=3", "--cfg", "job", "--package", "optimizer").out.startswith("kind: muon\n")
    result = command("explain", "model=tiny,small", "-m", "output=json")
    assert len(result.out.splitlines()) == 2


def test_a_sweep_has_a_directory_for_each_job(command, workdir):
    result = command("train", "-m", *TEXT, *SMALL, "seed=1,2", "trainer.max_steps=2", "name=sweep")
    assert result.code == 0, result.err
    runs = sorted(p.relative_to(workdir / "runs").as_posix() for p in workdir.glob("runs/**/model.safetensors"))
    assert runs == ["latest/model.safetensors", "sweep/0/model.safetensors", "sweep/1/model.safetensors"] or runs == [
        "sweep/0/model.safetensors", "sweep/1/model.safetensors"
    ]  # fmt: skip
    assert "seed: 1\n" in (workdir / "runs/sweep/0/config.yaml").read_text()
    assert "seed: 2\n" in (workdir / "runs/sweep/1/config.yaml").read_text()
    assert command("generate", "max_new_tokens=3").code == 0  # the newest job


def test_a_job_that_fails_does_not_stop_a_sweep(command, workdir):
    result = command("train", "-m", *TEXT, *SMALL, "model.n_heads=3,2", "trainer.max_steps=2", "name=sweep")
    refused(result, "n_heads=3")
    assert (workdir / "runs/sweep/1/model.safetensors").exists()
    assert not (workdir / "runs/sweep/0/config.yaml").exists()


def test_hydras_sweepers_are_chosen_with_m(command, workdir):
    refused(command("train", *TEXT, *SMALL, "sweep=positions"), "sweep=positions makes several runs", "-m sweep=")
    refused(command("train", *TEXT, *SMALL, "sweep=wandb"), "choose one of optuna, positions")
    result = command("train", "-m", *TEXT, *SMALL, "sweep=positions", "trainer.max_steps=1", "name=sweep")
    assert result.code == 0, result.err
    encodings = [OmegaConf.load(path).model.position for path in sorted((workdir / "runs/sweep").glob("?/config.yaml"))]
    assert encodings == ["none", "sinusoidal", "learned", "rotary", "alibi"]


def test_wandb_without_a_key_asks_and_waits_for_nothing(command, workdir, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    small = [s for s in SMALL if s != "logger=none"]
    result = command("train", *TEXT, *small, "name=mine")
    assert result.code == 0, result.err
    assert "wandb offline; upload with: wandb sync runs/mine/wandb/offline-run-*" in result.out
    assert list((workdir / "runs/mine/wandb").glob("offline-run-*/*.wandb"))
    assert result.err == ""


def test_start_up_imports_late():
    """--help needs no torch; generating needs neither Lightning nor datasets nor wandb."""
    code = "import sys; from minitransformer import cli; sys.argv = ['train.py', '--help']; cli.train(); " \
        "assert not {'torch', 'hydra', 'lightning'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    code = "import sys; from minitransformer import load, generate; import minitransformer.generation.generate; " \
        "assert not {'lightning', 'datasets', 'wandb'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_public_names():
    for name in minitransformer.__all__:
        assert getattr(minitransformer, name).__doc__
    with pytest.raises(AttributeError, match="magic"):
        _ = minitransformer.magic


def test_overfitting_one_batch_brings_the_loss_down(command, workdir):
    result = command("train", "data=text", "data.files=[book.txt]", "debug=overfit", "tokenizer=byte", "logger=none",
                     "model.max_seq_len=32", "data.batch_size=4", "trainer.max_steps=60")  # fmt: skip
    assert result.code == 0, result.err
    assert "rows      4 of 32 tokens" in result.out
    assert float(re.findall(r"step 60/60  train ([\d.]+)", result.out)[0]) < 0.3


def test_a_profile_shows_where_time_goes(command, workdir):
    result = command("train", "data=text", "data.files=[book.txt]", "debug=profile", "tokenizer=byte", "logger=none",
                     "model.max_seq_len=32", "name=run")  # fmt: skip
    assert result.code == 0, result.err
    assert re.search(r"(aten::(add)?mm|::_linear_pointwise) +\d", result.out)  # by either library
    assert json.loads((workdir / "runs/run/trace.json").read_text())["traceEvents"]


def test_a_reader_of_help_may_leave():
    """As `train.py --help | head -1` does."""
    pipe = subprocess.Popen(
        [sys.executable, ROOT / "train.py", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pipe.stdout.close()
    assert (pipe.stderr.read(), pipe.wait()) == ("", 0)


@pytest.mark.parametrize(("name", "arguments"), [
    ("explain", ["model=tiny,small", "output=json"]), ("generate", ["seed=1,2", "max_new_tokens=3", "output=json"]),
    ("evaluate", ["stride=8,16", "output=json"]),
])  # fmt: skip
def test_a_sweep_of_a_command_that_only_reads_leaves_nothing(command, trained, workdir, name, arguments):
    before = sorted(workdir.rglob("*"))
    result = command(name, "--multirun" if name == "explain" else "-m", *arguments)
    assert result.code == 0, result.err
    one, other = (json.loads(line) for line in result.out.splitlines())
    assert one != other
    assert sorted(workdir.rglob("*")) == before


def test_of_a_setting_that_is_given_several_times_the_last_holds(command):
    result = command("train", "seed=3", "seed=0", "seed=3", "--cfg", "job")
    assert result.code == 0, result.err
    assert "\nseed: 3\n" in result.out
