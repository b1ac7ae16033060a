"""The exception tree. Every error says what happened (with numbers), why it matters and what to do."""


class SqueezeboxError(Exception):
    """Root of every error raised on purpose by Squeezebox."""


class OptionError(SqueezeboxError, ValueError):
    """An argument or a command-line option is unknown or out of range."""


class AttachError(SqueezeboxError, RuntimeError):
    """A session is in the wrong state: attached twice, already detached, entered twice."""


class UnsupportedModelError(SqueezeboxError, RuntimeError):
    """The model cannot be captured as it is (two devices, Python hooks over compiled code)."""


class CaptureError(SqueezeboxError, RuntimeError):
    """A saved tensor was changed in place, or does not come back as it was saved."""


class CodecError(SqueezeboxError, ValueError):
    """A codec refuses a tensor: wrong dtype, NaN or infinity where the format has none."""


class FormatError(SqueezeboxError, ValueError):
    """Packed bytes are damaged, truncated, or written by a newer format version."""


class PlanError(SqueezeboxError):
    """A step saves what its plan does not know."""


class BudgetError(SqueezeboxError, ValueError):
    """No plan keeps a step within the budget; the message says which budget one would."""

    least_bytes: int | None = None  # that a plan needs, where one was found


class OutOfMemoryError(SqueezeboxError, RuntimeError):
    """A step ran out of memory; the message says where, how much was missing, and what would fit."""


class RankError(SqueezeboxError, RuntimeError):
    """Several ranks cannot begin or go on together; the message names the rank and why."""


class PipelineError(RankError):
    """A pipeline of several ranks cannot start or go on; the message names the rank and why."""


class DatasetError(SqueezeboxError, FileNotFoundError):
    """A data set is missing or damaged; the message says how to get it."""


class OutputError(SqueezeboxError, OSError):
    """A report could not be written; nothing half-written is left behind."""


class MemoryGrowthWarning(UserWarning):
    """What is held between steps grows, or a step exceeds its budget; the message has the figures."""


class PipelineWarning(UserWarning):
    """A pipeline goes on from a checkpoint, but without some of what was saved; the message names it."""


class CaptureWarning(UserWarning):
    """A session captures nothing; the message says why."""


_LONGEST = 300  # characters of somebody else's error in a sentence of ours


def in_one_line(error: BaseException) -> str:
    """``ValueError: what it says first``, without a full stop: for a sentence of another error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    first = first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
