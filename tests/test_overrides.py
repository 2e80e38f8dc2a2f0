"""What is typed for a setting reaches it: texts as they are, lists of texts, sweeps."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.nodes import StringNode

from minitransformer import cli
from minitransformer.cli import compose, options
from minitransformer.overrides import TextSetting, quoted

ANY = st.text(alphabet="ab1e '\\\"(){}[]:,=$~/.\n\té", min_size=1, max_size=12)
WORDS = [
    "2024_01",
    "1.10",
    "1e3",
    "0x10",
    "true",
    "None",
    "nan",
    "résumé.txt",
    "a b",
    "a=b",
    "it's",
    "*.md",
    "[x",
    "a,b",
]
WORDS += ["${", "a\\nb", "~", "x/~/y", "1:30:00", "-5", "a#b", "{a}", "(a)", "@a", "a\\"]
COMMANDS = ["train", "explain", "generate", "evaluate", "lab", "convert", "report"]


def read(word: str, **kwargs) -> object:
    """What Hydra's parser and OmegaConf make of a word; in a sweep the values of all jobs."""
    override = OverridesParser.create().parse_override(word)
    if override.is_sweep_override():
        return [OverridesParser.create().parse_override(f"a={v}").value() for v in override.sweep_string_iterator()]
    made = OmegaConf.create({"made": override.value()}).made
    return list(made) if isinstance(made, ListConfig) else made


def has_own_quotes(text: str) -> bool:
    return text[0] in ("'", '"') and text[-1] == text[0] and len(text) > 1


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_prose_is_any_text(text):
    if has_own_quotes(text) or "\\${" in text:
        return  # as Hydra reads it; a backslash before an interpolation cannot be told from an escape
    prose = {"prompt": TextSetting(many=False, optional=False, verbatim=True)}
    assert read(quoted(f"prompt={text}", prose)) == text
    assert read(quoted(f"prompt={text}", prose, sweep=True)) == text
    assert quoted("temperature=0.5", prose) == "temperature=0.5"


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY, max_size=4))
def test_a_list_holds_any_texts(texts):
    texts = [text for text in texts if not set(text) & set(",'\"$") and text.strip() == text and text[:2] != "~/"]
    names = {"files": TextSetting(many=True, optional=False, verbatim=False)}
    assert read(quoted(f"files=[{','.join(texts)}]", names)) == texts
    assert read(quoted(f"files=[{' , '.join(texts)}]", names)) == texts
    assert read(quoted("files=[" + ",".join(f'"{t}"' for t in texts if "\\" not in t) + "]", names)) == [
        text for text in texts if "\\" not in text
    ]
    for text in texts:
        if text[0] != "[":
            assert read(quoted(f"files={text}", names)) == [text]


def string_settings(config: DictConfig, prefix: str = "") -> dict[str, bool]:
    """Settings that OmegaConf knows to hold a text, and whether each holds a list of them."""
    found = {}
    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            found |= string_settings(node, f"{prefix}{key}.")
        elif isinstance(node, StringNode) or (isinstance(node, ListConfig) and node._metadata.element_type is str):
            found[prefix + key] = isinstance(node, ListConfig)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_text_of_every_command_stays_as_typed(command):
    """By the types of the dataclasses, as OmegaConf sees them, whatever is chosen."""
    known = cli._texts(command)
    groups = {"train": ("data", "tokenizer", "optimizer", "schedule", "logger"), "evaluate": ("data",)}
    groups["explain"] = groups["train"]
    expected = string_settings(compose(command))
    for number in range(max((len(options(group)) for group in groups.get(command, ())), default=0)):
        chosen = [f"{group}={options(group)[number % len(options(group))]}" for group in groups[command]]
        expected |= string_settings(compose(command, chosen))
    assert {name: setting.many for name, setting in known.items()} == expected
    assert len(known) >= 3
    for name, setting in known.items():
        for text in WORDS:
            if setting.many and text[0] == "[":
                continue  # a list that is not closed
            if text == "${" and not setting.verbatim:
                continue  # an interpolation is one, outside of prose
            assert read(quoted(f"{name}={text}", known)) == ([text] if setting.many else text), (name, text)
        assert read(quoted(f"+{name}=1.10", known)) == (["1.10"] if setting.many else "1.10")
        null = None if setting.optional else "null"
        assert read(quoted(f"{name}=null", known)) == (["null"] if setting.many else null)
        at_home = str(Path.home() / "runs/x")
        expected = "~/runs/x" if setting.verbatim else at_home
        assert read(quoted(f"{name}=~/runs/x", known)) == ([expected] if setting.many else expected)


@pytest.mark.parametrize(("typed", "jobs"), [
    ("position=none,rotary", ["none", "rotary"]), ("position=1e3,true", ["1e3", "true"]),
    ("position='a,b',c", ["a,b", "c"]), ("position=choice(a,b)", ["a", "b"]), ("position=a", "a"),
    ("files=a b,é", [["a b"], ["é"]]), ("files=[a,1.10],[c]", [["a", "1.10"], ["c"]]), ("files=[a,b]", ["a", "b"]),
    ("prompt=Hello, world", "Hello, world"), ("name=null,a", [None, "a"]), ("seed=1,2", [1, 2]),
])  # fmt: skip
def test_commas_stand_between_jobs_in_a_sweep(typed, jobs):
    known = {
        "position": TextSetting(many=False, optional=False, verbatim=False),
        "name": TextSetting(many=False, optional=True, verbatim=False),
        "files": TextSetting(many=True, optional=False, verbatim=False),
        "prompt": TextSetting(many=False, optional=False, verbatim=True),
    }
    assert read(quoted(typed, known, sweep=True)) == jobs
