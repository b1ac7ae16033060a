"""Whose trainings an audit's folder holds: none is taken for another's, and what a kill leaves goes."""

import functools
import json
import linecache
import os
import time

import pytest

import squeezebox
from squeezebox.auditing import _folder
from tests.auditing import audited

OPTIONS = {"arms": {"plain": None}, "seeds": 3, "factors": (), "threads": 1, "steps": 0}


def closure(rate):
    return lambda run: audited.quick(run, rate)


def with_default(rate):
    def train(run, rate=rate):
        return audited.quick(run, rate)

    return train


def decorated(rate):
    def given(train):
        @functools.wraps(train)
        def wrapper(run):
            return train(run, rate)

        return wrapper

    return given(audited.quick)


def cell(rate):
    """A notebook's cell: no file, but lines that Python knows."""
    source, name = f"def train(run):\n    return quick(run, {rate})\n", "<cell of a notebook>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return typed(rate, name)


def typed(rate, name="<stdin>"):
    """Neither file nor lines."""
    names = {"quick": audited.quick}
    exec(compile(f"def train(run):\n    return quick(run, {rate})\n", name, "exec"), names)
    return names["train"]


class Rate:
    def __init__(self, rate):
        self.rate = rate


class Trainer(Rate):
    def __call__(self, run):
        return audited.quick(run, self.rate)

    def method(self, run):
        return self(run)


MAKERS = {
    "partial": lambda rate: functools.partial(audited.quick, rate=rate),
    "object": Trainer,
    "method": lambda rate: Trainer(rate).method,
    "partial with an object": lambda rate: functools.partial(Trainer.__call__, Rate(rate)),
}


@pytest.mark.parametrize("make", [closure, with_default, decorated, cell, typed, *MAKERS.values()])
def test_functions_that_bind_other_values_are_told_apart(tmp_path, make):
    first = squeezebox.audit(make(0.1), out=tmp_path, **OPTIONS)
    again = squeezebox.audit(
        make(0.1), out=tmp_path, on_progress=lambda *_: pytest.fail("trained again"), **OPTIONS
    )
    assert first.series == again.series
    with pytest.raises(squeezebox.OptionError, match="source digest"):
        squeezebox.audit(make(1e-9), out=tmp_path, **OPTIONS)


def test_functions_of_one_file_are_told_apart(tmp_path):
    lambdas = [
        lambda run: audited.quick(run, 0.1),
        lambda run: audited.quick(run, 1e-9),
    ]
    partials = [functools.partial(audited.quick), functools.partial(audited.train)]
    for number, (one, other) in enumerate((lambdas, partials)):
        squeezebox.audit(one, out=tmp_path / str(number), **OPTIONS)
        with pytest.raises(squeezebox.OptionError, match="holds trainings with (train|source digest)"):
            squeezebox.audit(other, out=tmp_path / str(number), **OPTIONS)


def test_another_version_of_squeezebox_is_refused(tmp_path, monkeypatch):
    squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS)
    with monkeypatch.context() as patched:
        patched.setattr(_folder, "__version__", "9.9.9")
        with pytest.raises(squeezebox.OptionError, match=r"this audit wants squeezebox 9\.9\.9"):
            squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS)
    request = json.loads((tmp_path / "audit.json").read_text())
    del request["squeezebox"]
    (tmp_path / "audit.json").write_text(json.dumps(request))
    with pytest.raises(squeezebox.OptionError, match="holds trainings with squeezebox None"):
        squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS)


def test_threads_nobody_named_are_those_of_the_folder(tmp_path):
    squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS | {"threads": 3})
    found = squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS | {"threads": None, "workers": 2})
    assert found.facts["threads"] == 3


def test_a_controller_without_a_repr_is_named_as_the_reason(tmp_path):
    class Mine:
        def __init__(self, controller):
            self.due, self.bound, self.update = controller.due, controller.bound, controller.update

    def options():
        return OPTIONS | {"arms": {"mine": {"controller": Mine(squeezebox.bounds.Fixed(value=0.1))}}}

    squeezebox.audit(audited.quick, out=tmp_path, **options())
    with pytest.raises(squeezebox.OptionError, match="give its class a repr"):
        squeezebox.audit(audited.quick, out=tmp_path, **options())


def test_only_old_files_half_written_are_removed(tmp_path):
    old, new = (tmp_path / f".plain.npz.{name}" for name in ("old", "new"))
    old.touch(), new.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS)
    assert new.exists() and not old.exists()


def test_a_request_of_something_else_is_refused(tmp_path):
    (tmp_path / "audit.json").write_text(json.dumps({"arms": []}))
    with pytest.raises(squeezebox.FormatError, match=r"audit\.json"):
        squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS)


def test_long_names_of_arms_are_files_too(tmp_path):
    names = ["a" * 300, "a" * 300 + "b"]
    squeezebox.audit(audited.quick, out=tmp_path, **OPTIONS | {"arms": dict.fromkeys(names)})
    assert len(list(tmp_path.glob("*.npz"))) == 8
