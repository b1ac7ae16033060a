"""A training that may be killed at any moment: run as a program, it goes on from its last checkpoint.

    python -m tests.session.soaking NETWORK WAY STEPS FOLDER

Batches have 3 to 12 samples, and each step's are the same in every run. Evaluation and checkpoints come
between.
`progress` in FOLDER has a line for each step; `end.pt` is there when all are done.
"""

import gc
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import squeezebox
from squeezebox import codecs

LARGEST, SAVES, EVALUATES, MEASURES = 12, 40, 25, 10
PAGE = os.sysconf("SC_PAGE_SIZE")


class Gpt(nn.Module):
    """A causal transformer's layer over bytes, with dropout."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.position = nn.Embedding(64, width), nn.Parameter(torch.randn(24, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 64)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(24), persistent=False)

    def forward(self, index):
        hidden = self.layer(self.embed(index) + self.position, src_mask=self.mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)


class Lstm(nn.Module):
    """A recurrent network over rows of numbers."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 48, batch_first=True), nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def cnn():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [
        each for _ in range(4) for each in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
    ]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 49, 10))


NETWORKS = {"cnn": cnn, "gpt": Gpt, "lstm": Lstm}


def batch(network, step, size=None):
    generator = torch.Generator().manual_seed(step)
    size = size or int(torch.randint(3, LARGEST + 1, (), generator=generator))
    if network == "gpt":
        tokens = torch.randint(64, (size, 25), generator=generator)
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()
    shape, classes = ((3, 16, 16), 10) if network == "cnn" else ((20, 16), 5)
    return torch.randn(size, *shape, generator=generator), torch.randint(
        classes, (size,), generator=generator
    )


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def attached(way, network, model, optimizer, folder):
    """A session of one of the ways, or None; plans are made once, and kept beside the checkpoint."""
    if way == "plain":
        return None
    codecs.require(torch.float32)  # else the first steps hold exactly what later ones pack
    if way == "noise":
        return squeezebox.attach(model, optimizer=optimizer, noise=1e-2)
    path = folder / "plan.json"
    if not path.exists():
        squeezebox.plan(
            model,
            optimizer=optimizer,
            sample=batch(network, 0, LARGEST),
            loss_fn=F.cross_entropy,
            exact=True,
            offload=str(folder / "offload"),
            states=way == "states",
        ).save(path)
    return squeezebox.attach(model, optimizer=optimizer, plan=squeezebox.load_plan(path))


def saved(path, values):
    """Whole or not at all, also where the process is killed meanwhile."""
    torch.save(values, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def evaluate(network, model):
    model.eval()
    x, y = batch(network, 1 << 30, 16)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    model.train()
    return loss.item()


def main(network, way, steps, folder):
    folder = Path(folder)
    (folder / "offload").mkdir(exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = NETWORKS[network]()
    optimizer = optimizer_of(model)
    session = attached(way, network, model, optimizer, folder)
    torch.manual_seed(1)
    begin, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        found = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["random"])
        begin = found["step"]
        if session is not None:
            session.load_state_dict(found["session"])
    with (folder / "progress").open("a", buffering=1) as progress:
        for step in range(begin, steps):
            x, y = batch(network, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if (step + 1) % EVALUATES == 0:
                evaluate(network, model)
            if (step + 1) % SAVES == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                state |= {"random": torch.get_rng_state(), "session": session and session.state_dict()}
                saved(checkpoint, state)
            resident = files = 0
            if step % MEASURES == 0:
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
                files = len(os.listdir("/proc/self/fd"))
            progress.write(f"{os.getpid()} {step} {resident} {files}\n")
    codecs_used = set()
    if session is not None:
        codecs_used = {tensor.codec for tensor in session.report().tensors}
        session.detach()
    end = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "codecs": codecs_used}
    saved(folder / "end.pt", end | {"loss": evaluate(network, model)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
