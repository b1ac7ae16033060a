"""timm: any of its models, within 60 % of the plain step's peak.

Run it from the repository's root: .venv/bin/python examples/timm_model.py (timm needs torchvision)
"""

from importlib.resources import files

import numpy as np
import timm
import torch
from torch.nn import functional

import squeezebox

data = np.load(files("squeezebox_demo") / "fashion_mnist.npz")
images = functional.interpolate(torch.from_numpy(data["train_images"][:128])[:, None] / 255.0, size=64)
labels = torch.from_numpy(data["train_labels"][:128]).long()
model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

sample = (images[:32], labels[:32])
session = squeezebox.attach(
    model, optimizer=optimizer, budget="60%", noise=1e-2, sample=sample, loss_fn=functional.cross_entropy
)
for batch in torch.arange(128).split(32):
    optimizer.zero_grad()
    with session.step():
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}\n{session.report()}")
session.detach()
