"""Settings for every test: examples of a property, kernels without a device, no word from torch."""

import gc
import math
import os
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line does; read once, by torch
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the other tests

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from squeezebox import codecs  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is imported

# No deadline and no complaint about slowness: kernels compile on their first example, cores are shared.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("default"), max_examples=2000, derandomize=False)
settings.load_profile("default")


def compiled_now(dtype):
    """As codecs.ready, without a process in the background."""
    codecs.require(dtype)
    return True


@pytest.fixture(scope="session", autouse=True)
def compiled():
    """No test's first steps are held exactly until kernels are there; tests' processes find float32's."""
    codecs.require(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "ready", compiled_now)
        yield


@pytest.fixture(scope="module", autouse=True)
def collecting_quickly() -> None:
    """Collecting skips what is there before a file's tests: modules and tests take half a second."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--until``, for a machine that may be slow."""
    parser.addoption(
        "--until", type=float, default=math.inf, help="seconds since 1970; tests that begin later are skipped"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the test's fixtures are made."""
    if time.time() > item.config.getoption("--until"):
        pytest.skip("no time was left")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test's cases that say ``every(n)``, all but each n-th are slow ones."""
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None:
            name = str(item.path), item.name.partition("[")[0]
            seen[name] = seen.get(name, -1) + 1
            if seen[name] % mark.args[0]:
                item.add_marker("slow")


def pytest_sessionfinish() -> None:
    """Libraries that count what is left as the process ends find nothing."""
    gc.unfreeze()
