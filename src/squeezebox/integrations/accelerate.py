"""A context for loops with Hugging Face's accelerate; ``pip install 'squeezebox[hf]'``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from squeezebox.integrations._training import Training
from squeezebox.planning import explain_out_of_memory
from squeezebox.session import Session


@contextlib.contextmanager
def squeezed(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Iterator[Session]:
    """Squeeze what a prepared model saves, while in here.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with squeezed(accelerator, model, optimizer, noise=1e-3) as session:
            for inputs, target in loader:
                with session.step():  # also covers the loss
                    loss = loss_fn(model(inputs), target)
                accelerator.backward(loss)

    The session is registered with the accelerator: ``save_state`` writes its state and ``load_state``, called
    in here, goes on from it. Of several ranks it is the first one's: with ``noise=`` the others go on with
    its bounds. It stays registered afterwards, as accelerate has no way back, so that a checkpoint saved then
    is complete; the next session of the same model goes on from it, in its place. Weights that a plan has in
    a file, or packed, are in memory while ``save_state`` or ``save_model`` writes them.

    Args:
        accelerator: has prepared ``model``; it gets the session as an object to checkpoint.
        model: what ``prepare`` returned; the session is attached to the module within.
        optimizer: what ``prepare`` returned.
        options: of :func:`squeezebox.attach`.

    Raises:
        OptionError: see :func:`squeezebox.attach`; a budget with several ranks.
        OutOfMemoryError: what is done in here ran out of memory.
    """
    training = Training(options)
    optimizers = [] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]
    bare = accelerator.unwrap_model(model)
    try:
        every = accelerator.gradient_accumulation_steps
        session = training.begin(bare, optimizers, ranks=accelerator.num_processes, accumulate=every)
        _register(accelerator, bare, session)
        with explain_out_of_memory(bare, session=session):
            yield session
    finally:
        training.end()


class _Registered:
    """What accelerate checkpoints: a model's newest session."""

    def __init__(self, model: torch.nn.Module, session: Session) -> None:
        self.model, self.session = model, session

    def state_dict(self) -> dict[str, object]:
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.session.load_state_dict(state)


def _register(accelerator: Accelerator, model: torch.nn.Module, session: Session) -> None:
    for each in accelerator._custom_objects:
        if isinstance(each, _Registered) and each.model is model:
            session.load_state_dict(each.state_dict())
            each.session = session
            return
    accelerator.register_for_checkpointing(_Registered(model, session))
