"""torch.compile: squeezebox.compile() in its place; the graphs hold activations in 8 bits.

Run it from the repository's root: .venv/bin/python examples/compiled.py (needs a C++ compiler)
"""

from importlib.resources import files

import numpy as np
import torch
from torch import nn

import squeezebox

data = np.load(files("squeezebox_demo") / "fashion_mnist.npz")
images = torch.from_numpy(data["train_images"][:1024]).unsqueeze(1) / 255.0
labels = torch.from_numpy(data["train_labels"][:1024]).long()
layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

step = squeezebox.compile(model, bits=8)
for batch in torch.arange(1024).split(64):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(step(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}\n{step.report()}")
