"""What people brought who had not written it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import squeezebox


class Gated(nn.Module):
    """Attention, dropout and a gated unit: several readers of one storage, one after another."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.mix, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        query, key, value = self.mix(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.back(mixed), 0.1)
        value, gate = self.gate(self.second(x)).chunk(2, -1)
        return x + self.out(value * F.silu(gate))


def squares(output, target):
    return (output - target).square().mean()


@pytest.mark.parametrize("recompute", [True, False])
def test_offloaded_tensors_of_several_readers_take_what_the_plan_says(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(*[Gated(64) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(16, 48, 64), torch.randn(16, 48, 64)
    options = {"sample": (x, y), "loss_fn": squares, "optimizer": optimizer, "exact": True}
    plan = squeezebox.plan(model, recompute=recompute, **options)
    session = squeezebox.attach(model, optimizer=optimizer, plan=plan)
    for _ in range(2):
        optimizer.zero_grad()
        with session.step():
            loss = squares(model(x), y)
        loss.backward()
        optimizer.step()
    peak = session.report().peak_bytes
    session.detach()
    assert peak + y.nbytes == pytest.approx(plan.predicted_peak_bytes, rel=0.03)  # which a model does not see


def test_a_forward_that_fails_leaves_no_profiler_running():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    session = squeezebox.attach(model, noise=1e-3)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(4, 63))
    other = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    sample = torch.randn(64, 64), torch.randn(64, 64)
    assert squeezebox.plan(other, sample=sample, loss_fn=squares, exact=True).predicted_peak_bytes > 0
    session.detach()


def test_a_loss_of_pairs_gets_a_batch():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))

    def pairs(output, _):
        z = F.normalize(output, dim=-1)
        return F.cross_entropy(z @ z.detach().roll(1, 0).t() / 0.1, torch.arange(len(z)))

    sample = torch.randn(24, 64), torch.randn(24, 64)
    found = squeezebox.find_batch(model, sample, loss_fn=pairs, memory="4MiB")
    assert found.batch > 24 and (found.measured_peak_bytes or 0) <= found.memory_bytes


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_be_stepped_is_refused_by_an_estimate(optimizer):
    model, sample = nn.Linear(8, 8), (torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(squeezebox.OptionError, match=f"{optimizer.__name__} cannot step"):
        squeezebox.estimate(model, sample=sample, loss_fn=squares, optimizer=optimizer)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("model", {}, "is no torch.nn.Module"),
        (nn.Linear, {}, "is no torch.nn.Module"),
        (nn.Linear(2, 2), {"noise": "1e-2"}, "'1e-2' is no number"),
        (nn.Linear(2, 2), {"noise": True}, "True is no number"),
        (nn.Linear(2, 2), {"controller": "comet"}, r"squeezebox\.bounds\.Comet"),
        (nn.Linear(2, 2), {"plan": "plan.json"}, "load_plan"),
        (nn.Linear(2, 2), {"checks_per_refresh": -1}, "no whole number from 0 on"),
    ],
    ids=str,
)
def test_what_is_none_is_refused_at_once(model, options, says):
    with pytest.raises(squeezebox.OptionError, match=says):
        squeezebox.attach(model, **options)
