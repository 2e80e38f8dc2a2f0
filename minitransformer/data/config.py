"""Settings of the data: where documents come from, how they are cut into tokens and rows."""

import difflib
from dataclasses import dataclass, field
from typing import ClassVar

from minitransformer.model.checks import Choice, choose, count, fraction

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
        count("data.batch_size", self.batch_size)
        count("data.workers", self.workers, 0, 1024)
        if self.row_length is not None:
            count("data.row_length", self.row_length)
        if self.limit_rows is not None:
            count("data.limit_rows", self.limit_rows)
        choose("data.packing", self.packing, PACKINGS)
        choose("data.split", self.split, SPLITS)
        fraction("data.val_fraction", self.val_fraction, zero=False)

    def refuse_fraction(self, setting: str) -> None:
        """Raise ValueError for settings of which part is held out, beside `setting`, which names it."""
        for name in ("val_fraction", "split"):
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(f"data.{name}={value} cannot go with {setting}, all of which is held out")


@dataclass
class StdlibConfig(DataConfig):
    """The standard library of the running interpreter, one .py file a document."""

    sample_prompt: ClassVar[str | None] = "def"

    kind: str = "stdlib"


@dataclass
class FilesConfig(DataConfig):
    """Documents in files, also with .gz or .zst behind their endings.

    files: paths, folders and globs, relative to the working directory. A file that is named is read whatever its
        ending; below a folder these are the files that end as `data.files.ENDINGS` says, but for hidden ones.
    val_files: the same, held out for validation and not trained on, where `files` has them too; empty takes
        `val_fraction` of `files` by `split`.
    """

    files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise ValueError("data.files is empty; name at least one file, such as data.files=book.txt")
        for setting, names in (("data.files", self.files), ("data.val_files", self.val_files)):
            if "" in names:
                raise ValueError(f"{setting} holds an empty name; name a file, or . for the working directory")
        if self.val_files:
            self.refuse_fraction("data.val_files")


@dataclass
class TextConfig(FilesConfig):
    """Files of text.

    documents: what one document is: the whole `file`, a `line`, a paragraph up to a `blank_line`, or what stands
        between any other string that is given here.
    """

    kind: str = "text"
    val_fraction: float = 0.1
    documents: str = "file"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.documents:
            raise ValueError(f"data.documents is empty; choose {', '.join(DOCUMENTS)} or give a separator")
        if self.documents not in DOCUMENTS and (close := difflib.get_close_matches(self.documents, DOCUMENTS, 1)):
            raise ValueError(f"data.documents={self.documents} is not known; did you mean {close[0]}?")


@dataclass
class TableConfig(FilesConfig):
    """Files of rows, each a document.

    text_field: the field or column with the text (None: text).
    prefix_field: one with what comes before the text, such as a question: it is read, and no loss is taken on it.
    """

    text_field: str | None = None
    prefix_field: str | None = None


@dataclass
class JSONLinesConfig(TableConfig):
    """An object a line, or all of them in one array."""

    kind: str = "jsonl"


@dataclass
class CSVConfig(TableConfig):
    """Columns between commas, or between tabs in files that end in .tsv; the first line names them."""

    kind: str = "csv"


@dataclass
class ParquetConfig(TableConfig):
    """Columns in Parquet's form."""

    kind: str = "parquet"


@dataclass
class HubConfig(DataConfig):
    """A data set of the Hugging Face hub, or a local folder in the same form.

    name, config: as `datasets.load_dataset` takes them.
    train_split, val_split: names of its splits; without val_split `val_fraction` of the training split is held out.
    text_field, prefix_field: the columns, as in tables.
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
        if self.val_split is not None:
            self.refuse_fraction("data.val_split")
            if _overlap(self.train_split, self.val_split):
                raise ValueError(
                    f"data.val_split={self.val_split} holds out what data.train_split={self.train_split} trains on"
                )
        count("data.buffer", self.buffer)
        if not self.streaming and self.buffer != HubConfig.buffer:
            raise ValueError(f"data.buffer={self.buffer} is for data.streaming=true")
        if self.streaming and self.split == "tail":
            raise ValueError("data.split=tail cannot go with data.streaming=true; use hash")
        if self.streaming and self.packing == "concat":
            raise ValueError("data.packing=concat cannot go with data.streaming=true; use best_fit or sequential")
        if self.streaming and self.limit_rows is not None:
            raise ValueError(f"data.limit_rows={self.limit_rows} cannot go with data.streaming=true")
        if self.streaming and self.workers > 1:
            raise ValueError(f"data.workers={self.workers} would each read the whole stream; use 0 or 1")


def _overlap(one: str, other: str) -> bool:
    """Do two expressions for splits, such as train[:90%]+extra, name the same one, or a whole and its part?"""
    pairs = [(a.strip(), b.strip()) for a in one.split("+") for b in other.split("+")]
    return any(a == b or a.partition("[")[0] == b or a == b.partition("[")[0] for a, b in pairs)


# How a data set is chosen, and its settings.
SOURCES = {
    source.kind: source for source in (StdlibConfig, TextConfig, JSONLinesConfig, CSVConfig, ParquetConfig, HubConfig)
}


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
        count("tokenizer.sample_bytes", self.sample_bytes, 1, 2**63 - 1)
        count("tokenizer.vocab_size", self.vocab_size, 1, 2**24)
        if self.vocab_size < 257:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is too small; 256 bytes and the EOS token need 257"
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
