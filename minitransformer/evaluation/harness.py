"""The models of this package under EleutherAI's evaluation harness (Gao et al. 2021), as `minitransformer`.

from lm_eval import simple_evaluate
import minitransformer.evaluation.harness
simple_evaluate("minitransformer", model_args={"checkpoint": "runs/NAME"}, tasks=["arc_easy"])
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from minitransformer.data.packing import Documents, TokenStream, slide
from minitransformer.device import choose_device
from minitransformer.evaluation.scoring import score_rows
from minitransformer.generation.config import Sampling
from minitransformer.generation.generate import generate_all
from minitransformer.model.checks import choose
from minitransformer.run.models import load
from minitransformer.run.names import latest_run

SETTINGS = ("checkpoint", "runs_dir", "batch_size", "device")


@register_model("minitransformer")
class HarnessModel(TemplateLM):
    """What the harness asks of a model. As in training, every text begins with the start token.

    checkpoint: a run directory or a model file (None: the newest run under `runs_dir`). batch_size: texts read at once.
    device: auto | cpu | cuda | mps.

    Raises:
        ValueError: there is no model, or a setting is wrong.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        runs_dir: str = "runs",
        batch_size: int | str = 8,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        if max_batch_size is not None:
            raise ValueError(f"max_batch_size={max_batch_size} is for batch_size=auto; write --batch_size 8")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size} is no number of texts; write --batch_size 8")
        self.batch_size = int(batch_size)
        kind = (device or "auto").partition(":")[0]
        choose("device", kind, ("auto", "cpu", "cuda", "mps"))
        if kind == "cuda" and not torch.cuda.is_available():  # the harness says cuda:0 where nobody says anything
            kind = "auto"
        self._device = torch.device(device) if device and kind == "cuda" else choose_device(kind)
        path = latest_run(Path(runs_dir)) if checkpoint is None else checkpoint
        self.model, self.words = load(path, self._device)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict | None = None) -> "HarnessModel":
        """The model for `--model_args` and the options beside it.

        Raises:
            ValueError: one of them is not known, or is given in both places.
        """
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        for name, value in arg_dict.items():
            if name in options:
                raise ValueError(f"model_args: {name}={value} is set apart; write --{name} {value}")
            if name not in SETTINGS:
                raise ValueError(f"model_args: {name}={value} is not known; there are {', '.join(SETTINGS)}")
        return cls(**arg_dict, **options)

    @property
    def eot_token_id(self) -> int:
        return self.words.eos_id

    @property
    def tokenizer_name(self) -> str:
        return self.words.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self.words.encode(string) if add_special_tokens is False else self.words.encode_document(string)

    def apply_chat_template(self, *_, **__) -> str:
        raise ValueError("apply_chat_template: models of this package have no template of chats; leave it out")

    def _scored(self, texts: list[list[int]], unscored: list[int], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Of each text of ids all but the first `unscored`: their log-probability, and is each the likeliest token.

        A longer text than the model holds is read in windows: nothing is cut off.
        """
        size = np.array([len(ids) for ids in texts], np.int64)
        documents = Documents(np.cumsum(size) - size, size - 2, np.array(unscored, np.int64) - 1)
        length = self.model.config.max_seq_len
        rows = slide(documents, length, length)
        log_prob, greedy = np.zeros(len(texts)), np.ones(len(texts), bool)
        ids = np.concatenate([np.array(ids, np.int64) for ids in texts])
        stream = TokenStream(ids, self.words.eos_id, self.words.bos_id)
        of_row = np.searchsorted(documents.offset, rows.start, side="right") - 1
        with tqdm(total=len(rows), disable=disable_tqdm) as bar:
            for index, counted, nats, likeliest in score_rows(
                self.model, self.words.vocab_size, stream, rows, self.batch_size
            ):
                np.subtract.at(log_prob, of_row[index], nats.sum(1))
                np.logical_and.at(greedy, of_row[index], (likeliest | ~counted).all(1))
                bar.update(len(index))
        return list(zip(log_prob.tolist(), greedy.tolist(), strict=True))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations, split from their contexts as the harness's own models split them.

        Raises:
            ValueError: a continuation is empty, or lies in a token that begins in its context.
        """
        pairs = []
        for request in requests:
            context, continuation = request.args
            known, new = self._encode_pair(context, continuation) if context else ([], self.words.encode(continuation))
            if not new:
                pair = f"the continuation {continuation!r} of {context[-20:]!r}"
                raise ValueError(f"{pair} has no token of its own that could be scored")
            pairs.append((request.args, known or [self.words.bos_id], new))
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_
    ) -> list[tuple[float, bool]]:
        texts, unscored = [], []
        most = self.model.config.max_seq_len + 1
        for _, context, continuation in requests:
            # As elsewhere, the start of a context gives way; a continuation is read whole.
            context = context[-max(1, most - len(continuation)) :]
            texts.append(context + continuation)
            unscored.append(len(context))
        found = self._scored(texts, unscored, disable_tqdm)
        for (key, *_), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        found = [log_prob for log_prob, _ in self._scored(texts, [1] * len(texts), disable_tqdm)]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm) as bar:
            for numbers, settings in self._alike(requests):
                prompts = [requests[number].args[0] for number in numbers]
                made = generate_all(self.model, self.words, prompts, overflow="slide", seed=0, **settings)
                for number, found in zip(numbers, made, strict=True):
                    texts[number] = found.text
                    self.cache_hook.add_partial("generate_until", requests[number].args, found.text)
                bar.update(len(numbers))
        return [texts[number] for number in range(len(requests))]

    def _alike(self, requests: list[Instance]) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Batches of requests with the same settings, and these as `generate` takes them.

        Raises:
            ValueError: a setting is one that `generate` does not have.
        """
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            given = dict(normalize_gen_kwargs(requests[numbers[0]].args[1]))
            given.pop("do_sample")
            settings = {
                "stop": [stop for stop in given.pop("until") if stop],
                "max_new_tokens": given.pop("max_gen_toks"),
            }
            if unknown := sorted(set(given) - set(Sampling.__dataclass_fields__)):
                raise ValueError(f"gen_kwargs: {', '.join(unknown)} is not a setting of generation here")
            for first in range(0, len(numbers), self.batch_size):
                yield numbers[first : first + self.batch_size], settings | given
