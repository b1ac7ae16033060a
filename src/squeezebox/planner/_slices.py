"""What a step would hold with its first layers in slices, from what these take by themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from squeezebox.schema import Region, Slicing, StepProfile, TensorProfile


def in_slices(whole: StepProfile, slicing: Slicing) -> StepProfile:
    """The step to expect: its first layers save nothing, and are worked once more in backward.

    Until they are done, forward holds what they take by themselves; so does backward once it has come back
    to them. The layers' own positions stay, with these bytes.
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
        base[position] = max(owned + slicing.forward_bytes, beyond)
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
