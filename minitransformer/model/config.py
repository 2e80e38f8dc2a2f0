"""The shape of a model: one dataclass that checks itself and names the wrong field."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from minitransformer.model.checks import at_least, choose, count, finite, fraction, positive

POSITIONS = ("none", "sinusoidal", "learned", "rotary", "alibi", "t5", "shaw", "transformer_xl")
BIASED_POSITIONS = ("alibi", "t5", "shaw", "transformer_xl")
SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")
NORMS = ("rmsnorm", "rmsnorm_zero", "layernorm")
NORM_PLACEMENTS = ("pre", "post", "sandwich")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "geglu_tanh")
INITS = ("zero_residual", "gpt2", "xavier", "d_model")
KINDS = ("softmax", "elu", "performer")
PATTERNS = ("full", "window", "bigbird", "strided", "fixed")
KERNELS = ("auto", "reference", "sdpa", "flex")

# The patterns that use a setting of attention.
USED_BY = {
    "window": ("window", "bigbird"),
    "global_tokens": ("bigbird",),
    "block": ("bigbird",),
    "random_blocks": ("bigbird",),
    "stride": ("strided", "fixed"),
    "summary": ("fixed",),
}

# The largest model that can be named: its matrices have fewer than 2^63 bytes, its positions are exact in fp32.
MOST = {
    "vocab_size": 2**24,
    "d_model": 2**20,
    "n_layers": 10_000,
    "n_heads": 2**16,
    "n_kv_heads": 2**16,
    "d_head": 2**16,
    "d_ff": 2**24,
    "max_seq_len": 2**24,
}


# Fields by the names that earlier versions saved.
RENAMED = {"soft_cap": "softcap", "logit_soft_cap": "logit_softcap"}


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the names of now."""
    new = {RENAMED.get(name, name): value for name, value in values.items()}
    return {name: renamed(value) if isinstance(value, dict) else value for name, value in new.items()}


@dataclass
class AttentionConfig:
    """How tokens are mixed inside every block.

    kind: softmax | elu (linear attention, Katharopoulos et al. 2020) | performer (Choromanski et al. 2021).
    kernel: `auto` takes the fastest kernel that is exact, `reference` the written-out equation,
        `sdpa` torch's fused `F.scaled_dot_product_attention`, `flex` `flex_attention` (trains on a GPU only).
    pattern: what each layer may see, repeated over the depth: full | window | bigbird | strided | fixed.
    window: newest tokens seen by `window` and `bigbird`. global_tokens: first tokens seen by all in `bigbird`.
    block, random_blocks: size and number of the random blocks of `bigbird`.
    stride: of `strided` and `fixed`. summary: last places of each stride that all may see in `fixed`.
    qk_norm: normalise queries and keys per head before they meet (Henry et al. 2020). qk_gain: and scale each of their
        dimensions by trained gains, one set for all queries of a layer and one for its keys (Qwen3, 2025).
    score_width: scores are divided by its square root (None: d_head; Gemma 2's query_pre_attn_scalar).
    softcap: scores pass through cap * tanh(scores / cap); 0 leaves them (Gemma 2, 2024).
    qkv_bias, output_bias: biases of the projections (None: as `model.bias`).
    features: random features of a performer head (None: 2 * d_head).
    """

    kind: str = "softmax"
    kernel: str = "auto"
    pattern: list[str] = field(default_factory=lambda: ["full"])
    window: int = 128
    global_tokens: int = 16
    block: int = 16
    random_blocks: int = 2
    stride: int = 64
    summary: int = 8
    qk_norm: bool = False
    qk_gain: bool = False
    score_width: float | None = None
    softcap: float = 0.0
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    features: int | None = None

    def __post_init__(self) -> None:
        choose("model.attention.kind", self.kind, KINDS)
        choose("model.attention.kernel", self.kernel, KERNELS)
        if not self.pattern:
            raise ValueError("model.attention.pattern is empty; name at least one, such as [full]")
        for name in self.pattern:
            choose("model.attention.pattern", name, PATTERNS)
        for name in ("window", "block", "stride", "summary"):
            count(f"model.attention.{name}", getattr(self, name))
        count("model.attention.global_tokens", self.global_tokens, 0)
        count("model.attention.random_blocks", self.random_blocks, 0, 1024)
        at_least("model.attention.softcap", self.softcap, 0)
        finite("model.attention.softcap", self.softcap)
        if self.features is not None:
            count("model.attention.features", self.features, 1, 2**20)
        if self.score_width is not None:
            positive("model.attention.score_width", self.score_width)
        for name, patterns in USED_BY.items():
            value = getattr(self, name)
            if value != getattr(AttentionConfig, name) and not set(patterns) & set(self.pattern):
                raise ValueError(
                    f"model.attention.{name}={value} needs model.attention.pattern: {' or '.join(patterns)}"
                )
        if self.qk_gain and not self.qk_norm:
            raise ValueError("model.attention.qk_gain=true scales what model.attention.qk_norm=true has normalised")
        if "fixed" in self.pattern and self.summary > self.stride:
            raise ValueError(
                f"model.attention.summary={self.summary} is more than model.attention.stride={self.stride}"
            )


@dataclass
class RotaryConfig:
    """Rotary positions (Su et al. 2021).

    base: of the frequencies. fraction: the part of each head's width that is turned.
    scaling: none | linear | ntk | yarn | llama3, for reading `factor` times the `original_length` that a model was
        trained on (None: max_seq_len / factor).
    slow, fast: of yarn and llama3; frequencies that turn less than `slow` times in the original length are scaled,
        those that turn more than `fast` times are not (None: 1 and 32 in yarn, 1 and 4 in llama3).
    attention_factor: of yarn, on the turned vectors (None: 0.1 ln(factor) + 1).
    """

    base: float = 10_000.0
    fraction: float = 1.0
    scaling: str = "none"
    factor: float = 1.0
    original_length: int | None = None
    slow: float | None = None
    fast: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        at_least("model.rotary.base", self.base, 1)
        at_least("model.rotary.factor", self.factor, 1)
        choose("model.rotary.scaling", self.scaling, SCALINGS)
        fraction("model.rotary.fraction", self.fraction, zero=False, one=True)
        for name in ("slow", "fast", "attention_factor"):
            if getattr(self, name) is not None:
                positive(f"model.rotary.{name}", getattr(self, name))
        if self.original_length is not None:
            count("model.rotary.original_length", self.original_length, 1, MOST["max_seq_len"])
            if self.scaling not in ("yarn", "llama3"):
                raise ValueError(
                    f"model.rotary.original_length={self.original_length} needs model.rotary.scaling: yarn or llama3"
                )
        if self.scaling == "yarn" and self.base == 1:
            raise ValueError("model.rotary.base=1 turns all dimensions alike, and model.rotary.scaling=yarn none more")
        if self.scaling == "none" and self.factor != 1:
            raise ValueError(f"model.rotary.factor={self.factor} needs a scaling: linear, ntk, yarn or llama3")
        if self.scaling not in ("yarn", "llama3") and (self.slow is not None or self.fast is not None):
            raise ValueError("model.rotary.slow and fast need model.rotary.scaling: yarn or llama3")
        if self.scaling != "yarn" and self.attention_factor is not None:
            raise ValueError(f"model.rotary.attention_factor={self.attention_factor} needs model.rotary.scaling=yarn")
        if not self.slow_turns < self.fast_turns:
            raise ValueError(f"model.rotary.slow={self.slow_turns} must lie below fast={self.fast_turns}")

    @property
    def slow_turns(self) -> float:
        return 1 if self.slow is None else self.slow

    @property
    def fast_turns(self) -> float:
        return (4 if self.scaling == "llama3" else 32) if self.fast is None else self.fast


@dataclass
class ModelConfig:
    """Everything that decides a model's parameters and its function.

    vocab_size: number of token ids; None in a training config means "as large as the tokenizer".
    d_model: width of the residual stream.
    n_layers, n_heads: blocks, and query heads in each.
    n_kv_heads: key and value heads (None: n_heads). Fewer is grouped-query attention (Ainslie et al. 2023).
    d_head: width of a head (None: d_model / n_heads).
    d_ff: inner width of the feed-forward (None: 4 * d_model, or 8/3 * d_model rounded up to 32 if gated).
    max_seq_len: longest sequence in tokens.
    position: none | sinusoidal | learned | rotary | alibi | t5 | shaw | transformer_xl (see `positions`).
    norm: rmsnorm (Zhang and Sennrich 2019) | rmsnorm_zero (whose gain is 1 + weight, Gemma 2024) |
        layernorm (Ba et al. 2016).
    norm_placement: pre (Xiong et al. 2020) | post (Vaswani et al. 2017) | sandwich (both, Ding et al. 2021).
    norm_eps: added to the variance.
    parallel: attention and feed-forward read the stream side by side (Wang and Komatsuzaki 2021, GPT-J).
    activation: gelu | gelu_tanh | relu | relu2 (So et al. 2021) | swiglu | geglu (Shazeer 2020) | geglu_tanh.
    bias: biases in the linear layers and in layernorm.
    dropout: probability of zeroing attention weights, branch outputs and embeddings in training.
    tie_embeddings: one matrix is both the embedding and the head (Press and Wolf 2017).
    scale_embedding: embeddings are multiplied by sqrt(d_model) (Gemma 2024), as sinusoidal positions always do.
    logit_softcap: logits pass through cap * tanh(logits / cap); 0 leaves them (Gemma 2, 2024).
    init: zero_residual (output projections start at 0) | gpt2 (normal 0.02, residual ones scaled by depth) |
        xavier (Glorot and Bengio 2010) | d_model (normal, 1 / sqrt(d_model)).
    """

    vocab_size: int | None = None
    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_ff: int | None = None
    max_seq_len: int = 256
    position: str = "rotary"
    norm: str = "rmsnorm"
    norm_placement: str = "pre"
    norm_eps: float = 1e-6
    parallel: bool = False
    activation: str = "gelu"
    bias: bool = False
    dropout: float = 0.0
    tie_embeddings: bool = False
    scale_embedding: bool = False
    logit_softcap: float = 0.0
    init: str = "zero_residual"
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rotary: RotaryConfig = field(default_factory=RotaryConfig)

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if getattr(self, name) is not None:
                count(f"model.{name}", getattr(self, name), 1, most)
        at_least("model.logit_softcap", self.logit_softcap, 0)
        finite("model.logit_softcap", self.logit_softcap)
        fraction("model.dropout", self.dropout)
        choose("model.position", self.position, POSITIONS)
        choose("model.norm", self.norm, NORMS)
        choose("model.norm_placement", self.norm_placement, NORM_PLACEMENTS)
        choose("model.activation", self.activation, ACTIVATIONS)
        choose("model.init", self.init, INITS)
        fraction("model.norm_eps", self.norm_eps, zero=False)
        positive("model.norm_eps", self.norm_eps)
        if self.parallel and self.norm_placement == "post":
            raise ValueError("model.parallel=true cannot go with model.norm_placement=post; choose pre or sandwich")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}; "
                f"choose a multiple, or set model.d_head"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.kv_heads}; "
                f"each key and value head serves the same number of query heads"
            )
        if self.position == "rotary" and self.head_width % 2:
            raise ValueError(f"model.d_head={self.head_width} is odd; model.position=rotary turns pairs of dimensions")
        if self.position == "rotary" and self.turned < (needed := 4 if self.rotary.scaling == "ntk" else 2):
            raise ValueError(
                f"model.rotary.fraction={self.rotary.fraction} turns {self.turned} of model.d_head={self.head_width} "
                f"dimensions; model.rotary.scaling={self.rotary.scaling} needs {needed}"
            )
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"model.d_model={self.d_model} is odd; model.position=sinusoidal needs an even width")
        if self.position == "transformer_xl" and self.d_model % 2:
            raise ValueError(f"model.d_model={self.d_model} is odd; model.position=transformer_xl needs an even width")
        if self.position == "sinusoidal" and self.scale_embedding:
            raise ValueError("model.scale_embedding=true: model.position=sinusoidal scales embeddings already")
        self._check_attention()

    def _check_attention(self) -> None:
        """Refuse what no kernel can do, naming the nearest choice that works."""
        attention, kernel = self.attention, self.attention.kernel
        named = f"model.attention.kernel={kernel}"
        if self.position == "shaw" and kernel in ("sdpa", "flex"):
            raise ValueError(
                f"{named} cannot do model.position=shaw, whose values need the weights; use auto or reference"
            )
        if attention.softcap and kernel == "sdpa":
            raise ValueError(f"{named} cannot do model.attention.softcap; use auto, reference or flex")
        if self.dropout and kernel == "flex":
            raise ValueError(f"{named} cannot do model.dropout={self.dropout}; use auto or sdpa, or no dropout")
        if self.position != "rotary" and self.rotary != RotaryConfig():
            raise ValueError(
                f"model.rotary is set, and model.position={self.position} does not use it; use position=rotary"
            )
        if attention.kind == "softmax":
            if attention.features is not None:
                raise ValueError("model.attention.features is for model.attention.kind=performer")
            return
        kind = f"model.attention.kind={attention.kind}"
        if self.position in BIASED_POSITIONS:
            works = ", ".join(p for p in POSITIONS if p not in BIASED_POSITIONS)
            raise ValueError(f"{kind} has no scores for model.position={self.position} to add to; choose {works}")
        if kernel != "auto":
            raise ValueError(f"{kind} does not use {named}; use auto")
        if set(attention.pattern) != {"full"}:
            raise ValueError(f"{kind} cannot do model.attention.pattern={attention.pattern}; use [full]")
        if attention.softcap:
            raise ValueError(f"{kind} has no scores for model.attention.softcap={attention.softcap}; use 0")
        if attention.score_width is not None:
            raise ValueError(f"{kind} has no scores for model.attention.score_width={attention.score_width}")
        if attention.features is not None and attention.kind != "performer":
            raise ValueError("model.attention.features is for model.attention.kind=performer")

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def turned(self) -> int:
        """Dimensions of a head that rotary positions turn."""
        return 2 * int(self.head_width * self.rotary.fraction / 2)

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def ff_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        if self.gated:
            return -(-8 * self.d_model // (3 * 32)) * 32
        return 4 * self.d_model

    def flat(self) -> dict[str, Any]:
        """All settings by dotted names, such as `attention.window`, with what None stands for."""
        values, width = asdict(self), self.attention.score_width or self.head_width
        own = {"n_kv_heads": self.kv_heads, "d_head": self.head_width, "d_ff": self.ff_width}
        own["attention.score_width"] = int(width) if width == int(width) else width
        for name in ("qkv_bias", "output_bias"):
            given = values["attention"][name]
            own[f"attention.{name}"] = self.bias if given is None else given
        inner = {f"{part}.{name}": v for part in ("attention", "rotary") for name, v in values.pop(part).items()}
        return values | inner | own

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Rebuild a config from plain nested values, as a checkpoint holds them.

        Older versions let settings stand that nothing used; these are left out.

        Raises:
            ValueError: a key is not a field of ModelConfig (the checkpoint is from another version).
        """
        values = renamed(values)
        parts = {"attention": AttentionConfig, "rotary": RotaryConfig}
        inner = {name: values.pop(name, {}) for name in parts}
        for owner, given in ((cls, values), *((parts[name], inner[name]) for name in parts)):
            unknown = sorted(set(given) - {f.name for f in fields(owner)})
            if unknown:
                raise ValueError(f"the saved model config has unknown fields: {', '.join(unknown)}")
        attention, rotary = inner["attention"], inner["rotary"]
        pattern, scaling = attention.get("pattern", ["full"]), rotary.get("scaling", "none")
        unused = {name for name, patterns in USED_BY.items() if not set(patterns) & set(pattern)}
        unused |= {"kernel"} if attention.get("kind", "softmax") != "softmax" else set()
        inner["attention"] = {name: value for name, value in attention.items() if name not in unused}
        if scaling not in ("yarn", "llama3"):
            inner["rotary"] = {name: value for name, value in rotary.items() if name != "original_length"}
        return cls(**values, **{name: parts[name](**inner[name]) for name in parts})
