"""method="auto": what is sent together and how is chosen by what it takes, and then followed."""

import copy
import io
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox import gradients
from squeezebox.gradients import ExchangePlan, SentGroup
from squeezebox.schema import Link, OptionError
from tests.gradients import ranks

AFTER = 6  # passes after the choice is made


def _chosen(rank, speed, latency):
    """Trained over a link: the plan, the weights, what went and what is owed."""
    group = gradients.link_group(Link(bytes_per_second=speed, latency_seconds=latency))
    net = ranks.model(width=32)
    ddp = nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.004)
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05)
    noises, ratios = [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    left = AFTER
    for step in itertools.count():
        x, y = ranks.batch(rank, step, width=32, samples=16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        noises.append(squeezed.last.noise)
        ratios.append(squeezed.last.ratio)
        left -= squeezed.plan is not None
        if not left:
            break
    found = squeezed.plan, ranks.weights(net), noises, ratios
    squeezed.close()
    return found


def test_over_a_slow_link_it_packs_and_keeps_to_the_noise():
    (plan, weights, noises, ratios), (other, others, _, _) = ranks.run(_chosen, 2, 5e5, 0.0)
    assert plan == other and torch.equal(weights, others)
    assert plan.noise <= 0.05
    assert 0.0 < sorted(noises[-5:])[2] < 1.5 * 0.05  # where speeds vary, a way may be tried again meanwhile
    assert sorted(ratios[-5:])[2] > 3.0
    assert ratios[:4] == [1.0] * 4


@pytest.mark.slow
def test_over_a_fast_link_it_sends_whole():
    results = ranks.run(_chosen, 2, 1e12, 0.02)
    assert {group.method for group in results[0][0].groups} <= {"plain", "fp16"}
    assert torch.equal(results[0][1], results[1][1])


def _plan(net, methods, *, follows_buckets=False):
    """Parameters in backward's order, as many groups as methods, each cut through DDP's buckets."""
    names = [name for name, _ in net.named_parameters()][::-1]
    cuts = [len(names) * each // len(methods) for each in range(len(methods) + 1)]
    levels = {"entropy": 0.5, "planes": 0.5, "top-k": 10.0}
    groups = tuple(
        SentGroup(names=tuple(names[a:b]), method=method, level=levels.get(method, 1.0))
        for a, b, method in zip(cuts, cuts[1:], methods, strict=False)
    )
    return ExchangePlan(groups=groups, seconds=1.0, noise=0.05, follows_buckets=follows_buckets)


def _followed(rank, plans, options, steps):
    """What came under each plan in turn, what was owed at the end, and all gradients."""
    net, whole = ranks.model(), ranks.model()
    ddp = ranks.wrapped(net, **options)
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05)
    came = {name: torch.zeros_like(each).double() for name, each in net.named_parameters()}
    gone = {name: each.clone() for name, each in came.items()}
    for step in range(steps * len(plans)):
        if step % steps == 0:
            plan = replace(
                _plan(net, plans[step // steps]), follows_buckets=plans[step // steps] == ["plain"]
            )
            squeezed.load_state_dict(squeezed.state_dict() | {"plan": plan.to_dict(), "passes": step + 2})
        for model in (ddp, whole):
            model.zero_grad()
            if not ddp.static_graph:  # whose backward goes on only with all of them exchanged
                with ddp.no_sync():
                    _backward(model, rank, 2 * step)
            _backward(model, rank, 2 * step + 1)
        for (name, mean), own in zip(net.named_parameters(), whole.parameters(), strict=True):
            came[name] += mean.grad
            gone[name] += own.grad
    found = came, gone, squeezed.state_dict()["residuals"], squeezed.last
    squeezed.close()
    return found


def _backward(model, rank, step):
    x, y = ranks.batch(rank, step)
    nn.functional.cross_entropy(model(x), y).backward()


def _slow(rank):
    """Plain gradients over a slow link, another plan at hand: methods in force, gradients, the state."""
    group = gradients.link_group(Link(bytes_per_second=2e5, latency_seconds=1e-4))
    net = ranks.model(width=64)
    ddp = nn.parallel.DistributedDataParallel(net, process_group=group)
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05, balanced=True)
    codec = squeezebox.codecs.get("entropy")
    codec.unpack(codec.pack(torch.randn(5000), 0.1))  # its kernels load now
    plain = _plan(net, ["plain"])
    choices = [plain.to_dict(), replace(_plan(net, ["entropy"]), seconds=1.2).to_dict()]
    squeezed.load_state_dict(
        squeezed.state_dict() | {"plan": plain.to_dict(), "choices": choices, "passes": 2}
    )
    plans = []
    for step in range(20):
        x, y = ranks.batch(rank, step, width=64)
        nn.functional.cross_entropy(ddp(x), y).backward()
        plans.append(squeezed.plan.groups[0].method)
    found = plans, torch.cat([each.grad.flatten() for each in net.parameters()]), squeezed.state_dict()
    squeezed.close()
    return found


def test_over_a_slow_link_balanced_ranks_go_on_to_another_plan():
    (plans, total, state), (others, other, _) = ranks.run(_slow, 2)
    assert plans == others and torch.equal(total, other)
    assert plans[0] == "plain" and plans[-5:] == ["entropy"] * 5
    assert state["plan"] in state["choices"]


@pytest.mark.parametrize(
    ("world", "plans", "options"),
    [
        (2, [["plain", "entropy", "top-k"], ["planes", "plain"]], {}),
        (2, [["entropy"], ["plain"]], {"gradient_as_bucket_view": True}),
        pytest.param(3, [["planes", "entropy", "plain"]], {"static_graph": True}, marks=pytest.mark.slow),
        pytest.param(5, [["entropy", "plain"]], {}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_followed_and_nothing_is_lost(world, plans, options):
    results = ranks.run(_followed, world, plans, options, 4)
    assert all(isinstance(result, tuple) for result in results), results
    for name, mean in results[0][0].items():
        total = sum(gone[name] for _, gone, _, _ in results)
        owed = sum(res[name].view_as(total) for _, _, res, _ in results if name in res)
        assert (world * mean + owed - total).abs().max() <= 4e-6 * total.abs().max(), name
        assert all(torch.equal(came[name], mean) for came, *_ in results)
    if plans[-1] == ["plain"]:
        assert not results[0][2]  # all that was owed went
        assert results[0][3].ratio == 1.0


def _of_images(rank, format, methods):
    """Gradients of a convolutional network under a plan, and those of DDP alone."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, (1, 3)), nn.Flatten(), nn.Linear(8 * 6 * 4, 5)]
    plain = nn.Sequential(*layers).to(memory_format=format)
    net = copy.deepcopy(plain)
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05)
    squeezed.load_state_dict(squeezed.state_dict() | {"plan": _plan(net, methods).to_dict(), "passes": 2})
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank)).to(memory_format=format)
    for model in (ddp, ranks.wrapped(plain)):
        model(x).square().sum().backward()
    squeezed.close()
    return [(one.grad, other.grad) for one, other in zip(net.parameters(), plain.parameters(), strict=True)]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_any_memory_format_come_as_they_went(format):
    for pairs in ranks.run(_of_images, 2, format, ["plain", "plain", "plain"]):
        for found, wanted in pairs:
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


def _resumed(rank, methods, before, after):
    """Trained on, and resumed from the state on the way: weights of both."""
    net = ranks.model()
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05)
    squeezed.load_state_dict(squeezed.state_dict() | {"plan": _plan(net, methods).to_dict(), "passes": 2})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ranks.train(ddp, rank, before, optimizer)
    file = io.BytesIO()
    torch.save([net.state_dict(), squeezed.state_dict()], file)
    ranks.train(ddp, rank, after, optimizer, first=before)
    squeezed.close()
    other = ranks.model(seed=7)
    weights, state = torch.load(io.BytesIO(file.getvalue()))
    other.load_state_dict(weights)
    ddp = ranks.wrapped(other)
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05)
    squeezed.load_state_dict(state)
    ranks.train(ddp, rank, after, torch.optim.SGD(other.parameters(), lr=0.1), first=before)
    squeezed.close()
    return ranks.weights(net), ranks.weights(other)


def test_a_resumed_plan_goes_on_to_the_bit():
    for whole, resumed in ranks.run(_resumed, 2, ["plain", "entropy", "planes", "fp16"], 4, 3):
        assert torch.equal(whole, resumed)


def _large(rank):
    """Gradients beyond float16 under a plan that rounds to it."""
    net = ranks.model()
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, "auto")
    squeezed.load_state_dict(squeezed.state_dict() | {"plan": _plan(net, ["fp16"]).to_dict(), "passes": 2})
    x, y = ranks.batch(rank, 0)
    (1e7 * nn.functional.cross_entropy(ddp(x), y)).backward()
    found = all(torch.isfinite(each.grad).all() for each in net.parameters()), squeezed.last.whole
    with pytest.raises(OptionError, match="keeps to noise, got ratio=30"):
        squeezebox.compress_gradients(ddp, "auto", ratio=30)
    squeezed.close()
    return found


def test_what_no_half_holds_goes_whole():
    assert ranks.run(_large, 2) == [(True, 1)] * 2


def _changed(rank):
    """The level before and after the last pass under a plan, and that pass's noise."""
    net = ranks.model()
    ddp, plan = ranks.wrapped(net), _plan(net, ["entropy"])
    squeezed = squeezebox.compress_gradients(ddp, "auto", noise=0.05)
    squeezed.load_state_dict(squeezed.state_dict() | {"plan": plan.to_dict(), "passes": 2})
    ranks.train(ddp, rank, 6)
    before = squeezed.level
    squeezed._balanced = SimpleNamespace(plan=replace(plan, noise=5e-4), end_pass=lambda *_: None)
    ranks.train(ddp, rank, 1, first=6)
    squeezed.close()
    return before, squeezed.level, squeezed.last.noise


def test_where_plans_change_the_level_is_steered_by_the_noise_of_the_last_one():
    ((before, after, noise),) = ranks.run(_changed, 1)
    assert after == pytest.approx(before * min(max((0.05 / noise) ** 0.5, 0.5), 2.0))


def _endless(rank):
    """Measure exchanges of gradients that are never finite."""
    step = gradients.ExchangedStep(
        model=ranks.model(),
        inputs=ranks.batch(rank, 0)[0],
        target=None,
        loss_fn=lambda output, _: output.sum() * torch.inf,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with pytest.raises(OptionError, match="of 20 steps in a row are NaN or infinite"):
        gradients.measure_exchange(step)
    return True


def test_exchanges_of_gradients_that_are_never_finite_are_refused():
    assert ranks.run(_endless, 1) == [True]
