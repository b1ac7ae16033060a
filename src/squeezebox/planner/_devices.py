"""Plans a pipeline over devices that are not alike: which of them, in which order, and where to cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from squeezebox.planner._device_search import Search, Split
from squeezebox.planner._stages import runs
from squeezebox.schedules import FLOWS, Pipe
from squeezebox.schema import (
    BudgetError,
    Devices,
    Link,
    OptionError,
    PipelinePlan,
    PipelineProfile,
)

EXACT = 8  # devices up to which all choices and orders are searched
_SHAPES = 4  # schedules, depths and microbatches that are improved by moves, where there are more devices
_HERE = Link(bytes_per_second=float("inf"))  # of blocks' profiles: links are counted by device


def plan_on_devices(
    profiles: Sequence[PipelineProfile],
    *,
    batch: int,
    devices: Devices,
    speed: float,
    schedules: Sequence[str],
    policies: Sequence[str] = ("keep", "compress", "recompute"),
    depths: Sequence[int] | None = None,
    in_order: bool = False,
) -> list[PipelinePlan]:
    """Everything that fits, the fastest first: one plan for each depth, microbatch and schedule.

    A device of another speed than ``speed``, at which blocks were profiled, takes as many times longer. A
    stage takes the fastest policy that fits its device, and waits for what crosses both of its boundaries,
    over the links that are there. A batch of m microbatches takes the sum over all stages and m - 1 times
    the slowest one, or m times that without a flush: with links that cost nothing, that is what 1F1B takes.

    Up to :data:`EXACT` devices, no other choice of devices, order and cuts is faster by that measure. Where
    there are more, the search begins with the fastest devices, and with chains whose slowest link is fast
    (MAPA's measure), and moves one or two devices at a time (GiPH) as long as the simulator says that a
    batch takes less; cuts are the best ones for each order.

    Args:
        profiles: the same blocks, measured with microbatches of different sizes.
        batch: samples between two updates of the weights.
        devices: of which each has at most one rank.
        speed: of the device that blocks were measured on, in the same unit as theirs.
        schedules: names of squeezebox.schedules.FLOWS. Those with several stages a rank are left out.
        policies: how stages may hold what they save.
        depths: ranks of the pipeline to try; None: one to as many as there are devices and blocks.
        in_order: all devices, in the order that they have.

    Raises:
        OptionError: no batch can be divided so.
        BudgetError: nothing fits; names the device that is short of the least memory.
    """
    blocks = len(profiles[0].blocks)
    most = min(len(devices.devices), blocks)
    deep = [len(devices.devices)] if in_order else depths or range(1, most + 1)
    searches = [
        Search(runs(profile, policies, _HERE), devices, speed, name, pipe, in_order=in_order)
        for profile in profiles
        for name, pipe in _shapes(profile, deep, most, batch, schedules)
    ]
    if not searches:
        raise OptionError(
            f"a batch of {batch} cannot go through {len(devices.devices)} devices and {blocks} blocks in "
            f"pipelines {[*deep]} deep by {', '.join(schedules)}, with microbatches of "
            f"{', '.join(str(each.microbatch) for each in profiles)}: there must be a device and a block for "
            "each stage, one stage a rank, for 2bw as many microbatches as ranks or more, and for pipedream "
            "exactly one. Change the batch, the depth, the microbatches or schedules."
        )
    exact = in_order or len(devices.devices) <= EXACT
    begun = [(search, split) for search in searches if (split := search.begun())]
    found = _moved(_exact(searches) if exact else begun)
    if not found:
        raise _too_little(searches, exact)
    return sorted((search.plan(split) for search, split in found), key=lambda plan: plan.seconds)


def _shapes(
    profile: PipelineProfile, depths: Sequence[int], most: int, batch: int, schedules: Sequence[str]
) -> Iterator[tuple[str, Pipe]]:
    microbatches, rest = divmod(batch, profile.microbatch)
    for depth in depths:
        pipe = Pipe(ranks=depth, loops=1, microbatches=microbatches)
        if 1 <= depth <= most and microbatches and not rest:
            yield from ((name, pipe) for name in schedules if FLOWS[name].suits(pipe))


def _exact(searches: Sequence[Search]) -> list[tuple[Search, Split]]:
    """The best of each, as long as it could be the fastest of all."""
    begun = [(search, split) for search in searches if (split := search.bottleneck(search.order))]
    least = min((split.seconds for _, split in begun), default=math.inf)
    found = []
    for search, split in sorted(begun, key=lambda pair: pair[1].seconds):
        found.append((search, search.improved(split, least)))
        least = min(least, found[-1][1].seconds)
    return found


def _moved(found: Sequence[tuple[Search, Split]]) -> list[tuple[Search, Split]]:
    """The fastest few, improved by moves."""
    timed = [(search, search.simulated(split)) for search, split in found]
    timed.sort(key=lambda pair: pair[1].seconds)
    better = [(search, search.moved(split)) for search, split in timed[:_SHAPES]]
    return better + timed[_SHAPES:]


def _too_little(searches: Sequence[Search], exact: bool) -> BudgetError:
    lacks, why = min(search.shortage(exact=exact) for search in searches)
    if not math.isfinite(lacks):
        return BudgetError(
            "no plan can be made: each policy was measured for some blocks only, and a stage holds all of "
            "its blocks alike. Profile every block with one policy at least."
        )
    return BudgetError(
        f"no order of these devices fits; at best {why}. Give it that much more, or take smaller "
        "microbatches, policies that hold less, or more devices."
    )
