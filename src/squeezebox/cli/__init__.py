"""The command line: arguments in, calls to session and reports, tables and files out.

In: ``sys.argv`` and, for the data set, ``SQUEEZEBOX_DATA``. Out: text, JSON and an exit status.
May touch: everything below it; the only room that prints and touches environment variables.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from squeezebox.cli._interface import name_interface
from squeezebox.cli._output import open_streams, written
from squeezebox.schema import OptionError, SqueezeboxError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``squeezebox`` with these arguments (default: ``sys.argv``), and exit.

    Exit status: 0 done, 2 a wrong option or argument, 1 anything else. Results go to standard output,
    progress and errors to standard error. torch's profiler measures peaks here; its own messages on
    standard error are switched off by ``KINETO_LOG_LEVEL`` and ``TORCH_CPP_LOG_LEVEL``, unless they are set.
    Nor does ``GLOO_SOCKET_IFNAME`` change where it is set: see :func:`name_interface`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    name_interface()
    from squeezebox.cli._app import app

    with open_streams():
        try:
            with written():
                app(args=None if arguments is None else list(arguments), prog_name="squeezebox")
        except SqueezeboxError as error:
            print(f"squeezebox: {_as_options(str(error))}", file=sys.stderr)
            sys.exit(2 if isinstance(error, OptionError) else 1)


# What the functions of Python call what these options give; the commands' names for them.
_OPTIONS = {
    "sample=(inputs, target)": "--sample module:callable",
    "sample=": "--sample",
    "loss_fn=": "--loss",
    "input_shape=": "--input",
    "input_dtype=": "--input-dtype",
    "memory=, such as '8GiB'": "--memory 8GiB",
    "squeezebox.max_batch(budget=...)": "squeezebox max-batch --budget ...",
}


def _as_options(message: str) -> str:
    """An error of the functions below in the words of the command line."""
    for argument, option in _OPTIONS.items():
        message = re.sub(rf"(?<![\w-]){re.escape(argument)}", option, message)
    return message
