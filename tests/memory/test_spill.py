"""Tensors moved to a file come back to the bit, and the file does not grow while places are free."""

import os

import pytest
import torch

from squeezebox.memory import Spill
from squeezebox.schema import CaptureError


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
    assert os.fstat(spill._file.fileno()).st_size == 2 * 4096


def test_a_place_is_not_lost_by_a_write_that_fails():
    resource = pytest.importorskip("resource")
    spill = Spill()
    kept, gone = spill.write(torch.ones(1000)), spill.write(torch.ones(1000))
    del gone
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))
    try:
        for _ in range(3):
            with pytest.raises(CaptureError, match="8000 bytes could not be offloaded"):
                spill.write(torch.ones(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    slot, out = spill.write(torch.full((1000,), 2.0)), torch.empty(1000)
    for each, value in ((kept, 1.0), (slot, 2.0)):
        spill.read(each, out)
        assert float(out.sum()) == 1000.0 * value
    assert os.fstat(spill._file.fileno()).st_size == 8192


def test_reading_in_reverse_while_places_come_and_go():
    spill, out = Spill(), torch.empty(5000)
    slots = [spill.write(torch.full((5000,), float(value))) for value in range(6)]
    del slots[2]
    for slot, value in zip(reversed(slots), (5, 4, 3, 1, 0), strict=True):
        spill.read(slot, out)
        assert float(out.sum()) == 5000.0 * value
