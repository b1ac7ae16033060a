"""Whether a schedule does all that must be done, in an order that can be carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from squeezebox.schedules._action import Action, Kind, Schedule
from squeezebox.schedules._simulate import run
from squeezebox.schema import PlanError


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that is not whole or cannot be carried out.

    Every microbatch must pass every stage forwards and backwards once, backward whole or in its two parts,
    with the same weights both ways; those must have been made by then; a batch's update comes once, after
    all its gradients; and no ranks may wait for each other without end.

    Raises:
        PlanError: names the rank, the action and what is wrong.
    """
    for problem in _problems(schedule):
        raise PlanError(f"schedule '{schedule.name}': {problem} Mend its orders, or take a published one.")
    run(schedule, lambda action: 1.0)


def _problems(schedule: Schedule) -> Iterator[str]:
    total = schedule.batches * schedule.microbatches
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not 0 <= action.stage < schedule.num_stages or schedule.placement[action.stage] != rank:
                yield f"rank {rank} has {action}, of a stage that is not its own."
        for stage in (stage for stage, owner in enumerate(schedule.placement) if owner == rank):
            own = [action for action in order if action.stage == stage]
            yield from (f"rank {rank}: {problem}" for problem in _of_stage(own, stage, total, schedule))


def _of_stage(own: list[Action], stage: int, total: int, schedule: Schedule) -> Iterator[str]:
    times = Counter((action.kind, action.microbatch) for action in own)
    for microbatch in range(total):
        counts = tuple(times.pop((kind, microbatch), 0) for kind in Kind if kind is not Kind.UPDATE)
        if counts not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            passes = ", ".join(
                f"{count} {kind.name.lower()}" for kind, count in zip(Kind, counts, strict=False)
            )
            yield f"microbatch {microbatch} passes stage {stage} with {passes}."
    for batch in range(schedule.batches):
        if times.pop((Kind.UPDATE, batch), 0) != 1:
            yield f"stage {stage} is not updated once after batch {batch}."
    for kind, microbatch in times:
        yield f"stage {stage} has a {kind.name.lower()} of microbatch {microbatch}, of which there is none."
    yield from _weights(own, schedule.microbatches)


def _weights(own: list[Action], microbatches: int) -> Iterator[str]:
    """What is wrong with the versions, and with when they are made."""
    made, reads, complete = 0, dict[int, int](), Counter[int]()
    for action in own:
        if action.version > made:
            yield f"{action} reads weights after {action.version} updates; there were {made}."
        if action.kind is Kind.UPDATE:
            if complete[action.microbatch] < microbatches or action.microbatch != made:
                yield f"{action} comes before all of its gradients, or out of turn."
            made = action.microbatch + 1
        elif action.kind is Kind.FORWARD:
            reads[action.microbatch] = action.version
        elif reads.get(action.microbatch) != action.version:
            yield f"{action} comes before its forward, or reads other weights."
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            complete[action.microbatch // microbatches] += 1
