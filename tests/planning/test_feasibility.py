"""Devices that hold a step plain, under a plan, or not at all; jobs that share one; numbers that agree."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox import planner
from squeezebox.planning import SharedStep, _feasibility, shared
from squeezebox.planning._feasibility import listed, with_rates
from squeezebox.reports import Feasibility, Scenario
from squeezebox.schema import Device, Devices, FormatError, JobKind, JobSpec, OptionError

BAND = (0.5, 1.0, 2.0)
SHAPE = {"input_shape": (3, 16, 16), "batch": 16}


def network():
    layers = [
        each for _ in range(3) for each in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 256, 10))


def device(name, nbytes, flops=1e9, over=BAND):
    return Device(
        name=name,
        memory_bytes=nbytes,
        speed=flops,
        flops_per_second=flops,
        bytes_per_second=flops,
        call_seconds=1e-6,
        over_roofline=over,
    )


def devices(*sizes):
    return Devices(devices=tuple(device(str(size), size) for size in sizes), links=())


@pytest.fixture(scope="module")
def peak():
    return (
        squeezebox.feasibility(network, devices=devices(1 << 30), plans=False, **SHAPE).devices[0].peak_bytes
    )


def test_each_device_says_what_fits_it_and_how_long_that_takes(peak, tmp_path):
    sizes = [int(share * peak) for share in (4.0, 0.95, 0.85, 0.02)]
    found = squeezebox.feasibility(
        network, devices=devices(*sizes), steps=1000, reserve=0, noise=1e-2, **SHAPE
    )
    ample, exact, lossy, none = found.devices
    assert [ample.fits, exact.fits, none.fits] == ["plain", "exact plan", ""]
    assert lossy.fits in ("exact plan", "noise 0.01 plan")
    for row, size in zip(found.devices, sizes, strict=True):
        assert not row.fits or row.peak_bytes <= size
        assert row.plain_batch <= row.batch and row.measured
        assert (row.batch >= 16) == bool(row.fits)
        assert row.seconds == pytest.approx([over * row.seconds[1] for over in BAND])
    assert ample.time_ratio == 1.0 and ample.plain_batch >= 60
    assert found.go and found.why_unplanned == "" and "hours for 1,000 steps" in str(found)
    found.save(tmp_path / "found.json")
    assert Feasibility.load(tmp_path / "found.json") == found


def test_what_a_device_holds_plain_is_what_a_step_of_that_batch_takes(peak):
    (row,) = squeezebox.feasibility(
        network, devices=devices(3 * peak), reserve=0, plans=False, **SHAPE
    ).devices
    largest = squeezebox.estimate(network, input_shape=(3, 16, 16), batch=row.plain_batch).peak_bytes
    more = squeezebox.estimate(network, input_shape=(3, 16, 16), batch=row.plain_batch + 2).peak_bytes
    assert largest <= 3 * peak < 1.02 * more
    assert row.batch == row.plain_batch


def test_a_peak_that_moves_from_the_update_to_the_activations_is_seen_at_larger_batches():
    def wide():
        return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))

    def step_bytes(size):
        return squeezebox.estimate(wide, input_shape=(64,), batch=size, optimizer="adam").peak_bytes

    memory = step_bytes(2000)
    assert step_bytes(8) - step_bytes(4) < 4 * 64 * 10 < (step_bytes(2000) - step_bytes(1000)) / 100
    (row,) = squeezebox.feasibility(
        wide,
        devices=devices(memory),
        reserve=0,
        plans=False,
        input_shape=(64,),
        batch=4,
        optimizer="adam",
    ).devices
    assert 1000 <= row.plain_batch <= 2000 and step_bytes(row.plain_batch) <= memory


def test_no_plan_and_no_device_is_said(peak):
    found = squeezebox.feasibility(network, devices=devices(peak // 2), plans=False, **SHAPE)
    assert not found.go and "No plan was tried: it was not asked for." in str(found)
    with pytest.raises(OptionError, match="leaves nothing of the"):
        squeezebox.feasibility(network, devices=devices(1000), reserve="1MiB", **SHAPE)
    with pytest.raises(FormatError, match="list of devices"):
        squeezebox.feasibility(network, devices="nowhere.toml", **SHAPE)


def test_more_stays_free_where_processes_keep_freed_memory(peak):
    card, processor = (replace(device(kind, int(1.3 * peak)), type=kind) for kind in ("cuda", "cpu"))
    found = squeezebox.feasibility(
        network, devices=Devices(devices=(card, processor), links=()), plans=False, **SHAPE
    )
    assert [each.fits for each in found.devices] == ["plain", ""]
    assert "35% of a CPU's memory, at least 64 MiB, and 10% of others stay free." in str(found)
    spec = JobSpec(name="train", kind=JobKind.TRAINING, model="", every_seconds=100.0, frames=1)
    step = SharedStep(spec=spec, model=network, described=SHAPE)
    jobs = shared([step], Devices(devices=(card, processor), links=())).devices
    assert [each.fits for each in jobs] == [True, False]


def test_a_device_without_rates_has_this_machines_by_its_speed():
    here = device("this machine", 1000, flops=100.0)
    slow = Device(name="slow", memory_bytes=10, speed=50.0)
    sheet = device("sheet", 10, flops=7.0, over=())
    assert with_rates([here, slow, sheet])[1:] == (
        device("slow", 10, flops=50.0),
        device("sheet", 10, flops=7.0),
    )
    assert all(each.is_rated and not each.over_roofline for each in planner.KNOWN_DEVICES)


def test_a_system_that_does_not_say_what_is_free_compares_other_devices(monkeypatch):
    def silent(device):
        raise OptionError("this system does not say how much memory is free.")

    monkeypatch.setattr(_feasibility, "free_bytes", silent)
    assert listed("all") == planner.KNOWN_DEVICES
    (row,) = with_rates([Device(name="slow", memory_bytes=10, speed=50.0)])
    assert row.is_rated and row.over_roofline


def test_a_module_stays_as_it_was(peak):
    torch.manual_seed(0)
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sample = torch.randn(16, 3, 16, 16), torch.zeros(16, dtype=torch.int64)
    state = torch.get_rng_state()
    found = squeezebox.feasibility(
        model, sample=sample, loss_fn=nn.functional.cross_entropy, devices=devices(peak), exact=True
    )
    assert found.batch == 16 and found.devices[0].fits == "exact plan"
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_jobs_share_a_device_in_time_and_memory(tmp_path):
    def step(name, kind, every):
        spec = JobSpec(name=name, kind=kind, model="", every_seconds=every, frames=10)
        return SharedStep(spec=spec, model=network, described=SHAPE)

    jobs = [step("train", JobKind.TRAINING, 100.0), step("serve", JobKind.SERVING, 0.001)]
    found = shared(jobs, Devices(devices=(device("slow", 1 << 30), device("small", 1000)), links=()))
    slow, small = found.devices
    train, serve = slow.jobs
    assert (train.completed, train.in_time) == (10, 10) and serve.completed < 10
    assert train.seconds > serve.seconds and train.peak_bytes > serve.peak_bytes
    assert slow.fits and not small.fits and found.go
    assert slow.score == pytest.approx((train.score + serve.score) / 2) and small.score == 0.0
    assert train.score == pytest.approx(1.0 - slow.peak_bytes / slow.memory_bytes, rel=1e-3)
    found.save(tmp_path / "found.json")
    assert Scenario.load(tmp_path / "found.json") == found and "do not fit" in str(found)
