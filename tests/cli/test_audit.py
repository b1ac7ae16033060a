"""``squeezebox audit`` from outside: findings, files, and exit statuses."""

import json

import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.cli import main

TRAIN = "tests.auditing.audited:train"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("audits") / "new" / "audit")


def run(capfd, *arguments):
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(("audit", *arguments))
    captured = capfd.readouterr()
    return ended.value.code, captured.out, captured.err


def test_findings_come_as_text_and_as_json_and_trainings_are_kept(capfd, folder, monkeypatch):
    monkeypatch.setattr("squeezebox.cli._show._SILENT", 0.0)
    options = (TRAIN, "--arms", "plain,exact", "--seeds", "3", "--threads", "1", "--out", folder)
    code, out, err = run(capfd, *options, "--factors", "order", "--steps", "0")
    assert code == 0 and "exact against plain: below the noise" in out and "trainings: 10/10" in err
    monkeypatch.setattr("squeezebox.cli._show._SILENT", 3600.0)
    code, out, err = run(capfd, *options, "--factors", "order", "--steps", "0", "--json")
    found = json.loads(out)
    assert code == 0 and "trainings" not in err
    assert found["sound"] and found["comparisons"][0]["churn"]["value"] == 0.0
    assert [each["varied"] for each in found["series"]] == ["everything", "everything", "order"]


def test_a_plan_is_audited_and_another_one_is_not_taken_for_it(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def planned(noise):
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
        model = nn.Sequential(*layers, nn.Linear(6 * 49, 10))
        sample, loss_fn = (torch.rand(25, 1, 7, 7), torch.arange(25) % 10), nn.functional.cross_entropy
        squeezebox.plan(model, sample=sample, loss_fn=loss_fn, noise=noise).save("plan.json")

    options = ("--arms", "plain,plan=plan.json", "--factors", "none", "--steps", "0", "--threads", "1")
    options = ("tests.auditing.audited:brief", *options, "--seeds", "3", "--out", "audit")
    planned(1e-2)
    code, out, err = run(capfd, *options)
    assert (code, err) == (0, "") and "plan=plan.json against plain" in out
    assert run(capfd, *options)[0] == 0
    planned(1e-3)
    code, _, err = run(capfd, *options)
    assert code != 0 and "plan=plan.json" in err
    code, _, err = run(capfd, *options, "--arms", "plain,plan=none.json")
    assert code != 0 and "none.json" in err


def test_a_control_that_is_not_zero_is_an_error_after_the_findings(capfd, tmp_path):
    options = ("--arms", "plain", "--seeds", "3", "--factors", "none", "--steps", "1", "--threads", "1")
    code, out, err = run(
        capfd, "tests.auditing.audited:train_with_numpy", *options, "--out", str(tmp_path / "broken")
    )
    assert code == 1 and "NOT equal" in out and "aten.add.Tensor" in out
    assert "not equal to the bit (plain)" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TRAIN, "--arms", "squeezd"), "'squeezd' is none of plain, squeezed"),
        ((TRAIN, "--arms", "plain,noise=much"), "'noise=much'"),
        ((TRAIN, "--arms", "plain,plain"), "plain is there twice"),
        ((TRAIN, "--seeds", "1"), "seeds 1"),
        ((TRAIN, "--factors", "weather"), "weather"),
        ((TRAIN, "--arms", "plain,exact", "--noise", "0.01"), "--noise 0.01 is of the arm squeezed"),
        (("tests.auditing.audited:nothing",), "nothing"),
        (("tests.auditing.audited:images",), "images is called with run, but: too many positional arguments"),
        (("tests.auditing.audited:STEPS",), "cannot be called; name a function or class."),
    ],
)
def test_errors_have_no_traceback(capfd, tmp_path, arguments, words):
    code, _, err = run(capfd, *arguments, "--out", str(tmp_path / "out"))
    assert code == 2 and words in err and "Traceback" not in err
