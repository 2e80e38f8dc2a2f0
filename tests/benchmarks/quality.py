"""What the default run and the tiny Shakespeare recipe reach, and in how many seconds of stepping.

    python tests/benchmarks/quality.py [PATH OF TINY SHAKESPEARE]

nanoGPT's public CPU recipe (4 layers, 4 heads, d_model 128, rows of 64, 12 a step, no dropout) reaches 1.886 after
2,000 steps by its own estimate, and 1.898 over the whole last tenth of the text.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from minitransformer.run.directory import read_metrics
from minitransformer.run.names import latest_run

TRAIN = Path(__file__).parents[2] / "train.py"


def measure(name: str, *overrides: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), "logger=none", "callbacks.progress=false", *overrides]
        output = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
        last = read_metrics(latest_run(Path(folder, "runs")))[-1]
    seconds = re.search(r"[\d,]+ s of stepping", output)[0]
    print("{}: validation loss {val/loss:.4f}, {val/bits_per_byte:.4f} bits per byte, {}".format(name, seconds, **last))


def main() -> None:
    measure("default run")
    for path in sys.argv[1:]:
        for steps in (200, 300, 2000):
            files = f"data.files=[{Path(path).absolute()}]"
            measure(
                f"shakespeare_char, {steps} steps", "experiment=shakespeare_char", files, f"trainer.max_steps={steps}"
            )


if __name__ == "__main__":
    main()
