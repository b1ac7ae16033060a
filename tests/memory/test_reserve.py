"""The arena for packed tensors: places of the same size in every step, given back; spills are counted."""

import pytest
import torch

from squeezebox.memory import Reserve


class Owner:
    """Holds one packed tensor, as an entry does."""

    def __init__(self, reserve, key, content):
        room = reserve.claim(key)
        self.part = None if room is None else room.put(content)
        self.placed = self.part is not None
        self.part = content.clone() if self.part is None else self.part
        reserve.note(key, [content.nbytes], self, placed=self.placed)


def filled(nbytes, value=1):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def step(reserve, sizes, value=1):
    """Pack all, and let go of them in reverse; returns the record."""
    reserve.start_step()
    owners = [Owner(reserve, key, filled(nbytes, value)) for key, nbytes in sizes.items()]
    while owners:
        owners.pop()
    return reserve.record


class Memory:
    """Allocates, and says how much of that is still there."""

    def __init__(self):
        self.storages = []
        self.asked = []

    def __call__(self, nbytes):
        made = torch.empty(nbytes, dtype=torch.uint8)
        self.asked.append(nbytes)
        self.storages.append(torch.multiprocessing.reductions.StorageWeakRef(made.untyped_storage()))
        return made

    def living(self):
        pairs = zip(self.asked, self.storages, strict=True)
        return [nbytes for nbytes, storage in pairs if not storage.expired()]


def learned(sizes, steps=1, **options):
    memory = Memory()
    reserve = Reserve(memory, **options)
    for _ in range(steps):
        step(reserve, sizes)
    reserve.start_step()
    memory.asked.clear()
    memory.storages.clear()
    return reserve, memory


SIZES = {"a": 1000, "b": 3000, "c": 500}
KINDS = pytest.mark.parametrize("lasting", [False, True], ids=["given back", "lasting"])


@KINDS
def test_the_first_step_has_no_places(lasting):
    reserve = Reserve(lasting=lasting)
    record = step(reserve, SIZES)
    assert (reserve.places, record.nbytes, record.tensors, record.spills) == ({}, 0, 0, 0)


@KINDS
def test_the_second_has_one_for_every_tensor(lasting):
    reserve, _ = learned(SIZES, lasting=lasting)
    record = step(reserve, SIZES)
    assert (record.tensors, record.spills, record.layouts) == (3, 0, 1)
    assert sum(SIZES.values()) <= record.nbytes <= 1.2 * sum(SIZES.values())


@KINDS
def test_a_planned_one_has_them_in_the_first_step(lasting):
    reserve = Reserve(lasting=lasting)
    reserve.plan(SIZES)
    record = step(reserve, SIZES)
    assert (record.tensors, record.spills, record.layouts) == (3, 0, 1)
    assert sum(SIZES.values()) <= record.nbytes < sum(SIZES.values()) + 3 * 64


def test_a_first_step_that_is_no_guide_is_forgotten():
    reserve = Reserve()
    step(reserve, SIZES)
    reserve.start_step(learn=False)
    assert not reserve.places


def test_places_are_given_back_and_as_large_in_every_step():
    reserve, memory = learned(SIZES)
    asked = []
    for factor in (1.0, 0.7, 1.05):
        step(reserve, {key: int(factor * nbytes) for key, nbytes in SIZES.items()})
        assert memory.living() == []
        asked.append(memory.asked[-3:])
    assert asked[0] == asked[1] == asked[2]
    assert len(memory.asked) == 9


def test_a_place_lives_as_long_as_a_view_of_what_was_put_there():
    reserve, memory = learned(SIZES)
    view = Owner(reserve, "a", filled(1000, 7)).part[10:20].view(torch.int16)
    step(reserve, SIZES, value=9)
    assert view.tolist() == [0x0707] * 5
    assert len(memory.living()) == 1
    del view
    assert memory.living() == []


def test_a_lasting_one_is_one_block():
    reserve, memory = learned(SIZES, lasting=True)
    owners = [Owner(reserve, key, filled(nbytes)) for key, nbytes in SIZES.items()]
    start, end = owners[0].part.data_ptr(), owners[-1].part.data_ptr() + SIZES["c"]
    assert max(start, end) - min(start, end) <= reserve.record.nbytes
    del owners
    for _ in range(3):
        step(reserve, SIZES)
    assert (memory.asked, reserve.record.layouts) == ([], 1)


def apart(reserve):
    reserve.start_step()
    for key in ("a", "b"):
        owner = Owner(reserve, key, filled(4096))
        del owner


def test_in_one_block_what_is_never_there_together_shares_bytes():
    reserve = Reserve(lasting=True)
    for _ in range(2):
        apart(reserve)
    assert reserve.record.nbytes == 4096
    assert (reserve.record.tensors, reserve.record.spills) == (2, 0)


def test_in_one_block_bytes_in_use_are_not_overwritten():
    reserve, _ = learned(SIZES, lasting=True)
    kept = Owner(reserve, "a", filled(1000, 7))
    record = step(reserve, SIZES, value=9)
    assert kept.placed
    assert bool((kept.part == 7).all())
    assert (record.tensors, record.spills) == (2, 1)
    del kept
    assert step(reserve, SIZES).spills == 0


def test_in_one_block_places_shared_in_another_order_are_not_overwritten():
    reserve = Reserve(lasting=True)
    for _ in range(2):
        apart(reserve)
    reserve.start_step()
    first, second = Owner(reserve, "a", filled(4096, 1)), Owner(reserve, "b", filled(4096, 2))
    assert (first.placed, second.placed) == (True, False)
    assert bool((first.part == 1).all() and (second.part == 2).all())


@KINDS
def test_two_paths_through_a_model_both_have_places(lasting):
    reserve = Reserve(lasting=lasting)
    for _ in range(3):
        step(reserve, {"a": 1000, "b": 2000})
        step(reserve, {"a": 1000, "c": 3000})
    assert (reserve.record.spills, reserve.record.layouts) == (0, 2)
    assert step(reserve, {"a": 1000, "b": 2000}).spills == 0


@KINDS
def test_a_larger_one_is_spilled_and_counted_and_then_has_its_place(lasting):
    reserve, _ = learned(SIZES, lasting=lasting)
    record = step(reserve, SIZES | {"b": 30001})
    assert (record.tensors, record.spills, record.spilled_bytes) == (2, 1, 30001)
    record = step(reserve, SIZES | {"b": 30001})
    assert (record.tensors, record.spills, record.total_spills, record.layouts) == (3, 0, 1, 2)


def test_a_single_large_one_among_twenty_changes_nothing():
    reserve, _ = learned(SIZES, steps=20)
    step(reserve, SIZES | {"b": 30000})
    record = step(reserve, SIZES)
    assert (record.layouts, record.total_spills) == (1, 1)


def test_an_unknown_one_is_spilled():
    reserve, _ = learned(SIZES)
    record = step(reserve, SIZES | {"d": 10})
    assert (record.spills, record.spilled_bytes) == (1, 10)


@KINDS
def test_a_place_far_too_large_for_long_is_made_smaller(lasting):
    reserve = Reserve(lasting=lasting)
    reserve.plan(SIZES)
    smaller = {key: nbytes // 4 for key, nbytes in SIZES.items()}
    for _ in range(20):
        assert step(reserve, smaller).layouts == 1
    assert step(reserve, smaller).nbytes < sum(SIZES.values()) / 2
    assert (reserve.record.layouts, reserve.record.spills) == (2, 0)


@KINDS
def test_what_lies_there_outlives_the_arena(lasting):
    reserve, _ = learned(SIZES, lasting=lasting)
    owner = Owner(reserve, "a", filled(1000, 7))
    del reserve
    assert bool((owner.part == 7).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.uint8])
def test_parts_of_any_dtype_lie_one_after_another(dtype):
    reserve, _ = learned({"a": 4096})
    room = reserve.claim("a")
    parts = [torch.arange(7).to(dtype), torch.arange(9).to(dtype)]
    placed = [room.put(part) for part in parts]
    assert all(torch.equal(*pair) for pair in zip(placed, parts, strict=True))
    assert room.put(torch.zeros(4096)) is None
