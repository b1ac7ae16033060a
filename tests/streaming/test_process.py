"""The process itself grows by no more than is said on top of memory=."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys
    import torch
    from torch import nn
    from squeezebox.streaming import StreamedStep

    def status(field):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

    def growth(memory, rows):
        before = status("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")
        down = nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        model = nn.Sequential(*down, nn.ConvTranspose2d(32, 2, 4, 2, 1))
        step = StreamedStep(model, lambda output, _: output.square().mean(), memory=memory)
        for _ in range(2):
            step(image[:, :, :rows], None)
        return status("VmHWM") - before

    image = torch.randn(1, 3, 2048, 512)
    print(growth(2**24, 64), growth(48 * 2**20, 2048))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux counts the peak")
@pytest.mark.parametrize(("threshold", "factor"), [(None, 2.0), ("131072", 1.1)])
def test_the_process_grows_by_what_is_said(threshold, factor):
    environment = dict(os.environ)
    environment.pop("MALLOC_MMAP_THRESHOLD_", None)
    if threshold is not None:
        environment["MALLOC_MMAP_THRESHOLD_"] = threshold
    run = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    imports, step = map(int, ended.stdout.split())
    assert imports < 400 * 2**20
    assert step < factor * 48 * 2**20
