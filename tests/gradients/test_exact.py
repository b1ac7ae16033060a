"""What must hold of compressed gradients: plain's bits where nothing is lost, equal ranks, all of it owed."""

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.gradients._coders import CODERS
from squeezebox.gradients._wanted import Wanted
from tests.gradients import ranks


def _plain_and_squeezed(rank, options, steps):
    nets = ranks.model(), ranks.model()
    plain, ddp = (ranks.wrapped(net) for net in nets)
    squeezed = squeezebox.compress_gradients(ddp, **options)
    losses = [ranks.train(each, rank, steps) for each in (plain, ddp)]
    found = [ranks.weights(net) for net in nets]
    traffic = squeezed.total
    squeezed.close()
    return *losses, *found, traffic


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"noise": 0.0}, {"method": "top-k", "ratio": 1.0}, {"method": "plain"}])
def test_nothing_lost_is_plain_to_the_bit(world, options):
    for result in ranks.run(_plain_and_squeezed, world, options, 4):
        assert isinstance(result, tuple), result
        plain_losses, losses, plain_weights, weights, traffic = result
        assert losses == plain_losses
        assert torch.equal(weights, plain_weights)
        assert traffic.ratio == 1.0 and traffic.noise == 0.0


METHODS = [
    {"noise": 1e-2},
    {"ratio": 10.0},
    {"method": "planes", "noise": 0.1},
    {"method": "top-k", "ratio": 20.0},
    {"method": "random-k", "ratio": 20.0},
    {"method": "1-bit"},
    {"method": "powersgd", "rank": 2},
]


def _conserved(rank, options, steps):
    """The largest difference, over the gradients' scale, between what came and what should have."""
    net, whole = ranks.model(), ranks.model()
    ddp = ranks.wrapped(net)
    squeezed = squeezebox.compress_gradients(ddp, **options)
    came = {name: torch.zeros_like(each).double() for name, each in net.named_parameters()}
    gone = {name: each.clone() for name, each in came.items()}
    for step in range(steps):
        for model in (ddp, whole):
            model.zero_grad()
            x, y = ranks.batch(rank, step)
            nn.functional.cross_entropy(model(x), y).backward()
        for (name, mean), own in zip(net.named_parameters(), whole.parameters(), strict=True):
            came[name] += mean.grad
            gone[name] += own.grad
    state = squeezed.state_dict()
    found = came, gone, state["residuals"], squeezed.total
    squeezed.close()
    return found


CASES = [(2, options) for options in METHODS]
CASES += [pytest.param(world, METHODS[0], marks=pytest.mark.slow) for world in (3, 5)]
CASES += [pytest.param(5, METHODS[place], marks=pytest.mark.slow) for place in (2, 5)]


@pytest.mark.every(2)
@pytest.mark.parametrize(("world", "options"), CASES)
def test_what_came_and_what_is_owed_are_all_gradients(world, options):
    results = ranks.run(_conserved, world, options, 6)
    assert all(isinstance(result, tuple) for result in results), results
    for name, mean in results[0][0].items():
        total = sum(gone[name] for _, gone, _, _ in results)
        owed = sum(residuals[name].view_as(total) for _, _, residuals, _ in results)
        scale = sum(gone[name].abs().max() for _, gone, _, _ in results)
        assert (world * mean + owed - total).abs().max() <= 2e-6 * scale, name
        for came, *_ in results:  # all ranks, to the bit
            assert torch.equal(came[name], mean)
    traffic = results[0][3]
    assert traffic.sent_bytes < traffic.plain_bytes
    assert traffic.noise > 0.0


def _low_ranks(rank, columns, steps):
    """As torch's hook has it, in one bucket, and this house's in one and in several."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    nets = ranks.model(), ranks.model(), ranks.model()
    theirs = nn.parallel.DistributedDataParallel(nets[0])
    state = PowerSGDState(None, columns, start_powerSGD_iter=2)
    theirs.register_comm_hook(state, powerSGD_hook)
    ours = nn.parallel.DistributedDataParallel(nets[1])
    several = ranks.wrapped(nets[2])
    made = [squeezebox.compress_gradients(each, "powersgd", rank=columns) for each in (ours, several)]
    for model in (theirs, ours, several):
        ranks.train(model, rank, steps)
    residuals = [each.state_dict()["residuals"] for each in made]
    for each in made:
        each.close()
    return [ranks.weights(net) for net in nets], state.error_dict[0], residuals


@pytest.mark.parametrize("columns", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_low_rank_is_torchs_to_the_bit(columns):
    results = ranks.run(_low_ranks, 2, columns, 5)
    assert all(isinstance(result, tuple) for result in results), results
    for (theirs, ours, several), owed, (mine, _) in results:
        assert torch.equal(ours, theirs)
        assert torch.equal(owed.sort().values, torch.cat(list(mine.values())).sort().values)
        assert torch.equal(several, results[0][0][2])
        assert not torch.equal(several, ours)  # other factors to begin with


def test_a_parameter_without_elements_has_no_squares():
    values = torch.arange(8.0)
    squares = Wanted(values, None, (0, 3, 0, 0, 5, 0)).squares.tolist()
    assert squares == pytest.approx([0, 5, 0, 0, 135, 0])


@pytest.mark.parametrize("method", ["entropy", "planes"])
@pytest.mark.parametrize("level", [3.0, 200.0])
def test_messages_at_a_high_level_stay_small_and_send_small_parameters(method, level):
    torch.manual_seed(0)
    sizes, coder = (96 * 384, 96, 1, 0), CODERS[method]
    owed, drift = torch.zeros(sum(sizes)), torch.randn(sum(sizes))
    lengths = []
    for step in range(80):
        gradient = drift + torch.randn(sum(sizes))
        message = coder.encode(Wanted(gradient, owed, sizes), level, step)
        came = torch.cat([each.clone() for each in coder.decode(message, sizes, torch.float32)])
        lengths.append(message.numel())
        owed += gradient - came
    few, one = owed[sizes[0] :].split([96, 1])
    assert max(lengths) < sum(sizes) * 4 / 20
    assert one == 0.0  # it is sent whole in every pass
    assert few.abs().max() < 40 * drift[-97:-1].abs().max()
