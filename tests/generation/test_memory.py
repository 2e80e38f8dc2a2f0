"""How much memory generation takes: the weights, the cache, and little else."""

import subprocess
import sys

import pytest

PEAK = r"""
import re, sys, torch
from minitransformer.data.tokenizer import Tokenizer
from minitransformer.device import keep_freed_memory
from minitransformer.generation.generate import generate_all
from minitransformer.model.config import ModelConfig
from minitransformer.model.product import pack_weights
from minitransformer.model.transformer import Transformer

def memory(name):
    return 1024 * int(re.search(name + r":\s+(\d+)", open("/proc/self/status").read())[1])

def run(**shape):
    model = Transformer(ModelConfig(vocab_size=256, max_seq_len=2048, tie_embeddings=False, **shape)).eval()
    size = sum(weights.nbytes for weights in model.parameters())
    pack_weights(model, 1)
    if shape["n_layers"] > 1:
        keep_freed_memory()
        open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
    generate_all(model, Tokenizer.bytes(), ["a" * 1000], 20, temperature=0, draft=draft)
    return size

draft = None
run(d_model=64, n_layers=1, n_heads=4)  # whatever torch loads on first use
if sys.argv[1] == "drafted":
    config = ModelConfig(vocab_size=256, max_seq_len=2048, d_model=64, n_layers=1, n_heads=4)
    draft = Transformer(config).eval()
    run(d_model=64, n_layers=1, n_heads=4)
before = memory("VmRSS")
size = run(d_model=768, n_layers=12, n_heads=12)
cache = 2 * 12 * 768 * 1020 * 4  # keys and values, of each layer, of each token with the start
print((memory("VmHWM") - before) / (size + cache))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak that Linux keeps in /proc")
@pytest.mark.parametrize("how", ["plain", "drafted"])
def test_peak(how):
    """GPT-2's layers and a prompt of 1,000 tokens, in a model that was built and packed."""
    result = subprocess.run([sys.executable, "-c", PEAK, how], capture_output=True, text=True)
    assert 1 < float(result.stdout) < 1.1, result.stderr
