"""Replicas that keep a part of the weights each train as those that keep all, and gather as planned."""

import dataclasses
import os
import signal
import time

import pytest
import torch
from torch import nn

from squeezebox import OptionError
from squeezebox.pipeline import Runner, schedule_of
from squeezebox.pipeline._setup import check_shards
from squeezebox.pipeline._shards import check_elements, steps_elements
from squeezebox.pipeline._weights import sizes
from squeezebox.schedules import sharing
from squeezebox.schema import PipelineWarning
from tests.pipeline import ranks

BATCHES = 3


def _chain(seed=0, wide=7):
    """Eight blocks with weights of odd sizes, in two dtypes and with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(*(_Block(wide) for _ in range(8)))


class _Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, wide).double(), nn.BatchNorm1d(wide).double()
        self.back = nn.Linear(wide, 6)  # float32
        self.fixed = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        return self.back(self.norm(self.linear(x * self.fixed)).float()).double().tanh()


def _plan(ranks_=2, replicas=2, schedule="breadth-first", loops=2, **options):
    return ranks.plan(8, ranks_, schedule, 4, loops=loops, replicas=replicas, **options)


def _trained(rank, plan, optimizer, options, samples=8):
    """Losses, weights, what was gathered, and the bytes that this rank keeps, with and without shards."""
    found = []
    for shard in (False, True):
        model = _chain()
        stepping = ranks.OPTIMIZERS[optimizer](model.parameters())
        runner = Runner(
            model, plan, optimizer=stepping, loss_fn=nn.functional.mse_loss, shard=shard, **options
        )
        losses = []
        for batch in range(BATCHES):
            # One replica may have fewer microbatches than the other.
            count = samples - 2 * runner.replica if batch == 1 else 8
            given = ranks.numbers(batch * plan.replicas + runner.replica, count)
            losses.append(runner.step(*given))
        told = runner.sharing()
        losses.append(runner.evaluate(*ranks.numbers(9 + runner.replica, 8)))
        state = sum(each.nbytes for own in runner.optimizer.state.values() for each in own.values())
        found.append(([float(each) for each in losses if each is not None], runner.state_dict(), told,
                      runner.weights_bytes, state))  # fmt: skip
        runner.close()
    return found


def _check(plan, results, tolerance=0.0):
    schedule = schedule_of(plan)
    for number, result in enumerate(results):
        assert not isinstance(result, str), result
        (losses, whole, none, whole_bytes, whole_state), (same, parted, told, bytes_, state) = result
        assert none is None
        assert whole.keys() == parted.keys()
        for name, tensor in whole.items():
            assert (tensor - parted[name]).abs().max() <= tolerance, name
        assert losses == pytest.approx(same, abs=tolerance)
        # An equal part of weights and state, but for what fills parts up.
        assert abs(plan.replicas * bytes_ - whole_bytes) <= 64 * plan.replicas * 2 * len(plan.stages)
        assert state <= whole_state / plan.replicas + 1000
        parts = [_other_bytes(plan, stage) for stage in range(len(plan.stages))]
        planned = sharing(schedule, number % plan.ranks, parts)
        each = dataclasses.asdict(planned)
        assert dataclasses.asdict(told) == {name: count * BATCHES for name, count in each.items()}


def _other_bytes(plan, stage):
    """Bytes of a stage's parts that one replica does not keep."""
    own = plan.stages[stage]
    trained = [each for each in _chain()[own.first : own.end].parameters() if each.requires_grad]
    whole = sum(size * dtype.itemsize for dtype, size in sizes(trained, plan.replicas).items())
    return (plan.replicas - 1) * whole // plan.replicas


def test_shards_equal_whole_replicas_to_the_bit():
    plan = _plan()
    assert sharing(schedule_of(plan), 0, [1] * 4).gathers == 3
    _check(plan, ranks.run(_trained, 4, plan, "adamw", {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "optimizer", "options", "tolerance"),
    [
        (_plan(policy="recompute"), "momentum", {}, 0.0),
        (_plan(schedule="interleaved-1f1b"), "adamw", {}, 1e-6),  # gradients are scattered in parts
        (_plan(schedule="zb-h1", loops=1), "adamw", {}, 0.0),
        (_plan(1, 2), "sgd", {}, 0.0),
        (_plan(1, 3, loops=4), "adamw", {}, 1e-5),  # sums of three float32, in another order
        (_plan(2, 2), "adamw", {"clip": 0.1}, 1e-6),  # the norm is summed up in another order
    ],
)
def test_other_plans_are_sharded(plan, optimizer, options, tolerance):
    _check(plan, ranks.run(_trained, plan.ranks * plan.replicas, plan, optimizer, options), tolerance)


def _moved(rank, plan, folder):
    """From shards to shards, to whole replicas and back again: all go on alike."""

    def runner(shard, seed):
        model = _chain(seed)
        stepping = ranks.OPTIMIZERS["adamw"](model.parameters())
        return Runner(model, plan, optimizer=stepping, loss_fn=nn.functional.mse_loss, shard=shard)

    def go(own, first, end):
        for batch in range(first, end):
            own.step(*ranks.numbers(batch * plan.replicas + own.replica, 8))

    first = runner(shard=True, seed=0)
    go(first, 0, 2)
    first.save(folder)
    go(first, 2, 4)
    weights = first.state_dict()
    first.close()
    differing = []
    for shard, where in ((True, folder), (False, folder), (True, f"{folder}-whole")):
        again = runner(shard, seed=1)
        assert again.load(where) == 2
        if not shard:
            again.save(f"{folder}-whole")
        go(again, 2, 4)
        found = again.state_dict()
        again.close()
        differing += [(shard, name) for name, each in weights.items() if not torch.equal(each, found[name])]
    return differing, weights


def _alone(rank, folder):
    """A process by itself goes on from shards, with the batches of both replicas."""
    model = _chain(2)
    stepping = ranks.OPTIMIZERS["adamw"](model.parameters())
    plan = ranks.plan(8, 1, "gpipe", 8)
    runner = Runner(model, plan, optimizer=stepping, loss_fn=nn.functional.mse_loss)
    with pytest.warns(PipelineWarning, match="random states"):
        assert runner.load(folder) == 2
    for batch in (2, 3):
        both = [ranks.numbers(2 * batch + replica, 8) for replica in (0, 1)]
        runner.step(*map(torch.cat, zip(*both, strict=True)))
    found = runner.state_dict()
    runner.close()
    return {name: found[name] for name, _ in model.named_parameters()}


def test_checkpoints_of_shards_move(tmp_path):
    results = ranks.run(_moved, 4, _plan(), tmp_path / "shards")
    assert [differing for differing, _ in results] == [[]] * 4
    weights = {name: each for _, own in results for name, each in own.items()}
    (alone,) = ranks.run(_alone, 1, tmp_path / "shards")
    for name, each in alone.items():
        assert (each - weights[name]).abs().max() < 1e-6, name


def _killed(rank, plan):
    model, calls = _chain(), []

    def die(*_):
        calls.append(1)
        if rank == 3 and len(calls) > 5:
            os.kill(os.getpid(), signal.SIGKILL)

    model[2].register_forward_pre_hook(die)
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": nn.functional.mse_loss, "shard": True, "patience": 6.0}
    runner = Runner(model, plan, optimizer=stepping, **options)
    begun = time.monotonic()
    try:
        for batch in range(4):
            begun = time.monotonic()
            runner.step(*ranks.numbers(batch, 8))
    except Exception as error:  # noqa: BLE001
        return str(error), time.monotonic() - begun
    return "nothing happened"


@pytest.mark.slow
def test_others_name_a_rank_that_is_killed():
    processes, results = ranks.start(_killed, 4, _plan())
    for result in ranks.collect(processes, results, 3).values():
        assert isinstance(result, tuple), result
        message, seconds = result
        assert message.startswith("rank 3 (stages 1, 3 of replica 1) "), message
        assert seconds < 30.0
    for process in processes:
        process.join(30.0)


def test_what_cannot_be_shared_is_refused():
    for plan, is_tied, engine, told in [
        (_plan(replicas=1), False, "own", "the plan has 1, by breadth-first"),
        (ranks.plan(8, 2, "2bw", 4, replicas=2), False, "own", "that flush, .* by 2bw"),
        (_plan(), True, "own", "weights are tied over stages"),
        (_plan(loops=1, schedule="1f1b"), False, "torch", "engine='torch' makes the passes"),
    ]:
        with pytest.raises(OptionError, match=told):
            check_shards(plan, engine, is_tied)


class _Scaled(torch.optim.Optimizer):
    """Steps by the norm of a whole parameter, as Lamb does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


def test_only_optimizers_known_to_step_elements_are_sharded_by_a_plan():
    known, other, torchs = (
        make([torch.zeros(2).requires_grad_()])
        for make in (torch.optim.AdamW, _Scaled, torch.optim.Adafactor)
    )
    assert steps_elements(known) and not steps_elements(other)
    check_elements(known, is_asked=False)
    check_elements(other, is_asked=True)
    with pytest.raises(OptionError, match="^_Scaled may need whole parameters.*If _Scaled does so, give"):
        Runner(ranks.chain(), dataclasses.replace(_plan(), shard=True), optimizer=other, loss_fn=None)
    with pytest.raises(OptionError, match="^Adafactor may need whole parameters.*or give shard=False.$"):
        check_elements(torchs, is_asked=True)
