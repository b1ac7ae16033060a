"""Tensors moved to a file come back to the bit, and the file does not grow while places are free."""

import os

import pytest
import torch

from squeezebox.memory import Spill


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64))
@pytest.mark.parametrize("count", (0, 1, 1000))
def test_comes_back_to_the_bit(dtype, count):
    spill = Spill()
    x = (torch.randn(count) * 9).to(dtype)
    slot = spill.write(x)
    out = torch.empty_like(x)
    spill.read(slot, out)
    assert torch.equal(out, x)


def test_free_places_are_used_again():
    spill = Spill()
    first = spill.write(torch.ones(100))
    for value in range(50):
        slot = spill.write(torch.full((1000,), float(value)))
        out = torch.empty(1000)
        spill.read(slot, out)
        assert float(out.sum()) == 1000.0 * value
        del slot
    out = torch.empty(100)
    spill.read(first, out)
    assert float(out.sum()) == 100.0
    assert os.fstat(spill._file.fileno()).st_size == 4 * 1100
