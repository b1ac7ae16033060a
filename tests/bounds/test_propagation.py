"""propagate() on graphs small enough to add up by hand."""

import pytest

from squeezebox.bounds import corrected, gradient_energy, propagate
from squeezebox.schema import Edge, Injection, NodeStatistics, Role, TensorStatistics


def node(number, grad_energy, *edges, injections=()):
    return NodeStatistics(
        number=number,
        operator="",
        module="",
        grad_energy=grad_energy,
        edges=edges,
        injections=tuple(injections),
    )


def to(target, energy, gain=None):
    return Edge(target=target, parameter=False, energy=energy, gain=gain)


def parameter(energy, gain=None):
    return Edge(target=None, parameter=True, energy=energy, gain=gain)


def injection(key, edge, energy):
    return Injection(key=key, edge=edge, energy=energy)


def test_an_error_in_a_weight_gradient_stays_there():
    nodes = [node(1, 5.0, parameter(4.0), injections=[injection("x", 0, 0.8)])]
    assert propagate(nodes) == {"x": pytest.approx(0.8 / 4.0)}


def test_an_error_upstream_arrives_at_every_weight_it_passes():
    nodes = [
        node(3, 10.0, to(2, 6.0), injections=[injection("late", 0, 0.5)]),
        node(2, 6.0, to(1, 3.0), parameter(7.0, gain=2.0)),
        node(1, 3.0, parameter(1.0, gain=4.0)),
    ]
    # One unit into node 2: 2 in its weight, and 3/6 of it on to node 1, which makes 4 of each unit.
    assert propagate(nodes) == {"late": pytest.approx(0.5 * (2.0 + 0.5 * 4.0) / 8.0)}


def test_a_computed_weight_hands_on_what_its_gradient_gets():
    own = Injection(key="own", edge=1, energy=0.5, layer=True)
    nodes = [
        node(4, 8.0, to(3, 2.0), injections=[injection("late", 0, 1.0)]),
        node(3, 2.0, parameter(1.0, gain=0.0), to(2, 6.0, gain=2.0), injections=[own]),
        node(2, 6.0, to(1, 3.0)),
        node(1, 3.0, parameter(4.0, gain=7.0)),
    ]
    assert propagate(nodes) == pytest.approx({"late": 2.0 * 0.5 * 7.0 / 5.0, "own": 0.5 * 0.5 * 7.0 / 5.0})
    assert propagate(nodes[:2]) == {"late": 2.0, "own": 0.5}  # made before the step


def test_branches_add_up():
    nodes = [
        node(4, 8.0, to(3, 2.0), to(2, 4.0), injections=[injection("x", 0, 1.0), injection("x", 1, 3.0)]),
        node(3, 2.0, parameter(5.0, gain=1.5)),
        node(2, 4.0, to(1, 1.0)),
        node(1, 1.0, parameter(5.0, gain=2.0)),
    ]
    assert propagate(nodes) == {"x": pytest.approx((1.0 * 1.5 + 3.0 * 0.25 * 2.0) / 10.0)}


def test_order_of_the_nodes_does_not_matter():
    nodes = [
        node(3, 10.0, to(2, 6.0), injections=[injection("x", 0, 0.5)]),
        node(2, 6.0, to(1, 3.0)),
        node(1, 3.0, parameter(1.0, gain=4.0)),
    ]
    assert propagate(nodes) == propagate(nodes[::-1])


def test_errors_that_end_nowhere_cost_nothing():
    nodes = [
        node(2, 2.0, to(None, 1.0), injections=[injection("input", 0, 3.0)]),
        node(1, 0.0, to(7, 0.0), parameter(1.0), injections=[injection("unknown", 0, 3.0)]),
    ]
    assert propagate(nodes) == {"input": 0.0, "unknown": 0.0}


def test_no_gradient_no_noise():
    assert propagate([node(1, 1.0, to(None, 1.0), injections=[injection("x", 0, 1.0)])]) == {}
    assert propagate([]) == {}


def test_every_use_of_a_parameter_counts():
    assert gradient_energy([node(2, 1.0, parameter(2.0), to(1, 9.0)), node(1, 1.0, parameter(3.0))]) == 5.0


def statistics(key, role):
    return TensorStatistics(key=key, role=role, numel=1, nonzero=1.0, rms=1.0)


def test_corrections_come_from_the_nearest_checked_tensor_of_the_role():
    role = Role.CONV_INPUT
    costs = dict.fromkeys("abcdef", 2.0)
    tensors = [statistics(key, role) for key in "abcde"] + [statistics("f", Role.SOFTMAX)]
    found = corrected(costs, tensors, {"a": 1.5, "e": 3.0, "gone": 9.0})
    assert found == {"a": 3.0, "b": 3.0, "c": 3.0, "d": 6.0, "e": 6.0, "f": 2.0}


def test_of_two_that_are_as_near_the_earlier_counts_in_whatever_order_they_are_known():
    costs, tensors = dict.fromkeys("abc", 2.0), [statistics(key, Role.CONV_INPUT) for key in "abc"]
    found = [corrected(costs, tensors, known) for known in ({"a": 1.5, "c": 3.0}, {"c": 3.0, "a": 1.5})]
    assert found == [{"a": 3.0, "b": 3.0, "c": 6.0}] * 2


@pytest.mark.parametrize(("layer", "unchecked"), [(True, 0.2), (False, 2.0)])
def test_noise_that_is_handed_on_is_never_taken_for_less_than_white_unchecked(layer, unchecked):
    costs, tensors = {"a": 2.0, "b": 2.0}, [statistics(key, Role.NORM_INPUT) for key in "ab"]
    assert corrected(costs, tensors, {"a": 0.1}, layer=layer) == {"a": 0.2, "b": unchecked}


def test_what_stays_in_a_layer_and_what_is_handed_on_apart():
    own = Injection(key="x", edge=1, energy=0.5, layer=True)
    nodes = [
        node(2, 10.0, to(1, 5.0), parameter(3.0), injections=[own, injection("x", 0, 0.25)]),
        node(1, 5.0, parameter(1.0, gain=2.0)),
    ]
    assert propagate(nodes, layer=True) == {"x": 0.5 / 4.0}
    assert propagate(nodes, layer=False) == {"x": 0.25 * 2.0 / 4.0}
