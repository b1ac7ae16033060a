"""A callback for Hugging Face's Trainer; ``pip install 'squeezebox[hf]'``."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from squeezebox.integrations._training import Training
from squeezebox.reports import Report
from squeezebox.schema import AttachError, OptionError
from squeezebox.session import Session

_entered: list[SqueezeboxCallback] = []  # those within their `with`, the innermost last


class SqueezeboxCallback(TrainerCallback, ExportableState):
    """Squeeze what a model saves in its forward while a Trainer trains it.

    ::

        with SqueezeboxCallback(noise=1e-3) as callback:
            Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
        print(callback.report)

    The loss is covered where the model computes it, as models given ``labels`` do; one that the Trainer
    computes afterwards (label smoothing, ``compute_loss_func``) is held as ever. A Trainer tells its
    callbacks of nothing when training raises: the ``with`` takes the session off the model then too, and says
    where it was that memory ran out.

    The Trainer's history and printed lines get the figures of reports, such as ``squeezebox/packed_bytes``,
    every ``logging_steps`` steps. So do loggers, such as TensorBoard's, after :meth:`log_to`.

    The session's state is in every checkpoint's ``trainer_state.json``, and ``resume_from_checkpoint`` goes
    on from it, whether or not ``restore_callback_states_from_checkpoint`` is set. Of several ranks it is the
    first one's: with ``noise=`` the others go on with its bounds. Weights that a plan has in a file, or
    packed, are in memory while a checkpoint with them is written.

    Args:
        options: of :func:`squeezebox.attach`, but for the optimizer, which is the Trainer's. A plan is to be
            made with ``model.config.use_cache = False``, which a Trainer sets.
    """

    def __init__(self, **options: Any) -> None:
        self._training = Training(options)
        self._options = options
        self._model: torch.nn.Module | None = None
        self._is_restored = False
        self._logs_to: Trainer | None = None
        self.left_out: list[str] = []

    @property
    def session(self) -> Session:
        """Of the current training, or the last one; AttachError before the first."""
        return self._training.session

    @property
    def report(self) -> Report:
        """Of the last step; AttachError before the first."""
        return self._training.report

    def log_to(self, trainer: Trainer) -> None:
        """Go before the Trainer's loggers (its ``report_to``), so that what they log has the figures too.

        A Trainer calls its loggers first, and tells no callback of them. Within the callback's ``with``, the
        one that ``restore_callback_states_from_checkpoint`` puts in its place goes before them, too.
        """
        self._logs_to = trainer
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the report's figures to what is logged of a step."""
        logs = kwargs["logs"]
        if "loss" in logs:  # else of an evaluation, or of the training as a whole
            with contextlib.suppress(AttachError):  # nothing was captured yet
                figures = self.report.figures()
                logs.update(figures)
                state.log_history[-1].update(figures)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, whatever is wrapped around it, with the checkpoint's state if there is one."""
        missing = sorted(set(self.left_out) - set(self._options))
        if missing:
            raise OptionError(
                f"restore_callback_states_from_checkpoint builds this callback from the checkpoint, "
                f"which cannot hold {', '.join(missing)}. Leave that flag off: the session's state comes "
                "back anyway."
            )
        stored = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            self._training.load(stored["attributes"]["session_state"])
        optimizer = kwargs["optimizer"]
        optimizers = [getattr(optimizer, "optimizer", optimizer)]  # accelerate wraps it
        self._model = kwargs["model"]
        self._model.train()  # as every step does, later than a budget's plan is made
        if self._is_restored and _entered:  # the Trainer has put this one in the place of that one
            _entered[-1].follow(self, self._training, self._model)
        every = args.gradient_accumulation_steps
        self._training.begin(self._model, optimizers, ranks=args.world_size, accumulate=every)

    def follow(self, other: SqueezeboxCallback, training: Training, model: torch.nn.Module) -> None:
        """Report, and end, the training of the other one, which a checkpoint put in the place of this one."""
        self._training, self._model = training, model
        if self._logs_to is not None:
            other.log_to(self._logs_to)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was."""
        self._training.end()
        self._model = None

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint: plain options, and the session's state."""
        plain = {key: value for key, value in self._options.items() if _is_plain(value)}
        left_out = sorted(set(self._options) - set(plain))
        return {"args": plain, "attributes": {"left_out": left_out, "session_state": self._training.state()}}

    @property
    def session_state(self) -> dict[str, Any]:
        """The session's state, as it goes into a checkpoint."""
        return self._training.state()

    @session_state.setter
    def session_state(self, state: dict[str, Any]) -> None:
        self._training.load(state)
        self._is_restored = True

    def __enter__(self) -> SqueezeboxCallback:
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.remove(self)
        model = self._model
        if model is None or error is None:
            self._training.end()
        else:
            self._training.fail(model, error, self._training.end)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
