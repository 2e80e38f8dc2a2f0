"""What the commands ask of the machine's memory, and what they say of it."""

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from minitransformer import device

# Page faults each time that a tensor of 40 MB comes and goes: more than glibc ever keeps by default.
ROUNDS = """
import resource, sys, torch
from minitransformer.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(10): torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): torch.ones(10_000_000)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_serves_the_next_tensors():
    faults = {
        how: float(subprocess.run([sys.executable, "-c", ROUNDS, how], capture_output=True, check=True).stdout)
        for how in ("keep", "default")
    }
    assert faults["default"] >= 19  # pages of 2 MB; of 4 KB there are 9,766
    assert faults["keep"] < faults["default"] / 4  # it may take a few places before it settles


CHILD = "from minitransformer.device import peak_memory; block = b'x' * {size}; print(peak_memory())"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a parent leaves behind is Linux's")
def test_the_memory_of_a_process_is_not_its_parents():
    """A child that takes 256 MB beside Python and torch, of a parent that holds a gigabyte more than that."""
    parent = "import subprocess, sys; held = b'x' * 2**30; subprocess.run([sys.executable, '-c', sys.argv[1]])"

    def peak(size):
        command = [sys.executable, "-c", parent, CHILD.format(size=size)]
        return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    small, large = peak(1), peak(2**28)
    assert 2**26 < small < 2**30
    assert large - small == pytest.approx(2**28, rel=0.1)


@pytest.mark.parametrize("status", [None, "VmRSS: 5 kB"])
@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_elsewhere_it_is_what_getrusage_says_in_its_unit(monkeypatch, tmp_path, system, unit, status):
    monkeypatch.setattr(device, "STATUS", tmp_path / "status")
    if status:
        device.STATUS.write_text(status)
    monkeypatch.setattr(sys, "platform", system)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert device.peak_memory() == pytest.approx(kilobytes * unit, rel=0.1)


# Dense bf16 (T4: fp16) operations a second of the makers' data sheets, in 10^12, by the names that drivers report.
PEAKS = {
    "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 NVL": 835, "NVIDIA H100 PCIe": 756,
    "NVIDIA B200": 2250, "NVIDIA GH200 480GB": 989, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71, "NVIDIA GeForce RTX 5090": 210, "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX A6000": 155, "NVIDIA A10": 125, "Tesla T4": 65, "AMD Instinct MI300X": 1307,
    "NVIDIA A10G": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA L40": None, "Quadro T400": None,
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_a_gpu_is_known_by_its_name(name):
    found = device.known_device(name)
    assert (None if found is None else found.half) == PEAKS[name]
