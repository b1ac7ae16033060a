"""A model's forward passes as they begin and end: how deep, on which thread, and which are left alone."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from squeezebox.capture import Recorder, in_backward, is_innermost, why_left_alone
from squeezebox.schema import CaptureWarning, UnsupportedModelError


class Passes:
    """Of one session; ``step()`` around forwards counts as one too."""

    def __init__(self, recorder: Recorder, notes: dict[str, None]) -> None:
        self._recorder, self._notes = recorder, notes
        self._lock = threading.Lock()
        self._thread = 0
        self._of_step = False  # whether step() began the outermost one
        self._warned = False
        self.depth = 0
        self.count = 0  # the model's own since the step began

    def begin(self, *, of_step: bool) -> None:
        """One begins.

        Raises:
            UnsupportedModelError: another thread's has not ended, or waits for its backward.
        """
        here = threading.get_ident()
        with self._lock:
            if here != self._thread and not in_backward():
                if self.depth or (self._recorder.store.in_use and torch.is_grad_enabled()):
                    raise UnsupportedModelError(_THREADS)
                self._thread = here
            self.depth += 1
            if self.depth == 1:
                self._of_step = of_step

    def end(self) -> bool:
        """One ended, or was refused; whether it was the outermost."""
        with self._lock:
            if threading.get_ident() != self._thread and not in_backward():
                return False
            self.depth = max(0, self.depth - 1)
            return self.depth == 0

    @property
    def outermost(self) -> bool:
        """Whether the model's pass that has begun lies in none but step()'s."""
        recorded = torch.is_grad_enabled() and not in_backward()
        return recorded and (self.depth == 1 or (self.depth == 2 and self._of_step))

    def is_left_alone(self) -> bool:
        """Whether this one is not recorded; says why in a note where a user would wonder."""
        if self.depth > 1 or not torch.is_grad_enabled() or in_backward():
            return True
        why = why_left_alone()
        if why:
            self._notes[f"a forward was left alone: {why}"] = None
            self._warn(why)
        return bool(why)

    def was_hidden(self) -> bool:
        """Whether somebody else's hooks took all that was saved in a forward that has ended; warns of it."""
        store = self._recorder.store
        hidden = self._recorder.is_hidden and not (store.rows or store.small or store.borrowed)
        if hidden:
            self._notes["a forward had all its saved tensors taken by other hooks, entered within it"] = None
            self._warn("saved-tensor hooks that the model enters itself took all that it saves")
        return hidden

    def why_other(self) -> str:
        """Why tensors may not be those of a plan."""
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            return (
                "it was made without torch.autocast, which is on now and saves tensors of other dtypes; "
                "make the plan within torch.autocast too, or train without autocast"
            )
        if self.count > 1:
            return (
                f"it is for one forward before each backward, and this is forward {self.count}; call "
                "backward after each, or attach without a plan (noise= or exact=True)"
            )
        return (
            "it was made for another model, smaller inputs, in model.eval(), or within torch.autocast, which "
            "is off now; make a new one with squeezebox.plan() on the largest inputs, after model.train(), "
            "or attach with on_mismatch='replan', sample= and loss_fn=, where it is without states=True"
        )

    def why_no_plan(self, inputs: Any, *, is_open: bool) -> str:
        """Why none can be made for the inputs of a pass that begins; '' where one can."""
        recorder = self._recorder
        if all(inputs):
            return "some of them are by place and some by keyword"
        if is_open and recorder.store.in_use and not recorder.hooks.backward_seen:
            return "an earlier forward was waiting for its backward"
        if recorder.active and not is_innermost(recorder):
            return "other function modes or saved-tensor hooks were active"
        return ""

    def _warn(self, why: str) -> None:
        if not self._warned and "hooks" in why:
            self._warned = True
            warnings.warn(
                f"squeezebox captured nothing of a forward: {why}. What it saves takes as much memory as it "
                "does without a session; leave those hooks' context, or detach().",
                CaptureWarning,
                stacklevel=2,
            )


_THREADS = (
    "a forward of the attached model began on one thread while that of another runs, or waits for its "
    "backward; a session is for one thread at a time. Let each thread finish its backward first, give each "
    "its own copy of the model, or run such forwards under torch.no_grad()."
)
