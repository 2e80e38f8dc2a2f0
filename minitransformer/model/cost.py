"""What a model costs, in closed form from its config alone."""

from minitransformer.model.config import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the built model, tied ones once."""
    assert config.vocab_size is not None
    d, bias = config.d_model, int(config.bias)
    attention_out = config.n_heads * config.head_width
    qkv_out = attention_out + 2 * config.kv_heads * config.head_width
    ff_in = config.ff_width * (2 if config.activation == "swiglu" else 1)
    norm = d * (2 if config.norm == "layernorm" and config.bias else 1)
    block = (
        (d + bias) * qkv_out + (attention_out + bias) * d + (d + bias) * ff_in + (config.ff_width + bias) * d + 2 * norm
    )
    embeddings = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    learned = config.max_seq_len * d if config.position == "learned" else 0
    return config.n_layers * block + embeddings + learned + norm
