"""Under a real limit of address space a search answers with what trains there, or says what lacks."""

import re
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import resource, sys
    import torch
    from torch.nn import functional as F
    import squeezebox
    from squeezebox.schema import BudgetError

    what, mib, noise = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "noise"
    torch.manual_seed(0)
    convolutions = torch.nn.Conv2d(3, 32, 1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 1)
    head = torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    model, seed = torch.nn.Sequential(*convolutions, *head), torch.get_rng_state()
    sample = torch.ones(64, 3, 64, 64), torch.ones(64, dtype=torch.int64)
    options = {"loss_fn": F.cross_entropy, **({"noise": 1e-2} if noise else {"exact": True})}
    lines = open("/proc/self/status").read().splitlines()
    size = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (size + mib * 2**20,) * 2)
    try:
        if what == "find":
            found = squeezebox.find_batch(model, sample, **options)
        elif what == "max":
            found = squeezebox.max_batch(model, sample=sample, budget="200%", **options)
        else:
            found = squeezebox.plan(model, sample=sample, budget="70%", **options)
    except BudgetError as error:
        print("BudgetError", error)
        sys.exit()
    finally:
        assert torch.equal(seed, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in model.parameters())
    if what == "find":
        session = squeezebox.attach(model, plan=found.plan)
        images, target = (part[:1].expand(found.batch, *part.shape[1:]).clone() for part in sample)
        with session.step():
            loss = F.cross_entropy(model(images), target)
        loss.backward()
        assert found.memory_bytes > (mib - 800) * 2**20  # what imports and compiling took at most
    print("answer", found)
"""


def outcome(what, mib, loss):
    run = [sys.executable, "-c", textwrap.dedent(PROGRAM), what, str(mib), loss]
    ended = subprocess.run(run, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_no_room_for_imports_is_said_before_they_begin():
    message = outcome("find", 120, "exact")
    assert message.startswith("BudgetError there is too little memory for what planning imports and compiles")
    assert "bytes left of its limit (ulimit -v)" in message


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("what", "mib", "loss"),  # from where imports just find room
    [
        *(("find", 1030, "exact"), ("find", 1200, "noise"), ("max", 770, "exact"), ("plan", 770, "noise")),
    ],
)
def test_every_limit_is_met_or_refused(what, mib, loss):
    said, _, message = outcome(what, mib, loss).partition(" ")
    assert said == "answer" or (said == "BudgetError" and re.search(r"\d bytes", message)), message
