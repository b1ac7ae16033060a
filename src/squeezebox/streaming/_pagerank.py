"""Personalised PageRank, node by node where there is something left to hand on."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numba import njit

from squeezebox.schema import OptionError
from squeezebox.streaming._nodes import Graph, checked, distinct_nodes, edges_of

_FINER = 4.0  # a finer round takes nodes to which so much less has come
_MOST = 1 << 26  # edges and nodes, about, between two looks at signals
_STILL = 1e-12  # of what waits: where no more than that goes, it never will
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
        OptionError: restart or tolerance is out of range, seeds are no nodes, weights are no numbers from 0
            on, or the scores cannot be that exact.
    """
    real = all(isinstance(each, Real) for each in (restart, tolerance))
    if not real or not 0 < restart < 1 or not 0 < tolerance:
        raise OptionError(
            f"restart is {restart} and tolerance {tolerance}; give one between 0 and 1, and one above 0."
        )
    count = checked(graph)
    if not np.asarray(seeds).size:
        raise OptionError("seeds are none; give the nodes where walks begin.")
    places = distinct_nodes("seeds", seeds, count)
    sources, targets = edges_of(graph)
    sorted_ = np.argsort(sources, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=count))])
    totals, shares = _shares(graph, sources, count)
    waiting, scores = np.zeros(count), np.zeros(count)
    waiting[places] = 1.0 / len(places)
    kind = np.int32 if count < 2**31 else np.int64
    where, shares = targets[sorted_].astype(kind), shares[sorted_]
    visits, left = 0, 1.0
    bound = 1.0 / (len(where) + count)  # for each edge of a node: below it a node is not taken
    while left > tolerance:  # compiled loops heed no signal, so they end now and then
        gone, bound = _hand_on(
            ends, where, shares, totals > 0.0, places, restart, tolerance, waiting, scores, bound
        )
        visits, before, left = visits + gone, left, float(waiting.sum())
        if gone and left > (1.0 - _STILL) * before:
            raise OptionError(
                f"with restart {restart} the error stays at {left:.3g}, and tolerance is {tolerance}; give a "
                "larger one of them."
            )
    return PageRank(scores=scores, error=left, visits=visits)


def _shares(graph: Graph, sources: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each node the sum of its edges' weights, and of each edge the probability of being taken there."""
    if graph.weights is None:
        weights = np.ones(len(sources))
    else:
        is_tensor = isinstance(graph.weights, torch.Tensor)
        weights = np.asarray(graph.weights.detach().double() if is_tensor else graph.weights, np.float64)
    if weights.shape != sources.shape:
        raise OptionError(f"weights are {weights.shape}; give a number for each of {len(sources):,} edges.")
    if len(weights) and not 0.0 <= weights.min() <= weights.max() < np.inf:
        raise OptionError(
            f"weights go from {weights.min()} to {weights.max()}; a walk needs finite ones, none below 0."
        )
    with np.errstate(over="ignore"):
        totals = np.bincount(sources, weights, count)
    if not np.isfinite(totals).all():
        raise OptionError("a node's weights sum to more than float64 holds; divide all by the largest.")
    return totals, np.divide(weights, totals[sources], out=np.zeros_like(weights), where=weights > 0.0)


@njit(cache=True, nogil=True)
def _hand_on(ends, targets, shares, leads, seeds, restart, tolerance, waiting, scores, bound):
    """Take nodes until what waits is within the tolerance, or for a while.

    Returns how many edges were gone along, and the bound of the next round.
    """
    count, visits, rounds = scores.shape[0], 0, 0
    total = waiting.sum()
    while total > tolerance and visits + rounds * count < _MOST:
        taken = 0
        rounds += 1
        for node in range(count):
            first, last = ends[node], ends[node + 1]
            here = waiting[node]
            if here <= bound * (last - first + 1):
                continue
            taken += last - first + 1
            waiting[node] = 0.0
            scores[node] += restart * here
            rest = (1.0 - restart) * here
            if not leads[node]:
                for seed in seeds:
                    waiting[seed] += rest / seeds.shape[0]
                continue
            visits += last - first
            for at in range(first, last):
                waiting[targets[at]] += rest * shares[at]
        total = waiting.sum()
        if taken * _FEW < targets.shape[0] + count:
            bound /= _FINER
    return visits, bound
