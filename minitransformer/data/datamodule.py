"""The LightningDataModule: documents tokenised once and kept, packed into rows, in an exact order."""

from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from minitransformer.data.config import DataConfig, HubConfig, TokenizerConfig
from minitransformer.data.documents import load_corpus
from minitransformer.data.packing import pack
from minitransformer.data.rows import StepNumbers, TrainingSteps, ValidationSteps
from minitransformer.data.store import open_store
from minitransformer.data.streaming import StreamingSteps
from minitransformer.data.tokenizer import Tokenizer


class TextData(pl.LightningDataModule):
    """Packed rows of the documents that a `DataConfig` names.

    After `prepare` these are known: tokenizer, train and validation (`Split`), steps (None for a stream),
    validation_rows, skipped and boms.
    """

    def __init__(self, config: DataConfig, tokenizer_config: TokenizerConfig | Tokenizer, row_length: int, seed: int):
        super().__init__()
        self.config, self.tokenizer_config = config, tokenizer_config
        self.row_length, self.seed = row_length, seed
        self.stream_state: dict[str, Any] | None = None  # where the coming step begins; the training step moves it

    @property
    def streaming(self) -> bool:
        return isinstance(self.config, HubConfig) and self.config.streaming

    def prepare(self, console: Console) -> None:
        """Read, tokenise and pack; `console` is told what takes long.

        Raises:
            ValueError: the text is missing, wrong, or too short for one row.
        """
        if self.streaming and getattr(self.tokenizer_config, "kind", None) == "char":
            raise ValueError("tokenizer=char needs all characters before training, which data.streaming=true has not")
        corpus = load_corpus(self.config)
        if corpus.note:
            console.print(corpus.note)
        store = open_store(self.config, self.tokenizer_config, corpus, console)
        self.fingerprint, self.skipped, self.boms = corpus.fingerprint, store.skipped, store.boms
        self.tokenizer, self.tokens = store.tokenizer, store.tokens
        self.train, self.validation = store.train, store.validation
        # Documents of a stream whose hash is no larger are held out; none where validation has its own split.
        self.limit = store.limit if self.streaming and self.config.val_split is None else None
        n_tokens = int(self.train.documents.length.sum()) + len(self.train.documents)
        if n_tokens < self.row_length + 1 and not self.streaming:
            raise ValueError(
                f"the training text has {n_tokens} tokens, and a row of {self.row_length} with a target more needs "
                f"{self.row_length + 1}; give more text, or shorter rows: data.row_length={n_tokens - 1}"
            )
        self.steps = None if self.streaming else self._steps()
        self.validation_rows = pack(self.validation.documents, self.row_length, self.config.packing)

    def _steps(self, rank: int = 0, ranks: int = 1) -> TrainingSteps:
        config = self.config
        settings = (self.row_length, config.batch_size, self.seed, config.packing, config.limit_rows, rank, ranks)
        return TrainingSteps(self.tokens, self.train.documents, *settings)

    def held_out_text(self, n_tokens: int) -> str:
        """The first tokens of the first held-out document, as text."""
        return "".join(self.held_out(n_tokens)[0])

    def held_out(self, n_tokens: int) -> list[tuple[str, str]]:
        """The first held-out documents up to `n_tokens` together, the last one cut: (prefix, text) each."""
        documents, found = self.validation.documents, []
        for offset, length, prefix in zip(documents.offset, documents.length, documents.prefix, strict=True):
            ids = self.tokens.ids[int(offset) + 1 :][: min(n_tokens, int(length))].tolist()
            parts = (self.tokenizer.decode(part) for part in (ids[: int(prefix)], ids[int(prefix) :]))
            found.append(tuple(part.rstrip("\ufffd") if len(ids) < length else part for part in parts))
            n_tokens -= len(ids) + 1
            if n_tokens <= 0:
                break
        return found

    @property
    def cut_prefixes(self) -> tuple[int, int]:
        """How many prefixes of training documents do not share a row with all of their text, and how many there are."""
        documents = self.train.documents
        with_prefix = documents.prefix > 0
        too_long = documents.length + 1 > self.row_length
        return int((with_prefix & too_long).sum()), int(with_prefix.sum())

    @property
    def efficiency(self) -> float:
        """The part of all places in training rows that hold a token (of a stream: in validation rows)."""
        rows = self.validation_rows if self.steps is None else self.steps.rows(0)[0]
        return float(rows.length.sum() / (len(rows) * self.row_length))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the text and of the tokenizer: equal ones hold the same."""
        return {"data": self.fingerprint, "tokenizer": self.tokenizer.fingerprint}

    def state_dict(self) -> dict:
        """What the order of rows depends on beside the step, which the trainer counts."""
        return {
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "packing": self.config.packing,
            "rows": 0 if self.steps is None else self.steps.n_rows,
            "row_length": self.row_length,
            "batch_size": self.config.batch_size,
            "seed": self.seed,
            "stream": self.stream_state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError when a resumed run would read other rows than the one that was stopped."""
        self.stream_state = state["stream"]
        if self.config.allow_changed:
            return
        for name, now in self.state_dict().items():
            if state[name] != now:
                raise ValueError(
                    f"cannot resume: the checkpoint's data has {name}={state[name]}, this run has {now}; "
                    "data.allow_changed=true goes on all the same"
                )

    def train_dataloader(self) -> DataLoader:
        # Lightning restores the step before it asks for the loader, so the step is the loader's whole state.
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        if self.streaming:
            steps = StreamingSteps(
                self.config, self.tokenizer, self.limit, self.row_length, self.seed, self.stream_state, rank, ranks
            )
        else:
            steps = self._steps(rank, ranks)
        return DataLoader(
            steps,
            batch_size=None,
            sampler=None if self.streaming else StepNumbers(self.trainer.global_step),
            num_workers=self.config.workers,
            pin_memory=torch.cuda.is_available(),
            generator=self._generator(),
        )

    def val_dataloader(self) -> DataLoader:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        steps = ValidationSteps(
            self.tokens, self.validation_rows, self.row_length, self.config.batch_size, rank, ranks
        )  # fmt: skip
        return DataLoader(steps, batch_size=None, sampler=range(len(steps)), generator=self._generator())

    def _generator(self) -> torch.Generator:
        """A loader draws a seed for its workers each time it starts; not from the generator that dropout uses."""
        return torch.Generator().manual_seed(self.seed)
