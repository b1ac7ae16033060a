"""Where bytes go that are not held in the allocator's memory.

In: flat tensors on the CPU. Out: slots to read them back from, exactly.
May touch: torch tensors' bytes and one temporary file of its own.
"""

from squeezebox.memory._spill import Slot, Spill

__all__ = ["Slot", "Spill"]
