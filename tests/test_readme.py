"""Every command in README runs, made small; every file that it names is there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from minitransformer import Tokenizer
from minitransformer.cli import EXAMPLES
from tests.conftest import ROOT, SMALL, sentences

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines() if line]
RUN = [c for c in COMMANDS if c.startswith("python ")]


@pytest.fixture
def files(workdir):
    """What README's commands take for granted."""
    (workdir / "notes").mkdir()
    for name in ("a.txt", "b.txt", "shakespeare.txt", "names.txt", "notes/c.txt", "d.md", "e.md"):
        (workdir / name).write_text(sentences(200, seed=len(name) + ord(name[0])), encoding="utf-8")
    (workdir / "tokenizer.json").write_text(Tokenizer.bytes().to_json(), encoding="utf-8")
    pairs = [{"question": f"What is {i}?", "text": sentences(3, seed=i)} for i in range(60)]
    (workdir / "qa.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    lines = [json.dumps({"content": sentences(5, seed=i)}) for i in range(60)]
    (workdir / "chats.jsonl").write_text("\n".join(lines))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": [sentences(5, seed=i) for i in range(60)]}), "table.parquet")
    (workdir / "prompts.txt").write_text("Ann \nBob \n")
    (workdir / "tasks").mkdir()
    (workdir / "tasks" / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: chats.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{content}}'\n"
        "metric_list: [{metric: word_perplexity}]\n"
    )
    hub = workdir / "roneneldan" / "TinyStories"  # a local folder takes the place of the hub's
    hub.mkdir(parents=True)
    (hub / "train.jsonl").write_text("\n".join(json.dumps({"text": sentences(5, seed=i)}) for i in range(60)))
    return workdir


def shorten(words: list[str]) -> list[str]:
    """The same command with a small model and few steps; what it sets itself stays, but for sizes."""
    if "--cfg" in words:
        return words
    own = {word.split("=")[0] for word in words}
    if not own & {"data", "experiment"}:
        words = [*words, "data.val_fraction=0.002"]  # of the standard library: validation would take most of the time
    small = [s for s in SMALL if s.split("=")[0] not in own - {"trainer.max_steps"}]
    if any(word.startswith("debug=") for word in words):
        small = [s for s in small if not s.startswith(("trainer", "callbacks"))]
    if "trainer.max_steps" in own and "resume" in own:
        small = [s.replace("max_steps=6", "max_steps=8") for s in small]
    return [*words, *[s for s in small if not (s == "logger=none" and "logger" in own)]]


def test_readme_has_commands():
    assert len(RUN) >= 18
    assert sum(c.startswith("pip install") for c in COMMANDS) == 2
    known = ("python train.py", "python generate.py", "python -m minitransformer.", "pip install")
    assert all(c.startswith(known) for c in COMMANDS)


def words_in_shell(commands: list[str], folder: Path) -> list[list[str]]:
    """The words of each command, where a pattern that matches no file is an error, as in zsh."""
    lines = "\n".join(f"printf '%s\\0' {command}; printf '\\n'" for command in commands)
    result = subprocess.run(["bash", "-O", "failglob", "-c", lines], cwd=folder, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return [line.split("\0")[:-1] for line in result.stdout.splitlines()]


def test_every_command_can_be_pasted_in_any_shell(tmp_path):
    """In zsh, brackets and stars are patterns outside of quotes, and an interactive line takes no comment."""
    commands = [c.partition(" && ")[0] for c in COMMANDS]
    examples = [line for text in EXAMPLES.values() for line in re.findall(r"^  \{command\} (\S.*)$", text, re.M)]
    commands += [example.partition("  ")[0] for example in examples]
    assert words_in_shell(commands, tmp_path) == [shlex.split(command, comments=True) for command in commands]
    assert all("#" not in command for command in commands)


def test_no_message_shows_a_list_that_lacks_its_quotes():
    """A list that a message or comment shows for a setting stands in double quotes, as one word of any shell."""
    files = [*(ROOT / "minitransformer").rglob("*.py"), *(ROOT / "configs").rglob("*.y*ml")]
    shown = [(path.name, m) for path in files for m in re.findall(r"(?<!\w)\S?[\w{}]+\.[\w.]+=\[.*", path.read_text())]
    assert shown
    assert [found for found in shown if found[1][0] != '"'] == []


@pytest.mark.parametrize(
    "line",
    [c for c in RUN if c.startswith("python train.py") and "name=mine" not in c and "init_from" not in c],
)
def test_training_commands(line, command, files):
    words = shorten(shlex.split(line)[2:])
    if "trainer=ddp" in words:  # starts the script once more for each rank
        words += ["trainer.threads=1"]
        result = subprocess.run([sys.executable, ROOT / "train.py", *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return
    if "sweep=optuna" in words:
        words.append("hydra.sweeper.n_trials=2")
    result = command("train", *words)
    assert result.code == 0, result.err
    if "--cfg" in line:
        assert "max_steps:" in result.out
    elif "find_batch" in line:
        assert "rows at a time are enough" in result.out
    else:
        assert list(
            files.glob("runs/*/**/model.safetensors") if "-m" in line else files.glob("runs/*/model.safetensors")
        )


def test_commands_that_build_on_each_other_and_the_python_code(command, files, capfd):
    """Train, resume, extend; generate from that run; then README's Python."""
    mine = [c for c in RUN if "name=mine" in c]
    said = [command("train", *shorten(shlex.split(line)[2:])) for line in mine]
    assert [result.code for result in said] == [0, 0, 0], said
    assert "already trained" in said[1].out
    assert "resuming runs/mine after step 6" in said[2].out
    (files / "runs" / "less").symlink_to("mine")
    for line in (c for c in RUN if "init_from" in c):
        result = command("train", *shorten(shlex.split(line)[2:]))
        assert result.code == 0, result.err
    generating = [c for c in RUN if c.startswith("python generate.py")]
    for line in generating:
        words = shlex.split(line.replace("max_new_tokens=100", ""))[2:]  # more than the small model of this test holds
        result = command(
            "generate",
            *words,
            *([] if {"max_new_tokens", "score"} & {w.partition("=")[0] for w in words} else ["max_new_tokens=10"]),
        )
        assert result.code == 0, result.err
        assert result.out
    for line in (c for c in RUN if c.startswith("python -m minitransformer.")):
        name, *words = shlex.split(line.removeprefix("python -m minitransformer."))
        result = command(name, *words)
        assert result.code == 0, (line, result.err)
    code = next(text for language, text in BLOCKS if language == "python").replace(
        "max_new_tokens=40", "max_new_tokens=10"
    )
    scope: dict = {}
    exec(code, scope)
    assert len(scope["texts"]) == 2
    tree = next(text for _, text in BLOCKS if text.startswith("runs/mine/"))
    named = re.findall(r"^  ([\w.]+)/? ", tree, re.M)
    there = {path.name for path in (files / "runs" / "mine").iterdir()}
    assert there <= set(named)
    assert set(named) - there == {"wandb"}  # this test logs nothing


def test_ci_runs_the_two_install_commands():
    script = (ROOT / ".ci" / "run").read_text()
    patterns = re.findall(r"grep -m1 -E '([^']+)' README\.md", script)
    matched = [line for pattern in patterns for line in README.splitlines() if re.match(pattern, line)]
    assert matched == [c for c in COMMANDS if c.startswith("pip install")]


def test_files_that_readme_names_exist():
    for path in re.findall(r"\]\(([^)h][^)]*)\)", README) + re.findall(r"`(minitransformer/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
