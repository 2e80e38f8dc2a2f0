"""Tokens a second of generation, over transformers' `generate` of the same shape; both take turns in one run.

    python tests/benchmarks/generation.py [small|gpt2] ...

fp32, sampled with top_k=50, a prompt of 64 tokens. The first token is timed with the others.
"""

import statistics
import sys
import time

import torch

from minitransformer.data.tokenizer import Tokenizer
from minitransformer.generation.config import Sampling
from minitransformer.generation.generate import generate_rows
from minitransformer.model.config import ModelConfig
from minitransformer.model.transformer import Transformer

SHAPES = {
    "small": (dict(d_model=256, n_layers=6, n_heads=4, vocab_size=4096, max_seq_len=256), 128),
    "gpt2": (dict(d_model=768, n_layers=12, n_heads=12, vocab_size=50257, max_seq_len=1024), 48),
}


class Ids(Tokenizer):
    """Prompts are ids already, and every id stands for a byte."""

    def __init__(self, vocab_size: int):
        self.boundary, self.token_bytes = vocab_size - 1, [b"x"] * (vocab_size - 1) + [b""]

    def encode(self, text) -> list[int]:
        return text


def ours(shape: dict, n_new: int, rows: int):
    config = ModelConfig(
        **shape, position="learned", norm="layernorm", bias=True, tie_embeddings=True, init="gpt2",
        activation="gelu_tanh",
    )  # fmt: skip
    model, tokenizer = Transformer(config).eval(), Ids(shape["vocab_size"])
    if rows == 1:
        model.lay_out_for_one_row()  # as generate.py does
    prompts = torch.randint(shape["vocab_size"] - 1, (rows, 63)).tolist()
    sampling = Sampling(top_k=50, banned=[tokenizer.boundary])

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


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        shape, n_new = SHAPES[name]
        for rows in (1, 8):
            ways = {"ours": ours(shape, n_new, rows), "peer": peer(shape, n_new, rows)}
            times: dict[str, list[float]] = {way: [] for way in ways}
            for round_ in range(6):
                for way, run in ways.items():
                    start = time.perf_counter()
                    run()
                    if round_:
                        times[way].append(time.perf_counter() - start)
            ratio = statistics.median(b / a for a, b in zip(times["ours"], times["peer"], strict=True))
            speeds = {way: rows * n_new / statistics.median(found) for way, found in times.items()}
            speed = f"ours {speeds['ours']:.0f}, peer {speeds['peer']:.0f} tokens/s"
            print(f"{name}, {rows} rows: {ratio:.2f} times the peer; {speed}")
