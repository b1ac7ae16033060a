"""Transforms, threads, autocast and disabled hooks at every entry point: works, or is refused by name."""

import contextlib
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

import squeezebox
from squeezebox.streaming import StreamedStep


class Net(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.transform = transform

    def forward(self, x):
        return self.transform(self.body(x)).mean((2, 3))


MODELS = {
    "plain": lambda x: x,
    "vmap": vmap(lambda row: row.exp() * row),
    "grad": lambda x: x * grad(lambda each: each.square().sum())(x),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,))[1],
}


def step(model, session, x, y):
    try:
        F.cross_entropy(model(x), y).backward()
        session.report()
    finally:
        session.detach()


def attach(model, x, y):
    step(model, squeezebox.attach(model, noise=1e-2), x, y)


def plan(model, x, y):
    made = squeezebox.plan(model, sample=(x, y), loss_fn=F.cross_entropy, exact=True)
    step(model, squeezebox.attach(model, plan=made), x, y)


def estimate(model, x, y):
    squeezebox.estimate(model, sample=(x, y), loss_fn=F.cross_entropy)


def max_batch(model, x, y):
    squeezebox.max_batch(model, sample=(x, y), loss_fn=F.cross_entropy, budget="64MiB", exact=True)


def find_batch(model, x, y):
    squeezebox.find_batch(model, sample=(x, y), loss_fn=F.cross_entropy, memory="64MiB", exact=True)


def compiled(model, x, y):
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("Inductor needs a C++ compiler; none is here")
    run = squeezebox.compile(model, bits=8)
    F.cross_entropy(run(x), y).backward()


def streamed(model, x, y):
    StreamedStep(model, F.cross_entropy, height=8)(x, y)


def in_thread(do):
    found = []

    def run():
        try:
            do()
        except squeezebox.SqueezeboxError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if found:
        raise found[0]


def within(context):
    def run(do):
        with context():
            do()

    return run


AROUND = {
    "thread": in_thread,
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "disabled": within(lambda: disable_saved_tensors_hooks("none here")),
    "dual": within(forward_ad.dual_level),
    "vmap": lambda do: vmap(lambda _: do() or torch.zeros(()))(torch.zeros(2)),
    "grad": lambda do: grad(lambda x: (do() or x).sum())(torch.zeros(2)),
}
WITHIN = [(name, "nothing") for name in MODELS]
FIRST = [("grad", "nothing"), ("plain", "disabled"), ("plain", "vmap"), ("plain", "grad")]  # refused at once
CASES = [(entry, *case) for entry in (attach, estimate, streamed) for case in WITHIN]
CASES += [(entry, "plain", around) for entry in (estimate, streamed) for around in AROUND]
CASES += [(attach, "plain", around) for around in ("thread", "autocast", "disabled", "dual")]
CASES += [(entry, *case) for entry in (plan, max_batch, find_batch, compiled) for case in FIRST]
CASES += [(plan, "plain", "thread"), (plan, "plain", "autocast"), (plan, "vmap", "nothing")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("entry", "name", "around"), CASES)
def test_it_works_or_is_refused_by_name(name, around, entry):
    torch.manual_seed(0)
    model, x, y = Net(MODELS[name]), torch.randn(8, 3, 16, 16), torch.randint(8, (8,))
    run = AROUND.get(around, lambda do: do())
    with contextlib.suppress(squeezebox.SqueezeboxError):
        run(lambda: entry(model, x, y))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert type(model) is Net
    F.cross_entropy(model(x), y).backward()  # as if nothing had been
