"""Personalised PageRank, node by node where there is something left to hand on."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from squeezebox.schema import OptionError
from squeezebox.streaming._nodes import Graph, checked, distinct_nodes, edges_of

_FINER = 4.0  # a finer round takes nodes to which so much less has come
_FEW = 4  # rounds are finer once one goes along fewer edges than all, divided by this


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageRank:
    """``scores`` of all nodes, of shape (nodes,), in float64; they sum to 1 less the error.

    ``error`` is the sum over all nodes of what the scores are too low by. ``visits`` counts edges, each as
    often as it was gone along; a sweep of power iteration goes along all of them.
    """

    scores: np.ndarray
    error: float
    visits: int


def personalised_pagerank(
    graph: Graph, seeds: Any, *, restart: float = 0.15, tolerance: float = 1e-6
) -> PageRank:
    """How often a walk from ``seeds`` is at each node, if at each step it starts again with a probability.

    The scores p solve ``p = restart s + (1 - restart) P^T p``. P follows a node's edges, each with the same
    probability, or by the graph's weights; s is equal at all seeds. From a node without edges, and from one
    whose weights are zero, the walk starts again. Edges are sorted in memory.

    What has come to a node waits there, added up, until the node is taken; then ``restart`` of it is the
    node's, and the rest goes to its neighbours. Rounds go over the nodes in order, and take those that much
    has come to: GraphPulse's events (Rahman et al. 2020, algorithm 1) without a queue, with the rule of
    Andersen, Chung and Lang (2006) for which these are. What waits in the end is the error.

    Args:
        graph: whose edges the walk follows.
        seeds: distinct node numbers.
        restart: the probability, within 0 and 1.
        tolerance: the sum of all scores' errors, at most.

    Raises:
        OptionError: restart or tolerance is out of range, seeds are no nodes, or a weight is negative.
    """
    if not 0 < restart < 1 or not 0 < tolerance:
        raise OptionError(
            f"restart is {restart} and tolerance {tolerance}; give one between 0 and 1, and one above 0."
        )
    count = checked(graph)
    places = distinct_nodes("seeds", seeds, count)
    if not places.size:
        raise OptionError("seeds are none; give the nodes where walks begin.")
    sources, targets = edges_of(graph)
    sorted_ = np.argsort(sources, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=count))])
    weights = np.ones(len(sources)) if graph.weights is None else np.asarray(graph.weights, np.float64)
    if (weights < 0).any():
        raise OptionError(f"weights go down to {weights.min()}; a walk needs none below 0.")
    totals = np.bincount(sources, weights, count)
    waiting, scores = np.zeros(count), np.zeros(count)
    waiting[places] = 1.0 / len(places)
    kind = np.int32 if count < 2**31 else np.int64
    visits = _hand_on(
        ends,
        targets[sorted_].astype(kind),
        weights[sorted_],
        totals,
        places,
        restart,
        tolerance,
        waiting,
        scores,
    )
    return PageRank(scores=scores, error=float(waiting.sum()), visits=int(visits))


@njit(cache=True, nogil=True)
def _hand_on(ends, targets, weights, totals, seeds, restart, tolerance, waiting, scores):
    """Take nodes until what waits is within the tolerance; returns how many edges were gone along."""
    count, visits = scores.shape[0], 0
    bound = 1.0 / (targets.shape[0] + count)  # for each edge of a node: below it a node is not taken
    total = waiting.sum()
    while total > tolerance:
        taken = 0
        for node in range(count):
            first, last = ends[node], ends[node + 1]
            here = waiting[node]
            if here <= bound * (last - first + 1):
                continue
            taken += last - first + 1
            waiting[node] = 0.0
            scores[node] += restart * here
            rest = (1.0 - restart) * here
            if totals[node] == 0.0:
                for seed in seeds:
                    waiting[seed] += rest / seeds.shape[0]
                continue
            visits += last - first
            share = rest / totals[node]
            for at in range(first, last):
                waiting[targets[at]] += share * weights[at]
        total = waiting.sum()
        if taken * _FEW < targets.shape[0] + count:
            bound /= _FINER
    return visits
