"""The loosest noise within a margin: found on real trainings, resumed after a kill, or refused."""

import functools
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import squeezebox
from squeezebox.auditing import _calibrate, search
from squeezebox.auditing import _run as _audit_run
from squeezebox.reports import AuditRecord, Calibration
from tests.auditing import audited
from tests.auditing.test_audit import files

KNOBS = {"noise": (1e-3, 1e-1)}
PROGRAM = """
import squeezebox
from tests.auditing import audited
squeezebox.calibrate(audited.train, out={out!r}, margin=0.2, knobs={knobs}, trainings=8, threads=1)
"""


def calibrate(out, train=audited.brief, **options):
    return squeezebox.calibrate(
        train, out=out, **{"margin": 0.2, "knobs": KNOBS, "trainings": 8, "threads": 1, **options}
    )


def test_the_loosest_level_within_a_wide_margin_is_found_and_kept(tmp_path):
    done = []
    found = calibrate(tmp_path, on_progress=lambda *a: done.append(a))
    assert found.noise == 0.1 and found.options == {"noise": 0.1} and found.shown.shown
    assert found.shown.high < 0.2 and found.shown.low <= found.shown.loss and found.shown.chance > 0.9
    assert len(found.shown.losses) >= 3 and found.spent <= 8 and done[-1][1] == 8
    assert [level.options["noise"] for level in found.levels] == [0.001, 0.0032, 0.01, 0.032, 0.1]
    text = str(found)
    assert text.startswith("noise=0.1: accuracy stays within 0.2") and "may be within the margin too" in text
    before = files(tmp_path)
    again = calibrate(tmp_path)
    assert again == found and files(tmp_path) == before
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == found


@pytest.mark.slow
def test_a_killed_calibration_goes_on_where_it_was(tmp_path):
    out, program = tmp_path / "out", tmp_path / "program.py"
    program.write_text(PROGRAM.format(out=str(out), knobs=KNOBS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(program)], env=environment)
    deadline = time.monotonic() + 120
    while len(files(out)) < 4 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = files(out)
    assert 4 <= len(kept)
    resumed, whole = (calibrate(folder, audited.train) for folder in (out, tmp_path / "whole"))
    assert resumed == whole and kept.items() <= files(out).items()
    assert files(out).keys() == files(tmp_path / "whole").keys()


@pytest.mark.slow
def test_two_knobs_are_loosened_together(tmp_path):
    knobs = {"noise": (1e-3, 1e-2), "update_noise": (1e-5, 1e-3)}
    found = calibrate(tmp_path, knobs=knobs, margin=0.3)
    assert [level.options["update_noise"] for level in found.levels] == [1e-5, 3.2e-5, 1e-4, 3.2e-4, 1e-3]
    assert [level.options["noise"] for level in found.levels] == [1e-3, 1.8e-3, 3.2e-3, 5.6e-3, 1e-2]
    assert found.options == {"noise": 1e-2, "update_noise": 1e-3} and found.noise == 1e-2
    assert "noise=0.01, update_noise=0.001: accuracy stays within 0.3" in str(found)


def test_levels_stay_within_a_narrow_range():
    levels = _calibrate._levels({"noise": (1e-3, 1e-1), "exchange": (0.0104, 0.0106)})
    assert len(levels) == 5 and all(0.0104 <= level["exchange"] <= 0.0106 for level in levels)


def exchanging(run, name="exchange"):
    """Gradients go through a codec, as they would between ranks."""
    x, y = audited.images()
    with run.initialising():
        model = nn.Sequential(nn.Flatten(), nn.Linear(49, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = run.knob(name)
    with run.attach(model, optimizer) as session:
        assert session is None, "noise was not asked for"
        for chosen in torch.randperm(300, generator=run.order).split(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            for parameter in model.parameters() if noise else ():
                step = float(parameter.grad.square().mean().mul(12 * noise).sqrt())
                parameter.grad.div_(step).round_().mul_(step)
            optimizer.step()
    return run.finish(model, model(x[-400:]).detach(), y[-400:])


def test_of_two_models_each_has_a_session_until_its_end():
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2)]
    run = _audit_run.AuditRun(arm="", order=torch.Generator(), _numbers={}, _options={"noise": 1e-3})
    with run.attach(models[0]) as outer:
        with run.attach(models[1]) as inner:
            assert inner is not outer and run._session is inner
        assert run._session is outer and type(models[1]) is nn.Sequential
        with pytest.raises(squeezebox.AttachError):
            squeezebox.attach(models[0], noise=1e-3)
    assert run._session is None and type(models[0]) is nn.Sequential
    squeezebox.attach(models[0], noise=1e-3).detach()


def test_a_knob_of_ones_own_is_loosened_where_the_training_reads_it(tmp_path):
    found = calibrate(tmp_path / "own", exchanging, knobs={"exchange": (1e-2, 1e-1)})
    assert found.options == {"exchange": 0.1} and found.noise is None
    assert any(found.shown.losses), "gradients were rounded, so something changed"
    audit = squeezebox.audit(
        exchanging,
        arms={"plain": None, "rounded": {"exchange": 0.1}},
        seeds=3,
        out=tmp_path / "audit",
        threads=1,
    )
    assert "rounded" in str(audit)
    with pytest.raises(squeezebox.OptionError, match=r"never asked for run\.knob\('exchanges'\)"):
        calibrate(tmp_path / "typo", exchanging, knobs={"exchanges": (1e-2, 1e-1)})


def test_a_level_that_changes_nothing_is_named(tmp_path):
    found = calibrate(tmp_path, audited.quick, knobs={"noise": (1e-9, 1e-8)})
    assert "equals plain to the bit in every pair" in str(found)


def test_a_margin_that_few_trainings_cannot_show_says_how_many_would(tmp_path):
    found = calibrate(tmp_path, functools.partial(audited.quick, rate=0.5), margin=1e-4)
    assert found.noise is None and found.shown is None and found.spent <= 8
    assert found.trainings_needed is None or found.trainings_needed > 8
    assert "no level is shown to stay within 0.0001 of plain training's accuracy" in str(found)


def test_a_short_run_ends_after_its_steps_and_is_evaluated():
    key = _audit_run.RunKey(arm="plain", series="first-7", seed=0)
    whole = _audit_run.train_once(audited.train, key, None, 1)
    plain, same, noisy = (
        _audit_run.train_once(audited.train, key, None, 1, _audit_run.ShortRun(steps=7, noise=noise))
        for noise in (0.0, 0.0, 1.0)
    )
    assert whole.steps == audited.STEPS and plain.steps == noisy.steps == 7
    assert plain.digest == same.digest and noisy.digest not in (plain.digest, whole.digest)


def test_trainings_of_an_earlier_version_have_no_steps(tmp_path):
    key = _audit_run.RunKey(arm="plain", series="everything", seed=1)
    record = _audit_run.train_once(audited.quick, key, None, 1)
    record.save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as file:
        np.savez(tmp_path / "old.npz", **{name: file[name] for name in file.files if name != "steps"})
    new, old = (AuditRecord.load(tmp_path / f"{name}.npz") for name in ("new", "old"))
    assert new.steps == 3 and old.steps == 0 and old.digest == new.digest


@pytest.mark.parametrize("sparse", [False, True])
def test_injected_noise_has_the_squared_norm_it_is_given(sparse):
    run, _ = _audit_run.begin(
        _audit_run.RunKey(arm="plain", series="first-1", seed=0),
        None,
        1,
        short=_audit_run.ShortRun(steps=1, noise=0.04),
    )
    model = nn.EmbeddingBag(4000, 8, sparse=sparse)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with run.attach(model, optimizer):
        model(torch.arange(4000).view(10, 400)).sum().backward()
        optimizer.step()
    expected = before - 1 / 400
    error = (model.weight.detach() - expected).square().sum() / (before - expected).square().sum()
    assert float(error) == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "loss"}, "metric 'loss' is none of accuracy, score"),
        ({"margin": 0.0}, "margin 0.0 is not finite"),
        ({"margin": math.nan}, "margin nan"),
        ({"knobs": {}}, "no knob"),
        ({"knobs": {"budget": (1, 8)}}, r"knob \['budget'\] is an option of attach that is no noise"),
        ({"knobs": {"noise": (0.3, 1e-4)}}, "noise as .tightest, loosest."),
        ({"knobs": {"noise": 0.3}}, "noise as .tightest, loosest."),
        ({"knobs": {"noise": ("1e-4", "0.3")}}, "noise as .tightest, loosest."),
        ({"trainings": 6}, "trainings 6 is below 7, which screening 5 levels"),
        ({"threads": 0}, "threads 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(tmp_path, options, words):
    with pytest.raises(squeezebox.OptionError, match=words):
        calibrate(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def without_a_seed(run):
    """Every training is the same, whatever its seed."""
    with run.initialising():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.attach(model, optimizer):
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return run.finish(model, model(torch.ones(3, 4)).detach(), torch.tensor([0, 1, 0]))


def evaluated_within(run):
    x, y = audited.images()
    model = nn.Sequential(nn.Flatten(), nn.Linear(49, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.attach(model, optimizer):
        for chosen in torch.randperm(300, generator=run.order).split(10):
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        return run.finish(model, model(x[-400:]).detach(), y[-400:])


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (evaluated_within, r"return run\.finish\(\.\.\.\) after the with block"),
        (functools.partial(audited.quick, known=False), r"write run\.attach\(model, optimizer\)"),
        (without_a_seed, "two seeds are equal to the bit"),
        (functools.partial(audited.quick, held_out=audited.drawn), "different targets"),
        (lambda run: None, "run.finish"),
    ],
)
def test_trainings_that_tell_nothing_are_refused(tmp_path, train, words):
    with pytest.raises(squeezebox.OptionError, match=words):
        calibrate(tmp_path, train)


def simulated(true, deviation, generator, trainings=14):
    """(loosest level within the margin, what the search found) where levels lose ``true`` margins."""
    plain = {}

    def train(level, pair):
        plain.setdefault(pair, generator.normal() * deviation / 2**0.5)
        return true[level] + plain[pair] + generator.normal() * deviation / 2**0.5

    found = search(len(true), trainings, lambda level: true[level] + generator.normal() * deviation, train)
    assert found.spent <= trainings
    return int((true < 1).sum()) - 1, -1 if found.level is None else found.level


def test_simulated_searches_are_seldom_too_loose_and_mostly_near():
    generator = np.random.default_rng(0)
    curves = [10 ** (0.5 * (np.arange(8) - generator.uniform(-1, 8))) for _ in range(60)]
    found = [simulated(true, 0.3, generator) for true in curves]
    assert sum(level > best for best, level in found) <= 3
    assert sum(0 <= best - level <= 1 for best, level in found) >= 48


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.15, 0.6])
def test_many_levels_just_outside_the_margin_are_refused(deviation):
    generator = np.random.default_rng(0)
    plateaus = [np.where(np.arange(8) < generator.integers(0, 4), 0.2, 1.02) for _ in range(200)]
    found = [simulated(true, deviation, generator) for true in plateaus]
    assert sum(level > best for best, level in found) <= 18  # 5 %, and what 200 trials may add by chance
