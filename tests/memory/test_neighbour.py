"""Tensors in another process's memory: the same bits, and an error that names it when it is gone or hangs."""

import contextlib
import dataclasses
import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import squeezebox
from squeezebox.memory import CHUNK_BYTES, Neighbour, Spill, lend
from squeezebox.schema import CaptureError, OptionError, RankError
from tests.pipeline import ranks

MIB = 1 << 20
LENT = 64 * MIB


def network(width=48):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(8)]
    return nn.Sequential(*layers)


def batch(step, width=48):
    x = torch.randn(512, width, generator=torch.Generator().manual_seed(step))
    return x, x.flip(0)


def train(model, steps, first=0, before_backward=lambda: None):
    """Losses and weights."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(first, first + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        before_backward()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([each.detach().flatten() for each in model.parameters()])


def plain(steps):
    """What plain torch reaches with one thread, as ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(network(), steps)
    finally:
        torch.set_num_threads(threads)


def planned(model, neighbour, **more):
    """A plan that moves all that it can."""
    options = {"exact": True, "recompute": False, "offload": neighbour, **more}
    return squeezebox.plan(model, sample=batch(0), loss_fn=nn.functional.mse_loss, **options)


def moved(plan):
    return sum(each.saved_bytes for each in plan.tensors if each.option.codec == "neighbour")


def _lending(rank, function, *arguments):
    """The second rank lends, and says which process it is."""
    if rank == 1:
        dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))
        lend(LENT)
        return "given back"
    return function(*arguments)


def lending(function, *arguments):
    found, last = ranks.run(_lending, 2, function, *arguments)
    assert last == "given back", last
    return found


def _many_orders():
    neighbour, generator = Neighbour(rank=1), torch.Generator().manual_seed(0)
    spill = Spill(neighbour)
    for _ in range(2):
        sizes = torch.randint(1, 3 * CHUNK_BYTES, (9,), generator=generator).tolist()
        tensors = [torch.randint(99, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        slots = {number: spill.write(tensor) for number, tensor in enumerate(tensors)}
        for number in torch.randperm(len(sizes), generator=generator).tolist():
            out = torch.empty_like(tensors[number])
            spill.read(slots[number], out)
            assert torch.equal(out, tensors[number])
            if number % 3:
                del slots[number]
                tensors[number] = tensors[number].flip(0)
                slots[number] = spill.write(tensors[number])
        spill.settle()
        for number in reversed(slots):
            out = torch.empty_like(tensors[number])
            spill.read(slots[number], out)
            assert torch.equal(out, tensors[number])
        slots.clear()
    used = LENT - neighbour.free_bytes()
    with pytest.raises(CaptureError, match=r"memory of rank 1, which has \d+ bytes free.*rank 1 lend more"):
        [spill.write(torch.zeros(16 * MIB, dtype=torch.uint8)) for _ in range(5)]
    spill.close()
    del spill
    gc.collect()
    left = neighbour.free_bytes()
    neighbour.close()
    return used, left


def test_values_come_back_in_any_order_and_no_more_fits_than_is_lent():
    used, left = lending(_many_orders)
    assert 0 < used < left == LENT


def _trains():
    model = network()
    neighbour = Neighbour(rank=1, bytes="64MiB")
    plan = planned(model, neighbour)
    with pytest.raises(
        OptionError, match=r"moves tensors to the memory of rank 1, and no neighbour was given"
    ):
        squeezebox.attach(model, plan=plan)
    session = squeezebox.attach(model, plan=plan, offload=neighbour)
    found = train(model, 3)
    report = session.report()
    session.detach()
    neighbour.close()
    return found, moved(plan), plan.offload, report.record.offload, str(plan)


def test_training_over_a_neighbour_is_that_of_plain_torch_to_the_bit():
    (losses, weights), moved_bytes, planned_to, went_to, text = lending(_trains)
    plain_losses, plain_weights = plain(3)
    assert losses == plain_losses
    assert torch.equal(weights, plain_weights)
    assert moved_bytes > MIB // 2
    assert planned_to.folder == went_to.folder == "the memory of rank 1"
    assert went_to.file_bytes >= moved_bytes
    assert went_to.cache_bytes == 0
    assert "offloaded to the memory of rank 1 (gloo)" in text


def _at_worst():
    model, neighbour = network(), Neighbour(rank=1)
    plan = planned(model, neighbour, load="worst")
    neighbour.close()
    return moved(plan), plan.worst_peak_bytes


def test_the_worst_load_is_measured_with_the_plans_neighbour():
    moved_bytes, peak_bytes = lending(_at_worst)
    assert moved_bytes > 0 and peak_bytes > 0


def _less_than_is_wanted():
    model = network()
    with pytest.raises(OptionError, match=r"rank 1 lends 64.00 MiB, and 1.00 GiB were asked for"):
        Neighbour(rank=1, bytes="1GiB")
    neighbour = Neighbour(rank=1)
    plan = planned(model, neighbour)
    neighbour.most_bytes = moved(plan) // 2
    half = planned(model, neighbour)
    with pytest.raises(OptionError, match=r"the plan moves .* and the memory of rank 1 has .*lend more"):
        squeezebox.attach(model, plan=plan, offload=neighbour)
    squeezebox.attach(model, plan=half, offload=neighbour).detach()
    neighbour.close()
    return moved(plan), moved(half)


@pytest.mark.slow
def test_a_plan_moves_no_more_than_a_neighbour_has_and_another_is_refused_with_its_numbers():
    whole, half = lending(_less_than_is_wanted)
    assert 0 < half <= whole // 2


def _fails(number, patience):
    """The neighbour gets a signal between forward and backward; then training goes on without it."""
    model, neighbour = network(), Neighbour(rank=1, patience=patience)
    plan = planned(model, neighbour)
    pid = int(dist.distributed_c10d._get_default_store().get("pid"))
    session = squeezebox.attach(model, plan=plan, offload=neighbour)
    losses, before = train(model, 2)
    begun = []

    def strike():
        os.kill(pid, number)
        begun.append(time.monotonic())

    with pytest.raises(CaptureError) as error:
        train(model, 1, 2, strike)
    seconds = time.monotonic() - begun[0]
    assert torch.equal(before, torch.cat([each.detach().flatten() for each in model.parameters()]))
    session.detach()
    neighbour.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    again = dataclasses.replace(plan, offload=None, tensors=tuple(map(_to_file, plan.tensors)))
    session = squeezebox.attach(model, plan=again)
    found = train(model, 2, 2)
    session.detach()
    return [*losses, *found[0]], found[1], str(error.value), seconds


def _to_file(tensor):
    option = tensor.option
    return dataclasses.replace(
        tensor, option=dataclasses.replace(option, codec="file") if option.codec == "neighbour" else option
    )


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, r"rank 1 is gone, its connection closed"),
        pytest.param(signal.SIGSTOP, r"rank 1 has not answered for 2 s", marks=pytest.mark.slow),
    ],
)
def test_a_neighbour_that_dies_or_hangs_is_named_and_costs_the_step_alone(number, said):
    processes, results = ranks.start(_lending, 2, _fails, number, 2.0)
    found = ranks.collect(processes, results, 1)[0]
    assert isinstance(found, tuple), found
    losses, weights, text, seconds = found
    assert said in text
    assert "bytes offloaded to the memory of rank 1 do not come back" in text
    assert "Parameters and optimizer are as before this step" in text
    assert seconds < 30.0
    plain_losses, plain_weights = plain(4)
    assert losses == plain_losses
    assert torch.equal(weights, plain_weights)


def _leaves(rank):
    if rank == 0:
        area = Neighbour(rank=1).open()
        area.reserve(0, 8)
        area.begin_write(memoryview(bytearray(8)), 0).result()
        area.begin_read(memoryview(bytearray(8)), 0).result()  # answered: it has connected
        os._exit(0)
    lend(LENT)
    return "returned"


def test_lending_ends_with_the_other_process():
    assert ranks.collect(*ranks.start(_leaves, 2), 1) == {1: "returned"}


def _alone(rank):
    if rank == 1:
        time.sleep(1.0)
        return None
    found = []
    for call in (
        lambda: Neighbour(rank=1, patience=0.2),
        lambda: Neighbour(rank=0),
        lambda: Neighbour(rank=2),
        lambda: lend("1TiB", rank=1),
        lambda: lend("100000GiB", rank=1),
        lambda: lend("1KiB", rank=1),
    ):
        with pytest.raises((OptionError, RankError)) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_cannot_be_lent_is_refused_in_a_sentence():
    said = ranks.run(_alone, 2)[0]
    expected = (
        "rank 1 has lent no memory within 0.2 s. Have it call squeezebox.memory.lend('2GiB', rank=0)",
        "rank=0 is no other rank: this one is 0 of 2",
        "rank=2 is no other rank: this one is 0 of 2",
        "bytes 1TiB is no size",
        "100000.00 GiB were to be lent to rank 1, and this machine has",
        "1.00 KiB were to be lent to rank 1",
    )
    for text, start in zip(said, expected, strict=True):
        assert text.startswith(start)
    with pytest.raises(OptionError, match="init_process_group"):
        Neighbour(rank=1)
