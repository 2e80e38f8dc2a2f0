"""What every config checks of itself. An error is one line that names the field, what was found and what works."""

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


COUNT = 2**31 - 1  # no count is larger
# Nor is another number; sums and products of a few between these are finite, and not 0, in fp32.
SMALL, LARGE = 1e-30, 1e30


def count(name: str, value: int, least: int = 1, most: int = COUNT) -> None:
    """Raise ValueError when `value` is no whole number from `least` to `most`, naming the field and the bound."""
    if not value >= least:
        raise ValueError(f"{name}={value} is too small; it must be at least {least}")
    if value > most:
        raise ValueError(f"{name}={value} is too large; it must be at most {most}")
    if value != int(value):
        raise ValueError(f"{name}={value} must be a whole number")


def at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError when `value` is below `least`, above `LARGE` or NaN, naming the field and the bound."""
    if not value >= least:
        raise ValueError(f"{name}={value} is too small; it must be at least {least}")
    if value > LARGE:
        raise ValueError(f"{name}={value} is too large; it must be at most {LARGE}")


def positive(name: str, value: float) -> None:
    """Raise ValueError when `value` is not a finite number above 0, naming the field."""
    if not value > 0:
        raise ValueError(f"{name}={value} must be a finite number above 0")
    finite(name, value)


def finite(name: str, value: float) -> None:
    """Raise ValueError when `value` is neither 0 nor of a size from `SMALL` to `LARGE`, naming the field."""
    if value != 0 and not SMALL <= abs(value) <= LARGE:
        raise ValueError(f"{name}={value} must be a finite number, 0 or between {SMALL} and {LARGE} in size")


def fraction(name: str, value: float, zero: bool = True, one: bool = False) -> None:
    """Raise ValueError when `value` is outside 0 to 1, naming the field; zero, one: may it be 0, or 1?"""
    if not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        low, high = "at least" if zero else "above", "at most" if one else "below"
        raise ValueError(f"{name}={value} is out of range; it must be {low} 0 and {high} 1")
