"""Every capture test starts and ends without hooks, modes or a running profiler."""

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack


def assert_nothing_left() -> None:
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert _get_current_function_mode_stack() == []
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.fixture(autouse=True)
def nothing_left():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors; threads on shared cores wait for each other
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    assert_nothing_left()
