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
EXAMPLES = [path for path in EVERY if path.stem not in OF_COMMANDS]
NEEDS = {
    "accelerate_loop": "accelerate",
    "hugging_face_trainer": "transformers",
    "lightning_trainer": "lightning",
    "timm_model": "timm",
}


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_an_example_has_at_most_40_lines(path):
    assert len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_reports(path, tmp_path):
    needed = NEEDS.get(path.stem)
    if needed is not None:  # timm is there but raises ImportError where torchvision is not
        pytest.importorskip(needed, reason=f"{needed} cannot be imported", exc_type=ImportError)
    launcher = []
    if path.stem == "data_parallel":
        if not dist.is_available() or not dist.is_gloo_available():
            pytest.skip("needs gloo")
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = subprocess.run(
        [sys.executable, *launcher, str(path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "smaller)" in found.stdout
