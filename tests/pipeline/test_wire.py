"""What crosses between stages in fewer bytes: its bound, its bytes, and what is owed."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from squeezebox import OptionError
from squeezebox.pipeline import Runner, Wire
from squeezebox.pipeline._checkpoint import Checkpoint, unpacked
from squeezebox.schema import InputForm
from tests.pipeline import ranks

WIDTH = 512
INPUTS = (InputForm(shape=(WIDTH,), dtype="float32"),)
ERROR = 0.05
RESIDUALS = 0, True  # boundary 0, gradients


class _Seen(nn.Module):
    """Notes what passes it, forward and back."""

    def __init__(self):
        super().__init__()
        self.values, self.gradients = [], []

    def forward(self, given):
        inputs = given if isinstance(given, tuple) else (given,)
        self.values.append([each.detach().clone() for each in inputs])
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: self.gradients.append(gradient.clone()))
        return given


def _seen():
    torch.manual_seed(0)
    first = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), _Seen()]
    last = [_Seen(), nn.Hardshrink(0.2), nn.Linear(WIDTH, WIDTH)]  # gradients with zeros, too
    return nn.Sequential(*first, *last)


def _wide(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(_Normal() for _ in range(8)))


class _Normal(nn.Module):
    """With dropout and batch normalisation: random states and buffers count."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)).tanh())


def _chain():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def _plan(blocks, schedule="1f1b", microbatches=4, **options):
    return ranks.plan(blocks, 2, schedule, microbatches, inputs=INPUTS, **options)


def _data(batch, samples):
    x = torch.randn((samples, WIDTH), generator=torch.Generator().manual_seed(batch))
    return x, 0.5 * x.roll(1, dims=1)


def _runner(model, plan, wire, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, wire=wire, **options)


def _steps(runner, first, end):
    losses = [runner.step(*_data(batch, 2 * runner.plan.microbatches)) for batch in range(first, end)]
    return [None if loss is None else loss.item() for loss in losses]


def _watched(rank, plan, wire, directory):
    model = _seen()
    runner = _runner(model, plan, wire)
    _steps(runner, 0, 3)
    runner.save(directory)
    traffic = runner.traffic()
    runner.close()
    dist.barrier()  # the first rank has the store that the others still ask whether the checkpoint is whole
    seen = model[2 + rank]
    return [value for (value,) in seen.values], seen.gradients, traffic


def _root_mean_square(tensor):
    return tensor.double().square().mean().sqrt().item()


def _is_within(received, wanted, error):
    assert (wanted == 0).any()
    assert (received[wanted == 0] == 0).all()
    worst = (received - wanted).abs().max().item()
    return worst <= error * _root_mean_square(wanted) * (1 + 1e-6)


@pytest.mark.every(3)
@pytest.mark.parametrize("codec", ["entropy", "entropy-sign", "zero8", "minmax8", "bf16", "fp8-e4m3"])
def test_every_element_arrives_within_the_bound_and_zeros_stay_zero(codec, tmp_path):
    error = ERROR if codec.startswith("entropy") else 0.5
    wire = Wire(activation_error=error, gradient_error=2 * error, feedback=False, codec=codec)
    results = ranks.run(_watched, 2, _plan(6), wire, tmp_path)
    assert not any(isinstance(result, str) for result in results), results
    (sent, returned, forward), (received, gradients, back) = results
    assert len(sent) == len(received) == len(returned) == len(gradients) == 12
    assert all(_is_within(*pair, error) for pair in zip(received, sent, strict=True))
    assert all(_is_within(*pair, 2 * error) for pair in zip(returned, gradients, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(received, sent, strict=True))
    for (row,), is_back in ((forward, False), (back, True)):
        assert (row.boundary, row.back, row.left_whole) == (0, is_back, 0)
        assert row.plain_bytes == 12 * 2 * WIDTH * 4
        assert row.sent_bytes < 0.7 * row.plain_bytes
        assert 0 < row.noise <= (2 * error) ** 2


def _reach(wanted, received, error):
    """What feedback owes after the last of them, each being within its bound."""
    owed = torch.zeros_like(wanted[0])
    for want, got in zip(wanted, received, strict=True):
        sum_of_both = want + owed
        worst = (sum_of_both - got).abs().max().item()
        assert worst <= error * _root_mean_square(sum_of_both) * (1 + 1e-6)
        owed = sum_of_both - got
    return owed


def test_feedback_sends_all_but_a_residual_and_the_residual_is_saved(tmp_path):
    wire = Wire(activation_error=None, gradient_error=0.3, feedback=True)
    (sent, returned, _), (received, gradients, _) = ranks.run(_watched, 2, _plan(6), wire, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(received, sent, strict=True))
    state = unpacked(Checkpoint(tmp_path, 3).nested("ranks", "1"))["links"]
    residual = state[RESIDUALS]["residuals"][0]
    assert torch.equal(residual, _reach(gradients, returned, 0.3))
    assert residual.abs().max() > 0
    true, sum_of_sent = torch.stack(gradients).double().sum(0), torch.stack(returned).double().sum(0)
    slack = len(gradients) * 2.0**-22 * torch.stack(gradients).abs().max().item()
    torch.testing.assert_close(sum_of_sent + residual, true, rtol=0, atol=slack)


def _trained(rank, cases):
    found = []
    for plan, wire in cases:
        model = _chain()
        runner = _runner(model, plan, wire)
        losses = _steps(runner, 0, 3)
        middle = runner.evaluate(*_data(99, 2 * plan.microbatches))
        losses += _steps(runner, 3, 8)
        found.append((losses, middle, runner.state_dict(), runner.traffic()))
        runner.close()
    return found


@pytest.mark.slow
def test_losses_are_nearly_the_same_under_every_schedule_for_fewer_bytes():
    plans = [
        _plan(8, "gpipe"),
        _plan(8, policy="recompute"),
        _plan(8, "zb-h1"),
        _plan(8, "interleaved-1f1b", loops=2),
        _plan(8, "breadth-first", loops=2),
        _plan(8, "2bw"),
        _plan(8, "pipedream", 1),
    ]
    wires = (None, Wire(feedback=False), Wire(activation_error=0.1, gradient_error=0.1, feedback=True))
    cases = list(itertools.product(plans, wires))
    results = ranks.run(_trained, 2, cases)
    assert not any(isinstance(result, str) for result in results), results
    for number, (plan, wire) in enumerate(cases):
        losses, middle, _, _ = results[1][number]
        rows = [row for result in results for row in result[number][3]]
        whole = results[1][number - number % 3]
        near = {"rtol": 0.02, "atol": 0, "msg": f"{plan.schedule} {wire}: {losses} {whole[0]}"}
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole[0]), **near)
        torch.testing.assert_close(middle, whole[1], **near)
        assert {(row.boundary, row.back) for row in rows} == {
            (boundary, back) for boundary in range(len(plan.stages) - 1) for back in (False, True)
        }
        for row in rows:
            assert row.plain_bytes == 8 * plan.microbatches * 2 * WIDTH * 4, (plan.schedule, row)
            assert row.sent_bytes == row.plain_bytes if wire is None else row.sent_bytes < row.plain_bytes / 2


def _evaluated(rank, plan):
    runner = _runner(_chain(), plan, Wire(activation_error=0.5, gradient_error=0.5))
    _steps(runner, 0, 2)
    found = runner.evaluate(*_data(99, 2 * plan.microbatches)), runner.state_dict()
    runner.close()
    return found


def test_evaluation_sends_everything_as_it_is():
    (_, first), (loss, second) = ranks.run(_evaluated, 2, _plan(8))
    model = _chain()
    model.load_state_dict(first | second)
    parts = zip(*(each.split(2) for each in _data(99, 8)), strict=True)
    wanted = torch.stack([nn.functional.mse_loss(model(x), y) / 4 for x, y in parts]).sum()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)


def _resumed(rank, plan, wire, directory):
    whole = _runner(_wide(), plan, wire)
    torch.manual_seed(rank)
    _steps(whole, 0, 3)
    whole.save(directory)
    after, weights = _steps(whole, 3, 6), whole.state_dict()
    again = whole.load(directory), _steps(whole, 3, 6), whole.state_dict()
    whole.close()
    anew = _runner(_wide(seed=1), plan, wire)
    resumed = anew.load(directory), _steps(anew, 3, 6), anew.state_dict()
    anew.close()
    return (3, after, weights), again, resumed


@pytest.mark.every(3)
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 4), ("2bw", 4), ("pipedream", 1)])
def test_a_resume_goes_on_to_the_bit(schedule, microbatches, tmp_path):
    plan = _plan(8, schedule, microbatches)
    wire = Wire(activation_error=0.1, gradient_error=0.3, feedback=True)
    for result in ranks.run(_resumed, 2, plan, wire, tmp_path):
        assert not isinstance(result, str), result
        (batch, losses, weights), *others = result
        for other in others:
            assert other[:2] == (batch, losses)
            assert all(torch.equal(weights[name], other[2][name]) for name in weights)


class _Several(nn.Module):
    """What has a gradient, beside a mask, an index and a float that has none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x), x > 0, x.argsort(), x * 2.0


class _Joined(nn.Module):
    def forward(self, x, mask, index, extra):
        return x * mask + extra.gather(1, index)


def _several(rank, plan):
    model = nn.Sequential(_Several(), _Seen(), _Seen(), _Joined())
    runner = _runner(model, plan, Wire(feedback=False))
    _steps(runner, 0, 2)
    traffic = runner.traffic()
    runner.close()
    return model[1 + rank].values, traffic


def test_what_has_no_gradient_arrives_to_the_bit():
    (sent, forward), (received, _) = ranks.run(_several, 2, _plan(4))
    for before, after in zip(sent, received, strict=True):
        assert not torch.equal(before[0], after[0])
        assert [each.dtype for each in after[1:]] == [torch.bool, torch.int64, torch.float32]
        assert all(torch.equal(*pair) for pair in zip(before[1:], after[1:], strict=True))
    assert forward[0].plain_bytes == 8 * 2 * WIDTH * (4 + 1 + 8 + 4)


def _overflowing(rank, plan):
    model = _chain()
    runner = _runner(model, plan, Wire(), skip_overflow=True)
    losses = []
    for batch in range(4):
        x, y = _data(batch, 2 * plan.microbatches)
        x[3] = math.inf if batch == 1 else 0.0
        loss = runner.step(x, y)
        losses.append(None if loss is None else loss.item())
    runner.drain()
    left, finite = (
        runner.traffic()[0].left_whole,
        all(w.isfinite().all() for w in runner.state_dict().values()),
    )
    runner.close()
    return losses, left, finite


def test_an_overflow_arrives_as_one_and_leaves_nothing_behind():
    first, second = ranks.run(_overflowing, 2, _plan(8))
    assert first[1:] == second[1:] == (1, True)
    assert [math.isfinite(loss) for loss in second[0]] == [True, False, True, True]


def _tight(rank, plan):
    runner = _runner(_chain(), plan, Wire(activation_error=1e-3, gradient_error=1e-3, codec="zero4"))
    losses = _steps(runner, 0, 2)
    traffic = runner.traffic()
    runner.close()
    return losses, traffic


def test_what_a_codec_cannot_hold_goes_as_it_is():
    results = ranks.run(_tight, 2, _plan(8))
    plain = ranks.run(_plain, 2, _plan(8))
    assert results[1][0] == plain[1]
    for _, (row,) in results:
        assert (row.left_whole, row.noise) == (8, 0.0)
        assert row.sent_bytes == row.plain_bytes + 8 * 8


def _plain(rank, plan):
    runner = _runner(_chain(), plan, None)
    losses = _steps(runner, 0, 2)
    runner.close()
    return losses


@pytest.mark.parametrize("error", [0.0, -1e-2, math.nan, math.inf])
@pytest.mark.parametrize("name", ["activation_error", "gradient_error"])
def test_an_impossible_error_is_refused(name, error):
    with pytest.raises(OptionError, match=f"{name}={error}"):
        Wire(**{name: error})


@pytest.mark.parametrize("codec", ["sign", "zero8-stochastic", "zip"])
def test_a_codec_without_a_bound_is_refused(codec):
    with pytest.raises(OptionError, match=f"no codec '{codec}' for the wire; there are entropy"):
        Wire(codec=codec)


def _differing(rank, plan):
    _runner(_chain(), plan, Wire(activation_error=0.1 * (1 + rank)))


def test_ranks_must_agree():
    for result in ranks.run(_differing, 2, _plan(8)):
        assert "PipelineError" in result
        assert "has another wire than rank" in result
