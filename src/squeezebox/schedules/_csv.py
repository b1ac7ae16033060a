"""Orders as torch.distributed.pipelining writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from squeezebox.schedules._action import Action, Kind, Schedule
from squeezebox.schedules._orders import repeated
from squeezebox.schema import FormatError, PlanError

_PASS = re.compile(r"(\d+)([FBIW])(\d+)")


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule of such a file ("compute_only"), a line a rank: one batch, and then again and again.

    Where a rank waits, its line may have an empty cell. A forward and a backward that overlap there come one
    after the other here. Each stage is updated at the end of its line.

    Raises:
        FormatError: a cell is none of a batch's passes, such as ``0F3``.
        PlanError: stages are missing, or see :func:`validate`.
    """
    lines = [[*_passes(line, rank)] for rank, line in enumerate(text.splitlines())]
    owners = {action.stage: rank for rank, line in enumerate(lines) for action in line}
    if not owners or max(owners) >= len(owners):
        raise PlanError(
            f"schedule '{name}' has the stages {sorted(owners)}; there must be all from 0 to the last one. "
            "Export it again, with the lines of all ranks."
        )
    updates = [
        [
            Action(kind=Kind.UPDATE, stage=stage, microbatch=0)
            for stage in sorted(owners)
            if owners[stage] == rank
        ]
        for rank in range(len(lines))
    ]
    return repeated(
        Schedule(
            name=name,
            placement=tuple(owners[stage] for stage in sorted(owners)),
            microbatches=1 + max(action.microbatch for line in lines for action in line),
            batches=1,
            orders=tuple((*line, *own) for line, own in zip(lines, updates, strict=True)),
        )
    )


def _passes(line: str, rank: int) -> Iterator[Action]:
    for cell in line.split(","):
        for text in filter(None, cell.strip().removeprefix("(").removesuffix(")OVERLAP_F_B").split(";")):
            found = _PASS.fullmatch(text)
            if found is None:
                raise FormatError(
                    f"line {rank + 1} has '{text}', which is no pass of a microbatch through a stage, such "
                    "as 0F3. Give a file that was written with format='compute_only'."
                )
            stage, kind, microbatch = found.groups()
            yield Action(kind=Kind(kind), stage=int(stage), microbatch=int(microbatch))
