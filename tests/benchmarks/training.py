"""Training speed on this machine, in ratios of runs that take turns.

    python tests/benchmarks/training.py [loop|peer|packing|checkpointing] ...

loop: Lightning's loop with bar and logs around our step, over a bare PyTorch loop of the same step.
peer: our step over that of transformers' GPT2LMHeadModel of the same shape, plain and compiled (fused AdamW, gelu).
packing: useful tokens/s on documents of log-normal length, packed, over one padded row a document.
checkpointing: memory and time of gradient checkpointing at 12 layers and rows of 1,024.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from minitransformer.data.packing import Documents, TokenStream
from minitransformer.data.rows import Batch, StepNumbers, TrainingSteps
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import keep_freed_memory
from minitransformer.model.config import ModelConfig
from minitransformer.model.cost import activation_bytes
from minitransformer.model.transformer import Transformer
from minitransformer.training.callbacks import Bar
from minitransformer.training.config import AdamWConfig, ConstantConfig, TrainConfig, TrainerConfig
from minitransformer.training.logging import RunFiles
from minitransformer.training.module import LanguageModel

SHAPES = {
    "small": dict(n_layers=4, d_model=128, n_heads=4, vocab_size=65, max_seq_len=64, rows=12),
    "medium": dict(n_layers=6, d_model=384, n_heads=6, vocab_size=65, max_seq_len=256, rows=8),
}


def gpt2_like(rows: int, **shape) -> ModelConfig:
    """GPT-2's parts: what the peer has too."""
    return ModelConfig(
        **shape, position="learned", norm="layernorm", bias=True, tie_embeddings=True, init="gpt2", activation="gelu"
    )  # fmt: skip


def module_of(config: ModelConfig, **trainer) -> LanguageModel:
    settings = TrainConfig(
        model=config, data=SimpleNamespace(batch_size=1024), optimizer=AdamWConfig(), schedule=ConstantConfig(),
        trainer=TrainerConfig(max_steps=10**9, val_every=10**9, **trainer),
    )  # fmt: skip
    torch.manual_seed(0)
    return LanguageModel(Transformer(config), Tokenizer.bytes(), settings, 1)


def batches(rows: int, length: int, vocab_size: int, documents: np.ndarray | None = None) -> TrainingSteps:
    """Random tokens in whole rows, or in packed documents of the given lengths."""
    lengths = np.full(400, length - 1) if documents is None else documents
    tokens = np.random.default_rng(0).integers(0, vocab_size, int(lengths.sum()) + len(lengths) + 1)
    return TrainingSteps(TokenStream(tokens, 0, 0), Documents.of(lengths), length, rows, seed=0)


def our_step(module: LanguageModel) -> Callable[[Batch], None]:
    """The same work without Lightning."""
    optimizer = module.configure_optimizers()

    def step(batch: Batch) -> None:
        (module.loss_sums(batch)[0] / batch.step_targets).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer_step(shape: dict, compiled: bool) -> Callable[[Batch], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=shape["d_model"], n_layer=shape["n_layers"], n_head=shape["n_heads"], n_positions=shape["max_seq_len"],
        vocab_size=shape["vocab_size"], resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, activation_function="gelu",
        attn_implementation="sdpa", use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: Batch) -> None:
        logits = run(input_ids=batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_turns(ways: dict[str, Callable[[], None]], rounds: int = 7) -> dict[str, float]:
    """Median seconds of each; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def in_bf16(step: Callable[[Batch], None]) -> Callable[[Batch], None]:
    """As `trainer.precision=bf16-mixed`: for CPUs with bf16 instructions."""

    def run(batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step(batch)

    return run


def steps_of(step: Callable[[Batch], None], steps: TrainingSteps, n: int) -> Callable[[], None]:
    def run() -> None:
        for number in range(n):
            step(steps[number])

    return run


def speeds(ways: dict[str, Callable[[Batch], None]], steps: TrainingSteps, n: int) -> dict[str, float]:
    """Tokens/s of each way of making a step, in turns of n steps."""
    tokens = n * steps[0].tokens.numel()
    return {way: tokens / took for way, took in in_turns({w: steps_of(s, steps, n) for w, s in ways.items()}).items()}


def peer() -> None:
    for name, shape in SHAPES.items():
        n = 60 if name == "small" else 3
        steps = batches(shape["rows"], shape["max_seq_len"], shape["vocab_size"])
        exact = {
            "ours": our_step(module_of(gpt2_like(**shape))),
            "ours compiled": our_step(module_of(gpt2_like(**shape), compile=True)),
            "peer": peer_step(shape, False),
            "peer compiled": peer_step(shape, True),
        }
        exact = speeds(exact, steps, n)
        bf16 = {
            "ours in bf16": in_bf16(our_step(module_of(gpt2_like(**shape)))),
            "peer in bf16": in_bf16(peer_step(shape, False)),
        }
        bf16 = speeds(bf16, steps, n)  # apart: six models in one process slow each other down
        ratio = max(exact["ours"], exact["ours compiled"]) / max(exact["peer"], exact["peer compiled"])
        found = ", ".join(f"{way} {speed:,.0f}" for way, speed in (exact | bf16).items())
        print(f"{name}: {ratio:.2f} times the peer's best; tokens/s: {found}")


def loop() -> None:
    for name, shape in SHAPES.items():
        n = 100 if name == "small" else 4
        steps = batches(shape["rows"], shape["max_seq_len"], shape["vocab_size"])
        config = gpt2_like(**shape)
        ours = our_step(module_of(config))
        with tempfile.TemporaryDirectory() as folder, open(Path(folder, "bar"), "w") as file:
            trainer = pl.Trainer(
                accelerator="cpu", max_epochs=-1, max_steps=10**9, logger=RunFiles(Path(folder)), barebones=False,
                callbacks=[Bar(Console(force_terminal=True, file=file), 10)],
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            clock = Clock(steps_of(ours, steps, n), n)
            trainer.callbacks.append(clock)
            loader = DataLoader(steps, batch_size=None, sampler=StepNumbers(0), num_workers=0)
            trainer.fit(module_of(config, log_every=10), loader)
        ratios = [a / b for a, b in zip(clock.inside, clock.bare, strict=True)][1:]
        print(f"{name}: Lightning's loop takes {statistics.median(ratios):.3f} of the bare loop's time")


class Clock(pl.Callback):
    """After every n steps inside the loop, n bare ones."""

    def __init__(self, bare: Callable[[], None], n: int, rounds: int = 9):
        self.run_bare, self.n, self.rounds = bare, n, rounds
        self.inside: list[float] = []
        self.bare: list[float] = []

    def on_train_start(self, trainer, module) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step % self.n:
            return
        self.inside.append(time.perf_counter() - self.start)
        start = time.perf_counter()
        self.run_bare()
        self.bare.append(time.perf_counter() - start)
        trainer.should_stop = len(self.bare) == self.rounds
        self.start = time.perf_counter()


def packing() -> None:
    shape = SHAPES["medium"]
    lengths = np.random.default_rng(0).lognormal(3.8, 0.75, 4000).astype(np.int64).clip(1, 255)
    config = gpt2_like(**shape)
    packed = batches(shape["rows"], 256, shape["vocab_size"], lengths)
    # As many useful tokens a step, one document a row.
    padded = TrainingSteps(packed.tokens, packed.documents, 256, 36, 0, packing="pad")

    def trimmed(step):
        """Padded to the longest document of the step."""

        def run(batch: Batch) -> None:
            longest = int((batch.positions >= 0).sum(1).max())
            step(Batch(*(x[:, :longest] for x in batch[:3]), batch.step_targets))

        return run

    ways = {
        "packed": steps_of(our_step(module_of(config)), packed, 2),
        "padded": steps_of(trimmed(our_step(module_of(config))), padded, 2),
        "peer padded": steps_of(trimmed(peer_step(shape, False)), padded, 2),
    }
    useful = {"packed": sum(packed[i].step_targets for i in range(2))}
    useful |= dict.fromkeys(("padded", "peer padded"), sum(padded[i].step_targets for i in range(2)))
    speeds = {name: useful[name] / seconds for name, seconds in in_turns(ways).items()}
    print(f"documents of mean length {lengths.mean():.0f}: packed {speeds['packed']:,.0f} useful tokens/s, "
          f"{speeds['packed'] / speeds['padded']:.2f} times padding here, "
          f"{speeds['packed'] / speeds['peer padded']:.2f} times the peer padded")  # fmt: skip


def checkpointing() -> None:
    shape = dict(n_layers=12, d_model=256, n_heads=4, vocab_size=512, max_seq_len=1024)
    config = ModelConfig(**shape, init="gpt2")
    steps = batches(2, 1024, 512)
    ways = {
        how: steps_of(our_step(module_of(config, gradient_checkpointing=how)), steps, 1)
        for how in ("none", "full", "selective")
    }
    times = in_turns(ways, rounds=5)
    saved = 1 - activation_bytes(config, checkpointing="full") / activation_bytes(config)
    print(f"checkpointing at 12 layers, rows of 1,024: full saves {saved:.0%} of activation memory; time "
          + ", ".join(f"{how} {times[how] / times['none']:.2f}" for how in ("full", "selective")))  # fmt: skip


if __name__ == "__main__":
    keep_freed_memory()  # as train.py does; the peer gains from it too
    for name in sys.argv[1:] or ["loop", "peer", "packing", "checkpointing"]:
        {"loop": loop, "peer": peer, "packing": packing, "checkpointing": checkpointing}[name]()
