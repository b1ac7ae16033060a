"""A step checked from the door: batches, text and JSON, and nothing left behind."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import squeezebox
from squeezebox.schema import OutputError, Waste


class Normalising(nn.Module):
    """Scales its input by a table that it makes anew each time, twice."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        centred = x - torch.linspace(0.0, 1.0, 16)
        return self.head(centred / torch.linspace(0.0, 1.0, 16).add(1.0))


def made(with_batch):
    torch.manual_seed(0)
    model = Normalising()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)

    def batch():
        return torch.randn(8, 16, generator=generator), torch.arange(8) % 4

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x * 2.0), y).backward()
        optimizer.step()

    fixed = batch()
    return (step, batch) if with_batch else ((lambda: step(*fixed)), None)


@pytest.mark.parametrize("with_batch", [False, True])
def test_what_depends_on_the_batch_alone_is_constant_only_where_the_batch_is(with_batch):
    step, batch = made(with_batch)
    findings = squeezebox.check_step(step, batch=batch).findings
    found = {(each.waste, each.operator): each for each in findings}
    assert (Waste.REPEATED, "aten.linspace") in found and (Waste.CONSTANT, "aten.linspace") in found
    assert ((Waste.CONSTANT, "aten.mul.Tensor") in found) == (not with_batch)
    assert found[Waste.REPEATED, "aten.linspace"].modules == ("Normalising",)


def test_findings_as_text_and_as_json(tmp_path):
    step, batch = made(True)
    told = []
    check = squeezebox.check_step(step, batch=batch, on_progress=lambda *words: told.append(words))
    assert [done for done, total, _ in told] == [1, 2, 3]
    text = str(check)
    assert "repeated operator: the same result was there already" in text and "aten.linspace" in text
    assert f"test_step.py:{check.findings[0].line}, forward of Normalising" in text
    check.save(tmp_path / "check.json")
    values = json.loads((tmp_path / "check.json").read_text())
    assert values["findings"][0]["waste"] in {each.value for each in Waste} and values["operators"] > 0
    with pytest.raises(OutputError):
        check.save(tmp_path / "missing" / "check.json")


def test_a_step_that_raises_leaves_nothing_behind():
    def step():
        torch.ones(3) + torch.ones(4)

    with pytest.raises(RuntimeError, match="size of tensor"):
        squeezebox.check_step(step)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_session_s_own_operators_are_not_the_user_s():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = squeezebox.attach(model, optimizer=optimizer, exact=True)
    x = torch.randn(8, 3, 8, 8)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    assert squeezebox.check_step(step).findings == ()
    assert session.report().packed_bytes > 0
    session.detach()
