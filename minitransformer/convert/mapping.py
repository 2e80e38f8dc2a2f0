"""How a family's config.json and tensors translate to ours, in both directions by one description.

A `Family` is a list of `Part`s, each of which translates some keys of config.json to some of our settings and back, and
a table of names. What no part knows is refused by name: a key of config.json, or a setting of ours. The families
themselves are in `families`. `transformers` is not needed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minitransformer.model.config import ModelConfig

Settings = dict[str, Any]  # ours by dotted name: "d_model", "attention.window"
REQUIRED = object()  # in place of a default: a file cannot leave the key out


class ConvertError(ValueError):
    """A model that cannot be converted, and why."""


class NoCounterpart(ConvertError):
    """A setting of ours that a family has no word for."""


# Config.json -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Some keys of config.json and the settings of ours that they decide.

    keys: with the values that `transformers` takes where a file leaves them out.
    read: values of the keys -> our settings; raises ConvertError. write: our settings -> keys; raises NoCounterpart.
    """

    keys: dict[str, Any]
    settings: tuple[str, ...]
    read: Callable[[dict[str, Any]], Settings]
    write: Callable[[Settings], dict[str, Any]]


def same(key: str, settings: str, default: Any = REQUIRED, names: dict[Any, Any] | None = None) -> Part:
    """A key that is one setting of ours, or several equal ones ("a b"). names: their values -> ours, if they differ."""
    ours = tuple(settings.split())

    def read(given: dict[str, Any]) -> Settings:
        value = given[key]
        if names is not None and value not in names:
            raise ConvertError(f"config.json: {key}={value!r} is not known; there are {', '.join(map(str, names))}")
        return dict.fromkeys(ours, value if names is None else names[value])

    def write(settings: Settings) -> dict[str, Any]:
        value = settings[ours[0]]
        if any(settings[name] != value for name in ours):
            raise NoCounterpart(" and ".join(f"model.{name}={_text(settings[name])}" for name in ours))
        if names is None:
            return {key: value}
        for theirs, own in names.items():
            if own == value:
                return {key: theirs}
        raise NoCounterpart(f"model.{ours[0]}={_text(value)}")

    return Part({key: default}, ours, read, write)


def only(**values: Any) -> Part:
    """Keys that must have these values, which they have where they are left out: what else they say we cannot do."""

    def read(given: dict[str, Any]) -> Settings:
        for key, value in values.items():
            if (given[key] or None) != (value or None):
                raise ConvertError(f"config.json: {key}={given[key]!r} cannot be converted; only {value!r} can")
        return {}

    return Part(values, (), read, lambda settings: {})


def cap(key: str, setting: str, default: float | None) -> Part:
    """A soft cap, which is None where there is none, and 0 with us."""
    return Part(
        {key: default},
        (setting,),
        lambda given: {setting: given[key] or 0.0},
        lambda ours: {key: ours[setting] or None},
    )


DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout")  # whatever the family


def dropout(*keys: str, default: float) -> Part:
    """Dropouts of attention weights, branch outputs and embeddings: one with us, or none where they differ."""

    def read(given: dict[str, Any]) -> Settings:
        values = {given[key] or 0.0 for key in keys}
        return {"dropout": values.pop()} if len(values) == 1 else {}

    return Part(dict.fromkeys(keys, default), ("dropout",), read, lambda ours: dict.fromkeys(keys, ours["dropout"]))


def ignored(*keys: str) -> Part:
    """Keys that change nothing of what a model computes, whatever their values."""
    return Part(dict.fromkeys(keys), (), lambda given: {}, lambda settings: {})


def layers(alternate: bool = False, switch: bool = False) -> Part:
    """Which layers see a window alone: `layer_types` says it, or where that is left out, the family.

    alternate: layers 0, 2, ... do (Gemma 2). switch: it must be turned on
    by `use_sliding_window`, and the first `max_window_layers` have none (Qwen).
    """
    keys = {"sliding_window": 4096} | ({"layer_types": None} if alternate or switch else {})
    keys |= {"use_sliding_window": False, "max_window_layers": 28} if switch else {}
    kinds = {"full_attention": "full", "sliding_attention": "window"}

    def read(given: dict[str, Any]) -> Settings:
        n, size = given["num_hidden_layers"], given["sliding_window"]
        if size is None or (switch and not given["use_sliding_window"]):
            kinds_given = set(given.get("layer_types") or []) - {"full_attention"}
            if kinds_given:
                raise ConvertError(f"config.json: layer_types has {kinds_given.pop()!r}, but no sliding_window is set")
            return {"attention.pattern": ["full"]}
        if given.get("layer_types") is not None:
            for kind in given["layer_types"]:
                if kind not in kinds:
                    raise ConvertError(f"config.json: layer_types has {kind!r}; only {', '.join(kinds)} are known")
            pattern = [kinds[kind] for kind in given["layer_types"]]
            if len(pattern) != n:
                raise ConvertError(f"config.json: {len(pattern)} layer_types for num_hidden_layers={n}")
        elif alternate:
            pattern = ["full" if i % 2 else "window" for i in range(n)]
        else:
            pattern = ["window" if not switch or i >= given["max_window_layers"] else "full" for i in range(n)]
        period = next(p for p in range(1, n + 1) if all(pattern[i] == pattern[i % p] for i in range(n)))
        return {"attention.pattern": pattern[:period], "attention.window": size}

    def write(settings: Settings) -> dict[str, Any]:
        pattern, n = settings["attention.pattern"], settings["n_layers"]
        pattern = [pattern[i % len(pattern)] for i in range(n)]
        windows = [name == "window" for name in pattern]
        if set(pattern) - set(kinds.values()) or (not alternate and not switch and any(windows) != all(windows)):
            raise NoCounterpart(f"model.attention.pattern={_text(settings['attention.pattern'])}")
        size = settings["attention.window"] if any(windows) or alternate else None  # Gemma 2 wants a number
        found: dict[str, Any] = {"sliding_window": size}
        if alternate or switch:
            found["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        if switch:
            first = windows.index(True) if any(windows) else n
            found |= {"use_sliding_window": any(windows), "max_window_layers": first}
        return found

    return Part(keys, ("attention.pattern", "attention.window"), read, write)


# What each kind of rotary scaling is called, and its other parameters: theirs -> ours.
SCALINGS = {"default": "none", "linear": "linear", "dynamic": "none", "yarn": "yarn", "llama3": "llama3"}
SCALING_KEYS = {
    "linear": {"factor": "factor"},
    "dynamic": {},
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_length", "beta_slow": "slow",
        "beta_fast": "fast", "attention_factor": "attention_factor",
    },
    "llama3": {
        "factor": "factor", "original_max_position_embeddings": "original_length", "low_freq_factor": "slow",
        "high_freq_factor": "fast",
    },
}  # fmt: skip


def rotary(
    base: str = "rope_theta", fraction: str | None = None, fraction_default: float = 1.0, default: dict | None = None
) -> Part:
    """The base, the turned fraction of each head and the scaling, as transformers 4 and 5 write them.

    Of `dynamic` scaling frequencies change only past max_position_embeddings, which is where our models end.

    base, fraction: what these keys are called (fraction None: there is none). default: where nothing is said.
    """
    keys = {base: 10_000.0, "rope_scaling": None, "rope_parameters": None}
    keys[fraction or "partial_rotary_factor"] = fraction_default
    ours = ("base", "fraction", "scaling", "factor", "original_length", "slow", "fast", "attention_factor")

    def read(given: dict[str, Any]) -> Settings:
        name = "rope_parameters" if given["rope_parameters"] else "rope_scaling"
        rope = {key: value for key, value in (given[name] or default or {}).items() if value is not None}
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        if kind not in SCALINGS:
            raise ConvertError(f"config.json: {name} has rope_type={kind!r}; only {', '.join(SCALINGS)} are known")
        found = {"base": rope.pop("rope_theta", given[base]), "scaling": SCALINGS[kind]}
        part = rope.pop("partial_rotary_factor", given[fraction or "partial_rotary_factor"])
        if fraction is None and part not in (None, 1):
            raise ConvertError(f"config.json: partial_rotary_factor={part} has no meaning in this family; only 1 has")
        found["fraction"] = 1.0 if part is None else part
        if fraction is not None and int(given["hidden_size"] // given["num_attention_heads"] * part) % 2:
            raise ConvertError(f"config.json: {fraction}={part} turns an odd number of each head's dimensions")
        if kind == "dynamic":
            rope.pop("factor", None)
        if rope.get("truncate") is True:
            rope.pop("truncate")
        known = SCALING_KEYS.get(kind, {})
        if unknown := sorted(set(rope) - set(known)):
            key = unknown[0]
            raise ConvertError(f"config.json: {name} of type {kind} has {key}={rope[key]!r}, which cannot be converted")
        if "factor" in known and "factor" not in rope:
            raise ConvertError(f"config.json: {name} of type {kind} has no factor")
        found |= {known[key]: value for key, value in rope.items()}
        if "original_max_position_embeddings" in known:
            found.setdefault("original_length", given["max_position_embeddings"])
        return {f"rotary.{key}": value for key, value in found.items()}

    def write(settings: Settings) -> dict[str, Any]:
        have = {key: settings[f"rotary.{key}"] for key in ours}
        turned = int(settings["d_head"] * have["fraction"])
        if (fraction is None and have["fraction"] != 1) or turned % 2:
            raise NoCounterpart(f"model.rotary.fraction={have['fraction']}")
        if have["scaling"] == "ntk":  # no scaling, of a larger base
            have["base"] *= have["factor"] ** (turned / (turned - 2))
            have["scaling"] = "none"
        found: dict[str, Any] = {base: have["base"], "rope_scaling": default and {"rope_type": "default"}}
        if fraction is not None:
            found[fraction] = have["fraction"]
        if (kind := have["scaling"]) != "none":
            if have["original_length"] is None and kind != "linear":
                have["original_length"] = settings["max_seq_len"] / have["factor"]
            if kind == "llama3":
                have["slow"], have["fast"] = have["slow"] or 1, have["fast"] or 4
            scaling = {theirs: have[own] for theirs, own in SCALING_KEYS[kind].items() if have[own] is not None}
            found["rope_scaling"] = {"rope_type": kind, **scaling}
        return found

    return Part(keys, tuple(f"rotary.{name}" for name in ours), read, write)


# Tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One tensor of ours and those of theirs that lie in it, one after the other.

    sizes: rows of each. order: which of their rows is each of ours (None: the same). transposed: they keep columns.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    order: Tensor | None = None
    transposed: bool = False

    def shapes(self) -> list[tuple[int, ...]]:
        """Theirs."""
        shapes = [(size, *self.shape[1:]) for size in self.sizes]
        return [shape[::-1] if self.transposed else shape for shape in shapes]

    def to_ours(self, tensors: list[Tensor]) -> Tensor:
        whole = torch.cat([t.T if self.transposed else t for t in tensors])
        return whole if self.order is None else whole[self.order]

    def to_theirs(self, tensor: Tensor) -> list[Tensor]:
        whole = tensor if self.order is None else tensor[self.order.argsort()]
        parts = whole.split(self.sizes)
        return [(part.T if self.transposed else part).contiguous() for part in parts]


def rotary_order(config: ModelConfig) -> Tensor:
    """Which of their dimensions of a head is each of ours: they turn i with i + half, we turn 2i with 2i + 1."""
    width = config.head_width
    if config.position != "rotary":
        return torch.arange(width)
    turned = config.turned
    pairs = torch.arange(turned).view(2, -1).T.flatten()
    return torch.cat((pairs, torch.arange(turned, width)))


# A family ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A `model_type`.

    fixed: settings that all its models have, where they are not those of `ModelConfig`.
    names: our module or parameter -> theirs, whose rows lie in ours one after the other; * is the layer.
    transposed: linear layers keep columns. interleaved: queries, keys and values lie side by side in each head.
    whole_heads: `transformers` wants hidden_size to be a multiple of num_attention_heads.
    """

    model_type: str
    architecture: str
    fixed: Settings
    parts: list[Part]
    names: dict[str, str]
    transposed: bool = False
    interleaved: bool = False
    whole_heads: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """The keys of config.json and what `transformers` takes where a file leaves them out."""
        return {key: default for part in self.parts for key, default in part.keys.items()}

    def lost_dropouts(self, given: dict[str, Any], config: ModelConfig) -> list[str]:
        """Those of a config.json that our config for it does not have."""
        values = self.defaults | given
        return [f"{key}={values[key]}" for key in DROPOUTS if values.get(key) not in (None, 0, config.dropout)]

    def read_config(self, given: dict[str, Any]) -> ModelConfig:
        """Our config for a config.json.

        Raises:
            ConvertError: it says something that we do not know, or cannot do.
        """
        known = self.defaults
        if unknown := sorted(key for key in set(given) - set(known) if given[key] is not None):
            raise ConvertError(
                f"config.json: {unknown[0]}={given[unknown[0]]!r} is not known for model_type={self.model_type}"
            )
        values = known | given
        if missing := [key for key, value in values.items() if value is REQUIRED]:
            raise ConvertError(f"config.json has no {missing[0]}")
        settings = dict(self.fixed)
        for part in self.parts:
            settings |= part.read(values)
        nested: dict[str, Any] = {}
        for name, value in settings.items():
            owner, _, inner = name.rpartition(".")
            (nested.setdefault(owner, {}) if owner else nested)[inner] = value
        try:
            config = ModelConfig.from_dict(nested)
        except (TypeError, ValueError) as error:
            raise ConvertError(f"config.json: {error}") from None
        return config

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of our config.

        Raises:
            NoCounterpart: naming all settings that this family does not have.
        """
        settings = config.flat()
        standard = ModelConfig().flat() | {"n_kv_heads": config.n_heads, "d_head": config.d_model / config.n_heads}
        standard |= {"attention.score_width": config.head_width} | self.fixed
        covered = {name for part in self.parts for name in part.settings} | NEUTRAL
        missing = [
            f"model.{name}={_text(value)}"
            for name, value in settings.items()
            if name not in covered and value != standard[name]
        ]
        if self.whole_heads and config.d_model % config.n_heads:
            missing.append(f"model.d_model={config.d_model} with model.n_heads={config.n_heads}")
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for part in self.parts:
            try:
                found |= part.write(settings)
            except NoCounterpart as error:
                missing.append(str(error))
        if missing:
            raise NoCounterpart(", ".join(missing))
        return found

    def own_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by full names, which files of the bare model leave out, without the constants in old files."""
        tensors = {name: tensor for name, tensor in tensors.items() if not CONSTANT.search(name)}
        prefix = self.names["norm"].split(".")[0] + "."
        if any(name.startswith(prefix) for name in tensors):
            return tensors
        head = self.names["head"] + "."
        return {name if name.startswith(head) else prefix + name: tensor for name, tensor in tensors.items()}

    def weights(self, config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> list[Weight]:
        """How the tensors of our model (`shapes`) are made of theirs."""
        order = rotary_order(config)
        n_q, n_kv, width = config.n_heads, config.kv_heads, config.head_width
        heads = torch.arange((n_q + 2 * n_kv) * width).view(-1, width)
        if self.interleaved:
            heads = heads.view(n_q, 3, width).transpose(0, 1).reshape(-1, width)
        heads[: n_q + n_kv] = heads[: n_q + n_kv, order]
        orders = {"attention.qkv": heads.flatten(), "attention.q_gain": order, "attention.k_gain": order}
        orders = {name: rows for name, rows in orders.items() if not torch.equal(rows, torch.arange(len(rows)))}
        found = []
        for name, shape in shapes.items():
            layer = re.match(r"blocks\.(\d+)\.", name)
            general = re.sub(r"^blocks\.\d+\.", "blocks.*.", name)
            module, leaf = general, ""
            if general not in self.names:
                module, _, leaf = general.rpartition(".")
            theirs = tuple(
                (their + f".{leaf}" * bool(leaf)).replace("*", layer[1] if layer else "*")
                for their in self.names[module].split()
            )
            sizes = {1: shape[:1], 2: (shape[0] // 2,) * 2, 3: (n_q * width, n_kv * width, n_kv * width)}[len(theirs)]
            inner = module.removeprefix("blocks.*.")
            transposed = self.transposed and len(shape) == 2 and inner.startswith(("attention.", "feed_forward."))
            found.append(Weight(name, theirs, shape, sizes, orders.get(inner), transposed))
        return found


def _text(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


# Masks and frequencies that files of old versions hold.
CONSTANT = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
# Settings that change nothing of what a trained model computes, or only in patterns that no family has.
NEUTRAL = {"dropout", "init"} | {
    f"attention.{name}"
    for name in ("kernel", "window", "global_tokens", "block", "random_blocks", "stride", "summary", "features")
}
