"""Lightning: a callback squeezes a LightningModule, and its state goes into the checkpoint.

Run it from the repository's root: .venv/bin/python examples/lightning_trainer.py
"""

from importlib.resources import files

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from squeezebox.integrations.lightning import SqueezeboxCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4)]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 36, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


data = np.load(files("squeezebox_demo") / "fashion_mnist.npz")
images = torch.from_numpy(data["train_images"][:1024]).unsqueeze(1) / 255.0
labels = torch.from_numpy(data["train_labels"][:1024]).long()
squeezed = SqueezeboxCallback(noise=1e-3)
options = {"accelerator": "cpu", "logger": False, "enable_model_summary": False}
trainer = pl.Trainer(max_epochs=2, callbacks=[squeezed], enable_checkpointing=False, **options)
trainer.fit(Classifier(), DataLoader(TensorDataset(images, labels), batch_size=64))
trainer.save_checkpoint("squeezed.ckpt")  # fit(..., ckpt_path=...) goes on from it
print(squeezed.report)
