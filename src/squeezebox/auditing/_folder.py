"""What the trainings in an audit's folder depend on, so that none is taken for another's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from squeezebox.auditing._run import RunKey, ShortRun, TrainFunction, train_once
from squeezebox.reports import AuditRecord, require_writable, write_whole
from squeezebox.schema import FormatError, OptionError, OutputError, __version__

Arms = Mapping[str, Mapping[str, Any] | None]
_FILE = "audit.json"
_LONG = 300  # letters
_LEFT_OVER_SECONDS = 600.0  # a file is written in less


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What every training of one folder depends on, besides its own key."""

    train: str
    source_digest: str
    squeezebox: str
    torch: str
    device: str
    threads: int
    arms: Mapping[str, str]


def claim(folder: Path, train: TrainFunction, arms: Arms, threads: int | None, workers: int) -> Request:
    """Note what the folder's trainings depend on, or make sure that it is the same.

    Arms may be added, and seeds and factors: a training does not depend on which others there are.

    Raises:
        OptionError: the folder holds trainings of another request.
        FormatError: its request is damaged.
        OutputError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error}. Give another one.") from error
    require_writable(folder / _FILE)
    there = _read(folder / _FILE)
    wanted = Request(
        train=_name(train),
        source_digest=_digest(train),
        squeezebox=__version__,
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        threads=threads or there.get("threads") or max(1, (os.cpu_count() or 1) // workers),
        arms={name: _said(options) for name, options in arms.items()},
    )
    _remove_left_over(folder)
    if there:
        _require_same(folder, there, wanted)
    values = dataclasses.asdict(wanted) | {"arms": {**there.get("arms", {}), **wanted.arms}}
    write_whole(folder / _FILE, json.dumps(values, indent=1) + "\n")
    return wanted


def _said(options: Mapping[str, Any] | None) -> str:
    """An arm's options, long ones such as a plan by their digest."""
    said = repr(None if options is None else dict(options))
    digest = hashlib.sha256(said.encode()).hexdigest()
    return said if len(said) <= _LONG else f"{said[:_LONG]}... ({digest})"


def path_of(folder: Path, key: RunKey) -> Path:
    """A training's file: the arm's name made safe for files, and unlike others that would become the same."""
    safe = "".join(letter if letter.isalnum() or letter in "-_=." else "_" for letter in key.arm)
    short = hashlib.sha256(key.arm.encode()).hexdigest()[:6]
    return folder / f"{safe[:60]}-{short}-{key.series}-{key.seed}.npz"


def train_and_save(
    train: TrainFunction,
    key: RunKey,
    options: Mapping[str, Any] | None,
    threads: int,
    path: Path,
    short: ShortRun | None = None,
) -> None:
    """The training's file is there when this returns."""
    train_once(train, key, options, threads, short).save(path)


def require_same_samples(first: RunKey, one: AuditRecord, second: RunKey, other: AuditRecord) -> None:
    """As far as targets and groups tell. Of different samples, churn would mean nothing."""
    if np.array_equal(one.targets, other.targets) and np.array_equal(one.groups, other.groups):
        return
    raise OptionError(
        f"the trainings {first} and {second} gave run.finish() different targets or groups (of "
        f"{len(one.targets)} and {len(other.targets)} samples), so their predictions cannot be compared. "
        "Hold out the same ones, in the same order, whatever run.seed is."
    )


def _require_same(folder: Path, there: Mapping[str, Any], wanted: Request) -> None:
    """But for arms that only one of the two has."""
    for name, value in dataclasses.asdict(wanted).items():
        if name != "arms" and there.get(name) != value:
            raise _differs(folder, name.replace("_", " "), there.get(name), value)
    for arm, options in there["arms"].items():
        if wanted.arms.get(arm, options) != options:
            raise _differs(folder, f"arm {arm}", options, wanted.arms[arm])


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not isinstance(values.get("arms"), dict):
            raise ValueError("no JSON object with arms")
    except ValueError as error:
        raise FormatError(f"{path} is not an audit's request ({error}); give another folder.") from error
    return values


def _remove_left_over(folder: Path) -> None:
    """What a kill left half-written; another audit may be writing the newer ones."""
    for path in folder.glob(".*.npz.*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_SECONDS:
                path.unlink()


def _differs(folder: Path, what: str, there: object, wanted: object) -> OptionError:
    address = " (give its class a repr, as a dataclass has)" if " at 0x" in f"{there}{wanted}" else ""
    return OptionError(
        f"{folder} holds trainings with {what} {there}, and this audit wants {what} {wanted}{address}. They "
        "cannot be compared; give another folder for the new ones, or delete this one."
    )


def _name(train: TrainFunction) -> str:
    function, _ = _unwrapped(train)
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', '?')}"


def _digest(train: TrainFunction) -> str:
    """Of the file that the function stands in, and of all that it is given besides the run."""
    function, given = _unwrapped(train)
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(_told(value) for value in given))
    return hashlib.sha256(_source(function) + text.encode()).hexdigest()[:16]


def _unwrapped(function: Any) -> tuple[Any, list[object]]:
    """The function inside partials, decorators and objects, and what all of these bind."""
    if isinstance(function, functools.partial):
        inner, given = _unwrapped(function.func)
        return inner, [*given, *function.args, *function.keywords, *function.keywords.values()]
    if inspect.ismethod(function):
        inner, given = _unwrapped(function.__func__)
        return inner, [*given, function.__self__]
    if not inspect.isroutine(function) and not inspect.isclass(function):
        inner, given = _unwrapped(type(function).__call__)
        return inner, [*given, function]
    wrapped = getattr(function, "__wrapped__", None)
    inner, given = (function, []) if wrapped is None else _unwrapped(wrapped)
    return inner, [*given, *_bound(function)]


def _bound(function: Any) -> Iterator[object]:
    """Its place in the file, defaults, and what the closure holds, whose cells may be empty yet."""
    yield getattr(getattr(function, "__code__", None), "co_firstlineno", None)
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name, None):
            yield getattr(function, name)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _told(value: object) -> str:
    """An object without a repr of its own by its attributes."""
    plain = type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__")
    return f"{type(value).__qualname__} {vars(value)}" if plain else repr(value)


def _source(function: Any) -> bytes:
    """The file; of a notebook's cell the function's text, and of what has neither its code."""
    try:
        return Path(inspect.getsourcefile(function) or "").read_bytes()
    except (TypeError, OSError):
        pass
    try:
        return inspect.getsource(function).encode()
    except (TypeError, OSError):
        code = getattr(function, "__code__", None)
        parts = (getattr(code, name, None) for name in ("co_code", "co_consts", "co_names"))
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr([*parts])).encode()
