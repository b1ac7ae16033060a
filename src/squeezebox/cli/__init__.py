"""The command line: arguments in, calls to session and reports, tables and files out.

In: ``sys.argv`` and, for the data set, ``SQUEEZEBOX_DATA``. Out: text, JSON and an exit status.
May touch: everything below it; the only room that prints and touches environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from squeezebox.schema import OptionError, SqueezeboxError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``squeezebox`` with these arguments (default: ``sys.argv``), and exit.

    Exit status: 0 done, 2 a wrong option or argument, 1 anything else. Results go to standard output,
    progress and errors to standard error. torch's profiler measures peaks here; its own messages on
    standard error are switched off by ``KINETO_LOG_LEVEL`` and ``TORCH_CPP_LOG_LEVEL``, unless they are set.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from squeezebox.cli._app import app

    try:
        app(args=None if arguments is None else list(arguments), prog_name="squeezebox")
    except SqueezeboxError as error:
        print(f"squeezebox: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, OptionError) else 1)
