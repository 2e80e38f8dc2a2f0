"""How many rows to take at a time: what fits into memory, and what is fastest."""

import time
from contextlib import nullcontext
from itertools import count

import torch
from rich.console import Console

from minitransformer.data.rows import Batch
from minitransformer.training.module import LanguageModel


def find_batch_size(module: LanguageModel, device: torch.device, precision: str, length: int, console: Console) -> int:
    """Train on 1, 2, 4, ... rows of random tokens at a time, and print how fast and how large each is.

    It ends when memory does, or when doubling twice gains less than 5 %. Returns the fewest rows within 5 % of the
    fastest. The weights are of no use afterwards.

    Raises:
        ValueError: a single row does not fit.
    """
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    module.to(device=device, dtype=torch.bfloat16 if precision == "bf16-true" else None)
    optimizer = module.configure_optimizers()
    speeds: dict[int, float] = {}

    def step(rows: int) -> None:
        tokens = torch.randint(module.tokenizer.vocab_size, (rows, length + 1), device=device)
        positions = torch.arange(length, device=device).expand(rows, -1)
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            loss, _ = module.loss_sums(Batch(tokens[:, :-1], positions, tokens[:, 1:], rows * length))
        (loss / (rows * length)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    console.print(f"rows of {length} at a time    tokens/s    peak memory")
    for rows in (2**n for n in count()):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            step(rows)  # to warm up
            start = time.perf_counter()
            for _ in range(3):
                step(rows)
        except torch.OutOfMemoryError:
            console.print(f"{rows:>{20 + len(str(length))}}    does not fit")
            break
        speeds[rows] = 3 * rows * length / (time.perf_counter() - start)
        memory = module.peak_memory() / 1e9
        console.print(f"{rows:>{20 + len(str(length))}}    {speeds[rows]:8,.0f}    {memory:8.2f} GB")
        if rows >= 4 and speeds[rows] < 1.05 * speeds[rows // 4]:
            break
    if not speeds:
        raise ValueError(
            f"not even one row of {length} tokens fits; see trainer.gradient_checkpointing, or a smaller model"
        )
    best = next(rows for rows, speed in speeds.items() if speed > max(speeds.values()) / 1.05)
    batch = module.config.data.batch_size
    console.print(
        f"{best} rows at a time are enough: data.batch_size={best}, or for data.batch_size={batch} as it is "
        f"trainer.accumulate={-(-batch // best)}",
        style="bold",
    )
    return best
