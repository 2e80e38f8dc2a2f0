"""The commands: Hydra composes the config, it becomes typed here, and mistakes end in one line."""

import difflib
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_origin

from minitransformer.convert.config import ConvertConfig
from minitransformer.data import config as data
from minitransformer.evaluation.config import EvaluateConfig
from minitransformer.generation.config import GenerateConfig
from minitransformer.lab.config import LabConfig
from minitransformer.report.config import ReportConfig
from minitransformer.training import config as training

# The typed settings behind configs/GROUP/NAME.yaml, which each begin from `/schema/...` of that name.
SCHEMAS = {
    "train": training.TrainConfig,
    "generate": GenerateConfig,
    "lab": LabConfig,
    "convert": ConvertConfig,
    "report": ReportConfig,
    "evaluate": EvaluateConfig,
    "data_stdlib": data.StdlibConfig,
    "data_text": data.TextConfig,
    "data_jsonl": data.JSONLinesConfig,
    "data_csv": data.CSVConfig,
    "data_parquet": data.ParquetConfig,
    "data_hub": data.HubConfig,
    "tokenizer_byte": data.ByteConfig,
    "tokenizer_char": data.CharConfig,
    "tokenizer_bpe": data.BPEConfig,
    "tokenizer_pretrained": data.PretrainedConfig,
    "optimizer_adamw": training.AdamWConfig,
    "optimizer_muon": training.MuonConfig,
    "schedule_constant": training.ConstantConfig,
    "schedule_linear": training.LinearConfig,
    "schedule_inverse_sqrt": training.InverseSqrtConfig,
    "schedule_range": training.RangeConfig,
    "schedule_wsd": training.WSDConfig,
    "schedule_cosine": training.CosineConfig,
    "logger_none": training.LoggerConfig,
    "logger_wandb": training.WandbConfig,
}

EXAMPLES = {
    "train": """\
  {command}                                              the default run
  {command} data=text data.files=[book.txt] model=small  one's own text, a larger model
  {command} optimizer=adamw optimizer.lr=1e-3            other settings
  {command} -m seed=1,2,3                                a sweep, one directory a job
  {command} name=mine resume=auto                        go on where run `mine` stopped
  {command} init_from=runs/mine lora.rank=8              fine-tune a model by adapters
  {command} --cfg job                                    print the composed config""",
    "generate": """\
  {command} prompt="def "                           from the newest run
  {command} checkpoint=runs/NAME temperature=0.9    from another
  {command} prompt="Once" num_samples=3 top_k=50    three texts
  {command} prompt_file=prompts.txt output=json     a prompt a line; an object a line
  {command} prompt="A text." score=true             how likely the model finds it
  {command} interactive=true                        ask for prompts
  {command} --cfg job                               print the composed config""",
    "lab": """\
  {command} prompt="time flies"                 from the newest run, to its lab.html
  {command} checkpoint=runs/NAME layer=1 head=3 another run; what is shown first
  {command} serve=true                          open it on localhost, and type other prompts
  {command} example=true out=example.html       the textbook example, without a model""",
    "convert": """\
  {command} from=SmolLM2-135M to=smol     a Hugging Face folder becomes a model of ours
  {command} from=runs/NAME to=exported    and a run one of theirs""",
    "report": """\
  {command}                              the newest run
  {command} runs/mine out=mine.html      another, to another file
  {command} runs/mine runs/other         two runs compared
  {command} runs/seeds                   all runs of a sweep""",
    "explain": """\
  {command}                                            the default run
  {command} model=gpt2 data.batch_size=64 gpu=h100     a larger one on a GPU
  {command} experiment=gpt2_124m trainer.devices=8 gpu=a100-80gb
  {command} model=small throughput=25000 output=json   at a speed that was measured""",
    "evaluate": """\
  {command}                                   the newest run, on the text that it held out
  {command} checkpoint=runs/NAME data=text data.files=[book.txt]
  {command} data=jsonl data.files=[a.jsonl] stride=64 output=json
  {command} data=text data.files=[book.txt] by_position=true length=4x plot=losses.png""",
}


def config_dir() -> Path:
    """The folder of YAML files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def train() -> None:
    """The command `train.py`, or `minitransformer-train`."""

    def job(config: training.TrainConfig, hydra: Any) -> float | None:
        from minitransformer.training.callbacks import Interrupted
        from minitransformer.training.run import train as run

        sweep_dir = Path(hydra.runtime.output_dir) if hydra.mode.name == "MULTIRUN" else None
        if (sweep := hydra.runtime.choices["sweep"]) and sweep_dir is None:
            raise ValueError(f"sweep={sweep} makes several runs: write {shlex.join(_command())} -m sweep={sweep}")
        # To resume, a run is named by its directory: an earlier `resume` or `name` would contradict it.
        kept = [o for o in hydra.overrides.task if not o.startswith(("resume=", "name="))]
        try:
            return run(config, shlex.join([*_command(), *kept]), sweep_dir, _given(hydra))
        except Interrupted as stopped:
            sys.exit(stopped.code)

    _main("train", job)


def generate() -> None:
    """The command `generate.py`, or `minitransformer-generate`."""

    def job(config: GenerateConfig, hydra: Any) -> None:
        from minitransformer.generation.run import run

        run(config)

    _main("generate", job)


def lab() -> None:
    """The command `python -m minitransformer.lab`."""

    def job(config: LabConfig, hydra: Any) -> None:
        from minitransformer.lab.run import run

        run(config)

    sys.argv[1:] = ["serve=true" if argument == "--serve" else argument for argument in sys.argv[1:]]
    _main("lab", job)


def convert() -> None:
    """The command `python -m minitransformer.convert`."""

    def job(config: ConvertConfig, hydra: Any) -> None:
        from minitransformer.convert.run import run

        run(config)

    # See `spoken`.
    sys.argv[1:] = [re.sub("^from=", "source=", argument) for argument in sys.argv[1:]]
    _main("convert", job)


def report() -> None:
    """The command `python -m minitransformer.report`. Words that set nothing are runs."""

    def job(config: ReportConfig, hydra: Any) -> None:
        from minitransformer.report.page import write

        print(write(list(map(Path, config.runs)), config.out and Path(config.out), Path(config.runs_dir)))

    words = sys.argv[1:]
    runs = [word for word in words if "=" not in word or Path(word).is_dir()]
    if runs and not any(word.startswith("-") for word in words):
        sys.argv[1:] = [*(w for w in words if w not in runs), f"runs=[{','.join(map(_literal, runs))}]"]
    _main("report", job)


def evaluate() -> None:
    """The command `python -m minitransformer.evaluate`."""

    def job(config: EvaluateConfig, hydra: Any) -> None:
        from minitransformer.evaluation.run import run

        run(config)

    _main("evaluate", job)


def explain() -> None:
    """The command `python -m minitransformer.explain`."""

    def job(config: training.ExplainConfig, hydra: Any) -> None:
        from minitransformer.explain import run

        run(config, _given(hydra))

    _main("explain", job)


def harness() -> None:
    """The command `python -m minitransformer.harness`: lm_eval's own command line, with models of this package."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import minitransformer.evaluation.harness  # noqa: F401  registers the model
    except ModuleNotFoundError as error:
        missing = (error.name or "lm_eval").partition(".")[0]
        sys.exit(f"error: {missing} is not installed; pip install 'minitransformer[eval]'")
    if {"-t", "--tasks"} & set(sys.argv) and not {"-M", "--model", "ls", "validate"} & set(sys.argv):
        sys.argv += ["--model", "minitransformer"]
    try:
        cli_evaluate()
    except (ValueError, NotImplementedError, OSError) as error:  # a file or data set that is not there is an OSError
        sys.exit(f"error: {' '.join(str(error).split())}")


def _given(hydra: Any) -> list[str]:
    """Names of the settings on the command line."""
    return [override.lstrip("+~").split("=")[0] for override in hydra.overrides.task]


def _command() -> list[str]:
    """How this command was started: train.py, an installed name, or a module of the package."""
    script = Path(sys.argv[0])
    if script.is_relative_to(Path(__file__).parent):
        module = script.parent if script.stem == "__main__" else script.with_suffix("")
        return ["python", "-m", ".".join(module.relative_to(Path(__file__).parents[1]).parts)]
    return ["python", sys.argv[0]] if script.suffix == ".py" else [script.name]


def _main(name: str, job: Callable[[Any, Any], Any]) -> None:
    if {"--help", "-h"} & set(sys.argv[1:]):
        try:
            print(help_text(name), flush=True)
        except BrokenPipeError:
            _reader_left()
        return
    sys.argv[1:] = map(quoted, sys.argv[1:])
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    _register_schemas(name)
    OmegaConf.register_new_resolver(
        "run_name", lambda given: given or training.time_name(), use_cache=True, replace=True
    )
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra

    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir().absolute()), config_name=name)
    def task(composed: Any) -> Any:
        try:
            refuse_unknown(composed, name)
            return job(OmegaConf.to_object(composed), HydraConfig.get())
        except Exception as error:  # kept from Hydra, which would print more than a line; a sweep goes on
            failures.append(error)

    try:
        with ExitStack() as stack:
            if name != "train" and {"-m", "--multirun"} & set(sys.argv[1:]):  # Hydra wants a folder for a sweep
                folder = stack.enter_context(TemporaryDirectory())
                sys.argv.append(f"hydra.sweep.dir={_literal(folder)}")
            task()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        failures.append(error)
    for error in failures:
        if isinstance(error, BrokenPipeError):
            _reader_left()
        if (line := one_line(error, name)) is None:
            raise error
        print(f"error: {line}", file=sys.stderr)
    if failures:
        sys.exit(1)


def _register_schemas(name: str) -> None:
    """Tell Hydra of the dataclasses; for the command `explain`, of train.yaml with a few settings more."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for schema, kind in (SCHEMAS | ({"train": training.ExplainConfig} if name == "explain" else {})).items():
        node = OmegaConf.structured(kind)
        for field in fields(kind):
            if get_origin(field.type) is dict:  # such as logit_bias, whose keys are the user's
                OmegaConf.set_struct(node[field.name], False)
        ConfigStore.instance().store(group="schema", name=schema, node=node)


def _reader_left() -> None:
    """End well when who reads our output, such as `head`, has enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


TEXTS = ("prompt", "callbacks.sample_prompt")  # settings whose value is any text


def quoted(argument: str) -> str:
    """`prompt=def f():` as Hydra's grammar wants it, `prompt='def f():'`; what is quoted or no text stays."""
    name, equals, text = argument.partition("=")
    if (
        name not in TEXTS
        or (name != "prompt" and text == "null")
        or (text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1)
    ):
        return argument
    return f"{name}{equals}{_literal(text)}"


def _literal(text: str) -> str:
    """Any text as a quoted value of Hydra's grammar."""
    # A quote, and backslashes before one, are escaped; so is what would be taken for an interpolation.
    text = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text.replace("${", "\\${"))
    return f"'{text}'"


def refuse_unknown(config: Any, name: str, prefix: str = "") -> None:
    """Raise ValueError for a key that `+KEY=VALUE` added beside those of the dataclasses."""
    from omegaconf import DictConfig, OmegaConf

    known = {field.name for field in fields(OmegaConf.get_type(config))}
    for key in config:
        if key not in known:
            raise ValueError(unknown_key(f"{prefix}{key}", name))
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and is_dataclass(OmegaConf.get_type(node)):
            refuse_unknown(node, name, f"{prefix}{key}.")


def one_line(error: Exception, name: str) -> str | None:
    """One line for a mistake of the user's; None for a fault of ours, which deserves its traceback."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.filename or 'the system'}: {error.strerror}"
        return " ".join(str(error).split()) if isinstance(error, ValueError) else None
    # Hydra and OmegaConf tell mistakes apart by their words alone; the cause names the full key.
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}; write SETTING=VALUE, lists as [a,b], odd values in quotes"
    text = f"{error}\n{error.__cause__ or ''}"
    if found := re.search(r"Could not find '([\w/]+)/([^'/]+)'", text):
        return f"{found[1]}={found[2]} is not known; choose one of {', '.join(options(found[1]))}"
    if found := re.search(r"Could not override '([^']+)'|[Kk]ey '([^']+)' (?:is )?not in", text):
        return unknown_key(found[1] or found[2], name)
    lines = [spoken(line.strip()) for line in str(error.__cause__ or error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    if "is not a ListConfig" in lines[0]:
        return f"{key} takes a list, such as {key}=[a,b]"
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]


def spoken(text: str) -> str:
    """With `from`, a word of Python's that no field of a dataclass can be called, in the place of its field's name."""
    return re.sub(r"\bsource(?==|$)", "from", text)


def unknown_key(key: str, name: str) -> str:
    """Name the nearest setting that exists."""
    groups = [a for a in sys.argv[1:] if "=" in a and "," not in a and (config_dir() / a.split("=")[0]).is_dir()]
    known = list(map(spoken, _leaves(compose(name, groups))))
    by_last = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    group = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == group]
    near = difflib.get_close_matches(key, siblings, 1, 0.6) or by_last or difflib.get_close_matches(key, known, 1, 0.5)
    if near:
        return f"{key} is not a setting; did you mean {near[0]}?"
    there = siblings or [k for k in known if "." not in k]
    return f"{key} is not a setting; there are {', '.join(there)}"


def compose(name: str, overrides: list[str] | None = None) -> Any:
    """The config of a command before any setting of the user's but `overrides`."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    _register_schemas(name)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
        return hydra.compose(name, overrides)


def _leaves(config: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    from omegaconf import DictConfig

    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def options(group: str) -> list[str]:
    """The choices of a config group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def _about(path: Path) -> str:
    """The first comment of a config file, which says what it is."""
    comments = (line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# "))
    return next(comment for comment in comments if not comment.startswith("@package"))


def help_text(name: str) -> str:
    """What `--help` prints: groups with a line for each choice, and worked commands."""
    command = shlex.join(_command())
    lines = [f"usage: {command} [GROUP=CHOICE ...] [SETTING=VALUE ...]", ""]
    text = (config_dir() / f"{name}.yaml").read_text()
    lines += [_about(config_dir() / f"{name}.yaml"), ""]
    if name == "train":
        lines.append("Groups, and what may be chosen in each (* is the default):")
        defaults = dict(re.findall(r"^  - (\w+): (\w+)", text, re.M))
        for folder in sorted(path for path in config_dir().iterdir() if path.is_dir()):
            lines.append(f"  {folder.name}")
            for choice in options(folder.name):
                mark = "*" if defaults.get(folder.name) == choice else " "
                lines.append(f"   {mark}{choice:18} {_about(folder / f'{choice}.yaml')}")
        lines.append("")
    lines += ["Examples:", EXAMPLES[name].format(command=command), ""]
    lines.append("Every setting with its value: --cfg job. Hydra's own options: --hydra-help.")
    return "\n".join(lines)
