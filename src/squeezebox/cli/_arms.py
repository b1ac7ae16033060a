"""The demo's two arms: the same model, optimizer and batches, plain or under a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

import squeezebox
from squeezebox.bounds import Controller, ControllerState, NoiseBudget
from squeezebox.cli._network import network
from squeezebox.profiling import Peak, PeakMeter
from squeezebox.schema import Role, StepStatistics

LEARNING_RATE = 0.03
INTERVAL = 32  # steps between refreshes: a short training changes fast


class Steered:
    """A controller that refreshes when its owner says so, and until then as the wrapped one does."""

    def __init__(self, controller: Controller) -> None:
        self.forced: bool | None = None
        self._controller = controller

    def due(self, step: int) -> bool:
        """``forced`` where it is set."""
        return self._controller.due(step) if self.forced is None else self.forced

    def bound(self, state: ControllerState, key: str, role: Role, rms: Callable[[], float]) -> float | None:
        """As the wrapped controller."""
        return self._controller.bound(state, key, role, rms)

    def update(self, state: ControllerState, statistics: StepStatistics) -> ControllerState:
        """As the wrapped controller."""
        return self._controller.update(state, statistics)


class Arm:
    """One network in training."""

    def __init__(self, seed: int, noise: float | None) -> None:
        self.model = network(seed)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4
        )
        self.seconds: list[float] = []
        self.controller: Steered | None = None
        self.session: Any = None
        if noise is not None:
            self.controller = Steered(NoiseBudget(noise=noise, interval=INTERVAL))
            squeezebox.codecs.require(torch.float32)  # no arm's first steps are another's
            self.session = squeezebox.attach(self.model, optimizer=self.optimizer, controller=self.controller)

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Forward and backward; the mean loss."""
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()
        return float(loss.detach())

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """One training step; the mean loss."""
        self.optimizer.zero_grad()
        loss = self.gradients(images, labels)
        self.optimizer.step()
        return loss

    def timed_step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """The same, noting its seconds."""
        start = time.perf_counter()
        loss = self.step(images, labels)
        self.seconds.append(time.perf_counter() - start)
        return loss

    def refreshes(self, step: int) -> bool:
        """Whether training step ``step`` (from 0) gathers statistics for new bounds."""
        return self.controller is not None and self.controller.due(step)

    def measured_step(self, images: torch.Tensor, labels: torch.Tensor) -> Peak:
        """One training step and its peak, parameters, inputs and optimizer state included."""
        if self.session is not None:
            self.session.report()  # ends the session's own measurement, should one be running
        self.optimizer.zero_grad()
        held = [*self.model.parameters(), *self.model.buffers(), *self._state(), images, labels]
        before = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        meter = PeakMeter(torch.device("cpu"))
        if not meter.start():
            raise squeezebox.AttachError(
                "the peak of a step cannot be measured while another profiler is running; end that one first."
            )
        self.step(images, labels)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        peak = meter.stop([*gradients, *self._state()])
        return replace(peak, total_bytes=before + peak.total_bytes)

    def peak(self, images: torch.Tensor, labels: torch.Tensor, *, refresh: bool) -> Peak:
        """:meth:`measured_step`, with the bounds refreshed in it or not."""
        if self.controller is None:
            return self.measured_step(images, labels)
        self.controller.forced = refresh
        try:
            return self.measured_step(images, labels)
        finally:
            self.session.report()  # the step is closed while its refresh is still forced
            self.controller.forced = None

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of images whose class is found."""
        self.model.eval()
        with torch.no_grad():
            pairs = zip(images.split(500), labels.split(500), strict=True)
            right = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in pairs)
        self.model.train()
        return right / len(labels)

    def _state(self) -> list[torch.Tensor]:
        states: list[Mapping[str, Any]] = list(self.optimizer.state.values())
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def layout(images: torch.Tensor) -> torch.Tensor:
    """A copy of the images, of their own storage, in the network's layout."""
    return images.clone(memory_format=torch.channels_last)
