"""How fast text becomes rows: tokenising against `tokenizers` alone, packing, loading; and the memory of a large file.

    python tests/benchmarks/data.py [GIGABYTES]

With GIGABYTES a text file of that size is made in the temporary folder and tokenised in a process of its own.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from minitransformer.data.config import BPEConfig, TextConfig
from minitransformer.data.documents import Document, load_corpus, stdlib_documents
from minitransformer.data.packing import Documents, pack
from minitransformer.data.rows import StepNumbers, TrainingSteps
from minitransformer.data.store import TokenFile, end_to_end, open_store
from minitransformer.data.tokenizer import Tokenizer


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def tokenising() -> None:
    texts = stdlib_documents()
    tokenizer = Tokenizer.train_bpe(texts, 2048)
    encode_all = tokenizer.backend.encode_batch
    documents = [Document([text]) for text in texts]
    ratios, speeds = [], []
    for _ in range(5):
        alone = seconds(lambda: encode_all(texts))
        ours = seconds(lambda: end_to_end(documents, tokenizer, np.dtype(np.uint16), lambda ids: None))
        ratios.append(alone / ours)
        speeds.append(sum(map(len, texts)) / ours / 1e6)
    print(f"tokenising: {statistics.median(speeds):.1f} MB/s, {statistics.median(ratios):.2f} of encode_batch's speed")


def packing() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 1.2, 10_000_000).astype(np.int64)
    for how in ("best_fit", "sequential", "concat", "pad"):
        start = time.perf_counter()
        rows = pack(Documents.of(lengths), 1024, how)
        filled = rows.length.sum() / (len(rows) * 1024)
        print(f"packing 10,000,000 documents, {how}: {time.perf_counter() - start:.1f} s, {filled:.2%} filled")


def loading() -> None:
    random = np.random.default_rng(0)
    documents = Documents.of(random.lognormal(4, 1, 50_000).astype(np.int64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        random.integers(0, 2048, int(documents.length.sum()) + len(documents) + 1).astype(np.uint16).tofile(path)
        for workers, start_method in ((0, None), (2, "fork"), (2, "spawn")):
            steps = TrainingSteps(TokenFile(path, "uint16", 0, 0), documents, 256, 8, seed=0)
            settings = dict(num_workers=workers, multiprocessing_context=start_method)
            loader = DataLoader(steps, batch_size=None, sampler=StepNumbers(0), **settings)
            batches = iter(loader)
            next(batches)  # the workers have started
            took = seconds(lambda batches=batches: [next(batches) for _ in range(1000)])
            print(f"loading with {workers} workers ({start_method}): {1000 * 8 * 256 / took:,.0f} tokens/s")


def large_file(gigabytes: float) -> None:
    text = "\n".join(stdlib_documents()).encode()
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder, "large.txt"), "wb") as file:
            while file.tell() < gigabytes * 1e9:
                file.write(text)
        subprocess.run([sys.executable, __file__, "--tokenise", folder], check=True)


def tokenise(folder: str) -> None:
    config = TextConfig(files=[f"{folder}/large.txt"], cache_dir=f"{folder}/cache")
    took = seconds(lambda: open_store(config, BPEConfig(vocab_size=2048), load_corpus(config), Console(quiet=True)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    size = Path(config.files[0]).stat().st_size / 1e9
    print(f"one file of {size:.1f} GB: {took:.0f} s, {peak:.2f} GB of memory at most")


if __name__ == "__main__":
    if "--tokenise" in sys.argv:
        tokenise(sys.argv[2])
    else:
        torch.set_num_threads(1)  # the loader's numbers are those of a process that trains beside it
        tokenising()
        loading()
        packing()
        if len(sys.argv) > 1:
            large_file(float(sys.argv[1]))
