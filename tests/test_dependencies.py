"""What is not promised to us by other packages is as we need it, in the versions that pyproject.toml allows."""

import ast
import importlib.metadata
import inspect
import tomllib

import datasets
import lightning.pytorch as pl
import pytest
import torch
from hydra._internal.utils import _run_hydra, get_args_parser
from lightning.pytorch.callbacks import EMAWeightAveraging
from lm_eval.api.model import TemplateLM
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from torch import nn

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    requirement.name: requirement.specifier
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, group)
}


def omegaconf_nodes():
    config = OmegaConf.create({"some": {"a": 1}, "none": None})
    assert config._get_node("some")._is_none() is False
    assert config._get_node("none")._is_none() is True


def datasets_fingerprint():
    one, same, other = (datasets.Dataset.from_dict({"text": [text]}) for text in "aab")
    assert one._fingerprint == same._fingerprint != other._fingerprint


def torch_onednn():
    linear, x = nn.Linear(32, 48), torch.randn(8, 32)
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)
    for weight in (linear.weight, packed):
        y = torch.ops.mkldnn._linear_pointwise(x, weight, linear.bias, "none", [], "")
        torch.testing.assert_close(y, linear(x))


def torch_int8():
    weight, scale, x = torch.randint(-127, 128, (48, 32), dtype=torch.int8), torch.rand(48), torch.randn(8, 32)
    y = torch._weight_int8pack_mm(x, weight, scale)
    torch.testing.assert_close(y, x @ (weight * scale[:, None]).T, rtol=1e-4, atol=1e-3)


def torch_amp():
    """An optimizer that says so is given gradients that are unscaled, and no scale."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    assert optimizer._step_supports_amp_scaling is True
    optimizer._step_supports_amp_scaling = False
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    optimizer.register_step_pre_hook(lambda *_: torch.testing.assert_close(weight.grad, torch.ones(3)))
    scaler.step(optimizer)
    assert not weight.equal(torch.ones(3))


def hydra_main():
    arguments = get_args_parser().parse_args(["--cfg", "job", "--resolve", "-m", "a=1"])
    assert (arguments.cfg, arguments.resolve, arguments.multirun, arguments.overrides) == ("job", True, True, ["a=1"])
    inspect.signature(_run_hydra).bind(arguments, get_args_parser(), print, "a folder", "train")


def lm_eval_pair():
    inspect.signature(TemplateLM._encode_pair).bind(None, "context", "continuation")


# Each name of another package that begins with an underscore, what holds it to what we need, and whose it is.
PRIVATE = {
    "_internal": (hydra_main, "hydra-core"),
    "_run_hydra": (hydra_main, "hydra-core"),
    "_encode_pair": (lm_eval_pair, "lm_eval"),
    "_get_node": (omegaconf_nodes, "omegaconf"),
    "_is_none": (omegaconf_nodes, "omegaconf"),
    "_fingerprint": (datasets_fingerprint, "datasets"),
    "_linear_pointwise": (torch_onednn, "torch"),
    "_reorder_linear_weight": (torch_onednn, "torch"),
    "_weight_int8pack_mm": (torch_int8, "torch"),
    "_step_supports_amp_scaling": (torch_amp, "torch"),
}


def private_names() -> set[str]:
    """Names with an underscore that the package reads or sets and does not define."""
    used, own = set(), set()
    for path in (ROOT / "minitransformer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.ImportFrom(module=module, names=names):
                    used |= {*module.split("."), *(alias.name for alias in names)}
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_other_packages_are_all_known():
    assert private_names() == set(PRIVATE)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_is_as_we_need_it_and_its_package_has_an_upper_bound(name):
    holds, package = PRIVATE[name]
    holds()
    assert not REQUIREMENTS[package].contains("999")


def test_lightning_calls_and_counts_as_we_need_it():
    """Not private, but told nowhere: the layout of a checkpoint's progress, and when the average takes its place."""
    assert not REQUIREMENTS["lightning"].contains("999")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    progress = trainer.fit_loop.state_dict()["epoch_loop.batch_progress"]
    assert all({"ready", "started", "processed", "completed"} == set(progress[name]) for name in ("total", "current"))
    for hook in ("on_validation_epoch_end", "on_train_end"):  # which MovingAverage overrides
        assert getattr(EMAWeightAveraging, hook) is not getattr(pl.Callback, hook)
        inspect.signature(getattr(EMAWeightAveraging, hook)).bind(None, trainer, None)
    inspect.signature(trainer.strategy.reduce_boolean_decision).bind(True, all=False)


def test_the_versions_here_are_those_that_are_allowed():
    for name, specifier in REQUIREMENTS.items():
        if name != PROJECT["name"]:
            assert specifier.contains(importlib.metadata.version(name)), name


def test_the_release_of_datasets_that_reads_streams_anew_is_refused():
    """`test_datamodule` resumes a stream twice; this release gives other documents then."""
    assert not REQUIREMENTS["datasets"].contains("5.0.0")
