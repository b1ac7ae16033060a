"""Shares and bits by role add up, and each step has its own batch."""

import pytest
import torch
from torch import nn

pytest.importorskip("skimage", reason='needs pip install "squeezebox[bench]"')

from benchmarks import packed  # noqa: E402
from benchmarks.tasks import Task  # noqa: E402


def test_every_step_has_a_batch_of_its_own_and_shares_add_up():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.Flatten()
    )
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 3, 12, 12, generator=generator), torch.arange(8)) for _ in range(4)]

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1e-3)

    task = Task(model, *batches[0], nn.functional.cross_entropy, sgd)
    seen = []
    taken = packed.stepping(task, iter(batches[1:]), torch.contiguous_format)

    def step():
        taken()
        seen.append(task.inputs)

    record = packed.records(task, step, 1e-2, 1, 1, 1)[0]
    assert all(torch.equal(x, batch[0]) for x, batch in zip(seen, batches[1:], strict=True))
    parts = packed.bits(record).values()
    assert 0.5 < sum(part["held"] for part in parts) <= 1.0  # small ones are counted and not listed
    assert 0.9 < sum(part["saved"] for part in parts) <= 1.0
    assert all(0.0 < part["bits"] <= 32.0 for part in parts)
