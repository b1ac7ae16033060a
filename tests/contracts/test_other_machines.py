"""Memory, budgets and exactness are as promised with other instruction sets and numbers of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
TESTS = [
    "tests/capture/test_exact.py",
    "tests/optim/test_updates.py::test_elements_are_rounded_as_in_a_step_of_all",
    "tests/profiling/test_estimate.py",
    "tests/profiling/test_workspace.py",
    "tests/planning/test_find_batch.py::test_the_answer_fits_the_memory_less_the_reserve_and_a_tenth_more_does_not",
    "tests/planning/test_find_batch.py::test_profiles_with_noise_fit_the_memory_too",
    "tests/planning/test_find_batch.py::test_tensors_that_are_small_in_the_probes_and_not_in_the_answer_are_planned",
    "tests/planning/test_max_batch.py::test_the_answer_fits_and_little_more_does_not",
    "tests/planning/test_plan.py::test_exact_plans_leave_gradients_to_the_bit",
    "tests/streaming/test_memory.py",
]

WITH_AMX = pytest.mark.skipif("amx_tile" not in CPU, reason="is what all other tests run with")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("onednn", "aten", "threads"),  # each of them at least once
    # With AMX and without ATen's AVX-512, torch's attention in bfloat16 fails; so oneDNN gets no AMX either.
    [("SSE41", "default", 1), ("AVX2", "avx2", 4), pytest.param("AVX512_CORE", "default", 2, marks=WITH_AMX)],
)
def test_promises_hold(onednn, aten, threads):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": aten, "OMP_NUM_THREADS": str(threads)}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait do not take the others' cores
    environment["ONEDNN_MAX_CPU_ISA"] = onednn
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", *TESTS]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2_000:]
