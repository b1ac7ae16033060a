"""Whether installed packages still are what was installed: files by their RECORD, classes by their source."""

from __future__ import annotations

import ast
import base64
import csv
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import Distribution, FileHash, PackagePath
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from squeezebox.schema import EnvironmentFault, Fault, in_one_line
from squeezebox.steps import Progress

_IMPORTABLE = (".py", ".so", ".pyd", ".pyc")
_CHUNK = 64  # files between two words of progress
_METHODS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "backward")
_GENERATED = "<eval_with_key>"  # by torch.fx, which leaves a copied graph's forward on a class of its own
_DEPTH = 6  # of wrappers around wrappers
_COMPARED = (
    "co_name",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_firstlineno",
    "co_exceptiontable",
)


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed distribution.

    ``skipped`` says why its files cannot be checked, "" if they can; ``damaged`` has why files about it
    cannot be read, by their names.
    """

    name: str
    version: str
    files: tuple[PackagePath, ...]
    skipped: str = ""
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def hashed(self) -> list[PackagePath]:
        """Files of which the RECORD has a hash."""
        return [file for file in self.files if file.hash is not None]

    @property
    def sources(self) -> list[Path]:
        """Its Python files."""
        return [_located(file) for file in self.files if file.suffix == ".py"]


def installed(name: str) -> Installed | None:
    """The distribution of that name; None if there is none."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    files, wrong_record = _installed_files(found)
    is_editable, wrong_origin = _is_editable(found)
    skipped = ""
    if is_editable:
        skipped = "editable installation: its files are meant to change"
    elif not wrong_record and found.read_text("RECORD") is None:
        skipped = "no RECORD: whatever installed it wrote down no hashes"
    wrong = {"RECORD": wrong_record, "direct_url.json": wrong_origin}
    return Installed(name, found.version, files, skipped, {each: why for each, why in wrong.items() if why})


def _installed_files(found: Distribution) -> tuple[tuple[PackagePath, ...], str]:
    """What was installed, and why its RECORD does not say: "" where it does."""
    try:
        return tuple(_recorded(found)), ""
    except (csv.Error, ValueError) as error:
        return (), in_one_line(error)


def _recorded(found: Distribution) -> Iterator[PackagePath]:
    """What its RECORD names; ``Distribution.files`` leaves out what is missing, from Python 3.12 on."""
    record = found.read_text("RECORD")
    if not record:
        yield from found.files or ()
        return
    for row in filter(None, csv.reader(record.splitlines())):
        name, digest, size, *_ = [*row, "", ""]
        file = PackagePath(name)
        file.hash = FileHash(digest) if digest else None
        file.size = int(size) if size else None
        file.dist = found
        yield file


def _is_editable(found: Distribution) -> tuple[bool, str]:
    """Whether it is, and why direct_url.json does not say: "" where it does."""
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable")), ""
    except (AttributeError, ValueError) as error:
        return False, in_one_line(error)


def check_files(package: Installed, on_progress: Progress) -> Iterator[EnvironmentFault]:
    """Files that are missing, changed, or in the package's folders though nobody installed them.

    Hashes are those of the wheel's RECORD; files without one (byte code, scripts) are not compared here.
    """
    files = package.hashed
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (file, fault) in enumerate(zip(files, pool.map(_compare, files), strict=True), 1):
            if number % _CHUNK == 0 or number == len(files):
                on_progress(number, len(files), f"{package.name}: files")
            if fault is not None:
                detail = "RECORD's hash cannot be read" if fault is Fault.BROKEN else ""
                yield EnvironmentFault(
                    fault=fault, package=package.name, subject=str(_located(file)), detail=detail
                )
    for path in _strangers(package):
        yield EnvironmentFault(fault=Fault.ADDED, package=package.name, subject=str(path))


def _compare(file: PackagePath) -> Fault | None:
    path, expected = _located(file), file.hash
    if expected is None:
        return None
    try:
        if file.size is not None and path.stat().st_size != file.size:
            return Fault.CHANGED
        with path.open("rb") as opened:
            digest = _digest(opened.read, expected.mode)
    except OSError:
        return Fault.MISSING
    except (TypeError, ValueError):  # there is no such algorithm, or it needs more than its name
        return Fault.BROKEN
    return None if digest == expected.value else Fault.CHANGED


def _digest(read: Callable[[int], bytes], algorithm: str) -> str:
    found = hashlib.new(algorithm)
    while chunk := read(1 << 20):
        found.update(chunk)
    return base64.urlsafe_b64encode(found.digest()).rstrip(b"=").decode()


def _strangers(package: Installed) -> Iterator[Path]:
    """Importable files in the package's own folders that no installed distribution knows."""
    known = {_located(file) for file in package.files}
    importable = [file for file in package.files if file.suffix in _IMPORTABLE and len(file.parts) > 1]
    folders = {_located(file).parent for file in importable if ".." not in file.parts}
    found = [
        path
        for folder in folders
        if folder.name != "__pycache__" and folder.is_dir()
        for path in folder.iterdir()
        if path.suffix in _IMPORTABLE and path not in known
    ]
    if found:
        others = {
            _located(file)
            for each in importlib.metadata.distributions()
            for file in _installed_files(each)[0]
        }
        yield from sorted(set(found) - others)


def _located(file: PackagePath) -> Path:
    return Path(os.path.normpath(str(file.locate())))


def loaded_modules(sources: Iterable[Path]) -> list[ModuleType]:
    """The modules that were imported from these files."""
    files = {str(path) for path in sources}
    return [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) in files]


def check_forwards(package: str, modules: Iterable[ModuleType]) -> Iterator[EnvironmentFault]:
    """Methods by which layers compute (``forward``, ``__call__``, ``backward``) that were replaced.

    A class's method must be the code that compiling its module's source gives. Around that there may be
    decorators where the source has some, or wrappers from files of its base classes, which can put them on
    whatever is derived. A method that the source does not define may come from any installed file:
    packages add methods to their own classes. Classes without a source are not checked.
    """
    sources = _Sources()
    for module in modules:
        for kind in _classes(module):
            for name in _METHODS:
                if name in vars(kind):
                    wrong = _what_is_wrong(kind, name, sources)
                    if wrong:
                        subject = f"{kind.__module__}.{kind.__qualname__}.{name}"
                        yield EnvironmentFault(
                            fault=Fault.PATCHED, package=package, subject=subject, detail=wrong
                        )


def _classes(module: ModuleType) -> Iterator[type]:
    """Those that the module says are its own, with those within them."""
    waiting = [value for value in list(vars(module).values()) if _is_class(value)]
    seen = set[type]()
    while waiting:
        kind = waiting.pop()
        if kind in seen or kind.__module__ != module.__name__:
            continue
        seen.add(kind)
        yield kind
        waiting += [value for value in vars(kind).values() if _is_class(value)]


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)  # isinstance asks the value, and deprecated ones warn then


def _what_is_wrong(kind: type, name: str, sources: _Sources) -> str:
    """What the method is instead; "" where it is what it should be, or nothing can be said."""
    found = _plain(vars(kind)[name])
    source = sources.of(getattr(sys.modules[kind.__module__], "__file__", None) or "")
    if source is None:
        return ""
    if not isinstance(found, FunctionType):
        replaced = source.defines(kind, name) and not source.decorates(kind, name)
        return f"is a {type(found).__name__}" if replaced else ""
    generated = found.__code__.co_filename.startswith(_GENERATED)
    if generated or source.has(kind, name, found.__code__):
        return ""
    wraps = any(source.has(kind, name, each.__code__) for each in _within(found))
    of_base = wraps and found.__code__.co_filename in _files(kind)
    defined, decorated = source.defines(kind, name), source.decorates(kind, name)
    allowed = of_base or not defined or (decorated and wraps)
    return "" if allowed and _is_installed(found, sources) else _where(found)


def _files(kind: type) -> set[str | None]:
    """In which the class and its bases are."""
    return {getattr(sys.modules.get(each.__module__), "__file__", None) for each in kind.__mro__}


def _plain(value: Any) -> Any:
    """The function in a static or class method."""
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _where(function: FunctionType) -> str:
    code = function.__code__
    return f"is {function.__qualname__} from {code.co_filename}:{code.co_firstlineno}"


def _is_installed(function: FunctionType, sources: _Sources) -> bool:
    """Whether it is what an installed file defines."""
    code = function.__code__
    source = sources.of(code.co_filename) if code.co_filename.startswith(sources.installed) else None
    return source is not None and source.holds(code)


def _within(function: FunctionType, depth: int = _DEPTH) -> Iterator[FunctionType]:
    """The functions that a wrapper wraps, as far as can be seen."""
    if depth == 0:
        return
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    for value in (getattr(function, "__wrapped__", None), *cells):
        inner = _plain(value.func if isinstance(value, functools.partial) else value)
        inner = inner.__func__ if inspect.ismethod(inner) else inner
        if isinstance(inner, FunctionType):
            yield inner
            yield from _within(inner, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class _Sources:
    """Source files, each compiled once; ``installed`` are the folders of Python and of distributions."""

    def __init__(self) -> None:
        roots = {str(each.locate_file("")) for each in importlib.metadata.distributions()}
        roots |= {sysconfig.get_path("stdlib")}
        self.installed = tuple(os.path.join(root, "") for root in roots)
        self._known: dict[str, _Source | None] = {}

    def of(self, file: str) -> _Source | None:
        """None where there is no such file, or it is no Python."""
        if file not in self._known:
            self._known[file] = _source(file)
        return self._known[file]


def _source(file: str) -> _Source | None:
    try:
        text = Path(file).read_bytes()
        return _Source(text, compile(text, file, "exec", dont_inherit=True))
    except (OSError, SyntaxError, ValueError):
        return None


class _Source:
    """What one file defines."""

    def __init__(self, text: bytes, code: CodeType) -> None:
        self._text = text
        self._codes = dict[str, list[CodeType]]()
        _gather(code, "", self._codes)

    def has(self, kind: type, name: str, code: CodeType) -> bool:
        """Whether the class has this code under that name."""
        return any(same_code(each, code) for each in self._codes.get(f"{kind.__qualname__}.{name}", ()))

    def holds(self, code: CodeType) -> bool:
        """Whether the code is anywhere in it."""
        return any(same_code(each, code) for codes in self._codes.values() for each in codes)

    def defines(self, kind: type, name: str) -> bool:
        """Whether a ``def`` of the method stands in the class."""
        return f"{kind.__qualname__}.{name}" in self._codes

    def decorates(self, kind: type, name: str) -> bool:
        """Whether such a ``def``, or the class, has decorators, or the name is assigned to in the class."""
        return (kind.__qualname__, name) in self._decorated

    @functools.cached_property
    def _decorated(self) -> set[tuple[str, str]]:
        return set(_decorated(ast.parse(self._text), ""))


def _gather(code: CodeType, prefix: str, found: dict[str, list[CodeType]]) -> None:
    """All functions' codes by qualified name."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            name = f"{prefix}{inner.co_name}"
            is_function = bool(inner.co_flags & inspect.CO_OPTIMIZED)
            if is_function:
                found.setdefault(name, []).append(inner)
            _gather(inner, f"{name}.<locals>." if is_function else f"{name}.", found)


def _decorated(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            name = f"{prefix}{node.name}"
            yield from ((name, each) for each in _METHODS if node.decorator_list)
            yield from ((name, each) for each in _changed_in(node))
            yield from _decorated(node, f"{name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _decorated(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _decorated(node, prefix)


def _changed_in(node: ast.ClassDef) -> Iterator[str]:
    """Methods that have decorators other than static and class methods', or are assigned to."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            others = {ast.unparse(each) for each in inner.decorator_list} - {"staticmethod", "classmethod"}
            yield from [inner.name] if others else ()
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects do the same: equal in everything but the name of their file."""
    if any(getattr(one, name, None) != getattr(other, name, None) for name in _COMPARED):
        return False
    return bool(_comparable(one.co_consts) == _comparable(other.co_consts))


def _comparable(constant: Any) -> Any:
    """Equal only for equal constants of equal types: 1 is neither 1.0 nor True, and 0.0 not -0.0."""
    if isinstance(constant, tuple):
        return (tuple, *map(_comparable, constant))
    if isinstance(constant, frozenset):
        return (frozenset, frozenset(map(_comparable, constant)))
    if isinstance(constant, CodeType):
        fields = tuple(getattr(constant, name, None) for name in _COMPARED)
        return (CodeType, *fields, _comparable(constant.co_consts))
    if isinstance(constant, slice):
        return (slice, *map(_comparable, (constant.start, constant.stop, constant.step)))
    if isinstance(constant, float | complex):
        return (type(constant), repr(constant))
    return (type(constant), constant)
