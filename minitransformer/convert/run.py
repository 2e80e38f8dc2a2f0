"""What `python -m minitransformer.convert` does: a Hugging Face folder into a model of ours, or back."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel
from torch import Tensor

from minitransformer.checkpoint import MODEL_FILE, CheckpointError, read_model, save_model
from minitransformer.convert.config import ConvertConfig
from minitransformer.convert.families import FAMILIES, find_family
from minitransformer.convert.files import new_folder, read_json, read_tensors, write_json, write_tensors
from minitransformer.convert.mapping import ConvertError, Family, NoCounterpart
from minitransformer.data.tokenizer import Tokenizer, document_tokens, set_template, template
from minitransformer.model.config import ModelConfig
from minitransformer.model.transformer import Transformer

State = dict[str, Tensor]


def run(config: ConvertConfig) -> None:
    """Convert `config.source`, in the direction that it shows, to the folder `config.to`.

    Raises:
        ConvertError, CheckpointError: the source is not what it should be, or its model has no counterpart; nothing
            was written then.
    """
    source, to = Path(config.source), Path(config.to)
    if is_hugging_face(source):
        with new_folder(to) as folder:
            model, state, tokenizer = from_hugging_face(source, config.tokenizer_path)
            save_model(folder / MODEL_FILE, model, state, tokenizer)
            (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
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
            family = to_hugging_face(folder, model, state, tokenizer, config.shard_gb * 1e9)
        print(f"{to}: {family.architecture}, {describe(model, state)}, {_documents(tokenizer)}")


def describe(config: ModelConfig, state: State) -> str:
    numbers = sum(state[name].numel() for name in shapes(config))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    return f"{numbers:,} parameters in {', '.join(dtypes)}, {config.max_seq_len} tokens at most"


def _documents(tokenizer: Tokenizer) -> str:
    start, end = (tokenizer.backend.id_to_token(i) for i in (tokenizer.start, tokenizer.boundary))
    return f"documents start with {start} and end with {end}"


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
    found = read_tokenizer(folder, tokenizer, given)
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


def read_tokenizer(folder: Path, other: str | None, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a folder, or the one at `other`; config.json says which tokens start and end documents.

    Raises:
        ConvertError: there is none, or it would lose text.
    """
    path = Path(other or folder)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        have = f"tokenizer_path={other} does not exist" if other else f"{folder} has no tokenizer.json"
        raise ConvertError(f"{have}; a model of ours has its tokenizer with it: give one with tokenizer_path=PATH")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConvertError(f"{path} cannot be read as a tokenizer ({' '.join(str(error).split())})") from None
    generation = folder / "generation_config.json"
    given = config | (read_json(generation) if generation.is_file() else {})

    def token(key: str) -> str | None:
        number = given.get(key)
        number = number[0] if isinstance(number, list) and number else number
        return backend.id_to_token(number) if isinstance(number, int) else None

    names = {} if other else {"start": token("bos_token_id"), "end": token("eos_token_id")}
    try:
        return Tokenizer.adopt(backend, **names)
    except ValueError as error:
        raise ConvertError(f"{path} cannot be used: {error}; give another with tokenizer_path=PATH") from None


# To Hugging Face -------------------------------------------------------------------------------------------------


def to_hugging_face(
    folder: Path, config: ModelConfig, state: State, tokenizer: Tokenizer, shard_bytes: float = 5e9
) -> Family:
    """Fill a folder that `AutoModelForCausalLM` and `AutoTokenizer` of `transformers` load.

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
    start, end = tokenizer.start, tokenizer.boundary
    ids = {"bos_token_id": start, "eos_token_id": end}
    written = family.write_config(config) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_tensors(folder, tensors, shard_bytes)
    write_json(folder / "config.json", written)
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(folder, tokenizer, config.max_seq_len)
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
