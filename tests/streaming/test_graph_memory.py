"""A graph's step grows the process by no more than memory= and 32 MiB, without the files that it reads."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

PROGRAM = """
    import json, sys
    import numpy as np
    import torch
    from torch import nn
    from squeezebox.memory import return_all
    from squeezebox.streaming import Graph, GraphStep

    class Sage(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

        def forward(self, x, edge_index):
            sources, targets = edge_index
            return self.own(x) + self.others(torch.zeros_like(x).index_add(0, targets, x[sources]))

    def status(field):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

    def grown(work):
        return_all()
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")
        work()
        return status("VmHWM") - before

    folder, memory, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    random = np.random.default_rng(0)
    targets = np.repeat(np.arange(count), 4)
    sources = (targets + random.integers(-300, 301, targets.shape)).clip(0, count - 1)
    sources[::5] = random.integers(0, count, sources[::5].shape)
    edges = random.permutation(count)[np.stack([sources, targets])]
    features = np.memmap(folder + "/features", np.float32, "r", shape=(count, 128))
    out = np.memmap(folder + "/out", np.float32, "w+", shape=(count, 16))
    model = nn.Sequential(Sage(128, 128), nn.ReLU(), Sage(128, 16))
    graph = Graph(features=features, edges=edges, targets=torch.randint(16, (count,)))

    warm = Graph(features=features[:5000], edges=edges[:, :9] % 5000, targets=torch.zeros(5000, dtype=int))
    GraphStep(model, warm, memory)()
    step = GraphStep(model, graph, memory, folder=folder)
    print(json.dumps([step.parts, grown(step), grown(step), grown(lambda: step.predict(out))]))
"""
MEMORY, OWN, NODES = 48 << 20, 32 << 20, 120_000


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux counts the peak")
def test_the_process_grows_by_what_is_said(tmp_path):
    """The features alone are more than the memory, and nodes are taken in another order than given."""
    with (tmp_path / "features").open("wb") as file:
        for _ in range(8):
            file.write(np.random.default_rng(0).standard_normal((NODES // 8, 128), np.float32).tobytes())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), str(MEMORY), str(NODES)]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    parts, *grown = json.loads(ended.stdout)
    assert parts > 4
    assert MEMORY // 4 < min(grown) <= max(grown) < MEMORY + OWN, grown
