"""Packages that are not what was installed are named, planted ones of the tests' own; others are not."""

import base64
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import py_compile
import sys

import pytest
from torch import nn
from torch.fx import symbolic_trace

import squeezebox
from squeezebox.doctor._environment import _faults_of, _import_apart, _import_here, _unmet
from squeezebox.doctor._packages import check_files, check_forwards, installed, loaded_modules
from squeezebox.schema import Fault, OptionError

LAYERS = """
import functools
import torch
from torch import nn
from planted.decorators import bare, counted

class Plain(nn.Module):
    def forward(self, x):
        scale = 1.0
        return x * scale

class Decorated(nn.Module):
    @counted
    def forward(self, x):
        return x + 1

    @torch.no_grad()
    def backward(self, x):
        return x

class Bare(nn.Module):
    @bare
    def forward(self, x):
        return x + 2

class Aliased(nn.Module):
    def run(self, x):
        return x

    forward = run

class Base(nn.Module):
    def __init_subclass__(cls):
        inner = cls.forward

        @functools.wraps(inner)
        def forward(self, x):
            return inner(self, x)

        cls.forward = forward

class Derived(Base):
    def forward(self, x):
        return x - 1

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

def made():
    class Inner(nn.Module):
        def forward(self, x):
            return x
    return Inner

Inner = made()
"""
DECORATORS = """
import functools

def counted(function):
    @functools.wraps(function)
    def run(*args):
        return function(*args)
    return run

def bare(function):
    def run(*args):
        return function(*args)
    return run
"""
FILES = {
    "planted/__init__.py": "from planted.layers import *\n",
    "planted/layers.py": LAYERS,
    "planted/decorators.py": DECORATORS,
    "planted/weights.bin": "some weights\n",
}


def record_line(root, name):
    data = (root / name).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The folder of an installed distribution, on the path, compiled but not imported."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    lines = [record_line(tmp_path, name) for name in FILES]
    (info / "RECORD").write_text("".join(lines) + "planted-1.0.dist-info/RECORD,,\n")
    for name in FILES:
        if name.endswith(".py"):
            py_compile.compile(str(tmp_path / name))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "planted"]:
        del sys.modules[name]


def check(**options):
    return squeezebox.check_environment(["planted"], **options)


def faults():
    """Of files."""
    found = check_files(installed("planted"), ignore)
    return [(each.fault, os.path.basename(each.subject)) for each in found]


def patches():
    """Of the methods."""
    importlib.import_module("planted")
    return list(check_forwards("planted", loaded_modules(installed("planted").sources)))


def ignore(*progress):
    pass


def test_a_clean_package_is_silent(planted):
    found = check()
    assert found.healthy and found.figures.faults == ()
    (package,) = found.figures.packages
    assert (package.name, package.version, package.skipped) == ("planted", "1.0", "")
    assert (package.files, package.loaded) == (4, 3)
    assert "torch" in found.figures.facts and "planted" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["healthy"]


def test_changed_missing_and_added_files_are_named_and_nothing_of_them_is_run(planted):
    (planted / "planted/weights.bin").write_text("other weight\n")  # as long as before
    (planted / "planted/decorators.py").unlink()
    (planted / "planted/layers.py").write_text("raise SystemExit('it was run')\n")
    (planted / "planted/extra.py").write_text("")
    (planted / "planted/ghost.pyc").write_bytes(b"")  # importable where it lies beside sources
    assert sorted(faults(), key=str) == [
        (Fault.ADDED, "extra.py"),
        (Fault.ADDED, "ghost.pyc"),
        (Fault.CHANGED, "layers.py"),
        (Fault.CHANGED, "weights.bin"),
        (Fault.MISSING, "decorators.py"),
    ]
    assert "planted" not in sys.modules


def evil(self, x):
    return x


def wrapping(function):
    @functools.wraps(function)
    def run(*args):
        return function(*args)

    return run


PATCHES = {
    "Plain.forward": evil,
    "Decorated.forward": evil,
    "Decorated.backward": evil,
    "Bare.forward": evil,
    "Aliased.forward": evil,
    "Derived.forward": evil,
    "Function.forward": staticmethod(evil),
    "Function.backward": staticmethod(evil),
    "Inner.forward": evil,
    "Plain.__call__": evil,
}


WRAPPED = [name for name in PATCHES if name != "Plain.__call__"]  # which there is none of to wrap


@pytest.mark.parametrize(
    ("name", "wrapped"), [*((name, False) for name in PATCHES), *((name, True) for name in WRAPPED)]
)
def test_patched_methods_are_named(planted, monkeypatch, name, wrapped):
    assert patches() == []
    kind, method = name.split(".")
    kind = getattr(sys.modules["planted.layers"], kind)
    static = isinstance(PATCHES[name], staticmethod)
    new = wrapping(getattr(kind, method)) if wrapped else PATCHES[name]
    monkeypatch.setattr(kind, method, staticmethod(new) if static and wrapped else new)
    (found,) = patches()
    assert found.fault is Fault.PATCHED and found.package == "planted" and __file__ in found.detail
    assert found.subject == f"planted.layers.{kind.__qualname__}.{method}"


def initialised_with(planted, text):
    """The package, installed with another beginning."""
    (planted / "planted/__init__.py").write_text(text)
    record = planted / "planted-1.0.dist-info/RECORD"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join([record_line(planted, "planted/__init__.py"), *lines[1:]]))


def test_a_copied_graph_leaves_no_fault():
    pickle.loads(pickle.dumps(symbolic_trace(nn.Sequential(nn.ReLU()))))
    module = sys.modules["torch.fx.graph_module"]
    assert "forward" in vars(module._CodeOnlyModule)  # torch's, from the graph that came back
    assert not list(check_forwards("torch", [module]))


def test_a_package_that_patches_torch_when_it_is_imported_is_found_out(planted):
    before = nn.Linear.forward
    initialised_with(planted, "from torch import nn\nnn.Linear.forward = lambda self, x: x\n")
    try:
        (found,) = check().figures.faults
    finally:
        nn.Linear.forward = before
    assert found.subject == "torch.nn.modules.linear.Linear.forward"
    assert "planted/__init__.py" in found.detail


def test_a_package_that_cannot_be_imported_is_named(planted, monkeypatch):
    initialised_with(planted, "raise RuntimeError('operator planted::nms does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(planted))
    for way in (_import_here, _import_apart):
        (found,) = _faults_of(way, installed("planted"))
        assert found.fault is Fault.BROKEN and found.subject == "planted"
        assert found.detail == "RuntimeError: operator planted::nms does not exist"


def test_editable_installations_and_missing_records_are_said(planted):
    info = planted / "planted-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    assert "editable" in installed("planted").skipped
    (info / "direct_url.json").unlink()
    (info / "RECORD").unlink()
    assert "no RECORD" in installed("planted").skipped


def test_a_package_that_is_not_installed_is_an_error():
    for named in (["no-such-package"], "no-such-package"):
        with pytest.raises(OptionError, match="no package 'no-such-package'"):
            squeezebox.check_environment(named)


def test_what_squeezebox_needs_and_does_not_find_is_named(monkeypatch):
    lines = ["torch>=2.11", "numpy>=99.1", "no-such-package>=1.0", 'lightning>=99; extra == "lightning"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    old, missing = _unmet()
    assert (old.subject, missing.subject) == ("numpy", "no-such-package")
    assert "needs 99.1 or newer" in old.detail and "none is installed" in missing.detail


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("assert False, 'of another build'", "AssertionError: of another build"),
        ("nothing", "NameError: name 'nothing' is not defined"),
        ("def :", "SyntaxError: invalid syntax (__init__.py, line 1)"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_whatever_ends_an_import_is_a_fault(planted, text, detail):
    initialised_with(planted, f"{text}\n")
    (found,) = check().figures.faults
    assert (found.fault, found.subject, found.detail) == (Fault.BROKEN, "planted", detail)


@pytest.mark.parametrize("line", ["", "planted/cut"])
def test_blank_and_cut_lines_of_a_record_end_no_check(planted, line):
    with (planted / "planted-1.0.dist-info/RECORD").open("a") as record:
        record.write(f"{line}\n")
    assert check().healthy
    (planted / "planted/extra.py").write_text("")
    assert faults() == [(Fault.ADDED, "extra.py")]  # which asks the records of all packages


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("RECORD", b"planted/layers.py,sha256=abc,many\n", "ValueError"),
        ("RECORD", b"planted/\xff.py,,\n", "UnicodeDecodeError"),
        ("direct_url.json", b"{", "JSONDecodeError"),
        ("direct_url.json", b"[]", "AttributeError"),
    ],
)
def test_what_is_written_of_a_package_and_cannot_be_read_is_a_fault(planted, name, content, why):
    (planted / "planted-1.0.dist-info" / name).write_bytes(content)
    (found,) = check().figures.faults
    assert (found.fault, found.subject) == (Fault.BROKEN, name)
    assert found.detail.startswith(f"cannot be read: {why}")


@pytest.mark.parametrize("algorithm", ["sha999", "shake_128"])
def test_a_hash_that_nothing_can_make_is_a_fault(planted, algorithm):
    record = planted / "planted-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace("sha256=", f"{algorithm}=", 1))
    assert faults() == [(Fault.BROKEN, "__init__.py")]
