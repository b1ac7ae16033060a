"""How many bytes live at once, and where bytes go that are not held in the allocator's memory.

In: running code; flat tensors. Out: peaks; slots to read the tensors back from, exactly.
May touch: torch's profiler, tensors' bytes, pinned host memory with streams to it, and one temporary file of
its own.
"""

from squeezebox.memory._peak import Peak, PeakMeter, Recording
from squeezebox.memory._spill import Slot, Spill
from squeezebox.memory._staging import HostSlot, Staging, Streams
from squeezebox.memory._streams import CudaStreams

__all__ = [
    "CudaStreams",
    "HostSlot",
    "Peak",
    "PeakMeter",
    "Recording",
    "Slot",
    "Spill",
    "Staging",
    "Streams",
]
