"""The arena for packed tensors: places are learned, never overwritten in use, and spills are counted."""

import gc

import pytest
import torch

from squeezebox.memory import Reserve

LEARNING = 4


class Owner:
    """Holds one packed tensor, as an entry does."""

    def __init__(self, reserve, key, content):
        room = reserve.claim(key)
        self.part = None if room is None else room.put(content)
        self.placed = self.part is not None
        self.part = content.clone() if self.part is None else self.part
        reserve.note(key, content.nbytes, self, placed=self.placed)


def filled(nbytes, value=1):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def step(reserve, sizes, value=1):
    reserve.start_step()
    owners = [Owner(reserve, key, filled(nbytes, value)) for key, nbytes in sizes.items()]
    while owners:
        owners.pop()
    gc.collect()


def learned(sizes):
    reserve = Reserve()
    for _ in range(LEARNING):
        step(reserve, sizes)
    return reserve


SIZES = {"a": 1000, "b": 3000, "c": 500}


def test_the_first_steps_have_no_arena():
    reserve = Reserve()
    for _ in range(LEARNING):
        step(reserve, SIZES)
        assert (reserve.tensors, reserve.record.nbytes, reserve.record.spills) == ((), 0, 0)


def test_then_all_lie_in_one_block():
    reserve = learned(SIZES)
    reserve.start_step()
    owners = [Owner(reserve, key, filled(nbytes)) for key, nbytes in SIZES.items()]
    (memory,) = reserve.tensors
    start = memory.data_ptr()
    assert all(start <= owner.part.data_ptr() < start + memory.nbytes for owner in owners)
    assert sum(SIZES.values()) <= memory.nbytes == reserve.record.nbytes <= 1.1 * sum(SIZES.values())
    assert (reserve.record.tensors, reserve.record.spills, reserve.record.layouts) == (3, 0, 1)


def test_what_is_never_there_together_shares_bytes():
    def apart(reserve):
        reserve.start_step()
        for key in ("a", "b"):
            owner = Owner(reserve, key, filled(4096))
            del owner

    reserve = Reserve()
    for _ in range(LEARNING + 1):
        apart(reserve)
    assert 4096 <= reserve.record.nbytes < 2 * 4096
    assert (reserve.record.tensors, reserve.record.spills) == (2, 0)


def test_a_larger_one_is_spilled_and_counted():
    reserve = learned(SIZES)
    step(reserve, SIZES | {"b": 30000})
    assert (reserve.record.tensors, reserve.record.spills, reserve.record.spilled_bytes) == (2, 1, 30000)
    step(reserve, SIZES)
    assert (reserve.record.spills, reserve.record.total_spills) == (0, 1)


def test_an_unknown_one_is_spilled():
    reserve = learned(SIZES)
    step(reserve, SIZES | {"d": 10})
    assert (reserve.record.spills, reserve.record.spilled_bytes) == (1, 10)


def test_bytes_in_use_are_not_overwritten():
    reserve = learned(SIZES)
    reserve.start_step()
    kept = Owner(reserve, "a", filled(1000, 7))
    step(reserve, SIZES, value=9)
    assert kept.placed
    assert bool((kept.part == 7).all())
    assert (reserve.record.tensors, reserve.record.spills) == (2, 1)
    del kept
    step(reserve, SIZES)
    assert reserve.record.spills == 0


def test_a_view_of_a_place_keeps_it():
    reserve = learned(SIZES)
    reserve.start_step()
    view = Owner(reserve, "a", filled(1000, 7)).part[10:20].view(torch.int16)
    step(reserve, SIZES, value=9)
    assert view.tolist() == [0x0707] * 5


def test_places_shared_in_another_order_are_not_overwritten():
    reserve = Reserve()
    for _ in range(LEARNING + 1):
        reserve.start_step()
        for key in ("a", "b"):
            owner = Owner(reserve, key, filled(4096))
            del owner
    reserve.start_step()
    first, second = Owner(reserve, "a", filled(4096, 1)), Owner(reserve, "b", filled(4096, 2))
    assert (first.placed, second.placed) == (True, False)
    assert bool((first.part == 1).all() and (second.part == 2).all())


def test_it_is_laid_out_anew_where_it_keeps_spilling():
    reserve = learned(SIZES)
    larger = {key: 2 * nbytes for key, nbytes in SIZES.items()}
    for _ in range(6):
        step(reserve, larger)
    assert (reserve.record.layouts, reserve.record.spills) == (2, 0)
    assert reserve.record.nbytes >= 2 * sum(SIZES.values())


def test_it_is_laid_out_anew_where_most_of_it_is_not_needed():
    reserve = learned(SIZES)
    for _ in range(6):
        step(reserve, {key: nbytes // 4 for key, nbytes in SIZES.items()})
    assert reserve.record.layouts == 2
    assert reserve.record.nbytes < sum(SIZES.values()) / 2


def test_the_block_goes_when_nobody_uses_it():
    reserve = learned(SIZES)
    reserve.start_step()
    owner = Owner(reserve, "a", filled(1000, 7))
    del reserve
    gc.collect()
    assert bool((owner.part == 7).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.uint8])
def test_parts_of_any_dtype_lie_one_after_another(dtype):
    reserve = learned({"a": 4096})
    reserve.start_step()
    room = reserve.claim("a")
    parts = [torch.arange(7).to(dtype), torch.arange(9).to(dtype)]
    placed = [room.put(part) for part in parts]
    assert all(torch.equal(*pair) for pair in zip(placed, parts, strict=True))
    assert room.put(torch.zeros(4096)) is None
