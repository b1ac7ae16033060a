"""One finished training of an audit, and its file."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from squeezebox.schema import FormatError, write_whole

_ARRAYS = ("predictions", "targets", "groups", "weights")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditRecord:
    """What a training gave: n predicted classes, their targets, and k numbers that stand for its weights.

    ``series`` names what varied: "everything", one factor, or "control". ``groups`` has a name for each
    sample, or is empty. ``weights`` are normalised to length 1; of models with more than 65,536 parameters a
    sketch. ``digest`` is equal where all parameters, buffers and outputs are equal to the bit.
    """

    arm: str
    series: str
    seed: int
    predictions: NDArray[np.int64]
    targets: NDArray[np.int64]
    groups: NDArray[np.str_]
    weights: NDArray[np.float32]
    score: float
    finite: bool
    digest: str
    seconds: float

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all; OutputError if the path cannot be written."""
        content = io.BytesIO()
        np.savez(content, **{name: getattr(self, name) for name in AuditRecord.__slots__})
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AuditRecord:
        """What :meth:`save` wrote; FormatError if the file is damaged or of something else."""
        try:
            with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
                values = {
                    name: file[name] if name in _ARRAYS else file[name].item() for name in cls.__slots__
                }
        except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
            raise FormatError(
                f"{path} is no finished training of an audit ({error}). Delete it, and the audit "
                "will train it again."
            ) from error
        return cls(**values)
