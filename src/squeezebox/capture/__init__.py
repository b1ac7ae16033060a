"""See what autograd saves, tensor by tensor, and hold something smaller in its place.

In: a model, a policy that picks codecs and bounds. Out: rows of saved tensors, due statistics, checks.
May touch: torch's saved-tensor hooks, function modes, autograd nodes and compiler; codecs and bounds below.
"""

from squeezebox.capture._compiled._codes import BITS, BitRule, HalfSteps
from squeezebox.capture._compiled._spending import Spending
from squeezebox.capture._compiled._step import CompiledStep, Saving
from squeezebox.capture._device import DeviceBlocks
from squeezebox.capture._entries import Row, is_plain
from squeezebox.capture._install import (
    Installation,
    check_supported,
    compiled_part,
    foreign_hooks,
    is_compiled,
    is_innermost,
    refuse_transforms,
    why_left_alone,
)
from squeezebox.capture._onlooker import Onlooker, Stopwatch
from squeezebox.capture._overwrites import Overwrite, Overwrites
from squeezebox.capture._packer import Choice, Policy
from squeezebox.capture._path import ModulePath
from squeezebox.capture._readings import in_backward, leaves
from squeezebox.capture._recorder import Recorder, observing, saved_bytes
from squeezebox.capture._region import Slicer, Tracer, Work, work_of
from squeezebox.capture._register_rule import RegisteredRule, register_rule
from squeezebox.capture._rules import Rule
from squeezebox.capture._statistics import Collector
from squeezebox.capture._store import SMALL_BYTES, Store

__all__ = [
    "SMALL_BYTES",
    "BITS",
    "BitRule",
    "Choice",
    "Collector",
    "CompiledStep",
    "DeviceBlocks",
    "HalfSteps",
    "Installation",
    "ModulePath",
    "Onlooker",
    "Overwrite",
    "Overwrites",
    "Policy",
    "Recorder",
    "RegisteredRule",
    "Row",
    "Rule",
    "Slicer",
    "Spending",
    "Stopwatch",
    "Store",
    "Tracer",
    "Work",
    "check_supported",
    "compiled_part",
    "foreign_hooks",
    "in_backward",
    "is_compiled",
    "is_innermost",
    "is_plain",
    "leaves",
    "observing",
    "refuse_transforms",
    "register_rule",
    "saved_bytes",
    "why_left_alone",
    "work_of",
    "Saving",
]
