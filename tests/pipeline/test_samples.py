"""Batches of fewer samples than the plan's: microbatches that are smaller or missing, and how they count."""

import json

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.pipeline import Runner, cut
from squeezebox.schema import InputForm, Link, PipelinePlan
from tests.pipeline import ranks

SIZES = 8, 5, 8, 2, 7, 1
TOKENS = (InputForm(shape=(5,), dtype="int64"),)


def _data(kind, batch, samples):
    return ranks.numbers(batch, samples) if kind == "chain" else ranks.words(batch, samples)


def _loss(kind):
    return nn.functional.mse_loss if kind == "chain" else ranks.entropy


def _trained(rank, cases):
    found = []
    for kind, plan, options in cases:
        model = ranks.chain() if kind == "chain" else ranks.tied()
        optimizer = ranks.OPTIMIZERS["adamw"](model.parameters())
        runner = Runner(model, plan, optimizer=optimizer, loss_fn=_loss(kind), **options)
        losses = []
        for batch, size in enumerate(SIZES):
            x, y = _data(kind, batch, min(size, 2 * plan.microbatches))
            losses.append(runner.step(x, y))
        losses.append(runner.evaluate(*_data(kind, 9, 3)))
        found.append((losses, runner.state_dict()))
        runner.close()
    return found


def _alone(kind, plan, delay):
    """The same in one process, each batch's gradient at the weights of ``delay`` batches before."""
    model, loss_fn = (ranks.chain() if kind == "chain" else ranks.tied()), _loss(kind)
    names = dict(model.named_parameters())
    history = [{name: each.detach().clone() for name, each in names.items()}]
    newest = {name: nn.Parameter(each.clone()) for name, each in history[0].items()}
    optimizer, losses = ranks.OPTIMIZERS["adamw"](newest.values()), []

    def run(x, y, backward):
        total = 0.0
        for a, b in zip(x.split(2), y.split(2), strict=True):
            loss = loss_fn(model(a), b) / (len(x) / len(a))
            if backward:
                loss.backward()
            total += loss.detach()
        return total

    for batch, size in enumerate(SIZES):
        for name, parameter in names.items():
            parameter.data, parameter.grad = history[max(batch - delay, 0)][name].clone(), None
        losses.append(run(*_data(kind, batch, min(size, 2 * plan.microbatches)), backward=True))
        for name, parameter in newest.items():
            parameter.grad = names[name].grad
        optimizer.step()
        history.append({name: each.detach().clone() for name, each in newest.items()})
    for name, parameter in names.items():
        parameter.data = history[-1][name]
    with torch.no_grad():
        losses.append(run(*_data(kind, 9, min(3, 2 * plan.microbatches)), backward=False))
    return losses, history[-1]


def _check(cases):
    results = ranks.run(_trained, 2, cases)
    for number, (kind, plan, _) in enumerate(cases):
        assert not isinstance(results[0], str), results[0]
        assert not isinstance(results[1], str), results[1]
        losses, weights = _alone(kind, plan, 1 if plan.schedule == "2bw" else 0)
        found = results[0][number][1] | results[1][number][1]
        exact = 0.0 if kind == "chain" else 1e-12  # tied gradients are added up in another order
        for name, each in weights.items():
            assert (found[name] - each).abs().max() <= exact, f"{plan.schedule}: {name}"
        torch.testing.assert_close(
            torch.stack(results[1][number][0]), torch.stack(losses), rtol=1e-12, atol=0, msg=plan.schedule
        )


def test_a_smaller_batch_counts_by_its_samples():
    names = ("1f1b", "2bw", "zb-h1")
    loops = ranks.plan(8, 2, "interleaved-1f1b", 4, loops=2)
    _check([*(("chain", ranks.plan(8, 2, name, 4), {}) for name in names), ("chain", loops, {})])


@pytest.mark.slow
def test_a_graph_is_traced_again_for_fewer_samples():
    plans = [ranks.plan(5, 2, name, 4, inputs=TOKENS) for name in ("1f1b", "2bw")]
    recomputed = ranks.plan(5, 2, "1f1b", 4, inputs=TOKENS, policy="recompute")
    _check([("tied", plan, {}) for plan in (*plans, recomputed)])


def _replicated(rank, plan):
    model = ranks.chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    x, y = ranks.numbers(0, 13)
    own = slice(0, 5) if rank == 0 else slice(5, 13)
    loss = runner.step(x[own], y[own])
    weights = runner.state_dict()
    runner.close()
    return loss, weights


def test_replicas_of_different_numbers_of_samples_give_the_mean_of_all():
    results = ranks.run(_replicated, 2, ranks.plan(8, 1, "1f1b", 4, replicas=2))
    model = ranks.chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = ranks.numbers(0, 13)
    parts = [nn.functional.mse_loss(model(x[own]), y[own]) for own in (slice(0, 5), slice(5, 13))]
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    for (loss, weights), part in zip(results, parts, strict=True):
        torch.testing.assert_close(loss, part.detach(), rtol=1e-12, atol=0)
        for name, each in model.state_dict().items():
            torch.testing.assert_close(weights[name], each, rtol=1e-12, atol=1e-15)


class _Named(nn.Module):
    """Takes keywords, and returns several outputs by name."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, *, mask=None, scale=None):
        hidden = self.first(x).tanh() * mask
        return {"output": self.last(self.middle(hidden).tanh()) * scale, "hidden": hidden}


def _named():
    torch.manual_seed(0)
    return _Named().double()


def _of_both(output, target):
    return nn.functional.mse_loss(output["output"], target["y"]) + output["hidden"].square().mean()


def _named_batch(size):
    x, y = ranks.numbers(0, size)
    return {"scale": y[:, :1] + 2.0, "x": x, "mask": (y > 0).double()}, {"y": y}


def _keywords(rank, plan):
    model = _named()
    runner = Runner(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=_of_both)
    losses = [runner.step(*_named_batch(size)) for size in (8, 5)]
    try:
        runner.step(*ranks.numbers(0, 8))
    except Exception as error:  # noqa: BLE001
        losses.append(f"{type(error).__name__}: {error}")
    weights = runner.state_dict()
    runner.close()
    return losses, weights


def test_inputs_by_name_and_several_outputs():
    plan = squeezebox.plan_pipeline(
        _named(),
        sample=_named_batch(8),
        loss_fn=_of_both,
        ranks=2,
        depths=[2],
        schedules=["1f1b"],
        microbatches=[2],
        memory_bytes=2**30,
        link=Link(bytes_per_second=1e9),
    )[0]
    assert [form.name for form in plan.inputs] == ["scale", "x", "mask"]
    first, last = ranks.run(_keywords, 2, PipelinePlan.from_dict(json.loads(json.dumps(plan.to_dict()))))
    model = _named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size, loss in zip((8, 5), last[0], strict=False):
        inputs, target = _named_batch(size)
        optimizer.zero_grad()
        wanted = _of_both(model(**inputs), target)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
    for name, each in model.state_dict().items():
        torch.testing.assert_close((first[1] | last[1])[name], each, rtol=1e-12, atol=1e-15)
    for found in (first, last):
        assert "OptionError: inputs come by place, and the plan has them by the names" in found[0][2]


class _Shorter(nn.Module):
    """Leaves its last block out in evaluation mode and for a single sample."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks if self.training and len(x) > 1 else self.blocks[:3]:
            x = block(x)
        return x


def _elsewhere(rank, engine):
    torch.manual_seed(0)
    model, refused = _Shorter().double(), []
    plan = ranks.plan(len(cut(model, (ranks.numbers(0, 2)[0],))), 2, "1f1b", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, engine=engine)
    for act, samples in ((runner.step, 8), (runner.evaluate, 8), (runner.step, 5), (runner.step, 8)):
        try:
            act(*ranks.numbers(len(refused), samples))
        except Exception as error:  # noqa: BLE001
            refused.append(f"{type(error).__name__}: {error}")
    weights = runner.state_dict()
    runner.close()
    return refused, weights


@pytest.mark.parametrize("engine", ["own", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_graph_that_is_cut_elsewhere_is_refused_by_all_ranks_and_training_goes_on(engine):
    results = ranks.run(_elsewhere, 2, engine)
    for refused, _ in results:
        assert len(refused) == 2, refused
        assert refused[0].startswith("UnsupportedModelError: for evaluation mode the model's graph is cut")
        if engine == "own":
            assert refused[1].startswith("UnsupportedModelError: for microbatches of 1 the model's graph is")
    assert len(results[0][1] | results[1][1]) == 8
