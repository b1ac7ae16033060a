"""The optimizer's steps: queued when a batch's gradients are complete, done before they are first read."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from squeezebox.pipeline._health import await_until
from squeezebox.pipeline._weights import Flat, Weights

Settings = list[dict[str, Any]]  # of an optimizer's groups
Result = tuple[float | None, bool]  # all gradients' norm, if something depends on it, and whether to step


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """A parameter that several ranks hold: its place among this rank's, and who shares its gradient.

    ``counted``: it is this rank that counts it in the gradients' norm.
    """

    place: int
    group: dist.ProcessGroup
    counted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What ranks must tell each other of a batch's gradients before they step.

    ``replicas`` has the ranks with the same stages, ``pipeline`` those of one pipeline; None where there is
    but one. Replicas have gradients of equal weight if ``averaged``, else parts of a batch's. ``in_turn``
    are the replicas of this rank's stage within the pipeline, and ``counted`` says whether it is this rank
    that counts the stage in the gradients' norm. ``clip`` bounds the norm of all gradients, as
    torch.nn.utils.clip_grad_norm_ does.
    ``skip_overflow``: with an infinite or NaN gradient anywhere, nobody steps.
    """

    replicas: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    ties: tuple[Tie, ...]
    clip: float | None
    skip_overflow: bool
    averaged: bool = True
    in_turn: int = 1
    counted: bool = True

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.replicas or self.ties or self.clip is not None or self.skip_overflow)

    def run(self, gradients: Flat) -> Result:
        """Sum up and clip the gradients in place.

        Returns:
            Their norm, if something depends on it, and whether to step.
        """
        return self.end(gradients, self.begin(gradients))

    def begin(self, gradients: Flat) -> Tensor | None:
        """Give all messages to the device: sum up gradients, and their squares if something needs these."""
        if self.replicas is not None:
            for part in gradients.parts:
                dist.all_reduce(part, group=self.replicas)
                if self.averaged:
                    part /= self.replicas.size()
        for tie in self.ties:
            shared = gradients.views[tie.place]
            shared /= self.in_turn  # that many ranks of the group have this sum
            dist.all_reduce(shared, group=tie.group)
        return None if self.clip is None and not self.skip_overflow else self._squares(gradients)

    def end(self, gradients: Flat, squares: Tensor | None) -> Result:
        """What :meth:`run` does after :meth:`begin`."""
        if squares is None:
            return None, True
        norm = float(squares.sqrt())
        finite = norm < float("inf")  # false for NaN too
        factor = 1.0 if self.clip is None else self.clip / (norm + 1e-6)
        if not factor >= 1.0:  # NaN too: then all gradients are NaN, as torch's are
            for part in gradients.parts:
                part *= factor
        return norm, finite or not self.skip_overflow

    def level(self, weights: Flat) -> None:
        """Let all that hold the same parameters begin with the same values."""
        if self.replicas is not None:
            for part in weights.parts:
                dist.broadcast(part, group=self.replicas, group_src=0)
        for tie in self.ties:
            dist.broadcast(weights.views[tie.place], group=tie.group, group_src=0)

    def _squares(self, gradients: Flat) -> Tensor:
        elsewhere = {tie.place for tie in self.ties if not tie.counted}
        views = gradients.views if self.counted else []
        own = [view for place, view in enumerate(views) if place not in elsewhere]
        total = torch.zeros((), dtype=torch.float64, device=gradients.device)
        for view in own:
            total += _norm(view) ** 2
        if self.pipeline is not None:
            dist.all_reduce(total, group=self.pipeline)
        return total


def issues_in_order(device: torch.device) -> bool:
    """Whether communicators there need the same order of issue on all ranks, as nccl's do."""
    return device.type != "cpu"


def _fixed(value: Any) -> Any:
    """A setting as it is now, though a tensor may be changed in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _plain(values: Any) -> Any:
    """The same with numpy's numbers, which schedulers may have set, as Python's."""
    if isinstance(values, dict):
        return {key: _plain(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_plain(value) for value in values]
    return values.item() if isinstance(values, np.generic) else values


def _number(value: Any) -> Any:
    """A setting as a plain value."""
    return value.item() if isinstance(value, Tensor) else _plain(value)


def _like(settings: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Values with tensors where settings have them."""
    return {
        name: torch.full_like(settings[name], value) if isinstance(settings.get(name), Tensor) else value
        for name, value in values.items()
    }


def _norm(tensor: Tensor) -> Tensor:
    """Of all elements; squares may be too large for float32."""
    if tensor.device.type != "cpu":
        return _wide_norm(tensor, torch.float64)  # to look at it first would wait for the device
    norm = _wide_norm(tensor, torch.float32)
    return norm if norm.isfinite() else _wide_norm(tensor, torch.float64)


def _wide_norm(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, dtype))
    return norm.double()


def level(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Let all ranks of a group have the first one's values of tensors that are not trained."""
    for tensor in (each for each in tensors if each.numel()):
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
        if not torch.equal(values, tensor):
            tensor.data = torch.empty_like(tensor).copy_(values)


class _InOrder:
    """An exchange whose messages are issued at once, in the order of the rank's actions.

    On CUDA that is on a stream of its own, so that neither host nor passes wait. Communicators that run what
    they are given in the order of issue (NCCL's) need it; a thread would issue at any time.
    """

    def __init__(self, exchange: Exchange, gradients: Flat) -> None:
        self._exchange, self._gradients = exchange, gradients
        self._stream = torch.cuda.Stream(gradients.device) if gradients.device.type == "cuda" else None
        if self._stream is None:
            self._squares = exchange.begin(gradients)
            return
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(self._stream):
            self._squares = exchange.begin(gradients)
            self._issued = self._stream.record_event()

    def result(self, timeout: float) -> Result:
        """What came of it; TimeoutError after ``timeout`` seconds."""
        if self._stream is not None:
            await_until(self._issued.query, timeout)
            torch.cuda.current_stream(self._gradients.device).wait_stream(self._stream)
        return self._exchange.end(self._gradients, self._squares)


Outcome = Future[Result] | _InOrder


@dataclass(slots=True)
class _Pending:
    """A batch whose gradients are complete."""

    gradients: Flat
    settings: Settings
    outcome: Outcome | None
    late: bool


class Updates:
    """Steps the optimizer once a batch, no sooner than needed, so that what ranks exchange costs no time.

    ``groups`` are the names of all of the model's parameters in the optimizer's groups.
    ``correction``: each update is also given what it has grown by against the one before, for the gradients
    are a step late (arXiv:2606.30634): W(t+1) = W(t) + U(t) + (U(t) - U(t-1)). Where the exchange is not
    ``in_order``, a thread of its own runs it.
    """

    def __init__(
        self,
        weights: Weights,
        optimizer: torch.optim.Optimizer,
        groups: list[list[str]],
        exchange: Exchange,
        correction: bool,
        *,
        in_order: bool,
    ) -> None:
        self._weights, self._optimizer, self._exchange = weights, optimizer, exchange
        self._groups = groups
        self._pending: deque[_Pending] = deque()
        self._free: list[Flat] = []
        threaded = exchange.is_needed and not in_order
        self._thread = ThreadPoolExecutor(1, "squeezebox-updates") if threaded else None
        self._correction = correction
        self.last_update: Flat | None = None
        self.norm: float | None = None
        self.skipped = 0

    def gradients(self) -> Flat:
        """Room for a batch's gradients, all zero."""
        if self._free:
            self._free[-1].zero_()
            return self._free.pop()
        return Flat(self._weights.parameters)

    def settings(self) -> Settings:
        """The optimizer's settings as they are now, such as its learning rate."""
        groups = self._optimizer.param_groups
        return [
            {name: _fixed(value) for name, value in group.items() if name != "params"} for group in groups
        ]

    def queue(self, gradients: Flat, settings: Settings, *, late: bool) -> None:
        """A batch's gradients are complete: begin to exchange what the step needs.

        ``late``: they are of the weights before the newest ones.
        """
        outcome: Outcome | None = None
        if self._thread is not None:
            outcome = self._thread.submit(self._exchange.run, gradients)
        elif self._exchange.is_needed:
            outcome = _InOrder(self._exchange, gradients)
        self._pending.append(_Pending(gradients, settings, outcome, late))

    def reach(self, version: int, oldest: int, awaited: Callable[[Outcome], Result]) -> None:
        """Do the steps that make this version, keeping those from ``oldest`` on.

        ``awaited`` waits for what ranks tell each other, and raises what it likes if that does not come.
        """
        while self._weights.newest < version:
            pending = self._pending[0]
            step = True
            if pending.outcome is not None:
                self.norm, step = awaited(pending.outcome)
            self._pending.popleft()
            self._update(pending, step, oldest)
            self._free.append(pending.gradients)

    def about(self) -> str:
        """What kind of state there is."""
        return f"{type(self._optimizer).__name__} with {len(self._groups)} groups"

    def state(self) -> dict[str, Any]:
        """The optimizer's, by names of parameters as torch.distributed.checkpoint.state_dict has them."""
        assert not self._pending
        known = dict(zip(self._weights.names, self._weights.owned, strict=True))
        states = self._optimizer.state
        groups = [
            {name: _number(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return {
            "state": {name: _plain(states[own]) for name, own in known.items() if own in states},
            "param_groups": [
                {**group, "params": names} for group, names in zip(groups, self._groups, strict=True)
            ],
        }

    def restore(self, states: Mapping[str, Any], groups: Mapping[int, Any], last_update: Flat | None) -> None:
        """Go on with what :meth:`state` had, groups by their number, and with the update before."""
        names = {id(own): name for name, own in zip(self._weights.names, self._weights.owned, strict=True)}
        packed = self._optimizer.state_dict()["param_groups"]
        own = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in packed for number in group["params"]]
        self._optimizer.load_state_dict(
            {
                "state": {
                    number: states[names[id(parameter)]]
                    for number, parameter in zip(numbers, own, strict=True)
                    if names[id(parameter)] in states
                },
                "param_groups": [
                    _like(group, {**groups[number], "params": group["params"]})
                    for number, group in enumerate(packed)
                ],
            }
        )
        self.last_update = last_update

    def _update(self, pending: _Pending, step: bool, oldest: int) -> None:
        self.skipped += not step
        if self._correction:
            # The correction reads the version before, which the step would else overwrite.
            oldest = min(oldest, self._weights.newest)

        def act() -> None:
            if step:
                with _with(self._optimizer, pending.settings):
                    self._optimizer.step()

        before = self._weights.update(pending.gradients, act, oldest)
        if self._correction and before is not None and step:
            self._correct(before, self._weights.versions[self._weights.newest], pending.late)

    def _correct(self, before: Flat, after: Flat, late: bool) -> None:
        if self.last_update is None or not late:
            self.last_update = self.last_update or Flat(self._weights.parameters)
            self.last_update.copy_(after)
            for last, old in zip(self.last_update.parts, before.parts, strict=True):
                last -= old
            return
        for last, new, old in zip(self.last_update.parts, after.parts, before.parts, strict=True):
            # ``last`` is U(t-1) at first; all in place, as a buffer more would be as large as the weights.
            last.neg_().add_(new).sub_(old)  # U(t) - U(t-1)
            new += last
            torch.sub(new, last, out=last)
            last -= old  # U(t)

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _with(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """The optimizer with a batch's settings, and afterwards with those that it had or has set itself."""
    groups = optimizer.param_groups
    had = [{name: group[name] for name in wanted} for group, wanted in zip(groups, settings, strict=True)]
    for group, wanted in zip(groups, settings, strict=True):
        group.update(wanted)
    try:
        yield
    finally:
        for group, before, wanted in zip(groups, had, settings, strict=True):
            group.update({name: value for name, value in before.items() if group[name] is wanted[name]})
