"""Without a package that packing needs, attach refuses in one sentence, before any step."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ("numba", pytest.param("blosc2", marks=pytest.mark.slow)))
def test_a_missing_package_is_named_at_once(package):
    script = f"""
import sys
sys.modules[{package!r}] = None
import torch, squeezebox
from squeezebox.schema import AttachError
try:
    squeezebox.attach(torch.nn.Linear(2, 2), noise=1e-3)
except AttachError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"pip install {package}." in done.stdout and len(done.stdout.splitlines()) == 1
