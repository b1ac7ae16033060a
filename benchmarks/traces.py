"""What real training steps of six networks allocate, and when: what static allocation has to place.

Goes in: nothing. Comes out: a trace by the network's name, recorded on this machine from the allocator's own
events, of a step with optimizer state: each storage with its bytes and lifetime, operators' temporaries
included. ``traces()[name].buffers()`` is what squeezebox.memory.layout takes; all of it lives on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks._steps import step_of
from squeezebox.profiling import record_step
from squeezebox.schema import StepTrace

NAMES = ("resnet18", "resnet50", "efficientnet_b0", "unet", "vit", "gpt")


def traces(names: Iterable[str] = NAMES) -> dict[str, StepTrace]:
    """Each network's second training step, with AdamW."""
    return {name: _trace(name) for name in names}


def _trace(name: str) -> StepTrace:
    torch.manual_seed(0)
    step = step_of(name)
    optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-6)
    trace = None
    for _ in range(2):
        trace = record_step(step.model, sample=step.sample, loss_fn=step.loss, optimizer=optimizer)
    assert trace is not None
    return trace
