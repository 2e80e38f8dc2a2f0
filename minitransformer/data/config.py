"""Settings of the data: where documents come from, how they are cut into tokens and rows."""

from dataclasses import dataclass, field

from minitransformer.model.config import at_least, choose

SPLITS = ("hash", "tail")


@dataclass
class DataConfig:
    """What every source of documents shares.

    batch_size: rows of `model.max_seq_len` tokens in one optimizer step, over all micro-batches.
    val_fraction: the part held out for validation.
    split: `hash` holds out whole documents, chosen by a hash of their text, so that adding or reordering
        documents moves no other; `tail` holds out the last part of each document's characters.
    workers: processes that lay out rows; 0 does it in the training process.
    cache_dir: where tokenised documents are kept (None: `minitransformer` in the user's cache folder).
    """

    batch_size: int = 8
    val_fraction: float = 0.05
    split: str = "hash"
    workers: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        at_least("data.batch_size", self.batch_size, 1)
        at_least("data.workers", self.workers, 0)
        choose("data.split", self.split, SPLITS)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction} is out of range; it must lie between 0 and 1")


@dataclass
class StdlibConfig(DataConfig):
    """The standard library of the running interpreter, one .py file a document."""


@dataclass
class FilesConfig(DataConfig):
    """Documents in files.

    files: paths, relative to the working directory.
    val_files: files held out for validation; empty takes `val_fraction` of `files` by `split`.
    """

    files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise ValueError("data.files is empty; name at least one file, such as data.files=[book.txt]")


@dataclass
class TextConfig(FilesConfig):
    """Plain UTF-8 text, each file a document."""

    split: str = "tail"
    val_fraction: float = 0.1


@dataclass
class JsonlConfig(FilesConfig):
    """JSON lines, each line a document, its text in `text_field`."""

    text_field: str = "text"


@dataclass
class ParquetConfig(FilesConfig):
    """Parquet files, each row a document, its text in `text_field`."""

    text_field: str = "text"


@dataclass
class HubConfig(DataConfig):
    """A data set of the Hugging Face hub, or a local folder in the same form.

    name, config: as `datasets.load_dataset` takes them.
    train_split, val_split: names of its splits; without val_split `val_fraction` of the training split is held out.
    """

    name: str = ""
    config: str | None = None
    train_split: str = "train"
    val_split: str | None = None
    text_field: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ValueError("data.name is empty; name a data set, such as data.name=roneneldan/TinyStories")


@dataclass
class TokenizerConfig:
    """kind: bpe (byte-level, trained on the training documents) | byte | char."""

    kind: str = "bpe"

    def __post_init__(self) -> None:
        choose("tokenizer.kind", self.kind, ("bpe", "byte", "char"))


@dataclass
class BPEConfig(TokenizerConfig):
    """vocab_size: ids at most; a small corpus may fill fewer, and the model takes the real number."""

    vocab_size: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 257:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is too small; 256 bytes and the boundary token need 257"
            )
