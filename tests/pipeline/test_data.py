"""Batches that one rank reads: targets are of the inputs' samples, and bad batches are refused."""

import collections
import multiprocessing
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from squeezebox import OptionError
from squeezebox.pipeline import Runner, _data
from squeezebox.pipeline._data import Channel, Reader, _equal
from squeezebox.pipeline._wire import Sender
from tests.pipeline import ranks

SAMPLES, BATCH = 40, 8


class Noted(Dataset):
    """Samples whose first number says which they are; the rest is drawn as they are read."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        drawn = torch.tensor([random.random(), np.random.random(), torch.rand(()).item(), 0.0, 0.0])
        x = torch.cat([torch.tensor([float(index)]), drawn]).double()
        return x, 2.0 * x


def loader(workers, generator=None):
    multiprocessing.current_process()._config["daemon"] = False  # else it may not start workers
    return DataLoader(Noted(), BATCH, shuffle=True, num_workers=workers, generator=generator)


def dropping(rank):
    """Ranks draw different numbers, as their stages have dropout."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Dropout(0.5 if rank else 0.1), nn.Linear(6, 6), nn.Dropout(0.3)]
    return nn.Sequential(*layers).double()


def made(rank, plan, loss_fn=nn.functional.mse_loss, **options):
    model = dropping(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return Runner(model, plan, optimizer=optimizer, loss_fn=loss_fn, **options)


def _paired(rank, plan, workers):
    """The samples that the first rank read and those that the last one had targets of, over two passes."""
    seen = []

    def loss_fn(output, target):
        seen.append(target[:, 0].div(2.0).tolist())
        return nn.functional.mse_loss(output, target)

    runner = made(rank, plan, loss_fn)
    batches = loader(workers) if runner.is_first else None
    for _ in range(2):
        for batch in runner.read(batches):
            if batch:
                seen += [part[:, 0].tolist() for part in batch[0].split(plan.microbatch)]
            runner.step(*batch)
    runner.close()
    return seen


@pytest.mark.parametrize(
    ("schedule", "workers"), [("1f1b", 0), pytest.param("2bw", 2, marks=pytest.mark.slow)]
)
def test_targets_are_of_the_samples_that_were_read_in_every_pass(schedule, workers):
    plan = ranks.plan(4, 2, schedule, 4)
    read, targets = ranks.run(_paired, 2, plan, workers)
    assert len(read) == 2 * SAMPLES // plan.microbatch, read
    assert targets == read
    half = len(read) // 2
    assert read[:half] != read[half:] and sorted(sum(read[:half], [])) == sorted(sum(read[half:], []))


def _alone(rank, plan):
    """The order in which one process reads that draws nothing else."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    batches = loader(0)
    return [x[:, 0].tolist() for _ in range(2) for x, _ in batches]


def test_the_order_is_that_of_a_process_which_draws_nothing_else():
    plan = ranks.plan(4, 2, "1f1b", 4)
    (wanted,) = ranks.run(_alone, 1, plan)
    read, _ = ranks.run(_paired, 2, plan, 0)
    assert [sum(read[at : at + 4], []) for at in range(0, len(read), 4)] == wanted


def _resumed(rank, plan, directory, workers, seeded, stop):
    def passes(runner, batches, end):
        losses = []
        while len(losses) < end:
            for batch in runner.read(batches):
                loss = runner.step(*batch)
                losses.append(None if loss is None else loss.item())
                if len(losses) == end:
                    break
        return losses

    def batches():
        return loader(workers, torch.Generator().manual_seed(5) if seeded else None)

    runner = made(rank, plan)
    own = batches()
    passes(runner, own, stop)
    runner.save(directory)
    after = []
    for _ in range(2):  # what is left of the pass, and another one
        for batch in runner.read(own) if after else _going_on(runner, own):
            after.append(runner.step(*batch))
    weights = runner.state_dict()
    runner.close()
    again = made(rank, plan)
    torch.manual_seed(99)  # the checkpoint has the states that count
    again.load(directory)
    found, own = [], batches()
    for _ in range(2):
        found += [again.step(*batch) for batch in again.read(own)]
    resumed = again.state_dict()
    again.close()
    return after, found, weights, resumed


def _going_on(runner, batches):
    """What a pass that was left has not read yet."""
    runner._reader.restore(runner._reader.state())
    return runner.read(batches)


@pytest.mark.parametrize(
    ("workers", "seeded", "stop"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False, 3), (0, True, 3))), (0, False, 7)],
)
def test_resuming_in_a_pass_reads_the_rest_of_it_to_the_bit(tmp_path, workers, seeded, stop):
    plan = ranks.plan(4, 2, "1f1b", 4)
    for result in ranks.run(_resumed, 2, plan, tmp_path, workers, seeded, stop):
        assert not isinstance(result, str), result
        after, found, weights, resumed = result
        assert len(found) == 5 - stop % 5 + 5
        assert found == after
        assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def _bad(rank, plan, batches):
    """Losses, and errors in the place of refused batches."""
    runner = made(rank, plan, lambda output, target: nn.functional.mse_loss(output, target["wanted"][0]))
    found = []
    for inputs, target in batches:
        try:
            loss = runner.step(inputs, {"wanted": (target,)} if runner.is_first else None)
            found.append(None if loss is None else loss.item())
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")
    runner.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_bad_batch_is_refused_by_all_ranks_and_training_goes_on(schedule):
    good = [ranks.numbers(number, 8) for number in range(3)]
    bad = [ranks.numbers(0, 9), (good[0][0], good[0][1][:5]), (good[0][0][:, :2], good[0][1])]
    plan = ranks.plan(4, 2, schedule, 4)
    plain = ranks.run(_bad, 2, plan, good)
    for found, wanted in zip(ranks.run(_bad, 2, plan, [good[0], *bad, *good[1:]]), plain, strict=True):
        assert [found[0], *found[-2:]] == wanted
        assert all(each.startswith("OptionError") for each in found[1:4])
        assert "inputs: [9] samples, and the plan has 4 microbatches of 2" in found[1]
        assert "inputs have 8 samples, and the target 5." in found[2] and "samples are" in found[3]


def _other(rank, plan):
    runner = made(rank, plan)
    x, y = ranks.numbers(rank, 8)
    try:
        runner.step(x, y)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def test_a_last_rank_with_another_target_is_refused():
    first, last = ranks.run(_other, 2, ranks.plan(4, 2, "1f1b", 4))
    assert "OptionError" in last and "another target than the first" in last
    assert "PipelineError" in first and "OptionError" in first


def test_targets_with_nan_are_equal_to_themselves():
    target = {"y": torch.tensor([1.0, float("nan"), float("inf")]), "n": torch.arange(3)}
    same = {name: each.clone() for name, each in target.items()}
    assert _equal(target, same)
    for other in (torch.zeros(3), torch.ones(2), target["n"]):
        assert not _equal(target, same | {"y": other})


def _uneven(rank, plan):
    runner = made(rank, plan)
    batches = [ranks.numbers(number, 8) for number in range(2 + runner.replica)]
    losses = []
    try:
        for batch in runner.read(batches):
            losses.append(runner.step(*batch))
    except Exception as error:  # noqa: BLE001
        return len(losses), f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_replicas_that_read_different_numbers_of_batches_are_refused():
    for found in ranks.run(_uneven, 4, ranks.plan(4, 2, "1f1b", 4, replicas=2)):
        assert found[0] == 2 and "replica 0 of 2 has no further batch" in found[1], found


Named = collections.namedtuple("Named", "first second")


def _sent(rank, plan):
    """What a batch sends from the first rank, with a target that is a view; and refused kinds of targets."""
    runner = made(rank, plan, lambda output, target: nn.functional.mse_loss(output, target["y"][0]))
    x, y = torch.zeros(8, 6, dtype=torch.float64), torch.zeros(1 << 20, 6, dtype=torch.float64)[:8]
    sent, send = [], Sender.send

    def counting(self, tensors):
        sent.extend(each.nbytes for each in tensors)
        send(self, tensors)

    refused = []
    for target in (Named(y, y), {"y": Named(y, y)}):
        try:
            runner.step(x, target)
        except OptionError as error:
            refused.append(str(error))
    Sender.send = counting
    runner.step(x, {"y": [y]})
    return refused, max(sent)


def test_targets_are_sent_without_the_memory_around_them_or_refused():
    for refused, most in ranks.run(_sent, 2, ranks.plan(4, 2, "1f1b", 4)):
        assert len(refused) == 2
        assert all("target: a Named does not travel to the last rank" in each for each in refused)
        assert most < 10_000


def _refilled(rank, plan):
    """Losses with batches in memory of their own, and with the same ones in memory that is used again."""
    losses = []
    for fresh in (True, False):
        runner = made(rank, plan)
        x, y = (torch.empty(8, 6, dtype=torch.float64) for _ in range(2))
        for batch in range(4):
            if fresh:
                x, y = torch.empty_like(x), torch.empty_like(y)
            for tensor, values in zip((x, y), ranks.numbers(batch, 8), strict=True):
                tensor.copy_(values)
            losses.append(runner.step(x, y))
        runner.drain()
        runner.close()
    return [None if loss is None else loss.item() for loss in losses]


def test_what_does_not_flush_lets_batches_be_filled_again():
    for losses in ranks.run(_refilled, 2, ranks.plan(4, 2, "2bw", 4)):
        assert losses[:4] == losses[4:]


def _validated(rank, plan, directory, evaluates):
    """Losses after a checkpoint that is written within a pass, behind a validation; and those of a resume."""

    def validate(runner, evaluates=True):
        return [runner.evaluate(*batch) for batch in runner.read(loader(0), evaluates=evaluates)]

    def train(runner, first):
        losses = []
        for number, batch in enumerate(runner.read(loader(0)), first):
            if number == 1:
                validate(runner)
            losses.append(runner.step(*batch))
            if number == 2:
                validate(runner, evaluates)
                runner.save(directory)
        return losses

    runner = made(rank, plan)
    losses = train(runner, 0)[3:] + train(runner, 5)
    runner.close()
    again = made(rank, plan)
    again.load(directory)
    validated = validate(again)
    found = train(again, 3) + train(again, 5)
    again.close()
    return losses, found, validated


def test_a_pass_that_evaluates_within_another_leaves_its_place(tmp_path):
    for result in ranks.run(_validated, 2, ranks.plan(4, 2, "1f1b", 4), tmp_path, True):
        assert not isinstance(result, str), result
        losses, found, validated = result
        assert losses == found and (len(found), len(validated)) == (7, 5)


def test_another_pass_within_a_pass_is_refused(tmp_path):
    for result in ranks.run(_validated, 2, ranks.plan(4, 2, "1f1b", 4), tmp_path, False):
        assert isinstance(result, str) and "OptionError: a pass of read() is under way" in result, result


def test_after_the_last_pass_nothing_is_left_to_read_but_what_is_new():
    reader, again = Reader(), Reader()
    assert len([*reader.read(range(3), last=True)]) == 3
    again.restore(reader.state())
    assert [*again.read(range(5), last=True)] == [3, 4]
    assert [*again.read(range(2))] == [0, 1]  # a pass of its own after all


def test_the_next_pass_after_a_resume_has_its_own_order():
    def batches(generator):
        return DataLoader(range(24), 8, shuffle=True, generator=generator)

    def order(reader, generator):
        return torch.cat([*reader.read(batches(generator))]).tolist()

    reader, generator = Reader(), torch.Generator().manual_seed(5)
    order(reader, generator)
    [*reader.read([torch.zeros(1)])]  # another pass, without a generator
    state = reader.state()
    wanted = order(reader, generator)
    again, generator = Reader(), torch.Generator().manual_seed(5)
    again.restore(state)
    assert order(again, generator) == wanted
    first = next(iter(again.read(batches(generator))))
    assert len(first) == 8
    again.restore(again.state())
    with pytest.raises(
        OptionError, match="^1 batches of a pass were read with 1 generators, and these batches have 0"
    ):
        next(again.read([torch.zeros(1)]))


class _Noting:
    """What would be sent."""

    def __init__(self, peer, most):
        self.send = peer.sent.extend

    def settle(self):
        pass


def test_words_are_on_the_cpu_whatever_device_is_the_default(monkeypatch):
    monkeypatch.setattr(_data, "Sender", _Noting)
    peer = SimpleNamespace(rank=1, sent=[])
    with torch.device("meta"):
        Channel([peer], None, None, 1.0).tell("end")
    assert [each.device.type for each in peer.sent] == ["cpu", "cpu"]
