"""What training prints. It never stops a run: the stream may be closed or full, or know few characters."""

import io
import os
import sys
from contextlib import suppress
from typing import IO, Any

from rich.console import Console

NOWHERE = open(os.devnull, "w")  # noqa: SIM115  open as long as the process


class Unstoppable:
    """A stream of text that is given up for good, with a word on stderr, when it cannot be written.

    stream: None or a closed one is written nowhere. Characters that its encoding lacks are written as escapes.
    """

    def __init__(self, stream: IO[str] | None):
        self.stream = NOWHERE if stream is None or stream.closed else stream
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        os.dup2(NOWHERE.fileno(), self.stream.fileno())  # where Python also flushes what the stream still holds
        self.stream = NOWHERE
        with suppress(OSError):  # stderr may be in the same state
            print(f"standard output: {error.strerror}; training goes on", file=sys.stderr)


def make_console(quiet: bool) -> Console:
    """The console of a training run, on standard output. quiet: of a rank that says nothing."""
    stream = Unstoppable(sys.stdout)
    return Console(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet,
        force_interactive=None if stream.isatty() else False,  # FORCE_COLOR may colour a log, no more
    )  # fmt: skip
