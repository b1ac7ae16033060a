"""Personalised PageRank handed on node by node is power iteration's, in fewer visits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from squeezebox.schema import OptionError
from squeezebox.streaming import Graph, personalised_pagerank


def graph_of(edges, count, weights=None):
    return Graph(features=np.zeros((count, 1), np.float32), edges=edges, targets=None, weights=weights)


def swept(edges, count, seeds, restart, tolerance, weights):
    """Scores by power iteration until what was not given out is within the tolerance, and the sweeps."""
    start = np.zeros(count)
    start[seeds] = 1 / len(seeds)
    totals = np.bincount(edges[0], weights, count)
    shares = weights / np.maximum(totals[edges[0]], 1e-300)
    scores, waiting, sweeps = np.zeros(count), start.copy(), 0
    while waiting.sum() > tolerance:
        scores += restart * waiting
        rest = (1 - restart) * waiting
        waiting = np.bincount(edges[1], rest[edges[0]] * shares, count) + rest[totals == 0].sum() * start
        sweeps += 1
    return scores, sweeps


@given(
    count=st.integers(1, 30),
    degree=st.integers(0, 4),
    restart=st.floats(0.05, 0.9),
    tolerance=st.sampled_from([1e-3, 1e-9]),
    is_weighted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_scores_are_power_iterations_within_the_tolerance(
    count, degree, restart, tolerance, is_weighted, seed
):
    random = np.random.default_rng(seed)
    edges = random.integers(0, count, (2, count * degree))  # self-loops, and nodes without edges, among them
    weights = random.integers(0, 3, count * degree) * 1.0 if is_weighted else None
    seeds = random.permutation(count)[: 1 + count // 3]
    given_weights = np.ones(count * degree) if weights is None else weights
    wanted, _ = swept(edges, count, seeds, restart, 1e-14, given_weights)
    found = personalised_pagerank(
        graph_of(edges, count, weights), seeds, restart=restart, tolerance=tolerance
    )
    assert found.error <= tolerance and (found.scores <= wanted + 1e-12).all()
    np.testing.assert_allclose((wanted - found.scores).sum(), found.error, atol=1e-12)


def test_edges_are_visited_less_often_than_by_sweeps(tmp_path):
    random, count = np.random.default_rng(0), 5000
    ends = (count * random.random((2, 4 * count)) ** 3).astype(np.int64)  # some nodes have many edges
    mapped = np.memmap(tmp_path / "edges", np.int64, "w+", shape=(2, 8 * count))
    mapped[:] = np.concatenate([ends, ends[::-1]], 1)
    edges = np.memmap(tmp_path / "edges", np.int64, "r", shape=mapped.shape)
    found = personalised_pagerank(graph_of(edges, count), [4000])
    wanted, sweeps = swept(edges, count, [4000], 0.15, 1e-6, np.ones(8 * count))
    assert np.abs(wanted - found.scores).sum() < 2e-6
    assert 0 < found.visits < 0.7 * sweeps * 8 * count


def test_what_is_out_of_range_is_refused():
    graph = graph_of(np.array([[0, 1], [1, 0]]), 2)
    for options in ({"restart": 0.0}, {"restart": 1.0}, {"tolerance": 0.0}):
        with pytest.raises(OptionError, match="between 0 and 1"):
            personalised_pagerank(graph, [0], **options)
    for seeds, message in ((np.array([], int), "are none"), ([0, 0], "distinct"), ([2], "0 to 1")):
        with pytest.raises(OptionError, match=message):
            personalised_pagerank(graph, seeds)
    edge = np.array([[0], [1]])
    for weights, message in (
        ([-1.0], "none below 0"),
        ([np.nan], "finite"),
        ([np.inf], "finite"),
        ([[1.0]], r"are \(1, 1\); give a number for each of 1 edges"),
    ):
        with pytest.raises(OptionError, match=message):
            personalised_pagerank(graph_of(edge, 2, np.array(weights)), [0])
    with pytest.raises(OptionError, match="sum to more than float64 holds"):
        personalised_pagerank(graph_of(np.array([[0, 0], [1, 1]]), 2, np.full(2, 1e308)), [0])
    with pytest.raises(OptionError, match="between 0 and 1"):
        personalised_pagerank(graph, [0], restart="a")
    for none in ([], torch.tensor([], dtype=torch.int64)):
        with pytest.raises(OptionError, match="seeds are none"):
            personalised_pagerank(graph, none)


def test_numbers_of_other_kinds_are_numbers():
    edges = np.array([[0, 0, 1], [1, 2, 0]])
    plain = personalised_pagerank(graph_of(edges, 3, np.array([1.0, 3.0, 1.0])), [0])
    weights = torch.tensor([1.0, 3.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    other = personalised_pagerank(graph_of(edges, 3, weights), torch.tensor([0]), tolerance=np.float32(1e-6))
    np.testing.assert_allclose(other.scores, plain.scores, atol=2e-6)


def test_an_error_that_never_falls_is_refused():
    circle = graph_of(np.array([[0, 1, 2], [1, 2, 0]]), 5)
    with pytest.raises(OptionError, match="restart 1e-17 the error stays at 1"):
        personalised_pagerank(circle, [0], restart=1e-17)


def test_the_smallest_weights_are_weights():
    edges = np.array([[0, 0, 1], [1, 2, 0]])
    tiny = personalised_pagerank(graph_of(edges, 3, np.array([1e-309, 1e-309, 1.0])), [0])
    equal = personalised_pagerank(graph_of(edges, 3), [0])
    np.testing.assert_allclose(tiny.scores, equal.scores, rtol=1e-9)
