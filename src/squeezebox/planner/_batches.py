"""What a step would hold at another batch, and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from squeezebox.schema import Option, Profile, StepProfile, TensorProfile

_LARGEST = 1 << 20
_LEAST = 0.5

Line = Callable[[float, float], float]


def at_batch(known: Mapping[int, StepProfile], batch: int) -> StepProfile:
    """The step to expect at ``batch``, from those profiled at other batches.

    Bytes and seconds lie on the line through the two nearest ones. With one, or where a step's order differs
    from one batch to the other, everything but parameters, gradients and optimizer state is in proportion to
    the batch. Noise and bounds are the nearest one's.
    """
    nearest, *others = sorted(known, key=lambda size: (abs(size - batch), size))
    first, ratio = known[nearest], batch / nearest
    other = next((size for size in others if _alike(first.profile, known[size].profile)), None)
    if other is None:
        return _step(lambda one, _: ratio * one, first, first, _proportional(first.profile, ratio))

    def line(one: float, two: float) -> float:
        return max(one + (two - one) * (batch - nearest) / (other - nearest), 0.0)

    second = known[other]
    found = _step(line, first, second, _between(line, ratio, first.profile, second.profile))
    least = _LEAST * min(ratio, 1.0) * first.plain_seconds  # clocks err, and lines lead below nothing
    return replace(found, plain_seconds=max(found.plain_seconds, least))


def largest_batch(fits: Callable[[int], bool], start: int = 1) -> int:
    """The largest batch for which ``fits`` says yes, if all smaller ones fit too; 0 if not even 1 does."""
    low, high = 0, start
    while fits(high) and high < _LARGEST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _alike(first: Profile, second: Profile) -> bool:
    """Whether the same happens at the same positions."""
    return len(first.base_bytes) == len(second.base_bytes) and _order(first) == _order(second)


def _order(profile: Profile) -> list[tuple[object, ...]]:
    return [(t.key, t.saved_at, t.dropped_at, t.first_use, t.last_use, t.gaps) for t in profile.tensors]


def _step(line: Line, first: StepProfile, second: StepProfile, profile: Profile) -> StepProfile:
    saved = {
        key: math.ceil(line(nbytes, second.saved_bytes.get(key, nbytes)))
        for key, nbytes in first.saved_bytes.items()
    }
    small = {
        key: math.ceil(line(nbytes, second.small_bytes.get(key, nbytes)))
        for key, nbytes in first.small_bytes.items()
    }
    seconds = line(first.plain_seconds, second.plain_seconds)
    return replace(first, profile=profile, saved_bytes=saved, small_bytes=small, plain_seconds=seconds)


def _between(line: Line, ratio: float, first: Profile, second: Profile) -> Profile:
    bases = zip(first.base_bytes, second.base_bytes, strict=True)
    pairs = zip(first.tensors, second.tensors, strict=True)
    return replace(
        first,
        base_bytes=tuple(math.ceil(line(one, two)) for one, two in bases),
        tensors=tuple(_tensor(line, ratio, one, two) for one, two in pairs),
        input_bytes=math.ceil(line(first.input_bytes, second.input_bytes)),
    )


def _tensor(line: Line, ratio: float, first: TensorProfile, second: TensorProfile) -> TensorProfile:
    """On the line where both have the same options, else in proportion."""
    if [(o.action, o.codec) for o in first.options] != [(o.action, o.codec) for o in second.options]:
        return _tensor(lambda one, _: ratio * one, ratio, first, first)
    pairs = zip(first.options, second.options, strict=True)
    return replace(first, options=tuple(_option(line, one, two) for one, two in pairs))


def _option(line: Line, first: Option, second: Option) -> Option:
    return replace(
        first,
        held_bytes=math.ceil(line(first.held_bytes, second.held_bytes)),
        working_bytes=math.ceil(line(first.working_bytes, second.working_bytes)),
        making_bytes=math.ceil(line(first.making_bytes, second.making_bytes)),
        packing_bytes=math.ceil(line(first.packing_bytes, second.packing_bytes)),
        seconds=line(first.seconds, second.seconds),
    )


def _proportional(profile: Profile, ratio: float) -> Profile:
    gradients = [moment.gradient_bytes for moment in profile.moments]
    fixed = [profile.parameter_bytes + profile.state_bytes + gradient for gradient in gradients]
    fixed[-1] = profile.base_bytes[-1] - profile.input_bytes  # the optimizer works on parameters
    bases = zip(profile.base_bytes, fixed, strict=True)
    return replace(
        profile,
        base_bytes=tuple(math.ceil(held + ratio * max(base - held, 0)) for base, held in bases),
        tensors=tuple(_tensor(lambda one, _: ratio * one, ratio, t, t) for t in profile.tensors),
        input_bytes=math.ceil(ratio * profile.input_bytes),
    )
