"""What an audit trains: a small CNN on scikit-learn's handwritten digits, with shifted images and dropout.

Run it from the repository's root, where scikit-learn is installed:
.venv/bin/squeezebox audit examples.audit_digits:train --arms plain,squeezed --seeds 5 --out audit-digits
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
HELD_OUT = 597


def images():
    """All 1797 images, scaled to 0..1, and their digits."""
    digits = load_digits()
    return torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target)


def network():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4, 10))


def train(run):
    """A whole training, as ``squeezebox.audit`` calls it: factors vary as ``run`` says."""
    x, y = images()
    data = TensorDataset(x[:-HELD_OUT], y[:-HELD_OUT])
    with run.initialising():
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with run.attach(model, optimizer):
        for _ in range(EPOCHS):
            for inputs, target in DataLoader(data, batch_size=50, shuffle=True, generator=run.order):
                shift = int(torch.randint(-1, 2, ()))  # torch's global generator: augmentation
                optimizer.zero_grad()
                with run.step():
                    loss = functional.cross_entropy(model(inputs.roll(shift, 3)), target)
                loss.backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(x[-HELD_OUT:])
    ink = x[-HELD_OUT:].mean((1, 2, 3))
    groups = ["bold" if bold else "light" for bold in ink > ink.median()]
    return run.finish(model, outputs, y[-HELD_OUT:], groups=groups)
