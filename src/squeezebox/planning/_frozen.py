"""Frozen weights, and weights that autocast casts, as rows of a step's profile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox import codecs
from squeezebox.capture import Store
from squeezebox.memory import Lender, Loans, disk_speed, movable_weights, move, settle, usual_folder
from squeezebox.optim import SMALL_BYTES, SplitWeights, splittable
from squeezebox.profiling import StepProfiler
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


@contextlib.contextmanager
def watching(step: TrainingStep, profiler: StepProfiler, store: Store) -> Iterator[set[str]]:
    """Around a step: its frozen weights come into memory as they would from a file, and the profiler sees it.

    Gives the names, once the step is over, of those that must stay in memory.
    """
    weights = movable_weights(step.model, SMALL_BYTES) if step.moves_weights else {}
    fixed: set[str] = set()
    if not weights:
        yield fixed
        return
    store.loans = Loans()
    lenders = {name: _Watched(name, each.data, profiler) for name, each in weights.items()}
    for name, weight in weights.items():
        move(weight, lenders[name], store.loans)
    try:
        yield fixed
    finally:
        for name, weight in weights.items():
            settle(weight)
            weight.data = lenders[name].stand_in
        store.loans.check()
        store.loans = None
    fixed.update(name for name, lender in lenders.items() if lender.is_fixed)


class _Watched(Lender):
    """A weight that stays in memory, of which every reader gets a copy."""

    def __init__(self, name: str, value: torch.Tensor, profiler: StepProfiler) -> None:
        self.name, self.version = name, 0
        self._value, self._profiler = value, profiler
        self.is_fixed = False  # whether it must stay in memory

    @property
    def stand_in(self) -> torch.Tensor:
        """The weight itself."""
        return self._value

    def load(self) -> torch.Tensor:
        """A copy, as a file's reader allocates it."""
        value = self._value
        with self._profiler.lending(self.name):
            flat = torch.empty(value.numel(), dtype=value.dtype, device="cpu")
        copied = flat.as_strided(value.shape, value.stride())
        with torch.no_grad():
            return copied.copy_(value)

    def take(self, value: torch.Tensor) -> None:
        """Noted, and done."""
        self.is_fixed, self._value = True, value

    def refuse(self, name: str) -> Any:
        """Noted, and answered as without."""
        self.is_fixed = True
        return getattr(self._value, name)()

    def lose(self) -> None:
        """Noted."""
        self.is_fixed = True

    def changing(self) -> torch.Tensor:
        """Noted."""
        self.is_fixed = True
        return self._value

    def detached(self) -> torch.Tensor:
        """Noted: an operator on it is one that the profiler does not see."""
        self.is_fixed = True
        return self._value


class CastWeights:
    """The optimizer's weights of which a step makes nothing but a cast to bfloat16, and how they are held.

    Args:
        step: one whose plan may split weights, under autocast; else there are none.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._found: dict[str, torch.nn.Parameter] = {}
        self._split: SplitWeights | None = None
        self.seconds = 0.0  # that a step takes to restore and to split them all again

    @property
    def names(self) -> tuple[str, ...]:
        """Once they are found."""
        return tuple(self._found)

    @property
    def rest_bytes(self) -> int:
        """What they have beyond bfloat16 in memory now, by itself."""
        return sum(each.nbytes // 2 for each in self._found.values()) if self._split else 0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around a step: find them."""
        optimizer, model = self._step.optimizer, self._step.model
        if not (self._step.splits_weights and optimizer and torch.is_autocast_enabled("cpu")):
            yield
            return
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        weights = splittable(model, SMALL_BYTES)
        readings = _Readings({name: each for name, each in weights.items() if id(each) in stepped})
        with readings:
            yield
        cast = readings.cast - readings.read
        self._found = {name: each for name, each in weights.items() if name in cast}

    def split(self) -> None:
        """Hold them as a plan will."""
        if self._split is None:
            begun = time.perf_counter()
            self._split = SplitWeights(self._found)
            with torch.no_grad():
                for each in self._found.values():
                    each.sum()  # which restores it
            self.seconds = time.perf_counter() - begun

    def close(self) -> None:
        """Hold them as before."""
        if self._split is not None:
            self._split.close()
            self._split = None


class _Readings(TorchDispatchMode):
    """Sees every operator on the weights, or on views of them."""

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cast: set[str] = set()
        self.read: set[str] = set()
        self._names = {each.untyped_storage()._cdata: name for name, each in weights.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        casts = func is _aten._to_copy.default and kwargs == {"dtype": torch.bfloat16}
        for each in () if func in _SAME else tree_leaves((args, kwargs)):
            name = self._names.get(_storage_of(each)) if isinstance(each, torch.Tensor) else None
            if name is not None:
                (self.cast if casts else self.read).add(name)
        return func(*args, **kwargs)


def _storage_of(tensor: torch.Tensor) -> int:
    return (
        tensor.untyped_storage()._cdata if type(tensor) in _PLAIN and tensor.layout is torch.strided else -1
    )


_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)  # who computes with these shows
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    if folder.keeps_state:
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
