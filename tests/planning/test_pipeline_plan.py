"""Plans of pipelines, from measuring the blocks to training by them."""

import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox import BudgetError, OptionError
from squeezebox.pipeline import Runner
from squeezebox.profiling import PeakMeter
from squeezebox.schema import Device, DeviceLink, Devices, Link
from tests.pipeline import ranks

LINK = Link(bytes_per_second=1e9, latency_seconds=1e-5)
ROWS = 16


def network():
    torch.manual_seed(0)
    return ranks.Tied(depth=4, width=64, words=32)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 32, (ROWS, 24), generator=generator) for _ in range(2))


def planned(model=None, **options):
    model = model or network()
    given = {
        "ranks": 2,
        "depths": [2],
        "memory_bytes": 2**30,
        "microbatches": [2],
        "link": LINK,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    return squeezebox.plan_pipeline(model, sample=batch(), loss_fn=ranks.entropy, **given | options)


def test_the_fastest_comes_first_and_fits():
    plans = planned(depths=None, microbatches=[1, 2, 4])
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert {plan.ranks for plan in plans} <= {1, 2}
    microbatches = {plan.microbatch for plan in plans}
    assert len(microbatches) > 1 and microbatches <= {1, 2, 4}
    for plan in plans:
        assert plan.microbatch * plan.microbatches * plan.replicas == ROWS
        assert max(plan.rank_peak_bytes) <= 2**30
        assert json.dumps(dataclasses.asdict(plan))
        assert plan.stages[-1].end == len(plan.blocks)
        assert plan.inputs[0].shape == (24,) and plan.inputs[0].dtype == "int64"


def test_planning_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    squeezebox.plan_pipeline(
        model,
        sample=(torch.randn(ROWS, 8), torch.randn(ROWS, 4)),
        loss_fn=nn.functional.mse_loss,
        ranks=2,
        memory_bytes=2**30,
        microbatches=[4],
        link=LINK,
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_less_memory_costs_time_and_too_little_is_refused():
    memory_bytes = max(planned(schedules=["1f1b"])[0].rank_peak_bytes)
    while _is_kept_in(memory_bytes):  # where it is cut depends on the times measured
        memory_bytes = int(0.97 * memory_bytes)
    tight = planned(schedules=["1f1b"], memory_bytes=memory_bytes)[0]
    assert max(tight.rank_peak_bytes) <= memory_bytes
    assert "recompute" in {stage.policy for stage in tight.stages}
    with pytest.raises(BudgetError, match="MiB|KiB"):
        planned(memory_bytes=1000)
    with pytest.raises(OptionError, match=r"policies \['recomput'\] are unknown; known are keep"):
        planned(policies=("recomput",))
    with pytest.raises(OptionError, match=r"ranks 2\.0 is no whole number"):
        planned(ranks=2.0)
    with pytest.raises(OptionError, match="'50%' is a share of nothing"):
        planned(memory_bytes="50%")
    with pytest.raises(OptionError, match="microbatches"):
        planned(microbatches=[17])


def _is_kept_in(memory_bytes):
    try:
        return bool(planned(schedules=["1f1b"], policies=["keep"], memory_bytes=memory_bytes))
    except BudgetError:
        return False


def unlike(*sizes, speeds=(1e-9, 2e-9, 4e-9)):
    """Devices so slow that links cost nothing."""
    names = [f"device {number}" for number in range(len(sizes))]
    return Devices(
        devices=tuple(
            Device(name=name, memory_bytes=size, speed=speed)
            for name, size, speed in zip(names, sizes, speeds, strict=False)
        ),
        links=tuple(
            DeviceLink(between=pair, bytes_per_second=1e9, latency_seconds=0.0)
            for pair in itertools.combinations(names, 2)
        ),
    )


def test_unequal_devices_have_work_by_their_speed_and_memory():
    options = {"ranks": None, "memory_bytes": None, "link": None, "depths": [3], "schedules": ["1f1b"]}
    ratios = []  # of the slowest stage's seconds to the fastest one's; of an equal split, 4 and more
    for _ in range(3):  # as clocks err
        plan = planned(**options, devices=unlike(2**30, 2**30, 2**30))[0]
        assert sorted(plan.processes) == [0, 1, 2] and plan.replicas == 1
        each = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
        ratios.append(max(each) / min(each))
    assert min(ratios) < 3.9, ratios
    fast = plan.devices.index("device 2")
    small = unlike(2**30, 2**30, plan.rank_peak_bytes[fast] - 1)
    other = planned(**options, devices=small)[0]
    assert other.rank_peak_bytes[other.devices.index("device 2")] < plan.rank_peak_bytes[fast]
    with pytest.raises(BudgetError, match="'device 1' is short by"):
        planned(**options, devices=unlike(2**30, 1000, 2**30))
    with pytest.raises(OptionError, match="give it, or ranks= and memory_bytes="):
        planned(devices=small)


def _peak(rank, plan):
    model = network()
    runner = Runner(
        model, plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn=ranks.entropy
    )
    sessions = squeezebox.attach_stages(runner)
    held, meter, batches = runner.weights_bytes, PeakMeter(torch.device("cpu")), [batch(n) for n in range(3)]
    assert meter.start()
    for inputs, target in batches:
        runner.step(inputs, target)
    runner.drain()
    peak = held + meter.stop(()).total_bytes
    for session in sessions:
        session.detach()
    runner.close()
    return peak


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("schedule", "policy"),
    [
        ("1f1b", "keep"),
        ("1f1b", "recompute"),
        ("1f1b", "compress"),
        ("2bw", "keep"),
        ("2bw", "compress"),
        ("gpipe", "keep"),
        ("zb-h1", "keep"),
        ("zb-h1", "recompute"),
        ("zb-h2", "keep"),
        ("zb-v", "keep"),
    ],
)
def test_peaks_are_as_planned(schedule, policy):
    plan = planned(schedules=[schedule], policies=[policy])[0]
    for peak, predicted in zip(ranks.run(_peak, 2, plan), plan.rank_peak_bytes, strict=True):
        assert not isinstance(peak, str), peak
        assert 0.8 * predicted <= peak <= 1.05 * predicted  # some cuts share more


def _chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)))


def _parts_peak(rank, plan):
    """Of a rank whose replicas keep a part each, as the plan says."""
    model = _chain()
    runner = Runner(
        model, plan, optimizer=torch.optim.AdamW(model.parameters()), loss_fn=nn.functional.mse_loss
    )
    held, meter = runner.weights_bytes, PeakMeter(torch.device("cpu"))
    given = torch.randn(plan.microbatch * plan.microbatches, 96)
    assert meter.start()
    for _ in range(3):
        runner.step(given, given)
    peak = held + meter.stop(()).total_bytes
    told = runner.sharing()
    runner.close()
    return peak, told is not None


def test_replicas_keep_parts_where_the_budget_asks_for_it():
    model, given = _chain(), torch.randn(ROWS, 96)

    def planned(memory_bytes, **options):
        return squeezebox.plan_pipeline(
            model, sample=(given, given), loss_fn=nn.functional.mse_loss, ranks=4, depths=[2],
            microbatches=[2], link=LINK, memory_bytes=memory_bytes, schedules=["breadth-first"],
            policies=["keep"], **options,
        )  # fmt: skip

    adam = torch.optim.AdamW(model.parameters())
    plans = planned(2**30, optimizer=adam)
    whole, parts = (
        min(max(plan.rank_peak_bytes) for plan in plans if plan.shard == shard) for shard in (False, True)
    )
    assert parts < 0.8 * whole and not plans[0].shard
    least = planned((parts + whole) // 2, optimizer=adam)[0]
    assert least.shard
    found, told = zip(*ranks.run(_parts_peak, 4, least), strict=True)
    assert all(told)
    for peak, predicted in zip(found, 2 * least.rank_peak_bytes, strict=True):
        assert peak == pytest.approx(predicted, rel=0.05)
    with pytest.raises(BudgetError, match="the least that one does is|times as much"):
        planned(parts // 2, optimizer=adam)
    # Who cannot share is not planned to.
    other = torch.optim.Adafactor(model.parameters())
    assert not any(plan.shard for plan in planned(2**30, optimizer=other))
    model[5].weight = model[0].weight
    assert not any(plan.shard for plan in planned(2**30))


@pytest.mark.slow
def test_two_bw_holds_a_version_and_a_gradient_more():
    flushing = planned(schedules=["1f1b"], policies=["keep"])[0]
    weights = _weights(flushing)
    before = ranks.run(_peak, 2, flushing)
    after = ranks.run(_peak, 2, dataclasses.replace(flushing, schedule="2bw"))
    extra = [more - less for more, less in zip(after, before, strict=True)]
    inputs_bytes = 2 * batch()[0].nbytes  # nothing is flushed: those of two batches, where weights are few
    assert extra[0] == pytest.approx(2 * weights[0], rel=0.05, abs=inputs_bytes)
    assert extra[1] == pytest.approx(weights[1], rel=0.05)  # the last rank reads one version only


def _weights(plan):
    pieces = squeezebox.pipeline.cut(network(), (batch()[0][:2],))
    return [
        sum(
            parameter.nbytes
            for parameter in nn.ModuleList(
                piece.module for piece in pieces[stage.first : stage.end]
            ).parameters()
        )
        for stage in plan.stages
    ]


@pytest.mark.slow
def test_compression_is_planned_and_carried_out():
    plan = planned(schedules=["1f1b"], policies=["compress"], noise=1e-2)[0]
    kept = planned(schedules=["1f1b"], policies=["keep"])[0]
    assert plan.noise == 1e-2
    assert max(plan.rank_peak_bytes) < max(kept.rank_peak_bytes)
    for packed in ranks.run(_packed, 2, plan):
        assert not isinstance(packed, str), packed
        assert packed < 0.7


def _packed(rank, plan):
    model = network()
    runner = Runner(
        model, plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn=ranks.entropy
    )
    (session,) = squeezebox.attach_stages(runner)
    for number in range(4):
        runner.step(*batch(number))
    runner.drain()
    record = session.report().record
    session.detach()
    runner.close()
    return record.packed_bytes / record.saved_bytes


def test_gradients_that_wait_are_as_they_were():
    model, (x, y) = network(), batch()
    ranks.entropy(model(x), y).backward()
    before = [each.grad.clone() for each in model.parameters()]
    planned(model, schedules=["1f1b"], policies=["compress"], noise=1e-2)
    assert all(map(torch.equal, before, (each.grad for each in model.parameters())))
