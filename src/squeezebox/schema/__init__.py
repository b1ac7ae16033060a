"""The nouns that cross walls: frozen dataclasses and the exception tree.

In: plain Python values. Out: the same values, named and checked.
May touch: the standard library only; no tensor math, no torch.
"""

from squeezebox.schema._errors import (
    AttachError,
    CaptureError,
    CodecError,
    DatasetError,
    FormatError,
    OptionError,
    OutputError,
    SqueezeboxError,
    UnsupportedModelError,
)
from squeezebox.schema._saved import (
    Check,
    Edge,
    Injection,
    NodeStatistics,
    Reads,
    Role,
    SavedTensor,
    StepRecord,
    StepStatistics,
    TensorStatistics,
)

__all__ = [
    "AttachError",
    "CaptureError",
    "Check",
    "CodecError",
    "DatasetError",
    "Edge",
    "FormatError",
    "Injection",
    "NodeStatistics",
    "OptionError",
    "OutputError",
    "Reads",
    "Role",
    "SavedTensor",
    "SqueezeboxError",
    "StepRecord",
    "StepStatistics",
    "TensorStatistics",
    "UnsupportedModelError",
]
