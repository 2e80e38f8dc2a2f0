"""Settings of the converter."""

from dataclasses import dataclass

from minitransformer.model.checks import positive


@dataclass
class ConvertConfig:
    """The whole config of `python -m minitransformer.convert`.

    source: a Hugging Face folder, or a run directory or model file of ours (`from` on the command line).
    to: the folder to write: ours from a Hugging Face folder, a Hugging Face folder from ours.
    tokenizer_path: a tokenizer.json, or a folder with one, in place of that of a Hugging Face folder (None: its own).
        The folder's chat template, sampling settings and end tokens, which belong to its own, are left out then.
    shard_gb: size of the files that weights are written in, in 10^9 bytes.
    """

    source: str = ""
    to: str = ""
    tokenizer_path: str | None = None
    shard_gb: float = 5.0

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("from is not given; name a Hugging Face folder, or a run or model file: from=runs/NAME")
        if not self.to:
            raise ValueError("to is not given; name the folder to write, such as to=converted")
        positive("shard_gb", self.shard_gb)
