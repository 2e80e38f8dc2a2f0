"""Numbers as people and JSON say them, and texts as they are typed."""

import json
import math

VERBATIM = {"verbatim": True}  # metadata of a field that holds prose or code: nothing in it means anything to us


def short(number: float | None, unit: str = "") -> str:
    """1,088,208 as 1.09 M, to three digits; a dash where there is none."""
    if number is None:
        return "-"
    number = float(f"{number:.3g}")  # so that 999,999 is a million
    for power, letter in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """5,000 seconds as 83.3 min."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.0f} s"


def with_line_ends(typed: str) -> str:
    """A text in which \\n and \\t stand for a line end and a tab, which are hard to type on a command line."""
    return typed.replace("\\n", "\n").replace("\\t", "\t")


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinite where that is beyond all floats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def to_json(value: object) -> str:
    """One line of JSON, with null for the numbers that JSON lacks: NaN and infinities."""
    return json.dumps(_known(value), ensure_ascii=False, allow_nan=False)


def _known(value: object) -> object:
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_known(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
