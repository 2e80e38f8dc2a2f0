"""What the commands ask of the machine's memory."""

import platform
import subprocess
import sys

import pytest

# Page faults each time that a tensor of 40 MB comes and goes: more than glibc ever keeps by default.
ROUNDS = """
import resource, sys, torch
from minitransformer.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(3): torch.ones(10_000_000)
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
    assert faults["keep"] < 2
