"""Bound controllers: statistics in, one absolute error bound a tensor out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Protocol, TypeGuard

from squeezebox.bounds.law import allocate, corrected, propagate
from squeezebox.schema import FormatError, OptionError, Role, StepStatistics, TensorStatistics

_TABLES = ("bounds", "sensitivities", "corrections", "layer_corrections")
_FIRST_STEPS = 16
_FAR = 2.0  # times the predicted noise: more than steps differ
_SPENT = 0.99  # of the allowed noise: less is predicted only where every bound is at its cap
_SMOOTHING = 0.5  # weight of the newest statistics in the running (logarithmic) mean


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """What a controller knows: bounds and sensitivities by tensor key, and updates seen.

    ``corrections`` are of the noise that a tensor hands on to earlier layers, ``layer_corrections`` of that
    in the weight gradient of the layer that reads it. ``total_correction`` is what calibration found on top
    of the law and the checks of single tensors; the sensitivities have it within. ``scaled`` says whether a
    tensor was packed in units of its scale: what is known of it is of that unit, scaled or absolute.
    """

    bounds: Mapping[str, float] = field(default_factory=dict)
    sensitivities: Mapping[str, float] = field(default_factory=dict)
    corrections: Mapping[str, float] = field(default_factory=dict)
    layer_corrections: Mapping[str, float] = field(default_factory=dict)
    updates: int = 0
    total_correction: float = 1.0
    scaled: Mapping[str, bool] = field(default_factory=dict)

    def is_of_unit(self, key: str, scaled: bool) -> bool:
        """Whether what is known of a tensor, if anything, is for such bounds."""
        return self.scaled.get(key, scaled) == scaled

    def without(self, keys: Collection[str]) -> ControllerState:
        """The state that knows nothing of these tensors."""

        def rest(table: Mapping[str, float]) -> dict[str, float]:
            return {key: value for key, value in table.items() if key not in keys}

        return replace(
            self,
            bounds=rest(self.bounds),
            sensitivities=rest(self.sensitivities),
            corrections=rest(self.corrections),
            layer_corrections=rest(self.layer_corrections),
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values for ``state_dict()``; Python floats survive JSON and torch.save to the bit."""
        return {
            "bounds": dict(self.bounds),
            "sensitivities": dict(self.sensitivities),
            "corrections": dict(self.corrections),
            "layer_corrections": dict(self.layer_corrections),
            "updates": self.updates,
            "total_correction": self.total_correction,
            "scaled": dict(self.scaled),
        }

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> ControllerState:
        """The state that :meth:`to_dict` gave.

        Raises:
            FormatError: a field is missing or of the wrong type.
        """
        tables = [values.get(name) for name in _TABLES]
        updates, total = values.get("updates"), values.get("total_correction")
        scaled = values.get("scaled", {})  # older states have none
        if (
            not isinstance(updates, int)
            or not isinstance(total, float)
            or not all(_is_table(table) for table in tables)
            or not _is_table(scaled)
        ):
            raise FormatError(
                f"controller state has fields {sorted(values)}; it needs {', '.join(_TABLES)} (numbers by "
                "key), updates and total_correction. Pass the object that state_dict() gave."
            )
        found = {name: dict(table) for name, table in zip(_TABLES, tables, strict=True) if _is_table(table)}
        units = {key: bool(value) for key, value in scaled.items()}
        return ControllerState(**found, updates=updates, total_correction=total, scaled=units)


class Controller(Protocol):
    """Chooses every tensor's bound. State goes in, state comes out."""

    def due(self, step: int) -> bool:
        """Whether step number ``step`` (from 0) gathers statistics for an update."""

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """Absolute error bound of one tensor; None: hold it exactly.

        Of a normalisation's input whose deviations are saved, it is a multiple of each channel's or row's.
        ``rms()`` measures the root mean square of the tensor's non-zero elements, when asked; where zeros
        carry no meaning, the deviation: an error as wide as that would hide all that differs.
        """

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """The state after a due step."""


def refresh_due(step: int, interval: int) -> bool:
    """The first 17 steps, 20, 24, 28, 32, 40, 48, ... up to ``interval``, then every ``interval``.

    Training moves fastest at its start.
    """
    if step < interval:
        # Four times between two powers of two.
        return step < _FIRST_STEPS or step % (1 << (step.bit_length() - 3)) == 0
    return step % interval == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """One bound for all tensors, as :class:`Controller` has them, or a share of each rms (``relative``)."""

    value: float
    relative: bool = True
    interval: int = 100

    def __post_init__(self) -> None:
        _require_positive("bound", self.value)
        _require_count("interval", self.interval, least=1)

    def due(self, step: int) -> bool:
        """Statistics only feed the report here."""
        return refresh_due(step, self.interval)

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """``value``, times the tensor's rms if relative."""
        return self.value * rms() if self.relative else self.value

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """Only the sensitivities change."""
        return _observed(state, statistics)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseBudget:
    """Holds the step's relative gradient noise at ``noise`` and spends it where bits are dearest.

    Minimises the packed bits subject to ``sum_l c_l * bound_l^2 <= noise * ||g||^2`` (docs/theory.md,
    allocation; :func:`squeezebox.bounds.allocate`). Until a tensor has been measured its bound is a
    cautious share of its rms, ``first_share * sqrt(noise)``.
    """

    noise: float
    interval: int = 100
    first_share: float = 0.5
    highest_share: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("noise", self.noise)
        _require_count("interval", self.interval, least=1)
        _require_positive("first_share", self.first_share)
        _require_positive("highest_share", self.highest_share)

    def due(self, step: int) -> bool:
        """Often at first, then every ``interval`` steps."""
        return refresh_due(step, self.interval)

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """The allocated bound, or the cautious one of a tensor not seen before."""
        known = state.bounds.get(key)
        return known if known is not None else self.first_share * math.sqrt(self.noise) * rms()

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """Allocate the budget again, from the running sensitivities; what has none keeps its bound."""
        seen = _observed(state, statistics)
        weighed = [each for each in statistics.tensors if seen.sensitivities.get(each.key, 0.0) > 0.0]
        bounds = allocate(self.noise, weighed, seen.sensitivities, highest_share=self.highest_share)
        return replace(seen, bounds={**seen.bounds, **bounds})


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The bounds of a plan, by tensor; tensors without one are held exactly.

    No step gathers statistics: that would take memory which the plan has given away.
    """

    bounds: Mapping[str, float]

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """The planned bound."""
        return self.bounds.get(key)

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """Only the sensitivities change."""
        return _observed(state, statistics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comet:
    """COMET's adaptive bound on convolution inputs (arXiv:2111.09562, section 4); the rest is exact.

    The accepted standard deviation of a layer's gradient error is ``acceptance`` times the mean
    absolute momentum, and the paper's model of that deviation,

        sigma = coefficient * mean|loss| * sqrt(N * R) * bound,

    is solved for the bound every ``interval`` iterations. N counts the products that one weight sums,
    batch times output positions: the paper writes the batch and folds the positions into its fitted
    coefficient. ``coefficient=None`` takes the error law's own value for evenly spread errors and
    normal gradients, ``sqrt(1/3) * sqrt(pi/2)``.
    """

    coefficient: float | None = 0.32
    acceptance: float = 0.01
    interval: int = 1000
    first_share: float = 0.02

    def __post_init__(self) -> None:
        _require_positive("acceptance", self.acceptance)
        if self.coefficient is not None:
            _require_positive("coefficient", self.coefficient)
        _require_count("interval", self.interval, least=1)
        _require_positive("first_share", self.first_share)

    def due(self, step: int) -> bool:
        """At the start, then at the paper's interval."""
        return step in (0, 1) or step % self.interval == 0

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """The layer's bound for a convolution's input, None for everything else."""
        if role is not Role.CONV_INPUT:
            return None
        known = state.bounds.get(key)
        return known if known is not None else self.first_share * rms()

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """Solve the paper's model for every layer that was seen."""
        seen = _observed(state, statistics)
        coefficient = self.coefficient if self.coefficient is not None else math.sqrt(math.pi / 6.0)
        bounds = dict(seen.bounds)
        for tensor in statistics.tensors:
            momentum = statistics.mean_abs_momentum.get(tensor.parameter, 0.0)
            products = tensor.batch * tensor.positions * tensor.nonzero
            deviation = coefficient * tensor.mean_abs_loss * math.sqrt(products)
            if deviation > 0.0 and momentum > 0.0:
                bounds[tensor.key] = self.acceptance * momentum / deviation
        return replace(seen, bounds=bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """Holds everything exactly for the first ``updates`` updates of another controller."""

    controller: Controller
    updates: int

    def __post_init__(self) -> None:
        _require_count("updates", self.updates, least=0)

    def due(self, step: int) -> bool:
        """As the wrapped controller."""
        return self.controller.due(step)

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """None until warm, then the wrapped controller's bound."""
        if state.updates < self.updates:
            return None
        return self.controller.bound(state, key, role, rms)

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """As the wrapped controller."""
        return self.controller.update(state, statistics)


def predicted_noise(state: ControllerState, bounds: Mapping[str, float]) -> float | None:
    """Relative gradient noise expected of these bounds; None before any sensitivity is known."""
    if not state.sensitivities:
        return None
    return sum(state.sensitivities.get(key, 0.0) * bound**2 for key, bound in bounds.items())


def calibrated(state: ControllerState, ratio: float, allowed: float = 0.0) -> ControllerState:
    """The state after a step whose noise was ``ratio`` times what was predicted.

    Noise differs from step to step, so the root of that is believed, and all of it only beyond two. As many
    times higher are sensitivities from now on, and bounds are lower by the root, so that the predicted noise
    stays what it was. Bounds of less than the ``allowed`` noise are all at their caps: none is raised.
    """
    ratio = ratio if ratio > _FAR else math.sqrt(ratio)
    capped = (predicted_noise(state, state.bounds) or 0.0) < _SPENT * allowed
    root = math.sqrt(max(ratio, 1.0) if capped else ratio)
    bounds = {key: bound / root for key, bound in state.bounds.items()}
    return replace(_weighed(state, ratio), bounds=bounds)


def _weighed(state: ControllerState, ratio: float) -> ControllerState:
    """The state with all sensitivities as many times higher."""
    return replace(
        state,
        sensitivities={key: ratio * cost for key, cost in state.sensitivities.items()},
        total_correction=ratio * state.total_correction,
    )


def _believed(ratio: float, updates: int) -> float:
    """What to make of a refresh's measured noise over the predicted one.

    All of it where it is above what steps differ by, which is four (one before anything was measured); else
    the root.
    """
    return ratio if ratio > (_FAR**2 if updates else 1.0) else math.sqrt(ratio)


def _observed(state: ControllerState, statistics: StepStatistics) -> ControllerState:
    """The state with the newest sensitivities, and corrections mixed into their running mean.

    Where the step's own noise was measured, it says what all sensitivities are to be multiplied by; where it
    was not, each rises at once and falls slowly.
    """
    state = _in_units_of(statistics.tensors, state)
    tables = {True: dict(state.layer_corrections), False: dict(state.corrections)}
    costs: dict[str, float] = {}
    for layer, corrections in tables.items():
        for check in statistics.checks:
            ratio = check.measured / check.predicted if check.predicted else 0.0
            if check.layer is layer and _is_usable(ratio):
                corrections[check.key] = _mix(corrections.get(check.key), ratio)
        raw = propagate(statistics.nodes, layer=layer)
        for key, cost in corrected(raw, statistics.tensors, corrections, layer=layer).items():
            costs[key] = costs.get(key, 0.0) + cost
    measured = statistics.noise is not None and math.isfinite(statistics.noise)
    merged = {**state.sensitivities}
    # Of a gradient that is zero now, as where a branch is dropped, what was known holds.
    shown = {key: cost for key in costs if _is_usable(cost := state.total_correction * costs[key])}
    for key, cost in shown.items():
        mixed = _mix(merged.get(key), cost)
        merged[key] = mixed if measured else max(cost, mixed)
    seen = replace(
        state,
        sensitivities=merged,
        corrections=tables[False],
        layer_corrections=tables[True],
        updates=state.updates + 1,
    )
    bounds = {tensor.key: tensor.bound for tensor in statistics.tensors if tensor.key in shown}
    expected = predicted_noise(seen, bounds)
    ratio = statistics.noise / expected if statistics.noise and expected else 0.0
    return _weighed(seen, _believed(ratio, state.updates)) if _is_usable(ratio) else seen


def _in_units_of(tensors: Sequence[TensorStatistics], state: ControllerState) -> ControllerState:
    """The state without what it knows of tensors that are packed in another unit now."""
    seen = {tensor.key: tensor.scaled for tensor in tensors}
    packed = {tensor.key: tensor.scaled for tensor in tensors if tensor.bound > 0.0}
    other = {key for key, scaled in packed.items() if not state.is_of_unit(key, scaled)}
    return replace(state.without(other), scaled={**seen, **state.scaled, **packed})


def _is_table(value: object) -> TypeGuard[Mapping[str, float]]:
    return isinstance(value, Mapping) and all(isinstance(number, (int, float)) for number in value.values())


def _is_usable(weight: float) -> bool:
    """Neither zero, nor infinite, nor NaN."""
    return 0.0 < weight < math.inf


def _mix(known: float | None, newest: float) -> float:
    if not known:
        return newest
    return math.exp((1 - _SMOOTHING) * math.log(known) + _SMOOTHING * math.log(newest))


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, Real) or not 0.0 < float(value) < math.inf:
        raise OptionError(
            f"{name}={value} is not a positive finite number. Give a value such as 1e-3, "
            "or exact=True to allow no loss at all."
        )


def _require_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, Integral) or int(value) < least:
        raise OptionError(f"{name}={value} is not a whole number from {least}; give one.")
