"""Tokens a second of generation, over transformers' `generate` of the same shape; both take turns in one run.

    python tests/benchmarks/generation.py [small|gpt2|int8] ...
    python tests/benchmarks/generation.py bits CHECKPOINT TEXT

fp32, sampled with top_k=50, a prompt of 64 tokens. The first token is timed with the others. `int8` is GPT-2's shape in
eight bits against our own fp32; `bits` is what eight bits cost a trained model, in bits per byte of a text.
"""

import math
import statistics
import sys
import time
from pathlib import Path

import torch

from minitransformer import load
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import keep_freed_memory
from minitransformer.generation.config import Sampling
from minitransformer.generation.decode import generate_rows
from minitransformer.generation.generate import score
from minitransformer.model.config import ModelConfig
from minitransformer.model.product import pack_weights
from minitransformer.model.quantize import quantize_int8
from minitransformer.model.transformer import Transformer

SHAPES = {
    "small": (dict(d_model=256, n_layers=6, n_heads=4, vocab_size=4096, max_seq_len=256), 128),
    "gpt2": (dict(d_model=768, n_layers=12, n_heads=12, vocab_size=50257, max_seq_len=1024), 48),
}


class Ids(Tokenizer):
    """Prompts are ids already, and every id stands for a byte."""

    def __init__(self, vocab_size: int):
        self.bos_id = self.eos_id = vocab_size - 1
        self.token_bytes = [b"x"] * (vocab_size - 1) + [b""]

    def encode(self, text) -> list[int]:
        return text


def ours(shape: dict, n_new: int, rows: int, int8: bool = False):
    config = ModelConfig(
        **shape, position="learned", norm="layernorm", bias=True, tie_embeddings=True, init="gpt2",
        activation="gelu_tanh",
    )  # fmt: skip
    model, tokenizer = Transformer(config).eval(), Ids(shape["vocab_size"])
    if int8:
        quantize_int8(model)
    else:
        pack_weights(model, rows)  # as generate.py does
    prompts = torch.randint(shape["vocab_size"] - 1, (rows, 63)).tolist()
    sampling = Sampling(top_k=50, banned=[tokenizer.eos_id])

    def run() -> None:
        for _ in generate_rows(model, tokenizer, prompts, n_new, sampling, seed=0):
            pass

    return run


def peer(shape: dict, n_new: int, rows: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=shape["d_model"], n_layer=shape["n_layers"], n_head=shape["n_heads"], n_positions=shape["max_seq_len"],
        vocab_size=shape["vocab_size"], bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(1, shape["vocab_size"], (rows, 64))
    settings = dict(do_sample=True, top_k=50, min_new_tokens=n_new, max_new_tokens=n_new, pad_token_id=0)

    def run() -> None:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

    return run


def compare(name: str, ways: dict, n_tokens: int) -> None:
    """Print the median ratio of the second way's times to the first's, and both speeds; they take turns."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(6):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            if round_:
                times[way].append(time.perf_counter() - start)
    first, second = times.values()
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    speeds = ", ".join(f"{way} {n_tokens / statistics.median(found):.0f}" for way, found in times.items())
    print(f"{name}: {ratio:.2f} times; {speeds} tokens/s", flush=True)


def bits_per_byte(model: Transformer, tokenizer: Tokenizer, text: str) -> float:
    """Over stretches that fit the model however few bytes a token has."""
    size = (model.config.max_seq_len - 2) // 4
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    total = sum(sum(score(model, tokenizer, piece).log_probs) for piece in pieces)
    return -total / math.log(2) / len(text.encode())


if __name__ == "__main__":
    keep_freed_memory()  # as generate.py does; the peer gains from it too
    names = sys.argv[1:] or [*SHAPES, "int8"]
    if names[0] == "bits":
        model, tokenizer = load(names[1])
        text = Path(names[2]).read_text(encoding="utf-8")[:50_000]
        exact = bits_per_byte(model, tokenizer, text)
        quantize_int8(model)
        quantized = bits_per_byte(model, tokenizer, text)
        print(f"bits per byte: {exact:.5f}, in eight bits {quantized:.5f}, {quantized - exact:+.5f}")
        sys.exit()
    for name in names:
        shape, n_new = SHAPES["gpt2" if name == "int8" else name]
        for rows in (1, 8):
            if name == "int8":
                ways = {"int8": ours(shape, n_new, rows, int8=True), "fp32": ours(shape, n_new, rows)}
            else:
                ways = {"ours": ours(shape, n_new, rows), "peer": peer(shape, n_new, rows)}
            compare(f"{name}, {rows} rows", ways, rows * n_new)
