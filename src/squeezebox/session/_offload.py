"""Where a session moves tensors to."""

from __future__ import annotations

from squeezebox.capture import Store
from squeezebox.memory import DiskFolder, disk_folder
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, OptionError
from squeezebox.session._places import places_of


def make_room(store: Store, plan: StepPlan, notes: dict[str, None]) -> None:
    """Have a session's tensors go where the plan says; another folder than the plan's is noted.

    Raises:
        OptionError: tensors are moved, and there is no folder on a disk.
    """
    store.plan_arena(*places_of(plan))
    if plan.keys(Action.OFFLOAD) and store.staging is None:
        store.spill.folder = _folder_of(plan, notes)


def _folder_of(plan: StepPlan, notes: dict[str, None]) -> DiskFolder:
    if plan.offload is None:
        return disk_folder()
    try:
        return disk_folder(plan.offload.folder)
    except OptionError as error:
        other = disk_folder()
        notes[f"tensors are offloaded to {other} instead of the plan's folder: {error}"] = None
        return other
