"""Schedules exported to torch.distributed.pipelining run there, and give the same gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from squeezebox import schedules
from squeezebox.pipeline import cut
from tests.pipeline import ranks


def _gradients(rank, order, loops, folder):
    model = ranks.chain()
    blocks = [piece.module.inner for piece in cut(model, ())]
    count = 2 * loops
    stages = [
        PipelineStage(
            nn.Sequential(*blocks[stage * 8 // count : (stage + 1) * 8 // count]),
            stage,
            count,
            torch.device("cpu"),
        )
        for stage in range(rank, count, 2)
    ]
    path = folder / f"order-{rank}.csv"
    path.write_text(order.to_csv())
    schedule = _PipelineScheduleRuntime(stages, order.microbatches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(path), "compute_only")
    x, y = ranks.numbers(0, 2 * order.microbatches)
    schedule.step(*([x] if rank == 0 else []), target=y)
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("order", "loops"),
    [
        (schedules.gpipe(2, 4), 1),
        (schedules.one_f_one_b(2, 4), 1),
        (schedules.breadth_first(2, 4, loops=2), 2),
        (schedules.interleaved(2, 4, loops=2), 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_torch_runs_them(order, loops, tmp_path):
    order = schedules.Schedule(
        **{name: getattr(order, name) for name in ("name", "placement", "microbatches", "batches", "orders")}
    )
    results = ranks.run(_gradients, 2, order, loops, tmp_path)
    for result in results:
        assert not isinstance(result, str), result
    model = ranks.chain()
    x, y = ranks.numbers(0, 2 * order.microbatches)
    for a, b in zip(x.split(2), y.split(2), strict=True):
        (nn.functional.mse_loss(model(a), b) / order.microbatches).backward()
    together = results[0] | results[1]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-12, atol=1e-14)
