"""A classifier on an image in pieces: lightstream's tiles, our strips, and plain PyTorch on the whole image.

Goes in: nothing; the photographs that come with the demonstration. Comes out:
benchmarks/reports/streaming_rival-<date>.json and .md.

The network is one that lightstream takes: convolutions and pooling, then the mean over the image and a linear
layer behind the part that it streams. Every arm runs in a process of its own, with the same float32 image in
memory. Its peak is what the process grows by in later steps (Linux's VmHWM), the first one left out, which
also measures, plans and traces. lightstream is called for several tiles; our `memory=` is what each of those
took. Gradients are compared with the whole image's in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import _report
from squeezebox.cli._gigapixel import lay_out
from squeezebox.memory import ProcessMeter
from squeezebox.streaming import StreamedStep

CLASSES, TARGET = 8, 3
_MIB = 1 << 20


class Classifier(nn.Module):
    """Convolutions and pooling without padding, as lightstream's own example has them."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out in ((3, 16), (16, 32), (32, 48)):
            layers += [
                nn.Conv2d(channels, out, 3),
                nn.ReLU(),
                nn.Conv2d(out, out, 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(48, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.classified(self.features(image))

    def classified(self, features: Tensor) -> Tensor:
        """Classes of what the convolutions made."""
        classes: Tensor = self.head(features.mean((2, 3)))
        return classes


def loss_fn(classes: Tensor, target: Tensor) -> Tensor:
    """Of one image."""
    return nn.functional.cross_entropy(classes, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--side", type=int, default=3072)
    parser.add_argument("--tiles", type=int, nargs="+", default=[320, 512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        kind, number, folder = arguments.arm
        print(json.dumps(taken(kind, int(number), Path(folder), arguments.repeats)))
        return
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder), arguments.side, arguments.side, 0, lambda *_: None)
        rows = compared(arguments.tiles, arguments.side, Path(folder), arguments.repeats)
    for path in _report.write(
        "streaming_rival", {"side": arguments.side, "rows": rows}, table(rows, arguments)
    ):
        print(path)


def compared(tiles: Sequence[int], side: int, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """A row of each arm."""

    def row(kind: str, number: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.streaming_rival", "--repeats", str(repeats)]
        ended = subprocess.run(
            [*command, "--arm", kind, str(number), str(folder)], check=True, capture_output=True, text=True
        )
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return {"arm": kind, "number": number} | found

    (folder / "side").write_text(str(side))
    rows = [row("exact", 0), row("whole", 0)]
    for tile in tiles:
        rows.append(row("lightstream", tile))
        rows.append(row("strips", rows[-1]["grown_bytes"]))
    exact = torch.tensor(rows.pop(0).pop("gradients"), dtype=torch.float64)
    for each in rows:
        found = torch.tensor(each.pop("gradients"), dtype=torch.float64)
        each["error"] = float((found - exact).norm() / exact.norm())
    return rows


def taken(kind: str, number: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of steps, what the process grew by, and gradients."""
    side = int((folder / "side").read_text())
    pixels = np.memmap(folder / "pixels", np.uint8, "r", shape=(side, side, 3))
    dtype = torch.float64 if kind == "exact" else torch.float32
    image = torch.empty(1, 3, side, side, dtype=dtype)
    for row in range(side):
        image[0, :, row] = torch.from_numpy(pixels[row].T.astype(np.float32)) / 255.0
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    step = _step(kind, number, model, image)
    step()
    meter, seconds, grown = ProcessMeter(), list[float](), list[int]()
    for _ in range(repeats if kind != "exact" else 1):
        for parameter in model.parameters():
            parameter.grad = None
        meter.start()
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
        grown.append(meter.stop() or 0)
    gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    return {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "grown_bytes": max(grown),
        "gradients": gradients.tolist(),
    }


def _step(kind: str, number: int, model: Classifier, image: Tensor) -> Callable[[], object]:
    target = torch.tensor([TARGET])
    if kind == "strips":
        streamed = StreamedStep(model, loss_fn, memory=number)
        return lambda: streamed(image, target)
    if kind == "lightstream":
        return _lightstream(model, number, image, target)
    return lambda: loss_fn(model(image), target).backward()


def _lightstream(model: Classifier, tile: int, image: Tensor, target: Tensor) -> Callable[[], object]:
    """Tiles of the features, whose gradients then go through tiles again."""
    from lightstream.core.scnn.scnn import StreamingCNN

    tiled = StreamingCNN(
        model.features,
        tile_shape=(1, 3, tile, tile),
        statistics_on_cpu=False,
        normalize_on_gpu=False,
        verbose=False,
    )
    model.features = tiled.stream_module

    def step() -> None:
        features = tiled.forward(image).detach().requires_grad_()
        loss_fn(model.classified(features), target).backward()
        tiled.backward(image, features.grad)

    return step


def table(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The Markdown of the report."""
    whole = rows[0]
    lines = [
        f"An image of {arguments.side} x {arguments.side} pixels, float32; medians of {arguments.repeats} "
        "steps, least to most. Times and peaks are over those of the whole image. The error is of all "
        "gradients together, relative, against the whole image's in float64.",
        "",
        "| arm | tile, or memory= in MiB | seconds | times whole | peak MiB | of whole | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        size = {"strips": f"{row['number'] / _MIB:.0f}", "lightstream": f"{row['number']}"}.get(
            row["arm"], ""
        )
        lines.append(
            f"| {row['arm']} | {size} | {row['seconds']:.2f} ({row['least']:.2f} to {row['most']:.2f}) | "
            f"{row['seconds'] / whole['seconds']:.2f} | {row['grown_bytes'] / _MIB:.0f} | "
            f"{row['grown_bytes'] / whole['grown_bytes']:.3f} | {row['error']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
