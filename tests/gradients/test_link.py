"""Ranks over an emulated link: the same bits, and no collective sooner than its bytes take."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import squeezebox
from squeezebox import gradients
from squeezebox.schema import Link, OptionError
from tests.gradients import ranks

SPEED = 4e5  # bytes a second
STEPS = 4


def _slow(rank, arm):
    """Seconds, bytes and weights of a training over the link; its weights over none."""
    found, options = [], {"entropy": {"ratio": 6.0}, "powersgd": {"rank": 1}}.get(arm)
    group = gradients.link_group(Link(bytes_per_second=SPEED))
    for each in (None, group):
        net = ranks.model()
        ddp = nn.parallel.DistributedDataParallel(net, process_group=each)
        begun, before = time.monotonic(), group.wire.sent_bytes
        if options:
            squeezed = squeezebox.compress_gradients(ddp, arm, **options)
        elif arm == "fp16":
            ddp.register_comm_hook(each, default_hooks.fp16_compress_hook)
        elif arm == "torch's powersgd":
            ddp.register_comm_hook(powerSGD_hook.PowerSGDState(each, 1, 2), powerSGD_hook.powerSGD_hook)
        ranks.train(ddp, rank, STEPS)
        seconds, sent = time.monotonic() - begun, group.wire.sent_bytes - before
        if options:
            own = squeezed.total.sent_bytes
            assert each is None or own <= sent < own + 2000  # and what DDP tells itself
            squeezed.close()
        found.append(ranks.weights(net))
    return *found, seconds, sent


ARMS = ["plain", "powersgd"]
ARMS += [pytest.param(each, marks=pytest.mark.slow) for each in ("entropy", "fp16", "torch's powersgd")]


@pytest.mark.parametrize("arm", ARMS)
def test_a_link_changes_seconds_and_no_bits(arm):
    results = ranks.run(_slow, 2, arm)
    assert all(isinstance(result, tuple) for result in results), results
    elements = sum(each.numel() for each in ranks.model().parameters())
    for bits, slow, seconds, sent in results:
        assert torch.equal(slow, bits)
        assert seconds >= sent / SPEED
        if arm == "plain":  # ring all-reduces between two ranks, and what DDP checks on the way
            assert STEPS * 4 * elements <= sent < STEPS * 4 * elements + 2000
        else:
            assert 0 < sent < STEPS * 4 * elements


def _refused(rank):
    with pytest.raises(OptionError, match="0 bytes"):
        gradients.link_group(Link(bytes_per_second=0.0))
    group = gradients.link_group(Link(bytes_per_second=1e9, latency_seconds=0.25))
    begun = time.monotonic()
    torch.distributed.barrier(group=group)
    return time.monotonic() - begun


def test_latency_and_what_no_link_has():
    assert min(ranks.run(_refused, 2)) >= 0.25
