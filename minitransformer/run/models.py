"""Model files and checkpoints: weights with the config and the tokenizer that belong to them.

Both kinds of file are self-contained, and neither can run code: safetensors holds numbers and strings,
checkpoints are read with `weights_only=True`.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.model.config import ModelConfig
from minitransformer.model.transformer import Transformer
from minitransformer.run.directory import MODEL_FILE, USE_FILE, CheckpointError, atomic_write, checkpoints

HEADER = "minitransformer"  # the key under which both kinds of file describe the model


# Writing -------------------------------------------------------------------------------------------------------------


def describe(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """What a model file says of itself, as plain strings."""
    about = {"model": json.dumps(asdict(config)), "tokenizer": tokenizer.to_json()}
    if len(tokenizer.end_ids) > 1:  # tokenizer.json has no place for several
        about["end_ids"] = json.dumps(sorted(tokenizer.end_ids))
    return about


def save_model(path: Path, config: ModelConfig, state: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    """Write weights (a model's `state_dict`), model config and tokenizer as one safetensors file."""
    tied = {"head.weight"} if config.tie_embeddings else set()  # one tensor, one entry
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items() if name not in tied}
    with atomic_write(path) as file:
        file.write(save(tensors, metadata=describe(config, tokenizer)))


# Reading -------------------------------------------------------------------------------------------------------------


def load(
    path: str | Path, device: str | torch.device = "cpu", say: Callable[[str], None] = print
) -> tuple[Transformer, Tokenizer]:
    """A trained model, ready for use, and its tokenizer.

    Args:
        path: a run directory (its newest weights that can be read), or one of its model files.
        say: told when a broken file is passed over.

    Raises:
        CheckpointError: there is nothing at `path` that holds a model.
    """
    path = Path(path)
    if (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is a Hugging Face folder; convert it first: python -m minitransformer.convert from={path} to=OUT"
        )
    if path.is_dir():
        return _load_newest(path, device, say)
    if not path.exists():
        hint = "; for the newest run write checkpoint=null" if path.name in ("None", "none") else ""
        raise CheckpointError(f"checkpoint={path} does not exist (looked in {Path.cwd()}){hint}")
    return _load_file(path, device)


def _load_newest(run: Path, device, say: Callable[[str], None]) -> tuple[Transformer, Tokenizer]:
    files = [path for path in (run / MODEL_FILE, *reversed(checkpoints(run))) if path.exists()]
    if not files:
        raise CheckpointError(f"{run} holds no checkpoint: neither {MODEL_FILE} nor checkpoints/step-*.ckpt")
    for path in files:
        try:
            return _load_file(path, device)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    raise CheckpointError(f"{run} holds no checkpoint that can be read")


def read_model(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor], Tokenizer]:
    """Config, weights as they are stored, and tokenizer of a run directory's `model.safetensors`, or of a model file.

    Raises:
        CheckpointError: there is nothing at `path` that holds a model.
    """
    if path.is_dir():
        path = path / MODEL_FILE
    if not path.exists():
        raise CheckpointError(f"{path} does not exist (looked in {Path.cwd()})")
    if path.suffix == ".safetensors":
        header, state = _read_safetensors(path)
    else:
        saved = read_checkpoint(path)
        if "lora" in saved:
            raise CheckpointError(f"{path} holds adapters alone; {MODEL_FILE} of its run has them merged")
        header = saved[HEADER]
        state = {name.removeprefix("model."): tensor for name, tensor in saved["state_dict"].items()}
    if "model" not in header or "tokenizer" not in header:
        raise CheckpointError(f"{path} does not describe a minitransformer model")
    tokenizer = Tokenizer.from_json(header["tokenizer"], json.loads(header.get("end_ids", "[]")))
    return ModelConfig.from_dict(json.loads(header["model"])), state, tokenizer


def _load_file(path: Path, device) -> tuple[Transformer, Tokenizer]:
    config, state, tokenizer = read_model(path)
    model = Transformer(config)
    if config.tie_embeddings:
        state.setdefault("head.weight", state["embedding.weight"])
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its own config: {' '.join(str(error).split())}") from None
    return model.to(device).eval(), tokenizer


def _read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error})") from None


def use_file(source: Path) -> Path | None:
    """The files that describe the use of a model, in an archive; None where it was not converted.

    source: a run directory, or one of its model files.
    """
    run = source if source.is_dir() else source.parent.parent if source.suffix == ".ckpt" else source.parent
    return run / USE_FILE if (run / USE_FILE).is_file() else None


def keep_use(source: Path, run: Path) -> None:
    """Give these files to a run that goes on from the model `source`."""
    if found := use_file(source):
        shutil.copyfile(found, run / USE_FILE)


def same_weights(one: Path, other: Path) -> bool:
    """Do two model files hold equal weights? (The order of entries in a header is left to chance.)"""
    (_, a), (_, b) = _read_safetensors(one), _read_safetensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_checkpoint(path: Path) -> dict:
    """The plain values and tensors of a training checkpoint, on the CPU.

    Raises:
        CheckpointError: the file is cut short, damaged, or holds more than plain values.
    """
    saved = read_plain(path)
    if not isinstance(saved, dict) or HEADER not in saved or "state_dict" not in saved:
        raise CheckpointError(f"{path} is not a checkpoint of minitransformer")
    return saved


def read_plain(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU, if it is nothing but tensors and plain values: no code is run.

    Raises:
        CheckpointError: it is something else, or the file is cut short or damaged.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch would have it reported where it is no file of its own
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        if isinstance(error, UnpicklingError):  # whose words advise to run the code
            why = "it is none, or holds more than plain values"
        elif isinstance(error, EOFError) or "PytorchStreamReader" in str(error):
            why = "it is cut short or damaged"
        else:
            why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} cannot be read as a checkpoint ({why})") from None


def newest_readable(run: Path, say: Callable[[str], None]) -> tuple[Path, dict] | None:
    """The newest checkpoint that can be read, passing over broken ones with a word; None where there is none.

    Raises:
        CheckpointError: there are checkpoints, and none can be read.
    """
    found = checkpoints(run)
    for path in reversed(found):
        try:
            return path, read_checkpoint(path)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    if found:
        raise CheckpointError(f"{run / 'checkpoints'} holds no checkpoint that can be read")
    return None
