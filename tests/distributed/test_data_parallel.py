"""DistributedDataParallel and fully_shard on two processes: gradients as without a session."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import squeezebox
from squeezebox.schema import Action
from tests.capture.nets import Checkpointed, loss_of, resnet
from tests.pipeline import ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
RANKS, STEPS = 2, 3
SHAPE = (4, 3, 18, 18)
WRAPPINGS = [
    pytest.param(("ddp", "fsdp"), id="wrapped"),
    pytest.param(("ddp, checkpointed", "fsdp, checkpointed"), id="checkpointed", marks=pytest.mark.slow),
]


def wrap(model, wrapping):
    if wrapping.startswith("ddp"):
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in model.children():
        if any(parameter.requires_grad for parameter in part.parameters()):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def net(wrapping):
    torch.manual_seed(0)
    return Checkpointed() if "checkpointed" in wrapping else resnet(8, 1)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def gradients(wrapping, *, attached="", **options):
    """Gradients of a few steps; attached to the model ``before`` or ``after`` it is wrapped."""
    model = net(wrapping)
    if "recompute" in options:
        options = {"plan": least_plan(model, **options)}
    session = squeezebox.attach(model, **options) if attached == "before" else None
    wrapped = wrap(model, wrapping)
    if attached == "after":
        session = squeezebox.attach(wrapped, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped(torch.randn(SHAPE))).backward()
        found.append([whole(p.grad) for p in wrapped.parameters() if p.grad is not None])
        optimizer.step()
    if session is not None:
        assert 0 < session.report().packed_bytes < session.report().saved_bytes
        session.detach()
    return found


def least_plan(model, recompute):
    """Nothing lost: much is made again from what is held, or moved."""
    sample = torch.randn(SHAPE), torch.zeros(())
    options = {"exact": True, "offload": not recompute, "recompute": recompute}
    plan = squeezebox.plan(model, sample=sample, loss_fn=lambda output, _: loss_of(output), **options)
    assert plan.keys(*((Action.RECOMPUTE, Action.REGENERATE) if recompute else (Action.OFFLOAD,)))
    return plan


def noise_of(found, reference):
    pairs = list(zip(found[0], reference[0], strict=True))
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))


def check(wrapping):
    reference = gradients(wrapping)
    torch.testing.assert_close(gradients(wrapping), reference, rtol=0, atol=0)  # else nothing is shown
    for attached in ("before", "after"):
        exact = gradients(wrapping, attached=attached, exact=True)
        torch.testing.assert_close(exact, reference, rtol=0, atol=0)
        assert 0 < noise_of(gradients(wrapping, attached=attached, noise=1e-3), reference) < 5e-3, attached
    if "checkpointed" in wrapping:
        return
    check_plans(wrapping, reference)


def check_plans(wrapping, reference):
    for recompute in (False, True):
        if recompute and wrapping == "fsdp":
            with pytest.raises(squeezebox.UnsupportedModelError, match="recompute=False"):
                gradients(wrapping, attached="before", recompute=recompute)
            continue
        planned = gradients(wrapping, attached="before", recompute=recompute)
        torch.testing.assert_close(planned, reference, rtol=0, atol=0)
    with pytest.raises(squeezebox.OptionError, match="before it is"):
        least_plan(wrap(net(wrapping), wrapping), True)


def check_all(rank, wrappings):
    for wrapping in wrappings:
        check(wrapping)
    return "equal"


def packed_state(rank):
    """Whether ranks, each with data of its own, have the same weights after a few updates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.GELU(), torch.nn.Linear(600, 64))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    session = squeezebox.attach(wrapped, optimizer=optimizer, exact=True, update_noise=0.02)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(16, 64)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
    assert 0.0 < session.report().update_noise < 0.02
    session.detach()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    all_weights = [torch.empty_like(weights) for _ in range(RANKS)]
    dist.all_gather(all_weights, weights)
    with pytest.raises(squeezebox.OptionError, match="fully_shard"):
        sharded = wrap(net("fsdp"), "fsdp")
        squeezebox.attach(sharded, optimizer=torch.optim.AdamW(sharded.parameters()), update_noise=0.02)
    return torch.equal(*all_weights)


def test_ranks_with_packed_state_stay_together():
    assert ranks.run(packed_state, RANKS) == [True] * RANKS


@pytest.mark.every(3)
@pytest.mark.parametrize("wrappings", WRAPPINGS)
def test_gradients_are_those_without_a_session(wrappings):
    for found in ranks.run(check_all, RANKS, wrappings):
        assert found == "equal", found
