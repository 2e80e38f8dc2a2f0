"""What is logged is all there: in the run directory, and in W&B without a gap or a double, whatever stops a run."""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import pytest
import torch
import wandb
import yaml
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from minitransformer.run.directory import checkpoints, read_attention, read_metrics, read_samples
from minitransformer.training import logging
from minitransformer.training.pictures import attention_picture
from tests.conftest import ROOT, SMALL
from tests.training.test_training import TEXT, metrics
from tests.training.wandb_file import OfflineRun, records
from tests.training.wandb_server import Server

# W&B's own threads outlive a server that is gone.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

OFFLINE = [*TEXT, *(s for s in SMALL if s != "logger=none"), "callbacks.keep_checkpoints=9"]


def offline_run(run: Path) -> OfflineRun:
    """Of a run that has ended."""
    (folder,) = run.glob("wandb/offline-run-*")
    return ended(folder)


def ended(folder: Path) -> OfflineRun:
    """W&B's own process writes the end of its file a moment later."""
    for _ in range(100):
        found = OfflineRun(folder)
        if found.code is not None:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{folder} has no end")


def by_step(run: Path) -> dict[int, dict]:
    """metrics.jsonl with what was logged at one step together, without what measures time."""
    found: dict[int, dict] = {}
    for moment in read_metrics(run):
        found.setdefault(moment["step"], {}).update(timeless(moment))
    return found


def timeless(row: dict) -> dict:
    """Numbers of a row of history or metrics, but for those that measure time and the step itself."""
    return {name: v for name, v in row.items() if name == "tokens" or ("/" in name and not name.startswith("speed/"))}


def test_an_offline_run_holds_everything(command, workdir):
    run = workdir / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()  # it was killed at once
    (run / "report.html").write_text("a report")  # whoever wrote it
    result = command("train", *OFFLINE, "name=mine", "resume=auto", "callbacks.sample_prompt='--- step 1 ---\n'")
    assert result.code == 0, result.err
    found = offline_run(run)
    assert {step: timeless(row) for step, row in found.history.items()} == by_step(run)
    assert list(found.history) == [2, 3, 4, 6]
    groups = {name.partition("/")[0] for row in found.history.values() for name in row if "/" in name}
    assert groups == {"train", "val", "optim", "speed", "data", "model"}
    assert found.samples() == [list(sample) for sample in read_samples(run)]
    assert [step for step, _ in found.samples()] == [3, 6]
    pictures = {step: row["attention"]["path"] for step, row in found.history.items() if "attention" in row}
    assert list(pictures) == [3, 6]
    for step, png in read_attention(run):
        assert Image.open(found.files / pictures[step]).tobytes() == Image.open(BytesIO(png)).tobytes()
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    for group in ("model", "data"):  # what null stands for is said
        told = found.config[group]
        config[group] |= {name: told[name] for name, value in config[group].items() if value is None}
    config["model"]["attention"] = found.config["model"]["attention"]
    assert {name: found.config[name] for name in config} == config
    told = found.config["model"] | found.config["data"]
    sizes = {"n_kv_heads": 4, "d_head": 8, "d_ff": 128, "vocab_size": 300, "row_length": 32}
    assert {name: told[name] for name in sizes} == sizes
    assert (told["attention"]["score_width"], told["attention"]["qkv_bias"]) == (8, False)
    assert found.config["parameters"] == sum(w.numel() for w in load_file(run / "model.safetensors").values())
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|\d+\.\d+\.\d+", found.config["code"])
    assert set(found.config["fingerprints"]) == {"data", "tokenizer"}
    kept = {a.type: a for a in found.artifacts if a.type in ("model", "report")}
    assert set(kept["model"].aliases) == {"latest", "best"}  # the last validation was the best
    (entry,) = kept["model"].manifest.contents
    assert (entry.path, entry.size) == ("model.safetensors", (run / "model.safetensors").stat().st_size)
    assert Path(entry.local_path).parent == run  # named, not copied
    assert kept["report"].manifest.contents[0].path == "report.html"
    assert found.code == 0


def test_the_best_weights_are_an_artifact_of_their_own_where_they_are_not_the_last(command, workdir):
    schedule = ["schedule=constant", "schedule.warmup_steps=0", "optimizer=adamw", "optimizer.lr=0.5"]
    result = command("train", *OFFLINE, *schedule, "trainer.val_every=1", "name=mine")
    assert result.code == 0, result.err
    models = [a for a in offline_run(workdir / "runs/mine").artifacts if a.type == "model"]
    assert [set(a.aliases) - {"latest"} for a in models] == [{"best"}, set()]
    assert [Path(a.manifest.contents[0].local_path).stem for a in models] == ["best", "model"]
    command("train", *OFFLINE, "name=none", "logger.log_model=false")
    assert not [a for a in offline_run(workdir / "runs/none").artifacts if a.type == "model"]


def test_after_a_kill_an_offline_run_is_whole(command, workdir):
    """Killed between two checkpoints, wherever W&B's own file ends."""
    long = ["trainer.max_steps=40", "callbacks.checkpoint_every=8", "trainer.log_every=1", "callbacks.sample_tokens=2"]
    assert command("train", *OFFLINE, *long, "name=whole").code == 0
    run = workdir / "runs" / "killed"
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *OFFLINE, *long, "name=killed"], stdout=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},  # not this process's
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step 20/"):
            os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    step = int(checkpoints(run)[-1].stem.removeprefix("step-"))
    assert 16 <= step < read_metrics(run)[-1]["step"] < 40
    (before,) = run.glob("wandb/offline-run-*")
    assert command("train", *OFFLINE, *long, "name=killed", "resume=auto").code == 0
    whole, found = offline_run(workdir / "runs/whole"), offline_run(run)
    assert found.id == before.name.rpartition("-")[2]
    rows = [{step: timeless(row) for step, row in r.history.items()} for r in (found, whole)]
    assert rows[0] == rows[1]
    assert found.samples() == whole.samples()
    assert list(found.history) == list(range(1, 41))
    assert metrics(run) == metrics(workdir / "runs/whole")


def test_what_an_offline_run_is_given_again_keeps_its_time(command, workdir):
    """Samples and pictures that share its row too; what is new has the time at which it is logged."""
    settings = [*OFFLINE, "schedule=constant", "name=mine"]
    begin = time.time()
    assert command("train", *settings, "trainer.max_steps=6").code == 0
    run, between = workdir / "runs/mine", time.time()
    next(run.glob("wandb/offline-run-*/last-step.txt")).unlink()  # as after a kill
    before = read_metrics(run)
    assert all(begin < moment["time"] < between for moment in before)
    assert [moment["time"] for moment in before] == sorted(moment["time"] for moment in before)
    times = {moment["step"]: moment["time"] for moment in before}  # of the last line of a step
    assert command("train", *settings, "trainer.max_steps=10", "resume=auto").code == 0
    found = {step: row["_timestamp"] for step, row in offline_run(run).history.items()}
    assert {step: found[step] for step in times} == times
    assert min(found[step] for step in (8, 9, 10)) > between
    assert not any("time" in row for row in offline_run(run).history.values())


def test_an_offline_run_that_goes_on_adds_to_what_it_has(command, workdir):
    """What W&B measured itself (system metrics, the time that it took) is in each piece, and no step is in two."""
    settings = [*OFFLINE, "schedule=constant", "name=mine"]
    for steps in (6, 10):
        assert command("train", *settings, f"trainer.max_steps={steps}", "resume=auto").code == 0
    run = workdir / "runs/mine"
    pieces = [ended(folder) for folder in sorted(run.glob("wandb/offline-run-*"))]
    assert [list(piece.history) for piece in pieces] == [[2, 3, 4, 6], [8, 9, 10]]
    assert {step: timeless(row) for piece in pieces for step, row in piece.history.items()} == by_step(run)
    assert [step for piece in pieces for step, _ in piece.samples()] == [3, 6, 9, 10]
    assert len({piece.id for piece in pieces}) == 1
    assert all(piece.stats for piece in pieces)
    # From an earlier checkpoint the pieces hold too much: all is given again.
    earlier = f"resume={run / 'checkpoints/step-00000004.ckpt'}"
    assert command("train", *settings, "trainer.max_steps=8", earlier).code == 0
    assert list(offline_run(run).history) == [2, 3, 4, 6, 8]


def test_a_file_of_wandb_that_is_still_being_written_gives_its_whole_records(command, workdir, tmp_path):
    assert command("train", *OFFLINE, "name=mine", "trainer.max_steps=6").code == 0
    run = workdir / "runs/mine"
    offline_run(run)  # has ended
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    data, whole = file.read_bytes(), [r.SerializeToString() for r in records(file)]
    part = tmp_path / "part.wandb"
    for end in range(7, len(data), 101):
        part.write_bytes(data[:end])
        found = [r.SerializeToString() for r in records(part)]
        assert found == whole[: len(found)]


@pytest.fixture
def environment(monkeypatch):
    """environment(NAME=value, ...) sets variables as W&B will find them."""

    def set_all(**values: str) -> None:
        wandb.teardown()  # it remembers where it was
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    yield set_all
    monkeypatch.undo()
    wandb.teardown()


VARIABLES = {
    "WANDB_PROJECT": "project", "WANDB_ENTITY": "entity", "WANDB_NAME": "display_name", "WANDB_RUN_GROUP": "run_group",
    "WANDB_NOTES": "notes", "WANDB_JOB_TYPE": "job_type", "WANDB_RUN_ID": "run_id",
}  # fmt: skip


def test_the_environment_of_wandb_holds_where_the_command_line_is_silent(command, workdir, environment):
    environment(**{name: f"my-{name[6:].lower()}" for name in VARIABLES}, WANDB_TAGS="one,two", WANDB_MODE="dryrun",
                WANDB_DIR=str(workdir / "elsewhere"))  # fmt: skip
    (workdir / "elsewhere").mkdir()
    quick = [*OFFLINE, "callbacks.sample_every=0"]
    for more in (["trainer.max_steps=6"], ["trainer.max_steps=8", "resume=auto"]):
        result = command("train", *quick, *more, f"runs_dir={workdir}/r")
        assert result.code == 0, result.err
    assert not list(workdir.glob("r/*/wandb"))
    folders = sorted(workdir.glob("elsewhere/wandb/offline-run-*"))
    for folder in folders:
        run = ended(folder).run
        assert {name: getattr(run, field) for name, field in VARIABLES.items()} == {
            name: f"my-{name[6:].lower()}" for name in VARIABLES
        }
        assert list(run.tags) == ["one", "two"]
    assert [list(ended(folder).history) for folder in folders] == [[2, 3, 4, 6], [8]]
    assert f"wandb sync {workdir}/elsewhere/wandb/offline-run-*-my-run_id" in result.out
    given = ["logger.project=p", "logger.entity=e", "logger.tags=[t]", "name=mine"]
    assert command("train", *quick, *given, f"runs_dir={workdir}/s").code == 0
    run = ended(max(workdir.glob("elsewhere/wandb/offline-run-*"), key=lambda folder: folder.stat().st_mtime_ns)).run
    assert (run.project, run.entity, run.display_name, list(run.tags)) == ("p", "e", "mine", ["t"])
    assert (run.run_group, run.notes, run.job_type) == ("my-run_group", "my-notes", "my-job_type")


@pytest.mark.parametrize("variable", ["WANDB_DISABLED=true", "WANDB_MODE=disabled"])
def test_wandb_can_be_turned_off_in_the_environment(command, workdir, environment, variable):
    environment(**dict([variable.split("=")]))
    result = command("train", *OFFLINE, "name=mine")
    assert result.code == 0, result.err
    assert not (workdir / "runs/mine/wandb").exists()
    assert list(by_step(workdir / "runs/mine")) == [2, 3, 4, 6]
    if variable == "WANDB_DISABLED=true":
        assert command("train", *OFFLINE, "name=mine", "logger.mode=offline").code == 0
        assert list((workdir / "runs").glob("mine*/wandb"))


@pytest.mark.parametrize(("variables", "words"), [
    ({"WANDB_API_KEY": "short", "WANDB_MODE": "online"}, ["WANDB_API_KEY", "40+ characters, has 5"]),
    ({"WANDB_MODE": "online"}, ["no key", "wandb login", "logger.mode=offline"]),
    ({"WANDB_MODE": "shared"}, ["WANDB_MODE='shared'", "online, offline, disabled"]),
    ({"WANDB_MODE": "loud"}, ["mode='loud'", "'online'"]),
    ({"WANDB_PROJECT": "a/b"}, ["project name 'a/b'"]),
    ({"WANDB_RUN_ID": "a/b"}, ["Run ID"]),
    ({"WANDB_SILENT": "maybe"}, ["silent='maybe'", "boolean"]),
    ({"logger.project": "a/b"}, ["project name 'a/b'"]),
    ({"logger.tags": "['']"}, ["run_tags", "Tag at index 0 is empty"]),
])  # fmt: skip
def test_what_wandb_does_not_take_is_said_before_anything_is_made(command, workdir, environment, variables, words):
    environment(HOME=str(workdir), **{name: value for name, value in variables.items() if name.startswith("WANDB")})
    settings = [f"{name}={value}" for name, value in variables.items() if name.startswith("logger")]
    result = command("train", *OFFLINE, "name=mine", *settings)
    assert result.code == 1
    assert len(result.err.splitlines()) == 1, result.err
    assert all(word in result.err for word in words), result.err
    assert not (workdir / "runs").exists()


@pytest.fixture
def server(monkeypatch):
    """A W&B server that this process is logged in to."""
    made = Server()
    monkeypatch.delenv("WANDB_MODE")
    for name, value in {"WANDB_BASE_URL": made.url, "WANDB_API_KEY": "a" * 40}.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # it remembers where it was
    yield made
    made.close()
    monkeypatch.undo()
    wandb.teardown()


def test_a_resumed_run_goes_on_online_where_it_was(command, workdir, server):
    """W&B has later steps than the newest checkpoint, as after a kill: none is missing, none is there twice."""
    whole = ["trainer.max_steps=8", "schedule.decay_fraction=0"]
    assert command("train", *OFFLINE, *whole, "name=whole", "logger=none").code == 0
    run = workdir / "runs" / "mine"
    assert command("train", *OFFLINE, *whole, "trainer.max_steps=6", "name=mine").code == 0
    (id,) = server.runs
    assert [row["_step"] for row in server.history(id)] == [2, 3, 4, 6]
    checkpoints(run)[-1].unlink()
    assert command("train", *OFFLINE, *whole, "name=mine", "resume=auto").code == 0
    assert list(server.runs) == [id]
    assert {row["_step"]: timeless(row) for row in server.history(id)} == by_step(workdir / "runs/whole")
    assert len(server.history(id)) == len(by_step(workdir / "runs/whole"))
    assert {a["artifactTypeName"] for a in server.artifacts} == {"wandb-run-incremental-table", "model"}
    assert server.exits == {id: 0}


def test_an_offline_run_is_uploaded_whole_and_again_when_it_went_on(command, workdir, server):
    """Offline, uploaded with the command that is printed, resumed offline, uploaded again, resumed online."""
    settings = [*OFFLINE, "schedule.decay_fraction=0", "name=mine"]
    for steps, *more in ((4, "logger.mode=offline"), (6, "logger.mode=offline", "resume=auto"), (8, "resume=auto")):
        result = command("train", *settings, f"trainer.max_steps={steps}", *more)
        assert result.code == 0, result.err
        if len(more) and more[0] == "logger.mode=offline":
            upload = re.search(r"upload with: (wandb sync .*)", result.out)[1]
            here = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
            subprocess.run(f"{here} {upload}", shell=True, check=True, capture_output=True)
        (id,) = server.runs
        assert {row["_step"]: timeless(row) for row in server.history(id)} == by_step(workdir / "runs/mine")
    assert not list((workdir / "runs/mine/wandb").glob("offline-run-*"))


def test_a_key_that_the_server_does_not_know_leaves_an_offline_run(command, workdir, server):
    server.knows_key = False
    result = command("train", *OFFLINE, "name=mine")
    assert result.code == 0, result.err
    assert "logging   wandb offline (user is not logged in); upload with: wandb sync runs/mine" in result.out
    assert list(offline_run(workdir / "runs/mine").history) == [2, 3, 4, 6]
    assert [path.name for path in workdir.glob("runs/mine/wandb/*run-2*")] == [
        path.name for path in workdir.glob("runs/mine/wandb/offline-run-*")
    ]


def test_training_goes_on_when_wandb_cannot_be_reached_any_more(command, workdir, server, monkeypatch):
    monkeypatch.setattr(logging, "FINISH_SECONDS", 1)
    log_sample = logging.WandbRun.log_sample

    def cut_off(self, text, step):
        server.close()
        log_sample(self, text, step)

    monkeypatch.setattr(logging.WandbRun, "log_sample", cut_off)
    start = time.monotonic()
    result = command("train", *OFFLINE, "name=mine")
    assert result.code == 0, result.err
    assert time.monotonic() - start < 20
    assert "wandb cannot be reached; nothing is lost" in result.out
    assert list(by_step(workdir / "runs/mine")) == [2, 3, 4, 6]
    assert (workdir / "runs/mine/model.safetensors").exists()


def test_what_fails_inside_wandb_is_said_once_and_stops_nothing(command, workdir, monkeypatch):
    def broken(self, *_, **__):
        raise RuntimeError("the service is gone\nfor good")

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", broken)
    result = command("train", *OFFLINE, "name=mine")
    assert result.code == 0, result.err
    assert result.out.count("wandb: the service is gone for good; metrics.jsonl has everything") == 1
    assert list(by_step(workdir / "runs/mine")) == [2, 3, 4, 6]


def test_each_job_of_a_sweep_is_a_run_that_ends_as_the_job_did(command, workdir):
    sweep = ["optimizer=adamw", "optimizer.lr=1e30,1e-3", "schedule.warmup_steps=0", "trainer.max_skipped=1"]
    result = command("train", "-m", *OFFLINE, *sweep, "name=sweep")
    assert result.code == 1
    assert "not finite" in result.err
    failed, good = (offline_run(workdir / "runs/sweep" / job) for job in ("0", "1"))
    assert (failed.code, good.code) == (1, 0)
    assert failed.id != good.id
    assert failed.config["optimizer"]["lr"] == 1e30


def test_the_sweep_of_wandb_drives_the_command(command, workdir, monkeypatch):
    """What W&B's agent makes of configs/sweep/wandb.yml, as its environment has it."""
    sweep = yaml.safe_load((ROOT / "configs/sweep/wandb.yml").read_text())
    assert sweep["command"] == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    assert (ROOT / sweep["program"]).exists()
    drawn = {"optimizer.lr": {"value": 0.001234}, "schedule": {"value": sweep["parameters"]["schedule"]["values"][1]}}
    assert drawn.keys() == sweep["parameters"].keys()
    monkeypatch.setenv("WANDB_RUN_ID", "drawn1")
    wandb.teardown()  # it has read its environment before
    result = command("train", *create_sweep_command_args({"args": drawn})["args_no_hyphens"], *OFFLINE, "name=mine")
    assert result.code == 0, result.err
    found = offline_run(workdir / "runs/mine")
    assert (found.id, found.config["optimizer"]["lr"]) == ("drawn1", 0.001234)
    assert "min_ratio" in found.config["schedule"]
    assert sweep["metric"]["name"] in found.history[6]


def test_norms_and_rates_are_those_of_the_groups(command, workdir):
    groups = "optimizer.groups=[{pattern: blocks.0.attention.*, lr: 0.5}]"
    result = command("train", *TEXT, *SMALL, groups, "model.position=learned", "trainer.log_every=6", "name=mine")
    assert result.code == 0, result.err
    (row,) = [m for m in read_metrics(workdir / "runs/mine") if "train/loss" in m]
    weights = load_file(workdir / "runs/mine/model.safetensors")
    names = {"embedding": "embedding.", "position": "position.", "attention": ".attention.", "head": "head.",
             "feed_forward": ".feed_forward.", "norms": "norm."}  # fmt: skip
    chosen = {group: [w for n, w in weights.items() if part in f".{n}"] for group, part in names.items()}
    chosen["embedding"] = [weights["embedding.weight"]]
    assert sum(map(len, chosen.values())) == len(weights)
    for group, tensors in chosen.items():
        norm = torch.cat([w.flatten().double() for w in tensors]).norm().item()
        assert row[f"model/norm/{group}"] == pytest.approx(norm, rel=1e-5), group
    assert row["model/norm"] == pytest.approx(math.hypot(*(row[f"model/norm/{g}"] for g in names)))
    assert row["optim/grad_norm"] == pytest.approx(math.hypot(*(row[f"optim/grad_norm/{g}"] for g in names)), rel=1e-5)
    rates = {n.removeprefix("optim/lr/"): v / row["optim/lr_factor"] for n, v in row.items() if "optim/lr/" in n}
    assert rates == pytest.approx({"muon": 0.014, "adamw": 0.01, "embedding": 0.1, "blocks.0.attention.*": 0.5})
    assert row["data/epoch"] == pytest.approx(6 * 4 / 76, rel=0.1)


def test_a_picture_shows_the_weights():
    """Black where a weight is 1, white where it is 0, half of it where it is a quarter; rows are queries."""
    one = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0, 0, 1]])
    weights = [torch.stack([one, one.flip(0)])[None]] * 9
    picture = Image.open(BytesIO(attention_picture(weights)))
    side, left, top = 192, 8, 14 + 8 + 14

    def at(row: int, column: int, head: int = 0) -> int:
        return picture.getpixel((left + head * (side + 8) + column * 64 + 32, top + row * 64 + 32))

    assert [[at(r, c) for c in range(3)] for r in range(3)] == [[0, 255, 255], [128, 34, 255], [255, 255, 0]]
    assert [at(0, c, head=1) for c in range(3)] == [255, 255, 0]
    assert picture.height == 14 + 8 + 4 * (14 + 192 + 8)  # layers 0, 3, 5 and 8


def test_linear_attention_has_no_picture(command, workdir):
    result = command("train", *TEXT, *SMALL, "model.attention.kind=elu", "name=mine")
    assert result.code == 0, result.err
    assert read_attention(workdir / "runs/mine") == []
    assert len(read_samples(workdir / "runs/mine")) == 2
