"""Optimizer state in 16 and 8 bits: what it takes, and how wrong its updates are, for every optimizer.

Goes in: torch's optimizers with their usual settings. Comes out: benchmarks/reports/packed_state-<date>.json
and .md. The noise is what a plan predicts: that of the optimizer itself after a thousand steps on random
gradients, from a generator of its own, so it is the same on every run.
"""

from __future__ import annotations

import torch

from benchmarks import _report
from squeezebox.planning._state_costs import state_costs
from squeezebox.profiling import parameter_needs

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
    for path in _report.write("packed_state", {"rows": rows}, "\n".join(lines)):
        print(path)


if __name__ == "__main__":
    main()
