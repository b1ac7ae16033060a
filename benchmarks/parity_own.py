"""Squeezebox's own claims under `squeezebox.parity`: exact=True, compiled and autocast; `make parity`.

Goes in: small networks with random weights, each plain and as Squeezebox trains it. Comes out:
benchmarks/reports/parity_own-<date>.json and .md, and status 1 where a pair is not as claimed.
May touch: that folder, and a temporary file of moved tensors.

Exact pairs agree to the bit, with every layer's own inputs and with plain's. Compiled ones may add up in
another order, and agree within the tolerance. A lossy pair agrees forward and has to be named in backward:
that shows that the comparison would see a difference.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import squeezebox
from benchmarks import _report, models
from squeezebox import codecs
from squeezebox.reports import Parity

CLASSES, TOKENS, BATCH = 10, 64, 8
COMPILED = ("GPT with dropout",)  # a budget compiles several steps, which takes a minute or more
Stages = dict[str, Callable[..., Any]]
Sample = tuple[Tensor, Tensor]
Way = Callable[[nn.Module, Sample], "contextlib.AbstractContextManager[tuple[Stages, Stages]]"]


def networks() -> dict[str, tuple[nn.Module, Sample]]:
    """In training, with a batch and its targets."""
    torch.manual_seed(0)
    images, text = torch.randn(BATCH, 3, 64, 64), torch.randint(50, (BATCH, TOKENS + 1))
    gpt = models.build("gpt", num_classes=50, width=64, depth=2, heads=4, context=TOKENS, dropout=0.1)
    unet = models.build("unet", num_classes=CLASSES, width=8, depth=3)
    return {
        "ResNet-18": (models.build("resnet18", num_classes=CLASSES), (images, torch.arange(BATCH))),
        "U-Net": (unet, (images, torch.randint(CLASSES, (BATCH, 64, 64)))),
        "GPT with dropout": (gpt, (text[:, :-1].contiguous(), text[:, 1:].contiguous())),
    }


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of classes, pixels or tokens; tokens' classes come last."""
    return F.cross_entropy(output.movedim(-1, 1) if output.dim() == 3 else output, target)


def stages(net: Callable[..., Any], sample: Sample) -> Stages:
    return {"net": net, "loss": functools.partial(loss, target=sample[1])}


@contextlib.contextmanager
def attached(net: nn.Module, sample: Sample, **options: Any) -> Iterator[tuple[Stages, Stages]]:
    session = squeezebox.attach(net_b := copy.deepcopy(net), **options)
    try:
        yield stages(net, sample), stages(net_b, sample)
    finally:
        session.detach()


@contextlib.contextmanager
def planned(net: nn.Module, sample: Sample) -> Iterator[tuple[Stages, Stages]]:
    """Recomputed, regenerated and moved, as the lowest exact plan has it."""
    net_b = copy.deepcopy(net)
    plan = squeezebox.plan(net_b, sample=sample, loss_fn=loss, exact=True)
    session = squeezebox.attach(net_b, plan=plan)
    try:
        yield stages(net, sample), stages(net_b, sample)
    finally:
        session.detach()


def cast(net: nn.Module, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


@contextlib.contextmanager
def under_autocast(net: nn.Module, sample: Sample) -> Iterator[tuple[Stages, Stages]]:
    with attached(net, sample, exact=True) as (plain, squeezed):
        a, b = plain["net"], squeezed["net"]
        yield plain | {"net": functools.partial(cast, a)}, squeezed | {"net": functools.partial(cast, b)}


@contextlib.contextmanager
def compiled(net: nn.Module, sample: Sample) -> Iterator[tuple[Stages, Stages]]:
    """In evaluation: compiled dropout draws other numbers than PyTorch's."""
    torch._dynamo.reset()
    net_a = copy.deepcopy(net).eval()
    step = squeezebox.compile(copy.deepcopy(net_a), budget="90%", sample=sample, loss_fn=loss)
    yield stages(net_a, sample), stages(step, sample)


# name -> (how, whether to the bit, whether backward has to differ)
WAYS: dict[str, tuple[Way, bool, bool]] = {
    "exact=True": (functools.partial(attached, exact=True), True, False),
    "exact plan": (planned, True, False),
    "autocast, exact=True": (under_autocast, True, False),
    "compiled, budget 90 %": (compiled, False, False),
    "noise=1e-2": (functools.partial(attached, noise=1e-2), True, True),
}


def as_claimed(found: Parity, exact: bool, lossy: bool) -> bool:
    if lossy:
        return not found.agrees and all(each.backward for each in found.differing)
    largest = max(max(each.own or 0.0, each.free or 0.0) for each in found.figures.places)
    return found.agrees and bool(found.figures.places) and (largest == 0.0 or not exact)


def measured(way: Way, net: nn.Module, sample: Sample) -> Parity:
    with way(net, sample) as (a, b):
        return squeezebox.parity(a, b, [sample[0]] * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--no-report", action="store_true", help="print only")
    report = not parser.parse_args().no_report
    codecs.require(torch.float32)
    ways = dict(WAYS)
    if not (shutil.which("g++") or shutil.which("clang++")):
        ways = {name: way for name, way in ways.items() if not name.startswith("compiled")}
        print("Inductor needs a C++ compiler, and none is here: compiled pairs are left out")
    rows, table = (
        [],
        ["| pair | network | places | own | free | named | as claimed |", "|---|---|---|---|---|---|---|"],
    )
    for name, (net, sample) in networks().items():
        for way_name, (way, exact, lossy) in ways.items():
            if way is compiled and name not in COMPILED:
                continue
            found = measured(way, net, sample)
            places = found.figures.places
            own, free = max(each.own or 0.0 for each in places), max(each.free or 0.0 for each in places)
            claimed = as_claimed(found, exact, lossy)
            named = "" if found.first is None else f"{found.first.layer}: {found.first.what}"
            rows.append(
                {
                    "pair": way_name,
                    "network": name,
                    "own": own,
                    "free": free,
                    "named": named,
                    "claimed": claimed,
                }
            )
            cells = (
                way_name,
                name,
                len(places),
                f"{own:.1e}",
                f"{free:.1e}",
                named or "none",
                "yes" if claimed else "no",
            )
            table.append(f"| {' | '.join(map(str, cells))} |")
            print(table[-1], "" if claimed else f"\n{found}", flush=True)
    if report:
        _report.write("parity_own", {"pairs": rows}, "\n".join(table))
    sys.exit(0 if all(row["claimed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
