"""What is typed for a setting, in the words of Hydra's grammar: a text stays the text that was typed."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = re.compile(rf"(?:^|,)\s*({_QUOTED}|[^,]*?)\s*(?=,|\Z)", re.DOTALL)
_SWEEP = re.compile(r"\w+\(.*\)", re.DOTALL)  # such as choice(a,b) and glob(*)


@dataclass(frozen=True)
class TextSetting:
    """A setting that holds a text, or a list of texts (`many`). optional: `null` stands for None."""

    many: bool
    optional: bool
    verbatim: bool

    def quoted(self, typed: str) -> str:
        """What was typed, as one value of Hydra's grammar; what it cannot be stays, for Hydra to refuse."""
        if self.optional and typed == "null":
            return typed
        if not self.many:
            return self._text(typed)
        if typed[:1] != "[":
            return f"[{self._text(typed)}]"  # a bare text is a list of one
        if typed[-1:] != "]":
            return typed
        return f"[{','.join(map(self._text, _ITEM.findall(typed[1:-1])))}]"

    def swept(self, typed: str) -> str:
        """The same in a sweep, where commas stand between values."""
        if self.many and typed[:1] == "[":
            return ",".join(map(self.quoted, re.split(r"(?<=\]),\s*(?=\[)", typed)))
        if self.verbatim:
            return self.quoted(typed)
        if _SWEEP.fullmatch(typed):
            return typed
        return ",".join(map(self.quoted, _ITEM.findall(typed)))

    def _text(self, typed: str) -> str:
        if not typed or re.fullmatch(_QUOTED, typed, re.DOTALL):
            return typed
        if self.verbatim:
            return literal(typed.replace("${", "\\${"))
        return literal(os.path.expanduser(typed) if typed.startswith("~/") else typed)


def text_settings(config: type, groups: Mapping[str, Sequence[type]], prefix: str = "") -> dict[str, TextSetting]:
    """The settings of a dataclass that hold texts, by their dotted names.

    groups: the dataclasses that may be chosen for a field of type Any.
    """
    found = {}
    for field in fields(config):
        name = prefix + field.name
        kinds = [field.type] if get_origin(field.type) is list else get_args(field.type) or [field.type]
        if field.type is Any:
            for choice in groups[field.name]:
                found |= text_settings(choice, groups, f"{name}.")
        elif is_dataclass(field.type):
            found |= text_settings(field.type, groups, f"{name}.")
        elif str in kinds or list[str] in kinds:
            found[name] = TextSetting(list[str] in kinds, type(None) in kinds, "verbatim" in field.metadata)
    return found


def quoted(word: str, settings: Mapping[str, TextSetting], sweep: bool = False) -> str:
    """`prompt=def f():` as Hydra's grammar wants it, `prompt='def f():'`; a setting that holds no text stays.

    sweep: commas stand between the values of several jobs.
    """
    name, equals, typed = word.partition("=")
    setting = settings.get(name.lstrip("+"))
    if setting is None or not equals:
        return word
    return name + equals + (setting.swept(typed) if sweep else setting.quoted(typed))


def literal(text: str) -> str:
    """Any text as a quoted value of Hydra's grammar."""
    # A quote, and backslashes before one, are escaped.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text) + "'"
