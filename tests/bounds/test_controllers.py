"""Controllers: what each gives before and after statistics, computed by hand."""

import dataclasses
import json
import math

import pytest

from squeezebox.bounds import (
    Comet,
    ControllerState,
    Fixed,
    NoiseBudget,
    WarmUp,
    calibrated,
    predicted_noise,
    refresh_due,
)
from squeezebox.schema import (
    Check,
    Edge,
    FormatError,
    Injection,
    NodeStatistics,
    OptionError,
    Role,
    StepStatistics,
    TensorStatistics,
)

NAN, INF = float("nan"), float("inf")
EMPTY = ControllerState()
CONV = Role.CONV_INPUT


def statistics(**changes):
    """One convolution with gradient energy 4 and injected energy 0.8 a squared unit: sensitivity 0.2."""
    node = NodeStatistics(
        number=1,
        operator="ConvolutionBackward",
        module="conv",
        grad_energy=1.0,
        edges=(Edge(target=None, parameter=True, energy=4.0),),
        injections=(Injection(key="x", edge=0, energy=0.8),),
    )
    tensor = TensorStatistics(
        key="x",
        role=CONV,
        numel=1000,
        nonzero=0.5,
        rms=2.0,
        mean_abs_loss=1e-3,
        batch=8,
        positions=100,
        parameter="conv.weight",
    )
    given = {"nodes": (node,), "tensors": (tensor,), "mean_abs_momentum": {"conv.weight": 0.05}} | changes
    return StepStatistics(**given)


def rms():
    return 3.0


def not_asked():
    raise AssertionError("rms is measured only when it is needed")


def test_fixed():
    assert Fixed(value=0.1).bound(EMPTY, "x", CONV, rms) == pytest.approx(0.3)
    assert Fixed(value=0.1, relative=False).bound(EMPTY, "x", CONV, not_asked) == 0.1
    state = Fixed(value=0.1).update(EMPTY, statistics())
    assert state.updates == 1 and state.bounds == {} and state.sensitivities == {"x": pytest.approx(0.2)}


def test_noise_budget():
    controller = NoiseBudget(noise=0.01)
    assert controller.bound(EMPTY, "x", CONV, rms) == pytest.approx(0.5 * 0.1 * 3.0)
    state = controller.update(EMPTY, statistics())
    assert controller.bound(state, "x", CONV, not_asked) == pytest.approx(math.sqrt(0.01 / 0.2))
    assert predicted_noise(state, state.bounds) == pytest.approx(0.01)
    assert controller.bound(state, "new", CONV, rms) == pytest.approx(0.15)


def test_noise_budget_stops_at_a_share_of_the_rms():
    state = NoiseBudget(noise=1.0, highest_share=0.25).update(EMPTY, statistics())
    assert state.bounds == {"x": pytest.approx(0.25 * 2.0)}


@pytest.mark.parametrize("energy, expected", [(3.2, 0.8), (0.2, math.sqrt(0.2 * 0.05))], ids=["rise", "fall"])
def test_sensitivities_rise_at_once_and_fall_as_a_geometric_mean(energy, expected):
    controller = NoiseBudget(noise=0.01)
    state = controller.update(EMPTY, statistics())
    (node,) = statistics().nodes
    node = dataclasses.replace(node, injections=(Injection(key="x", edge=0, energy=energy),))
    state = controller.update(state, statistics(nodes=(node,)))
    assert state.sensitivities["x"] == pytest.approx(expected)
    assert state.updates == 2


def measured(noise, bound=0.1):
    """Of a step whose tensor had that bound, with that noise."""
    (tensor,) = statistics().tensors
    return statistics(noise=noise, tensors=(dataclasses.replace(tensor, bound=bound),))


@pytest.mark.parametrize("share, after_one", [(9.0, 9.0), (0.25, 0.5), (2.25, 2.25)])
def test_a_step_s_own_noise_corrects_all_both_ways(share, after_one):
    """The law says 0.2 * bound^2 = 2e-3."""
    controller = NoiseBudget(noise=0.01)
    state = controller.update(EMPTY, measured(share * 2e-3))
    assert state.total_correction == pytest.approx(after_one)
    for _ in range(12):
        bound = state.bounds["x"]
        state = controller.update(state, measured(share * 0.2 * bound**2, bound))
    assert share * 0.2 * state.bounds["x"] ** 2 == pytest.approx(0.01, rel=0.05)


def test_what_gets_no_gradient_at_a_refresh_keeps_what_was_known():
    (node,), (tensor,) = statistics().nodes, statistics().tensors

    def of(cost, **changes):
        reads = (*node.injections, Injection(key="y", edge=0, energy=cost))
        tensors = [dataclasses.replace(tensor, key=key, bound=0.1) for key in "xy"]
        return statistics(nodes=[dataclasses.replace(node, injections=reads)], tensors=tensors, **changes)

    controller, without = NoiseBudget(noise=0.01), of(0.0, noise=0.2 * 0.1**2)
    known = controller.update(EMPTY, of(8.0))
    state = controller.update(known, without)
    assert state.sensitivities == pytest.approx(known.sensitivities)
    assert state.bounds == pytest.approx(known.bounds)
    assert controller.update(EMPTY, without).bounds.keys() == {"x"}  # the other has its first bound


@pytest.mark.parametrize("wrong", [INF, NAN])
def test_what_is_no_number_teaches_nothing(wrong):
    controller = NoiseBudget(noise=0.01)
    known = controller.update(EMPTY, statistics())
    (node,) = statistics().nodes
    node = dataclasses.replace(node, injections=(*node.injections, Injection(key="y", edge=0, energy=wrong)))
    check = Check(key="x", step=0, layer=False, measured=wrong, predicted=1e-4)
    state = controller.update(known, statistics(nodes=(node,), checks=(check,), noise=wrong))
    assert state == dataclasses.replace(
        known, sensitivities=pytest.approx(known.sensitivities), bounds=pytest.approx(known.bounds), updates=2
    )


def test_later_only_a_part_of_what_one_step_shows_is_believed():
    controller = NoiseBudget(noise=0.01)
    state = controller.update(EMPTY, measured(2e-3))
    for share, expected in ((2.25, 1.5), (4.5, 4.5), (0.04, 0.2)):
        assert controller.update(state, measured(share * 2e-3)).total_correction == pytest.approx(expected)


def test_of_other_controllers_bounds_do_not_follow():
    before = Comet().update(EMPTY, statistics())
    assert Comet().update(before, measured(0.05)).bounds == before.bounds


@pytest.mark.parametrize("layer", [True, False])
def test_checks_correct_sensitivities_of_their_kind(layer):
    check = Check(key="x", step=0, layer=layer, measured=3e-4, predicted=1e-4)
    (node,) = statistics().nodes
    (read,) = node.injections
    node = dataclasses.replace(node, injections=(read, dataclasses.replace(read, layer=True)))
    state = NoiseBudget(noise=0.01).update(EMPTY, statistics(checks=(check,), nodes=(node,)))
    assert (state.layer_corrections if layer else state.corrections) == {"x": pytest.approx(3.0)}
    assert state.sensitivities == {"x": pytest.approx(0.6 + 0.2)}


def test_comet():
    controller = Comet()
    assert controller.bound(EMPTY, "x", CONV, rms) == pytest.approx(0.06)
    assert controller.bound(EMPTY, "x", Role.BATCH_NORM_INPUT, not_asked) is None
    state = controller.update(EMPTY, statistics())
    # acceptance * mean|momentum| / (0.32 * mean|loss| * sqrt(batch * positions * R))
    expected = 0.01 * 0.05 / (0.32 * 1e-3 * math.sqrt(8 * 100 * 0.5))
    assert controller.bound(state, "x", CONV, not_asked) == pytest.approx(expected)
    own = Comet(coefficient=None).update(EMPTY, statistics())
    assert own.bounds["x"] == pytest.approx(expected * 0.32 / (math.sqrt(1 / 3) * math.sqrt(math.pi / 2)))


def test_comet_without_momentum_waits():
    state = Comet().update(EMPTY, statistics(mean_abs_momentum={}))
    assert state.bounds == {} and state.updates == 1


def test_comet_is_due_at_its_interval():
    assert [step for step in range(25) if Comet(interval=10).due(step)] == [0, 1, 10, 20]


def test_warm_up_holds_everything_exactly():
    inner = NoiseBudget(noise=0.01)
    controller = WarmUp(controller=inner, updates=2)
    state = EMPTY
    for _ in range(2):
        assert controller.bound(state, "x", CONV, not_asked) is None
        state = controller.update(state, statistics())
    assert controller.bound(state, "x", CONV, not_asked) == inner.bound(state, "x", CONV, not_asked)
    assert [controller.due(step) for step in range(50)] == [inner.due(step) for step in range(50)]


def test_refreshes_come_often_at_first():
    due = [step for step in range(600) if refresh_due(step, 128)]
    assert due == [*range(16), 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 256, 384, 512]
    assert [step for step in range(12) if refresh_due(step, 4)] == [0, 1, 2, 3, 4, 8]


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, "x"])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: Fixed(value=value),
        lambda value: NoiseBudget(noise=value),
        lambda value: NoiseBudget(noise=1e-3, first_share=value),
        lambda value: NoiseBudget(noise=1e-3, highest_share=value),
        lambda value: Comet(acceptance=value),
        lambda value: Comet(first_share=value),
        lambda value: Comet(coefficient=value),
    ],
)
def test_values_out_of_range_are_refused(make, value):
    with pytest.raises(OptionError, match="not a positive finite number"):
        make(value)


@pytest.mark.parametrize("value", [-3, 0, 2.5, NAN, "x"])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: Fixed(value=1.0, interval=value),
        lambda value: NoiseBudget(noise=1e-3, interval=value),
        lambda value: Comet(interval=value),
        lambda value: WarmUp(controller=Comet(), updates=value - 1 if value == 0 else value),
    ],
)
def test_intervals_are_whole_numbers_from_one(make, value):
    with pytest.raises(OptionError, match="not a whole number from"):
        make(value)


def test_prediction_needs_sensitivities():
    assert predicted_noise(EMPTY, {"x": 1.0}) is None
    state = ControllerState(sensitivities={"x": 2.0, "y": 3.0})
    assert predicted_noise(state, {"x": 0.1, "z": 5.0}) == pytest.approx(0.02)


def test_calibration_keeps_the_predicted_noise_and_lasts():
    law = statistics()
    state = calibrated(EMPTY, 4.0)
    assert calibrated(state, 0.25).total_correction == 2.0
    assert calibrated(state, 1.44).total_correction == pytest.approx(4.8)
    plain = NoiseBudget(noise=1e-3).update(EMPTY, law)
    corrected = NoiseBudget(noise=1e-3).update(state, law)
    assert corrected.sensitivities == {key: 4.0 * cost for key, cost in plain.sensitivities.items()}
    later = calibrated(plain, 4.0)
    assert later.bounds == {key: pytest.approx(bound / 2.0) for key, bound in plain.bounds.items()}
    assert predicted_noise(later, later.bounds) == pytest.approx(predicted_noise(plain, plain.bounds))


def test_calibration_raises_no_bound_above_its_cap():
    state = NoiseBudget(noise=1.0, highest_share=0.25).update(EMPTY, statistics())  # 0.2 * 0.5^2 of 1.0
    later = calibrated(state, 0.25, 1.0)
    assert later.bounds == state.bounds and later.sensitivities == {"x": pytest.approx(0.1)}
    assert calibrated(state, 4.0, 1.0).bounds == {"x": pytest.approx(0.25)}


def test_what_is_known_of_a_tensor_is_forgotten_where_its_bounds_get_another_unit():
    (tensor,), controller = statistics().tensors, NoiseBudget(noise=0.01)
    state = ControllerState(sensitivities={"x": 5.0}, bounds={"x": 1.0})
    for scaled, expected in ((True, 1.0), (True, math.sqrt(0.2)), (False, 0.2)):
        seen = statistics(tensors=(dataclasses.replace(tensor, bound=1.0, scaled=scaled),), noise=0.0)
        state = controller.update(state, seen)
        assert state.sensitivities == {"x": pytest.approx(expected)}
    assert state.is_of_unit("x", False) and not state.is_of_unit("x", True) and state.is_of_unit("y", True)
    assert ControllerState.from_dict(state.to_dict()) == state


def test_a_state_survives_json_to_the_bit():
    state = ControllerState(
        bounds={"a": 0.1, "b": 1e-300},
        sensitivities={"a": 1 / 3},
        corrections={"a": math.pi},
        layer_corrections={"a": math.e},
        updates=7,
        total_correction=1 / 7,
    )
    assert ControllerState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    "changes",
    [
        {"bounds": None},
        {"sensitivities": [1]},
        {"corrections": {"a": "b"}},
        {"updates": 1.5},
        {"updates": None},
        {"total_correction": "high"},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(changes):
    with pytest.raises(FormatError, match="controller state has fields"):
        ControllerState.from_dict({**EMPTY.to_dict(), **changes})
