"""Which bytes live at once, which may be used again, and where bytes go that the allocator does not hold.

In: running code, buffers' lifetimes, operators on streams, tensors. Out: peaks, safe offsets, slots to read.
May touch: torch's profiler, what Linux says of free memory, tensors' bytes, pinned host memory with streams
to it, one temporary file, another rank that lends memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.memory._chunks import CHUNK_BYTES, sectors
from squeezebox.memory._disk import DiskFile, DiskFolder, disk_folder, usual_folder
from squeezebox.memory._disk_speed import DiskSpeed, disk_speed
from squeezebox.memory._elsewhere import Area, Elsewhere, close_at_exit
from squeezebox.memory._mapped_file import mapped_file, nameless_file
from squeezebox.memory._peak import Operator, Peak, PeakMeter, Ran, Recording
from squeezebox.memory._process import Ceiling, ProcessMeter
from squeezebox.memory._reserve import HEADROOM, Reserve, Room, aligned
from squeezebox.memory._room import (
    asked_bytes,
    free_at_peak,
    free_bytes,
    freed_kept,
    freed_returned,
    is_scarce,
    lacks_memory,
    live_bytes,
    require_imports,
    return_all,
    within_room,
)
from squeezebox.memory._spill import BUFFER_BYTES, Slot, Spill, offload_record
from squeezebox.memory._staging import CudaStreams, HostSlot, Staging, Streams, is_capturing
from squeezebox.memory._stored import (
    Absent,
    Lender,
    Loans,
    MovedWeight,
    StoredTensor,
    flat_in_memory,
    is_view,
    move,
    settle,
)
from squeezebox.memory._tensor_file import FileTensor, Place, TensorFile, parts_of
from squeezebox.memory._weights import Weights, movable_weights, show_whole
from squeezebox.schema import door

__all__ = [
    "BUFFER_BYTES",
    "CHUNK_BYTES",
    "Ceiling",
    "HEADROOM",
    "Absent",
    "Area",
    "CudaStreams",
    "DiskFile",
    "DiskFolder",
    "DiskSpeed",
    "Elsewhere",
    "FileTensor",
    "HostSlot",
    "Lender",
    "Loans",
    "MovedWeight",
    "Operator",
    "Ran",
    "Neighbour",
    "Packer",
    "Peak",
    "PeakMeter",
    "Place",
    "Problem",
    "ProcessMeter",
    "Recording",
    "Reserve",
    "Room",
    "RowFile",
    "Slot",
    "Spill",
    "Staging",
    "StoredTensor",
    "Streams",
    "TensorFile",
    "Weights",
    "aligned",
    "asked_bytes",
    "close_at_exit",
    "disk_folder",
    "disk_speed",
    "flat_in_memory",
    "free_at_peak",
    "free_bytes",
    "freed_kept",
    "freed_returned",
    "is_scarce",
    "is_capturing",
    "is_view",
    "lacks_memory",
    "layout",
    "layout_csv",
    "lend",
    "live_bytes",
    "mapped_file",
    "movable_weights",
    "move",
    "nameless_file",
    "offload_record",
    "parts_of",
    "read_buffers",
    "read_rows",
    "require_imports",
    "return_all",
    "safe_sharing",
    "search",
    "sectors",
    "settle",
    "show_whole",
    "somas",
    "usual_folder",
    "verify",
    "within_room",
]

if TYPE_CHECKING:
    from squeezebox.memory._layout import Packer, layout, verify
    from squeezebox.memory._neighbour import Neighbour, lend
    from squeezebox.memory._problem import Problem, layout_csv, read_buffers
    from squeezebox.memory._row_file import RowFile, read_rows
    from squeezebox.memory._search import search
    from squeezebox.memory._sharing import safe_sharing
    from squeezebox.memory._somas import somas
else:
    # Those that load numba or torch.distributed, which takes longer than all the rest of attach().
    _FILES = {
        "Neighbour": "_neighbour",
        "Packer": "_layout",
        "Problem": "_problem",
        "RowFile": "_row_file",
        "layout": "_layout",
        "layout_csv": "_problem",
        "lend": "_neighbour",
        "read_buffers": "_problem",
        "read_rows": "_row_file",
        "safe_sharing": "_sharing",
        "search": "_search",
        "somas": "_somas",
        "verify": "_layout",
    }
    __getattr__ = door(__name__, _FILES)

    def __dir__() -> list[str]:
        """Name everything exported, imported or not: the documentation and completion read this."""
        return sorted([*globals(), *_FILES])
