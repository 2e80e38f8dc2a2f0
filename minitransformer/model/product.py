"""Products with weight matrices. On a CPU torch has two libraries for them, and uses the slower one in fp32."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.utils.flop_counter import register_flop_formula

# oneDNN, which torch takes for lower precisions and compiled models alone; MKL is half as fast in fp32 on AMD's CPUs.
CAPABLE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and torch.backends.mkldnn.is_available()
ONEDNN = torch.ops.mkldnn._linear_pointwise if CAPABLE else None
LEAST = 2**21  # multiplications that outweigh what a call of it costs more
LEAST_PACKED = {"row": 2**21, "rows": 2**17}  # weights that it reads faster, for a single row and for several
LEAST_SLICE = 2**15  # weights that are worth a thread


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return ONEDNN(x, weight, bias, "none", [], "")


if ONEDNN is not None:
    # torch's compiler takes oneDNN's operator for weights alone that never change, and this one for any.
    library.define("minitransformer::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("minitransformer::linear", "CPU", _onednn)
    library.register_fake("minitransformer::linear", lambda x, weight, _: x.new_empty(*x.shape[:-1], weight.shape[0]))

    @register_flop_formula([ONEDNN, torch.ops.minitransformer.linear])
    def _flops(x_shape, weight_shape, *_, out_shape=None, **__) -> int:
        return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


class _Product(torch.autograd.Function):
    """x W^T + b by oneDNN: (N, d_in), (d_out, d_in), (d_out,) -> (N, d_out)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if not x.is_contiguous():
            x = x[None].contiguous()[0]  # as three dimensions, since torch turns two by one thread
        if torch.compiler.is_compiling():
            return torch.ops.minitransformer.linear(x, weight, bias)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (for_x, for_weight, for_bias), grad = ctx.saved_tensors, ctx.needs_input_grad, grad.contiguous()
        return (
            product(grad, weight.t()) if for_x else None,
            weight_gradient(grad, x) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """(N, d_out), (N, d_in) -> (d_out, d_in). oneDNN copies what comes first, so that is the narrower of the two."""
    return product(grad.t(), x.t()) if grad.shape[1] <= x.shape[1] else product(x.t(), grad.t()).t()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `F.linear`: (..., d_in), (d_out, d_in) -> (..., d_out)."""
    if (
        x.numel() * weight.shape[0] < LEAST  # asked first, as it decides for most single tokens
        or ONEDNN is None
        or x.device.type != "cpu"
        or type(weight) not in (Tensor, nn.Parameter)  # such as the shards of fsdp
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x, weight, bias)
    return _Product.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


class Linear(nn.Linear):
    """`nn.Linear`, whose products are taken by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return product(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A `Linear` for inference, whose weights lie in the blocks that oneDNN reads."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        # Blocks made for 8 rows serve any number of them well, and those made for one row do not.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return _onednn(x, self.weight, self.bias)


class SlicedLinear(nn.Module):
    """A `Linear` for inference with single rows: each thread has a slice of its outputs, stored column by column.

    Products of a matrix and one vector are left to one thread by MKL; products of many matrices are shared out.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        threads = min(torch.get_num_threads(), max(1, linear.weight.numel() // LEAST_SLICE))
        slices = math.gcd(linear.out_features, threads)
        weight = linear.weight.detach().unflatten(0, (slices, -1))
        self.weight = weight.transpose(1, 2).contiguous()  # (slices, d_in, d_out / slices)
        self.bias = None if linear.bias is None else linear.bias.detach().view(slices, 1, -1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        slices, d_in, _ = self.weight.shape
        if x.numel() == d_in:
            row = x.expand(slices, 1, d_in)
            out = row.bmm(self.weight) if self.bias is None else torch.baddbmm(self.bias, row, self.weight)
            return out.view(*x.shape[:-1], -1)
        out = torch.cat([product(x, part.t()) for part in self.weight], dim=-1)
        return out if self.bias is None else out + self.bias.flatten()


def replace_linears(model: nn.Module, replacement: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what `replacement` makes of each `nn.Linear` in its place, one by one, so that the old is freed at once."""
    for module in [part for part in model.modules() if not isinstance(part, nn.Linear)]:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, replacement(child))


@torch.no_grad()
def pack_weights(model: nn.Module, rows: int) -> None:
    """Store the matrices of a model as a CPU reads them fastest, for inference with `rows` tokens at a time.

    Large ones become `PackedLinear`; small ones become `SlicedLinear` for a single row, and stay for several. Values
    stay, but the model can be neither trained nor saved any more, and a head that was tied to the embedding is held
    beside it.
    """
    least = LEAST_PACKED["row" if rows == 1 else "rows"]

    def packed(linear: nn.Linear) -> nn.Module:
        weight = linear.weight
        if not weight.is_cpu or weight.dtype != torch.float32:
            return linear
        if ONEDNN is not None and weight.numel() >= least:
            return PackedLinear(linear)
        return SlicedLinear(linear) if rows == 1 else linear

    replace_linears(model, packed)
