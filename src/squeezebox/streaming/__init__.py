"""Exact training on inputs larger than memory.

In: a model, a loss function, and images that are read strip by strip, or a graph that is read part by part.
Out: the loss, and gradients equal to the whole image's or graph's. May touch: memory, reports and schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from squeezebox.schema import door
from squeezebox.streaming._bag import BagStep
from squeezebox.streaming._plan import StreamPlan, StripPlan
from squeezebox.streaming._progress import Progress
from squeezebox.streaming._step import StreamedStep

__all__ = [
    "BagStep",
    "Graph",
    "GraphStep",
    "PageRank",
    "Progress",
    "StreamPlan",
    "StreamedStep",
    "StripPlan",
    "personalised_pagerank",
]

if TYPE_CHECKING:
    from squeezebox.streaming._graph_step import GraphStep
    from squeezebox.streaming._nodes import Graph
    from squeezebox.streaming._pagerank import PageRank, personalised_pagerank
else:
    # They load numba.
    __getattr__ = door(
        __name__,
        {
            "Graph": "_nodes",
            "GraphStep": "_graph_step",
            "PageRank": "_pagerank",
            "personalised_pagerank": "_pagerank",
        },
    )
