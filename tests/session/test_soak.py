"""Long trainings that are killed and go on: bits equal, memory flat, no file left."""

import getpass
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
STEPS, KILLS, SETTLED = 700, 2, 150  # 2,100 in all
PATIENCE, LEAK = 600.0, 2 << 20  # seconds of silence; bytes of growth that are none


def started(network, way, folder):
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.session.soaking", network, way, str(STEPS), str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
    with (folder / "said").open("a") as said:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)


def steps_of(folder):
    """(process, step, resident bytes, open files) of each whole line."""
    path = folder / "progress"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]


def killed(process, folder, step, randomness):
    """Kill it once it has begun that step of its own, at any point of it."""
    deadline = time.monotonic() + PATIENCE
    while sum(line[0] == process.pid for line in steps_of(folder)) < step:
        assert process.poll() is None, (folder / "said").read_text()
        assert time.monotonic() < deadline, f"{step} steps take more than {PATIENCE} s"
        time.sleep(0.01)
    time.sleep(randomness.uniform(0.0, 0.02))
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL


def assert_no_file(folder):
    found = [path for name in ("offload", "temporary") for path in (folder / name).rglob("*")]
    assert [
        path for path in found if path.name != f"torchinductor_{getpass.getuser()}"
    ] == []  # torch's, empty


def assert_flat(folder):
    """What each process holds does not grow once it has settled."""
    measured = {}
    for process, step, resident, files in steps_of(folder):
        if resident:
            measured.setdefault(process, []).append((step, resident, files))
    longest = max(measured.values(), key=len)
    settled = [each for each in longest if each[0] >= longest[0][0] + SETTLED]
    assert len(settled) > 20, "no process lived long enough to tell"
    assert settled[-1][1] - settled[0][1] < LEAK, [resident >> 10 for _, resident, _ in settled]
    assert len({files for _, _, files in settled}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "way", "codecs"),  # of these one at least: plans follow the speed of this machine's disk
    [
        ("cnn", "plan", {"recompute", "offload"}),
        ("gpt", "states", {"recompute", "offload"}),
        ("lstm", "noise", {"entropy"}),
    ],
)
def test_a_training_that_is_killed_ends_as_one_that_is_not(network, way, codecs, tmp_path):
    randomness = random.Random(network)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reference = started(network, "noise" if way == "noise" else "plain", whole)  # exact is plain, to the bit
    try:
        process = started(network, way, broken)
        time.sleep(randomness.uniform(0.0, 4.0))  # while it starts, or plans
        process.kill()
        process.wait(PATIENCE)
        for _ in range(KILLS):
            process = started(network, way, broken)
            killed(process, broken, randomness.randrange(1, 80), randomness)
            assert_no_file(broken)
        process = started(network, way, broken)
        assert process.wait(PATIENCE) == 0, (broken / "said").read_text()
        assert reference.wait(PATIENCE) == 0, (whole / "said").read_text()
    finally:
        for each in (reference, process):
            each.kill()
            each.wait()
    ends = [torch.load(folder / "end.pt", weights_only=False) for folder in (whole, broken)]
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ends[1][part], ends[0][part], rtol=0, atol=0)
    assert ends[1]["loss"] == ends[0]["loss"]
    assert codecs & {codec for used in ends[1]["codecs"] for codec in used.split("+")}
    assert len({pid for pid, *_ in steps_of(broken)}) > KILLS
    assert_flat(broken)
    assert_no_file(broken)
