"""A Hugging Face folder: config.json, weights in safetensors or pickled (both may be in shards), tokenizer files."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from minitransformer.convert.mapping import ConvertError
from minitransformer.data.tokenizer import json_object
from minitransformer.run.directory import CheckpointError
from minitransformer.run.models import read_plain

# What describes how a model is used, whatever it computes.
USE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model*", "tekken.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY.md",
)  # fmt: skip
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConvertError when there is no object in `path`."""
    try:
        return json_object(path)
    except ValueError as error:
        raise ConvertError(str(error)) from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weights, as they are stored.

    Raises:
        ConvertError: there are none, one is not where the index says, or a pickle holds more than tensors.
    """
    for name in (SAFETENSORS, PICKLE):
        if (folder / name).exists():
            return _read_file(folder / name)
        if (folder / f"{name}.index.json").exists():
            return _read_shards(folder, folder / f"{name}.index.json")
    raise ConvertError(f"{folder} holds no weights: neither {SAFETENSORS} nor {PICKLE}, nor an index of either")


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConvertError(f"{index} has no weight_map")
    found: dict[str, Tensor] = {}
    for shard in dict.fromkeys(places.values()):
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            raise ConvertError(f"{index} points to {shard!r}, which is not a file of its own folder")
        if not (folder / shard).is_file():
            raise ConvertError(f"{folder} lacks the shard {shard}, which {index.name} names")
        tensors = _read_file(folder / shard)
        if absent := [name for name, place in places.items() if place == shard and name not in tensors]:
            raise ConvertError(f"{folder / shard} lacks the tensor {absent[0]}, which {index.name} places there")
        found |= tensors
    return found


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConvertError(f"{path} cannot be read as safetensors ({error})") from None
    try:
        found = read_plain(path)
    except CheckpointError as error:
        raise ConvertError(str(error)) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ConvertError(f"{path} holds more than tensors by name")
    return found


def pack_use(folder: Path, archive: Path) -> None:
    """Keep those of USE_FILES that are in `folder`."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as file:
        for path in (path for pattern in USE_FILES for path in sorted(folder.glob(pattern))):
            file.write(path, path.relative_to(folder))


def unpack_use(archive: Path, folder: Path) -> None:
    """Take out those of USE_FILES; an archive of a stranger's may hold more, such as code or a pickle.

    Raises:
        ConvertError: the archive is damaged.
    """
    try:
        with ZipFile(archive) as file:
            known = [name for name in file.namelist() if any(fnmatchcase(name, pattern) for pattern in USE_FILES)]
            file.extractall(folder, known)
    except BadZipFile as error:
        raise ConvertError(f"{archive} is damaged: {error}") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears under `path` when it is complete.

    Raises:
        ConvertError: there is something at `path` already.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConvertError(f"to={path} is there already; choose another place, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    beside.mkdir()
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        shutil.rmtree(beside)
        raise


def write_tensors(folder: Path, tensors: dict[str, Tensor], shard_bytes: float) -> None:
    """One safetensors file, or several of at most `shard_bytes` with an index (a larger tensor has one of its own)."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _write_file(folder / SAFETENSORS, tensors)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / f"{SAFETENSORS}.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; safetensors would let nobody else read the file
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
