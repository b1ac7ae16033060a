"""A step with its first layers in slices: predicted from a few runs of these alone, then profiled."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves

from squeezebox import planner
from squeezebox.capture import Work, work_of
from squeezebox.planning._profiles import profile_step
from squeezebox.profiling import measure_marks, now, own_casts
from squeezebox.schema import Region, Slicing, StepProfile, arguments
from squeezebox.steps import TrainingStep, apart, device_of, restored

_MANY, _FEWER = 16, 4  # slices, and as many times fewer, of which two are measured; others lie on a line


class Slices:
    """What a step's step could be with regions in slices. Each is measured once, when it is asked for.

    Args:
        step: whose sample has the batch at which the layers are measured.
        adapt: makes of a profile what is planned with.
        bare: the whole step's profile as it was before; None where it is planned with as it is.
        is_run: whether :meth:`profiled` may run a step of the batch that it is asked for.
    """

    def __init__(
        self,
        step: TrainingStep,
        adapt: Callable[[StepProfile], StepProfile] = lambda seen: seen,
        bare: StepProfile | None = None,
        *,
        is_run: bool = True,
    ) -> None:
        self._training, self._adapt, self._bare, self._is_run = step, adapt, bare, is_run
        self._measured: dict[tuple[str, ...], list[Slicing]] = {}
        self._profiled: dict[tuple[int, Region], StepProfile] = {}

    def predicting(self) -> Slices:
        """The same, with nothing profiled that is not yet."""
        other = Slices(self._training, self._adapt, is_run=False)
        other._measured = self._measured
        return other

    def predicted(self, whole: StepProfile, region: Region, batch: int) -> list[StepProfile]:
        """The step of that batch with the region in 2, 4, 8, ... slices; none where the region is not met."""
        if region.functions not in self._measured:
            self._measured[region.functions] = self._measure(region)
        measured = self._measured[region.functions]
        if not measured:
            return []
        own = max(self._training.batch, 1)
        return [planner.in_slices(whole, each) for each in planner.slicings(measured, own, batch)]

    def profiled(self, whole: StepProfile, predicted: StepProfile, batch: int) -> StepProfile:
        """The step as one run of it shows it, if it may be run, and as predicted otherwise."""
        region = predicted.region
        if region is None or not self._is_run:
            return predicted
        if (batch, region) not in self._profiled:
            step = self._training.of_size(batch)
            seen = profile_step(step, whole=self._bare or whole, region=region)
            self._profiled[batch, region] = self._adapt(seen)
        timed = self._profiled[batch, region]
        return dataclasses.replace(timed, plain_seconds=predicted.plain_seconds)

    def _measure(self, region: Region) -> list[Slicing]:
        with restored(self._training.model), torch.enable_grad():
            work = self._work
            functions = tuple(call.function.__name__ for call in work.calls) if work is not None else ()
            if work is None or functions[: len(region.functions)] != region.functions:
                return []
            return _measured(work.first(len(region.functions)), region, device_of(self._training.model))

    @functools.cached_property
    def _work(self) -> Work | None:
        model = self._training.model
        by_place, by_name = arguments(model, apart(self._training.sample[0]))

        def forward() -> None:
            model(*by_place, **by_name)

        with own_casts():
            return work_of(forward)


def _measured(work: Work, region: Region, device: torch.device) -> list[Slicing]:
    """Of few slices and of many, two; what is left over of a batch of one needs no slices."""
    batch = len(work.source)
    many = min(_MANY, batch)
    counts = sorted({max(2, many // _FEWER), many}) if batch > 1 else []
    found: list[Slicing] = []
    plain = 0.0  # seconds a sample
    for count in counts:
        size = min(2 * math.ceil(batch / count), batch)
        run, output_bytes = _forward_and_backward(work.of(size))
        if not found:
            run(1, lambda number: None)
            plain = _timed(functools.partial(run, 1), device) / size
        marks = measure_marks(functools.partial(run, 2), 2, device, 1, warm=True)
        rest = (batch - size) * output_bytes // size  # of the whole batch's output
        found.append(
            Slicing(
                region=dataclasses.replace(region, slices=count, output_bytes=output_bytes + rest),
                forward_bytes=marks.highest[0] + rest,
                backward_bytes=marks.highest[1] + rest,
                seconds=max((sum(marks.seconds) / size - plain) * batch, 0.0),
            )
        )
    return found


def _forward_and_backward(work: Work) -> tuple[Callable[[int, Callable[[int], None]], None], int]:
    """Runs the work in ``slices``, with a mark before forward and after each part; its output's bytes."""
    values = tree_leaves([(call.arguments, call.keywords) for call in work.calls])
    trained = [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]
    with torch.no_grad():
        incoming = torch.ones_like(work.run(1))

    def run(slices: int, mark: Callable[[int], None]) -> None:
        mark(0)
        out = work.run(slices)
        mark(1)
        gradients = torch.autograd.grad(out, trained, incoming, allow_unused=True)
        mark(2)
        del gradients

    return run, incoming.nbytes


def _timed(run: Callable[[Callable[[int], None]], None], device: torch.device) -> float:
    begun = now(device)
    run(lambda number: None)
    return now(device) - begun
