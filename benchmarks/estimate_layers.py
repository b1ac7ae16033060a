"""Peaks of steps that are mostly one layer: as squeezebox.estimate foretells them, and as recorded.

Goes in: nothing. Comes out: benchmarks/reports/estimate_layers-<date>.json and .md.

For layers whose operators keep or take far more on a CPU than their fake kernels show. Each takes two steps
of SGD with a mean square as loss; the second is recorded from the allocator's events.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import squeezebox
from benchmarks import _report
from squeezebox.profiling import record_step

Case = tuple[str, str, nn.Module, Tensor]


class Recurrent(nn.Module):
    """A recurrent layer's outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """For every step of the sequence."""
        output: Tensor = self.layer(x)[0]
        return output


class Folding(nn.Module):
    """A convolution's output in blocks, and the blocks added up again."""

    def __init__(self, channels: int, kernel: int, **options: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 1)
        self.kernel, self.options = kernel, options

    def forward(self, x: Tensor) -> Tensor:
        """As large as the input."""
        blocks = functional.unfold(self.mix(x), self.kernel, **self.options)
        return functional.fold(blocks, list(x.shape[-2:]), self.kernel, **self.options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="estimate_layers", help="of the report")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure(*case) for case in cases()]
    print(*_report.write(arguments.name, {"rows": rows}, render(rows)), file=sys.stderr)


def cases() -> Iterator[Case]:
    """Layer, shape, model and input."""
    for batch, length, inputs, hidden in ((8, 20, 16, 32), (32, 50, 64, 128), (64, 100, 256, 512)):
        shape = f"{batch} x {length} x {inputs}, {hidden} wide"
        for name, kind, options in (
            ("LSTM", nn.LSTM, {}),
            ("LSTM, 2 layers both ways", nn.LSTM, {"num_layers": 2, "bidirectional": True}),
            ("GRU", nn.GRU, {}),
        ):
            yield (
                name,
                shape,
                Recurrent(kind(inputs, hidden, batch_first=True, **options)),
                torch.randn(batch, length, inputs),
            )
    for batch, channels, size in ((4, 8, 32), (16, 16, 64)):
        for kernel, options in ((3, {"padding": 1}), (4, {"stride": 4}), (5, {"padding": 4, "dilation": 2})):
            shape = f"{batch} x {channels} x {size} x {size}, kernel {kernel} {options}"
            yield (
                "Unfold, Fold",
                shape,
                Folding(channels, kernel, **options),
                torch.randn(batch, channels, size, size),
            )
    for bags, length, rows, width in ((10, 700, 300, 8), (256, 20, 2000, 64), (4096, 50, 20000, 32)):
        for mode in ("sum", "mean", "max"):
            yield (
                f"EmbeddingBag, {mode}",
                f"{bags} bags of {length}, table {rows} x {width}",
                nn.EmbeddingBag(rows, width, mode=mode),
                torch.randint(0, rows, (bags, length)),
            )


def measure(name: str, shape: str, model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """One case."""
    options: dict[str, Any] = {"sample": (inputs, None), "loss_fn": _mean_square}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        measured = record_step(model, optimizer=optimizer, **options).peak().nbytes
    foretold = squeezebox.estimate(model, optimizer="sgd", **options).peak_bytes
    row = {"layer": name, "shape": shape, "foretold_bytes": foretold, "measured_bytes": measured}
    print(*row.values(), file=sys.stderr, flush=True)
    return {**row, "error": foretold / measured - 1.0}


def _mean_square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def render(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = ["| layer | shape | foretold | measured | error |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        lines.append(
            f"| {row['layer']} | {row['shape']} | {row['foretold_bytes'] / 2**20:.2f} MiB "
            f"| {row['measured_bytes'] / 2**20:.2f} MiB | {row['error']:+.2%} |"
        )
    worst = max(abs(row["error"]) for row in rows)
    return "\n".join([*lines, "", f"The largest error of {len(rows)} cases is {worst:.2%}."])


if __name__ == "__main__":
    main()
