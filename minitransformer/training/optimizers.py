"""Optimizers: Muon for the hidden matrices with AdamW for the rest, and AdamW alone."""

import fnmatch
import re
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from minitransformer.model.product import LEAST, product
from minitransformer.model.transformer import Transformer
from minitransformer.training.config import AdamWConfig, MuonConfig

# Newton-Schulz coefficients of Jordan et al. 2024: singular values go to about 1 in five rounds.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def products(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of each pair: (n, a, c), (n, b, c) -> (n, a, b). Large ones of a CPU one by one, as `product` is faster."""
    if x.is_cpu and x[0].numel() * y.shape[1] >= LEAST:
        return torch.stack([product(*pair) for pair in zip(x, y, strict=True)])
    return x @ y.mT


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1: (n, rows, columns) -> the same (Jordan et al. 2024).

    Runs in bf16 on a GPU and in fp32 on a CPU, whichever is fast there.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = products(x, x)  # x x^T, and symmetric
        x = a * x + products(b * gram + c * products(gram, gram), x.mT)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for groups with `matrix=True`; AdamW for the others, fused, in one optimizer.

    A matrix moves by lr * 0.2 * sqrt(max(m, n)) times a nearly orthogonal matrix, which is as large as a typical
    AdamW step, so both kinds of group take rates of one scale (Jordan et al. 2024; Liu et al. 2025). Weight decay
    is decoupled (Loshchilov and Hutter 2019).

    stacks: parameters that are several matrices of one shape, one above the other, and how many. Each moves by itself.
    """

    def __init__(
        self,
        params,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_steps: int = 5,
        stacks: dict[Tensor, int] | None = None,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum)
        # `fused` lets torch load the `step` of AdamW to the device of its parameter, where the fused kernel needs it.
        super().__init__(params, defaults | dict(ns_steps=ns_steps, matrix=False, fused=True))
        self.stacks = stacks or {}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            (self._step_matrices if group["matrix"] else self._step_adamw)(group, params)
        return loss

    def _step_matrices(self, group: dict, params: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            momentum = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            direction = p.grad.lerp(momentum, group["momentum"])  # Nesterov
            update = self._orthogonal(direction, self.stacks.get(p, 1), group["ns_steps"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update, alpha=-group["lr"])

    def _orthogonal(self, direction: Tensor, n: int, steps: int) -> Tensor:
        """The direction of n matrices, one above the other, each orthogonalised and as large as a step of AdamW."""
        if hasattr(direction, "full_tensor"):  # fsdp: each rank works on the whole, and keeps its shard
            from torch.distributed.tensor import distribute_tensor

            whole = self._orthogonal(direction.full_tensor(), n, steps)
            return distribute_tensor(whole, direction.device_mesh, direction.placements, src_data_rank=None)
        matrices = direction.unflatten(0, (n, -1))
        return orthogonalize(matrices, steps).flatten(0, 1) * (0.2 * max(matrices.shape[1:]) ** 0.5)

    def _step_adamw(self, group: dict, params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = dict(
                    step=torch.zeros((), dtype=torch.float32, device=p.device),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def stacked_matrices(model: Transformer) -> dict[Tensor, int]:
    """The weights of the blocks that are several matrices of one shape, and how many: heads; a gate and its input."""
    found: dict[Tensor, int] = {}
    for block in model.blocks:
        found[block.attention.qkv.weight] = block.attention.n_heads + 2 * block.attention.n_kv_heads
        if block.feed_forward.gated:
            found[block.feed_forward.input.weight] = 2
    return found


def make_optimizer(config: AdamWConfig, model: Transformer) -> torch.optim.Optimizer:
    """The optimizer that `config` names, each parameter in exactly one group with its `name` and peak rate, `peak_lr`.

    Weight decay acts on matrices only. Muon takes the matrices inside the blocks, where each head's queries, keys and
    values are matrices of their own, and so are a feed-forward's gate and input. Tied parameters count once.

    Raises:
        ValueError: a pattern of `config.groups` matches no parameter.
    """
    hidden = {id(p) for p in model.blocks.parameters() if p.ndim == 2}
    untied = None if model.config.tie_embeddings else model.embedding.weight
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for group in config.groups:
        if not fnmatch.filter(parameters, group.pattern):
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in parameters))
            raise ValueError(f"optimizer.groups: {group.pattern} matches no parameter; there are {known}")

    def settings_of(name: str, p: Tensor) -> tuple[str, bool, float, float]:
        """Its group's name, is it Muon's, its peak rate, its weight decay."""
        of, matrix, rate = "adamw", False, config.lr
        if isinstance(config, MuonConfig):
            matrix = id(p) in hidden
            of = "muon" if matrix else "embedding" if p is untied else "adamw"
            rate = {"muon": config.lr, "embedding": config.embedding_lr, "adamw": config.adamw_lr}[of]
        decay = config.weight_decay if p.ndim >= 2 else 0.0
        for group in config.groups:
            if fnmatch.fnmatchcase(name, group.pattern):
                of = group.pattern
                rate = rate if group.lr is None else group.lr
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        return of, matrix, rate, decay

    found: dict[tuple[str, bool, float, float], list[tuple[str, Tensor]]] = {}
    for name, p in parameters.items():
        # Named as in the LightningModule, whose names a checkpoint has.
        found.setdefault(settings_of(name, p), []).append((f"model.{name}", p))
    groups = [
        dict(params=params, name=name, lr=lr, peak_lr=lr, weight_decay=decay, matrix=matrix)
        for (name, matrix, lr, decay), params in found.items()
    ]
    settings = dict(lr=config.lr, betas=tuple(config.betas), eps=config.eps)
    if isinstance(config, MuonConfig):
        stacks = stacked_matrices(model)
        optimizer = Muon(groups, **settings, momentum=config.momentum, ns_steps=config.ns_steps, stacks=stacks)
    else:
        optimizer = torch.optim.AdamW(groups, **settings, fused=True)
        optimizer._step_supports_amp_scaling = False  # else gradients would be clipped before they are unscaled
    optimizer.register_load_state_dict_pre_hook(_with_own_settings)
    return optimizer


def by_name(saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the names of parameters in place of numbers, which depend on groups and on ranks."""
    names: dict[int, str] = {}
    for group in saved["param_groups"]:
        names |= zip(group["params"], group["param_names"], strict=True)
    groups = [group | {"params": group["param_names"]} for group in saved["param_groups"]]
    return {"state": {names[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def _with_own_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved moments with the settings that `optimizer` has; torch itself would take both from the checkpoint."""
    check_resumable(optimizer, saved)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        params = group["param_names"] if _is_by_name(saved) else saved["param_groups"][number]["params"]
        groups.append(group | {"params": params})
    return {"state": saved["state"], "param_groups": groups}


def _is_by_name(saved: dict[str, Any]) -> bool:
    return all(isinstance(name, str) for name in saved["state"])


def check_resumable(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Refuse the state of another optimizer. Other settings of the same optimizer are fine.

    saved: what a checkpoint has in `optimizer_states[0]`.

    Raises:
        ValueError: it is of another optimizer; or it is of an earlier version, and of other groups.
    """
    groups = saved["param_groups"], optimizer.param_groups
    was, now = ("muon" if "ns_steps" in some[0] else "adamw" for some in groups)
    if was != now:
        raise ValueError(f"it was trained with optimizer={was}, not {now}")
    was, now = ([len(group["params"]) for group in some] for some in groups)
    if was != now and not _is_by_name(saved):
        raise ValueError(
            "its checkpoint is of an earlier version, which goes on with the same optimizer.groups alone, and with an "
            "optimizer.weight_decay of 0 where it was 0"
        )
