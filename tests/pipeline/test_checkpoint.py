"""Checkpoints that move: to another split, schedule or number of ranks, to plain torch, to disks of nodes."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

from squeezebox.pipeline import Runner
from squeezebox.schema import OptionError
from tests.pipeline import ranks


def _model(width=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).double()


def _optimizer(model, name="adamw"):
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:]}]
    return ranks.OPTIMIZERS[name](groups)


def _runner(plan, model=None, optimizer="adamw"):
    model = model or _model(seed=1)
    return Runner(model, plan, optimizer=_optimizer(model, optimizer), loss_fn=nn.functional.mse_loss)


def _batches(seed=3):
    torch.manual_seed(seed)
    samples = TensorDataset(*(torch.randn(48, 6, dtype=torch.float64) for _ in range(2)))
    return DataLoader(samples, batch_size=8, shuffle=True)


def _steps(runner, count):
    """So many batches of a pass over the data."""
    losses = []
    for number, batch in enumerate(runner.read(_batches() if runner.is_first else None), 1):
        loss = runner.step(*batch)
        losses.append(None if loss is None else loss.item())
        if number == count:
            break
    return losses


def _saved(rank, plan, directory):
    runner = _runner(plan, _model())
    _steps(runner, 3)
    runner.save(directory)
    runner.close()
    again = _runner(plan)  # the same split goes on without a word
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load(directory)
    result = _steps(again, 3), again.state_dict()
    again.close()
    return result


def _loaded(rank, plan, directory):
    runner = _runner(plan)
    with warnings.catch_warnings(record=True) as words:
        warnings.simplefilter("always")
        batch = runner.load(directory)
    losses = _steps(runner, 3)
    weights = runner.state_dict()
    runner.close()
    return (
        batch,
        losses,
        weights,
        [str(each.message) for each in words if each.category.__name__ == "PipelineWarning"],
    )


def _gathered(results):
    """Losses, of the rank that has them, and all ranks' weights."""
    weights = {}
    for result in results:
        assert not isinstance(result, str), result
        weights |= result[-1]
    return next(losses for *_, losses, _ in results if None not in losses), weights


MOVES = [
    (ranks.plan(6, 3, "1f1b", 4), ranks.plan(6, 2, "gpipe", 4)),
    pytest.param(ranks.plan(6, 2, "2bw", 4), ranks.plan(6, 3, "2bw", 4), marks=pytest.mark.slow),
    pytest.param(
        ranks.plan(6, 2, "interleaved-1f1b", 4, loops=3), ranks.plan(6, 1, "1f1b", 4), marks=pytest.mark.slow
    ),
    pytest.param(
        replace(ranks.plan(6, 2, "1f1b", 4), processes=(0, 1)),
        replace(ranks.plan(6, 2, "1f1b", 4), processes=(1, 0)),
        marks=pytest.mark.slow,
    ),
    pytest.param(ranks.plan(6, 3, "zb-v", 4, loops=2), ranks.plan(6, 2, "zb-h2", 4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("saving", "loading"), MOVES)
def test_training_goes_on_to_the_bit_under_another_split(saving, loading, tmp_path):
    wanted = _gathered(ranks.run(_saved, saving.ranks, saving, tmp_path))
    found = ranks.run(_loaded, loading.ranks, loading, tmp_path)
    losses, weights = _gathered([result[:-1] for result in found])
    assert losses == wanted[0]
    assert weights.keys() == wanted[1].keys()
    assert all(torch.equal(weights[name], each) for name, each in wanted[1].items())
    for batch, *_, words in found:
        assert batch == 3
        assert len(words) == 1 and "goes on without ranks' random states." in words[0]


def test_plain_torch_reads_a_checkpoint(tmp_path):
    plan = ranks.plan(6, 3, "1f1b", 4)
    (losses, weights) = _gathered(ranks.run(_saved, 3, plan, tmp_path))
    dcp_to_torch_save(tmp_path / "batch-3", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = _model(seed=2)
    optimizer = _optimizer(model)
    model.load_state_dict(whole["model"])
    set_optimizer_state_dict(model, optimizer, whole["optim"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-2]
    found = []
    for x, y in [*_ordered()][3:]:
        optimizer.zero_grad()
        total = 0.0
        for a, b in zip(x.split(2), y.split(2), strict=True):
            loss = nn.functional.mse_loss(model(a), b) / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        found.append(total.item())
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in weights.items())


def _ordered():
    """The batches in the order in which a runner's reader takes them."""
    _model()
    state = torch.get_rng_state()
    batches = _batches()
    torch.set_rng_state(state)
    return batches


def _stale(rank, saving, loading, directory):
    runner = _runner(saving, _model())
    _steps(runner, 3)
    runner.save(directory)
    runner.close()
    return _loaded(rank, loading, directory)


@pytest.mark.slow
def test_versions_that_are_not_there_are_named(tmp_path):
    saving = ranks.plan(6, 2, "1f1b", 4)
    for batch, losses, _, words in ranks.run(_stale, 2, saving, ranks.plan(6, 2, "2bw", 4), tmp_path):
        assert batch == len(losses) == 3
        assert "without version 2 of the weights, ranks' random states." in words[0]


def _other(rank, plan, directory):
    runner = _runner(plan, _model())
    runner.save(directory)
    runner.close()
    found = []
    for model, optimizer in ((_model(width=5), "adamw"), (_model(), "momentum")):
        try:
            made = _runner(ranks.plan(6, 2, "1f1b", 4, inputs=()), model, optimizer)
            made.load(directory)
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_another_model_or_optimizer_is_refused(tmp_path):
    for found in ranks.run(_other, 2, ranks.plan(6, 2, "1f1b", 4), tmp_path):
        assert len(found) == 2, found
        assert "FormatError" in found[0] and "it has ((6, 6), torch.float64) for 0.weight" in found[0]
        assert "of the optimizer AdamW with 2 groups, and this one is SGD with 2 groups" in found[1]


def _on_nodes(rank, plan, directory):
    own = directory / f"node-{rank}"
    runner = _runner(plan, _model())
    for _ in range(2):
        _steps(runner, 2)
        runner.save(own)
    runner.close()
    if rank == 1:  # it was cut off just before the end
        (own / "batch-4").rename(own / ".batch-4.partial")
    again = _runner(plan)
    loaded = again.load(own)
    _steps(again, 2)
    again.save(own)
    later = again.load(own)
    again.close()
    return loaded, later, sorted(path.name for path in own.iterdir())


def test_nodes_agree_on_the_newest_that_all_have(tmp_path):
    for rank, result in enumerate(ranks.run(_on_nodes, 2, ranks.plan(6, 2, "1f1b", 4), tmp_path)):
        assert result == (2, 4, ["batch-2", "batch-4"]), result
        found = sorted(path.name for path in (tmp_path / f"node-{rank}" / "batch-4").iterdir())
        assert found == [".metadata", f"rank-{rank}"]


def _with_a_loss_of_its_own(rank, plan):
    model, loss = _model(), nn.Bilinear(6, 6, 1).double()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    with pytest.raises(OptionError, match="2 of the optimizer's 14 parameters are not the model's") as caught:
        Runner(model, plan, optimizer=optimizer, loss_fn=lambda x, y: loss(x, y).mean())
    return str(caught.value)


def test_parameters_that_no_stage_has_are_refused():
    (said,) = ranks.run(_with_a_loss_of_its_own, 1, ranks.plan(6, 1, "1f1b", 4))
    assert "the first one of (1, 6, 6)" in said
