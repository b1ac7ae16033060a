"""Whether installed packages still are what was installed: files by their RECORD, byte code by its source."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution, PackagePath
from pathlib import Path
from typing import IO

from squeezebox.doctor import _byte_code
from squeezebox.schema import EnvironmentFault, Fault
from squeezebox.steps import Progress

_IMPORTABLE = (".py", ".so", ".pyd", ".pyc")
_OPTIMISATIONS = {"": 0, "1": 1, "2": 2}  # as byte code files are named, and as the compiler knows them
_CHUNK = 64  # files between two words of progress


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed distribution; ``skipped`` says why its files cannot be checked, "" if they can."""

    name: str
    version: str
    files: tuple[PackagePath, ...]
    skipped: str = ""

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
    files = tuple(found.files or ())
    return Installed(name, found.version, files, _why_skipped(found))


def _why_skipped(found: Distribution) -> str:
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return "editable installation: its files are meant to change"
    if found.read_text("RECORD") is None:
        return "no RECORD: whatever installed it wrote down no hashes"
    return ""


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
                yield EnvironmentFault(fault=fault, package=package.name, subject=str(_located(file)))
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
        others = {_located(file) for each in importlib.metadata.distributions() for file in each.files or ()}
        yield from sorted(set(found) - others)


def check_byte_code(package: Installed, on_progress: Progress) -> tuple[int, list[EnvironmentFault]]:
    """How many byte code files this Python would load of the package, and which their sources do not make.

    A changed source does not count: its byte code is out of date then, and loaded only if it says to be
    taken unchecked.
    """
    pairs = list(_byte_code_files(package.sources))
    faults = []
    for number, (pair, wrong) in enumerate(zip(pairs, _compared(pairs), strict=True), 1):
        if number % _CHUNK == 0 or number == len(pairs):
            on_progress(number, len(pairs), f"{package.name}: byte code")
        if wrong:
            faults.append(
                EnvironmentFault(
                    fault=Fault.BYTE_CODE, package=package.name, subject=str(pair[1]), detail=wrong
                )
            )
    return len(pairs), faults


def _byte_code_files(sources: Iterable[Path]) -> Iterator[tuple[Path, Path, int]]:
    for source in sources:
        for suffix, level in _OPTIMISATIONS.items():
            path = Path(importlib.util.cache_from_source(str(source), optimization=suffix))
            if path.is_file() and source.is_file():
                yield source, path, level


def _compared(pairs: Sequence[tuple[Path, Path, int]]) -> Iterator[str]:
    """What is wrong with each, from processes of their own, which load nothing that is installed."""
    number = min(os.cpu_count() or 1, -(-len(pairs) // _CHUNK))
    with contextlib.ExitStack() as stack:
        idle = queue.SimpleQueue[_Comparer]()
        for _ in range(number):
            idle.put(stack.enter_context(_Comparer()))

        def compared(pair: tuple[Path, Path, int]) -> str:
            comparer = idle.get()
            try:
                return comparer.ask(pair)
            finally:
                idle.put(comparer)

        if pairs:
            yield from stack.enter_context(ThreadPoolExecutor(number)).map(compared, pairs)


class _Comparer:
    """A process that compares byte code, and starts again where a file ends it."""

    def __enter__(self) -> _Comparer:
        command = [sys.executable, "-I", "-S", "-B", "-W", "ignore", _byte_code.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, pair: tuple[Path, Path, int]) -> str:
        source, byte_code, level = pair
        try:
            self._stdin.write(json.dumps([str(source), str(byte_code), level]) + "\n")
            self._stdin.flush()
            answer = self._stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return str(json.loads(answer))
        self.__exit__()
        self.__enter__()
        return "ends the interpreter that reads it"

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout


def _located(file: PackagePath) -> Path:
    return Path(os.path.normpath(str(file.locate())))
