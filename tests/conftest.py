"""What many tests share: a small corpus, and the two commands run inside this process."""

import ctypes
import os
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

# Set before anything imports these libraries: no network, no questions, no thread fights.
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.pop("WANDB_API_KEY", None)
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, and threads of several would wait for each other

import pytest
from tokenizers import Tokenizer as Backend

from minitransformer.data.tokenizer import Tokenizer, set_template
from tests.browser import browser_page, chromium  # noqa: F401  fixtures

ROOT = Path(__file__).parents[1]

# Enough to make any run small: appended to a command, the rest of which is what is tested.
SMALL = [
    "model.d_model=32",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.max_seq_len=32",
    "data.batch_size=4",
    "trainer.max_steps=6",
    "trainer.val_every=3",
    "trainer.log_every=2",
    "callbacks.checkpoint_every=2",
    "callbacks.sample_every=3",
    "callbacks.sample_tokens=8",
    "callbacks.report=false",
    "logger=none",
]


def sentences(n: int, seed: int = 0) -> str:
    """Made-up prose with a learnable structure, and characters of two, three and four bytes."""
    draw = random.Random(seed)
    names, verbs = ["Zoë", "Ann", "Bob", "李", "Ödön"], ["sees", "likes", "draws", "hears"]
    return "".join(
        f"{draw.choice(names)} {draw.choice(verbs)} the {draw.choice(['cat', 'dog', 'owl 🦉'])}.\n" for _ in range(n)
    )


def with_start(words: Tokenizer) -> Tokenizer:
    """The same tokenizer, but documents start with <s> and end as before, as Llama's do."""
    backend = Backend.from_str(words.to_json())
    backend.add_special_tokens(["<s>"])
    set_template(backend, "<s>")
    return Tokenizer(backend)


def as_a_user_without_rights(job):
    """Run `job` in a thread that gave up its capabilities, so that file modes hold even for root."""
    errors = []

    def work():
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0
        try:
            job()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def workdir(tmp_path, monkeypatch, cache_dir) -> Path:
    """An empty working directory with one text file, book.txt; the cache of tokenised text stays inside the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(sentences(400), encoding="utf-8")
    return tmp_path


@pytest.fixture
def command(workdir, monkeypatch, capfd):
    """command("train", "data=text", ...) runs train.py here, or a module of the package; returns code, out, err."""
    from hydra.core.global_hydra import GlobalHydra

    from minitransformer import cli

    def run(name: str, *arguments: str) -> SimpleNamespace:
        GlobalHydra.instance().clear()
        script = ROOT / f"{name}.py"
        if not script.exists():
            script = Path(cli.__file__).with_name(f"{name}.py")
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        capfd.readouterr()
        code = 0
        try:
            getattr(cli, name)()
        except SystemExit as exit:
            code = exit.code or 0
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def trained(command, workdir):
    """A finished small run: its directory."""
    result = command("train", "data=text", "data.files=[book.txt]", "tokenizer.vocab_size=300", "name=small", *SMALL)
    assert result.code == 0, result.err
    return workdir / "runs" / "small"
