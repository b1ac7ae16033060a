"""Jobs that share a device, as a TOML file has them."""

from __future__ import annotations

import os
import sys
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any

from squeezebox.schema._errors import FormatError
from squeezebox.schema._files import checked, load_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class JobKind(Enum):
    """Training has backward and an optimizer; the others only a forward, evaluation with the loss."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    SERVING = "serving"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One job: a step that comes ``frames`` times, every ``every_seconds``.

    ``deadline_seconds`` count from there; 0: until the next one comes. The others are what the options of
    ``squeezebox estimate`` of these names are, "" or 0 for their defaults.
    """

    name: str
    kind: JobKind
    model: str
    every_seconds: float
    deadline_seconds: float = 0.0
    frames: int = 100
    input: str = ""
    batch: int = 0
    sample: str = ""
    loss: str = ""
    optimizer: str = "sgd-momentum"
    input_dtype: str = ""

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> JobSpec:
        """A job of a TOML file's values; FormatError where one is missing or out of range."""
        defaults = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
        made = cls(**checked(cls, {**defaults, **values} if isinstance(values, dict) else values, where))
        if not (made.every_seconds > 0.0 and made.frames > 0):
            raise FormatError(
                f"{where} has {made.frames} frames, one every {made.every_seconds:g} s, of which neither may "
                "be 0"
            )
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class JobList:
    """The jobs of a file; their names are their own."""

    jobs: tuple[JobSpec, ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> JobList:
        """What a person wrote.

        Raises:
            FormatError: the file is missing or damaged, or two jobs have one name.
        """
        return load_text(path, "list of jobs", "an editor; docs/estimate.md has one", _from_toml)


def _from_toml(text: str) -> JobList:
    made = JobList(**checked(JobList, tomllib.loads(text)))
    names = [job.name for job in made.jobs]
    if len(names) != len(set(names)) or not names:
        twice = next((name for name in names if names.count(name) > 1), None)
        raise FormatError("there is no job" if twice is None else f"two jobs are called {twice!r}")
    return made
