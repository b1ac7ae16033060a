"""Stages with replicas that take microbatches in turn train by the papers' formulas, in real processes."""

import dataclasses
import math
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from squeezebox import OptionError
from squeezebox.pipeline import Runner, schedule_of
from squeezebox.schema import InputForm
from tests.pipeline import ranks

BATCHES = 5
TOKENS = (InputForm(shape=(5,), dtype="int64"),)


def _plan(replicas, schedule="pipedream", microbatches=None, blocks=8, **options):
    """Stages with so many replicas each, and a batch that they share evenly."""
    count = microbatches or math.lcm(*replicas)
    return ranks.plan(blocks, len(replicas), schedule, count, in_turn=replicas, **options)


def _train(rank, cases, make=ranks.chain, data=ranks.numbers, loss_fn=nn.functional.mse_loss, sizes=()):
    results = []
    for optimizer, plan, drains, options in cases:
        model = make()
        stepping = ranks.OPTIMIZERS[optimizer](model.parameters())
        runner = Runner(model, plan, optimizer=stepping, loss_fn=loss_fn, **options)
        losses = []
        for batch in range(BATCHES):
            # The first rank reads; nobody else is given anything.
            count = sizes[batch] if sizes else 2 * plan.microbatches
            given = data(batch, count) if rank == 0 else ()
            losses.append(runner.step(*given))
            if batch in drains:
                runner.drain()
        results.append(([None if loss is None else loss.item() for loss in losses], runner.state_dict()))
        runner.close()
    return results


def _in_turn(plan, optimizer, *, warmup=0, vertical_sync=False):
    """PipeDream in one process: weights of each stage, and every microbatch's loss.

    Of stage s, a replica has taken ``ahead`` microbatches in before its first backward; from then on it does
    one backward for each forward. So its i-th forward comes after i - ahead of its backwards, each followed
    by an update with the mean over the stage's replicas. With vertical sync a microbatch is seen everywhere
    by weights that have learned from no other microbatches than the first stage's have.
    """
    model = ranks.chain()
    replicas = [stage.replicas for stage in plan.stages]
    stages = [
        _Updated(nn.ModuleList(model[each.first : each.end]), optimizer, each.replicas)
        for each in plan.stages
    ]
    losses = []
    for batch in range(BATCHES):
        flushed = min(batch, warmup) * plan.microbatches  # all of these have been learned from
        inputs, target = ranks.numbers(batch, 2 * plan.microbatches)
        for place, (x, y) in enumerate(zip(inputs.split(2), target.split(2), strict=True)):
            number = batch * plan.microbatches + place
            ahead = [math.ceil(sum(replicas[each:]) / count) - 1 for each, count in enumerate(replicas)]
            seen = [
                max(number // count - lag, flushed // count)
                for count, lag in zip(replicas, ahead, strict=True)
            ]
            if vertical_sync:
                seen = [max(seen[0] * replicas[0], flushed) // count for count in replicas]
            for stage, version in zip(stages, seen, strict=True):
                stage.read(version)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
            for stage in stages:
                stage.learn()
    for stage in stages:
        stage.read(-1)
    return losses, dict(model.named_parameters())


class _Updated:
    """A stage's weights after each update, which is made from the mean gradient of so many microbatches."""

    def __init__(self, module, optimizer, count):
        self.parameters, self.count, self.gradients = [*module.parameters()], count, []
        self.newest = [nn.Parameter(each.detach().clone()) for each in self.parameters]
        self.stepping = ranks.OPTIMIZERS[optimizer](self.newest)
        self.history = [[each.detach().clone() for each in self.newest]]

    def read(self, version):
        for parameter, value in zip(self.parameters, self.history[version], strict=True):
            parameter.data, parameter.grad = value.clone(), None

    def learn(self):
        self.gradients.append([parameter.grad.clone() for parameter in self.parameters])
        if len(self.gradients) < self.count:
            return
        for parameter, gradients in zip(self.newest, zip(*self.gradients, strict=True), strict=True):
            parameter.grad = sum(gradients) / self.count
        self.stepping.step()
        self.history.append([each.detach().clone() for each in self.newest])
        self.gradients = []


def _together(found):
    whole = {}
    for _, own in found:
        for name, tensor in own.items():
            # Replicas of a stage have the same weights to the bit.
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def _check_in_turn(cases, results):
    for number, (optimizer, plan, _, options) in enumerate(cases):
        for result in results:
            assert not isinstance(result, str), result
        what = f"{[stage.replicas for stage in plan.stages]} {optimizer} {options}"
        losses, weights = _in_turn(plan, optimizer, **options)
        whole = _together([result[number] for result in results])
        assert whole.keys() == weights.keys()
        for name, tensor in weights.items():
            worst = (whole[name] - tensor).abs().max().item()
            assert worst <= (0.0 if {stage.replicas for stage in plan.stages} <= {1, 2} else 1e-12), (
                what,
                name,
                worst,
            )
        # Each replica of the last stage has the losses of its own microbatches.
        last, m = plan.stages[-1].replicas, plan.microbatches
        for replica in range(last):
            own = [sum(losses[b * m + replica : (b + 1) * m : last]) / (m // last) for b in range(BATCHES)]
            found = results[plan.ranks - last + replica][number][0]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(own), atol=1e-6, rtol=1e-6, msg=what)


def test_pipedream_with_replicas_is_its_formula_to_the_bit():
    cases = [
        ("sgd", _plan((2, 1)), (), {}),
        ("adamw", _plan((2, 1), policy="recompute"), (1,), {}),
        ("momentum", _plan((1, 2)), (), {"warmup": 2}),
        ("adamw", _plan((2, 1)), (), {"vertical_sync": True}),
        ("momentum", _plan((1, 2)), (2,), {"vertical_sync": True, "warmup": 1}),
        ("adamw", _plan((1, 1, 1)), (), {"vertical_sync": True}),
    ]
    _check_in_turn(cases, ranks.run(_train, 3, cases))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2, 1), (3, 1), (1, 3), (2, 3), (2, 1, 2)])
def test_pipedream_with_many_replicas(replicas):
    cases = [
        (optimizer, _plan(replicas), drains, options)
        for optimizer, drains in (("adamw", ()), ("momentum", (0, 3)))
        for options in ({}, {"vertical_sync": True}, {"warmup": 2})
    ]
    _check_in_turn(cases, ranks.run(_train, sum(replicas), cases))


def _check_2bw(cases, results, make, data, loss_fn):
    for number, (optimizer, plan, _, options) in enumerate(cases):
        for result in results:
            assert not isinstance(result, str), result
        losses, weights = ranks.reference(
            make(), optimizer, BATCHES, data, loss_fn, plan.microbatches,
            version=lambda _, batch: max(batch - 1, 0), **options,
        )  # fmt: skip
        found = [result[number] for result in results]
        whole = _together(found)
        for name, tensor in weights.items():
            worst = (whole[name] - tensor).abs().max().item()
            assert worst <= 1e-12, f"{plan.stage_replicas} {options}: {name} is off by {worst}"
        last = [told for told, _ in found[-plan.stages[-1].replicas :]]
        mean = torch.tensor(last).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses), atol=1e-6, rtol=1e-6)


def test_2bw_averages_over_replicas_of_stages_once_a_batch():
    plan = _plan((2, 1), "2bw", 4)
    cases = [("adamw", plan, (2,), {"clip": 0.3}), ("momentum", _plan((1, 2), "2bw", 4), (), {})]
    results = ranks.run(_train, 3, cases)
    _check_2bw(cases, results, ranks.chain, ranks.numbers, nn.functional.mse_loss)


@pytest.mark.slow
def test_2bw_with_replicas_takes_smaller_batches():
    """Of one sample too, where a replica gets none; as a pipeline without replicas does."""
    rest = ranks.chain, ranks.numbers, nn.functional.mse_loss, (8, 5, 2, 1, 8)
    found = ranks.run(_train, 3, [("adamw", _plan((2, 1), "2bw", 4), (), {})], *rest)
    plain = ranks.run(_train, 2, [("adamw", ranks.plan(8, 2, "2bw", 4), (), {})], *rest)
    whole, wanted = (_together([result[0] for result in results]) for results in (found, plain))
    for name, tensor in wanted.items():
        torch.testing.assert_close(whole[name], tensor, atol=1e-12, rtol=0.0)
    assert found[2][0][0] == pytest.approx(plain[1][0][0], abs=1e-6)


@pytest.mark.slow
def test_2bw_with_replicas_ties_weights():
    options = {"blocks": 5, "inputs": TOKENS}
    cases = [
        ("adamw", _plan((2, 1), "2bw", 4, **options), (), {"clip": 0.3}),
        ("sgd", _plan((1, 2), "2bw", 6, **options), (1,), {"clip": 0.1}),
    ]
    results = ranks.run(_train, 3, cases, ranks.tied, ranks.words, ranks.entropy)
    _check_2bw(cases, results, ranks.tied, ranks.words, ranks.entropy)


def _loader():
    torch.manual_seed(3)
    samples = TensorDataset(*(torch.randn(40, 6, dtype=torch.float64) for _ in range(2)))
    return DataLoader(samples, batch_size=8, shuffle=True)


def _resumed(rank, plan, folder, options):
    def runner(seed):
        torch.manual_seed(seed)
        layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))]
        model = nn.Sequential(*layers).double()
        stepping = ranks.OPTIMIZERS["adamw"](model.parameters())
        return Runner(model, plan, optimizer=stepping, loss_fn=nn.functional.mse_loss, **options)

    loader = _loader()

    def go(runner, saves):
        losses = []
        for number, batch in enumerate(runner.read(loader if runner.reads else None)):
            losses.append(runner.step(*batch))
            if saves and number == 1:
                runner.save(folder)
        again = runner.evaluate(*(ranks.numbers(9, 8) if runner.reads else ()))
        losses = [None if loss is None else loss.item() for loss in [*losses, again]]
        weights = runner.state_dict()
        runner.close()
        return losses, weights

    first = runner(0)
    torch.manual_seed(rank)
    losses, weights = go(first, saves=True)
    second = runner(1)
    assert second.load(folder) == 2
    resumed, same = go(second, saves=False)
    assert resumed == losses[2:]
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    return losses


@pytest.mark.parametrize(
    ("schedule", "microbatches", "options"),
    [
        ("pipedream", 2, {"vertical_sync": True}),
        pytest.param("pipedream", 2, {}, marks=pytest.mark.slow),
        pytest.param("2bw", 4, {"correction": True, "clip": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_a_resume_with_replicas_goes_on_to_the_bit(schedule, microbatches, options, tmp_path):
    plan = dataclasses.replace(_plan((2, 1), schedule, microbatches, blocks=12), microbatch=8 // microbatches)
    for losses in ranks.run(_resumed, 3, plan, tmp_path, options):
        assert not isinstance(losses, str), losses


def _killed(rank, schedule, microbatches):
    """The second replica of the first stage dies in its second batch."""
    model = ranks.chain()
    calls = []

    def die(*_):
        calls.append(1)
        if rank == 1 and len(calls) > 3:
            os.kill(os.getpid(), signal.SIGKILL)

    model[0].register_forward_pre_hook(die)
    runner = Runner(
        model,
        _plan((2, 1), schedule, microbatches),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.functional.mse_loss,
        patience=6.0,
    )
    begun = time.monotonic()
    try:
        for batch in range(8):
            begun = time.monotonic()
            runner.step(*(ranks.numbers(batch, 2 * microbatches) if rank == 0 else ()))
    except Exception as error:  # noqa: BLE001
        return str(error), time.monotonic() - begun
    return "nothing happened"


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("pipedream", 2), pytest.param("2bw", 4, marks=pytest.mark.slow)]
)
def test_others_name_a_replica_that_is_killed(schedule, microbatches):
    processes, results = ranks.start(_killed, 3, schedule, microbatches)
    for result in ranks.collect(processes, results, 2).values():
        assert isinstance(result, tuple), result
        message, seconds = result
        assert message.startswith("rank 1 (stage 0, replica 1) "), message
        assert seconds < 30.0
    for process in processes:
        process.join(30.0)


def test_replicas_must_share_a_batch_evenly():
    for plan, told in [
        (_plan((2, 1), microbatches=3), "Give it 2 .2 is the least that .2, 1. replicas share evenly"),
        (_plan((2, 1), "2bw", 5), "5 microbatches .* cannot be shared evenly"),
        (_plan((2, 1), "1f1b", 4), "with 1f1b all have as many"),
        (dataclasses.replace(_plan((2, 1)), replicas=2), "2 pipelines and .2, 1. replicas of stages"),
        (dataclasses.replace(_plan((2, 1)), ranks=4), "there are 4 ranks"),
    ]:
        with pytest.raises(OptionError, match=told):
            schedule_of(plan)
    with pytest.raises(OptionError, match="vertical_sync=True is for pipedream"):
        schedule_of(ranks.plan(8, 2, "2bw", 4), vertical_sync=True)
