"""One thread, and torch's own test databases: importing them changes settings of the process."""

import importlib
import warnings

import pytest
import torch
from hypothesis import settings

_FLAGS_LOCK = "__allow_nonbracketed_mutation_flag"  # of torch.backends, which torch's tests close


@pytest.fixture(autouse=True)
def one_quiet_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what its samples try on purpose
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def databases():
    """The module of that name, imported once it is wanted."""
    pytest.importorskip("expecttest", reason="torch's databases need it")
    profile, lock = settings.get_current_profile_name(), getattr(torch.backends, _FLAGS_LOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module("tests.torch_db.databases")
    settings.load_profile(profile)
    setattr(torch.backends, _FLAGS_LOCK, lock)
    return found
