"""What an audit trains: a small CNN on scikit-learn's handwritten digits, with shifted images and dropout.

.venv/bin/squeezebox audit examples.audit_digits:train --arms plain,squeezed --seeds 5 --out audit-digits
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def network():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4, 10))


def train(run):
    """A whole training, as ``squeezebox.audit`` calls it: factors vary as ``run`` says."""
    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x, held_out = (x.float() / 16).view(-1, 1, 8, 8).split([1200, 597])
    with run.initialising():
        model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y[:1200]), batch_size=50, shuffle=True, generator=run.order)
    with run.attach(model, optimizer):
        for inputs, target in (batch for _ in range(EPOCHS) for batch in loader):
            shift = int(torch.randint(-1, 2, ()))  # torch's global generator: augmentation
            optimizer.zero_grad()
            with run.step():
                loss = functional.cross_entropy(model(inputs.roll(shift, 3)), target)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        outputs, ink = model.eval()(held_out), held_out.mean((1, 2, 3))
    groups = ["bold" if bold else "light" for bold in ink > ink.median()]
    return run.finish(model, outputs, y[1200:], groups=groups)
