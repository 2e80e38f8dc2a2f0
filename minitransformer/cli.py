"""The commands: Hydra composes the config, it becomes typed here, and mistakes end in one line."""

import argparse
import difflib
import os
import re
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minitransformer import __version__
from minitransformer.convert.config import ConvertConfig
from minitransformer.data import config as data
from minitransformer.evaluation.config import EvaluateConfig
from minitransformer.generation.config import GenerateConfig
from minitransformer.lab.config import LabConfig
from minitransformer.overrides import literal, quoted, text_settings
from minitransformer.report.config import ReportConfig
from minitransformer.streams import finish, printing_never_fails, reader_left, replace_what_cannot_be_shown
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

OVERLAYS = ("experiment", "debug", "sweep")  # groups whose choices set any setting, and choose in other groups

EXAMPLES = {
    "train": """\
  {command}                                              the default run
  {command} data=text data.files=book.txt model=small    one's own text, a larger model
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
  {command} prompt="time flies"                  from the newest run, to its lab.html
  {command} checkpoint=runs/NAME layer=1 head=3  another run; what is shown first
  {command} serve=true                           open it on localhost, and type other prompts
  {command} example=true out=example.html        the textbook example, without a model""",
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
  {command} checkpoint=runs/NAME data=text data.files=book.txt
  {command} data=jsonl data.files=a.jsonl stride=64 output=json
  {command} data=text data.files=book.txt by_position=true length=4x plot=losses.png""",
}


def config_dir() -> Path:
    """The folder of YAML files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def train() -> None:
    """The command `train.py`, or `minitransformer-train`."""

    def job(config: training.TrainConfig, hydra: Any, typed: list[str]) -> float | None:
        from minitransformer.training.callbacks import Interrupted
        from minitransformer.training.run import train as run

        sweep_dir = Path(hydra.runtime.output_dir) if hydra.mode.name == "MULTIRUN" else None
        if (sweep := hydra.runtime.choices["sweep"]) and sweep_dir is None:
            raise ValueError(f"sweep={sweep} makes several runs: write {shlex.join(_command())} -m sweep={sweep}")
        # To resume, a run is named by its directory: an earlier `resume` or `name` would contradict it.
        kept = [word for word in typed if not word.startswith(("resume=", "name="))]
        defaults = default_settings() if config.callbacks.report else {}

        def draw(run: Path) -> None:
            from minitransformer.report.page import write

            write([run], defaults)

        try:
            with printing_never_fails():
                return run(config, shlex.join([*_command(), *kept]), sweep_dir, _names(typed), draw)
        except Interrupted as stopped:
            sys.exit(stopped.code)

    _main("train", job, sys.argv[1:])


def generate() -> None:
    """The command `generate.py`, or `minitransformer-generate`."""

    def job(config: GenerateConfig, *_: Any) -> None:
        from minitransformer.generation.run import run

        run(config)

    _main("generate", job, sys.argv[1:])


def lab() -> None:
    """The command `python -m minitransformer.lab`."""

    def job(config: LabConfig, *_: Any) -> None:
        from minitransformer.lab.run import run

        run(config)

    _main("lab", job, ["serve=true" if word == "--serve" else word for word in sys.argv[1:]])


def convert() -> None:
    """The command `python -m minitransformer.convert`."""

    def job(config: ConvertConfig, *_: Any) -> None:
        from minitransformer.convert.run import run

        run(config)

    # `from`, a word of Python's, cannot be the name of a field.
    _main("convert", job, [re.sub("^from=", "source=", word) for word in sys.argv[1:]])


def report() -> None:
    """The command `python -m minitransformer.report`. Words that set nothing are runs."""

    def job(config: ReportConfig, *_: Any) -> None:
        from minitransformer.report.page import write

        print(
            write(
                list(map(Path, config.runs)), default_settings(), config.out and Path(config.out), Path(config.runs_dir)
            )
        )

    words = sys.argv[1:]
    runs = [word for word in words if "=" not in word or Path(word).is_dir()]
    if runs and not any(word.startswith("-") for word in words):
        words = [*(w for w in words if w not in runs), f"runs=[{','.join(map(literal, runs))}]"]
    _main("report", job, words)


def evaluate() -> None:
    """The command `python -m minitransformer.evaluate`."""

    def job(config: EvaluateConfig, *_: Any) -> None:
        from minitransformer.evaluation.run import run

        run(config)

    _main("evaluate", job, sys.argv[1:])


def explain() -> None:
    """The command `python -m minitransformer.explain`."""

    def job(config: training.ExplainConfig, hydra: Any, typed: list[str]) -> None:
        from minitransformer.explain import run

        run(config, _names(typed))

    _main("explain", job, sys.argv[1:])


def harness() -> None:
    """The command `python -m minitransformer.harness`: lm_eval's own command line, with models of this package."""
    replace_what_cannot_be_shown()
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


def _names(words: list[str]) -> list[str]:
    """Of the settings on a command line."""
    return [word.lstrip("+~").partition("=")[0] for word in words]


def _command() -> list[str]:
    """How this command was started: train.py, an installed name, or a module of the package."""
    script = Path(sys.argv[0])
    if script.is_relative_to(Path(__file__).parent):
        module = script.parent if script.stem == "__main__" else script.with_suffix("")
        return ["python", "-m", ".".join(module.relative_to(Path(__file__).parents[1]).parts)]
    return ["python", sys.argv[0]] if script.suffix == ".py" else [script.name]


def _main(name: str, job: Callable[[Any, Any, list[str]], Any], words: list[str]) -> None:
    """Run the command `name` on the words after it; mistakes end in a line each and exit code 1."""
    replace_what_cannot_be_shown()
    try:
        failures = _run(name, job, words)
        finish()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        failures = [error]
    for error in failures:
        if isinstance(error, BrokenPipeError):
            reader_left()
        if (line := one_line(error, name, words)) is None:
            raise error
        print(f"error: {line}", file=sys.stderr)
    if failures:
        sys.exit(1)


def _run(name: str, job: Callable[[Any, Any, list[str]], Any], words: list[str]) -> list[Exception]:
    """Do what the words ask for. Returns what went wrong in each job of a sweep, or in the only one.

    job: called with the typed config, Hydra's own, and the settings as they were typed.
    """
    if {"--help", "-h"} & set(words):
        print(help_text(name))
        return []
    if "--version" in words:
        print(f"minitransformer {__version__}")
        return []
    from hydra import version
    from hydra._internal.utils import _run_hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    parser, arguments = _parse(words)
    texts = _texts(name)
    overrides = [quoted(word, texts, arguments.multirun) for word in arguments.overrides]
    typed = dict(zip(overrides, arguments.overrides, strict=True))
    arguments.overrides = overrides  # each as often as it was given: the last one of a setting holds
    shown = arguments.cfg == "job" and not arguments.multirun  # shown as it will be when the job has it
    if shown:
        arguments.cfg, arguments.resolve, resolve = None, False, arguments.resolve
    OmegaConf.register_new_resolver("run_name", training.run_name, use_cache=True, replace=True)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra
    failures: list[Exception] = []

    def task(composed: Any) -> Any:
        try:
            hydra = HydraConfig.get()
            lines = leave_out(composed, name, hydra)
            refuse_unknown(composed, name, hydra)
            config = None if shown else OmegaConf.to_object(composed)
            for line in lines:
                print(line, file=sys.stderr)
            if shown:
                node = OmegaConf.select(composed, arguments.package) if arguments.package else composed
                print(OmegaConf.to_yaml(node, resolve=resolve), end="")
                return None
            return job(config, hydra, [typed.get(word, word) for word in hydra.overrides.task])
        except Exception as error:  # kept from Hydra, which would print more than a line; a sweep goes on
            failures.append(error)

    with ExitStack() as stack:
        if name != "train" and arguments.multirun:  # Hydra wants a folder for a sweep
            folder = stack.enter_context(TemporaryDirectory())
            arguments.overrides.append(f"hydra.sweep.dir={literal(folder)}")
        _register_schemas(name)
        version.setbase("1.3")
        _run_hydra(arguments, parser, task, str(config_dir().absolute()), name)
    return failures


def _parse(words: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Hydra's parser, and what it finds, wherever the options stand.

    Raises:
        ValueError: an option is not known, or lacks its value.
    """
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> None:
        raise ValueError(message)

    parser = get_args_parser()
    parser.error = refuse
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        name = unknown[0].partition("=")[0]
        raise ValueError(f"{name} is not an option; a setting has no dashes: write {name.lstrip('-')}=VALUE")
    return parser, arguments


def _texts(name: str) -> dict[str, Any]:
    """The settings of a command that hold texts; see `text_settings`."""
    groups = defaultdict(list)
    for schema, kind in SCHEMAS.items():
        groups[schema.partition("_")[0]].append(kind)
    return text_settings(_schema(name), groups)


def _schema(name: str) -> type:
    """The dataclass of a command's settings. The YAML of `explain` is that of `train` with a few settings more."""
    return training.ExplainConfig if name == "explain" else SCHEMAS[name]


def _register_schemas(name: str) -> None:
    """Tell Hydra of the dataclasses."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for schema, kind in (SCHEMAS | ({"train": _schema(name)} if name == "explain" else {})).items():
        node = OmegaConf.structured(kind)
        # An overlay may name settings of a choice that was replaced: `leave_out` and `refuse_unknown` decide.
        _take_any_key(node)
        ConfigStore.instance().store(group="schema", name=schema, node=node)


def _take_any_key(node: Any) -> None:
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_struct(node, False)
    for key in node:
        if isinstance(child := node._get_node(key), DictConfig) and not child._is_none():
            _take_any_key(child)


def leave_out(config: Any, name: str, hydra: Any) -> list[str]:
    """Where a choice replaces the one that an overlay was written for, the overlay's settings of that group drop out.

    Such as optimizer.lr of an experiment with Muon, where the user has chosen optimizer=adamw.

    Returns:
        A line for each choice that was replaced.

    Raises:
        ValueError: a debug overlay, which chooses what it is about, has lost its choice.
    """
    lines, overlays, words = [], list(_overlays(hydra)), hydra.overrides.task
    for group, chosen, overlay in overlays:
        defaults = [entry for entry in overlay.get("defaults", []) if not isinstance(entry, str)]
        written_for = {key.removeprefix("override /"): choice for entry in defaults for key, choice in entry.items()}
        replaced = {key: hydra.runtime.choices.get(key, choice) for key, choice in written_for.items()}
        replaced = {key: choice for key, choice in replaced.items() if choice != written_for[key]}
        if replaced and group == "debug":
            key, choice = next(iter(replaced.items()))
            raise ValueError(f"debug={chosen} chooses {key}={written_for[key]}; leave {key}={choice} out")
        replaced = {key: choice for key, choice in replaced.items() if key in overlay}
        if not replaced:
            continue
        choices = [f"{key}={choice}" for key, choice in replaced.items()]
        others = [f"{other}={choice}" for other, choice, _ in overlays if other != group]
        own = [word for word in words if word.lstrip("+~").partition(".")[0] in replaced]
        without = compose(name, [*choices, *others, *own])
        for key in replaced:
            config[key] = without[key]
            left_out = [s for s in _keys(overlay[key], f"{key}.") if s not in _names(words)]
            if left_out:
                lines.append(
                    f"{group}={chosen} was written for {key}={written_for[key]}: {', '.join(left_out)} left out"
                )
    return lines


def _overlays(hydra: Any) -> Iterator[tuple[str, str, Any]]:
    """Group, name and content of each overlay that was chosen, in the order in which they are laid over the rest."""
    from omegaconf import OmegaConf

    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    for group in OVERLAYS:
        if chosen := hydra.runtime.choices.get(group):
            files = (folder / group / f"{chosen}.yaml" for folder in folders)
            yield group, chosen, OmegaConf.load(next(file for file in files if file.exists()))


def refuse_unknown(config: Any, name: str, hydra: Any) -> None:
    """Raise ValueError for a key that none of the dataclasses has, whether typed or set by an overlay."""
    known, words = set(_settings(config)), list(hydra.overrides.task)
    typed = set(_names(words)) - set(hydra.runtime.choices)
    for key in _keys(config):
        above = {key} | {key[: dot.start()] for dot in re.finditer(r"\.", key)}  # a setting may hold keys of the user's
        if above & known:
            continue
        overlays = [f"{group}={chosen}: " for group, chosen, content in _overlays(hydra) if key in _keys(content)]
        said_by = "" if above & typed else "".join(overlays[-1:])
        raise ValueError(said_by + unknown_key(key, name, words))


def _settings(config: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings of a composed config."""
    from omegaconf import DictConfig, OmegaConf

    for field in fields(OmegaConf.get_type(config)):
        node = config._get_node(field.name)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            yield from _settings(node, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all values, whether settings or not."""
    from omegaconf import DictConfig, OmegaConf

    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and (node or is_dataclass(OmegaConf.get_type(node))):
            yield from _keys(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def one_line(error: Exception, name: str, words: list[str]) -> str | None:
    """One line for a mistake of the user's; None for a fault of ours, which deserves its traceback."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.filename or 'the system'}: {error.strerror}"
        text = " ".join(str(error).split())
        # torch says it in a RuntimeError on a CPU, in a class of its own on a GPU.
        found = re.search("tried to allocate [^.]*", text, re.I)
        if found or isinstance(error, MemoryError):
            what = f" ({found[0]})" if found else ""
            return f"there is not enough memory{what}; use less at once, or a smaller model"
        return text if isinstance(error, ValueError) else None
    # Hydra and OmegaConf tell mistakes apart by their words alone; the cause names the full key.
    if isinstance(error, OverrideParseException):
        return f'cannot read the override {error.override!r}; write SETTING=VALUE, lists as "SETTING=[a,b]"'
    cause = error.__cause__
    text = f"{error}\n{cause or ''}"
    if found := re.search(r"Could not find '([\w/]+)/([^'/]+)'", text):
        return f"{found[1]}={found[2]} is not known; choose one of {', '.join(options(found[1]))}"
    if found := re.search(r"Could not override '([^']+)'|[Kk]ey '([^']+)' (?:is )?not in", text):
        key = found[1] or found[2]
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and str(cause.key) != key.rpartition(".")[2]:
            there = ", ".join(field.name for field in fields(cause.object_type))  # of one in a list of dataclasses
            return f"{key}: {cause.key} is not a setting; there are {there}"
        return unknown_key(key, name, words)
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    key = _typed(key, name)
    if "is not a ListConfig" in lines[0]:
        return f'{key} takes a list, such as "{key}=[a,b]"'
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]


def _typed(key: str, name: str) -> str:
    """A setting as it is typed: the converter's `source` is `from`, a word of Python's that no field can be called."""
    return "from" if (name, key) == ("convert", "source") else key


def unknown_key(key: str, name: str, words: list[str]) -> str:
    """Name the nearest setting that exists, among those of the choices in `words` or of another choice."""
    groups = [w for w in words if "=" in w and "," not in w and (config_dir() / w.split("=")[0]).is_dir()]
    config = compose(name, groups, return_hydra_config=True)
    known = [_typed(setting, name) for setting in _settings(config)]
    section, group = key.partition(".")[0], key.rpartition(".")[0]
    elsewhere: dict[str, list[str]] = {}  # the settings of other choices of its group, and the choices that have each
    if section in config.hydra.runtime.choices:
        for choice in options(section):
            for setting in _settings(compose(name, [f"{section}={choice}"])):
                if setting.startswith(f"{section}.") and setting not in known:
                    elsewhere.setdefault(setting, []).append(f"{section}={choice}")
    if key in elsewhere:
        chosen = f"{section}={config.hydra.runtime.choices[section]}"
        return f"{key} is not a setting of {chosen}; choose {' or '.join(elsewhere[key])}"
    by_last = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    siblings = [k for k in known if k.rpartition(".")[0] == group]
    near = (
        difflib.get_close_matches(key, [*siblings, *elsewhere], 1, 0.6)
        or by_last
        or difflib.get_close_matches(key, known, 1, 0.5)
    )
    if near:
        of = f" of {' or '.join(elsewhere[near[0]])}" if near[0] in elsewhere else ""
        return f"{key} is not a setting; did you mean {near[0]}{of}?"
    there = siblings or [k for k in known if "." not in k]
    return f"{key} is not a setting; there are {', '.join(there)}"


def compose(name: str, overrides: list[str] | None = None, return_hydra_config: bool = False) -> Any:
    """The config of a command before any setting of the user's but `overrides`."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    _register_schemas(name)
    if not GlobalHydra.instance().is_initialized():
        hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3")
    return hydra.compose(name, overrides, return_hydra_config)


def default_settings() -> dict[str, Any]:
    """Dotted names and values of the settings of `python train.py` alone."""
    from omegaconf import OmegaConf

    from minitransformer.run.directory import flat

    return flat(OmegaConf.to_container(compose("train"), resolve=True))


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
