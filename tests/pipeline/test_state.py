"""Checkpoints, evaluation, schedulers of learning rates, and what a rank forgets."""

import resource
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from squeezebox import FormatError, OutputError
from squeezebox.pipeline import Runner
from squeezebox.schema import InputForm
from tests.pipeline import ranks


def _runner(plan, model, **options):
    optimizer = ranks.OPTIMIZERS["adamw"](model.parameters())
    return Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, **options)


def _steps(runner, first, end):
    losses = [runner.step(*ranks.numbers(batch, 2 * runner.plan.microbatches)) for batch in range(first, end)]
    return [None if loss is None else loss.item() for loss in losses]


def _resumed(rank, plan, directory, options):
    whole = _runner(plan, _noisy(), **options)
    torch.manual_seed(rank)
    before = _steps(whole, 0, 3)
    whole.save(directory)
    after = _steps(whole, 3, 6)
    weights = whole.state_dict()
    whole.close()
    again = _runner(plan, _noisy(seed=1), **options)
    found = again.load(directory), _steps(again, 3, 6)
    resumed = again.state_dict()
    again.close()
    return before, after, weights, found, resumed


def _noisy(seed=0):
    """With dropout and batch normalisation: random states and buffers count."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "options"),
    [("1f1b", 4, {}), ("2bw", 4, {"correction": True, "clip": 1.0}), ("pipedream", 1, {})],
)
def test_a_resume_goes_on_to_the_bit(schedule, microbatches, options, tmp_path):
    plan = ranks.plan(12, 2, schedule, microbatches)
    for result in ranks.run(_resumed, 2, plan, tmp_path, options):
        assert not isinstance(result, str), result
        _, after, weights, (batch, again), resumed = result
        assert batch == 3
        assert again == after
        assert weights.keys() == resumed.keys()
        assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert [path.name for path in tmp_path.iterdir()] == ["batch-3"]


def _interrupted(rank, plan, directory):
    runner = _runner(plan, ranks.chain())
    _steps(runner, 0, 1)
    runner.save(directory)
    _steps(runner, 1, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # no file grows beyond
    try:
        runner.save(directory)
    except Exception as error:  # noqa: BLE001
        failed = type(error).__name__, str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = _runner(plan, ranks.chain(seed=1))
    return failed, again.load(directory)


def test_an_interrupted_checkpoint_leaves_the_one_before(tmp_path):
    first, second = ranks.run(_interrupted, 2, ranks.plan(8, 2, "2bw", 4), tmp_path)
    assert first[0][0] == "PipelineError", first
    assert "rank 1 (stage 1) raised OutputError" in first[0][1]
    assert second[0][0] == OutputError.__name__
    assert "File too large" in second[0][1]
    assert first[1] == second[1] == 1
    assert (tmp_path / ".batch-2.partial").exists()


def _refused(rank, plan, directory):
    runner = _runner(plan, ranks.chain())
    _steps(runner, 0, 1)
    runner.save(directory)
    if rank == 0:
        dcp.save({"model": ranks.chain().state_dict()}, checkpoint_id=directory / "batch-7", no_dist=True)
        shutil.copytree(directory / "batch-1", directory / "batch-5")
        file = next((directory / "batch-5" / "rank-1").glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    runner.gather(None)
    before, found = runner.state_dict(), []
    for act in (
        lambda: runner.load(directory / "none"),
        lambda: runner.save(directory),
        lambda: runner.load(directory),
        lambda: runner.load(directory, batch=5),
    ):
        try:
            act()
        except (FormatError, OutputError) as error:
            found.append((type(error).__name__, str(error)))
    after = runner.state_dict()
    _steps(runner, 1, 2)
    return (
        found,
        all(torch.equal(after[name], each) for name, each in before.items()),
        runner.load(directory, 1),
    )


def test_what_ranks_refuse_together_changes_nothing_and_training_goes_on(tmp_path):
    for found, is_same, batch in ranks.run(_refused, 2, ranks.plan(8, 2, "gpipe", 2), tmp_path):
        assert [kind for kind, _ in found] == ["FormatError", "OutputError", "FormatError", "FormatError"]
        missing, taken, foreign, damaged = (message for _, message in found)
        assert "no complete checkpoint" in missing
        assert "batch-1 is there already" in taken
        assert "batch-7 was not saved by a runner" in foreign
        assert "rank-1 cannot be read" in damaged and "has the CRC-32" in damaged
        assert is_same and batch == 1


class _Partly(nn.Module):
    """Does not use all that it has."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(6, 6)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def _partly(rank, plan, directory):
    torch.manual_seed(0)
    model = _Partly().double()
    began = model.unused.weight.detach().clone()
    runner = _runner(plan, model)
    _steps(runner, 0, 1)
    runner.save(directory)
    saved = runner.state_dict()
    again = _runner(plan, _Partly().double())
    again.load(directory)
    loaded = again.state_dict()
    same = all(torch.equal(loaded[name], each) for name, each in saved.items())
    return [*saved], same, rank > 0 or torch.equal(saved["unused.weight"], began)


def test_the_first_rank_keeps_what_no_stage_uses(tmp_path):
    found = ranks.run(_partly, 2, ranks.plan(3, 2, "1f1b", 2), tmp_path)
    torch.manual_seed(0)
    assert sorted(name for names, *_ in found for name in names) == sorted(_Partly().state_dict())
    assert all(same and kept for _, same, kept in found)


def _evaluated(rank, plan):
    model = _noisy()
    runner = _runner(plan, model)
    _steps(runner, 0, 2)
    x, y = ranks.numbers(9, 8)
    loss, again = runner.evaluate(x, y), runner.evaluate(x, y)
    weights = runner.state_dict()
    after = _steps(runner, 2, 3)
    runner.close()
    return loss, again, weights, after


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_evaluation_is_of_the_newest_weights(schedule):
    results = ranks.run(_evaluated, 2, ranks.plan(12, 2, schedule, 4))
    weights = results[0][2] | results[1][2]
    model = _noisy().eval()
    model.load_state_dict(weights)
    x, y = ranks.numbers(9, 8)
    pairs = zip(x.split(2), y.split(2), strict=True)
    wanted = torch.stack([nn.functional.mse_loss(model(a), b) / 4 for a, b in pairs]).sum()
    assert results[0][0] is None
    assert results[1][0] == results[1][1]
    torch.testing.assert_close(results[1][0], wanted.detach(), rtol=1e-12, atol=0)
    assert results[1][3][0] is not None


def _trained(rank, plans):
    found = []
    for plan in plans:
        runner = _runner(plan, _noisy())
        torch.manual_seed(rank)
        losses = _steps(runner, 0, 3)
        found.append((losses, runner.state_dict()))
        runner.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_computing_again_changes_no_statistics_and_draws_the_same_numbers(schedule):
    plans = [ranks.plan(12, 2, schedule, 4, policy=policy) for policy in ("keep", "recompute")]
    for result in ranks.run(_trained, 2, plans):
        assert not isinstance(result, str), result
        (kept, weights), (again, others) = result
        assert kept == again
        assert any("num_batches_tracked" in name for name in weights)
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def _scheduled(rank, plan):
    model = ranks.chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    for batch in range(5):
        runner.step(*ranks.numbers(batch, 8))
        scheduler.step()
    weights = runner.state_dict()
    runner.close()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.parameters()}
    return weights, sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_each_batch_has_the_learning_rate_of_its_own_step(schedule, delay):
    results = ranks.run(_scheduled, 2, ranks.plan(8, 2, schedule, 4))
    model = ranks.chain()
    history = [[each.detach().clone() for each in model.parameters()]]
    for batch in range(5):
        for parameter, value in zip(model.parameters(), history[max(batch - delay, 0)], strict=True):
            parameter.data, parameter.grad = value.clone(), None
        x, y = ranks.numbers(batch, 8)
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (nn.functional.mse_loss(model(a), b) / 4).backward()
        rate = 0.1 * 0.5**batch
        history.append(
            [
                old.add(each.grad, alpha=-rate)
                for old, each in zip(history[-1], model.parameters(), strict=True)
            ]
        )
    together = results[0][0] | results[1][0]
    for (name, _), value in zip(model.named_parameters(), history[-1], strict=True):
        assert torch.equal(together[name], value), name


def test_a_rank_forgets_what_others_hold():
    whole = sum(parameter.nbytes for parameter in ranks.chain().parameters())
    for _, nbytes in ranks.run(_scheduled, 2, ranks.plan(8, 2, "gpipe", 4)):
        assert whole / 2 <= nbytes <= whole / 2 + 8 * 64  # each of 8 tensors begins at a multiple of 64


def _evaluated_between(rank, plan):
    found = []
    for evaluates in (False, True):
        model = _noisy()
        model[1].eval()  # frozen statistics stay frozen
        runner = _runner(plan, model)
        torch.manual_seed(rank)
        losses = _steps(runner, 0, 2)
        state = torch.get_rng_state()
        if evaluates:
            runner.evaluate(*ranks.numbers(9, 8))
            assert not model[1].training and model[0].training
        else:
            runner.drain()
        torch.set_rng_state(state)
        found.append((losses + _steps(runner, 2, 4), runner.state_dict()))
        runner.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_evaluation_leaves_training_as_it_was(schedule):
    for result in ranks.run(_evaluated_between, 2, ranks.plan(12, 2, schedule, 4)):
        assert not isinstance(result, str), result
        (losses, weights), (others, after) = result
        assert losses == others
        assert all(torch.equal(weights[name], after[name]) for name in weights)


def _loaded_midway(rank, plan, directory):
    runner = _runner(plan, ranks.chain())
    _steps(runner, 0, 2)
    runner.save(directory / "latest")
    runner.save(directory / "best")
    wanted = _steps(runner, 2, 5)
    runner.load(directory / "latest")
    again = _steps(runner, 2, 5)
    runner.close()
    return wanted, again


@pytest.mark.parametrize(("schedule", "microbatches"), [("2bw", 4), ("pipedream", 1)])
def test_loading_in_the_middle_forgets_what_was_under_way(schedule, microbatches, tmp_path):
    for result in ranks.run(_loaded_midway, 3, ranks.plan(8, 3, schedule, microbatches), tmp_path):
        assert not isinstance(result, str), result
        assert result[0] == result[1]
    for name in ("latest", "best"):
        found = sorted(path.name for path in (tmp_path / name / "batch-2").iterdir())
        assert found == [".metadata", "rank-0", "rank-1", "rank-2"]


def _frozen(rank, plan, directory):
    model = ranks.chain()
    for parameter in [*model.parameters()][8:]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.5))
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, clip=0.1)
    losses = _steps(runner, 0, 2)
    scheduler.step()
    runner.save(directory)
    runner.load(directory)
    held = sum(not bool(parameter.isnan().any()) for parameter in model.parameters())
    runner.close()
    return losses, held


def test_a_stage_with_nothing_to_train(tmp_path):
    results = ranks.run(_frozen, 2, ranks.plan(8, 2, "1f1b", 4), tmp_path)
    for result in results:
        assert isinstance(result, tuple), result
        assert result[1] == 8  # the other stage's, frozen or not, are gone
    assert results[1][0][0] is not None


def _misshapen(rank, plan):
    model = ranks.Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=ranks.entropy)
    try:
        runner.step(*(tensor[:, :3] for tensor in ranks.words(0, 8)))
    except Exception as error:  # noqa: BLE001
        refused = type(error).__name__, str(error)
    loss = runner.step(*ranks.words(0, 8))
    runner.close()
    return refused, loss


def test_inputs_of_another_shape_are_refused_and_training_goes_on():
    plan = ranks.plan(5, 2, "gpipe", 4, inputs=(InputForm(shape=(5,), dtype="int64"),))
    results = ranks.run(_misshapen, 2, plan)
    for refused, _ in results:
        assert refused[0] == "OptionError" and "samples are [((3,), 'int64')]" in refused[1]
    assert results[1][1].item() > 0.0


def _frozen_first(rank, plan):
    model = ranks.chain()
    for parameter in [*model.parameters()][:8]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=nn.functional.mse_loss, clip=0.1)
    losses = _steps(runner, 0, 3)
    runner.close()
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "zb-h1"])
def test_a_first_stage_with_nothing_to_train(schedule):
    results = ranks.run(_frozen_first, 2, ranks.plan(8, 2, schedule, 4))
    assert not any(isinstance(result, str) for result in results), results
    assert len({*results[1]}) == 3
