"""Models of this package under lm_eval: its log-likelihoods are those of `score`."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'minitransformer[eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows
from tokenizers import Tokenizer as Backend

from minitransformer import Tokenizer, generate, load, score
from minitransformer.evaluation.harness import HarnessModel
from minitransformer.run.models import save_model
from tests.conftest import ROOT, sentences, with_start
from tests.model.models import make


@pytest.fixture
def model(trained):
    return HarnessModel(str(trained), batch_size="3", device="cuda:0")  # what the harness says where nobody chose


def ask(model, kind: str, *arguments: tuple):
    requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
    return getattr(model, kind)(requests, disable_tqdm=True)


def log_prob(model, text: str) -> float:
    """Of a text that fits, without its end."""
    return sum(score(model.model, model.words, text).log_probs[:-1])


def test_log_likelihoods_are_those_of_score(model):
    texts = ["Ann sees the cat.", "Bob", "Zoë likes the owl 🦉."]
    rolling = ask(model, "loglikelihood_rolling", *[(text,) for text in texts], ("",))
    assert rolling == pytest.approx([log_prob(model, text) for text in texts] + [0.0], rel=1e-5)
    whole = ask(model, "loglikelihood", *[("", text) for text in texts])
    assert [found for found, _ in whole] == pytest.approx(rolling[:3], rel=1e-6)
    pairs = [("Ann sees the", " cat."), ("Ann", " draws the dog."), ("Bob hears ", "the cat.")]
    for (context, continuation), (found, _) in zip(pairs, ask(model, "loglikelihood", *pairs), strict=True):
        n = len(model.words.encode(context.rstrip()))  # the harness moves a space to the continuation
        assert found == pytest.approx(
            sum(score(model.model, model.words, context + continuation).log_probs[n:-1]), rel=1e-5
        )


@torch.no_grad()
def test_greedy_says_whether_every_token_is_the_likeliest(model):
    written = generate(model.model, model.words, ["Ann sees"], 8, temperature=0)[0]
    pairs = [("Ann sees", written + more) for more in ("", "李", " q")] + [("Ann sees", "q" + written)]
    expected = []
    for context, continuation in pairs:
        ids, n = [model.words.eos_id, *model.words.encode(context + continuation)], len(model.words.encode(context))
        likeliest = model.model(torch.tensor([ids]))[0, :, : model.words.vocab_size].argmax(-1)
        expected.append(likeliest[n:-1].tolist() == ids[n + 1 :])
    assert [greedy for _, greedy in ask(model, "loglikelihood", *pairs)] == expected
    assert set(expected) == {True, False}


class Reference(TemplateLM):
    """The harness's own splitting of texts, with the ids of tokenizer.json and a loop in float64."""

    eot_token_id = prefix_token_id = None

    def __init__(self, model, words):
        super().__init__()
        self.model, self.backend_of_text = model.double(), Backend.from_str(words.to_json())
        self.prefix_token_id = words.bos_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.backend_of_text.encode(string, add_special_tokens=add_special_tokens is not False).ids

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        found = []
        for _, context, continuation in requests:
            log_probs = self.model(torch.tensor([context + continuation[:-1]]))[0].log_softmax(-1)[len(context) - 1 :]
            likely = [row[i].item() for row, i in zip(log_probs, continuation, strict=True)]
            found.append((sum(likely), log_probs.argmax(-1).tolist() == continuation))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [found for found, _ in self.loglikelihood([Instance("", {}, ("", *r.args), 0) for r in requests])]

    def generate_until(self, requests, disable_tqdm=False): ...


def saved(path, words) -> str:
    model = make(vocab_size=words.vocab_size)
    save_model(path, model.config, model.state_dict(), words)
    return str(path)


def test_texts_are_split_and_started_as_the_harness_does_it(tmp_path):
    """Where a token spans both, its rest is scored, as the harness's model of transformers does."""
    words = with_start(Tokenizer.train_bpe([sentences(300)], 300))
    model = HarnessModel(saved(tmp_path / "m.safetensors", words), device="cpu")
    reference = Reference(load(tmp_path / "m.safetensors")[0], words)
    text = "Zoë likes the owl 🦉."
    pairs = [(text[:i], text[i:]) for i in range(len(text))] + [("Bob ", "hears"), (" ", "x"), ("\n", "Ann")]
    pairs = [pair for pair in pairs if len(words.encode("".join(pair))) > len(words.encode(pair[0].rstrip()))]
    known = [(words.encode(context), words.encode(context + continuation)) for context, continuation in pairs]
    spanning = [whole for context, whole in known if whole[: len(context)] != context]
    assert len(spanning) > 5
    found, expected = (ask(one, "loglikelihood", *pairs) for one in (model, reference))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = [(text,), ("Ann",), ("李",)]
    found, expected = (ask(one, "loglikelihood_rolling", *texts) for one in (model, reference))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pair", [("the", ""), ("", ""), ("Zo", "ë"), ("Ann s", "ees")], ids=str)
def test_what_has_no_target_has_no_score(tmp_path, pair):
    words = Tokenizer.train_bpe(["Zoë sees the"] * 9, 300)
    assert len(words.encode("".join(pair))) <= len(words.encode(pair[0]))
    model = HarnessModel(saved(tmp_path / "m.safetensors", words), device="cpu")
    with pytest.raises(ValueError, match=f"continuation '{pair[1]}' of '{pair[0]}' has no token of its own"):
        ask(model, "loglikelihood", pair)


def test_long_texts_are_read_in_the_windows_of_the_harness(model):
    text = sentences(12)
    ids = model.words.encode(text)
    expected = 0.0
    for context, predicted in get_rolling_token_windows(ids, model.words.eos_id, 32, 1):
        with torch.no_grad():
            logits = model.model(torch.tensor([context]))[0, :, : model.words.vocab_size].double().log_softmax(-1)
        expected += sum(logits[i - len(predicted), token].item() for i, token in enumerate(predicted))
    assert len(ids) > 70
    assert ask(model, "loglikelihood_rolling", (text,)) == pytest.approx([expected], rel=1e-5)
    # A context that is too long loses its start.
    context = sentences(12).rstrip()
    n, ids = len(model.words.encode(context)), model.words.encode(context + " Ann")
    with torch.no_grad():
        logits = model.model(torch.tensor([ids[-33:-1]]))[0, :, : model.words.vocab_size].log_softmax(-1)
    wanted = sum(logits[n - len(ids) + i, token].item() for i, token in enumerate(ids[n:]))
    assert ask(model, "loglikelihood", (context, " Ann"))[0][0] == pytest.approx(wanted, rel=1e-5)


def test_generation_is_that_of_generate(model):
    settings = {"until": [".", "\n"], "max_gen_toks": 9, "do_sample": False}
    prompts = ["Ann", "Bob sees", "Zoë likes the", "李 "]
    found = ask(model, "generate_until", *[(prompt, settings) for prompt in prompts])
    assert found == [generate(model.model, model.words, [p], 9, temperature=0, stop=[".", "\n"])[0] for p in prompts]
    assert ask(model, "generate_until", (sentences(20), {"until": [], "max_gen_toks": 3}))  # a longer one slides
    with pytest.raises(ValueError, match="gen_kwargs: num_beams is not a setting"):
        ask(model, "generate_until", ("Ann", {"num_beams": 3}))


def test_a_task_of_local_files(trained, workdir, model):
    """Chosen by log-likelihood, and scored by bits per byte."""
    rows = [
        {"text": f"{name} sees", "a": " the cat.", "b": " the owl 🦉.", "right": i % 2}
        for i, name in enumerate(["Ann", "Bob", "Zoë"])
    ]
    (workdir / "tasks").mkdir()
    (workdir / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    common = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
    (workdir / "tasks" / "choice.yaml").write_text(
        "task: choice\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: ['{{a}}', '{{b}}']\n"
        "doc_to_target: right\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n" + common
    )
    (workdir / "tasks" / "rolling.yaml").write_text(
        "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}{{a}}'\n"
        "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n" + common
    )
    manager = TaskManager(include_path=str(workdir / "tasks"), include_defaults=False)
    found = simple_evaluate(
        "minitransformer", model_args={"checkpoint": str(trained)}, tasks=["choice", "rolling"], task_manager=manager,
        bootstrap_iters=0,
    )["results"]  # fmt: skip
    picked = [
        np.argmax([log_prob(model, row["text"] + row[c]) - log_prob(model, row["text"]) for c in "ab"]) for row in rows
    ]
    assert found["choice"]["acc,none"] == np.mean([p == row["right"] for p, row in zip(picked, rows, strict=True)])
    texts = [row["text"] + row["a"] for row in rows]
    bits = -sum(log_prob(model, text) for text in texts) / np.log(2) / sum(len(text.encode()) for text in texts)
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


def test_without_lm_eval_it_says_what_to_install(workdir):
    code = "import sys; sys.modules['lm_eval'] = None; from minitransformer import cli; cli.harness()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert done.stderr == "error: lm_eval is not installed; pip install 'minitransformer[eval]'\n"


def test_mistakes_end_in_one_line(trained):
    for settings, words in [
        (dict(checkpoint="nowhere"), "checkpoint=nowhere does not exist"),
        (dict(checkpoint=str(trained), batch_size="auto"), "batch_size=auto is no number"),
        (dict(checkpoint=str(trained), device="tpu"), "device='tpu'"),
        (dict(checkpoint=str(trained), max_batch_size=4), "max_batch_size=4 is for batch_size=auto"),
    ]:
        with pytest.raises(ValueError, match=words):
            HarnessModel(**settings)


def test_a_wrong_model_argument_is_named(trained):
    options = {"batch_size": 1, "device": None, "max_batch_size": None}  # as the harness's command line gives them
    for wrong, words in [
        (
            {"pretrained": "runs/small"},
            "model_args: pretrained=runs/small is not known; there are checkpoint",
        ),
        ({"dtype": "float32"}, "model_args: dtype=float32 is not known; there are checkpoint"),
        ({"batch_size": 4}, "model_args: batch_size=4 is set apart; write --batch_size 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            HarnessModel.create_from_arg_obj({"checkpoint": str(trained)} | wrong, options)
    model = HarnessModel.create_from_arg_obj({"checkpoint": str(trained), "device": "cpu"}, options)
    assert model.batch_size == 1
    with pytest.raises(ValueError, match="apply_chat_template: models of this package have no template"):
        model.apply_chat_template([], True)


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, FileNotFoundError, ConnectionError])
def test_mistakes_that_the_harness_finds_end_in_one_line(command, workdir, monkeypatch, error):
    assert command("harness", "--config", "gone.yaml").code.startswith("error: Config file not found")

    def wrong():
        raise error("no such\nthing")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", wrong)
    assert command("harness", "--tasks", "choice").code == "error: no such thing"
