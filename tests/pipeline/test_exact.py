"""What ranks train together is what one process would, bit by bit."""

import dataclasses

import pytest
import torch
from torch import nn

from squeezebox.pipeline import Runner, schedule_of
from squeezebox.pipeline._setup import check_optimizer
from squeezebox.pipeline._training import Forwards
from squeezebox.pipeline._updates import Exchange
from squeezebox.pipeline._weights import Flat, Weights
from squeezebox.schedules import Action, Kind, Schedule, placement
from squeezebox.schema import InputForm, OptionError
from tests.pipeline import ranks

BATCHES = 7
TOKENS = (InputForm(shape=(5,), dtype="int64"),)


def _train(rank, model, optimizer, plan, data, loss_fn, drains=(), **options):
    """Losses and this rank's weights by name, after seven batches."""
    runner = Runner(
        model, plan, optimizer=ranks.OPTIMIZERS[optimizer](model.parameters()), loss_fn=loss_fn, **options
    )
    losses = []
    for batch in range(BATCHES):
        number = batch * plan.replicas + rank // plan.ranks
        losses.append(runner.step(*data(number, 2 * plan.microbatches)))
        if batch in drains:
            runner.drain()
    weights = runner.state_dict()
    runner.close()
    return [None if loss is None else loss.item() for loss in losses], weights


def _chains(rank, cases):
    return [
        _train(rank, ranks.chain(), optimizer, plan, ranks.numbers, nn.functional.mse_loss, drains, **options)
        for optimizer, plan, drains, options in cases
    ]


def _check(cases, results, version, tolerance=0.0, make=ranks.chain, data=ranks.numbers, loss_fn=None):
    for number, (optimizer, plan, _, options) in enumerate(cases):
        for result in results:
            assert not isinstance(result, str), result
        known = {key: options[key] for key in ("clip", "correction") if key in options}
        losses, weights = ranks.reference(
            make(),
            optimizer,
            BATCHES,
            data,
            loss_fn or nn.functional.mse_loss,
            plan.microbatches,
            version=lambda name, batch, plan=plan, options=options: version(plan, name, batch, options),
            replicas=plan.replicas,
            **known,
        )
        what = f"{plan.schedule} {plan.ranks} {optimizer} {options}"
        found = [result[number] for result in results]
        last = placement(plan.schedule, plan.ranks, len(plan.stages))[-1]
        told = [each for each in found[last][0]]
        torch.testing.assert_close(torch.tensor(told), torch.tensor(losses), atol=1e-6, rtol=1e-6, msg=what)
        together = {}
        for _, own in found:
            together |= own
        assert together.keys() >= weights.keys(), what
        for name, tensor in weights.items():
            worst = (together[name] - tensor).abs().max().item()
            assert worst <= tolerance, f"{what}: {name} is off by {worst}"


def _delayed(plan, name, batch, options):
    warmup = options.get("warmup", 0)
    if batch < warmup:
        return batch
    if plan.schedule == "2bw":
        return max(batch - 1, warmup)
    if plan.schedule == "pipedream":
        block = int(name.split(".")[0])
        stage = next(each for each, stage in enumerate(plan.stages) if stage.first <= block < stage.end)
        return max(batch - (plan.ranks - 1 - stage), warmup)
    return batch


def _cases(world):
    synchronous = [
        ("adamw", ranks.plan(8, world, "gpipe", 4), (), {}),
        ("momentum", ranks.plan(8, world, "1f1b", 4), (), {}),
        ("adamw", ranks.plan(8, world, "1f1b", 4, policy="recompute"), (), {}),
        ("adamw", ranks.plan(8, world, "1f1b", 2), (), {}),
        ("adamw", ranks.plan(8, world, "zb-h1", 4), (), {}),
        ("adamw", ranks.plan(8, world, "zb-h1", 4, policy="recompute"), (), {}),
        ("adamw", ranks.plan(8, world, "zb-h2", 6), (), {}),
        ("adamw", ranks.plan(8, world, "zb-v", 6, loops=2), (), {}),
        ("adamw", ranks.plan(8, world, "zb-v", 2, loops=2, policy="recompute"), (), {}),
        ("adamw", ranks.plan(8, world, "breadth-first", 4, loops=2), (), {}),
        ("adamw", ranks.plan(8, world, "interleaved-1f1b", 4, loops=2), (), {}),
    ]
    delayed = [
        (name, ranks.plan(8, world, schedule, microbatches, policy=policy), drains, options)
        for schedule, microbatches in (("2bw", 4), ("pipedream", 1))
        for name, policy, drains, options in (
            ("sgd", "keep", (), {}),
            ("momentum", "keep", (), {}),
            ("adamw", "recompute", (), {}),
            ("adamw", "keep", (2, 4), {}),
            ("adamw", "keep", (), {"warmup": 2}),
            ("adamw", "keep", (1,), {"correction": True}),
        )
        if schedule == "2bw" or not options.get("correction")
    ]
    return synchronous + [("adamw", ranks.plan(8, world, "2bw", 6), (), {}), *delayed]


def test_two_ranks_equal_one_process_to_the_bit():
    cases = _cases(2)
    exact = [case for case in cases if not case[3].get("correction")]
    _check(exact, ranks.run(_chains, 2, exact), _delayed)


def test_four_ranks_equal_one_process_to_the_bit():
    exact = [case for case in _cases(4) if not case[3].get("correction")]
    _check(exact, ranks.run(_chains, 4, exact), _delayed)


def _unlike(plan, processes):
    return dataclasses.replace(plan, devices=("a", "b", "c")[: plan.ranks], processes=processes)


@pytest.mark.parametrize("processes", [(1, 0), pytest.param((1, 2, 0), marks=pytest.mark.slow)])
def test_ranks_in_processes_of_other_numbers_equal_one_process(processes):
    """As a plan over unequal devices has them: losses are where the last stage is."""
    world = len(processes)
    cases = [
        ("adamw", _unlike(ranks.plan(8, world, schedule, 6), processes), drains, options)
        for schedule, drains, options in (
            ("1f1b", (), {}),
            ("2bw", (2,), {}),
            ("1f1b", (), {"engine": "torch"}),
            ("zb-h1", (), {"engine": "torch"}),
        )
    ]
    results = ranks.run(_chains, world, cases)
    assert not [result for result in results if isinstance(result, str)], results
    _check(cases, [results[process] for process in processes], _delayed)


def test_correction_follows_its_formula():
    corrected = [case for case in _cases(2) if case[3].get("correction") and case[1].schedule == "2bw"]
    _check(corrected, ranks.run(_chains, 2, corrected), _delayed, tolerance=1e-12)


def _last_first(world, microbatches):
    """All forwards, then the backwards from the last microbatch to the first; orders only, which end."""

    def order(rank):
        forwards = [
            Action(kind=Kind.FORWARD, stage=rank, microbatch=number) for number in range(microbatches)
        ]
        backwards = [dataclasses.replace(each, kind=Kind.BACKWARD) for each in reversed(forwards)]
        return (*forwards, *backwards, Action(kind=Kind.UPDATE, stage=rank, microbatch=0))

    orders = tuple(order(rank) for rank in range(world))
    return Schedule(
        name="last-first", placement=tuple(range(world)), microbatches=microbatches, batches=1, orders=orders
    )


def test_a_schedule_of_ones_own_is_carried_out():
    cases = [("adamw", ranks.plan(8, 2, "gpipe", 4), (2,), {"schedule": _last_first(2, 4)})]
    _check(cases, ranks.run(_chains, 2, cases), _delayed, tolerance=1e-12)  # added up in another order


@pytest.mark.parametrize("named", ["1f1b", "2bw"])
def test_a_schedule_of_ones_own_goes_with_the_plan(named):
    plan, own = ranks.plan(8, 2, named, 4), _last_first(2, 6 if named == "1f1b" else 4)
    with pytest.raises(OptionError, match=f"'last-first' is for 2 ranks, 2 stages and .*by {named}"):
        schedule_of(plan, own=own)


def _tied(rank, cases):
    return [
        _train(rank, ranks.tied(), optimizer, plan, ranks.words, ranks.entropy, drains, **options)
        for optimizer, plan, drains, options in cases
    ]


def test_clipping_and_tied_weights():
    plan = ranks.plan(5, 2, "2bw", 4, inputs=TOKENS)
    flushing = ranks.plan(5, 2, "1f1b", 4, inputs=TOKENS)
    cases = [
        ("adamw", flushing, (), {}),
        ("adamw", plan, (), {}),
        ("adamw", plan, (3,), {"clip": 0.3}),
        ("sgd", plan, (), {"clip": 0.1}),
    ]
    _check(cases, ranks.run(_tied, 2, cases), _delayed, 1e-12, ranks.tied, ranks.words, ranks.entropy)


@pytest.mark.slow
def test_two_pipelines_of_two():
    cases = [
        ("adamw", ranks.plan(5, 2, schedule, 4, inputs=TOKENS, replicas=2), (), {"clip": 0.3})
        for schedule in ("1f1b", "2bw")
    ]
    _check(cases, ranks.run(_tied, 4, cases), _delayed, 1e-12, ranks.tied, ranks.words, ranks.entropy)


def test_a_schedule_of_ones_own_refuses_what_it_would_not_read():
    plan = ranks.plan(8, 2, "gpipe", 4)
    with pytest.raises(OptionError, match="^warmup=3 and vertical_sync=False are for the plan's schedule"):
        schedule_of(plan, 3, _last_first(2, 4))


@pytest.mark.parametrize("value", [1e20, 3.0, 1e-3, float("inf"), float("nan")])
def test_a_norm_beyond_float32_clips(value):
    wanted = [
        torch.tensor([value, 1.0], dtype=torch.float64).requires_grad_(),
        torch.ones(3).requires_grad_(),
    ]
    flat = Flat([torch.zeros(2), torch.zeros(3)])
    for view, each in zip(flat.views, wanted, strict=True):
        each.grad = each.detach().clone()
        view.copy_(each.grad)
    exchange = Exchange(replicas=None, pipeline=None, ties=(), clip=1.0, skip_overflow=False)
    norm, steps = exchange.run(flat)
    total = nn.utils.clip_grad_norm_(wanted, 1.0)
    assert steps
    torch.testing.assert_close(norm, total.item(), equal_nan=True, rtol=1e-6, atol=0)
    for view, each in zip(flat.views, wanted, strict=True):
        torch.testing.assert_close(view, each.grad.float(), equal_nan=True, rtol=1e-6, atol=0)


def test_autocast_casts_the_version_that_is_read():
    linear, x = nn.Linear(4, 4), torch.ones(1, 4)
    names = {id(each): name for name, each in linear.named_parameters()}
    weights = Weights([*linear.parameters()], names, torch.Tensor.detach)

    def step():
        for own in weights.owned:
            own.data += 1.0

    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = linear(x)
        weights.update(Flat(weights.parameters), step, oldest=0)
        weights.select(1)
        second = linear(x)
        weights.select(0)
        assert torch.equal(linear(x), first) and not torch.equal(second, first)
        weights.select(1)
        assert torch.equal(linear(x), second)
        weights.update(Flat(weights.parameters), step, oldest=2)  # in its place
        assert not torch.equal(linear(x), second)


def test_weights_begin_where_torch_s_own_would():
    parameters = [
        torch.empty(size, dtype=dtype) for size in (5, 33, 1) for dtype in (torch.float32, torch.bfloat16)
    ]
    flat = Flat(parameters, multiple=3)
    assert all(view.data_ptr() % 64 == 0 for view in flat.views)
    assert all(part.nbytes % (3 * 64) == 0 for part in flat.parts)


def test_optimizers_that_a_runner_cannot_step_are_refused():
    for make in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(OptionError, match=f"^{make.__name__} needs sparse gradients or a closure"):
            check_optimizer(make([torch.zeros(2).requires_grad_()]))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.0, "returned float: it must be one number"),
        (torch.ones(2).requires_grad_(), r"returned a tensor of shape \(2,\)"),
        (torch.ones(()), "no gradient goes through"),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    forwards = Forwards(None, None, {}, None, None, lambda output: loss, 2, None)
    with pytest.raises(OptionError, match=message):
        forwards.loss_of(0, None, torch.ones(2))
