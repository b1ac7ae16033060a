"""Ways to use DistributedDataParallel: accumulation, unused parameters, uneven inputs, dtypes."""

import warnings

import pytest
import torch
from torch import nn

import squeezebox
from tests.gradients import ranks


def _finished(squeezed, *found):
    squeezed.close()
    return found


def _nan(rank, method, options):
    """NaN in rank 1's third gradient: what comes on all ranks, and what is owed before and after."""
    net = ranks.model()
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, method, **options)
    ranks.train(ddp, rank, 3)
    before = squeezed.state_dict()
    ddp.zero_grad()
    x, y = ranks.batch(rank, 3)
    loss = nn.functional.cross_entropy(ddp(x), y)
    (loss * torch.nan if rank == 1 else loss).backward()
    grads = torch.cat([each.grad.flatten() for each in net.parameters()])
    last, after = squeezed.last, squeezed.state_dict()
    ranks.train(ddp, rank, 1, first=4)
    return _finished(squeezed, before, after, bool(grads.isnan().all()), last, ranks.weights(net))


@pytest.mark.parametrize(
    ("method", "options"), [("entropy", {"ratio": 8.0}), ("top-k", {"ratio": 8.0}), ("powersgd", {})]
)
def test_all_ranks_treat_nan_alike(method, options):
    results = ranks.run(_nan, 2, method, options)
    for before, after, is_nan, last, weights in results:
        assert is_nan
        assert last.whole > 0 and last.noise == 0.0
        assert before["level"] == after["level"]
        assert all(torch.equal(each, after["residuals"][name]) for name, each in before["residuals"].items())
        assert torch.equal(weights, results[0][4])


class _Branches(nn.Module):
    """One of two layers has a part in the output, by a switch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))
        self.goes_left = True

    def forward(self, x):
        return (self.left if self.goes_left else self.right)(self.stem(x).tanh())


def _unused(rank, options, steps):
    """As ``_conserved`` of the exact tests, with parameters that no rank, or one, uses."""
    net, whole = _Branches(), _Branches()
    ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    squeezed = squeezebox.compress_gradients(ddp, **options)
    came = {name: torch.zeros_like(each).double() for name, each in net.named_parameters()}
    gone = {name: each.clone() for name, each in came.items()}
    for step in range(steps):
        goes_left = [True, rank == 0, False, rank == 1][step % 4]
        x, _ = ranks.batch(rank, step, width=8)
        for model, inner in ((ddp, net), (whole, whole)):
            model.zero_grad()
            inner.goes_left = goes_left
            model(x).square().mean().backward()
        for name, each in net.named_parameters():
            came[name] += 0.0 if each.grad is None else each.grad
        for name, each in whole.named_parameters():
            gone[name] += 0.0 if each.grad is None else each.grad
    return _finished(squeezed, came, gone, squeezed.state_dict()["residuals"])


@pytest.mark.parametrize(
    "options", [{"ratio": 12.0}, pytest.param({"method": "powersgd", "rank": 1}, marks=pytest.mark.slow)]
)
def test_what_is_owed_of_an_unused_parameter_waits(options):
    results = ranks.run(_unused, 2, options, 9)
    assert all(isinstance(result, tuple) for result in results), results
    for name, mean in results[0][0].items():
        total = sum(gone[name] for _, gone, _ in results)
        owed = sum(residuals[name].view_as(total) for _, _, residuals in results)
        assert (2 * mean + owed - total).abs().max() <= 1e-6 * total.abs().max(), name
        assert torch.equal(results[1][0][name], mean)


def _accumulated(rank):
    """Two batches of gradients a step, with and without compression that loses nothing much."""
    nets = ranks.model(), ranks.model()
    plain, ddp = (ranks.wrapped(net) for net in nets)
    squeezed = squeezebox.compress_gradients(ddp, noise=1e-8)
    for model in (plain, ddp):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                _backward(model, rank, 2 * step)
            _backward(model, rank, 2 * step + 1)
            optimizer.step()
    return _finished(squeezed, ranks.weights(nets[0]), ranks.weights(nets[1]), squeezed.passes)


def _backward(model, rank, step):
    x, y = ranks.batch(rank, step)
    nn.functional.cross_entropy(model(x), y).backward()


def test_accumulated_gradients_go_once():
    for plain, weights, passes in ranks.run(_accumulated, 2):
        assert passes == 4
        assert (weights - plain).abs().max() < 1e-4 * plain.abs().max()
        assert not torch.equal(weights, plain)


def _joined(rank):
    """Rank 1 has two batches more."""
    net = ranks.model()
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, noise=0.1)
    with ddp.join():
        ranks.train(ddp, rank, 3 + 2 * rank)
    return _finished(squeezed, ranks.weights(net), squeezed.passes, squeezed.total.noise)


def test_uneven_inputs_join():
    (one, passes, noise), (other, others, _) = ranks.run(_joined, 2)
    assert torch.equal(one, other)
    assert passes == others == 5
    assert 0.0 < noise < 0.2


def _of_form(rank, dtype, options):
    nets = ranks.model(dtype=dtype), ranks.model(dtype=dtype)
    plain, ddp = (ranks.wrapped(net, **options) for net in nets)
    squeezed = squeezebox.compress_gradients(ddp, noise=0.01)
    for model in (plain, ddp):
        ranks.train(model, rank, 6, dtype=dtype)
    return _finished(squeezed, *map(ranks.weights, nets), squeezed.last)


FORMS = [
    (torch.bfloat16, {}),
    pytest.param(torch.float64, {"gradient_as_bucket_view": True}, marks=pytest.mark.slow),
    (torch.float32, {"static_graph": True, "gradient_as_bucket_view": True}),
]


@pytest.mark.parametrize(("dtype", "options"), FORMS)
def test_dtypes_and_options_of_ddp(dtype, options):
    results = ranks.run(_of_form, 2, dtype, options)
    begun = ranks.weights(ranks.model(dtype=dtype))
    for plain, weights, last in results:
        assert torch.equal(weights, results[0][1])
        assert 0.0 < (weights - plain).norm() < 0.2 * (plain - begun).norm()
        assert 0.003 < last.noise < 0.03
        assert last.ratio > 2.0


def _steered(rank, options):
    net = ranks.model(width=96)
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    found = []
    for step in range(16):
        optimizer.zero_grad()
        x, y = ranks.batch(rank, step, width=96, samples=16)
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        found.append(squeezed.last)
    return _finished(squeezed, found)


def test_noise_and_ratio_are_kept_to():
    for (found,) in ranks.run(_steered, 2, {"noise": 0.05}):
        assert all(0.03 < each.noise < 0.08 for each in found[4:])
    for (found,) in ranks.run(_steered, 2, {"ratio": 9.0}):
        assert 8.0 < sum(each.ratio for each in found[8:]) / 8 < 10.0


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 5])
def test_a_ratio_is_of_bytes_that_go_among_more_ranks(world):
    for (found,) in ranks.run(_steered, world, {"ratio": 5.0}):
        assert 4.4 < sum(each.ratio for each in found[8:]) / 8 < 5.6


class _Scaled(nn.Module):
    """Two layers, and parameters of one element and of few, all of one gradient's size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.scale * self.layers(x) + self.shift


def _steep(rank, method, ratio):
    """Losses, what was warned of, and how far the small parameters moved."""
    net = _Scaled()
    ddp = nn.parallel.DistributedDataParallel(net)
    squeezed = squeezebox.compress_gradients(ddp, method, ratio=ratio)
    optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=0.05), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(60):
            x, _ = ranks.batch(rank, step, width=64, samples=32)
            optimizer.zero_grad()
            loss = (ddp(x) - x[:, :4] - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    said = [str(each.message) for each in warned if "ratio" in str(each.message)]
    return _finished(squeezed, losses, said, net.scale.item(), net.shift.tolist(), squeezed.level)


@pytest.mark.parametrize("method", ["entropy", "planes"])
def test_small_parameters_are_sent_at_any_ratio(method):
    for losses, _, scale, shift, level in ranks.run(_steep, 2, method, 20.0):
        assert level > 1.0 and scale != 1.0
        assert all(abs(each) > 0.1 for each in shift)
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_a_ratio_that_cannot_be_reached_is_said_once_and_training_goes_on():
    for losses, said, scale, _, level in ranks.run(_steep, 2, "entropy", 1000.0):
        assert len(said) == 1 and "ratio=1000 cannot be reached" in said[0]
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
        assert scale != 1.0 and level == 64.0
