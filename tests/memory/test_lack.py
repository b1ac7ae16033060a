"""What failed for lack of memory is known by its error, and is a BudgetError with the numbers."""

import errno

import numpy as np
import pytest
import torch

from squeezebox.memory import asked_bytes, lacks_memory, within_room
from squeezebox.schema import BudgetError, OptionError


@pytest.mark.parametrize(("make", "dtype"), [(torch.empty, torch.float64), (np.empty, np.float64)])
def test_an_allocators_own_error_says_what_was_asked_for(make, dtype):
    with pytest.raises(BudgetError, match=r"memory for this\. \d[\d,]{18,} bytes were asked for") as raised:
        within_room("this")(make)(2**56, dtype=dtype)
    assert asked_bytes(raised.value.__cause__) == 2**59


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libx.so: failed to map segment from shared object"),
        RuntimeError("could not create a memory object"),
        RuntimeError("could not create a primitive"),
        RuntimeError("can't start new thread"),
        SystemError("error return without exception set"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=repr,
)
def test_errors_for_lack_of_memory(error):
    assert lacks_memory(error)
    with pytest.raises(BudgetError, match="too little memory for this"), within_room("this"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("could not create a primitive descriptor for a convolution"),
        ModuleNotFoundError("No module named 'numba'"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        OptionError("tried to allocate 1 bytes"),
        SystemError("something else"),
    ],
    ids=repr,
)
def test_other_errors_are_as_they_were(error):
    with pytest.raises(type(error)) as raised, within_room("this"):
        raise error
    assert raised.value is error
