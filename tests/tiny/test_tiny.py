"""A glance at each part, to be taken at every save: make tiny. The rooms' own tests say more."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import squeezebox
from squeezebox import codecs
from squeezebox.cli import main


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 64), nn.GELU(), nn.Linear(64, 10))


def batch():
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8)


def trained(model):
    """Losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = batch()
    losses = []
    torch.manual_seed(2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_importing_is_light():
    program = "import sys, squeezebox; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_attached_exactly_is_plain_to_the_bit():
    plain, other = network(), network()
    session = squeezebox.attach(other, exact=True)
    assert trained(plain) == trained(other)
    report = session.report()
    session.detach()
    assert 0 < report.packed_bytes < report.saved_bytes
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), other.parameters(), strict=True))


def test_a_codec_keeps_its_bound_there_and_back():
    codec, x = codecs.get("entropy"), torch.randn(5000, generator=torch.Generator().manual_seed(0))
    packed = codecs.loads(codecs.dumps(codec.pack(x, 0.01)))
    assert packed.nbytes < x.nbytes / 2
    assert float((codec.unpack(packed).double() - x.double()).abs().max()) <= packed.bound <= 0.01


def test_a_plan_takes_less_memory():
    made = squeezebox.plan(network(), sample=batch(), loss_fn=F.cross_entropy, budget="80%", cache=None)
    assert made.predicted_peak_bytes <= 0.8 * made.plain_peak_bytes


def test_a_command_answers(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["codecs", "--json"])
    assert ended.value.code == 0
    assert [row["name"] for row in json.loads(capfd.readouterr().out)] == list(codecs.available())
