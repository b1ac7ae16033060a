"""Where a session moves tensors to."""

from __future__ import annotations

import torch

from squeezebox.capture import Store
from squeezebox.memory import (
    DiskFolder,
    FileTensor,
    StoredTensor,
    TensorFile,
    Weights,
    disk_folder,
    movable_weights,
)
from squeezebox.optim import Updates, splittable
from squeezebox.reports import StepPlan
from squeezebox.schema import Action, OptionError, PlanError
from squeezebox.session._packed_weights import PackedTensor, codec_of
from squeezebox.session._places import places_of


def make_room(store: Store, plan: StepPlan, notes: dict[str, None]) -> None:
    """Have a session's tensors go where the plan says; another folder than the plan's is noted.

    Raises:
        OptionError: tensors are moved, and there is no folder on a disk.
    """
    store.plan_arena(*places_of(plan))
    if plan.keys(Action.OFFLOAD) and store.staging is None:
        store.spill.folder = _folder_of(plan, notes)


def updates_of(
    plan: StepPlan, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Updates | None:
    """The optimizer's updates as the plan says; None where they stay as they are.

    Raises:
        OptionError: there is no optimizer, or its step is not parameter by parameter.
        PlanError: the model has no parameter of a name in the plan.
    """
    if plan.optimizer is None:
        return None
    if optimizer is None:
        raise OptionError(
            "the plan was made with states=True, for an optimizer's updates, and none was given; pass it as "
            "attach(model, optimizer=optimizer, plan=plan)."
        )
    in_file = (*plan.optimizer.states, *plan.optimizer.gradients)
    names = (*in_file, *plan.optimizer.packed, *plan.optimizer.sliced, *plan.optimizer.split)
    known, stepped = (
        dict(model.named_parameters()),
        {id(p) for g in optimizer.param_groups for p in g["params"]},
    )
    missing = next((name for name in names if id(known.get(name)) not in stepped), None)
    if missing is None and plan.optimizer.split:
        missing = next(iter({*plan.optimizer.split} - splittable(model, 0).keys()), None)
    kind = type(optimizer).__name__
    if missing is not None or kind != plan.optimizer.name:
        raise PlanError(
            f"the plan, made for {plan.model} and its {plan.optimizer.name}, "
            + (f"has the parameter '{missing}'" if missing is not None else "counts that one's state")
            + f", and this {type(model).__name__} with its {kind} has another. Make a plan for these with "
            "squeezebox.plan()."
        )
    return Updates(
        model,
        optimizer,
        in_backward=plan.optimizer.in_backward,
        states=plan.optimizer.states,
        packed=plan.optimizer.packed,
        gradients=plan.optimizer.gradients,
        sliced=plan.optimizer.sliced,
        split=plan.optimizer.split,
        folder=_folder_of(plan, {}) if in_file else None,
    )


def weights_of(plan: StepPlan, model: torch.nn.Module) -> Weights | None:
    """The model's frozen weights in a file or packed, as the plan says; None where all stay.

    Raises:
        PlanError: the model has no such frozen weight of a name in the plan.
    """
    chosen = plan.weights
    if chosen is None or not (chosen.moved or chosen.packed):
        return None
    known, names = movable_weights(model, 0), (*chosen.moved, *chosen.packed)
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise PlanError(
            f"the plan moves or packs the frozen weight '{missing}', and this {type(model).__name__} has "
            "none of that name that is frozen, on the CPU and shares no memory. Make a plan for it with "
            "squeezebox.plan()."
        )
    file = TensorFile(_folder_of(plan, {}), reads_on=True) if chosen.moved else None

    def home(name: str, value: torch.Tensor) -> StoredTensor:
        if name in chosen.packed:
            return PackedTensor(value, codec_of(chosen.packed[name]))
        assert file is not None
        return FileTensor(value, file)

    return Weights({name: known[name] for name in names}, home, file)


def _folder_of(plan: StepPlan, notes: dict[str, None]) -> DiskFolder:
    if plan.offload is None:
        return disk_folder()
    try:
        return disk_folder(plan.offload.folder)
    except OptionError as error:
        other = disk_folder()
        notes[f"tensors are offloaded to {other} instead of the plan's folder: {error}"] = None
        return other
