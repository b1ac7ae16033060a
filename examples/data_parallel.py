"""DistributedDataParallel: attach to the module before it is wrapped; every rank has its own session.

Run it from the repository's root: .venv/bin/torchrun --nproc-per-node 2 examples/data_parallel.py
"""

from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would hold the process group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import squeezebox

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
data = np.load(files("squeezebox_demo") / "fashion_mnist.npz")
images = torch.from_numpy(data["train_images"][:1024]).unsqueeze(1)[rank::ranks] / 255.0
labels = torch.from_numpy(data["train_labels"][:1024]).long()[rank::ranks]
torch.manual_seed(0)
layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

session = squeezebox.attach(model, optimizer=optimizer, noise=1e-3)
parallel = DistributedDataParallel(model)
for batch in torch.arange(len(images)).split(64):
    optimizer.zero_grad()
    with session.step():
        loss = nn.functional.cross_entropy(parallel(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
if rank == 0:
    print(f"loss {loss.item():.3f}\n{session.report()}")
session.detach()
del parallel  # so that nothing holds the group, and its threads end before Python does
dist.destroy_process_group()
