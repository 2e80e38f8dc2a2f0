"""Documents tokenised once and kept, rows in an order that is a function of (seed, step)."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from minitransformer.data.config import BPEConfig, DataConfig, TokenizerConfig
from minitransformer.data.documents import Corpus, load_corpus
from minitransformer.data.packing import Rows, fill, pack
from minitransformer.data.tokenizer import Tokenizer

FORMAT = 1  # of the cache; a change of what is stored takes a new number


class Batch(NamedTuple):
    """Rows of one optimizer step, or of one validation step.

    tokens, positions, targets: (B, T) int64; positions restart at 0 where a document starts and are -1 on padding,
    where targets are IGNORE. step_targets: target tokens of the whole step, over all ranks.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    step_targets: int


@dataclass
class Split:
    """The documents of one split as a token stream (see `packing`)."""

    stream: np.ndarray
    lengths: np.ndarray  # tokens of each document, without boundaries
    n_bytes: int  # UTF-8 bytes of the text


def make_tokenizer(config: TokenizerConfig, corpus: Corpus) -> Tokenizer:
    """Train the tokenizer that `config` names. Characters are those of the whole corpus, merges those of training."""
    if isinstance(config, BPEConfig):
        return Tokenizer.train_bpe(corpus.train, config.vocab_size)
    if config.kind == "byte":
        return Tokenizer.bytes()
    return Tokenizer.train_characters(corpus.train + corpus.validation)


def cache_folder(config: DataConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minitransformer"


def tokenised(
    config: DataConfig, tokenizer_config: TokenizerConfig, corpus: Corpus, say: Callable[[str], None]
) -> tuple[Tokenizer, Split, Split]:
    """The corpus as ids, from the cache if this text was tokenised before.

    An entry is named by a hash of the text and the settings, and appears whole or not at all: it is built in a
    folder beside its place and renamed. Two runs that build at once both succeed; one result stays.
    """
    what = json.dumps([FORMAT, corpus.fingerprint, asdict(tokenizer_config)], sort_keys=True)
    entry = cache_folder(config) / blake2b(what.encode(), digest_size=16).hexdigest()
    if not entry.is_dir():
        say("tokenising the corpus (once; it is kept for the next run)")
        building = None
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix="building-", dir=entry.parent))
            _build(building, make_tokenizer(tokenizer_config, corpus), corpus)
            try:
                building.rename(entry)
            except OSError:
                if not entry.is_dir():  # not merely that another run was first
                    raise
        except OSError as error:
            raise ValueError(f"data.cache_dir={entry.parent} cannot be written: {error.strerror}") from None
        finally:
            if building is not None:
                shutil.rmtree(building, ignore_errors=True)
    sizes = json.loads((entry / "bytes.json").read_text())
    splits = [
        Split(np.load(entry / f"{name}.npy", mmap_mode="r"), np.load(entry / f"{name}_lengths.npy"), sizes[name])
        for name in ("train", "validation")
    ]
    return Tokenizer.load(entry / "tokenizer.json"), *splits


def _build(folder: Path, tokenizer: Tokenizer, corpus: Corpus) -> None:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    sizes = {}
    for name, texts in (("train", corpus.train), ("validation", corpus.validation)):
        boundary = np.array([tokenizer.boundary], dtype)
        ids = [document.astype(dtype) for document in tokenizer.encode_documents(texts)]
        np.save(folder / f"{name}.npy", np.concatenate([part for d in ids for part in (boundary, d)] + [boundary]))
        np.save(folder / f"{name}_lengths.npy", np.array([len(d) for d in ids], np.int64))
        sizes[name] = sum(len(text.encode()) for text in texts)
    (folder / "bytes.json").write_text(json.dumps(sizes))
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")


class TrainingSteps(Dataset):
    """Item s is what this rank trains on in optimizer step s, a pure function of (seed, s).

    Rows are drawn without replacement, in a new order each epoch; a step that reaches past an epoch's end goes on
    into the next, so every row comes exactly once an epoch and every step is full.
    """

    def __init__(self, stream, rows: Rows, row_length: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1):
        if batch_size % ranks:
            raise ValueError(f"data.batch_size={batch_size} rows do not divide into {ranks} ranks")
        self.stream, self.rows, self.row_length = stream, rows, row_length
        self.batch_size, self.seed, self.rank, self.ranks = batch_size, seed, rank, ranks
        self.row_targets = rows.targets
        self._order = (-1, np.zeros(0, np.int64))

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of all rows in one epoch."""
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.rows)))
        return self._order[1]

    def row_numbers(self, step: int) -> np.ndarray:
        """The rows of one step, over all ranks."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = np.divmod(places, len(self.rows))
        return np.concatenate([self.order(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs).tolist()])

    def __getitem__(self, step: int) -> Batch:
        numbers = self.row_numbers(step)
        mine = np.array_split(numbers, self.ranks)[self.rank]
        arrays = fill(self.stream, self.rows, mine, self.row_length)
        return Batch(*map(torch.from_numpy, arrays), int(self.row_targets[numbers].sum()))


class StepNumbers(Sampler):
    """start, start + 1, ... without end: training stops at max_steps, never at the end of an epoch."""

    def __init__(self, start: int):
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return count(self.start)


class ValidationSteps(Dataset):
    """All validation rows in order, `batch_size` at a time."""

    def __init__(self, stream, rows: Rows, row_length: int, batch_size: int):
        self.stream, self.rows, self.row_length, self.batch_size = stream, rows, row_length, batch_size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        if step >= len(self):
            raise IndexError(step)
        numbers = np.arange(step * self.batch_size, min((step + 1) * self.batch_size, len(self.rows)))
        arrays = fill(self.stream, self.rows, numbers, self.row_length)
        return Batch(*map(torch.from_numpy, arrays), int((arrays[2] >= 0).sum()))


class TextData(pl.LightningDataModule):
    """Packed rows of the documents that a `DataConfig` names.

    After `prepare` these are known: tokenizer, train, validation (`Split`), train_rows, validation_rows, skipped.
    """

    def __init__(self, config: DataConfig, tokenizer_config: TokenizerConfig, row_length: int, seed: int):
        super().__init__()
        self.config, self.tokenizer_config = config, tokenizer_config
        self.row_length, self.seed = row_length, seed

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Read, tokenise and pack.

        Raises:
            ValueError: the text is missing, wrong, or too short for one row.
        """
        corpus = load_corpus(self.config)
        self.fingerprint, self.skipped = corpus.fingerprint, corpus.skipped
        self.tokenizer, self.train, self.validation = tokenised(self.config, self.tokenizer_config, corpus, say)
        if len(self.train.stream) - 1 < self.row_length + 1:
            raise ValueError(
                f"the training text has {len(self.train.stream) - 1} tokens; one row of model.max_seq_len="
                f"{self.row_length} and a target need {self.row_length + 1}: give more text or a smaller max_seq_len"
            )
        self.train_rows = pack(self.train.lengths, self.row_length)
        self.validation_rows = pack(self.validation.lengths, self.row_length)

    @property
    def efficiency(self) -> float:
        """The part of all places in training rows that hold a token."""
        return float(self.train_rows.length.sum() / (len(self.train_rows) * self.row_length))

    def state_dict(self) -> dict:
        """What the order of rows depends on beside the step, which the trainer counts."""
        return {
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "rows": len(self.train_rows),
            "row_length": self.row_length,
            "batch_size": self.config.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError when a resumed run would read other rows than the one that was stopped."""
        for name, now in self.state_dict().items():
            if state[name] != now:
                raise ValueError(f"cannot resume: the checkpoint's data has {name}={state[name]}, this run has {now}")

    def train_dataloader(self) -> DataLoader:
        # Lightning restores the step before it asks for the loader, so the step is the loader's whole state.
        rank, ranks, start = self.trainer.global_rank, self.trainer.world_size, self.trainer.global_step
        steps = TrainingSteps(
            self.train.stream, self.train_rows, self.row_length, self.config.batch_size, self.seed, rank, ranks
        )
        return DataLoader(
            steps,
            batch_size=None,
            sampler=StepNumbers(start),
            num_workers=self.config.workers,
            pin_memory=torch.cuda.is_available(),
            generator=self._generator(),
        )

    def val_dataloader(self) -> DataLoader:
        steps = ValidationSteps(self.validation.stream, self.validation_rows, self.row_length, self.config.batch_size)
        numbers = range(self.trainer.global_rank, len(steps), self.trainer.world_size)
        return DataLoader(steps, batch_size=None, sampler=numbers, generator=self._generator())

    def _generator(self) -> torch.Generator:
        """A loader draws a seed for its workers each time it starts; not from the generator that dropout uses."""
        return torch.Generator().manual_seed(self.seed)
