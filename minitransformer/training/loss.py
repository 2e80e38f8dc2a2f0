"""Cross-entropy of the head without a full table of logits."""

import torch
from torch import Tensor

from minitransformer.data.packing import IGNORE
from minitransformer.model.cost import LEAST_ROWS, LOGITS
from minitransformer.model.product import product, weight_gradient


class _HeadCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one sweep over chunks of places, as in Wijmans et al. 2025 and Liger (Hsu et al. 2024)."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, cap: float, smoothing: float, z: float
    ) -> tuple[Tensor, Tensor]:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        exact = torch.promote_types(dtype, torch.float32)
        w = weight.to(dtype)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        loss, objective = torch.zeros(2, dtype=exact, device=x.device).unbind()
        rows = max(LEAST_ROWS, LOGITS // len(weight))
        for start in range(0, len(x), rows):
            chunk, target = x[start : start + rows].to(dtype), targets[start : start + rows]
            kept = (target != IGNORE).unsqueeze(-1)
            target = target.clamp(min=0).unsqueeze(-1)
            with torch.autocast(kind, enabled=False):
                logits = product(chunk, w).to(exact)  # (rows, V)
                if cap:
                    slope = logits.div_(cap).tanh_().square().neg_().add_(1)
                    logits *= cap
                log_p = logits.log_softmax(-1)
                normaliser = logits[:, :1] - log_p[:, :1]
                del logits
                nats = -log_p.gather(-1, target)
                loss += (nats * kept).sum()
                if smoothing or z:
                    spread = -log_p.mean(-1, keepdim=True)  # against the uniform distribution
                    extra = smoothing * (spread - nats) + z * normaliser.square()
                    objective += (extra * kept).sum()
                if grad_x is None and grad_w is None:
                    continue
                grad = log_p.exp_()  # softmax, then softmax minus one at the target
                if z:
                    grad *= 1 + 2 * z * normaliser
                if smoothing:
                    grad -= smoothing / len(weight)
                grad.scatter_add_(-1, target, torch.full_like(nats, smoothing - 1))
                grad *= kept
                if cap:
                    grad *= slope
                grad = grad.to(dtype)
                if grad_x is not None:
                    grad_x[start : start + rows] = product(grad, w.T)
                if grad_w is not None:
                    grad_w += weight_gradient(grad, chunk)
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight.dtype))
        ctx.mark_non_differentiable(loss)
        return objective + loss, loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        grad_x, grad_w = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * grad_loss.to(grad_x.dtype),
            None if grad_w is None else grad_w * grad_loss.to(grad_w.dtype),
            *[None] * 4,
        )


def head_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What is minimised, and the summed cross-entropy in nats, of the logits x @ weight.T (soft-capped if asked for).

    x: (N, d_model); weight: (V, d_model); targets: (N,) ids, or IGNORE where a place does not count. Both sums are at
    least in fp32; only the first has a gradient. It is the cross-entropy against targets smoothed with the uniform
    distribution (Szegedy et al. 2016), plus `z_loss` times the squared log-normaliser (Chowdhery et al. 2022). Under
    autocast the products run in its dtype, the softmax in fp32. Memory is that of a few rows of logits, whatever N.
    """
    return _HeadCrossEntropy.apply(x, weight, targets, softcap, label_smoothing, z_loss)
