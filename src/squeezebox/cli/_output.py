"""Standard streams that are closed or full."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from squeezebox.schema import OutputError


@contextlib.contextmanager
def open_streams() -> Iterator[None]:
    """Within it, a standard stream that is closed takes what is written, and keeps nothing."""
    with contextlib.ExitStack() as opened:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, opened.enter_context(open(os.devnull, "w")))
                opened.callback(setattr, sys, name, None)
        yield


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Around a command: its results are written when this ends.

    Raises:
        OutputError: where they go, there is no room.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has had enough, as head
        _write_no_more()
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _write_no_more()
        raise OutputError(f"cannot write: {error}. Make room there, or write elsewhere.") from None


def _write_no_more() -> None:
    """Python flushes standard output again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
