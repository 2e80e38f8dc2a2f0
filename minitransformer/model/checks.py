"""What every config checks of itself. An error is one line that names the field, what was found and what works."""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass
class Choice:
    """One choice of a config group, such as optimizer=muon.

    kind: its name, which is kept with its other settings. Another choice is made by the group alone.
    """

    group: ClassVar[str]

    kind: str = ""

    def __post_init__(self) -> None:
        own = type(self).kind
        if self.kind != own:
            raise ValueError(
                f"{self.group}.kind={self.kind} does not choose: {self.group}={own} does; "
                f"write {self.group}={self.kind} instead"
            )


def choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError when `value` is not one of `allowed`, naming the field and what would work."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError when `value` is below `least` (or NaN), naming the field and both numbers."""
    if not value >= least:
        raise ValueError(f"{name}={value} is too small; it must be at least {least}")


def positive(name: str, value: float) -> None:
    """Raise ValueError when `value` is not a finite number above 0, naming the field."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be a finite number above 0")


def fraction(name: str, value: float) -> None:
    """Raise ValueError when `value` is outside [0, 1), naming the field."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} is out of range; it must be at least 0 and below 1")
