"""The meter sees known allocations, to the byte where nothing else allocates."""

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
