"""The peak of a training step as squeezebox.estimate foretells it, against the allocator's own events.

Goes in: nothing; networks of benchmarks/tasks.py. Comes out: benchmarks/reports/estimate-<date>.json and .md.

Each network takes real steps at several batches, in both layouts of images, and with several optimizers; the
second one is measured. What is foretold comes from the same model, sample, loss and kind of optimizer on fake
tensors. A transformer of 70 billion parameters, of which no step is taken, is asked about first.
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import sys
import time
from typing import Any

import torch

import squeezebox
from benchmarks import _report
from benchmarks._large import Llama
from benchmarks._steps import LAYOUTS, Step, step_of
from benchmarks.tasks import SETUPS
from squeezebox.profiling import PeakMeter, record_step
from squeezebox.schema import Kind

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-6),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-6, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-6),
}
CONTEXT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(SETUPS), metavar="network")
    parser.add_argument("--name", default="estimate", help="of the report")
    arguments = parser.parse_args()
    big, rows = large(), []
    for name in arguments.networks:
        rows += [measure(name, *case) for case in cases(name)]
        print(*rows[-1].values(), file=sys.stderr, flush=True)
    results = {"rows": rows, "large": big}
    print(*_report.write(arguments.name, results, render(results)), file=sys.stderr)


def cases(name: str) -> list[tuple[int, str, str]]:
    """Batch, layout and optimizer: each of them varied, the others as in the network's setup."""
    setup = SETUPS[name]
    layout = next(key for key, value in LAYOUTS.items() if value is setup.layout)
    other = [key for key in LAYOUTS if key != layout and name not in ("gpt", "vit")]
    optimizer = "adamw" if name in ("gpt", "vit") else "sgd-momentum"
    batches = [(batch, layout, optimizer) for batch in (2, setup.batch, 3 * setup.batch)]
    layouts = [(setup.batch, key, optimizer) for key in other]
    return [*batches, *layouts, *((setup.batch, layout, key) for key in OPTIMIZERS if key != optimizer)]


def measure(name: str, batch: int, layout: str, optimizer: str) -> dict[str, Any]:
    """One case: the peak foretold and measured, and what each is made of."""
    torch.manual_seed(0)
    step = step_of(name, batch=batch, layout=LAYOUTS[layout])
    begun = time.perf_counter()
    foretold = squeezebox.estimate(
        step.model, sample=step.sample, loss_fn=step.loss, optimizer=OPTIMIZERS[optimizer]
    )
    seconds = time.perf_counter() - begun
    measured = measured_peak(step, OPTIMIZERS[optimizer])
    return {
        "network": name,
        "batch": batch,
        "layout": layout,
        "optimizer": optimizer,
        "foretold_bytes": foretold.peak_bytes,
        "measured_bytes": measured["peak_bytes"],
        "error": foretold.peak_bytes / measured["peak_bytes"] - 1.0,
        "estimate_seconds": seconds,
        "foretold": foretold.to_dict()["peak"],
        "measured": measured,
    }


def measured_peak(step: Step, optimizer: Any) -> dict[str, Any]:
    """The second step's peak by the allocator's events; what a recorder says of the third."""
    taken = optimizer(step.model.parameters())
    inputs, target = step.sample

    def run() -> None:
        taken.zero_grad()
        step.loss(step.model(inputs), target).backward()
        taken.step()

    run()
    taken.zero_grad()
    gc.collect()
    states = [value for state in taken.state.values() for value in state.values() if value is not None]
    held = [*step.model.parameters(), *step.model.buffers(), *step.sample, *states]
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    run()
    peak = sum(tensor.nbytes for tensor in held) + meter.stop([]).total_bytes
    recorded = record_step(step.model, sample=step.sample, loss_fn=step.loss, optimizer=taken).peak()
    return {
        "peak_bytes": peak,
        "recorded_bytes": recorded.nbytes,
        "by_kind": {kind.value: nbytes for kind, nbytes in recorded.by_kind.items()},
        "phase": recorded.call.phase if recorded.call else None,
        "module": recorded.call.module if recorded.call else None,
    }


def large() -> dict[str, Any]:
    """What a step of 70 billion parameters holds, and what asking takes."""
    begun = time.perf_counter()
    found = squeezebox.estimate(
        Llama, input_shape=(CONTEXT,), batch=1, optimizer="adamw", dtype="bfloat16", input_dtype="int64"
    )
    return {
        "seconds": time.perf_counter() - begun,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "parameters": found.parameter_bytes // 2,
        "estimate": found.to_dict(),
    }


def render(results: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "Peaks are everything: parameters, gradients, buffers, optimizer state, batch, saved tensors, "
        "temporaries.",
        "",
        "| network | batch | layout | optimizer | foretold | measured | error | in | seconds to ask |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['network']} | {row['batch']} | {row['layout']} | {row['optimizer']} "
            f"| {row['foretold_bytes'] / 2**20:.1f} MiB | {row['measured_bytes'] / 2**20:.1f} MiB "
            f"| {row['error']:+.3%} | {_owner(row['foretold'])} | {row['estimate_seconds']:.1f} |"
        )
    worst = max(abs(row["error"]) for row in results["rows"])
    agree = sum(_owner(row["foretold"]) == _owner(row["measured"]) for row in results["rows"])
    apart = max(abs(part) for row in results["rows"] for part in _apart(row))
    big = results["large"]
    return "\n".join(
        [
            *lines,
            "",
            f"The largest error is {worst:.3%}. Phase and module of the peak are the recorded step's in "
            f"{agree} of {len(results['rows'])} cases; no part of the peak is off by "
            f"more than {apart:.2%} of it.",
            "",
            f"A decoder of {big['parameters'] / 1e9:.1f} billion parameters in bfloat16, {CONTEXT} tokens, "
            f"AdamW: {big['estimate']['peak_bytes'] / 2**30:.1f} GiB, asked in {big['seconds']:.1f} s by a "
            f"process of {big['resident_bytes'] / 2**30:.2f} GiB at most.",
        ]
    )


def _owner(peak: dict[str, Any]) -> str:
    return f"{peak['phase']} of {peak['module'] or 'the model'}"


def _apart(row: dict[str, Any]) -> list[float]:
    """By kind, foretold less recorded, over the peak."""
    foretold, recorded = row["foretold"]["by_kind"], row["measured"]["by_kind"]
    return [(foretold[kind.value] - recorded[kind.value]) / row["measured_bytes"] for kind in Kind]


if __name__ == "__main__":
    main()
