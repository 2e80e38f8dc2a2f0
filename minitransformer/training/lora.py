"""Low-rank adapters: few trained numbers beside frozen weights, which they are merged into when the model is saved."""

import fnmatch
import re
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitransformer.model.product import Linear
from minitransformer.model.transformer import Transformer
from minitransformer.training.config import LoRAConfig

ADAPTER = re.compile(r"\.lora_(down|up)$")  # what their parameters are called


class LoRALinear(Linear):
    """y = W x + b + scale * B A x, where W and b are frozen (Hu et al. 2021).

    A (rank, in) starts uniform with standard deviation 1 / sqrt(in), B (out, rank) at zero: at first nothing is added.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self.weight, self.bias = base.weight, base.bias
        bound = (3 / base.in_features) ** 0.5
        self.lora_down = nn.Parameter(base.weight.new_empty(rank, base.in_features).uniform_(-bound, bound))
        self.lora_up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_down), self.lora_up)


def add_adapters(model: Transformer, config: LoRAConfig) -> None:
    """Freeze the model and put adapters beside the linear layers that `config.targets` names.

    Raises:
        ValueError: a target matches none.
    """
    layers = {f"blocks.{name}": layer for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)}
    for target in config.targets:
        if not fnmatch.filter(layers, target):
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers))
            raise ValueError(f"lora.targets: {target} matches no linear layer of the blocks; there are {known}")
    model.requires_grad_(False)
    for name, layer in layers.items():
        if any(fnmatch.fnmatchcase(name, target) for target in config.targets):
            model.set_submodule(name, LoRALinear(layer, config.rank, config.scale))


def merged(state: dict[str, Tensor], config: LoRAConfig) -> dict[str, Tensor]:
    """The weights of a plain model that computes the same: W + scale * B A, and no adapters."""
    plain = {name: tensor for name, tensor in state.items() if not ADAPTER.search(name)}
    for name, down in state.items():
        if name.endswith(".lora_down"):
            layer = name.removesuffix(".lora_down")
            weight, up = plain[f"{layer}.weight"], state[f"{layer}.lora_up"]
            plain[f"{layer}.weight"] = (weight.float() + config.scale * up.float() @ down.float()).to(weight.dtype)
    return plain


def fingerprint(model: Transformer) -> str:
    """Names the frozen weights, which a checkpoint of adapters alone does not hold."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    text = "".join(f"{name} {tuple(p.shape)} {torch.hash_tensor(p.detach()).item()}\n" for name, p in frozen)
    return blake2b(text.encode(), digest_size=16).hexdigest()
