"""From a sample and a budget to a plan: attach, plan, estimate, the largest batch, out of memory, pipelines.

In: models, samples and options. Out: plans, what they would take, and sessions under them.
May touch: the model while it is measured, and a folder that profiles are kept in if one is named.
The door exports lazily: attaching loads none of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door

__all__ = [
    "STATISTICS_STEPS",
    "SharedStep",
    "States",
    "attach",
    "attach_stages",
    "check_kinds",
    "check_states",
    "estimate",
    "explain_out_of_memory",
    "explanation",
    "feasibility",
    "find_batch",
    "make_plan",
    "max_batch",
    "named_place",
    "peak_meter",
    "plan_pipeline",
    "shared",
    "size_named",
    "state_costs",
    "within",
]

if TYPE_CHECKING:
    from squeezebox.planning._attach import attach
    from squeezebox.planning._choices import within
    from squeezebox.planning._estimate import estimate
    from squeezebox.planning._feasibility import feasibility
    from squeezebox.planning._find import find_batch
    from squeezebox.planning._kinds import check_kinds
    from squeezebox.planning._max_batch import max_batch
    from squeezebox.planning._out_of_memory import explain_out_of_memory, explanation
    from squeezebox.planning._pipelines import attach_stages, peak_meter, plan_pipeline
    from squeezebox.planning._plans import make_plan, named_place, size_named
    from squeezebox.planning._profiles import STATISTICS_STEPS
    from squeezebox.planning._sharing import SharedStep, shared
    from squeezebox.planning._state_costs import state_costs
    from squeezebox.planning._states import States, check_states
else:  # hidden from type checkers, who would take any name for an attribute
    __getattr__ = door(
        __name__,
        {
            "attach": "_attach",
            "within": "_choices",
            "estimate": "_estimate",
            "feasibility": "_feasibility",
            "find_batch": "_find",
            "check_kinds": "_kinds",
            "max_batch": "_max_batch",
            "explain_out_of_memory": "_out_of_memory",
            "explanation": "_out_of_memory",
            "attach_stages": "_pipelines",
            "peak_meter": "_pipelines",
            "plan_pipeline": "_pipelines",
            "make_plan": "_plans",
            "named_place": "_plans",
            "size_named": "_plans",
            "STATISTICS_STEPS": "_profiles",
            "SharedStep": "_sharing",
            "shared": "_sharing",
            "state_costs": "_state_costs",
            "States": "_states",
            "check_states": "_states",
        },
    )
