"""Pipeline schedules as plain lists of actions: made, checked and run on paper.

In: numbers of ranks, stages and microbatches, and what every stage costs. Out: a Schedule, and its Timeline.
May touch: squeezebox.schema and numpy; no torch, no ranks.
"""

from squeezebox.schedules._action import Action, Kind, Schedule
from squeezebox.schedules._csv import from_csv
from squeezebox.schedules._flows import Flow, Passes, Pipe
from squeezebox.schedules._issue import Call, Issue, at_once, find_deadlock, line_name
from squeezebox.schedules._issued import issued
from squeezebox.schedules._orders import (
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    repeated,
    two_bw,
    zero_bubble,
    zero_bubble_v,
)
from squeezebox.schedules._simulate import (
    Costs,
    Sharing,
    Span,
    Timeline,
    gathers,
    sharing,
    simulate,
    validate,
)
from squeezebox.schedules._table import FLOWS, PUBLISHED, SYNCHRONOUS, Published, make, placement, published

__all__ = [
    "FLOWS",
    "PUBLISHED",
    "SYNCHRONOUS",
    "Action",
    "Call",
    "Costs",
    "Flow",
    "Issue",
    "Kind",
    "Passes",
    "Pipe",
    "Published",
    "Schedule",
    "Sharing",
    "Span",
    "Timeline",
    "at_once",
    "breadth_first",
    "find_deadlock",
    "from_csv",
    "gathers",
    "gpipe",
    "interleaved",
    "issued",
    "line_name",
    "make",
    "one_f_one_b",
    "pipedream",
    "placement",
    "published",
    "repeated",
    "sharing",
    "simulate",
    "two_bw",
    "validate",
    "zero_bubble",
    "zero_bubble_v",
]
