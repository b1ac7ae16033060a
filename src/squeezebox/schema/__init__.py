"""The nouns that cross walls: frozen dataclasses and the exception tree.

In: plain Python values. Out: the same values, named and checked.
May touch: the standard library only; no tensor math, no torch.
"""

from squeezebox.schema._errors import (
    AttachError,
    BudgetError,
    CaptureError,
    CodecError,
    DatasetError,
    FormatError,
    OptionError,
    OutputError,
    PlanError,
    SqueezeboxError,
    UnsupportedModelError,
)
from squeezebox.schema._plan import (
    Action,
    Budget,
    Moment,
    Option,
    Plan,
    Profile,
    Region,
    Shortage,
    StepProfile,
    TensorProfile,
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
    "Action",
    "AttachError",
    "Budget",
    "BudgetError",
    "CaptureError",
    "Check",
    "CodecError",
    "DatasetError",
    "Edge",
    "FormatError",
    "Injection",
    "Moment",
    "NodeStatistics",
    "Option",
    "OptionError",
    "OutputError",
    "Plan",
    "PlanError",
    "Profile",
    "Reads",
    "Region",
    "Role",
    "SavedTensor",
    "Shortage",
    "SqueezeboxError",
    "StepProfile",
    "StepRecord",
    "StepStatistics",
    "TensorProfile",
    "TensorStatistics",
    "UnsupportedModelError",
]
