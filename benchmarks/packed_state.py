"""Packed optimizer state and frozen weights: what they take, and how wrong updates and weights are.

Goes in: torch's optimizers with their usual settings; random weights. Comes out:
benchmarks/reports/packed_state-<date>.json and .md. An update's noise is what a plan predicts: that of the
optimizer itself after a thousand steps on random gradients, from a generator of its own, so it is the same on
every run.
"""

from __future__ import annotations

import torch

from benchmarks import _report
from squeezebox.planning._state_costs import state_costs
from squeezebox.profiling import parameter_needs
from squeezebox.session import codec_of

OPTIMIZERS = {
    "SGD, momentum 0.9": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "Adam, AdamW": torch.optim.AdamW,
    "Adam with amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}
NUMEL = 1 << 20


def main() -> None:
    rows = []
    for name, make in OPTIMIZERS.items():
        parameter = torch.nn.Parameter(torch.zeros(NUMEL))
        optimizer = make([parameter])
        tensors = parameter_needs(optimizer)[id(parameter)].state_bytes // parameter.nbytes
        costs = {cost.bits: cost for cost in state_costs(optimizer, 1.0, torch.device("cpu"))[0]}
        rows.append(
            {
                "optimizer": name,
                "bytes": {"exact": 4 * tensors}
                | {bits: tensors * cost.nbytes(NUMEL) / NUMEL for bits, cost in costs.items()},
                "noise": {bits: cost.noise for bits, cost in costs.items()},
            }
        )
    lines = [
        "Bytes of state a parameter, and predicted squared error of an update over its squared norm.",
        "",
        "| optimizer | exact, bytes | 16 bits, bytes | noise | 8 bits, bytes | noise |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [f"{row['bytes'][bits]:.2f} | {row['noise'][bits]:.1e}" for bits in (16, 8)]
        lines.append(f"| {row['optimizer']} | {row['bytes']['exact']} | {' | '.join(cells)} |")
    weights = packed_weights()
    lines += [
        "",
        "Bytes of a frozen weight's parameter, and its squared error over its squared norm.",
        "",
        "| elements | bits | bytes | noise |",
        "| --- | --- | --- | --- |",
        *(
            f"| {each['elements']} | {each['bits']} | {each['bytes']:.2f} | {each['noise']:.1e} |"
            for each in weights
        ),
    ]
    payload = {"rows": rows, "weights": weights}
    for path in _report.write("packed_state", payload, "\n".join(lines)):
        print(path)


def packed_weights() -> list[dict[str, object]]:
    """Bytes and noise of each form, for two kinds of weights."""
    random = torch.Generator().manual_seed(0)
    values = {
        "normal": torch.randn(NUMEL, generator=random),
        "uniform": torch.rand(NUMEL, generator=random) - 0.5,
    }
    found = []
    for name, value in values.items():
        for bits in (8, 4):
            held = codec_of(bits).pack(value)
            error = codec_of(bits).unpack(held) - value
            noise = float(error.square().sum() / value.square().sum())
            found.append({"elements": name, "bits": bits, "bytes": held.nbytes / NUMEL, "noise": noise})
    return found


if __name__ == "__main__":
    main()
