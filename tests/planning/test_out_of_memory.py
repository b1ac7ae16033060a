"""Real out-of-memory, in a process whose address space is limited: where, how much, and what would fit."""

import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from squeezebox.planning import _out_of_memory, attach, explain_out_of_memory, explanation
from squeezebox.schema import OptionError, OutOfMemoryError

PREAMBLE = """
    import resource, torch
    import squeezebox, squeezebox.planning
    from pathlib import Path
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(64), nn.Flatten(),
        nn.Linear(32, 10),
    )

    def sample(size):
        return torch.randn(size, 3, 64, 64), torch.arange(size) % 10

    def step(size):
        x, y = sample(size)
        F.cross_entropy(model(x), y).backward()

    def limit(mebibytes):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), -1))

    step(2)
"""
BATCH = 1 << 19  # bytes that one sample takes after each convolution


def run(program):
    text = textwrap.dedent(PREAMBLE) + textwrap.dedent(program)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process
    found = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_in_forward_it_names_the_module_and_the_bytes():
    text = run("""
        limit(150)
        try:
            with squeezebox.explain_out_of_memory(model):
                step(128)
        except squeezebox.OutOfMemoryError as error:
            print(error)
    """)
    assert re.search(r"in forward, in module '[01234]'", text)
    asked, free, short = map(int, re.findall(r"\((\d+) bytes\)", text)[:3])
    assert asked == 128 * BATCH and short == asked - free
    assert "can't allocate memory" in text and "Give sample= and loss_fn=" in text


@pytest.mark.slow
def test_in_backward_it_names_the_tensor_that_was_read_and_the_plan_that_fits_trains():
    text = run("""
        session = squeezebox.attach(model, exact=True)
        step(2)
        x, y = sample(64)
        with session.step():
            loss = F.cross_entropy(model(x), y)
        limit(40)
        try:
            with squeezebox.explain_out_of_memory(model, session=session):
                loss.backward()
        except squeezebox.OutOfMemoryError as error:
            print(error)
    """)
    assert re.search(r"in backward, in module .\d., after .\d:\w+\.\w+. was read", text)
    assert "32.00 MiB (33554432 bytes) were asked for" in text
    assert 0 < int(re.search(r"about .*\((\d+) bytes\) short", text)[1]) <= 33554432


SAMPLED = """
    squeezebox.plan(model, sample=sample(8), loss_fn=F.cross_entropy, noise=1e-2)  # compiles kernels,
    squeezebox.estimate(model, sample=sample(8), loss_fn=F.cross_entropy)  # and torch loads its compiler
    x, y = sample(128)
    limit({limit})
    try:
        with squeezebox.explain_out_of_memory(model, sample=(x, y), loss_fn=F.cross_entropy, noise=1e-2):
            F.cross_entropy(model(x), y).backward()
    except squeezebox.OutOfMemoryError as error:
        text = str(error)
        print(text)
"""


@pytest.mark.slow
def test_where_no_plan_holds_the_batch_it_names_one_that_would():
    text = run(SAMPLED.format(limit=260))
    assert "No plan holds this batch" in text
    assert 80 <= int(re.search(r"a batch of about (\d+)", text)[1]) < 128


def test_other_errors_pass():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        with explain_out_of_memory(model):
            model(torch.ones(3, 3))
    assert not isinstance(caught.value, OutOfMemoryError)
    assert explanation(ValueError("tried to allocate 4 bytes"), model) is None


class Vast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return 1 - self.inner(x).sum().expand(1 << 50)


def test_a_forward_is_one_in_an_optimizers_closure_too_and_a_difference_is_no_backward():
    model, x = torch.nn.Sequential(Vast()), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (lambda: model(x), lambda: optimizer.step(lambda: model(x))):
        with pytest.raises(OutOfMemoryError, match="in forward, in module '0'"), explain_out_of_memory(model):
            step()


def test_an_explanation_is_not_explained_again():
    model = torch.nn.Sequential(Vast())
    with pytest.raises(OutOfMemoryError, match="in forward, in module '0'") as caught:
        with explain_out_of_memory(model), explain_out_of_memory(model):
            model(torch.ones(1, 2))
    assert "outside" not in str(caught.value)


def test_a_sample_that_is_none_is_refused_before_and_one_that_fails_hides_nothing():
    model, x = torch.nn.Sequential(Vast()), torch.ones(1, 2)
    with (
        pytest.raises(OptionError, match="sample"),
        explain_out_of_memory(model, sample=x, loss_fn=torch.sum),
    ):
        model(x)
    with pytest.raises(OutOfMemoryError, match="in forward, in module '0'.*No plan could be tried"):
        with explain_out_of_memory(model, sample=(torch.ones(1, 3), x), loss_fn=lambda o, t: o.sum()):
            model(x)


class Unforeseen(torch.nn.Linear):
    def forward(self, x):
        if type(x) is torch.Tensor:  # not where shapes alone are run
            torch.empty(1 << 50)
        return super().forward(x)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"sample": (1, 1)}, "give both"),
        ({"loss_fn": print}, "give both"),
        ({"noise": "x"}, "noise 'x' is no number"),
        ({"noise": -1}, "noise=-1"),
    ),
)
def test_options_of_another_kind_are_refused_before(options, words):
    with pytest.raises(OptionError, match=words), explain_out_of_memory(torch.nn.Linear(2, 2), **options):
        raise AssertionError("it ran")


def test_the_optimizer_counts_where_the_session_has_none(monkeypatch):
    model, seen = torch.nn.Linear(2, 2), []
    adam = torch.optim.Adam(model.parameters())
    monkeypatch.setattr(_out_of_memory, "_cheapest", lambda step, session: str(seen.append(step.optimizer)))
    session = attach(model)
    error = MemoryError("Unable to allocate 1.00 GiB")
    options = {"sample": (torch.zeros(2, 2), None), "loss_fn": print, "optimizer": adam}
    assert explanation(error, model, session=session, **options) is not None
    session.detach()
    assert seen == [adam]


def test_a_trial_that_lacks_memory_is_no_fault_of_the_model():
    model, x = torch.nn.Sequential(Unforeseen(2, 2)), torch.ones(4, 2)
    with pytest.raises(OutOfMemoryError, match="not even enough to try plans on small batches") as caught:
        with explain_out_of_memory(model, sample=(x, x), loss_fn=lambda o, t: o.sum()):
            model(x)
    assert "the model or the loss fails" not in str(caught.value)


def test_numpy_and_devices_say_it_in_their_own_words():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OutOfMemoryError, match=r"outside of the model.*short.*Unable to allocate"):
        with explain_out_of_memory(model):
            np.ones(1 << 45)
    words = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 4.00 GiB of which "
    text = str(explanation(torch.OutOfMemoryError(f"{words}512.00 MiB is free."), model))
    assert "2.50 GiB (2684354560 bytes) were asked for, 512.00 MiB (536870912 bytes) were free" in text
    assert "about 2.00 GiB (2147483648 bytes) short" in text
