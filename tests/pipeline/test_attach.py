"""Squeezebox inside a stage: what microbatches in flight have saved is packed."""

import pytest
import torch

import squeezebox
from squeezebox.pipeline import Runner
from squeezebox.schema import InputForm
from tests.pipeline import ranks

TOKENS = (InputForm(shape=(5,), dtype="int64"),)


def _train(rank, schedule, options):
    torch.manual_seed(0)
    model = ranks.Tied(depth=4, width=512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = ranks.plan(6, 2, schedule, 4, inputs=TOKENS)
    runner = Runner(model, plan, optimizer=optimizer, loss_fn=ranks.entropy)
    sessions = [squeezebox.attach(stage, **options) for stage in runner.stages.values()]
    losses = [runner.step(*ranks.words(batch, 8)) for batch in range(40)]
    runner.drain()
    report = sessions[0].report()
    for session in sessions:
        session.detach()
    runner.close()
    return [None if loss is None else loss.item() for loss in losses], report.saved_bytes, report.packed_bytes


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_stages_are_packed(schedule):
    results = ranks.run(_train, 2, schedule, {"noise": 1e-3})
    for result in results:
        assert not isinstance(result, str), result
        print(result)
