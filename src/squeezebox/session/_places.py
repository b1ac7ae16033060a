"""What a plan counts for an arena: a place for every packed tensor whose size varies."""

from __future__ import annotations

import math
from dataclasses import replace

from squeezebox import codecs
from squeezebox.memory import HEADROOM, aligned
from squeezebox.reports import StepPlan, human_bytes
from squeezebox.schema import Action, BudgetError, Option, StepProfile


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
