"""``squeezebox calibrate`` from outside: findings, files, and exit statuses."""

import json

import pytest

from squeezebox.cli import main

TRAIN = "tests.auditing.audited:brief"


def run(capfd, *arguments):
    """(exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(("calibrate", *arguments))
    captured = capfd.readouterr()
    return ended.value.code, captured.out, captured.err


def test_findings_come_as_text_and_as_json_and_trainings_are_kept(capfd, tmp_path):
    options = (TRAIN, "--noise", "1e-2,1e-1", "--trainings", "7", "--threads", "1", "--out", str(tmp_path))
    code, out, _ = run(capfd, *options, "--margin", "0.5")
    assert code == 0 and "accuracy stays within 0.5 of plain training's" in out
    code, out, err = run(capfd, *options, "--margin", "0.0001", "--json")
    assert code == 1 and json.loads(out)["options"] is None
    assert "give more --trainings or a wider --margin" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TRAIN, "--noise", "much"), "noise 'much': give the tightest and the loosest"),
        ((TRAIN, "--noise", "none"), "there is no knob"),
        ((TRAIN, "--update-noise", "1"), "--update-noise '1': give"),
        ((TRAIN, "--knob", "exchange"), "exchange '': give the tightest and the loosest"),
        ((TRAIN, "--knob", "exchange=none"), "exchange 'none': give the tightest and the loosest"),
        ((TRAIN, "--knob", "noise=1e-2,1e-1"), "knobs of your own; give this one as --noise 1e-2,1e-1."),
        ((TRAIN, "--knob", "update_noise=1,2"), "knobs of your own; give this one as --update-noise 1,2."),
        ((TRAIN, "--knob", "mine=1,2", "--knob", "mine=3,4"), "--knob mine is there twice"),
        ((TRAIN, "--knob", "exchange=1e-2,1e-1"), "never asked for run.knob('exchange')"),
        ((TRAIN, "--trainings", "2"), "trainings 2 is below 7"),
        (("tests.auditing.audited:nothing",), "nothing"),
    ],
)
def test_errors_have_no_traceback(capfd, tmp_path, arguments, words):
    code, _, err = run(capfd, *arguments, "--out", str(tmp_path / "out"))
    assert code == 2 and words in err and "Traceback" not in err
