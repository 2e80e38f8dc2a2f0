"""The device and the precision that a setting stands for on this machine, and its memory."""

import ctypes
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Device:
    """A device to train on.

    memory: GB. half, full: dense operations a second at most, in 10^12, of matrix products in bf16 and in fp32.
    pattern: is found in the name that torch has for it; None for a CPU.
    bf16: where it is missing, train.py trains in fp32 unless trainer.precision=16-mixed; `half` is of fp16 then.
    """

    memory: float
    half: float
    full: float
    pattern: str | None
    bf16: bool = True


# From the makers' data sheets, without sparsity; the laptop's are those of 8 cores with AVX2 and half of 32 GB.
DEVICES = {
    "laptop-cpu": Device(16, 0.5, 0.5, None, bf16=False),
    "t4": Device(16, 65, 8.1, r"\bT4$", bf16=False),
    "rtx3090": Device(24, 71, 35.6, r"RTX 3090$"),
    "rtx4090": Device(24, 165, 82.6, r"RTX 4090$"),
    "rtx5090": Device(32, 210, 104.8, r"RTX 5090$"),
    "a6000": Device(48, 155, 38.7, r"RTX A6000$"),
    "6000-ada": Device(48, 364, 91.1, r"RTX 6000 Ada"),
    "a10": Device(24, 125, 31.2, r"\bA10$"),
    "l4": Device(24, 121, 30.3, r"\bL4$"),
    "l40s": Device(48, 362, 91.6, r"\bL40S$"),
    "a100-40gb": Device(40, 312, 19.5, r"\bA100.*40GB"),
    "a100-80gb": Device(80, 312, 19.5, r"\bA100.*80GB"),
    "h100": Device(80, 989, 67, r"\bH100 80GB HBM3"),
    "h100-pcie": Device(80, 756, 51, r"\bH100 PCIe"),
    "h100-nvl": Device(94, 835, 60, r"\bH100 NVL"),
    "gh200": Device(96, 989, 67, r"\bGH200 480GB"),
    "h200": Device(141, 989, 67, r"\bH200$"),
    "b200": Device(180, 2250, 75, r"\bB200$"),
    "mi300x": Device(192, 1307, 163.4, r"\bMI300X"),
}


def known_device(name: str) -> Device | None:
    """The device that torch calls `name`; None where the table lacks it."""
    known = (device for device in DEVICES.values() if device.pattern is not None)
    return next((device for device in known if re.search(device.pattern, name)), None)


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


def total_memory() -> float:
    """Bytes of the machine's memory; without end where nothing tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # as on Windows
        return math.inf


def peak_memory() -> int:
    """Bytes of the machine's memory that this process has held at most; 0 where nothing tells."""
    # On Linux, where getrusage may tell of the process that started this one.
    if found := re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text() if STATUS.exists() else ""):
        return 1024 * int(found[1])
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
