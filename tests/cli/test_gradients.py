"""``squeezebox gradients measure``: processes of its own, and what is refused before they start."""

import json

import pytest

from squeezebox.reports import MeasuredExchange
from tests.cli.test_commands import models, run  # noqa: F401 - a fixture

STEP = ("gradients", "measure", "my_models:small", "--input", "3x16x16", "--batch", "2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "1"), "give 2 or more"),
        (("--rounds", "0"), "give 1 or more measured steps"),
        (("--noise", "1"), "between 0 and 1"),
        (("--ratio", "1"), "above 1"),
        (("--bandwidth", "fast"), "--bandwidth fast"),
        (("--latency", "-1"), "from 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, words, models, capfd):  # noqa: F811
    code, out, err = run(capfd, *STEP, *options)
    assert (code, out) == (2, "")
    assert words in err


STEPS = """
import torch

def one(): return torch.randn(2, 3, 16, 16)
def pair(): return one(), torch.zeros(2)
def narrow(): return torch.randn(2, 2, 16, 16), torch.zeros(2)
def absent(): raise ValueError("no file data.bin")
def loss(output, target): return output.mean()
def each(output, target): return output
"""


@pytest.mark.parametrize(
    ("sample", "loss", "words"),
    [
        ("steps:nothing", "steps:loss", "has no 'nothing'"),
        ("steps:absent", "steps:loss", "no file data.bin"),
        ("steps:one", "steps:loss", "known by --sample module:callable"),
        ("steps:narrow", "steps:loss", "inputs float32[2, 2, 16, 16]"),
        ("steps:pair", "steps:each", "backward starts from one number"),
    ],
)
def test_a_step_that_fails_is_refused_early(sample, loss, words, models, capfd, monkeypatch):  # noqa: F811
    (models / "steps.py").write_text(STEPS)
    monkeypatch.setattr("multiprocessing.get_context", lambda *_: pytest.fail("processes start"))
    code, out, err = run(capfd, "gradients", "measure", "my_models:small", "--sample", sample, "--loss", loss)
    assert code in (1, 2) and out == "" and "Traceback" not in err
    assert words in err


@pytest.mark.slow
def test_all_exchanges_are_in_one_table(models, capfd):  # noqa: F811
    code, out, _ = run(
        capfd, *STEP, "--bandwidth", "1MB", "--rounds", "2", "--noise", "0.1", "--out", "found.json", "--json"
    )
    assert code == 0
    found = MeasuredExchange.load("found.json")
    assert json.loads(out) == json.loads(json.dumps(found.to_dict()))
    arms = {arm.name.split(",")[0]: arm for arm in found.arms}
    assert set(arms) == {
        "plain", "fp16", "bf16", "powersgd", "top-k", "random-k", "1-bit", "planes", "entropy", "auto",
    }  # fmt: skip
    assert arms["plain"].noise == 0.0 < arms["fp16"].noise < arms["bf16"].noise < 1e-4
    assert 0.02 < arms["entropy"].noise < 0.2
    assert arms["plain"].sent_bytes == 4 * found.elements
    assert arms["fp16"].sent_bytes == arms["bf16"].sent_bytes == 2 * found.elements
    for arm in found.arms:
        assert len(arm.step_seconds) == 2
        assert all(a > b > 0.0 for a, b in zip(arm.step_seconds, arm.exchange_seconds, strict=True))
    assert all(arms[name].planned_seconds > 0.0 for name in ("plain", "fp16", "auto"))
    assert found.link_bytes_per_second > 0.0
    assert sum(count for _, count in found.groups) > 0
    assert "auto sends in groups" in str(found)


def test_a_model_that_is_missing_is_refused(models, capfd):  # noqa: F811
    code, _, err = run(capfd, "gradients", "measure", "my_models:nothing")
    assert code == 2 and "has no 'nothing'" in err
