"""Frozen weights as rows of a step's profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from squeezebox.memory import disk_speed, lending_seconds, movable_weights, usual_folder
from squeezebox.optim import SMALL_BYTES
from squeezebox.schema import Action, Option, Part, Plan, StepProfile, TensorProfile, WeightsPlan
from squeezebox.steps import TrainingStep


def with_weights(seen: StepProfile, step: TrainingStep) -> StepProfile:
    """The step with a row for every frozen weight that could be in a file.

    Those are the ones that the profiled step has read, and as operators of torch read them.
    """
    folder, known = step.folder or usual_folder(), movable_weights(step.model, SMALL_BYTES)
    sizes = {name: known[name].nbytes for name in seen.profile.weights_at if name in known}
    if not sizes or folder.is_in_memory:
        return seen
    profile, own = seen.profile, sum(sizes.values())
    read = sum(len(profile.weights_at[name]) * nbytes for name, nbytes in sizes.items())
    hidden = seen.plain_seconds / max(read, 1)
    seconds = max(lending_seconds(), disk_speed(folder).reading - hidden)
    rows = [_row(name, nbytes, profile.weights_at[name], seconds) for name, nbytes in sizes.items()]
    made = dataclasses.replace(
        profile,
        parameter_bytes=profile.parameter_bytes - own,
        base_bytes=tuple(nbytes - own for nbytes in profile.base_bytes),
        tensors=(*profile.tensors, *rows),
    )
    saved = seen.saved_bytes | {row.key: sizes[name] for row, name in zip(rows, sizes, strict=True)}
    return dataclasses.replace(seen, profile=made, saved_bytes=saved)


def weights_plan(seen: StepProfile, chosen: Plan) -> WeightsPlan | None:
    """What the chosen options mean for frozen weights; None where none could be moved."""
    keys = {
        row.key.removeprefix(_KEY): row.key
        for row in seen.profile.tensors
        if row.part is Part.PARAMETER and row.key in chosen.choices
    }
    if not keys:
        return None
    moved = [name for name, key in keys.items() if chosen.choices[key].action is Action.OFFLOAD]
    return WeightsPlan(
        moved=tuple(moved),
        weight_bytes=sum(seen.saved_bytes[key] for key in keys.values()),
        moved_bytes=sum(seen.saved_bytes[keys[name]] for name in moved),
        seconds=sum(chosen.choices[keys[name]].seconds for name in moved),
    )


_KEY = "weight of "


def _row(name: str, nbytes: int, reads: Sequence[tuple[int, int]], seconds: float) -> TensorProfile:
    """In memory for as long as each reader has it; ``seconds`` are those of reading a byte."""
    there, most = _together(reads)
    keep = Option(action=Action.KEEP, codec="keep", held_bytes=nbytes, lasting=True)
    moved = Option(
        action=Action.OFFLOAD,
        codec="file",
        held_bytes=0,
        working_bytes=most * nbytes,
        seconds=len(reads) * nbytes * seconds,
    )
    return TensorProfile(
        key=f"{_KEY}{name}",
        part=Part.PARAMETER,
        saved_at=0,
        first_use=there[0][0],
        last_use=there[-1][1],
        gaps=tuple((before[1] + 1, after[0] - 1) for before, after in zip(there, there[1:], strict=False)),
        options=(keep, moved),
    )


def _together(reads: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """Spans of positions with any of these reads, and the most reads at one position."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted(reads):
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], last))
        else:
            spans.append((first, last))
    most = max(sum(first <= at <= last for first, last in reads) for at, _ in reads)
    return spans, most
