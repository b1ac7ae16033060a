"""Where tensors are moved to: a folder that is named, or a usual one on a disk."""

from __future__ import annotations

import os
from dataclasses import replace

from squeezebox.memory import DiskFolder, disk_folder, disk_speed, offload_record, usual_folder
from squeezebox.reports import StepPlan


def named_folder(offload: bool | str | os.PathLike[str]) -> DiskFolder:
    """That of squeezebox.plan()'s argument.

    Raises:
        OptionError: it is in memory, missing or not writable.
    """
    return usual_folder() if isinstance(offload, bool) else disk_folder(offload)


def with_folder(plan: StepPlan, folder: DiskFolder) -> StepPlan:
    """The plan, saying where it moves tensors to, if any, and what that takes."""
    saved = sum(each.saved_bytes for each in plan.tensors if each.option.codec == "file")
    others = (plan.optimizer, plan.weights)
    moved = [saved, *(0 if each is None else each.moved_bytes for each in others)]
    if not any(moved):
        return plan
    record = offload_record(folder, sum(moved), direct=disk_speed(folder).direct)
    files = sum(nbytes > 0 for nbytes in moved)  # each has buffers of its own
    record = replace(record, buffer_bytes=files * record.buffer_bytes, cache_bytes=files * record.cache_bytes)
    return replace(plan, offload=record)
