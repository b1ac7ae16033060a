"""What real training steps of six networks allocate, and when: what static allocation has to place.

Goes in: nothing. Comes out: a trace by the network's name, recorded on this machine from the allocator's own
events, of a step with optimizer state: each storage with its bytes and lifetime, operators' temporaries
included. ``traces()[name].buffers()`` is what squeezebox.memory.layout takes; all of it lives on one stream.

As a program it lays them out and writes benchmarks/reports/traces-<date>.json and .md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks import _report
from benchmarks._steps import step_of
from squeezebox import memory
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


def laid_out(name: str, trace: StepTrace) -> dict[str, Any]:
    """The arena of everything that the step allocates, over the most bytes that live at once."""
    buffers = trace.buffers()
    begun = time.perf_counter()
    made = memory.layout(buffers)
    return {
        "network": name,
        "storages": len(buffers),
        "operators": len(trace.calls),
        "peak_bytes": trace.peak().nbytes,
        "arena_bytes": made.nbytes,
        "lower_bound_bytes": made.lower_bound_bytes,
        "over_peak": made.nbytes / trace.peak().nbytes - 1.0,
        "over_bound": made.nbytes / made.lower_bound_bytes - 1.0,
        "seconds": time.perf_counter() - begun,
    }


def main() -> None:
    rows = []
    for name in NAMES:
        rows.append(laid_out(name, traces([name])[name]))
        print(rows[-1], file=sys.stderr, flush=True)
    lines = [
        "Everything that a recorded step allocates, with what is there before it, in one arena. The peak is "
        "without alignment, the bound with that of 64 bytes.",
        "",
        "| network | storages | operators | peak | arena over peak | arena over bound | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['network']} | {row['storages']} | {row['operators']} | {row['peak_bytes'] / 2**20:.1f} MiB "
        f"| {row['over_peak']:.4%} | {row['over_bound']:.4%} | {row['seconds']:.2f} |"
        for row in rows
    ]
    print(*_report.write("traces", {"rows": rows}, "\n".join(lines)), file=sys.stderr)


if __name__ == "__main__":
    main()
