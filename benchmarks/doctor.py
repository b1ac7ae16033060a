"""What `squeezebox doctor` finds in plain training steps of well-known networks, and how long it takes.

Goes in: networks of benchmarks/models.py on random inputs, with AdamW, and the installed torch. Comes out:
benchmarks/reports/doctor-<date>.json and .md.
May touch: that folder.

Each finding is taken at its word as in the tests (tests/profiling/sabotage.py): the step runs again with
garbage in dead stores, and earlier results and originals in place of repeats and copies.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import squeezebox
from benchmarks import _report, models
from squeezebox.reports import StepCheck
from tests.profiling.sabotage import findings_hold

IMAGE, TOKENS = (3, 64, 64), 128
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-18": ("resnet18", {}),
    "EfficientNet-B0": ("efficientnet_b0", {}),
    "U-Net": ("unet", {"width": 16}),
    "ViT": ("vit", {"image": 64}),
    "GPT": ("gpt", {"width": 128}),
    "GPT with dropout": ("gpt", {"width": 128, "dropout": 0.1}),
}
CLASSES, BATCH = 50, 4


def training(kind: str, sizes: dict[str, Any]) -> tuple[Callable[[], object], Callable[[], list[Any]]]:
    """A plain training step after a first one, and what it changes."""
    torch.manual_seed(0)
    model = models.build(kind, num_classes=CLASSES, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randint(CLASSES, (BATCH, TOKENS)) if kind == "gpt" else torch.randn(BATCH, *IMAGE)
    with torch.no_grad():
        target = torch.randint(CLASSES, (len(logits(model(inputs))),))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits(model(inputs)), target)
        loss.backward()
        optimizer.step()
        return loss

    step()
    return step, lambda: [model.state_dict(), optimizer.state_dict()["state"]]


def logits(output: torch.Tensor) -> torch.Tensor:
    """Rows of classes; those of pixels come as channels."""
    return output.movedim(1, -1).flatten(0, -2) if output.dim() == 4 else output.flatten(0, -2)


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def row(name: str, figures: dict[str, Any]) -> str:
    found = ", ".join(f"{count} x {what}" for what, count in figures["found"].items()) or "nothing"
    return (
        f"| {name} | {figures['operators']} | {figures['step_seconds']:.2f} | "
        f"{figures['check_seconds'] / (3 * figures['step_seconds']):.1f} | {found} | "
        f"{figures['replaced']} |"
    )


def measured(kind: str, sizes: dict[str, Any], repeats: int) -> dict[str, Any]:
    step, _ = training(kind, sizes)
    plain = _report.timed(step, repeats)
    check: StepCheck
    seconds, check = seconds_of(partial(squeezebox.check_step, step))
    found = findings_hold(partial(training, kind, sizes))  # raises where one is not true
    return {
        "operators": check.figures.operators,
        "step_seconds": plain.median,
        "check_seconds": seconds,
        "found": {
            f"{each.waste.value} {each.operator} ({each.phase})": each.count for each in check.findings
        },
        "replaced": len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    figures = {name: measured(*network, repeats) for name, network in NETWORKS.items()}
    environment, found = seconds_of(partial(squeezebox.check_environment, ["torch"]))
    (package,) = found.figures.packages
    assert found.healthy, found
    table = [
        "| training step | operators | seconds | check / three steps | found | replaced, to the bit |",
        "|---|---|---|---|---|---|",
        *(row(name, each) for name, each in figures.items()),
        "",
        f"`squeezebox.check_environment(['torch'])` took {environment:.1f} s: {package.files} files, "
        f"classes of {package.loaded} loaded modules; nothing was wrong.",
    ]
    payload = {"steps": figures, "environment_seconds": environment}
    _report.write("doctor", payload, "\n".join(table))


if __name__ == "__main__":
    main()
