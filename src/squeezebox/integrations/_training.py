"""One training of somebody else's loop: a session that begins and ends with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from squeezebox.memory import show_whole
from squeezebox.planning import attach, explanation
from squeezebox.reports import Report
from squeezebox.schema import AttachError, OptionError
from squeezebox.session import Session


class Training:
    """Between the loop's events and a session; ``options`` are those of :func:`squeezebox.attach`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if "optimizer" in options:
            raise OptionError("the loop has an optimizer, which is used; leave optimizer= away.")
        self._options = dict(options)
        self._session: Session | None = None
        self._pending: Mapping[str, Any] | None = None
        self._shown: RemovableHandle | None = None

    @property
    def is_planned(self) -> bool:
        """Whether steps are counted in bytes."""
        return not {"budget", "plan"}.isdisjoint(self._options)

    @property
    def session(self) -> Session:
        """The session of this training, or of the last one.

        Raises:
            AttachError: no training has begun.
        """
        if self._session is None:
            raise AttachError("there is no session yet: it begins with the training.")
        return self._session

    @property
    def report(self) -> Report:
        """Of the last step; also after the training."""
        return self.session.report()

    def begin(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        ranks: int = 1,
        accumulate: int = 1,
    ) -> Session:
        """Attach; go on from a state that was loaded before.

        A budget counts that ``accumulate`` backward passes add up to an update. Until the end,
        ``state_dict()`` suits safetensors, too.

        Raises:
            OptionError: a budget where there are several ranks or optimizers.
        """
        self.end()
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        if "budget" in self._options and (ranks > 1 or optimizer is None):
            raise OptionError(
                f"a budget's plan is made for one rank and one optimizer, and this training has {ranks} "
                f"ranks and {len(optimizers)} optimizers. Make it before, with squeezebox.plan(), and "
                "give plan=."
            )
        given = {"accumulate": accumulate, **self._options} if "budget" in self._options else self._options
        self._session = attach(model, optimizer=optimizer, **given)
        self._shown = model.register_state_dict_post_hook(show_whole)
        if self._pending is not None:
            self._session.load_state_dict(self._pending)
            self._pending = None
        return self._session

    def end(self) -> None:
        """Take the session off the model; its report and state stay. Safe to call twice."""
        if self._shown is not None:
            self._shown.remove()
        if self._session is not None:
            self._session.detach()

    def fail(self, model: torch.nn.Module, error: BaseException, end: Callable[[], None]) -> None:
        """``end``, and raise what explains the error if memory ran out."""
        try:
            explained = explanation(error, model, session=self._session)
        finally:
            end()
        if explained is not None:
            raise explained from error

    def state(self) -> dict[str, Any]:
        """The session's, for a checkpoint; as it was loaded where no training has begun; else empty."""
        if self._session is None or self._pending is not None:
            return dict(self._pending or {})
        return self._session.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` when the training begins; an empty one is none."""
        self._pending = dict(state) or None
