"""See what autograd saves, tensor by tensor, and hold something smaller in its place.

In: a model, a policy that picks codecs and bounds. Out: rows of saved tensors, due statistics, checks.
May touch: torch's saved-tensor hooks, function modes, autograd nodes and compiler; codecs and bounds below.
"""

from squeezebox.capture._compiled._bits import BitRule, HalfSteps
from squeezebox.capture._compiled._codes import BITS
from squeezebox.capture._compiled._step import CompiledStep
from squeezebox.capture._contracts import Choice, Policy
from squeezebox.capture._device import DeviceBlocks
from squeezebox.capture._entries import Row, is_plain
from squeezebox.capture._graph import in_backward, leaves
from squeezebox.capture._install import Installation, check_supported, compiled_part, is_innermost
from squeezebox.capture._observe import observing, saved_bytes
from squeezebox.capture._onlooker import Onlooker
from squeezebox.capture._overwrites import Overwrite, Overwrites
from squeezebox.capture._recorder import Recorder
from squeezebox.capture._region import Slicer, Tracer
from squeezebox.capture._register_rule import RegisteredRule, register_rule
from squeezebox.capture._rules import Rule
from squeezebox.capture._statistics import Collector
from squeezebox.capture._stopwatch import Stopwatch
from squeezebox.capture._store import SMALL_BYTES, Store
from squeezebox.capture._surroundings import foreign_hooks, refuse_transforms, why_left_alone
from squeezebox.capture._work import Work, work_of

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
    "Onlooker",
    "Overwrite",
    "Overwrites",
    "Policy",
    "Recorder",
    "RegisteredRule",
    "Row",
    "Rule",
    "Slicer",
    "Stopwatch",
    "Store",
    "Tracer",
    "Work",
    "check_supported",
    "compiled_part",
    "foreign_hooks",
    "in_backward",
    "is_innermost",
    "is_plain",
    "leaves",
    "observing",
    "refuse_transforms",
    "register_rule",
    "saved_bytes",
    "why_left_alone",
    "work_of",
]
