"""squeezebox plan --compiled: the plan's step next to the compiled one of the same bytes."""

import json
import shutil

import pytest
import torch

from squeezebox.cli import _beside
from tests.cli.test_commands import models, run  # noqa: F401 - a fixture
from tests.compiling.conftest import needs_compiler

STEP = ("plan", "my_models:small", "--input", "3x32x32", "--batch", "8", "--exact")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.slow
def test_both_are_timed(models, own_cache, capfd):  # noqa: F811
    code, out, err = run(capfd, *STEP, "--budget", "100%", "--compiled", "--json", "--states")
    assert (code, err) == (0, "")
    found = json.loads(out)["compiled"]
    assert found["plan_seconds"] > 0 and found["plain_seconds"] > 0
    assert (found["compiled_seconds"] is None) == bool(found["refused"])  # by what this CPU's kernels take
    assert found["budget_bytes"] <= json.loads(out)["predicted_peak_bytes"]


@needs_compiler
@pytest.mark.slow
def test_what_does_not_fit_is_said(models, own_cache, capfd):  # noqa: F811
    code, out, _ = run(capfd, *STEP, "--compiled")  # the least that a plan takes, by files
    assert code == 0
    assert "squeezebox.compile within" in out and (
        "is refused: the compiled step takes" in out or "of this" in out
    )


def test_a_slower_plan_says_that_there_is_another_way(models, capfd, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(_beside, "is_slower", lambda plan: False)
    assert "--compiled" not in run(capfd, *STEP, "--budget", "100%")[1]
    monkeypatch.setattr(_beside, "is_slower", lambda plan: True)
    assert "--compiled times it" in run(capfd, *STEP, "--budget", "100%")[1]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "--compiled" not in run(capfd, *STEP, "--budget", "100%")[1]
