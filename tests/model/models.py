"""Small models with every part at work, for the tests."""

import torch
from torch import Tensor

from minitransformer import ModelConfig, Transformer
from minitransformer.model.attention import attend
from minitransformer.model.config import USED_BY, AttentionConfig
from minitransformer.model.masks import AttentionMask

PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
ATTENTION = set(AttentionConfig.__dataclass_fields__)


def make(position: str = "rotary", seed: int = 0, **settings) -> Transformer:
    """A model whose parameters are all random: zeros would hide what a part does. Fields of AttentionConfig may be
    given beside those of ModelConfig."""
    torch.manual_seed(seed)
    settings = dict(vocab_size=50, d_model=32, n_layers=2, n_heads=4, max_seq_len=64) | settings
    attention = AttentionConfig(**{name: settings.pop(name) for name in ATTENTION & set(settings)})
    model = Transformer(ModelConfig(position=position, attention=attention, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def patterned(*pattern: str, **settings: int) -> dict:
    """A pattern, and those of the settings that it uses."""
    used = {name: value for name, value in settings.items() if set(USED_BY[name]) & set(pattern)}
    return {"pattern": list(pattern)} | used


def with_gradients(kernel: str, attention_mask: AttentionMask, qkv: Tensor) -> tuple[Tensor, ...]:
    """Output of `attend` on (3, B, H, T, D), and the gradients of a weighted sum of it."""
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    output, _ = attend(q, k, v, attention_mask, kernel=kernel)
    (output * torch.arange(qkv.shape[-1])).sum().backward()
    return output, q.grad, k.grad, v.grad
