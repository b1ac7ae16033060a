"""The meter sees known allocations, to the byte where nothing else allocates."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from squeezebox.profiling import PeakMeter

CPU = torch.device("cpu")
MIB = 1 << 20


def floats(nbytes):
    return torch.empty(nbytes // 4)


def test_the_peak_is_the_highest_sum_of_what_lives():
    meter = PeakMeter(CPU)
    assert meter.start()
    first = floats(8 * MIB)
    second = floats(4 * MIB)
    del second
    third = floats(2 * MIB)
    peak = meter.stop([])
    assert peak.total_bytes == peak.activation_bytes == 12 * MIB
    assert first.numel() > third.numel()


def test_named_tensors_are_left_out_of_the_activations():
    meter = PeakMeter(CPU)
    meter.start()
    gradient = floats(8 * MIB)
    activation = floats(4 * MIB)
    peak = meter.stop([gradient])
    assert peak.total_bytes == 12 * MIB
    assert peak.activation_bytes == 4 * MIB
    del activation


@pytest.mark.parametrize(("named", "expected"), [(True, 0), (False, 4 * MIB)])
def test_what_an_earlier_measurement_saw_counts_as_freed_only_where_it_is_named(named, expected):
    meter = PeakMeter(CPU)
    meter.start()
    old = floats(8 * MIB)
    meter.stop([])
    meter.start([old] if named else [])
    del old
    new = floats(4 * MIB)
    assert meter.stop([]).total_bytes == expected
    del new


def test_nothing_is_measured_inside_another_profiler():
    with torch.autograd.profiler.profile():
        meter = PeakMeter(CPU)
        assert not meter.start()
        assert not meter.running


def test_an_abandoned_measurement_lets_the_next_one_start():
    first = PeakMeter(CPU)
    first.start()
    first.abandon()
    second = PeakMeter(CPU)
    assert second.start()
    second.stop([])


def test_the_profiler_is_quiet():
    program = (
        "import torch; from squeezebox.profiling import PeakMeter\n"
        "meter = PeakMeter(torch.device('cpu')); meter.start(); torch.empty(10)\n"
        "print(meter.stop([]).total_bytes)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert (result.stdout, result.stderr) == ("40\n", "")


class Allocator:
    """A device's, of which cuBLAS holds 8 MiB from a step before."""

    def __init__(self, monkeypatch, capturing):
        self.allocated = self.peak = 8 * MIB
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
        monkeypatch.setattr(f"{PeakMeter.__module__}._take_workspaces", self.take_again)

        self.capturing = capturing

    def clear(self):
        self.allocated = 0

    def take_again(self, device):
        if not self.capturing:
            self.take(8 * MIB)

    def reset(self, device):
        self.peak = self.allocated

    def take(self, nbytes):
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


@pytest.mark.parametrize("capturing", (False, True))
def test_what_cublas_keeps_of_a_device_belongs_to_the_step(capturing, monkeypatch):
    allocator = Allocator(monkeypatch, capturing)
    meter = PeakMeter(torch.device("cuda:0"))
    meter.start()
    allocator.take(2 * MIB)
    assert meter.stop([]).total_bytes == (2 if capturing else 10) * MIB  # a graph must keep what it uses


THREADS = """
import threading, torch, squeezebox
from torch import nn

def train():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(256, 64)
    session = squeezebox.attach(net, exact=True)
    for _ in range(50):
        net(x).square().sum().backward()
    session.detach()

threads = [threading.Thread(target=train) for _ in range(3)]
for each in threads: each.start()
for each in threads: each.join()
print("trained")
"""


def test_threads_may_train_at_once():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "trained\n", done.stderr
