"""Train a small CNN on random images, squeezed, with the loss computed outside the model.

Run it from the repository's root: .venv/bin/python examples/loss_outside_the_model.py
"""

import torch
from torch import nn
from torch.nn import functional

import squeezebox


def main():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 32 * 32, 10)]
    model = nn.Sequential(*layers)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    squeezed = squeezebox.attach(model, optimizer=optimizer, noise=1e-3)

    def gradients():
        with squeezed.step():
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    for step in range(20):
        optimizer.zero_grad()
        loss = gradients()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    squeezed.measure_noise(gradients)
    print(squeezed.report())
    squeezed.detach()


if __name__ == "__main__":
    main()
