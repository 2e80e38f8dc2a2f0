"""Standard output and error: what a terminal or log cannot show is replaced, and never stops a training run."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator


def replace_what_cannot_be_shown() -> None:
    """A terminal or log of another encoding than UTF-8, such as a code page of Windows, gets a ? in its place."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        sys.stdout.reconfigure(errors="replace")  # standard error writes \\xe9 by itself


class _NeverFails(io.FileIO):
    """A file that takes whatever is written, and loses what it cannot keep."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


@contextlib.contextmanager
def printing_never_fails() -> Iterator[None]:
    """While this lasts, nobody who stops reading, such as `head`, and no full disk makes printing raise an error."""
    with (
        contextlib.redirect_stdout(_never_failing(sys.stdout)),
        contextlib.redirect_stderr(_never_failing(sys.stderr)),
    ):
        yield


def _never_failing(stream):
    if stream is None:  # closed, as `>&-` does
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    # The descriptor is a copy: handlers of logging keep the stream when this process has closed the original.
    file = io.BufferedWriter(_NeverFails(os.dup(stream.fileno()), "w"))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)


def reader_left() -> None:
    """End well when who reads standard output, such as `head`, has enough."""
    _drop_the_rest()
    sys.exit(0)


def finish() -> None:
    """Write the rest of standard output.

    Raises:
        OSError: it cannot be written.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_the_rest()
        raise


def _drop_the_rest() -> None:
    """What is still buffered would fail once more as the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
