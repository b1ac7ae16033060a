"""A training step on a 16000 x 64000 image within 1 GiB of the process: batch normalisation, attention.

Goes in: nothing; the photographs that come with the package. Comes out:
benchmarks/reports/gigapixel_reach-<date>.json and .md.

A U-Net with batch normalisation in training, and a slide classifier with gated attention over the image, take
one step each in a process of its own, planning included. The image and its mask are files that are read. What
the process holds is all of it: Python, torch, torch.export, tensors, and pages of files. It is read from
/proc/self/statm every few hundredths of a second, and from VmHWM at the end; the greater one counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import _report
from squeezebox.cli._gigapixel import lay_out, loss_fn
from squeezebox.memory import live_bytes
from squeezebox.reports import human_bytes
from squeezebox.streaming import StreamedStep

_SAMPLING_SECONDS = 0.02


class Block(nn.Sequential):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, convolution: nn.Module, channels: int) -> None:
        super().__init__(convolution, nn.BatchNorm2d(channels), nn.ReLU())


class UNet(nn.Module):
    """The demonstration's, with batch normalisation behind every convolution but the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.down = Block(nn.Conv2d(3, 8, 9, stride=4, padding=4, bias=False), 8)
        self.further = Block(nn.Conv2d(8, 12, 5, stride=4, padding=2, bias=False), 12)
        self.middle = Block(nn.Conv2d(12, 12, 3, padding=1, bias=False), 12)
        self.up = Block(nn.ConvTranspose2d(12, 8, 4, stride=4, bias=False), 8)
        self.merge = Block(nn.Conv2d(16, 8, 3, padding=1, bias=False), 8)
        self.last = nn.ConvTranspose2d(8, 4, 8, stride=4, padding=2)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down(image)
        coarse = self.middle(self.further(fine))
        merged = self.merge(torch.cat([fine, self.up(coarse)], 1))
        logits: Tensor = self.head(torch.relu(self.last(merged)))
        return logits


class Classifier(nn.Module):
    """Features of patches of 16 pixels, pooled by gated attention over all of them (Ilse et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 9, stride=4, padding=4), nn.ReLU()),
            *(
                nn.Conv2d(16, 32, 5, stride=4, padding=2),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.ReLU(),
            ),
        )
        self.what, self.gate, self.score = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 1)
        self.head = nn.Linear(32, 2)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.features(image).flatten(2).transpose(1, 2)
        scores = self.score(torch.tanh(self.what(patches)) * torch.sigmoid(self.gate(patches)))
        logits: Tensor = self.head((torch.softmax(scores, 1) * patches).sum(1))
        return logits


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor]]] = {
    "U-Net with batch normalisation": (UNet, loss_fn),
    "classifier with gated attention": (Classifier, nn.functional.cross_entropy),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="16000x64000")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--quick", action="store_true", help="a small image")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(size="320x1280", memory="64MiB")
    arguments = parser.parse_args()
    height, width = map(int, arguments.size.split("x"))
    if arguments.child:
        case, folder = arguments.child
        print(json.dumps(stepped(case, folder, height, width, arguments.memory)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder), height, width, 0, lambda *_: None)
        for case in CASES:
            options = ["--size", arguments.size, "--memory", arguments.memory, "--child", case, folder]
            run = [sys.executable, "-m", "benchmarks.gigapixel_reach", *options]
            results[case] = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout)
            print(case, results[case]["process_bytes"], results[case]["seconds"], file=sys.stderr, flush=True)
    payload = {"size": arguments.size, "memory": arguments.memory, "cases": results}
    for path in _report.write("gigapixel_reach", payload, table(payload)):
        print(path)


def stepped(case: str, folder: str, height: int, width: int, memory: str) -> dict[str, Any]:
    """One step, and what this process held."""
    build, loss = CASES[case]
    torch.manual_seed(0)
    model = build().train()
    pixels = np.memmap(Path(folder) / "pixels", np.uint8, "r", shape=(height, width, 3))
    mask = np.memmap(Path(folder) / "mask", np.uint8, "r", shape=(height, width))
    target = mask if build is UNet else torch.tensor([1])
    with Highest() as highest:
        before = highest.nbytes
        step = StreamedStep(model, loss, memory=memory, spool=True)
        image, start = pixels.transpose(2, 0, 1)[None], time.perf_counter()
        plan = step.plan(image, target)
        planned = time.perf_counter()
        value = float(step(image, target))
        seconds = time.perf_counter() - planned
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    return {
        "loss": value,
        "seconds": seconds,
        "planning_seconds": planned - start,
        "before_bytes": before,
        "process_bytes": highest.nbytes,
        "plan": asdict(plan),
    }


class Highest:
    """What this process holds at its highest, all of it."""

    def __enter__(self) -> Highest:
        self.nbytes, self._end = self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        known = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        self.nbytes = max(self.nbytes, 1024 * known)

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLING_SECONDS):
            self.nbytes = max(self.nbytes, self._now())

    def _now(self) -> int:
        return live_bytes(torch.device("cpu")) or 0


def table(payload: dict[str, Any]) -> str:
    lines = [
        f"One step on {payload['size']} pixels with memory={payload['memory']}.",
        "",
        "| network | process at its highest | before | on disk | passes | planning s | step s | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in payload["cases"].items():
        lines.append(
            f"| {case} | {human_bytes(found['process_bytes'])} | {human_bytes(found['before_bytes'])} | "
            f"{human_bytes(found['plan']['disk_bytes'])} | {len(found['plan']['stages'])} | "
            f"{found['planning_seconds']:.0f} | {found['seconds']:.0f} | {found['loss']:.6f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
