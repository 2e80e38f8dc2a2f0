"""Settings of evaluation."""

import re
from dataclasses import dataclass, fields
from typing import Any

from minitransformer.data.config import DataConfig
from minitransformer.generation.config import OUTPUTS
from minitransformer.model.checks import choose, count
from minitransformer.model.config import SCALINGS

# Settings of the data that only say how to train on it: those that every source has, and some of each.
OF_TRAINING = {field.name for field in fields(DataConfig)} - {"kind"}
OF_TRAINING |= {"val_files", "val_split", "streaming", "buffer"}


@dataclass
class EvaluateConfig:
    """The whole config of `python -m minitransformer.evaluate`.

    checkpoint: a run directory or a model file (None: the newest run under `runs_dir`).
    data: chosen as for train.py, such as data=text data.files=book.txt: all of its documents. None: what the run
        held out of its own data.
    length: tokens that the model sees at most (None: its max_seq_len); 512, or 4x for four times max_seq_len.
    stride: a longer document is read in windows of `length` that begin so many tokens apart (None: half of length).
        Each token is scored once, with at least length - stride tokens before it, or all that there are.
    by_position: in place of one loss that at each position, over stretches of text that are `length` long.
    scaling: how rotary positions reach a `length` above max_seq_len (None: as the model was trained).
    quantize: int8 reads weights of eight bits, as generate.py does (none: as they are).
    plot: draw the loss by position into this file, .png or .svg.
    batch_size: windows read at once, which changes speed and memory, not the result.
    output: text or json. device: auto | cpu | cuda | mps.
    """

    checkpoint: str | None = None
    runs_dir: str = "runs"
    data: Any = None
    length: str | None = None
    stride: int | None = None
    by_position: bool = False
    scaling: str | None = None
    quantize: str = "none"
    plot: str | None = None
    batch_size: int = 8
    output: str = "text"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.length is not None and not re.fullmatch(r"[1-9]\d{0,8}|\d{0,9}\.?\d{1,9}x", self.length):
            raise ValueError(f"length={self.length} is no number of tokens; write length=512, or length=4x")
        if self.stride is not None:
            count("stride", self.stride)
        count("batch_size", self.batch_size)
        if self.checkpoint is not None and self.runs_dir != "runs":
            raise ValueError(f"runs_dir={self.runs_dir} is for the newest run; checkpoint={self.checkpoint} names one")
        if self.scaling is not None:
            choose("scaling", self.scaling, SCALINGS)
        choose("quantize", self.quantize, ("none", "int8"))
        choose("output", self.output, OUTPUTS)
        choose("device", self.device, ("auto", "cpu", "cuda", "mps"))
        if self.by_position and self.stride is not None:
            raise ValueError(f"stride={self.stride} cannot go with by_position=true, where each token has its position")
        if self.plot is not None and not self.by_position:
            raise ValueError(f"plot={self.plot} is for by_position=true")
        if self.plot is not None and not self.plot.endswith((".png", ".svg")):
            raise ValueError(f"plot={self.plot} is neither a .png nor an .svg file")
        if self.data is not None:
            assert isinstance(self.data, DataConfig)
            for field in fields(self.data):
                if field.name in OF_TRAINING and getattr(self.data, field.name) != _default(field):
                    raise ValueError(f"data.{field.name} is for training; evaluate reads all documents of the data")

    def window(self, trained: int) -> int:
        """`length` in tokens, for a model that was trained on `trained`."""
        if self.length is None:
            return trained
        return int(float(self.length[:-1]) * trained) if self.length.endswith("x") else int(self.length)


def _default(field: Any) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default
