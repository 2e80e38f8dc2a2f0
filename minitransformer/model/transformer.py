"""The decoder-only transformer: embed, blocks, norm, logits. All initialisation is in one function."""

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minitransformer.model.cache import KVCache
from minitransformer.model.config import ModelConfig
from minitransformer.model.layers import Block, make_norm
from minitransformer.model.masks import Visibility
from minitransformer.model.positions import ENCODINGS


class Transformer(nn.Module):
    """A causal language model (Radford et al. 2018).

    gradient_checkpointing: recompute each block in the backward pass instead of keeping its
        activations (Chen et al. 2016). Changes memory and time, never the result.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set; give the number of token ids")
        self.config = config
        self.gradient_checkpointing = False
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position = ENCODINGS[config.position](config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        initialise(self)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Next-token logits at every place.

        Args:
            tokens: (B, T) ids.
            positions: (B, T), restarting at 0 where a document starts, -1 on padding. None: every row is one
                document, continued from the cache if there is one.
            cache: holds the tokens read before; the new ones are added to it.
            return_attention: also return the weights of every layer, a list of (B, H, T, Tk).

        Returns:
            logits (B, T, vocab_size), in the dtype of the weights or of autocast.

        Raises:
            ValueError: a row is longer than `max_seq_len`, or shapes disagree.
        """
        x, weights = self.features(tokens, positions, cache, return_attention)
        logits = self.logits(x)
        return (logits, weights) if return_attention else logits

    def features(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """What `logits` reads: the normed residual stream (B, T, d_model), and the weights asked for."""
        visibility = self._visibility(tokens, positions, cache)
        x = self.dropout(self.position.embed(self.embedding(tokens), visibility.query_positions))
        attention = dict(
            rotation=self.position.rotation(visibility.query_positions),
            bias=self.position.bias(visibility.query_positions, visibility.key_positions),
            cache=cache,
            return_weights=return_attention,
        )
        all_weights = []
        for layer, block in enumerate(self.blocks):
            if self.gradient_checkpointing and self.training:
                x, weights = checkpoint(block, x, visibility, layer=layer, use_reentrant=False, **attention)
            else:
                x, weights = block(x, visibility, layer=layer, **attention)
            all_weights.append(weights)
        return self.norm(x), all_weights if return_attention else []

    def logits(self, features: Tensor) -> Tensor:
        """(..., d_model) -> (..., vocab_size)."""
        logits = self.head(features)
        if cap := self.config.logit_soft_cap:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def new_cache(self, batch_size: int, max_length: int | None = None) -> KVCache:
        """An empty cache for `batch_size` rows of at most `max_length` tokens (None: max_seq_len)."""
        weight = self.embedding.weight
        length = self.config.max_seq_len if max_length is None else max_length
        return KVCache(self.config, batch_size, length, device=weight.device, dtype=weight.dtype)

    def _visibility(self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None) -> Visibility:
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; (batch, time) is expected")
        if positions is not None and positions.shape != tokens.shape:
            raise ValueError(f"positions {tuple(positions.shape)} and tokens {tuple(tokens.shape)} disagree in shape")
        length = tokens.shape[1]
        total = length if cache is None else cache.length + length
        # Shapes alone are checked: looking at positions would wait for the GPU. Padding may be counted in.
        if total > self.config.max_seq_len and not self.position.extends and (cache is None or positions is None):
            raise ValueError(f"{total} tokens are more than the model's max_seq_len={self.config.max_seq_len}")
        if cache is not None:
            return Visibility(cache.append_positions(positions, length), length, plain=cache.plain)
        if positions is None:
            return Visibility(torch.arange(length, device=tokens.device)[None], length, plain=True)
        return Visibility(positions, length, plain=None if tokens.device.type == "cpu" else False)


@torch.no_grad()
def initialise(model: Transformer) -> None:
    """Fill every parameter as `config.init` says.

    zero_residual: matrices are uniform with standard deviation 1/sqrt(fan-in); those that write to the residual
        stream, and an untied head, start at zero, so that each block starts as the identity (Zhang et al. 2019,
        Fixup; Yang et al. 2022, muP). Embeddings are normal with standard deviation 1 (0.02 if tied).
    gpt2: normal with standard deviation 0.02; residual outputs divided by sqrt(2 n_layers) (Radford et al. 2019).
    """
    config = model.config
    residual = {id(part.output.weight) for block in model.blocks for part in (block.attention, block.feed_forward)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if module.bias is not None:
                module.bias.zero_()
            if config.init == "gpt2":
                shrink = math.sqrt(2 * config.n_layers) if id(module.weight) in residual else 1.0
                module.weight.normal_(std=0.02 / shrink)
            elif id(module.weight) in residual or module is model.head:
                module.weight.zero_()
            else:
                bound = math.sqrt(3 / module.in_features)
                module.weight.uniform_(-bound, bound)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.02 if config.init == "gpt2" or config.tie_embeddings else 1.0)
    if config.tie_embeddings:
        model.embedding.weight.normal_(std=0.02)
