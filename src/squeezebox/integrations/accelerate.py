"""A context for loops with Hugging Face's accelerate; ``pip install 'squeezebox[hf]'``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from squeezebox.integrations._training import Training
from squeezebox.session import Session, explain_out_of_memory


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

    The session is registered with the accelerator, once: ``save_state`` writes its state and ``load_state``,
    called in here, goes on from it. It stays registered afterwards, as accelerate has no way back, so that a
    checkpoint saved then is complete.

    Args:
        accelerator: has prepared ``model``; told of the session.
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
        session = training.begin(bare, optimizers, ranks=accelerator.num_processes)
        accelerator.register_for_checkpointing(session)
        with explain_out_of_memory(bare, session=session):
            yield session
    finally:
        training.end()
