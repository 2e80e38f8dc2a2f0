"""Every positional encoding read up to four times the length that it was trained on, as a table and a picture.

    python tests/benchmarks/extrapolation.py PATH_OF_TINY_SHAKESPEARE [PICTURE.png]

With a picture, its numbers are kept beside it as PICTURE.json.

One small model by characters for each encoding, 4 layers of 128, 500 steps of 8 rows of 128; the last tenth of the text
is held out and read in stretches of 512. About a minute of one core for each encoding, two for the slowest.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from minitransformer.evaluation.run import draw
from minitransformer.model.config import POSITIONS, SCALINGS

ROOT = Path(__file__).parents[2]
LENGTH, FACTOR = 128, 4
TRAIN = [
    "data=text", "tokenizer=char", "data.files=[train.txt]", "data.val_files=[held_out.txt]", "data.batch_size=8",
    f"model.max_seq_len={LENGTH}", "model.d_model=128", "model.n_layers=4", "model.n_heads=4",
    "optimizer.embedding_lr=0.01", "optimizer.momentum=0.9", "trainer.max_steps=500", "trainer.val_every=500",
    "callbacks.sample_every=0", "callbacks.progress=false", "logger=none",
]  # fmt: skip
EVALUATE = ["data=text", "data.files=[held_out.txt]", "by_position=true", "output=json"]


def command(folder: str, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def measure(text: str) -> dict[str, np.ndarray]:
    """The loss at each position, for each encoding."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        cut = int(len(text) * 0.9)
        for name, part in (("train", text[:cut]), ("held_out", text[cut:])):
            Path(folder, f"{name}.txt").write_text(part, encoding="utf-8")
        for position in POSITIONS:
            begin = time.perf_counter()
            command(folder, str(ROOT / "train.py"), *TRAIN, f"model.position={position}", f"name={position}")
            seconds = time.perf_counter() - begin
            for scaling in SCALINGS if position == "rotary" else ("none",):
                name = position if scaling == "none" else f"{position}, {scaling}"
                factor = 1 if position == "learned" else FACTOR
                words = [*EVALUATE, f"checkpoint=runs/{position}", f"length={factor}x"]
                words += [f"scaling={scaling}"] if scaling != "none" else []
                result = json.loads(command(folder, "-m", "minitransformer.evaluate", *words))
                found[name] = np.array(result["loss_by_position"])
                means = found[name].reshape(factor, LENGTH).mean(1)
                row = [f"{mean:.3f}" for mean in means] + ["-"] * (FACTOR - factor)
                print(f"| {name} | {' | '.join(row)} |  ({seconds:.0f} s of training)", flush=True)
    return found


def main() -> None:
    heads = [f"{i * LENGTH} to {(i + 1) * LENGTH - 1}" for i in range(FACTOR)]
    print(f"| position | {' | '.join(heads)} |\n|---{'|---' * FACTOR}|", flush=True)
    found = measure(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if len(sys.argv) > 2:
        picture = Path(sys.argv[2])
        picture.with_suffix(".json").write_text(json.dumps({name: x.tolist() for name, x in found.items()}))
        draw(picture, found, LENGTH)


if __name__ == "__main__":
    main()
