"""``squeezebox stream train``: the steps that StreamedStep takes, and what is refused before them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.test_commands import run

MODULE = """
import torch
from torch import nn

torch.manual_seed(0)
IMAGE, TARGET = torch.rand(1, 3, 64, 16), torch.randint(2, (1, 64, 16))

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))

def slides():
    return [(IMAGE, TARGET), (1 - IMAGE, TARGET)]

def alone():
    return [IMAGE]

def none():
    return []
"""


@pytest.fixture
def slides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_slides.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "stream", "train", "my_slides:net", "--data"
    sys.modules.pop("my_slides", None)


def test_it_trains_as_a_loop_over_whole_images(slides, capfd):
    options = "--memory", "256KiB", "--epochs", "2", "--optimizer", "sgd", "--lr", "0.1", "--json"
    code, out, err = run(capfd, *slides, "my_slides:slides", *options)
    assert code == 0, err
    import my_slides

    model = my_slides.net()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for image, target in 2 * my_slides.slides():
        loss = nn.functional.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = json.loads(out)
    assert sum(found["losses"], []) == pytest.approx(losses, rel=1e-5)
    weights = torch.load("weights.pt", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("alone", (), "gives a Tensor; give pairs of image and target"),
        ("none", (), "gives no image in epoch 0"),
        ("slides", ("--epochs", "0"), "--epochs 0: give 1 or more"),
        ("slides", ("--memory", "much"), "--memory much"),
        ("slides", ("--out", "missing/weights.pt"), "missing"),
    ],
)
def test_what_cannot_be_trained_is_refused(data, options, words, slides, capfd):
    code, out, err = run(capfd, *slides, f"my_slides:{data}", "--memory", "1MiB", *options)
    assert code in (1, 2) and words in err


def test_losses_that_are_no_numbers_are_null_in_json(slides, capfd):
    options = "--memory", "256KiB", "--optimizer", "sgd", "--lr", "1e38", "--json"
    code, out, err = run(capfd, *slides, "my_slides:slides", *options)
    assert code == 0, err
    first, second = json.loads(out, parse_constant=pytest.fail)["losses"][0]
    assert first > 0.0 and second is None
