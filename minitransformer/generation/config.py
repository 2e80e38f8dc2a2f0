"""Settings of generation."""

from dataclasses import dataclass

from minitransformer.model.config import at_least, choose


@dataclass
class GenerateConfig:
    """The whole config of generate.py.

    checkpoint: a run directory or a model file (None: the newest run under `runs_dir`).
    prompt: the text to continue; empty starts a new document.
    max_new_tokens: tokens at most (None: as many as the model still holds).
    temperature: 0 takes the likeliest token, 1 the model's own distribution.
    top_k: sample among the k likeliest tokens (0: all). top_p: among the likeliest that together have this probability.
    seed: repeats a text (None: another each time). device: auto | cpu | cuda | mps.
    """

    checkpoint: str | None = None
    runs_dir: str = "runs"
    prompt: str = ""
    max_new_tokens: int | None = None
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)
        if self.max_new_tokens is not None:
            at_least("max_new_tokens", self.max_new_tokens, 1)
        choose("device", self.device, ("auto", "cpu", "cuda", "mps"))


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError when a sampling setting is out of its range, naming it."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be a finite number, 0 or above")
    at_least("top_k", top_k, 0)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is out of range; it must be above 0 and at most 1")
