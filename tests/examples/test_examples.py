"""Every example is short, and runs as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

FOLDER = Path(__file__).parents[2] / "examples"
OF_COMMANDS = {"audit_digits"}  # trained by `squeezebox audit`, as benchmarks/audit.py does
EVERY = sorted(FOLDER.glob("*.py"))
QUICK = {"plain_pytorch"}
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])
    for path in EVERY
    if path.stem not in OF_COMMANDS
]
NEEDS = {
    "accelerate_loop": "accelerate",
    "hugging_face_trainer": "transformers",
    "lightning_trainer": "lightning",
    "timm_model": "timm",
}


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_an_example_has_at_most_40_lines(path):
    assert len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_runs_and_reports(path, tmp_path):
    needed = NEEDS.get(path.stem)
    if needed is not None:  # timm is there but raises ImportError where torchvision is not
        pytest.importorskip(needed, reason=f"{needed} cannot be imported", exc_type=ImportError)
    launch(path, tmp_path)


DECLARED = """
import runpy, sys
import torch

if torch.version.cuda is None:  # then the wheel's own kernels, which importing asks for, cannot be loaded
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
def test_timm_with_torchvision_beside_it(tmp_path):
    """In a folder of their own: beside a CPU build of torch, torchvision breaks what asks for it."""
    packages = ["pillow==13.0.0", "timm==1.0.31", "torchvision==0.28.0"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    installed = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"needs a package index: {installed.stderr.strip().splitlines()[-1]}")
    launch(FOLDER / "timm_model.py", tmp_path, program=["-c", DECLARED])


def launch(path, tmp_path, program=()):
    """Run an example as its first lines say, or through a program; see its report."""
    launcher = [*program]
    if path.stem == "data_parallel":
        if not dist.is_available() or not dist.is_gloo_available():
            pytest.skip("needs gloo")
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = subprocess.run(
        [sys.executable, *launcher, str(path)],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{FOLDER.parent / 'src'}{os.pathsep}{tmp_path}",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "smaller)" in found.stdout
