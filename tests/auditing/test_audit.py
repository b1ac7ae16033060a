"""Audits of real trainings: controls, planted effects, false alarms, kills, and what is refused."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import squeezebox
from squeezebox.auditing import _run as _audit_run
from squeezebox.bounds import Fixed
from squeezebox.reports import AuditRecord, equivalence
from tests.auditing import audited

PLANTED = {
    "plain": None,
    "same": None,
    "exact": {"exact": True},
    "squeezed": {"noise": 1e-3},
    "coarse": {"controller": Fixed(value=10.0)},
    "noisy labels": None,
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    before = (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    found = squeezebox.audit(
        audited.train, out=tmp_path_factory.mktemp("planted"), arms=PLANTED, seeds=6, threads=1, steps=1
    )
    after = (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert not torch.are_deterministic_algorithms_enabled() and torch._C._get_mkldnn_enabled()
    return found


def comparison(found, arm):
    return next(each for each in found.comparisons if each.arm == arm)


@pytest.mark.slow
def test_controls_are_zero_to_the_bit(planted):
    assert [control.arm for control in planted.controls] == list(PLANTED)
    assert planted.sound
    assert all(control.churn == control.distance == 0.0 for control in planted.controls)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["same", "exact"])
def test_arms_that_are_the_same_differ_in_nothing(planted, arm):
    found = comparison(planted, arm)
    assert found.test.mean == found.test.deviation == found.churn.high == found.distance.high == 0.0
    assert found.verdict == "below the noise" and found.exceeds_tooling is None
    assert all(part.adjusted_p == 1.0 for part in (*found.classes, *found.groups))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["noisy labels", "coarse"])
def test_planted_effects_are_found(planted, arm):
    found = comparison(planted, arm)
    assert not found.test.equivalent and found.test.mean < 0.0
    assert found.test.different or arm == "coarse"  # which six seeds do not show in the top line
    tooling = next(each for each in planted.series if each.varied == "implementation")
    assert found.churn.low > tooling.churn.value and found.exceeds_tooling is None  # one pair of toolings
    assert found.churn.low > 2 * comparison(planted, "squeezed").churn.value


@pytest.mark.slow
def test_every_factor_varies_alone_and_tooling_least(planted):
    plain = {each.varied: each for each in planted.series if each.arm == "plain"}
    assert set(plain) == {"everything", "initialisation", "order", "augmentation", "implementation"}
    assert {each.varied: each.runs for each in plain.values()} == dict.fromkeys(plain, 6) | {
        "implementation": 2
    }
    assert all(each.distinct == each.runs for each in plain.values())
    assert plain["implementation"].distance.value < 1e-2 * plain["initialisation"].distance.value
    assert sum(planted.factor_shares.values()) == pytest.approx(1.0)
    assert planted.factor_shares["implementation"] < 0.1


@pytest.mark.slow
def test_the_ledger_has_the_operators_and_their_seconds(planted):
    rows = {row.name: row for row in planted.operators}
    convolution = rows["aten.convolution.default"]
    assert convolution.calls == 1 and convolution.deterministic_seconds > 0.0 and convolution.seconds > 0.0
    assert all(row.unequal["again"] == 0 for row in rows.values())
    assert planted.cost.steps == 3 and planted.cost.seconds > 0.0


@pytest.mark.slow
def test_text_and_json_say_the_same(planted):
    text, values = str(planted), json.loads(json.dumps(planted.to_dict()))
    for found in values["comparisons"]:
        assert f"{found['arm']} against plain: {found['verdict']}" in text
    assert values["sound"] and text.count("equal to the bit") == len(PLANTED)


@pytest.mark.slow
def test_false_alarms_among_real_trainings_are_as_rare_as_the_level_says():
    keys = [_audit_run.RunKey(arm="plain", series="everything", seed=seed) for seed in range(40)]
    scores = [_audit_run.train_once(audited.train, key, None, 1).score for key in keys]
    generator = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):  # arms of ten out of forty trainings each, none in both
        chosen = generator.permutation(40)[:20]
        differences = np.array(scores)[chosen[:10]] - np.array(scores)[chosen[10:]]
        alarms += equivalence(list(differences), 1.0).different
    assert 0.01 < alarms / 400 < 0.1


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (audited.train_with_fresh_generator, "aten.normal_.default, had equal inputs and unequal outputs"),
        (audited.train_with_numpy, "aten.add.Tensor, differ and come from no operator before it"),
    ],
)
def test_a_control_that_is_not_zero_names_the_operator(tmp_path, train, words):
    found = squeezebox.audit(
        train, out=tmp_path, arms={"plain": None}, seeds=3, factors=(), threads=1, steps=1
    )
    assert not found.sound and words in found.controls[0].first_unequal
    assert "NOT equal" in str(found)


def test_the_ledger_finds_an_operator_that_is_random_by_itself(tmp_path):
    library = torch.library.Library("audited", "FRAGMENT")
    library.define("shaken(Tensor x) -> Tensor")
    library.impl("shaken", lambda x: x + int.from_bytes(os.urandom(2), "big") * 1e-9, "CPU")

    def train(run):
        with torch.no_grad():
            torch.ops.audited.shaken(torch.ones(3))
        return audited.train(run)

    found = squeezebox.audit(
        train, out=tmp_path, arms={"plain": None}, seeds=3, factors=(), threads=1, steps=1
    )
    rows = {row.name: row for row in found.operators}
    assert rows.pop("audited.shaken.default").unequal["again"] == 1
    assert all(row.unequal["again"] == 0 for row in rows.values())


# --- kills, workers, folders ---------------------------------------------------------------------------

PROGRAM = """
import squeezebox
from tests.auditing import audited
if __name__ == "__main__":
    squeezebox.audit(audited.train, out={out!r}, arms={{"plain": None, "same": None}}, seeds=7, factors=(),
                     threads=1, steps=0, workers=2)
"""


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npz")}


@pytest.mark.slow
def test_a_killed_audit_goes_on_where_it_was(tmp_path):
    out, program = tmp_path / "out", tmp_path / "program.py"
    program.write_text(PROGRAM.format(out=str(out)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(program)], env=environment)
    deadline = time.monotonic() + 120
    while not files(out) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # workers end with their parent
    kept = files(out)
    assert 1 <= len(kept) < 16
    time.sleep(0.3)
    assert files(out) == kept
    options = {"arms": {"plain": None, "same": None}, "seeds": 7, "factors": (), "threads": 1, "steps": 0}
    done = []
    resumed = squeezebox.audit(audited.train, out=out, on_progress=lambda *a: done.append(a), **options)
    assert kept.items() <= files(out).items() and len(done) == 16 - len(kept) and done[-1][:2] == (16, 16)
    whole = squeezebox.audit(audited.train, out=tmp_path / "whole", **options)
    assert [control.equal for control in resumed.controls] == [True, True]
    digests = [
        [AuditRecord.load(folder / name).digest for name in sorted(kept)]
        for folder in (out, tmp_path / "whole")
    ]
    assert digests[0] == digests[1] and resumed.series == whole.series


def test_what_was_trained_otherwise_is_refused_and_named(tmp_path):
    options = {"out": tmp_path, "seeds": 3, "factors": (), "steps": 0}
    squeezebox.audit(audited.train, arms={"plain": None}, threads=1, **options)
    with pytest.raises(squeezebox.OptionError, match="threads 1, and this audit wants threads 2"):
        squeezebox.audit(audited.train, arms={"plain": None}, threads=2, **options)
    with pytest.raises(squeezebox.OptionError, match="arm plain None"):
        squeezebox.audit(audited.train, arms={"plain": {"exact": True}}, threads=1, **options)
    with pytest.raises(squeezebox.OptionError, match="train tests.auditing.audited:train,"):
        squeezebox.audit(audited.train_with_numpy, arms={"plain": None}, threads=1, **options)
    before = files(tmp_path)
    squeezebox.audit(audited.train, arms={"plain": None, "exact": {"exact": True}}, threads=1, **options)
    assert before.items() < files(tmp_path).items()


def cut(content):
    return content[:100]


def compressed_otherwise(content):
    """By a method that no zip file has, says the directory's first entry."""
    place = content.index(b"PK\x01\x02") + 10
    return content[:place] + b"\x63" + content[place + 1 :]


@pytest.mark.parametrize("damage", [cut, compressed_otherwise])
def test_a_damaged_file_is_named(tmp_path, damage):
    options = {"out": tmp_path, "arms": {"plain": None}, "seeds": 3, "factors": (), "threads": 1, "steps": 0}
    squeezebox.audit(audited.train, **options)
    damaged = next(tmp_path.glob("*.npz"))
    damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(squeezebox.FormatError, match=damaged.name):
        squeezebox.audit(audited.train, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": 2}, "seeds 2"),
        ({"factors": ("weather",)}, "weather"),
        ({"factors": ("order", "order")}, "there twice in order, order"),
        ({"margin": 0.0}, "margin 0.0"),
        ({"margin": float("inf")}, "margin inf"),
        ({"workers": 0}, "workers 0"),
        ({"arms": {}}, "no arm"),
        ({"workers": 2, "train": lambda run: None}, "workers=1"),
        ({"train": lambda run: None}, "run.finish"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, words):
    train = options.pop("train", audited.train)
    with pytest.raises(squeezebox.OptionError, match=words):
        squeezebox.audit(train, out=tmp_path, **{"seeds": 3, "threads": 1, **options})
    assert not list(tmp_path.glob("*.npz"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise": -1}, "arm 'odd': noise=-1"),
        ({"noise": float("nan"), "budget": "50%"}, "arm 'odd': noise=nan"),
        ({"noise": "abc"}, "arm 'odd': noise 'abc' is no number"),
        ({"noise": 1e-3, "exact": True}, "arm 'odd': .*exclude each other"),
        ({"codec": "zip"}, "arm 'odd': .*zip"),
    ],
)
def test_wrong_options_of_an_arm_are_refused_before_any_training(tmp_path, options, words):
    made = []
    with pytest.raises(squeezebox.OptionError, match=words):
        squeezebox.audit(made.append, out=tmp_path, arms={"plain": None, "odd": options}, threads=1)
    assert not made and not list(tmp_path.iterdir())


@pytest.mark.parametrize("held_out", [audited.drawn, audited.as_many_as_the_seed])
def test_trainings_that_hold_out_other_samples_are_refused_at_once(tmp_path, held_out):
    train = functools.partial(audited.quick, held_out=held_out)
    with pytest.raises(squeezebox.OptionError, match="plain everything 0 and plain everything 1 .*Hold out"):
        squeezebox.audit(train, out=tmp_path, arms={"plain": None}, seeds=9, threads=1)
    assert len(files(tmp_path)) == 2


@pytest.mark.slow
def test_a_killed_process_is_told(tmp_path):
    with pytest.raises(squeezebox.OptionError, match="was killed, .* 2 at a time.* fewer workers"):
        squeezebox.audit(audited.quick_or_killed, out=tmp_path, seeds=3, factors=(), threads=1, workers=2)


def test_an_optimizer_that_the_audit_does_not_know_costs_one_training_more(tmp_path):
    made = []

    def train(run):
        made.append(run)
        return audited.quick(run, known=False)

    found = squeezebox.audit(train, out=tmp_path, arms={"plain": None}, seeds=3, factors=(), threads=1)
    assert found.cost is None and found.operators and len(made) == 3 + 1 + 1 + 1  # control, ledger, cost


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(squeezebox.SqueezeboxError, match="cannot make the folder"):
        squeezebox.audit(audited.train, out=tmp_path / "file" / "audit", seeds=3)


def test_outputs_of_other_kinds_are_refused():
    key = _audit_run.RunKey(arm="plain", series="everything", seed=0)
    model = torch.nn.Linear(2, 2)
    for outputs, targets in (
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 2), [0, 1, 0]),
    ):
        with pytest.raises(squeezebox.OptionError, match="run.finish"):
            _audit_run.train_once(lambda run, o=outputs, t=targets: run.finish(model, o, t), key, None, 1)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused_at_the_first(tmp_path, score):
    train = functools.partial(audited.quick, score=score)
    with pytest.raises(squeezebox.OptionError, match=f"score {score} is not finite.*give 0"):
        squeezebox.audit(train, out=tmp_path, seeds=3, threads=1)
    assert not files(tmp_path)


def test_tensors_of_groups_and_modules_with_other_state_are_taken():
    class Stateful(torch.nn.Linear):
        def get_extra_state(self):
            return {"calls": 1}

    key = _audit_run.RunKey(arm="plain", series="everything", seed=0)
    classes = torch.tensor([0, 1])
    record = _audit_run.train_once(
        lambda run: run.finish(Stateful(2, 2), classes, classes, groups=classes), key, None, 1
    )
    assert record.groups.tolist() == ["0", "1"] and record.finite


def test_weights_that_are_no_numbers_have_diverged():
    key = _audit_run.RunKey(arm="plain", series="everything", seed=0)
    model, classes = torch.nn.Linear(2, 2), torch.tensor([0, 1])
    torch.nn.init.constant_(model.weight, float("inf"))
    assert not _audit_run.train_once(lambda run: run.finish(model, classes, classes), key, None, 1).finite


def test_large_models_are_sketched_within_a_percent_or_so():
    key = _audit_run.RunKey(arm="plain", series="everything", seed=0)

    def of(seed):
        model = torch.nn.Linear(500, 400)
        torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(seed))
        flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        classes = torch.zeros(2, dtype=torch.int64)
        record = _audit_run.train_once(lambda run: run.finish(model, classes, classes), key, None, 1)
        return record.weights, flat / flat.norm()

    (sketch, exact), (other_sketch, other_exact) = of(0), of(1)
    assert len(sketch) == 65_536 < len(exact)
    expected = float((exact - other_exact).norm())
    assert float(np.linalg.norm(sketch - other_sketch)) == pytest.approx(expected, rel=0.02)
