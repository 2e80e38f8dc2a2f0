"""The decoder-only transformer: embed, blocks, norm, logits. All initialisation is in one function."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from minitransformer.model.cache import KVCache
from minitransformer.model.config import AttentionConfig, ModelConfig
from minitransformer.model.layers import Block, make_norm
from minitransformer.model.masks import (
    AttentionMask,
    Mask,
    causal,
    first,
    fixed,
    prefix,
    random_blocks,
    strided,
    window,
)
from minitransformer.model.positions import ENCODINGS
from minitransformer.model.product import Linear


def make_mask(name: str, config: AttentionConfig) -> Mask:
    """The mask that a pattern's name stands for."""
    if name == "window":
        return window(config.window)
    if name == "bigbird":
        return window(config.window) | first(config.global_tokens) | random_blocks(config.block, config.random_blocks)
    if name == "strided":
        return strided(config.stride)
    if name == "fixed":
        return fixed(config.stride, config.summary)
    return causal


class Transformer(nn.Module):
    """A causal language model (Radford et al. 2018)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set; give the number of token ids")
        self.config = config
        self.compiled = False
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position = ENCODINGS[config.position](config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.Identity() if config.norm_placement == "post" else make_norm(config)
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        names = [config.attention.pattern[i % len(config.attention.pattern)] for i in range(config.n_layers)]
        made = {name: make_mask(name, config.attention) for name in names}
        self.masks = [made[name] for name in names]  # of each layer; layers with one pattern share one object
        initialise(self)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        return_attention: bool = False,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Next-token logits at every place.

        Args:
            tokens: (B, T) ids.
            positions: (B, T), restarting at 0 where a document starts, -1 on padding. None: every row is one
                document, continued from the cache if there is one.
            cache: holds the tokens read before; the new ones are added to it.
            return_attention: also return the weights of every layer, a list of (B, H, T, Tk).
            prefix_lengths: (B, 1), or (B, T) for packed documents: that many first tokens of a document see each
                other both ways (prefix language model, Raffel et al. 2020). With a cache they are read at once.

        Returns:
            logits (B, T, vocab_size), in the dtype of the weights or of autocast.

        Raises:
            ValueError: a row is longer than `max_seq_len`, or shapes disagree.
        """
        x, weights = self.hidden_states(tokens, positions, cache, return_attention, prefix_lengths)
        logits = self.logits(x)
        return (logits, weights) if return_attention else logits

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        return_attention: bool = False,
        prefix_lengths: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """What `logits` reads: the normed residual stream (B, T, d_model), and the weights asked for."""
        attention_masks = self._attention_masks(tokens, positions, cache, prefix_lengths)
        x = self.embedding(tokens)
        if self.config.scale_embedding:
            x = x * self.config.d_model**0.5
        x = self.dropout(self.position.embed(x, attention_masks[0].query_positions))
        attention = dict(position=self.position, cache=cache, return_weights=return_attention)
        if self.compiled:
            for mask in set(attention_masks):
                mask.prepare(self.position, self.config.attention.kernel)
        all_weights = []
        with torch.compiler.set_stance("force_eager") if self.compiled and cache else nullcontext():
            for layer, (block, attention_mask) in enumerate(zip(self.blocks, attention_masks, strict=True)):
                x, weights = block(x, attention_mask, layer=layer, **attention)
                all_weights.append(weights)
        return self.norm(x), all_weights if return_attention else []

    def checkpoint_gradients(self, how: str, every: int = 1) -> None:
        """Let every `every`-th block recompute what `how` says, see `Block`."""
        for number, block in enumerate(self.blocks):
            block.recompute = how if number % every == 0 else "none"

    def compile_blocks(self, **options) -> None:
        """Compile every block in place (`torch.compile`, with its options); parameters keep their names.

        One graph serves all blocks and any documents. Reading with a cache, where each step has another shape,
        stays as it is.
        """
        for block in self.blocks:
            block.compile(**options)
        self.compiled = True

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., d_model) -> (..., vocab_size)."""
        logits = self.head(hidden_states)
        if cap := self.config.logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _check(
        self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None, prefix_lengths: Tensor | None
    ) -> None:
        """Refuse what cannot be read. On a GPU shapes alone are checked: values would make it wait."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; (batch, time) is expected")
        if positions is not None and positions.shape != tokens.shape:
            raise ValueError(f"positions {tuple(positions.shape)} and tokens {tuple(tokens.shape)} disagree in shape")
        total = tokens.shape[1] if cache is None else cache.length + tokens.shape[1]
        # Padding may be counted in where positions are given to a cache.
        if total > self.config.max_seq_len and not self.position.extends and (cache is None or positions is None):
            raise ValueError(f"{total} tokens are more than the model's max_seq_len={self.config.max_seq_len}")
        if prefix_lengths is not None:
            if self.config.attention.kind != "softmax":
                raise ValueError(f"prefix_lengths: model.attention.kind={self.config.attention.kind} is causal only")
            if cache is not None and (cache.length or any(mask is not causal for mask in self.masks)):
                raise ValueError("prefix_lengths with a cache: read the whole prefix at once, with pattern=[full]")
        if tokens.is_cpu and tokens.shape[1] > 1:
            least, most = tokens.aminmax()
            if least < 0 or most >= self.config.vocab_size:
                wrong = least if least < 0 else most
                raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}")
            if positions is not None and cache is None and (where := _broken_position(positions)):
                raise ValueError(f"positions must restart at 0 and go on by one, with -1 for padding: {where}")

    def new_cache(self, batch_size: int, max_length: int | None = None, rolling: bool = True) -> KVCache:
        """An empty cache for `batch_size` rows of at most `max_length` tokens (None: max_seq_len).

        rolling: let layers with a window keep only what it reaches; False where tokens will be taken back.
        """
        weight = self.embedding.weight
        length = self.config.max_seq_len if max_length is None else max_length
        return KVCache(self.config, self.masks, batch_size, length, weight.device, weight.dtype, rolling)

    def _attention_masks(
        self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None, prefix_lengths: Tensor | None
    ) -> list[AttentionMask]:
        """Who sees whom, for each layer; layers with one mask share one object."""
        self._check(tokens, positions, cache, prefix_lengths)
        length = tokens.shape[1]
        plain = cache is None and positions is None
        if cache is not None:
            seen = cache.append_positions(positions, length)
            at, plain = [seen[capacity] for capacity in cache.capacity], cache.plain
        else:
            row = torch.arange(length, device=tokens.device)[None] if positions is None else positions
            at = [row] * len(self.masks)
        if not plain and cache is None:
            plain = None if tokens.device.type == "cpu" and not self.compiled else False
        made: dict[Mask, AttentionMask] = {}
        for mask, key_positions in zip(self.masks, at, strict=True):
            if mask not in made:
                shown = mask if prefix_lengths is None else mask | prefix(prefix_lengths.unsqueeze(-1))
                made[mask] = AttentionMask(
                    key_positions, length, plain, shown, fixed_shapes=self.compiled and cache is None
                )
        return [made[mask] for mask in self.masks]


def _broken_position(positions: Tensor) -> str | None:
    """Say where a row's positions neither go on by one, nor restart at 0, nor are padding; None if nowhere."""
    before = torch.cat((torch.full_like(positions[:, :1], -1), positions[:, :-1]), dim=1)
    broken = (positions > 0) & (positions != before + 1) | (positions < -1)
    if not broken.any():
        return None
    row, column = broken.nonzero()[0].tolist()
    return f"row {row} has {positions[row, column]} at place {column} after {before[row, column]}"


def check_head(config: ModelConfig, layer: int, head: int) -> None:
    """Raise ValueError when there is no such layer or head, naming the range."""
    for name, given, there in (("layer", layer, config.n_layers), ("head", head, config.n_heads)):
        if not 0 <= given < there:
            raise ValueError(f"{name}={given} does not exist; the model has {name}s 0 to {there - 1}")


def get_attention_weights(model: Transformer, tokens: Tensor, layer: int, head: int) -> Tensor:
    """The weights of one head, (B, T, T): rows are queries and sum to 1.

    Raises:
        ValueError: there is no such layer or head.
    """
    check_head(model.config, layer, head)
    with torch.no_grad():
        return model(tokens, return_attention=True)[1][layer][:, head]


@torch.no_grad()
def initialise(model: Transformer) -> None:
    """Fill every parameter as `config.init` says; biases start at 0, gains at 1, learned score biases at 0.

    zero_residual: matrices are uniform with standard deviation 1/sqrt(fan-in); those that write to the residual
        stream, and an untied head, start at zero, so that each block starts as the identity (Zhang et al. 2019,
        Fixup; Yang et al. 2022, muP). Embeddings are normal with standard deviation 1.
    gpt2: normal with standard deviation 0.02; residual outputs divided by sqrt(2 n_layers) (Radford et al. 2019).
    xavier: uniform, variance 2 / (fan-in + fan-out) (Glorot and Bengio 2010); embeddings normal, 1 / sqrt(d_model).
    d_model: normal with standard deviation 1 / sqrt(d_model) everywhere (Vaswani et al. 2017's embeddings).
    A tied embedding is also the head, and is normal with standard deviation 0.02 in zero_residual.
    """
    config = model.config

    def fill(matrix: Tensor, writes: bool = False) -> None:
        if config.init == "gpt2":
            matrix.normal_(std=0.02 / (math.sqrt(2 * config.n_layers) if writes else 1))
        elif config.init == "xavier":
            nn.init.xavier_uniform_(matrix)
        elif config.init == "d_model":
            matrix.normal_(std=config.d_model**-0.5)
        elif writes:
            matrix.zero_()
        else:
            bound = math.sqrt(3 / matrix.shape[1])
            matrix.uniform_(-bound, bound)

    residual = {id(part.output.weight) for block in model.blocks for part in (block.attention, block.feed_forward)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.head:
            if module.bias is not None:
                module.bias.zero_()
            fill(module.weight, writes=id(module.weight) in residual)
    if config.position == "transformer_xl":
        for matrix in model.position.projections:
            fill(matrix)
    stds = {"gpt2": 0.02, "zero_residual": 0.02 if config.tie_embeddings else 1.0}
    std = stds.get(config.init, config.d_model**-0.5)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=std)
    if config.position == "t5":
        model.position.embedding.weight.zero_()
    if not config.tie_embeddings:
        if config.init == "zero_residual":
            model.head.weight.zero_()
        else:
            model.head.weight.normal_(std=std)
