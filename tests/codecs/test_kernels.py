"""Kernels on a fresh machine: compiled in the background, tensors held exactly until then, and told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import squeezebox
from squeezebox import codecs
from squeezebox.codecs import _kernels

SOURCE = Path(squeezebox.__file__).parents[1]
TRAINING = """
import logging, sys, time
import torch, squeezebox
from squeezebox import codecs

logging.basicConfig(format="%(message)s", stream=sys.stdout)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
x = torch.randn(512, 256)

def step(session):
    model(x).square().mean().backward()
    report = session.report()
    return {tensor.codec for tensor in report.tensors}, " ".join(report.record.notes)
"""


def environment(folder, **others):
    return os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(SOURCE)} | others


def output(program, folder, **others):
    command = [sys.executable, "-c", TRAINING + program]
    done = subprocess.run(
        command, env=environment(folder, **others), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # compiles
def test_the_first_step_is_exact_what_is_measured_waits_and_a_second_process_finds_all(tmp_path):
    said = output(
        """
session = squeezebox.attach(model, noise=1e-2)
begun = time.monotonic()
print("first", *step(session))
print("quick", time.monotonic() - begun < 10)
print("noise", session.measure_noise(lambda: model(x).square().mean().backward()) > 0)
print("later", *step(session))
""",
        tmp_path,
    )
    lines = said.splitlines()
    assert "compiles its float32 kernels in the background" in lines[0]
    assert lines[1].startswith("first {'keep'} 1 step held tensors exactly")
    assert lines[2] == "quick True"
    assert "kernels are compiled, after" in said
    assert lines[-2] == "noise True"
    assert "entropy" in lines[-1] and "1 step held tensors exactly" in lines[-1]
    again = output('print("codecs", *step(squeezebox.attach(model, noise=1e-2)))', tmp_path)
    assert again.startswith("codecs ") and "entropy" in again and "background" not in again


@pytest.mark.slow  # starts torch
def test_a_process_that_ends_early_leaves_none_behind(tmp_path):
    said = output(
        """
session = squeezebox.attach(model, noise=1e-2)
step(session)
from squeezebox.codecs import _kernels
while not _kernels._state.processes:
    time.sleep(0.01)
print("process", _kernels._state.processes[0].pid)
""",
        tmp_path,
    )
    assert "could not" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.split("process ")[1]), 0)


@pytest.mark.slow  # compiles
@pytest.mark.skipif(sys.platform == "win32", reason="has other exit statuses")
def test_a_process_that_is_killed_is_told_and_made_up_for(tmp_path):
    said = output(
        """
from squeezebox.codecs import _kernels
session = squeezebox.attach(model, noise=1e-2)
step(session)
while not _kernels._state.processes:
    time.sleep(0.01)
_kernels._state.processes[0].kill()
while not _kernels._state.failed:
    time.sleep(0.01)
print("made up for", *step(session))
""",
        tmp_path,
    )
    assert "could not be compiled in the background (exit status -9)" in said
    assert "entropy" in said.split("made up for ")[1]


@pytest.mark.slow  # compiles
def test_without_a_folder_to_write_to_the_process_compiles_at_once(tmp_path):
    """numba looks for one in the package, then in the user's folders; files stand in their way."""
    package = tmp_path / "squeezebox"
    shutil.copytree(SOURCE / "squeezebox", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "codecs" / "_cpu" / "__pycache__").touch()
    (package / "codecs" / "_reference" / "__pycache__").touch()
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "within"
    others = {"PYTHONPATH": str(tmp_path), "HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere)}
    said = output('print("first", *step(squeezebox.attach(model, noise=1e-2)))', nowhere, **others)
    assert "in the background" not in said and "compiles its kernels (values float32)" in said
    assert "entropy" in said.split("first ")[1]


@pytest.mark.slow  # compiles
def test_running_every_kernel_once_leaves_nothing_to_compile(tmp_path):
    """Whatever a codec is given: else it would be compiled in silence, and without the lock."""
    said = output(
        """
import numba.core.event as events
compiled = []

class Listener(events.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__qualname__)

    def on_end(self, event):
        pass

codecs.compile_kernels(float64=True)
codecs.require(torch.float32, "blocks")
events.register("numba:compile", Listener())
one = torch.randn(300_000)
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for name in codecs.available():
        codec = codecs.get(name)
        for scale in (1e-3, 0.1, 10.0, 1e4):
            try:
                packed = codec.pack((one * scale).to(dtype), 0.05)
            except squeezebox.CodecError:
                continue
            codec.unpack(packed)
hints = codecs.Hints(lag=1, scale=torch.tensor([0.5, 2.0]), inner=1, dither=32)
for bound in (1e-4, 0.05):
    for name in ("entropy", "entropy-sign"):
        codecs.get(name).unpack(codecs.get(name).pack(one, bound, hints))
print("compiled", sorted(set(compiled)))
""",
        tmp_path,
    )
    assert said.splitlines()[-1] == "compiled []"


def test_two_cannot_have_the_lock_at_once(tmp_path):
    if sys.platform == "win32":
        pytest.skip("has none")
    with _kernels.locked(tmp_path) as first, _kernels.locked(tmp_path) as second:
        assert first and not second
    with _kernels.locked(tmp_path) as third:
        assert third


def test_what_another_process_compiles_is_waited_for(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.setattr(_kernels, "mark_of", lambda name: mark)
    monkeypatch.setattr(_kernels, "_state", _kernels._State())
    monkeypatch.setattr(_kernels, "_in_a_process", lambda unit: pytest.fail("somebody else compiles"))
    with _kernels.locked(tmp_path):
        assert not _kernels.ready(torch.float32) and not _kernels.ready(torch.float32)
        mark.touch()
    codecs.require(torch.float32)
    assert _kernels.ready(torch.float32) and _kernels.ready(torch.int64)


def test_a_forked_process_starts_over():
    state = _kernels._State()
    state.ready.add(("values", torch.float32))
    state.watches["values", torch.float64] = None
    state.start_over()
    assert state.ready and not state.watches and not state.processes
