"""Data parallel trainings in real processes over gloo."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.pipeline.ranks import collect, run, start

__all__ = ["collect", "run", "start"]


def model(seed=0, width=24, depth=4, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 5)).to(dtype)


def wrapped(net, **options):
    """Several buckets, so that what is between them is tried too."""
    return DistributedDataParallel(net, bucket_cap_mb=0.003, **options)


def batch(rank, step, width=24, samples=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(samples, width, generator=generator).to(dtype)
    return x, torch.randint(0, 5, (samples,), generator=generator)


def train(ddp, rank, steps, optimizer=None, first=0, dtype=torch.float32):
    """Losses; weights are the model's."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        x, y = batch(rank, step, dtype=dtype)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(net):
    return torch.cat([each.detach().double().flatten() for each in net.parameters()])
