"""Gradients and optimizer state as rows of a step's profile."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Container, Iterator, Sequence

import torch

from squeezebox import planner
from squeezebox.memory import CHUNK_BYTES, disk_speed, movable_weights, usual_folder
from squeezebox.optim import PIECE_BYTES, SMALL_BYTES, WAITING_BYTES, can_be_cut, refuse_unknown, slice_bytes
from squeezebox.planning._profiles import without
from squeezebox.planning._state_costs import StateCost, can_be_packed, check_share
from squeezebox.profiling import ParameterNeeds, parameter_needs, state_bytes, transfer_of
from squeezebox.reports import exact_bytes
from squeezebox.schema import (
    Action,
    Budget,
    BudgetError,
    Moment,
    OptimizerPlan,
    Option,
    OptionError,
    Part,
    Plan,
    Profile,
    StepProfile,
    TensorProfile,
    human_bytes,
)
from squeezebox.steps import TrainingStep, device_of

_BACKWARD = 2 / 3  # of a step's time, in which states are moved
_BITS = {"16 bit": 16, "8 bit": 8}
_LEAST_SECONDS = 5e-11  # a byte: 0.1 ms for a chunk, which wakes threads


@dataclasses.dataclass(frozen=True, slots=True)
class _Parameter:
    """What a parameter has in a step: where its gradient is complete, the bytes of that and of its update."""

    name: str
    position: int
    gradient_bytes: int
    needs: ParameterNeeds
    in_pieces: bool  # it is updated, and read from a file
    slice_bytes: int = 0  # of the gradient, where it can be made some rows at a time
    numel: int = 0
    rest_bytes: int = 0  # of a weight held in bfloat16, where its state is
    codes: tuple[StateCost, ...] = ()  # that its state may be packed with

    @property
    def state_key(self) -> str:
        return f"state of {self.name}"

    @property
    def gradient_key(self) -> str:
        return f"gradient of {self.name}"

    @property
    def update_bytes(self) -> int:
        """Beyond gradient and state; the first update makes the state in quarters of a piece."""
        if not self.in_pieces:
            return self.needs.update_bytes
        share = min(1.0, CHUNK_BYTES / max(self.gradient_bytes, 1))
        taken = math.ceil(share * max(self.needs.update_bytes, sum(self.needs) / 4))
        piece = math.ceil(share * self.gradient_bytes)
        return piece + max(taken, piece) if self.rest_bytes else taken  # another one as it is split again

    @property
    def packed_bytes(self) -> int:
        """What an update from packed state takes beyond that: a piece of the state, unpacked."""
        piece = min(PIECE_BYTES, self.gradient_bytes)
        share = piece / max(self.gradient_bytes, 1)
        return max(0, math.ceil(share * sum(self.needs)) - self.update_bytes)

    @property
    def is_small(self) -> bool:
        """Whether it is updated together with others, and nothing of it is moved."""
        return self.gradient_bytes < SMALL_BYTES

    @property
    def state_bytes(self) -> int:
        """With the rest."""
        return self.needs.state_bytes + self.rest_bytes

    @property
    def has_state_row(self) -> bool:
        return not self.is_small and self.state_bytes > 0


def check_states(
    step: TrainingStep,
    clip: float | bool | None,
    accumulate: int,
    update_noise: float | None,
    weight_noise: float | None,
    *,
    wanted: bool,
) -> None:
    """OptionError where updates are ``wanted`` one by one and cannot be, or nothing is and it is said how."""
    if not isinstance(wanted, bool):
        raise OptionError(f"states {wanted!r} is neither True nor False.")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise OptionError(f"accumulate {accumulate!r} is no number of backward passes; give 1, 2, ...")
    if not wanted:
        if clip is not None or update_noise is not None or weight_noise is not None:
            raise OptionError(
                "clip, update_noise and weight_noise say how states=True updates and holds weights; give "
                "that too."
            )
        return
    if update_noise is not None:
        check_share("update_noise", update_noise, "of updates")
    if weight_noise is not None:
        check_share("weight_noise", weight_noise, "of frozen weights")
    if step.optimizer is None:
        raise OptionError("states=True is about an optimizer's updates, and none was given; pass optimizer=.")
    if clip not in (None, True, False) and not (isinstance(clip, (int, float)) and clip > 0.0):
        raise OptionError(f"clip {clip!r} is no norm; give the one that the loop clips to, or True.")
    refuse_unknown(step.optimizer)


@contextlib.contextmanager
def hinting(
    step: TrainingStep,
    seen: StepProfile,
    limit: int | None,
    noise: float,
    plain_peak_bytes: int,
    accumulate: int,
    barred: Container[Action],
) -> Iterator[None]:
    """Where no plan fits, say whether one with ``states=True`` would, without the actions ``barred``."""
    try:
        yield
    except BudgetError as error:
        if limit is None or step.optimizer is None or seen.plain_peak_bytes is not None:
            raise
        try:
            refuse_unknown(step.optimizer)
        except OptionError:
            raise error from None
        # Without slices of large layers' gradients, which only a profile for such updates shows.
        wider = with_states(seen, step, plain_peak_bytes, clip=False, accumulate=accumulate)
        least = planner.smallest(without(wider, barred).profile, noise).predicted_peak_bytes
        frozen = sum(each.nbytes for each in movable_weights(step.model, SMALL_BYTES).values())
        more = frozen if least > limit and Action.OFFLOAD not in barred else 0
        if least > limit and not more and error.least_bytes is not None and error.least_bytes <= least:
            raise  # slices of the batch, which are not looked for here, take less
        needs = (
            f"{human_bytes(least)}, which fits" if least <= limit else f"{exact_bytes(least)}, still above it"
        )
        also = f"; it may also move {human_bytes(more)} of frozen weights" if more else ""
        how = _how(accumulate, barred)
        raise BudgetError(
            f"{error} With states=True, which {how}, a plan needs at most {needs}{also}."
        ) from error


def _how(accumulate: int, barred: Container[Action]) -> str:
    """What ``states=True`` does."""
    if Action.OFFLOAD not in barred:
        return "updates parameter by parameter and moves optimizer state to a file"
    if accumulate == 1:
        return "updates in backward and keeps no gradients"
    return "updates parameter by parameter"


def accumulating(seen: StepProfile, model: torch.nn.Module) -> StepProfile:
    """The step with all gradients of an earlier backward in memory, to which its own are added."""
    profile, named = seen.profile, dict(model.named_parameters())
    base, gradients = list(profile.base_bytes), [moment.gradient_bytes for moment in profile.moments]
    for name, position in profile.gradients_at.items():
        for earlier in range(position + 1):
            base[earlier] += named[name].nbytes
            gradients[earlier] += named[name].nbytes
    return dataclasses.replace(seen, profile=_replaced(profile, base, gradients, profile.moments, ()))


def with_states(
    seen: StepProfile,
    step: TrainingStep,
    plain_peak_bytes: int,
    *,
    clip: bool,
    accumulate: int,
    codes: Sequence[tuple[StateCost, ...]] = (),
) -> StepProfile:
    """The step with a row for every gradient and every state that could be elsewhere.

    With neither ``clip`` nor ``accumulate`` beyond 1 each parameter is updated in backward, and no gradient
    outlives that. Else the optimizer's step has a position for each parameter, the largest first.
    The state of an optimizer's groups may be packed with ``codes``, one entry for each.
    """
    assert step.optimizer is not None
    found = _trained(seen.profile, step.model, step.optimizer, codes)
    late = clip or accumulate > 1
    rows = [each for each in found if each.has_state_row]
    own = sum(each.state_bytes for each in rows)
    profile = dataclasses.replace(
        seen.profile,
        state_bytes=seen.profile.state_bytes - own,
        base_bytes=tuple(nbytes - own for nbytes in seen.profile.base_bytes),
    )
    total = (
        sum(each.gradient_bytes for each in found) * late
        + sum(each.state_bytes for each in found)
        + sum(
            seen.saved_bytes[tensor.key]
            for tensor in profile.tensors
            if any(option.action is Action.OFFLOAD for option in tensor.options)
        )
    )
    seconds, profile = _seconds_a_byte(seen, step, total), _repriced(profile, seen, step, total)
    made = _late(profile, found, seconds, accumulate) if late else _in_backward(profile, found, seconds)
    sizes = {each.state_key: each.state_bytes for each in rows}
    if late:
        sizes |= {each.gradient_key: each.gradient_bytes for each in found if not each.is_small}
    return dataclasses.replace(
        seen,
        profile=made,
        saved_bytes={**seen.saved_bytes, **sizes},
        plain_peak_bytes=plain_peak_bytes,
        in_backward=not late,
    )


def optimizer_plan(
    seen: StepProfile, chosen: Plan, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> OptimizerPlan:
    """What the chosen options mean for the optimizer."""
    found = _trained(seen.profile, model, optimizer)
    states = {each.state_key: each for each in found if each.state_key in chosen.choices}
    gradients = {each.gradient_key: each for each in found if each.gradient_key in chosen.choices}
    moved = {key for key, option in chosen.choices.items() if option.action is Action.OFFLOAD}
    packed = {key: chosen.choices[key] for key in states if chosen.choices[key].action is Action.COMPRESS}
    own = [*packed, *(moved & (states.keys() | gradients.keys()))]
    return OptimizerPlan(
        name=type(optimizer).__name__,
        in_backward=seen.in_backward,
        states=tuple(each.name for key, each in states.items() if key in moved),
        sliced=tuple(each.name for each in found if each.slice_bytes) if seen.in_backward else (),
        split=tuple(each.name for each in found if each.rest_bytes),
        packed={states[key].name: _BITS[option.codec] for key, option in packed.items()},
        gradients=tuple(each.name for key, each in gradients.items() if key in moved),
        state_bytes=state_bytes(model, optimizer) + sum(each.rest_bytes for each in found),
        gradient_bytes=sum(each.gradient_bytes for each in found),
        moved_bytes=sum(seen.saved_bytes[key] for key in own if key in moved),
        packed_bytes=sum(option.held_bytes - states[key].rest_bytes for key, option in packed.items()),
        update_noise=max((option.bound for option in packed.values()), default=0.0),
        seconds=sum(chosen.choices[key].seconds for key in own),
    )


_NOTHING = Plan(
    choices={}, predicted_peak_bytes=0, predicted_seconds=0.0, predicted_noise=0.0, peak_position=0
)


class States:
    """The states of an optimizer that updates in backward, apart from what else a step has.

    Args:
        step: whose optimizer is meant.
        seconds: of a plain step, behind which moving them hides.
        codes: that they may be packed with, one entry for each of the optimizer's groups.
        moves: whether they may be in a file.

    Attributes:
        nbytes: of all of them.
        gradient_bytes: of all gradients.
        taken_bytes: what the update of each parameter takes besides, but for small ones, which are updated
            together.
    """

    def __init__(
        self, step: TrainingStep, seconds: float, codes: Sequence[tuple[StateCost, ...]], *, moves: bool
    ) -> None:
        assert step.optimizer is not None
        self._model, self._optimizer = step.model, step.optimizer
        named = {name: each for name, each in step.model.named_parameters() if each.requires_grad}
        places = {name: place for place, name in enumerate(named)}
        none = Profile(base_bytes=(0,) * len(named), tensors=(), gradients_at=places)
        found = _trained(none, step.model, step.optimizer, codes)
        rows = [each for each in found if each.has_state_row]
        self._seen = seen = StepProfile(
            profile=none,
            saved_bytes={each.state_key: each.state_bytes for each in rows},
            plain_seconds=seconds,
            late_values={},
            in_backward=True,
        )
        self.nbytes = state_bytes(step.model, step.optimizer)
        self.gradient_bytes = sum(each.gradient_bytes for each in found)
        self.taken_bytes = {named[each.name]: each.update_bytes for each in found if not each.is_small}
        self._others_bytes = self.nbytes - sum(seen.saved_bytes.values())
        price = _seconds_a_byte(seen, step, self.nbytes) if moves else math.inf
        self._profile = dataclasses.replace(
            none, tensors=tuple(_state_row(each, each.position, price) for each in rows)
        )
        self.least_bytes = self._others_bytes
        if rows:
            self.least_bytes += planner.smallest(self._profile, 0.0).predicted_peak_bytes

    def within(self, nbytes: int) -> tuple[OptimizerPlan, int] | None:
        """Where they are in the least time within ``nbytes`` in memory, and what they take there; or None."""
        if nbytes < self.least_bytes:
            return None
        room = Budget(peak_bytes=nbytes - self._others_bytes)
        chosen = planner.solve(self._profile, room) if self._profile.tensors else _NOTHING
        plan = optimizer_plan(self._seen, chosen, self._model, self._optimizer)
        return plan, self._others_bytes + chosen.predicted_peak_bytes


def _trained(
    profile: Profile,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    codes: Sequence[tuple[StateCost, ...]] = (),
) -> list[_Parameter]:
    """Those that have a gradient and are the optimizer's, in the order in which gradients come."""
    needs = parameter_needs(optimizer)
    named = dict(model.named_parameters())
    groups = zip(optimizer.param_groups, codes, strict=bool(codes))
    usable = {id(each): own for group, own in groups for each in group["params"] if can_be_packed(each)}
    found = [
        _Parameter(
            name,
            position,
            named[name].nbytes,
            needs[id(named[name])],
            can_be_cut(named[name]),
            slice_bytes(named[name]) if name in profile.sliced else 0,
            named[name].numel(),
            named[name].nbytes // 2 if name in profile.split else 0,
            usable.get(id(named[name]), ()),
        )
        for name, position in profile.gradients_at.items()
        if id(named[name]) in needs
    ]
    return sorted(found, key=lambda each: each.position)


def _seconds_a_byte(seen: StepProfile, step: TrainingStep, total: int) -> float:
    """Of moving a byte to the file and back while backward runs, worked in place of a copy.

    ``total`` are all bytes that the disk moves in the step, saved tensors too.
    """
    folder = step.folder or usual_folder()
    if device_of(step.model).type != "cpu" or not folder.keeps_state:
        return math.inf
    speed, hidden = disk_speed(folder), _BACKWARD * seen.plain_seconds / max(total, 1)
    return _LEAST_SECONDS + 2 * speed.slowing + max(0.0, speed.writing + speed.reading - hidden)


def _repriced(profile: Profile, seen: StepProfile, step: TrainingStep, total: int) -> Profile:
    """Saved tensors share the disk with states: moving one hides less behind the step."""
    transfer = transfer_of(device_of(step.model), step.folder, [total], seen.plain_seconds)

    def option(tensor: TensorProfile, given: Option) -> Option:
        if tensor.part is not Part.SAVED:
            return given
        if given.action is not Action.OFFLOAD or given.codec == "host" or transfer is None:
            return given
        again = 1 + len(tensor.gaps)
        seconds = seen.saved_bytes[tensor.key] * (transfer.leaving + again * transfer.returning)
        return dataclasses.replace(given, seconds=max(given.seconds, seconds))

    return dataclasses.replace(
        profile,
        tensors=tuple(
            dataclasses.replace(each, options=tuple(option(each, given) for given in each.options))
            for each in profile.tensors
        ),
    )


def _in_backward(profile: Profile, found: Sequence[_Parameter], seconds: float) -> Profile:
    """Every gradient is there at one position only, with what its update takes."""
    base, gradients = list(profile.base_bytes), [moment.gradient_bytes for moment in profile.moments]
    for each in found:
        base[each.position] += each.update_bytes + each.slice_bytes
        for later in range(each.position + 1, len(base)):
            base[later] -= each.gradient_bytes
            gradients[later] -= each.gradient_bytes
    small = [each for each in found if each.is_small]
    waiting = min(WAITING_BYTES, sum(each.gradient_bytes for each in small))
    for later in range(min((each.position for each in small), default=len(base)), len(base)):
        base[later] += waiting
        gradients[later] += waiting
    owned = profile.parameter_bytes + profile.input_bytes + profile.state_bytes
    base[-1] = owned + gradients[-1]  # nothing is left for the optimizer's own step
    rows = [_state_row(each, each.position, seconds) for each in found if each.has_state_row]
    return _replaced(profile, base, gradients, profile.moments, rows)


def _late(profile: Profile, found: Sequence[_Parameter], seconds: float, accumulate: int) -> Profile:
    """Gradients wait for the optimizer's step, in which each parameter has a position."""
    base, gradients = list(profile.base_bytes), [moment.gradient_bytes for moment in profile.moments]
    for each in found:
        positions = range(each.position + 1, len(base)) if not each.is_small else range(0)
        for later in positions:
            base[later] -= each.gradient_bytes
            gradients[later] -= each.gradient_bytes
        if accumulate > 1 and each.is_small:  # there from the backward pass before
            for earlier in range(each.position + 1):
                base[earlier] += each.gradient_bytes
    ordered = sorted(found, key=lambda each: -each.gradient_bytes)
    owned = profile.parameter_bytes + profile.input_bytes + profile.state_bytes + gradients[-1]
    first, moment = len(base) - 1, Moment(phase="optimizer", gradient_bytes=gradients[-1])
    base[first:] = [owned + each.update_bytes for each in ordered] or [owned]
    gradients[first:] = [gradients[-1]] * max(len(ordered), 1)
    rows: list[TensorProfile] = []
    for number, each in enumerate(ordered):
        if each.has_state_row:
            rows.append(_state_row(each, first + number, seconds))
        if not each.is_small:
            rows.append(_gradient_row(each, first + number, len(base) - 1, seconds, accumulate))
    moments = (*profile.moments[:first], *[moment] * max(len(ordered), 1))
    return _replaced(profile, base, gradients, moments, rows)


def _replaced(
    profile: Profile,
    base: Sequence[int],
    gradients: Sequence[int],
    moments: Sequence[Moment],
    rows: Sequence[TensorProfile],
) -> Profile:
    pairs = zip(moments, gradients, strict=True)
    return dataclasses.replace(
        profile,
        base_bytes=tuple(base),
        moments=tuple(dataclasses.replace(moment, gradient_bytes=nbytes) for moment, nbytes in pairs),
        tensors=(*profile.tensors, *rows),
    )


def _state_row(each: _Parameter, position: int, seconds: float) -> TensorProfile:
    nbytes = each.state_bytes
    keep = Option(action=Action.KEEP, codec="keep", held_bytes=nbytes, lasting=True)
    moved = _moved(seconds * nbytes, 0 if each.in_pieces else nbytes)
    tensors = each.needs.state_bytes // each.gradient_bytes
    packed = [
        Option(
            action=Action.COMPRESS,
            codec=f"{code.bits} bit",
            bound=code.noise,  # of the update, not of the gradient, whose budget is another
            held_bytes=tensors * code.nbytes(each.numel) + each.rest_bytes,
            lasting=True,
            working_bytes=each.packed_bytes,
            seconds=code.seconds * each.numel,
        )
        for code in each.codes
        if tensors * code.nbytes(each.numel) < each.needs.state_bytes
    ]
    return TensorProfile(
        key=each.state_key,
        part=Part.STATE,
        saved_at=0,
        first_use=position,
        last_use=position,
        options=(keep, *packed, *([moved] if math.isfinite(seconds) else [])),
    )


def _gradient_row(each: _Parameter, at: int, last: int, seconds: float, accumulate: int) -> TensorProfile:
    """Kept from where it is complete until ``zero_grad()``; where several add up, through all of the step.

    In the file it is read for its update, and before, wherever something is added to it.
    """
    nbytes, adds = each.gradient_bytes, accumulate > 1
    start = each.position if adds else min(each.position + 1, at)
    keep = Option(action=Action.KEEP, codec="keep", held_bytes=nbytes, lasting=adds)
    away = [(each.position + 1, at - 1)] if adds else []
    away = [(begin, end) for begin, end in (*away, (at + 1, last)) if begin <= end]
    whole = adds or not each.in_pieces  # something is added to it, or all of it is read at once
    moved = _moved(seconds * nbytes * accumulate, nbytes if whole else 0)
    return TensorProfile(
        key=each.gradient_key,
        part=Part.GRADIENT,
        saved_at=start,
        first_use=each.position if adds else at,
        last_use=last,
        gaps=tuple(away),
        options=(keep, moved) if math.isfinite(seconds) else (keep,),
    )


def _moved(seconds: float, working_bytes: int) -> Option:
    """Worked in the file's own buffers, but for ``working_bytes``."""
    return Option(
        action=Action.OFFLOAD, codec="file", held_bytes=0, working_bytes=working_bytes, seconds=seconds
    )
