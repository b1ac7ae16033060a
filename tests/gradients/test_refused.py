"""What cannot be is refused in words; a rank that dies, hangs or raises is named."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import squeezebox
from squeezebox.schema import SqueezeboxError
from tests.gradients import ranks

PATIENCE = 20.0


def _said(call):
    try:
        call()
    except SqueezeboxError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _refusals(rank):
    def compress(net, *options, **named):
        return _said(lambda: squeezebox.compress_gradients(net, *options, **named))

    ddp = ranks.wrapped(ranks.model())
    hooked = ranks.wrapped(ranks.model())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    embedded = ranks.wrapped(nn.Sequential(nn.Embedding(4, 3, sparse=True)))
    imaginary = nn.Module()
    imaginary.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    sharded = fully_shard(ranks.model(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    return {
        "method": compress(ddp, "zip", ratio=3.0),
        "no target": compress(ddp),
        "two targets": compress(ddp, noise=0.1, ratio=3.0),
        "noise": compress(ddp, noise=1.5),
        "text": compress(ddp, ratio="30"),
        "noise of top-k": compress(ddp, "top-k", noise=0.1),
        "rank of top-k": compress(ddp, "top-k", ratio=3.0, rank=2),
        "rank": compress(ddp, "powersgd", rank=0),
        "rank, a bool": compress(ddp, "powersgd", rank=True),
        "ratio of powersgd": compress(ddp, "powersgd", ratio=50.0),
        "ratio": compress(ddp, ratio=0.5),
        "balanced": compress(ddp, noise=0.1, balanced=True),
        "patience": compress(ddp, noise=0.1, patience=0.0),
        "module": compress(ranks.model(), noise=0.1),
        "sharded": compress(sharded, noise=0.1),
        "hook": compress(hooked, noise=0.1),
        "sparse": compress(embedded, noise=0.1),
        "complex": compress(ranks.wrapped(imaginary), noise=0.1),
    }


def test_refused_in_words():
    (said,) = ranks.run(_refusals, 1)
    assert isinstance(said, dict), said
    expected = {
        "method": "no method 'zip'",
        "no target": "one of noise= and ratio=",
        "two targets": "one of noise= and ratio=",
        "noise": "from 0 to 1",
        "text": "ratio='30' is a str",
        "noise of top-k": "Give such a one, or ratio=",
        "rank of top-k": "rank=2 with method 'top-k'",
        "rank": "rank=0",
        "rank, a bool": "rank=True",
        "ratio of powersgd": "ratio=50.0",
        "ratio": "ratio=0.5",
        "balanced": "only 'auto' has several plans",
        "patience": "seconds above 0",
        "module": "Wrap the model first",
        "sharded": "sharded (FSDP)",
        "hook": "communication hook already",
        "sparse": "'0' has sparse gradients",
        "complex": "'weight' is torch.complex64",
    }
    for what, words in expected.items():
        assert said[what].startswith("OptionError") and words in said[what], (what, said[what])


def _differ(rank):
    ddp = ranks.wrapped(ranks.model())
    return _said(lambda: squeezebox.compress_gradients(ddp, noise=0.1 if rank else 0.2))


def test_ranks_with_other_options_are_refused():
    for said in ranks.run(_differ, 2):
        assert said.startswith("RankError: rank ") and "noise=0.2" in said and "noise=0.1" in said


class _Troubled(nn.Module):
    def __init__(self, trouble):
        super().__init__()
        self.inner, self.trouble, self.calls = ranks.model(), trouble, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2 and self.trouble:
            if self.trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "raises":
                raise ValueError("the input looks bad")
            time.sleep(600)
        return self.inner(x)


def _train(rank, trouble):
    ddp = ranks.wrapped(_Troubled(trouble if rank == 1 else None), broadcast_buffers=False)
    squeezebox.compress_gradients(ddp, noise=0.1, patience=PATIENCE)
    begun = time.monotonic()
    try:
        ranks.train(ddp, rank, 2)
        begun = time.monotonic()
        ranks.train(ddp, rank, 2, first=2)
    except ValueError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), time.monotonic() - begun
    return "nothing happened"


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("raises", "hangs")]


@pytest.mark.parametrize("trouble", ["dies", *SLOW])
def test_a_missing_rank_is_named(trouble):
    processes, results = ranks.start(_train, 3, trouble)
    found = []
    for rank, result in ranks.collect(processes, results, 2).items():
        assert rank != 1
        kind, message, seconds = result
        found.append(message)
        assert kind == "RankError", message
        assert message.startswith("rank 1 did not come to the exchange of gradients"), message
        assert seconds < PATIENCE + 30.0
    assert len(found) == 2
    for process in processes:
        process.kill()
