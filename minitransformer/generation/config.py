"""Settings of generation."""

from dataclasses import MISSING, dataclass, field, fields

from minitransformer.model.checks import at_least, choose, count, finite, fraction, positive
from minitransformer.words import VERBATIM, with_line_ends

OVERFLOWS = ("error", "slide", "extend")
OUTPUTS = ("text", "json")


@dataclass
class Sampling:
    """How the next token is chosen; `sampling` has a function for each setting.

    temperature: 0 takes the likeliest token, 1 the model's own distribution.
    top_k: sample among the k likeliest tokens (0: all). top_p: among the likeliest that together have this probability.
    min_p: among those that have at least this part of the likeliest token's probability (0: all).
    repetition_penalty: above 1, tokens of the prompt and the text so far become less likely (1: none).
    presence_penalty, frequency_penalty: taken from the logits of tokens made so far, once and for each time (0: none).
    no_repeat_ngram: no run of so many tokens comes twice (0: none).
    logit_bias: added to the logits of these ids. banned: ids that never come. forced: {0: 17} makes the first new
        token 17, and so on.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    forced: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("temperature", self.temperature, 0)
        count("top_k", self.top_k, 0)
        fraction("top_p", self.top_p, zero=False, one=True)
        fraction("min_p", self.min_p, one=True)
        positive("repetition_penalty", self.repetition_penalty)
        finite("presence_penalty", self.presence_penalty)
        finite("frequency_penalty", self.frequency_penalty)
        count("no_repeat_ngram", self.no_repeat_ngram, 0)
        for token, bias in self.logit_bias.items():
            finite(f"logit_bias: that of id {token}", bias)
        for place in self.forced:
            count("forced: the number of a new token", place, 0)

    @property
    def looks_back(self) -> bool:
        """Does the choice depend on the tokens so far?"""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.no_repeat_ngram)

    @property
    def forbids(self) -> bool:
        """May it leave nothing to choose from? To look makes a GPU wait."""
        return bool(self.banned or self.logit_bias or self.no_repeat_ngram)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError when the ids of a setting are outside the vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("banned", self.banned), ("forced", self.forced.values())):
            for i in ids:
                if not 0 <= i < vocab_size:
                    raise ValueError(f"{name}: id {i} is outside the vocabulary of {vocab_size}")


DRAWING = ("temperature", "top_k", "top_p", "min_p")  # settings of how tokens are drawn


@dataclass
class GenerateConfig(Sampling):
    """The whole config of generate.py.

    checkpoint: a run directory or a model file (None: the newest run under `runs_dir`).
    prompt: the text to continue; empty starts a new document.
    prompt_file: a file with one prompt a line, in place of `prompt`; - reads standard input.
    num_samples: continuations of each prompt; with beams, so many of the best.
    beams: search for the likeliest text with so many beams, instead of drawing (1: draw). length_penalty: above 0
        favours long ones; their log-probability is divided by their length to this power.
    draft: a smaller model of the same tokenizer, named as `checkpoint` is, that guesses draft_tokens ahead for the
        model to check in one pass: the same texts, or texts of the same distribution, sooner.
    quantize: int8 reads weights of eight bits, which is faster and a little less exact (none: as they are).
    max_new_tokens: tokens at most (None: as many as the model still holds).
    max_seconds: stop after this time (None: never).
    stop: texts that end a continuation; they are not part of it. A special token is named as it is written,
        such as <|im_end|>.
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
    prompt: str = field(default="", metadata=VERBATIM)
    prompt_file: str | None = None
    num_samples: int = 1
    beams: int = 1
    length_penalty: float = 1.0
    draft: str | None = None
    draft_tokens: int = 4
    quantize: str = "none"
    max_new_tokens: int | None = None
    max_seconds: float | None = None
    stop: list[str] = field(default_factory=list, metadata=VERBATIM)
    overflow: str = "error"
    output: str = "text"
    interactive: bool = False
    score: bool = False
    temperature: float = 0.7
    seed: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        count("num_samples", self.num_samples, 1, 2**16)
        count("beams", self.beams, 1, 2**16)
        if not abs(self.length_penalty) <= 40:  # a length to this power stays finite
            raise ValueError(f"length_penalty={self.length_penalty} is out of range; it must lie between -40 and 40")
        count("draft_tokens", self.draft_tokens)
        if self.max_new_tokens is not None:
            count("max_new_tokens", self.max_new_tokens)
        if self.max_seconds is not None:
            positive("max_seconds", self.max_seconds)
        if self.seed is not None:
            count("seed", self.seed, 0, 2**63 - 1)
        choose("quantize", self.quantize, ("none", "int8"))
        choose("overflow", self.overflow, OVERFLOWS)
        choose("output", self.output, OUTPUTS)
        choose("device", self.device, ("auto", "cpu", "cuda", "mps"))
        self.stop = [with_line_ends(text) for text in self.stop]
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which would end everything at once")
        if self.prompt and self.prompt_file:
            raise ValueError("prompt and prompt_file are both set; give one of them")
        self._refuse_unused()
        if self.beams > 1:
            if self.num_samples > self.beams:
                raise ValueError(f"num_samples={self.num_samples} are more texts than beams={self.beams} can find")
        elif self.length_penalty != 1:
            raise ValueError(f"length_penalty={self.length_penalty} is for beams; set beams above 1")
        if self.overflow == "slide" and self.max_new_tokens is None and self.max_seconds is None and not self.stop:
            raise ValueError("overflow=slide has no end of its own; set max_new_tokens, max_seconds or stop")

    def _refuse_unused(self) -> None:
        """Raise ValueError for a setting that another one leaves without effect."""
        reads = {"checkpoint", "runs_dir", "prompt", "prompt_file", "quantize", "output", "device"}
        names = {f.name for f in fields(self)}
        for switch, on, unused in (
            ("checkpoint", self.checkpoint is not None, {"runs_dir"}),
            ("score", self.score, names - reads - {"score"}),
            ("interactive", self.interactive, {"prompt", "prompt_file", "output"}),
            ("beams", self.beams > 1, {*DRAWING, "seed", "overflow", "draft"}),
            ("draft", self.draft is not None, {"overflow"}),
            ("temperature", self.temperature == 0, {"seed", "top_k", "top_p", "min_p"}),
        ):
            if on and (given := sorted(name for name in unused if self._set(name))):
                value = getattr(self, switch)
                value = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{switch}={value} cannot go with {', '.join(given)}, which it does not use")
        if self.draft is None and self._set("draft_tokens"):
            raise ValueError(f"draft_tokens={self.draft_tokens} needs a draft")

    def _set(self, name: str) -> bool:
        """Was it given another value than its default?"""
        default = next(f for f in fields(self) if f.name == name)
        value = default.default if default.default_factory is MISSING else default.default_factory()
        return getattr(self, name) != value
