"""Frozen weights as rows of a step's profile."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from squeezebox import codecs
from squeezebox.memory import disk_speed, movable_weights, usual_folder
from squeezebox.optim import SMALL_BYTES
from squeezebox.schema import (
    Action,
    CodecError,
    Option,
    Part,
    Plan,
    StepProfile,
    TensorProfile,
    WeightsPlan,
)
from squeezebox.session import codec_of
from squeezebox.steps import TrainingStep

_BITS = {"8 bit": 8, "4 bit": 4}
_TRIED, _TRIALS = 1 << 20, 7  # elements, and how often


def with_weights(seen: StepProfile, step: TrainingStep, weight_noise: float | None) -> StepProfile:
    """The step with a row for every frozen weight that could be in a file, or packed within the noise.

    Those are the ones that the profiled step has read, and as operators of torch read them.
    """
    folder, known = step.folder or usual_folder(), movable_weights(step.model, SMALL_BYTES)
    sizes = {name: known[name].nbytes for name in seen.profile.weights_at if name in known}
    if not sizes:
        return seen
    profile, own = seen.profile, sum(sizes.values())
    read = sum(len(profile.weights_at[name]) * nbytes for name, nbytes in sizes.items())
    hidden = seen.plain_seconds / max(read, 1)
    seconds = math.inf
    if not folder.is_in_memory:
        speed = disk_speed(folder)
        seconds = speed.returning + speed.slowing + max(0.0, speed.reading - hidden)
    rows = [_row(name, known[name], profile.weights_at[name], seconds, weight_noise) for name in sizes]
    made = dataclasses.replace(
        profile,
        parameter_bytes=profile.parameter_bytes - own,
        base_bytes=tuple(nbytes - own for nbytes in profile.base_bytes),
        tensors=(*profile.tensors, *rows),
    )
    saved = seen.saved_bytes | {row.key: sizes[name] for row, name in zip(rows, sizes, strict=True)}
    return dataclasses.replace(seen, profile=made, saved_bytes=saved)


def weights_plan(seen: StepProfile, chosen: Plan) -> WeightsPlan | None:
    """What the chosen options mean for frozen weights; None where none could be moved."""
    keys = {
        row.key.removeprefix(_KEY): row.key
        for row in seen.profile.tensors
        if row.part is Part.PARAMETER and row.key in chosen.choices
    }
    if not keys:
        return None
    options = {name: chosen.choices[key] for name, key in keys.items()}
    moved = [name for name, option in options.items() if option.action is Action.OFFLOAD]
    packed = {name: option for name, option in options.items() if option.action is Action.COMPRESS}
    return WeightsPlan(
        moved=tuple(moved),
        packed={name: _BITS[option.codec] for name, option in packed.items()},
        weight_bytes=sum(seen.saved_bytes[key] for key in keys.values()),
        moved_bytes=sum(seen.saved_bytes[keys[name]] for name in moved),
        packed_bytes=sum(option.held_bytes for option in packed.values()),
        weight_noise=max((option.bound for option in packed.values()), default=0.0),
        seconds=sum(option.seconds for option in options.values()),
    )


_KEY = "weight of "


def _row(
    name: str,
    weight: torch.Tensor,
    reads: Sequence[tuple[int, int]],
    seconds: float,
    weight_noise: float | None,
) -> TensorProfile:
    """In memory for as long as each reader has it; ``seconds`` are those of reading a byte from the file."""
    (there, most), nbytes = _together(reads), weight.nbytes
    keep = Option(action=Action.KEEP, codec="keep", held_bytes=nbytes, lasting=True)
    moved = Option(
        action=Action.OFFLOAD,
        codec="file",
        held_bytes=0,
        working_bytes=most * nbytes,
        seconds=len(reads) * nbytes * seconds,
    )
    packed = [
        dataclasses.replace(each, working_bytes=most * nbytes, seconds=len(reads) * each.seconds)
        for each in _packed(weight, weight_noise)
    ]
    return TensorProfile(
        key=f"{_KEY}{name}",
        part=Part.PARAMETER,
        saved_at=0,
        first_use=there[0][0],
        last_use=there[-1][1],
        gaps=tuple((before[1] + 1, after[0] - 1) for before, after in zip(there, there[1:], strict=False)),
        options=(keep, *packed, *([moved] if math.isfinite(seconds) else [])),
    )


def _packed(weight: torch.Tensor, weight_noise: float | None) -> Iterator[Option]:
    """The forms whose error in this weight is within the noise; ``seconds`` are those of unpacking once."""
    if weight_noise is None:
        return
    value = weight.detach()
    total = float(codecs.energy(value))
    for name, bits in _BITS.items():
        codec = codec_of(bits)
        try:
            held = codec.pack(value)
        except CodecError:  # not finite
            return
        noise = float(codecs.energy(codec.unpack(held) - value)) / max(total, torch.finfo(torch.float32).tiny)
        if noise <= weight_noise:
            yield Option(
                action=Action.COMPRESS,
                codec=name,
                bound=noise,  # of the weight, not of the gradient, whose budget is another
                held_bytes=held.nbytes,
                lasting=True,
                seconds=value.numel() * _unpacking_seconds(bits, value.dtype),
            )


@functools.cache
def _unpacking_seconds(bits: int, dtype: torch.dtype) -> float:
    """Seconds an element, in new memory; measured once."""
    codec, times = codec_of(bits), []
    held = codec.pack(torch.linspace(-1.0, 1.0, _TRIED, device="cpu").to(dtype))
    for _ in range(_TRIALS):
        begun = time.perf_counter()
        codec.unpack(held)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) / _TRIED


def _together(reads: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """Spans of positions with any of these reads, and the most reads at one position."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted(reads):
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], last))
        else:
            spans.append((first, last))
    most = max(sum(first <= at <= last for first, last in reads) for at, _ in reads)
    return spans, most
