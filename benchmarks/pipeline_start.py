"""What a rank of a pipeline needs to start on a model that none of the ranks could hold.

Goes in: nothing. Comes out: benchmarks/reports/pipeline_start-<date>.json and .md.

Each of some gloo processes makes a runner of the same model, a chain of linear layers: one that is whole
on each rank, as without anything done about it; one constructed without memory; and one on the meta device
whose weights are read from safetensors files. The peak of the process's resident memory is the
kernel's own (VmHWM), from before the model is constructed to when the runner is made. Pages of the files
count too. Then one process plans the same model, whole and block by block.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks import _ranks, _report
from squeezebox.pipeline import Construction, Runner
from squeezebox.planning import plan_pipeline
from squeezebox.schema import InputForm, Link

ARMS = ("whole", "constructed", "read")
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two ranks, a smaller network")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(ranks=2, width=1024, blocks=4, repeats=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, tensor in network(arguments).state_dict().items():
            save_file({name: tensor}, Path(folder, f"{name}.safetensors"))
        rows = [measure(arm, arguments, folder) for arm in ARMS]
        for arm in ARMS[:2]:
            found = _repeated(_planned, 1, arm, arguments)
            rows.append({"arm": f"plan, {arm}", "peak MiB": [peak / MIB for peak in found]})
    results = {"rows": rows, "model MiB": network_bytes(arguments) / MIB, "settings": vars(arguments)}
    for path in _report.write("pipeline_start", results, table(rows, results["model MiB"])):
        print(path)


def measure(arm: str, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The most that a rank needed, in each repeat."""
    found = _repeated(_started, arguments.ranks, arm, arguments, folder)
    return {"arm": arm, "peak MiB": [peak / MIB for peak in found]}


def _repeated(function: Any, ranks: int, arm: str, arguments: argparse.Namespace, *rest: Any) -> list[int]:
    return sorted(max(_ranks.run(function, ranks, arm, arguments, *rest)) for _ in range(arguments.repeats))


def network(arguments: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(arguments.width, arguments.width) for _ in range(arguments.blocks))
    return nn.Sequential(*layers)


def network_bytes(arguments: argparse.Namespace) -> int:
    return 4 * arguments.blocks * arguments.width * (arguments.width + 1)


def _started(rank: int, arm: str, arguments: argparse.Namespace, folder: str) -> int:
    before, construction, weights = _peak_from_here(), None, None
    if arm == "constructed":
        with Construction() as construction:
            model = network(arguments)
    elif arm == "read":
        weights = folder
        with torch.device("meta"):
            model = network(arguments)
    else:
        model = network(arguments)
    form = InputForm(shape=(arguments.width,), dtype="float32")
    plan = _ranks.plan(arguments.blocks, arguments.ranks, "1f1b", arguments.ranks, inputs=(form,))
    runner = Runner(
        model,
        plan,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_fn=nn.functional.mse_loss,
        construction=construction,
        weights=weights,
    )
    peak = _status("VmHWM") - before
    runner.close()
    return peak


def _planned(rank: int, arm: str, arguments: argparse.Namespace) -> int:
    before, construction = _peak_from_here(), None
    if arm == "constructed":
        with Construction() as construction:
            model = network(arguments)
    else:
        model = network(arguments)
    plan_pipeline(
        model,
        sample=(torch.randn(8, arguments.width), torch.randn(8, arguments.width)),
        loss_fn=nn.functional.mse_loss,
        ranks=arguments.blocks,
        depths=[arguments.blocks],
        memory_bytes=2**40,
        microbatches=[1],
        schedules=["1f1b"],
        policies=["keep"],
        link=Link(bytes_per_second=1e9),
        construction=construction,
    )
    return _status("VmHWM") - before


def _peak_from_here() -> int:
    """Bytes that are resident now, from where the kernel is to take the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def table(rows: list[dict[str, Any]], model: float) -> str:
    lines = ["| arm | peak MiB, median (least..most) | of the model |", "|---|---|---|"]
    for row in rows:
        peaks = row["peak MiB"]
        median = peaks[len(peaks) // 2]
        spread = f"{median:.0f} ({peaks[0]:.0f}..{peaks[-1]:.0f})"
        lines.append(f"| {row['arm']} | {spread} | {median / model:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
