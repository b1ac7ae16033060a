"""As in session, nothing is left behind; nor does a module find what another one compiled."""

import shutil

import pytest
import torch

from tests.session.conftest import nothing_left

__all__ = ["needs_compiler", "nothing_left", "own_cache"]

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="Inductor needs a C++ compiler; none is here",
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()
