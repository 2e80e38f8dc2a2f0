"""Forward and backward of attention alone, ways compared in turn; prints the median ratio of times.

python tests/benchmarks/attention.py
"""

import statistics
import time

import torch

from minitransformer.model.attention import attend
from minitransformer.model.masks import AttentionMask, Mask, causal, window

B, H, D = 1, 4, 64


def step(positions: torch.Tensor, mask: Mask, dense: bool = False) -> float:
    """Seconds of one training step; `dense` forces one boolean mask."""
    q, k, v = (torch.randn(len(positions), H, positions.shape[1], D, requires_grad=True) for _ in range(3))
    start = time.perf_counter()
    attention_mask = AttentionMask(positions, positions.shape[1], mask=mask)
    if dense:
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask.dense)
    else:
        output, _ = attend(q, k, v, attention_mask)
    output.sum().backward()
    return time.perf_counter() - start


def ratio(one, other, rounds: int = 9) -> float:
    one(), other()
    return statistics.median(one() / other() for _ in range(rounds))


def packed_rows(mean: int, rows: int = 8, length: int = 1024) -> torch.Tensor:
    """Rows of documents whose lengths are log-normal with this mean."""
    draw = torch.Generator().manual_seed(0)
    out = []
    for _ in range(rows):
        lengths = (torch.randn(length, generator=draw).mul(0.8).exp() * mean / 1.377).long().clamp(min=1)
        out.append(torch.cat([torch.arange(int(n)) for n in lengths])[:length])
    return torch.stack(out)


def main() -> None:
    row = torch.arange(4096)[None]
    found = ratio(lambda: step(row, window(256)), lambda: step(row, causal))
    print(f"window of 256 at 4,096 tokens takes {found:.2f} of full causal attention's time")
    for mean in (64, 512):
        rows = packed_rows(mean)
        found = ratio(lambda rows=rows: step(rows, causal), lambda rows=rows: step(rows, causal, dense=True))
        print(f"documents of mean length {mean} in rows of 1,024 take {found:.2f} of one boolean mask's time")


if __name__ == "__main__":
    main()
