"""The device and the precision that a setting stands for on this machine, and its memory."""

import ctypes
import re
import sys
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
STATUS = Path("/proc/self/status")


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


def keep_freed_memory() -> None:
    """Let tensors on a CPU take the memory that others of this process have left.

    glibc gives large blocks back to the system by default, which hands out each page again zeroed and by an interrupt:
    thousands in a training step. See mallopt(3); other libraries are left as they are.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.malloc_trim(0)  # what was freed until now, in pieces that may not serve again
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def peak_memory() -> int:
    """Bytes of the machine's memory that this process has held at most; 0 where nothing tells."""
    # On Linux, where getrusage may tell of the process that started this one.
    if found := re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text() if STATUS.exists() else ""):
        return 1024 * int(found[1])
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
