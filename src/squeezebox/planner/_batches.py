"""What a step would hold at another batch or with its first layers in slices, and the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from squeezebox.schema import Option, Profile, Region, Slicing, StepProfile, TensorProfile


def in_slices(whole: StepProfile, slicing: Slicing) -> StepProfile:
    """The step to expect: its first layers save nothing, and are worked once more in backward.

    Until they are done, forward holds what they take by themselves, and gradients of an earlier backward; so
    does backward once it has come back to them. The layers' own positions stay, with these bytes.
    """
    profile, region = whole.profile, slicing.region
    gone = frozenset(region.keys)
    owned = profile.parameter_bytes + profile.input_bytes + profile.state_bytes
    sliced = [tensor for tensor in profile.tensors if tensor.key in gone]
    base = list(profile.base_bytes)
    for tensor in sliced:  # originals
        for position in range(tensor.saved_at, min(tensor.dropped_at, len(base))):
            base[position] -= whole.saved_bytes[tensor.key]
    end = max((tensor.saved_at + 1 for tensor in sliced), default=0)
    start = min((tensor.first_use for tensor in sliced), default=len(base) - 1)
    left = profile.moments[-1].gradient_bytes
    for position in range(end + 1):
        beyond = base[position] if position == end else 0  # which goes on with what follows the layers
        base[position] = max(owned + profile.moments[position].gradient_bytes + slicing.forward_bytes, beyond)
    for position in range(start, len(base) - 1):
        base[position] = owned + left + slicing.backward_bytes
    tensors = tuple(_without(tensor, gone) for tensor in profile.tensors if tensor.key not in gone)
    return replace(
        whole,
        profile=replace(profile, base_bytes=tuple(base), tensors=tensors),
        saved_bytes={key: nbytes for key, nbytes in whole.saved_bytes.items() if key not in gone},
        small_bytes={key: nbytes for key, nbytes in whole.small_bytes.items() if key not in gone},
        plain_seconds=whole.plain_seconds + slicing.seconds,
        region=region,
        regions=(),
    )


def _without(tensor: TensorProfile, gone: frozenset[str]) -> TensorProfile:
    """The tensor with no options that are made from those."""
    return replace(
        tensor, options=tuple(option for option in tensor.options if gone.isdisjoint(option.sources))
    )


def free_slices(region: Region) -> Slicing:
    """What no slices can take less than: nothing."""
    return Slicing(region=region, forward_bytes=0, backward_bytes=0, seconds=0.0)


def slicings(measured: Sequence[Slicing], own: int, batch: int) -> list[Slicing]:
    """In 2, 4, 8, ... slices of the batch, on the line through two that were measured with their ``own``.

    Bytes are on a line in a slice's samples, seconds in the number of slices. The result is in proportion to
    the batch, and so are the seconds.
    """
    few, many = measured[0], measured[-1]
    counts = [2**power for power in range(1, max(batch, 2).bit_length())]
    return [_on_line(few, many, own, batch, count) for count in counts]


def _on_line(few: Slicing, many: Slicing, own: int, batch: int, slices: int) -> Slicing:
    first, last, ratio = few.region.slices, many.region.slices, batch / own
    apart = math.ceil(own / first) != math.ceil(own / last)
    most = math.ceil(own / first)  # samples of a slice
    share = (math.ceil(batch / slices) - most) / (math.ceil(own / last) - most) if apart else 0.0
    later = (slices - first) / (last - first) if apart else 0.0
    result = (ratio - 1.0) * few.region.output_bytes

    def nbytes(one: int, two: int) -> int:
        return max(math.ceil(one + share * (two - one) + result), 0)

    return Slicing(
        region=replace(few.region, slices=slices),
        forward_bytes=nbytes(few.forward_bytes, many.forward_bytes),
        backward_bytes=nbytes(few.backward_bytes, many.backward_bytes),
        seconds=ratio * max(few.seconds + later * (many.seconds - few.seconds), few.seconds),
    )


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


def largest_batch(fits: Callable[[int], bool], start: int = 1, *, share: float = 0.0) -> int:
    """The largest batch for which ``fits`` says yes, if all smaller ones fit too; 0 if not even 1 does.

    Up to ``share`` of it more may fit, which saves calls of ``fits``. From 2**20 on, no larger one is tried
    than the first that fits.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
        if low >= _LARGEST:
            return low
    while high - low > max(1, share * low):
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
    return replace(
        first,
        profile=profile,
        saved_bytes=saved,
        small_bytes=small,
        output_bytes=math.ceil(line(first.output_bytes, second.output_bytes)),
        plain_seconds=line(first.plain_seconds, second.plain_seconds),
        file_seconds=line(first.file_seconds, second.file_seconds),
        clock_seconds=line(first.clock_seconds, second.clock_seconds),
    )


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
