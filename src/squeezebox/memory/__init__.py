"""Where bytes go that are not held in the allocator's memory.

In: flat tensors. Out: slots to read them back from, exactly.
May touch: torch tensors' bytes, pinned host memory with streams to it, and one temporary file of its own.
"""

from squeezebox.memory._spill import Slot, Spill
from squeezebox.memory._staging import HostSlot, Staging, Streams
from squeezebox.memory._streams import CudaStreams

__all__ = ["CudaStreams", "HostSlot", "Slot", "Spill", "Staging", "Streams"]
