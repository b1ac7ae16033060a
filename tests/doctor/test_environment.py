"""Packages that are not what was installed are named, planted ones of the tests' own; others are not."""

import base64
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import marshal
import os
import pickle
import py_compile
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.fx import symbolic_trace

import squeezebox
from squeezebox.doctor._byte_code import what_is_wrong
from squeezebox.doctor._environment import _faults_of, _import_apart, _import_here, _unmet
from squeezebox.doctor._forwards import check_forwards, loaded_modules
from squeezebox.doctor._packages import _Comparer, check_byte_code, check_files, installed
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
            for level in (0, 1, 2):
                py_compile.compile(str(tmp_path / name), optimize=level)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "planted"]:
        del sys.modules[name]


def check(**options):
    return squeezebox.check_environment(["planted"], **options)


def faults():
    """Of files and byte code."""
    package = installed("planted")
    found = [*check_files(package, ignore), *check_byte_code(package, ignore)[1]]
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
    assert (package.files, package.byte_code_files, package.loaded) == (4, 9, 3)
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


def rewritten(path, source, **header):
    """Byte code of other source, under the header that was there."""
    data = path.read_bytes()
    code = compile(source, str(path), "exec", optimize=header.pop("optimize", -1))
    path.write_bytes(header.get("header", data[:16]) + marshal.dumps(code))


@pytest.mark.parametrize("level", ["", "1", "2"])
def test_byte_code_that_its_source_does_not_make_is_named(planted, level):
    source = planted / "planted/layers.py"
    path = importlib.util.cache_from_source(str(source), optimization=level)
    changed = LAYERS.replace("scale = 1.0", "scale = 1.5")
    rewritten(planted / path, changed, optimize=int(level or 0))
    assert faults() == [(Fault.BYTE_CODE, os.path.basename(path))]


def wrong(folder, text, header=None, data=None):
    """What is found wrong with byte code beside the source ``text``, where other code or data was put."""
    source = folder / "module.py"
    source.write_text(text)
    path = folder / "module.pyc"
    py_compile.compile(
        str(source), str(path), invalidation_mode=header or py_compile.PycInvalidationMode.TIMESTAMP
    )
    if data is not None:
        path.write_bytes(path.read_bytes()[:16] + data)
    return what_is_wrong(str(source), str(path), 0)


def other(text):
    return marshal.dumps(compile(text, "module.py", "exec"))


CHECKED, UNCHECKED = (
    py_compile.PycInvalidationMode.CHECKED_HASH,
    py_compile.PycInvalidationMode.UNCHECKED_HASH,
)
SAME = "x = (1, 2.0, -0.0, 'a', b'b', frozenset({1, 2}), None, ...)\nf = lambda y: {y in {1, 2}: 3j}\n"


@pytest.mark.parametrize("header", [None, CHECKED, UNCHECKED])
def test_byte_code_is_compared_constant_by_constant(tmp_path, header):
    assert wrong(tmp_path, SAME, header) == ""
    assert wrong(tmp_path, SAME, header, other(SAME)) == ""
    for old, new in (("1, 2.0", "1.0, 2.0"), ("1, 2.0", "True, 2.0"), ("-0.0", "0.0"), ("3j", "4j")):
        assert "another code" in wrong(tmp_path, SAME, header, other(SAME.replace(old, new)))
    assert "cannot be read" in wrong(tmp_path, SAME, header, b"")
    assert "holds a int" in wrong(tmp_path, SAME, header, marshal.dumps(3))


def test_byte_code_that_is_out_of_date_is_not_loaded_and_no_fault(tmp_path):
    for header, expected in ((None, ""), (CHECKED, ""), (UNCHECKED, "another code than the source's")):
        wrong(tmp_path, "x = 1\n", header)
        (tmp_path / "module.py").write_text("x = 1000\n")
        found = what_is_wrong(str(tmp_path / "module.py"), str(tmp_path / "module.pyc"), 0)
        assert found == expected


def test_byte_code_that_would_take_all_memory_is_named_and_the_rest_still_compared(planted):
    first, second = (
        planted / importlib.util.cache_from_source(str(planted / f"planted/{name}.py"))
        for name in ("layers", "decorators")
    )
    first.write_bytes(first.read_bytes()[:16] + b"(" + b"\xff\xff\xff\x7f")  # a tuple of 2**31 - 1
    rewritten(second, "x = 1")
    assert faults() == [(Fault.BYTE_CODE, first.name), (Fault.BYTE_CODE, second.name)]


def test_a_reader_that_ends_is_begun_anew(tmp_path):
    (tmp_path / "module.py").write_text("x = 1\n")
    path = py_compile.compile(str(tmp_path / "module.py"))
    with _Comparer() as comparer:
        comparer._process.kill()
        comparer._process.wait()
        pair = tmp_path / "module.py", Path(path), 0
        assert "ends the interpreter" in comparer.ask(pair)
        assert comparer.ask(pair) == ""


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
