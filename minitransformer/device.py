"""The device and the precision that a setting stands for on this machine."""

import torch


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU.

    Raises:
        ValueError: the named device is not on this machine.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        works = ", ".join(kind for kind, there in available.items() if there)
        raise ValueError(f"device={name} is not available on this machine; here work: auto, {works}")
    return torch.device(name)


def choose_precision(name: str, device: torch.device) -> str:
    """`auto` takes bf16-mixed on a GPU that computes in bf16, and 32 elsewhere. Returns Lightning's name for it.

    Raises:
        ValueError: the device lacks it.
    """
    if name == "16-mixed" and device.type != "cuda":
        raise ValueError(f"trainer.precision=16-mixed is for GPUs; on {device.type} use bf16-mixed or 32")
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16-mixed" if fast else "32-true"
    return "32-true" if name == "32" else name
