"""The published schedules, a row each, by the names that they are published under."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from squeezebox.schedules import _flows, _orders
from squeezebox.schedules._action import Schedule
from squeezebox.schedules._flows import Flow, Pipe
from squeezebox.schema import OptionError


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published schedule.

    ``make`` takes ranks, microbatches and batches; of those that do not ``flushes`` after each batch, also
    ``warmup`` and ``replicas``, and where a rank has several stages, ``loops``. ``flow`` is its closed form,
    if there is one. Where it ``splits``, backward comes in two parts.
    """

    name: str
    make: Callable[..., Schedule]
    flow: Flow
    flushes: bool = True
    loops: bool = False
    splits: bool = False


def _zb_h2(ranks: int, microbatches: int, *, batches: int) -> Schedule:
    return _orders.zero_bubble(ranks, microbatches, doubled=True, batches=batches)


def _zb_v(ranks: int, microbatches: int, *, batches: int, loops: int) -> Schedule:
    if loops != 2:
        raise OptionError(f"loops is {loops}, and zb-v has 2 stages a rank; give 2.")
    return _orders.zero_bubble_v(ranks, microbatches, batches=batches)


def _pipedream(ranks: int, microbatches: int, *, batches: int, **options: Any) -> Schedule:
    made = _orders.pipedream(ranks, batches=batches, **options)
    per_batch, rest = divmod(microbatches, made.microbatches)
    if rest:
        raise OptionError(
            f"{microbatches} microbatches cannot be shared evenly by {list(made.replicas)} replicas of "
            f"stages. Take a multiple of {made.microbatches}."
        )
    return made if per_batch == 1 else _orders.pipedream(ranks, batches=batches * per_batch, **options)


_ROWS = (
    Published(name="gpipe", make=_orders.gpipe, flow=_flows.GPIPE),
    Published(name="1f1b", make=_orders.one_f_one_b, flow=_flows.ONE_F_ONE_B),
    Published(name="interleaved-1f1b", make=_orders.interleaved, flow=_flows.INTERLEAVED, loops=True),
    Published(name="breadth-first", make=_orders.breadth_first, flow=_flows.BREADTH_FIRST, loops=True),
    Published(name="zb-h1", make=_orders.zero_bubble, flow=_flows.ZERO_BUBBLE, splits=True),
    Published(name="zb-h2", make=_zb_h2, flow=_flows.ZERO_BUBBLE_2, splits=True),
    Published(name="zb-v", make=_zb_v, flow=_flows.ZERO_BUBBLE_V, loops=True, splits=True),
    Published(name="pipedream", make=_pipedream, flow=_flows.PIPEDREAM, flushes=False),
    Published(name="2bw", make=_orders.two_bw, flow=_flows.TWO_BW, flushes=False),
)
PUBLISHED: Mapping[str, Published] = MappingProxyType({row.name: row for row in _ROWS})
FLOWS: Mapping[str, Flow] = MappingProxyType({row.name: row.flow for row in _ROWS})
"""Closed forms by name."""
SYNCHRONOUS = tuple(row.name for row in _ROWS if row.flushes)
"""Those that train as one rank would; the others' gradients are of earlier weights."""


def published(name: str) -> Published:
    """The row of that name.

    Raises:
        OptionError: there is none.
    """
    if name not in PUBLISHED:
        raise OptionError(f"there is no schedule '{name}'; take one of {', '.join(PUBLISHED)}.")
    return PUBLISHED[name]


def placement(name: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each stage in a schedule of that name.

    Raises:
        OptionError: there is none.
    """
    return published(name).flow.placement(Pipe(ranks=ranks, loops=stages // ranks, microbatches=1))


def make(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    loops: int = 1,
    batches: int = 1,
    warmup: int = 0,
    replicas: Sequence[int] = (),
    vertical_sync: bool = False,
) -> Schedule:
    """A published schedule by its name.

    Args:
        name: of :data:`PUBLISHED`.
        ranks: of one pipeline.
        microbatches: of a batch. PipeDream updates after each, so that it makes as many batches of a batch.
        loops: stages a rank.
        batches: one after the other.
        warmup: batches that are flushed at first, where others are not.
        replicas: ranks of each stage, which take microbatches in turn, in 2bw and pipedream (default: one).
        vertical_sync: all stages read the version of an input's admission, in pipedream.

    Raises:
        OptionError: there is none of that name or for those numbers.
    """
    row = published(name)
    if loops != 1 and not row.loops:
        looped = " or ".join(each.name for each in _ROWS if each.loops)
        raise OptionError(
            f"loops is {loops}, and {name} has one stage a rank; leave it out, or take {looped}."
        )
    if warmup and row.flushes:
        raise OptionError(
            f"warmup is {warmup}, and {name} flushes after each batch anyway. Leave it out, or take 2bw."
        )
    if row.flushes and max(replicas, default=1) > 1:
        raise OptionError(
            f"stages have {list(replicas)} replicas, and with {name} all have as many. Take whole pipelines "
            "as replicas, or pipedream or 2bw."
        )
    if vertical_sync and name != "pipedream":
        raise OptionError(f"vertical_sync=True is for pipedream, not {name}. Leave it out.")
    own: dict[str, Any] = {"loops": loops} if row.loops else {}
    if not row.flushes:
        own |= {"warmup": warmup, "replicas": replicas}
    if vertical_sync:
        own["vertical_sync"] = True
    return row.make(ranks, microbatches, batches=batches, **own)
