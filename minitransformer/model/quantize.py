"""Weights in eight bits: a quarter of the memory to read for each token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitransformer.model.product import replace_linears

# torch's kernel reads whole vectors of inputs, and past the end of what is no multiple of them.
VECTOR = 32


class Int8Linear(nn.Module):
    """x W^T + b with W as whole numbers from -127 to 127 and one scale for each output (absmax quantization by rows,
    Dettmers et al. 2022, LLM.int8).

    x is read in bfloat16. On a CPU torch's kernel for such weights takes the products. On CUDA it is far slower than a
    plain product: off the CPU weights become bfloat16, which holds them exactly, for the time of each product.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        # The scale is rounded before the weights are, so that they make up for it; rows of zeros keep a scale.
        scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        whole = (weight / scale.float()[:, None]).round().clamp(-127, 127)
        self.padding = -linear.in_features % VECTOR
        self.register_buffer("weight", F.pad(whole.to(torch.int8), (0, self.padding)))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        flat = F.pad(x.bfloat16().flatten(0, -2), (0, self.padding))
        if x.is_cpu:
            y = torch._weight_int8pack_mm(flat, self.weight, self.scale)
        else:
            y = F.linear(flat, self.weight.bfloat16()) * self.scale
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def quantize_int8(model: nn.Module) -> None:
    """Put an `Int8Linear` in the place of every `nn.Linear`, for inference. Embeddings keep their numbers."""
    replace_linears(model, Int8Linear)
