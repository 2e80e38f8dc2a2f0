"""Settings of the data: where documents come from, how they are cut into tokens and rows."""

import difflib
from dataclasses import dataclass, field
from typing import ClassVar

from minitransformer.model.checks import Choice, at_least, choose

SPLITS = ("auto", "hash", "tail")
PACKINGS = ("best_fit", "sequential", "concat", "pad")
DOCUMENTS = ("file", "line", "blank_line")


@dataclass
class DataConfig(Choice):
    """What every source of documents shares.

    batch_size: rows in one optimizer step, over all micro-batches.
    row_length: tokens in a row (None: `model.max_seq_len`).
    packing: how documents fill rows. `best_fit` leaves almost no place empty; `sequential` keeps their order, within
        rows and from row to row; `concat` cuts one endless stream, documents seeing each other, as GPT-2 was trained;
        `pad` gives each document rows of its own.
    val_fraction: the part held out for validation.
    split: `hash` holds out whole documents, chosen by a hash of their text, so that adding or reordering
        documents moves no other; `tail` holds out the last part of each document's characters; `auto` is `tail`
        for a single text and `hash` for many.
    workers: processes that lay out rows; 0 does it in the training process.
    cache_dir: where tokenised documents are kept (None: `minitransformer` in the user's cache folder).
    limit_rows: train on the first so many rows alone, to see whether a model can learn them by heart (None: all).
    allow_changed: resume although the data are no longer those that the checkpoint was trained on.
    sample_prompt: what samples continue unless callbacks.sample_prompt says it (None: the start of held-out text).
    """

    group = "data"
    sample_prompt: ClassVar[str | None] = None

    batch_size: int = 8
    row_length: int | None = None
    packing: str = "best_fit"
    val_fraction: float = 0.05
    split: str = "auto"
    workers: int = 0
    cache_dir: str | None = None
    limit_rows: int | None = None
    allow_changed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.batch_size", self.batch_size, 1)
        at_least("data.workers", self.workers, 0)
        if self.row_length is not None:
            at_least("data.row_length", self.row_length, 1)
        if self.limit_rows is not None:
            at_least("data.limit_rows", self.limit_rows, 1)
        choose("data.packing", self.packing, PACKINGS)
        choose("data.split", self.split, SPLITS)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction} is out of range; it must lie between 0 and 1")


@dataclass
class StdlibConfig(DataConfig):
    """The standard library of the running interpreter, one .py file a document."""

    sample_prompt: ClassVar[str | None] = "def"

    kind: str = "stdlib"


@dataclass
class FilesConfig(DataConfig):
    """Documents in files, which are read by their endings: .jsonl, .csv, .parquet, and text; also with .gz or .zst.

    files: paths, folders and globs, relative to the working directory.
    val_files: the same, held out for validation; empty takes `val_fraction` of `files` by `split`.
    documents: what one document of a text file is: the whole `file`, a `line`, a paragraph up to a `blank_line`, or
        what stands between any other string that is given here.
    text_field: the field or column of .jsonl, .csv and .parquet with the text (None: text).
    prefix_field: one with what comes before the text, such as a question: it is read, and no loss is taken on it.
    """

    kind: str = "text"
    files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    documents: str = "file"
    text_field: str | None = None
    prefix_field: str | None = None
    val_fraction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise ValueError("data.files is empty; name at least one file, such as data.files=[book.txt]")
        if not self.documents:
            raise ValueError(f"data.documents is empty; choose {', '.join(DOCUMENTS)} or give a separator")
        if self.documents not in DOCUMENTS and (close := difflib.get_close_matches(self.documents, DOCUMENTS, 1)):
            raise ValueError(f"data.documents={self.documents} is not known; did you mean {close[0]}?")


@dataclass
class HubConfig(DataConfig):
    """A data set of the Hugging Face hub, or a local folder in the same form.

    name, config: as `datasets.load_dataset` takes them.
    train_split, val_split: names of its splits; without val_split `val_fraction` of the training split is held out.
    text_field, prefix_field: the columns, as in files.
    streaming: read it as training goes on and keep nothing, for sets larger than the disk. The tokenizer is trained
        on the first `buffer` documents, and the held-out ones are among these.
    buffer: documents that are shuffled and packed together when streaming.
    """

    kind: str = "hub"
    name: str = ""
    config: str | None = None
    train_split: str = "train"
    val_split: str | None = None
    text_field: str | None = None
    prefix_field: str | None = None
    streaming: bool = False
    buffer: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ValueError("data.name is empty; name a data set, such as data.name=roneneldan/TinyStories")
        at_least("data.buffer", self.buffer, 1)
        if self.streaming and self.split == "tail":
            raise ValueError("data.split=tail cannot go with data.streaming=true; use hash")
        if self.streaming and self.packing == "concat":
            raise ValueError("data.packing=concat cannot go with data.streaming=true; use best_fit or sequential")
        if self.streaming and self.limit_rows is not None:
            raise ValueError(f"data.limit_rows={self.limit_rows} cannot go with data.streaming=true")
        if self.streaming and self.workers > 1:
            raise ValueError(f"data.workers={self.workers} would each read the whole stream; use 0 or 1")


@dataclass
class TokenizerConfig(Choice):
    """What every tokenizer shares: nothing but its kind."""

    group = "tokenizer"


@dataclass
class ByteConfig(TokenizerConfig):
    """One id a byte of UTF-8."""

    kind: str = "byte"


@dataclass
class CharConfig(TokenizerConfig):
    """One id a character of the corpus."""

    kind: str = "char"


@dataclass
class BPEConfig(TokenizerConfig):
    """Byte-level BPE, trained on the training documents.

    vocab_size: ids at most; a small corpus may fill fewer, and the model takes the real number.

    sample_bytes: text that it is trained on at most, from the start of the corpus.
    """

    kind: str = "bpe"
    vocab_size: int = 2048
    sample_bytes: int = 200_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("tokenizer.sample_bytes", self.sample_bytes, 1)
        if self.vocab_size < 257:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is too small; 256 bytes and the boundary token need 257"
            )


@dataclass
class PretrainedConfig(TokenizerConfig):
    """name: a tokenizer.json, a folder that holds one (such as a run), or a name on the hub, such as gpt2."""

    kind: str = "pretrained"
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ValueError("tokenizer.name is empty; name a tokenizer.json, or one of the hub, such as gpt2")
