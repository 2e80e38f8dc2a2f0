"""What a model costs, in closed form from its config alone."""

from minitransformer.model.config import ModelConfig
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
