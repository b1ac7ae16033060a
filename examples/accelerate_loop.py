"""accelerate: a context squeezes a prepared model, and save_state() has the session's state too.

Run it from the repository's root: .venv/bin/python examples/accelerate_loop.py
"""

from importlib.resources import files

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from squeezebox.integrations.accelerate import squeezed

data = np.load(files("squeezebox_demo") / "fashion_mnist.npz")
images = torch.from_numpy(data["train_images"][:1024]).unsqueeze(1) / 255.0
labels = torch.from_numpy(data["train_labels"][:1024]).long()
layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(images, labels), batch_size=64)

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with squeezed(accelerator, model, optimizer, noise=1e-3) as session:
    for inputs, target in loader:
        optimizer.zero_grad()
        with session.step():  # also covers the loss
            loss = nn.functional.cross_entropy(model(inputs), target)
        accelerator.backward(loss)
        optimizer.step()
    print(f"loss {loss.item():.3f}\n{session.report()}")
    accelerator.save_state("squeezed-state")
