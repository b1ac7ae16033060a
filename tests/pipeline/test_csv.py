"""Orders to and from torch.distributed.pipelining, and what its runtime makes of ours."""

import dataclasses

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleZBVZeroBubble, schedules

from squeezebox.schedules import PUBLISHED, SYNCHRONOUS, Costs, from_csv, make, simulate, zero_bubble_v
from tests.pipeline import ranks
from tests.pipeline.test_exact import _chains, _check, _delayed

MICROBATCHES = 4


def _ours(name):
    return make(name, 2, MICROBATCHES, loops=2 if PUBLISHED[name].loops else 1)


def _stages(rank, placement):
    model = ranks.chain()
    x = ranks.numbers(0, 2)[0]
    share = len(model) // len(placement)
    return model, [
        PipelineStage(
            model[stage * share : (stage + 1) * share],
            stage,
            len(placement),
            torch.device("cpu"),
            input_args=(x.clone().requires_grad_(stage > 0),),
            output_args=(x.clone().requires_grad_(),),
        )
        for stage, owner in enumerate(placement)
        if owner == rank
    ]


def _by_torch(rank, folder):
    """Losses and gradients by torch's runtime, reading our orders; by schedule."""
    found = {}
    for name in SYNCHRONOUS:
        schedule = _ours(name)
        path = folder / f"{name}.csv"
        if rank == 0:
            path.write_text(schedule.to_csv())
        torch.distributed.barrier()
        model, stages = _stages(rank, schedule.placement)
        runtime = schedules._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        runtime._load_csv(path)
        x, y = ranks.numbers(0, 2 * MICROBATCHES)
        last, losses = schedule.placement[-1] == rank, []
        runtime.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if last else {}))
        gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        found[name] = [each.item() for each in losses], gradients
    return found


def test_torchs_runtime_carries_out_our_orders(tmp_path):
    results = ranks.run(_by_torch, 2, tmp_path)
    model, (x, y) = ranks.chain(), ranks.numbers(0, 2 * MICROBATCHES)
    losses = [nn.functional.mse_loss(model(a), b) for a, b in zip(x.split(2), y.split(2), strict=True)]
    for loss in losses:
        loss.backward()
    for result in results:
        assert not isinstance(result, str), result
    for name in SYNCHRONOUS:
        told = next(result[name][0] for result in results if result[name][0])
        assert told == [loss.item() for loss in losses], name
        gradients = {key: each for result in results for key, each in result[name][1].items()}
        assert len(gradients) == len([*model.parameters()])
        for key, parameter in model.named_parameters():
            assert torch.equal(gradients[key], parameter.grad / MICROBATCHES), (name, key)


def _of_torch(rank, folder):
    """Files that torch writes."""
    found = {}
    for kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        stages = _stages(rank, (0, 1, 1, 0))[1]
        made = kind(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        path = folder / f"{rank}.csv"
        made._dump_csv(path, format="compute_only")
        found[kind.__name__] = path.read_text()
    return found


def test_our_runner_carries_out_torchs_orders(tmp_path):
    files, _ = ranks.run(_of_torch, 2, tmp_path)
    assert from_csv(files["ScheduleZBVZeroBubble"]).orders == zero_bubble_v(2, MICROBATCHES).orders
    both = from_csv(files["ScheduleDualPipeV"], "dualpipe-v")
    assert simulate(both, Costs.even(4)).seconds > 0.0
    ends = dataclasses.replace(both, turns=None)  # what goes on without end is of no use in a message
    cases = [("adamw", ranks.plan(8, 2, "zb-v", MICROBATCHES, loops=2), (2,), {"schedule": ends})]
    _check(cases, ranks.run(_chains, 2, cases), _delayed, tolerance=1e-12)
