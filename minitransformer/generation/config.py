"""Settings of generation."""

from dataclasses import dataclass, field

from minitransformer.generation.sampling import Sampling
from minitransformer.model.config import at_least, choose

OVERFLOWS = ("error", "slide", "extend")
OUTPUTS = ("text", "json")


@dataclass
class GenerateConfig(Sampling):
    """The whole config of generate.py.

    checkpoint: a run directory or a model file (None: the newest run under `runs_dir`).
    prompt: the text to continue; empty starts a new document.
    prompt_file: a file with one prompt a line, in place of `prompt`; - reads standard input.
    num_samples: continuations of each prompt.
    max_new_tokens: tokens at most (None: as many as the model still holds).
    max_seconds: stop after this time (None: never).
    stop: texts that end a continuation; they are not part of it.
    overflow: what happens past the model's max_seq_len. `error` refuses before work; `slide` reads the newest half
        again whenever the model is full, and goes on; `extend` reads further, where positions reach further.
    output: text, or json: one object a line with prompt, text, tokens, log_probs and finish.
    interactive: ask for prompts until an empty line.
    score: instead of continuing the prompt, print how likely it is.
    temperature: as above, but 0.7 if nothing is said.
    seed: repeats a text (None: another each time). device: auto | cpu | cuda | mps.
    """

    checkpoint: str | None = None
    runs_dir: str = "runs"
    prompt: str = ""
    prompt_file: str | None = None
    num_samples: int = 1
    max_new_tokens: int | None = None
    max_seconds: float | None = None
    stop: list[str] = field(default_factory=list)
    overflow: str = "error"
    output: str = "text"
    interactive: bool = False
    score: bool = False
    temperature: float = 0.7
    seed: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("num_samples", self.num_samples, 1)
        if self.max_new_tokens is not None:
            at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds={self.max_seconds} must be above 0")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which would end everything at once")
        choose("overflow", self.overflow, OVERFLOWS)
        choose("output", self.output, OUTPUTS)
        choose("device", self.device, ("auto", "cpu", "cuda", "mps"))
        if self.overflow == "slide" and self.max_new_tokens is None and self.max_seconds is None and not self.stop:
            raise ValueError("overflow=slide has no end of its own; set max_new_tokens, max_seconds or stop")
        if self.prompt and self.prompt_file:
            raise ValueError("prompt and prompt_file are both set; give one of them")
        if self.interactive and (self.prompt_file or self.score or self.output == "json"):
            raise ValueError("interactive=true cannot go with prompt_file, score or output=json")
