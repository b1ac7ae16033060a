"""Which bytes live at once, which may be used again, and where bytes go that the allocator does not hold.

In: running code, buffers' lifetimes, operators on streams, tensors. Out: peaks, safe offsets, slots to read.
May touch: torch's profiler, tensors' bytes, pinned host memory with streams to it, one temporary file.
"""

from squeezebox.memory._csv import layout_csv, read_buffers
from squeezebox.memory._layout import Packer, layout, verify
from squeezebox.memory._peak import Peak, PeakMeter, Recording
from squeezebox.memory._problem import Problem
from squeezebox.memory._reserve import HEADROOM, Reserve, Room, aligned
from squeezebox.memory._search import search
from squeezebox.memory._sharing import safe_sharing
from squeezebox.memory._somas import somas
from squeezebox.memory._spill import Slot, Spill
from squeezebox.memory._staging import HostSlot, Staging, Streams
from squeezebox.memory._streams import CudaStreams, is_capturing

__all__ = [
    "HEADROOM",
    "CudaStreams",
    "HostSlot",
    "Packer",
    "Peak",
    "PeakMeter",
    "Problem",
    "Recording",
    "Reserve",
    "Room",
    "Slot",
    "Spill",
    "Staging",
    "Streams",
    "aligned",
    "is_capturing",
    "layout",
    "layout_csv",
    "read_buffers",
    "safe_sharing",
    "search",
    "somas",
    "verify",
]
