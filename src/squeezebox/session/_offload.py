"""Where a session moves tensors to, and the places and weights that a plan counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from squeezebox import codecs
from squeezebox.capture import Store
from squeezebox.memory import (
    HEADROOM,
    DiskFolder,
    FileTensor,
    StoredTensor,
    TensorFile,
    Weights,
    aligned,
    disk_folder,
    movable_weights,
    sectors,
)
from squeezebox.optim import Updates, splittable
from squeezebox.reports import StepPlan, human_bytes
from squeezebox.schema import Action, BudgetError, CodecError, Option, OptionError, PlanError, StepProfile


def places_of(plan: StepPlan) -> tuple[dict[str, int], list[int]]:
    """Bytes that the plan counts for packed tensors whose size varies, by key; and of those it moves."""
    packed = {each.key: each.option.held_bytes for each in plan.tensors if _varies(each.option)}
    moved = [each.saved_bytes for each in plan.tensors if each.option.action is Action.OFFLOAD]
    return packed, moved


def profile_with_places(seen: StepProfile) -> StepProfile:
    """The profile with options that hold their places."""
    tensors = tuple(
        replace(tensor, options=tuple(_placed(option) for option in tensor.options))
        for tensor in seen.profile.tensors
    )
    return replace(seen, profile=replace(seen.profile, tensors=tensors))


def plan_with_places(plan: StepPlan) -> StepPlan:
    """The plan with places counted that it was made without, all of them at its peak.

    Raises:
        BudgetError: that is more than the plan's budget.
    """
    tensors = tuple(replace(each, option=_placed(each.option)) for each in plan.tensors)
    pairs = zip(tensors, plan.tensors, strict=True)
    added = sum(new.option.held_bytes - old.option.held_bytes for new, old in pairs)
    reached = plan.predicted_peak_bytes + added
    if plan.budget_bytes is not None and reached > plan.budget_bytes:
        raise BudgetError(
            f"the plan predicts a peak of {human_bytes(plan.predicted_peak_bytes)}, and an arena may add "
            f"{human_bytes(added)}: more than the budget, {human_bytes(plan.budget_bytes)}. Make the plan "
            "with squeezebox.plan(..., arena=True), or attach it without an arena."
        )
    peak = plan.peak
    if peak is not None:
        parts = replace(peak.parts, saved_bytes=peak.parts.saved_bytes + added)
        peak = replace(peak, parts=parts)
    return replace(plan, tensors=tensors, predicted_peak_bytes=reached, peak=peak, arena=True)


def _placed(option: Option) -> Option:
    if not _varies(option):
        return option
    return replace(option, held_bytes=aligned(math.ceil(HEADROOM * option.held_bytes)))


def _varies(option: Option) -> bool:
    """Whether it is packed, in the host's memory, in as many bytes as it takes."""
    if option.action is not Action.COMPRESS or option.lasting or option.codec not in codecs.available():
        return False
    return not codecs.get(option.codec).fixed_size


class PackedTensor(StoredTensor):
    """A tensor in a codec's form: every operator unpacks it, and one that works in place packs it again.

    Args:
        like: its shape and layout are taken. There are no elements before :meth:`store`.
        codec: which packs it.
    """

    def __init__(self, like: torch.Tensor, codec: codecs.Codec) -> None:
        self._codec = codec
        self._packed: codecs.Packed | None = None

    def parts(self) -> Iterable[torch.Tensor]:
        """The codes, and what their groups have."""
        return () if self._packed is None else self._packed.payload

    def store(self, value: torch.Tensor) -> None:
        """Take these elements, rounded; CodecError if some are not finite."""
        if not bool(value.isfinite().all()):
            raise CodecError(
                "NaN or infinity cannot be put into a frozen weight that is packed; make the plan without "
                "weight_noise, which leaves weights exact."
            )
        self._packed = self._codec.pack(value)

    def load(self) -> torch.Tensor:
        """The rounded elements, in memory of their own."""
        assert self._packed is not None
        return self._codec.unpack(self._packed)


def codec_of(bits: int) -> codecs.Codec:
    """What packs a frozen weight in 8 or 4 bits an element: levels between each group's least and largest."""
    return codecs.get(f"minmax{bits}")


def make_room(store: Store, plan: StepPlan, notes: dict[str, None]) -> None:
    """Have a session's tensors go where the plan says; another folder than the plan's is noted.

    Raises:
        OptionError: tensors are moved, and there is no folder on a disk, or the neighbour's memory is
            missing or too small.
    """
    packed, moved = places_of(plan)
    store.plan_arena(packed, moved)
    if not moved:
        store.spill.rest()
    if store.staging is not None:  # copies under way may take what the plan leaves of its budget
        left = (plan.budget_bytes or plan.predicted_peak_bytes) - plan.predicted_peak_bytes
        store.staging.most_bytes = max(left, 0)
        return
    if not moved:
        return
    if store.spill.folder is None and any(each.option.codec == "neighbour" for each in plan.tensors):
        where = "a neighbour" if plan.offload is None else plan.offload.folder
        raise OptionError(
            f"the plan moves tensors to {where}, and no neighbour was given: pass attach(..., "
            "offload=squeezebox.memory.Neighbour(rank=...)), or make a plan with another offload."
        )
    place = store.spill.folder = store.spill.folder or _folder_of(plan, notes)
    needed = sum(map(sectors, moved))
    if place.most_bytes is not None and needed > place.most_bytes:
        raise OptionError(
            f"the plan moves {human_bytes(needed)}, and {place} has {human_bytes(place.most_bytes)}. "
            f"{place.advice[0]}"
        )


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
