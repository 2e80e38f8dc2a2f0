"""Train decoder-only transformer language models: text in; model, samples and dashboards out."""

from importlib import import_module

# Looked up on first use, so that a command which needs no torch does not wait for it.
_HOME = {
    "ModelConfig": "model.config",
    "Transformer": "model.transformer",
    "KVCache": "model.cache",
    "SelfAttention": "model.attention",
    "MultiHeadAttention": "model.attention",
    "get_attention_weights": "model.transformer",
    "pack_weights": "model.product",
    "scaled_dot_product_attention": "model.attention",
    "sinusoidal_encoding": "model.positions",
    "Tokenizer": "data.tokenizer",
    "load": "run.models",
    "generate": "generation.generate",
    "generate_all": "generation.generate",
    "beam_search": "generation.beam",
    "score": "generation.generate",
}

__all__ = list(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'minitransformer' has no attribute {name!r}")
    return getattr(import_module(f"minitransformer.{_HOME[name]}"), name)
