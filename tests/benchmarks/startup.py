"""Seconds from the start of a process to its first optimizer step, with a warm file cache and a tokenised corpus.

python tests/benchmarks/startup.py [RUNS]
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).parents[2] / "train.py"


def first_step(folder: str, *overrides: str) -> float:
    """Run two steps of the default config; the progress line of step 1 marks the moment."""
    start = time.perf_counter()
    command = [
        sys.executable,
        "-u",
        str(TRAIN),
        "trainer.max_steps=2",
        "trainer.log_every=1",
        "callbacks.sample_every=0",
    ]
    with subprocess.Popen([*command, *overrides], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                seconds = time.perf_counter() - start
        if process.wait():
            sys.exit("the run failed")
    return seconds


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for logger in ("wandb", "none"):
        with tempfile.TemporaryDirectory() as folder:
            first_step(folder, f"logger={logger}")  # fills the caches
            seconds = [first_step(folder, f"logger={logger}") for _ in range(runs)]
        middle = statistics.median(seconds)
        print(f"logger={logger}: median {middle:.1f} s of {runs} runs, {min(seconds):.1f} to {max(seconds):.1f}")


if __name__ == "__main__":
    main()
