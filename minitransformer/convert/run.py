"""What `python -m minitransformer.convert` does: a Hugging Face folder into a model of ours, or back."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel
from torch import Tensor

from minitransformer.convert.config import ConvertConfig
from minitransformer.convert.families import FAMILIES, GENERATION, USE, find_family
from minitransformer.convert.files import (
    new_folder,
    pack_use,
    read_json,
    read_tensors,
    unpack_use,
    write_json,
    write_tensors,
)
from minitransformer.convert.mapping import ConvertError, Family, NoCounterpart
from minitransformer.data.tokenizer import Tokenizer, document_tokens, named_tokens, set_template, template
from minitransformer.model.config import ModelConfig
from minitransformer.model.transformer import Transformer
from minitransformer.run.directory import MODEL_FILE, USE_FILE, CheckpointError
from minitransformer.run.models import read_model, save_model, use_file

State = dict[str, Tensor]


def run(config: ConvertConfig) -> None:
    """Convert `config.source`, in the direction that it shows, to the folder `config.to`.

    Raises:
        ConvertError, CheckpointError: the source is not what it should be, or its model has no counterpart; nothing
            was written then.
    """
    source, to = Path(config.source), Path(config.to)
    if source.is_file() and is_hugging_face(source.parent):
        raise ConvertError(f"from={source} is a file of a Hugging Face folder; name the folder: from={source.parent}")
    if is_hugging_face(source):
        if config.shard_gb != ConvertConfig.shard_gb:
            raise ConvertError(f"shard_gb={config.shard_gb:g} is for Hugging Face folders; a model of ours is one file")
        with new_folder(to) as folder:
            model, state, tokenizer = from_hugging_face(source, config.tokenizer_path)
            save_model(folder / MODEL_FILE, model, state, tokenizer)
            (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
            if config.tokenizer_path is None:  # of another tokenizer they would say what is wrong
                pack_use(source, folder / USE_FILE)
        print(f"{to}: {describe(model, state)}, {_documents(tokenizer)}")
    else:
        if config.tokenizer_path is not None:
            raise ConvertError(
                f"tokenizer_path={config.tokenizer_path} is for Hugging Face folders; {source} has its own"
            )
        try:
            model, state, tokenizer = read_model(source)
        except CheckpointError as error:
            raise ConvertError(f"from={source} is no Hugging Face folder, and {error}") from None
        with new_folder(to) as folder:
            family = to_hugging_face(folder, model, state, tokenizer, config.shard_gb * 1e9, use_file(source))
        print(f"{to}: {family.architecture}, {describe(model, state)}, {_documents(tokenizer)}")


def describe(config: ModelConfig, state: State) -> str:
    numbers = sum(state[name].numel() for name in shapes(config))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    return f"{numbers:,} parameters in {', '.join(dtypes)}, {config.max_seq_len} tokens at most"


def _documents(tokenizer: Tokenizer) -> str:
    start, end, *others = map(tokenizer.backend.id_to_token, (tokenizer.bos_id, *end_ids(tokenizer)))
    return f"documents start with {start} and end with {end}" + "".join(f", texts with {name} too" for name in others)


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """All that end a text, first the one that ends documents."""
    return [tokenizer.eos_id, *sorted(tokenizer.end_ids - {tokenizer.eos_id})]


def is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file()


# From Hugging Face -----------------------------------------------------------------------------------------------


def from_hugging_face(folder: Path, tokenizer: str | None = None) -> tuple[ModelConfig, State, Tokenizer]:
    """The config, the weights and the tokenizer of a Hugging Face folder; numbers and their dtype stay as they are.

    Raises:
        ConvertError: a file is missing or wrong, or the model is none that we can be.
    """
    given = read_json(folder / "config.json")
    family = FAMILIES.get(given.get("model_type"))
    if family is None:
        raise ConvertError(
            f"{folder}/config.json has model_type={given.get('model_type')!r}; there are {', '.join(FAMILIES)}"
        )
    architectures = given.get("architectures")
    if architectures and family.architecture not in architectures and not architectures[0].endswith("Model"):
        raise ConvertError(f"{folder}/config.json is of a {architectures[0]}; only a {family.architecture} can be read")
    try:
        config = family.read_config(given)
    except ConvertError as error:
        raise ConvertError(f"{folder}/{error}") from None
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if "dynamic" in (rope.get("rope_type"), rope.get("type")):
        print(f"its dynamic rotary scaling begins past {config.max_seq_len} tokens, where the converted model ends")
    if lost := family.lost_dropouts(given, config):
        print(f"{', '.join(lost)} is left out: a model of ours has one dropout in all places, here {config.dropout}")
    found = read_tokenizer(folder, tokenizer)
    if found.vocab_size > config.vocab_size:
        raise ConvertError(
            f"{folder}: the tokenizer has {found.vocab_size} ids, the embedding has {config.vocab_size}; "
            "give the model's own with tokenizer_path=PATH"
        )
    return config, to_our_state(family, config, read_tensors(folder), folder), found


def to_our_state(family: Family, config: ModelConfig, tensors: State, folder: Path) -> State:
    """Tensors by our names.

    Raises:
        ConvertError: one is missing, left over, or of another shape.
    """
    tensors = family.own_tensors(tensors)
    if config.tie_embeddings and (head := tensors.pop(family.names["head"] + ".weight", None)) is not None:
        embedding = tensors.get(family.names["embedding"] + ".weight")
        if embedding is not None and not torch.equal(head, embedding):
            raise ConvertError(f"{folder}: config.json ties the embedding and the head, whose tensors differ")
    state: State = {}
    for weight in family.weights(config, shapes(config)):
        parts = []
        for name, shape in zip(weight.theirs, weight.shapes(), strict=True):
            if name not in tensors:
                raise ConvertError(f"{folder} has no tensor {name}")
            parts.append(tensors.pop(name))
            if tuple(parts[-1].shape) != shape:
                raise ConvertError(
                    f"{folder}: the tensor {name} has the shape {list(parts[-1].shape)}; config.json says {list(shape)}"
                )
        state[weight.ours] = weight.to_ours(parts)
    if tensors:
        raise ConvertError(
            f"{folder} has {len(tensors)} tensors that a {family.architecture} of its config.json has not, such as "
            f"{next(iter(tensors))}"
        )
    return state


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of our model's tensors, a tied one once."""
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    return {n: tuple(t.shape) for n, t in state.items() if n != "head.weight" or not config.tie_embeddings}


def read_tokenizer(folder: Path, other: str | None) -> Tokenizer:
    """The tokenizer of a folder, or the one at `other`, a folder or a file.

    Raises:
        ConvertError: there is none, or it would lose text.
    """
    place = Path(other or folder)
    path = place / "tokenizer.json" if place.is_dir() else place
    if not path.is_file():
        have = f"tokenizer_path={other} does not exist" if other else f"{folder} has no tokenizer.json"
        raise ConvertError(f"{have}; a model of ours has its tokenizer with it: give one with tokenizer_path=PATH")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConvertError(f"{path} cannot be read as a tokenizer ({' '.join(str(error).split())})") from None
    try:
        names = named_tokens(place, backend) if place.is_dir() else (None, [])
        return Tokenizer.adopt(backend, *names)
    except ValueError as error:
        raise ConvertError(f"{path} cannot be used: {error}; give another with tokenizer_path=PATH") from None


# To Hugging Face -------------------------------------------------------------------------------------------------


def to_hugging_face(
    folder: Path, config: ModelConfig, state: State, tokenizer: Tokenizer, shard_bytes: float, use: Path | None
) -> Family:
    """Fill a folder that `AutoModelForCausalLM` and `AutoTokenizer` of `transformers` load.

    use: an archive of the files that describe the use of a model that came from there; they leave as they came.

    Raises:
        NoCounterpart: no family has what the model has.
    """
    try:
        family, config = find_family(config)
    except NoCounterpart as error:
        raise NoCounterpart(f"no model of Hugging Face's computes what this one does: {error}") from None
    if config.dropout and not any("dropout" in part.settings for part in family.parts):
        print(f"model.dropout={config.dropout} is left out: {family.architecture} has no such dropout")
    dtype = state["embedding.weight"].dtype
    tensors: State = {}
    for weight in family.weights(config, shapes(config)):
        ours = state.get(weight.ours)
        if ours is None:  # gains and biases that change nothing
            ours = (torch.ones if weight.ours.endswith("_gain") else torch.zeros)(weight.shape, dtype=dtype)
        tensors |= zip(weight.theirs, weight.to_theirs(ours), strict=True)
    write_tensors(folder, tensors, shard_bytes)
    given: dict[str, Any] = {}
    if use is None:
        write_tokenizer(folder, tokenizer, config.max_seq_len)
    else:
        unpack_use(use, folder)
        given = read_json(folder / "config.json")
        if given["model_type"] != family.model_type:  # by which `transformers` may choose to change tokenizer.json
            path = folder / "tokenizer_config.json"
            settings = read_json(path) if path.exists() else {}
            write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    ends = end_ids(tokenizer)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0]}
    written = {key: given[key] for key in USE if key in given} | family.write_config(config) | ids
    write_json(folder / "config.json", written | {"torch_dtype": str(dtype).removeprefix("torch.")})
    if not (folder / "generation_config.json").exists():
        generation = {key: given[key] for key in GENERATION if key in given} | ids
        write_json(folder / "generation_config.json", generation | ({"eos_token_id": ends} if len(ends) > 1 else {}))
    return family


def write_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """With a decoder, which ours does without, and a post-processor that puts the start token before a text."""
    backend = Backend.from_str(tokenizer.to_json())
    start, end = document_tokens(backend)
    if backend.decoder is None:
        backend.decoder = decoders.Fuse() if isinstance(backend.model, WordLevel) else decoders.ByteLevel()
    if backend.post_processor is None or template(backend)[1] is not None:  # not what ours adds at the end
        set_template(backend, start)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": end,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
