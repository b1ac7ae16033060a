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
            print(f"squeezebox: {as_options(str(error))}", file=sys.stderr)
            sys.exit(2 if isinstance(error, OptionError) else 1)


# What the functions of Python call what these options give; the commands' names for them.
OPTIONS = {
    r"squeezebox\.max_batch\(budget=\.\.\.\)": "squeezebox max-batch --budget ...",
    r"squeezebox\.plan\(\)": "squeezebox plan",
    r"[\w.]+\([^()]*\)": "",  # other calls are the user's program, and stay
    r"sample=\(inputs, target\)": "--sample module:callable",
    r"sample=": "--sample",
    r"loss_fn(?:=|(?= returned))": "--loss",
    r"input_shape=": "--input",
    r"input_dtype=": "--input-dtype",
    r"memory=, such as '8GiB'": "--memory 8GiB",
    r"memory_bytes(?:=|(?= \S+ is ))": "--memory",
    r"devices=": "--devices",
    r"ranks=": "--ranks",
    r"workers=": "--workers ",
    r"states=True": "--states",
    r"offload=True": "--offload",
    r"offload=False": "--no-offload",
    r"offload=(?=')": "--offload-folder ",
    r"recompute=False": "--no-recompute",
    r"load=(?=')": "--load ",
    r"update_noise\b": "--update-noise",
    r"weight_noise\b": "--weight-noise",
    r"time_limit\b": "--time-limit",
    r"noise=(?=\S+ is not )": "--noise ",
    r"exact=True": "--exact",
}
_SPELLING = re.compile(rf"(?<![\w./-])(?:{'|'.join(f'({each})' for each in OPTIONS)})")


def as_options(message: str) -> str:
    """An error of the functions below in the words of the command line."""
    named = list(OPTIONS.values())
    return _SPELLING.sub(lambda found: named[(found.lastindex or 1) - 1] or found[0], message)
