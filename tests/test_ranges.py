"""Numbers that no setting can mean: a config takes them or names the field, and what it takes can be built."""

import math
from dataclasses import Field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.cli import SCHEMAS
from minitransformer.convert.config import ConvertConfig
from minitransformer.data.config import BPEConfig, FilesConfig, HubConfig, PretrainedConfig, StdlibConfig
from minitransformer.generation.config import Sampling
from minitransformer.model.checks import LARGE
from minitransformer.model.config import AttentionConfig, ModelConfig, RotaryConfig
from minitransformer.model.transformer import Transformer
from minitransformer.training.config import (
    CallbacksConfig,
    ExplainConfig,
    GroupConfig,
    LoggerConfig,
    LoRAConfig,
    MuonConfig,
    TrainConfig,
    TrainerConfig,
    WSDConfig,
)

NUMBERS = (
    math.nan, math.inf, -math.inf, -1, 0, 1, 0.5, 2.5, 1e-45, 1e-300, 1e-320, 1e308, 10**20, -(10**20), 2**31, 2**63,
)  # fmt: skip
INNER = (AttentionConfig, RotaryConfig, ModelConfig, TrainerConfig, CallbacksConfig, LoRAConfig, GroupConfig, Sampling)
CONFIGS = list(dict.fromkeys((*SCHEMAS.values(), ExplainConfig, *INNER)))


# What a config cannot do without.
NEEDED = {
    FilesConfig: dict(files=["a.txt"]),
    HubConfig: dict(name="a"),
    PretrainedConfig: dict(name="a"),
    ConvertConfig: dict(source="a", to="b"),
    GroupConfig: dict(pattern="*"),
    TrainConfig: dict(
        data=StdlibConfig(), tokenizer=BPEConfig(), optimizer=MuonConfig(), schedule=WSDConfig(), logger=LoggerConfig()
    ),
}


# Settings without which another has no use: it is then refused for that, and not for its number.
USED_WITH = {
    "length_penalty": {"beams": 2},
    "draft_tokens": {"draft": "a"},
    "factor": {"scaling": "linear"},
    "original_length": {"scaling": "yarn"},
    "slow": {"scaling": "yarn"},
    "fast": {"scaling": "yarn"},
    "attention_factor": {"scaling": "yarn"},
    "buffer": {"streaming": True},
    "checkpoint_blocks": {"gradient_checkpointing": "full"},
    "alpha": {"rank": 1},
    **{name: {"pattern": ["bigbird"]} for name in ("window", "global_tokens", "block", "random_blocks")},
    **{name: {"pattern": ["fixed"]} for name in ("stride", "summary")},
}


def needed(config: type) -> dict[str, Any]:
    return next((NEEDED[base] for base in config.__mro__ if base in NEEDED), {})


def with_number(kind: Any, number: float) -> Any:
    """A value of a field of type `kind` that holds the number; None where it holds none."""
    if isinstance(kind, UnionType):
        return next((found for part in get_args(kind) if (found := with_number(part, number)) is not None), None)
    if kind in (int, float):
        return number
    if get_origin(kind) is tuple:
        return tuple(number if part is float else None for part in get_args(kind))
    if kind == dict[int, float]:
        return {0: number}
    if kind == dict[int, int]:
        return {number: 0}
    return None


def numeric(config: type) -> list[Field]:
    hints = get_type_hints(config)
    return [f for f in fields(config) if with_number(hints[f.name], 1) is not None]


def test_no_config_and_no_number_is_left_out():
    inside = {field.type for config in CONFIGS for field in fields(config) if is_dataclass(field.type)}
    assert inside <= set(CONFIGS)
    assert sum(len(numeric(config)) for config in CONFIGS) > 100
    assert [field.name for field in numeric(GroupConfig)] == ["lr", "weight_decay"]


def test_every_number_of_every_config_is_taken_or_named():
    tried = 0
    for config in CONFIGS:
        hints = get_type_hints(config)
        config(**needed(config))
        for field in numeric(config):
            for number in NUMBERS:
                used_with = {k: v for k, v in USED_WITH.get(field.name, {}).items() if k in hints}
                refusal = refused(config, used_with | {field.name: with_number(hints[field.name], number)})
                if refusal is not None:
                    assert field.name in refusal, (config, field.name, number, refusal)
                    assert "\n" not in refusal
                else:
                    whole = hints[field.name] in (int, int | None)
                    assert abs(number) <= (2**63 - 1 if whole else LARGE), (config, field.name, number)
                    assert not whole or number == int(number), (config, field.name, number)
                tried += 1
    assert tried > 1000


def refused(config: type, values: dict[str, Any]) -> str | None:
    """What the config says against the values; None where it takes them."""
    try:
        config(**needed(config) | values)
    except ValueError as error:
        return str(error)
    return None


def choices(config: type) -> st.SearchStrategy:
    """Settings of a config: words from a few that are known, numbers from `NUMBERS` and small ones."""
    hints = get_type_hints(config)
    found: dict[str, st.SearchStrategy] = {}
    for field in numeric(config):
        numbers = st.sampled_from([*NUMBERS, 1, 2, 3, 4, 8, 64, 1.0, 0.5, 1.0000000001, 1e30, 1e-30])
        found[field.name] = numbers.map(lambda n, kind=hints[field.name]: with_number(kind, n))
    return st.fixed_dictionaries({}, optional=found)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_a_model_takes_can_be_built(data):
    """On the meta device; positions are worked out in full, and are finite."""
    words = dict(
        position=data.draw(st.sampled_from(["rotary", "alibi", "learned", "transformer_xl"])),
        norm=data.draw(st.sampled_from(["rmsnorm", "layernorm"])),
    )
    scaling = data.draw(st.sampled_from(["none", "linear", "ntk", "yarn", "llama3"]))
    small = dict(vocab_size=7, d_model=8, n_layers=1, n_heads=2, max_seq_len=16)
    try:
        attention = AttentionConfig(**data.draw(choices(AttentionConfig)))
        rotary = RotaryConfig(**{"factor": 2.0, "scaling": scaling} | data.draw(choices(RotaryConfig)))
        config = ModelConfig(**small | words | data.draw(choices(ModelConfig)), attention=attention, rotary=rotary)
    except ValueError:
        return
    with torch.device("meta"):
        model = Transformer(config)
    if config.position == "rotary":
        assert torch.view_as_real(model.position.turns).isfinite().all()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([c for c in CONFIGS if numeric(c)]), st.data())
def test_numbers_together_are_taken_or_refused(config, data):
    assert "\n" not in (refused(config, data.draw(choices(config))) or "")
