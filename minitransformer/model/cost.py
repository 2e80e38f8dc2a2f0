"""What a model costs, in closed form from its config alone."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from minitransformer.model.config import ModelConfig
from minitransformer.model.linear import CHUNK
from minitransformer.model.positions import ShawEncoding, T5Encoding

LOGITS = 2**22  # that the head works out at once, as long as they make rows enough for a fast product
LEAST_ROWS = 256

# Parameters ------------------------------------------------------------------------------------------------------


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Parameters of the built model; a head that is tied to the embedding has none of its own."""
    d, h, width = config.d_model, config.n_heads, config.head_width
    assert config.vocab_size is not None
    norm = d * (2 if config.norm == "layernorm" and config.bias else 1)
    qkv_bias, output_bias = (
        config.bias if own is None else own for own in (config.attention.qkv_bias, config.attention.output_bias)
    )
    attention = (d + qkv_bias) * (h + 2 * config.kv_heads) * width + (h * width + output_bias) * d
    attention += 2 * width if config.attention.qk_gain else 0
    feed_forward = (d + config.bias) * _inner(config) + (config.ff_width + config.bias) * d
    position = {
        "learned": config.max_seq_len * d,
        "t5": T5Encoding.n_buckets * h,
        "shaw": 2 * config.n_layers * (2 * ShawEncoding.clip + 1) * width,
        "transformer_xl": 2 * h * width + config.n_layers * d * h * width,
    }
    norms = config.n_layers * (4 if config.norm_placement == "sandwich" else 2) + (config.norm_placement != "post")
    return {
        "embedding": config.vocab_size * d,
        "positions": position.get(config.position, 0),
        "attention": config.n_layers * attention,
        "feed-forward": config.n_layers * feed_forward,
        "norms": norms * norm,
        "head": 0 if config.tie_embeddings else config.vocab_size * d,
    }


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the built model, tied ones once."""
    return sum(parameters_by_part(config).values())


def hidden_matrix_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices inside the blocks, which are Muon's."""
    d, h = config.d_model, config.n_heads
    attention = d * (2 * h + 2 * config.kv_heads) * config.head_width
    return config.n_layers * (attention + d * (_inner(config) + config.ff_width))


def adapter_parameters(config: ModelConfig, rank: int, targets: list[str]) -> int:
    """Parameters of low-rank adapters beside the linear layers that `targets` names (see `training.lora`)."""
    d, width = config.d_model, config.n_heads * config.head_width
    sizes = {
        "attention.qkv": d + width + 2 * config.kv_heads * config.head_width,
        "attention.output": width + d,
        "feed_forward.input": d + _inner(config),
        "feed_forward.output": config.ff_width + d,
    }
    names = {f"blocks.{layer}.{name}": n for layer in range(config.n_layers) for name, n in sizes.items()}
    return rank * sum(n for name, n in names.items() if any(fnmatchcase(name, target) for target in targets))


def _inner(config: ModelConfig) -> int:
    """Outputs of the feed-forward's first matrix."""
    return config.ff_width * (2 if config.gated else 1)


# Operations ------------------------------------------------------------------------------------------------------


def flops_per_token(
    config: ModelConfig,
    length: int | None = None,
    training: bool = False,
    rows: int = 1,
    recompute_every: int = 0,
    adapters: int = 0,
) -> float:
    """Floating-point operations of the matrix products for one token in a row of `length` (None: max_seq_len).

    Softmax attention is counted over the whole row, as is usual (Chowdhery et al. 2022, appendix B), although a causal
    kernel may do half of it, and a fused one repeats some in its backward pass; a window that `auto` reads in bands
    is counted over these.

    Args:
        training: the backward pass too, which has two products for each of the forward pass, or one where a factor is
            constant.
        rows: read together, which share what Transformer-XL works out for each distance.
        recompute_every: gradient checkpointing repeats every so many-th block (0: none; 1: all).
        adapters: parameters of low-rank adapters in all blocks, beside which all others are frozen (0: none).
    """
    length = config.max_seq_len if length is None else length
    assert config.vocab_size is not None
    head = 2 * config.vocab_size * config.d_model
    blocks = [_block_flops(config, layer, length, rows) for layer in range(config.n_layers)]
    forward = head + sum(forward for forward, _ in blocks) + 2 * adapters
    if not training:
        return forward
    # The last product of a block is not repeated where nothing after it needs its result.
    last = 2 * config.d_model * config.ff_width
    spared = 0 if config.norm_placement != "pre" or config.dropout or adapters else last
    each = 2 * adapters / config.n_layers - spared
    repeated = sum(forward + each for forward, _ in blocks[::recompute_every]) if recompute_every else 0
    backward = 2 * head + sum(backward for _, backward in blocks)
    if adapters:  # frozen matrices have no gradient, nor has what the first block reads
        first = config.d_model * (config.n_heads + 2 * config.kv_heads) * config.head_width
        backward += 4 * adapters - head - 2 * hidden_matrix_parameters(config) - 2 * first
    return forward + backward + repeated


def _block_flops(config: ModelConfig, layer: int, length: int, rows: int) -> tuple[float, float]:
    """Of the forward and of the backward pass of one block, for one token."""
    d, width = config.d_model, config.n_heads * config.head_width
    projections = width + 2 * config.kv_heads * config.head_width + width
    matrices = 2 * d * (projections + _inner(config) + config.ff_width)
    if config.attention.kind != "softmax":
        forward, backward = _linear_flops(config, length)
        return matrices + forward, 2 * matrices + backward
    mixing, constant = 4 * width * _keys(config, layer, length), 0.0
    if config.position == "shaw":
        mixing += 4 * width * (2 * ShawEncoding.clip + 1)
    if config.position == "transformer_xl":
        mixing += 2 * width * length
        constant = 2 * d * width / rows  # sinusoids, which have no gradient
    return matrices + mixing + constant, 2 * (matrices + mixing) + constant


def _keys(config: ModelConfig, layer: int, length: int) -> float:
    """Keys that the kernel works out for each query."""
    if _banded(config, layer, length):
        window = config.attention.window
        return 2 * window * -(-length // window) * window / length
    return length


def _banded(config: ModelConfig, layer: int, length: int) -> bool:
    """Does `auto` read this layer in bands, see `attention._attend_banded`?"""
    attention = config.attention
    plain = attention.kernel in ("auto", "sdpa") and not attention.softcap
    biased = config.position in ("alibi", "t5", "shaw", "transformer_xl")
    windowed = attention.pattern[layer % len(attention.pattern)] == "window"
    return plain and windowed and not biased and length >= 4 * attention.window


def _linear_flops(config: ModelConfig, length: int) -> tuple[float, float]:
    """Of linear attention in chunks: inside each, against the state, into the state, and a performer's features."""
    h, width = config.n_heads, config.head_width
    performer = config.attention.kind == "performer"
    features = (config.attention.features or 2 * width) if performer else width
    last = length % CHUNK or CHUNK
    first = min(length, CHUNK)
    inside = 2 * h * (features + width + 1) * ((length - last) * CHUNK + last**2) / length
    state = 2 * h * features * (width + 1)  # the first chunk reads no state, and nobody reads what the last one adds
    turning = 4 * h * width * features if performer else 0  # by directions that have no gradient
    forward = inside + 2 * state + turning
    return forward, 2 * inside + state * ((length - first) + length + 2 * (length - last)) / length + turning


# Memory ----------------------------------------------------------------------------------------------------------


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 4) -> int:
    """Bytes of keys and values that one more token adds: none in layers with a full window, or of linear attention."""
    if config.attention.kind != "softmax":
        return 0
    pattern = config.attention.pattern
    growing = sum(pattern[i % len(pattern)] != "window" for i in range(config.n_layers))
    return growing * 2 * config.kv_heads * config.head_width * bytes_per_number


def cache_bytes(config: ModelConfig, length: int | None = None, bytes_per_number: int = 4) -> int:
    """Bytes of keys and values, or of states, after one row of `length` tokens (None: max_seq_len)."""
    length = config.max_seq_len if length is None else length
    attention, width = config.attention, config.head_width
    if attention.kind != "softmax":
        features = (attention.features or 2 * width) if attention.kind == "performer" else width
        return config.n_layers * config.n_heads * features * (width + 1) * 4
    rolling = config.n_layers * 2 * config.kv_heads * width * bytes_per_number - cache_bytes_per_token(
        config, bytes_per_number
    )
    return length * cache_bytes_per_token(config, bytes_per_number) + min(length, attention.window) * rolling


@dataclass(frozen=True)
class Widths:
    """Bytes of a number: in weights, gradients and optimizer state; in norms and softmax; in other activations."""

    weight: int
    wide: int
    narrow: int

    @classmethod
    def of(cls, precision: str, config: ModelConfig) -> "Widths":
        """precision: 32 | bf16-mixed | 16-mixed | bf16-true."""
        if precision == "bf16-true":
            return cls(2, 2 if config.norm == "layernorm" else 4, 2)
        return cls(4, 4, 4 if precision == "32" else 2)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process that trains.

    average: the moving average of the weights. casts: copies of the matrices in the narrow type of mixed precision.
    activations: what the forward pass of a micro-batch keeps. recomputed: what checkpointing brings back of one block.
    logits: of the head, a few rows at a time, with their gradient and that of the head.
    passing: gradients of activations on their way through a block. updating: what the optimizer needs for one matrix.
    peak: the most at once.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    casts: int
    activations: int
    recomputed: int
    logits: int
    passing: int
    updating: int
    peak: int


def activation_bytes(
    config: ModelConfig,
    length: int | None = None,
    checkpointing: str = "none",
    every: int = 1,
    precision: str = "32",
    on_gpu: bool = False,
) -> int:
    """Bytes that one training row of `length` tokens (None: max_seq_len) keeps from its forward for its backward pass.

    The row is one document, the kernel what `auto` takes on a CPU; on a GPU fused kernels drop weights without keeping
    them. With `checkpointing` (none | full | selective) every `every`-th block keeps its input alone, or the results of
    its matrix products too, and the one whose backward pass is running its inside. Gradients of weights, and their
    narrow copies in mixed precision, are not counted.
    """
    return round(sum(_kept_and_recomputed(config, length, checkpointing, every, precision, on_gpu)))


def _kept_and_recomputed(
    config: ModelConfig, length: int | None, checkpointing: str, every: int, precision: str, on_gpu: bool
) -> tuple[float, float]:
    length = config.max_seq_len if length is None else length
    d, widths = config.d_model, Widths.of(precision, config)
    kept = [_block_bytes(config, layer, length, widths, on_gpu) for layer in range(config.n_layers)]
    recomputed = 0.0
    if checkpointing != "none":
        products = _product_bytes(config, length, widths, on_gpu) if checkpointing == "selective" else 0
        for layer in range(0, config.n_layers, every):
            recomputed = max(recomputed, kept[layer] - products)
            kept[layer] = d * widths.wide + products
    # The gradient that the head keeps, what the last norm does, and dropout of the embedding.
    ends = d * widths.wide + (d * widths.wide if config.dropout else 0)
    if config.norm_placement != "post":
        ends += _norm_numbers(config) * widths.wide
    return length * (sum(kept) + ends), length * recomputed


def _norm_numbers(config: ModelConfig) -> int:
    """Numbers that a norm keeps for one token: what it reads, its statistics, and in RMSNorm what the gain scales."""
    return config.d_model + 2 if config.norm == "layernorm" else 2 * config.d_model + 1


def _block_bytes(config: ModelConfig, layer: int, length: int, widths: Widths, on_gpu: bool) -> float:
    """Bytes that one block keeps for each token."""
    d = config.d_model
    norms = {"pre": 2, "post": 2, "sandwich": 4}[config.norm_placement] * _norm_numbers(config)
    numbers = d if config.parallel else 2 * d  # what the matrices behind the norms read; parallel norms read one x
    numbers += (4 if config.gated else 1 if config.activation == "relu" else 2) * config.ff_width
    numbers += 2 * d if config.dropout else 0
    mixer = _softmax_bytes if config.attention.kind == "softmax" else _linear_bytes
    return norms * widths.wide + numbers * widths.narrow + mixer(config, layer, length, widths, on_gpu)


def _keeps_weights(config: ModelConfig, on_gpu: bool) -> bool:
    """Does the kernel keep every attention weight?"""
    written = _written(config) or config.position in ("t5", "transformer_xl")
    return written or (config.dropout > 0 and not on_gpu)


def _written(config: ModelConfig) -> bool:
    """Does `auto` take the written-out equation?"""
    attention = config.attention
    return attention.kernel == "reference" or attention.softcap > 0 or config.position == "shaw"


def _softmax_bytes(config: ModelConfig, layer: int, length: int, widths: Widths, on_gpu: bool) -> float:
    """Queries, keys, values, the output, and what lies between them."""
    attention, h, width = config.attention, config.n_heads, config.n_heads * config.head_width
    narrow, wide = widths.narrow, widths.wide
    qk, projected = width + config.kv_heads * config.head_width, width + 2 * config.kv_heads * config.head_width
    turned, pattern = (
        config.position == "rotary" or attention.qk_norm,
        attention.pattern[layer % len(attention.pattern)],
    )
    heads = h + config.kv_heads
    statistics = heads * (2 if config.norm == "layernorm" else 1) * wide if attention.qk_norm else 0
    if attention.qk_norm and config.norm != "layernorm" and narrow < wide:
        statistics += qk * wide  # the norm reads wide copies
    if attention.qk_gain:
        statistics += qk * wide
    if attention.score_width:
        statistics += width * narrow  # queries are scaled once more
    normed = projected * narrow + statistics if attention.qk_norm else 0
    if _keeps_weights(config, on_gpu):
        # Every weight is kept, in each of its steps: soft-capped, masked (with the mask), dropped.
        written, dropped = _written(config), config.dropout > 0
        weights = (1 + (attention.softcap > 0) + 2 * (dropped and not written)) * wide + (
            1 + dropped
        ) * written * narrow
        kept = h * length * weights + 4 * width * narrow + normed + 2 * length * written
        if config.position == "shaw":
            kept += (width + 2 * (2 * length + 33 * h)) * narrow
        elif config.position == "t5":
            kept += 8 * length
        elif config.position == "transformer_xl":
            kept += 8 * length + (h * length + width) * narrow
        return kept
    if _banded(config, layer, length):
        return (6 * width + h + 2 * attention.window) * narrow + normed
    mask = 0 if pattern == "full" or (pattern == "window" and length <= attention.window) else length
    if config.position == "alibi":
        mask = h * length
    if config.kv_heads < h:  # queries keep what they are a view of, keys and values their repeated copies
        inputs = (qk if turned else projected) * narrow + 2 * width * narrow + normed
    else:
        inputs = (projected + (qk if turned else 0)) * narrow + statistics
    return inputs + (width + mask) * narrow + h * wide


def _linear_bytes(config: ModelConfig, layer: int, length: int, widths: Widths, on_gpu: bool) -> float:
    """Features of queries and keys, the weights inside each chunk, and the state between chunks, all wide."""
    attention, h, width = config.attention, config.n_heads, config.n_heads * config.head_width
    projected = width + 2 * config.kv_heads * config.head_width
    heads, turned = h + config.kv_heads, config.position == "rotary" or attention.qk_norm
    performer = attention.kind == "performer"
    features = h * ((attention.features or 2 * config.head_width) if performer else config.head_width)
    numbers = (2 + max(0, length - CHUNK) / length) * features + features * (config.head_width + 1) / CHUNK
    if performer:
        numbers += 2 * width + 2 * features
    else:
        numbers += (heads * config.head_width if turned else projected) + (width if config.kv_heads < h else 0)
    if attention.qk_gain:
        numbers += heads * config.head_width
    if attention.qk_norm:
        numbers += projected + heads * (2 if config.norm == "layernorm" else 1)
    return 4 * (numbers + CHUNK / 4 + h * CHUNK + 3 * (width + h))


def _product_bytes(config: ModelConfig, length: int, widths: Widths, on_gpu: bool) -> float:
    """Results of the matrix products of a block, which selective checkpointing keeps."""
    d, h, width = config.d_model, config.n_heads, config.n_heads * config.head_width
    numbers = width + 2 * config.kv_heads * config.head_width + width + d + _inner(config) + d
    if config.attention.kind != "softmax":
        features = (config.attention.features or 2 * config.head_width) * h
        features = features if config.attention.kind == "performer" else 0
        return numbers * widths.narrow + 4 * (h * min(length, CHUNK) + 2 * (width + h) + 2 * features)
    weights = h * length * (2 if config.position == "transformer_xl" else 1) if _keeps_weights(config, on_gpu) else h
    return numbers * widths.narrow + weights * widths.wide


def training_memory(
    config: ModelConfig,
    rows: int,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    every: int = 1,
    precision: str = "32",
    accumulates: bool = False,
    average: bool = False,
    on_gpu: bool = False,
    shards: int = 1,
    adapters: int = 0,
    length: int | None = None,
) -> TrainingMemory:
    """Bytes of a process that trains on micro-batches of `rows` rows of `length` tokens (None: max_seq_len).

    optimizer: adamw, which keeps two numbers for each parameter, or muon, which keeps one for the hidden matrices.
    accumulates: gradients of earlier micro-batches are there as the next one begins. average: a moving average of the
        weights is kept. shards: processes that share weights, gradients and optimizer state, of which each brings one
        block at a time, embedding and head together (fsdp). adapters: parameters of low-rank adapters, which alone are
        trained then (0: none). The rest is as in `activation_bytes`.
    """
    length = config.max_seq_len if length is None else length
    widths, d, tokens = Widths.of(precision, config), config.d_model, rows * length
    width, inner = config.n_heads * config.head_width, _inner(config)
    n, hidden = parameter_count(config), hidden_matrix_parameters(config)
    trained, muon = (adapters, adapters) if adapters else (n, hidden)
    assert config.vocab_size is not None
    head = 0 if adapters else 4 * config.vocab_size * d
    # Of some rows the logits and their log_softmax, and the slope of a soft cap.
    chunk = 4 * min(tokens, max(LEAST_ROWS, LOGITS // config.vocab_size)) * config.vocab_size
    logits = chunk * (3 if config.logit_softcap else 2)
    mixing = 4 * width * widths.narrow
    if config.attention.kind == "softmax" and _keeps_weights(config, on_gpu):
        mixing += 2 * config.n_heads * length * widths.wide
    kept, recomputed = _kept_and_recomputed(config, length, checkpointing, every, precision, on_gpu)
    # Newton-Schulz holds five matrices of the largest shape, and five of its shorter side squared.
    shapes = [(d, width + 2 * config.kv_heads * config.head_width), (width, d), (d, inner), (config.ff_width, d)]
    orthogonalising = max(5 * m * k + 5 * min(m, k) ** 2 for m, k in shapes)
    share = widths.weight / shards
    together = (n - hidden + hidden // config.n_layers) * widths.weight if shards > 1 else 0
    memory = dict(
        weights=round((n + adapters) * share) + together,
        gradients=round(trained * share),
        optimizer=round((2 * trained - (muon if optimizer == "muon" else 0)) * share),
        average=round(n * share) if average else 0,
        casts=hidden * widths.narrow if widths.narrow < widths.weight else 0,
        activations=round(rows * kept),
        recomputed=round(rows * recomputed),
        logits=head + max(logits, head),
        passing=head + tokens * (max(inner * widths.narrow, mixing) + 2 * d * widths.wide),
        updating=orthogonalising * 4 if optimizer == "muon" and not adapters else 0,
    )
    # The peak is at the head, in the last block's backward pass, in the first one's, or in the update: between these
    # activations shrink as gradients grow.
    gradients, backward = memory["gradients"], memory["recomputed"] + memory["passing"]
    first = memory["casts"] + memory["activations"] + max(memory["logits"], backward)
    last = gradients - round(muon // config.n_layers * share) + memory["casts"] + backward
    moments = [first + (gradients if accumulates else 0), last, gradients + memory["updating"]]
    return TrainingMemory(**memory, peak=memory["weights"] + memory["optimizer"] + memory["average"] + max(moments))
