"""Which bytes a step may use again, and where bytes go that are not held in the allocator's memory.

In: buffers' lifetimes, operators on streams, flat tensors. Out: offsets that never clash, slots to read back.
May touch: torch tensors' bytes, pinned host memory with streams to it, and one temporary file of its own.
"""

from squeezebox.memory._csv import layout_csv, read_buffers
from squeezebox.memory._layout import Packer, layout, verify
from squeezebox.memory._problem import Problem
from squeezebox.memory._reserve import Reserve, Room
from squeezebox.memory._search import search
from squeezebox.memory._sharing import safe_sharing
from squeezebox.memory._somas import somas
from squeezebox.memory._spill import Slot, Spill
from squeezebox.memory._staging import HostSlot, Staging, Streams
from squeezebox.memory._streams import CudaStreams

__all__ = [
    "CudaStreams",
    "HostSlot",
    "Packer",
    "Problem",
    "Reserve",
    "Room",
    "Slot",
    "Spill",
    "Staging",
    "Streams",
    "layout",
    "layout_csv",
    "read_buffers",
    "safe_sharing",
    "search",
    "somas",
    "verify",
]
