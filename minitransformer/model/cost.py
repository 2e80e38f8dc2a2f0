"""What a model costs, in closed form from its config alone."""

from minitransformer.model.config import ModelConfig
from minitransformer.model.linear import CHUNK
from minitransformer.model.positions import ShawEncoding, T5Encoding


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the built model, tied ones once."""
    d, h, width = config.d_model, config.n_heads, config.head_width
    assert config.vocab_size is not None
    norm = d * (2 if config.norm == "layernorm" and config.bias else 1)
    qkv_bias, output_bias = (
        config.bias if own is None else own for own in (config.attention.qkv_bias, config.attention.output_bias)
    )
    ff_in = config.ff_width * (2 if config.gated else 1)
    block = (
        (d + qkv_bias) * (h + 2 * config.kv_heads) * width
        + (h * width + output_bias) * d
        + (d + config.bias) * ff_in
        + (config.ff_width + config.bias) * d
        + norm * (4 if config.norm_placement == "sandwich" else 2)
        + (2 * width if config.attention.qk_gain else 0)
    )
    position = {
        "learned": config.max_seq_len * d,
        "t5": T5Encoding.n_buckets * h,
        "shaw": 2 * config.n_layers * (2 * ShawEncoding.clip + 1) * width,
        "transformer_xl": 2 * h * width + config.n_layers * d * h * width,
    }
    embeddings = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    final_norm = 0 if config.norm_placement == "post" else norm
    return config.n_layers * block + embeddings + position.get(config.position, 0) + final_norm


def flops_per_token(config: ModelConfig, length: int | None = None, training: bool = False) -> int:
    """Floating-point operations of the matrix products for one token in a row of `length` (None: max_seq_len).

    Attention of softmax is counted over the whole row, as is usual (Chowdhery et al. 2022, appendix B), although a
    causal kernel may do half of it. Training is three times the forward pass.
    """
    length = config.max_seq_len if length is None else length
    assert config.vocab_size is not None
    width, h = config.head_width, config.n_heads
    matrices = config.d_model * (
        (h + 2 * config.kv_heads) * width + h * width + config.ff_width * (3 if config.gated else 2)
    )
    forward = 2 * (config.n_layers * matrices + config.vocab_size * config.d_model)
    if config.attention.kind == "softmax":
        forward += config.n_layers * 4 * h * width * length
    return forward * (3 if training else 1)


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 4) -> int:
    """Bytes of keys and values that one more token adds: none in layers with a full window, or of linear attention."""
    if config.attention.kind != "softmax":
        return 0
    pattern = config.attention.pattern
    growing = sum(pattern[i % len(pattern)] != "window" for i in range(config.n_layers))
    return growing * 2 * config.kv_heads * config.head_width * bytes_per_number


def activation_bytes(
    config: ModelConfig, length: int | None = None, checkpointing: bool = False, bytes_per_number: int = 4
) -> int:
    """Bytes that one training row of `length` tokens (None: max_seq_len) keeps from its forward for its backward pass.

    The row is one document, the kernel what `auto` takes on a CPU. With checkpointing blocks keep their input alone,
    and the one whose backward pass is running its inside too. Gradients of weights are not counted.
    """
    length = config.max_seq_len if length is None else length
    d, inside = config.d_model, [_block_numbers(config, layer, length) for layer in range(config.n_layers)]
    blocks = config.n_layers * d + max(inside) if checkpointing else sum(inside)
    ends = d + (d if config.dropout else 0)  # the gradient that the head keeps, and dropout of the embedding
    if config.norm_placement != "post":
        ends += _norm_numbers(config)
    return round(length * bytes_per_number * (blocks + ends))


def _norm_numbers(config: ModelConfig) -> int:
    """Numbers that a norm keeps for one token: what it reads, its statistics, and in RMSNorm what the gain scales."""
    return config.d_model + 2 if config.norm == "layernorm" else 2 * config.d_model + 1


def _block_numbers(config: ModelConfig, layer: int, length: int) -> float:
    """Numbers that one block keeps for each token."""
    d = config.d_model
    numbers = {"pre": 2, "post": 2, "sandwich": 4}[config.norm_placement] * _norm_numbers(config)
    numbers += d if config.parallel else 2 * d  # what the matrices behind the norms read; parallel norms read one x
    numbers += (4 if config.gated else 1 if config.activation == "relu" else 2) * config.ff_width
    numbers += 2 * d if config.dropout else 0
    mixer = _softmax_numbers if config.attention.kind == "softmax" else _linear_numbers
    return numbers + mixer(config, layer, length)


def _softmax_numbers(config: ModelConfig, layer: int, length: int) -> float:
    """Queries, keys, values, the output, and what lies between them."""
    attention, h, width = config.attention, config.n_heads, config.n_heads * config.head_width
    qk, projected = width + config.kv_heads * config.head_width, width + 2 * config.kv_heads * config.head_width
    turned, pattern = (
        config.position == "rotary" or attention.qk_norm,
        attention.pattern[layer % len(attention.pattern)],
    )
    statistics = (h + config.kv_heads) * (2 if config.norm == "layernorm" else 1) if attention.qk_norm else 0
    normed = projected + statistics + (qk if attention.qk_gain else 0) if attention.qk_norm else 0
    written = attention.kernel == "reference" or attention.soft_cap > 0 or config.position == "shaw"
    if written or config.dropout or config.position in ("t5", "transformer_xl"):
        # Every weight is kept, in each of its steps: soft-capped, masked (with the mask), dropped.
        steps = 1 + written + (attention.soft_cap > 0) + (config.dropout > 0) * (1 if written else 2)
        numbers = 4 * width + h * length * steps + (length / 2 if written else 0) + normed
        if config.position == "shaw":
            numbers += width + 2 * (2 * length + 33 * h)
        elif config.position == "t5":
            numbers += 2 * length
        elif config.position == "transformer_xl":
            numbers += 2 * length + h * length + width
        return numbers
    if pattern == "window" and length >= 4 * attention.window:
        return 6 * width + h + 2 * attention.window + normed
    mask = 0 if pattern == "full" or (pattern == "window" and length <= attention.window) else length
    if config.position == "alibi":
        mask = h * length
    if config.kv_heads < h:  # queries keep what they are a view of, keys and values their repeated copies
        inputs = (qk if turned else projected) + 2 * width + normed
    else:
        inputs = projected + (qk if turned else 0) + statistics + (qk if attention.qk_gain else 0)
    return inputs + width + h + mask


def _linear_numbers(config: ModelConfig, layer: int, length: int) -> float:
    """Features of queries and keys, the weights inside each chunk, and the state between chunks."""
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
    return numbers + CHUNK / 4 + h * CHUNK + 3 * (width + h)
