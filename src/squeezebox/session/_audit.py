"""The audit: which trainings are made, one after another or side by side, and kept as they end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import inspect
import json
import multiprocessing
import os
import pickle
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from squeezebox.reports import (
    CONTROL,
    EVERYTHING,
    Audit,
    AuditRecord,
    StepCost,
    analyse,
    load_record,
    require_writable,
    save_record,
    write_whole,
)
from squeezebox.schema import FormatError, OptionError, OutputError
from squeezebox.session._audit_operators import audit_operators, first_unequal
from squeezebox.session._audit_run import (
    Factor,
    RunKey,
    Tooling,
    TrainFunction,
    train_once,
    train_some,
)

Arms = Mapping[str, Mapping[str, Any] | None]
Progress = Callable[[int, int, str], None]
FACTORS = tuple(each.value for each in Factor)
_REQUEST = "audit.json"
_ROUNDS = 3  # of timed steps, deterministic and not in turn


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What every training of one folder depends on, besides its own key."""

    train: str
    source_digest: str
    torch: str
    device: str
    threads: int
    arms: Mapping[str, str]


def audit(
    train: TrainFunction,
    *,
    out: str | os.PathLike[str],
    arms: Arms | None = None,
    seeds: int = 10,
    factors: Sequence[str] = FACTORS,
    margin: float = 1.0,
    workers: int = 1,
    threads: int | None = None,
    steps: int = 3,
    on_progress: Progress | None = None,
) -> Audit:
    """Find out whether compression changes a training more than its tooling does.

    Trains every arm with ``seeds`` seeds, in which all factors vary together; the first arm also with each
    factor varied alone; and every arm's seed 0 a second time, which must be equal to the bit.

    Args:
        train: a whole training. It is given an :class:`AuditRun`, makes its model within
            ``run.initialising()``, orders its data by ``run.order``, trains within
            ``run.attach(model, optimizer)``, and returns ``run.finish(model, outputs, targets)``.
        out: a folder for finished trainings. Those that are there are not made again.
        arms: options of :func:`squeezebox.attach` by the arm's name, None for plain training. The first arm
            is the one that the others are compared with. Default: plain, and squeezed with ``noise=1e-3``.
        seeds: trainings of every series, at least 3.
        factors: those of "initialisation", "order", "augmentation" and "implementation" to vary alone.
        margin: a mean difference within so many standard deviations of the first arm's score between seeds
            counts as none.
        workers: processes that train at the same time. With more than one, ``train`` and the arms' options
            must be importable or plain, as for ``multiprocessing``.
        threads: of torch in each training, except where implementation varies (default: the cores, shared
            among the workers). Part of what the results depend on.
        steps: of every arm's training that are repeated operator by operator for the ledger, and timed for
            determinism's cost; 0 leaves both out.
        on_progress: called with (done, total, what was done).

    Returns:
        The findings; ``str()`` is a page, ``to_dict()`` has everything.

    Raises:
        OptionError: an argument is out of range; ``out`` holds trainings of another request, and in what
            it differs; ``train`` returns something else than ``run.finish(...)``.
        OutputError: ``out`` cannot be written.
    """
    chosen: Arms = {"plain": None, "squeezed": {"noise": 1e-3}} if arms is None else arms
    _check(chosen, seeds, factors, margin, workers, threads, steps)
    if threads is None:
        threads = max(1, (os.cpu_count() or 1) // workers)
    folder = Path(out)
    _claim(folder, train, chosen, threads)
    keys = _keys(list(chosen), seeds, factors, threads)
    records = _records(folder, train, chosen, threads, keys, workers, on_progress)
    facts = {
        "train": _name_of(train),
        "arms": _told(chosen),
        "seeds": seeds,
        "threads": threads,
        "torch": torch.__version__,
        "device": _device(),
        "trainings": len(keys),
        "training_seconds": statistics.median(record.seconds for record in records),
    }
    found = analyse(records, margin, facts)
    return _with_operators(found, train, chosen, threads, steps) if steps else found


def _check(
    arms: Arms,
    seeds: int,
    factors: Sequence[str],
    margin: float,
    workers: int,
    threads: int | None,
    steps: int,
) -> None:
    unknown = [name for name in factors if name not in FACTORS]
    checks = (
        (not arms, "there is no arm; give at least plain."),
        (seeds < 3, f"seeds {seeds} is below 3, which tells nothing of a spread; give 10."),
        (bool(unknown), f"factor {unknown[:1]} is none of {', '.join(FACTORS)}."),
        (not margin > 0.0, f"margin {margin} is not above 0; give 1 for one deviation between seeds."),
        (workers < 1, f"workers {workers} is below 1."),
        (threads is not None and threads < 1, f"threads {threads} is below 1."),
        (steps < 0, f"steps {steps} is below 0; give 0 for no ledger."),
    )
    for wrong, message in checks:
        if wrong:
            raise OptionError(message)


def _keys(arms: Sequence[str], seeds: int, factors: Sequence[str], threads: int) -> list[RunKey]:
    """Seed by seed, so that an audit cut short has whole pairs; the first arm's everything comes first."""
    keys = [RunKey(arm=arm, series=EVERYTHING, seed=seed) for seed in range(seeds) for arm in arms]
    keys += [RunKey(arm=arm, series=CONTROL, seed=0) for arm in arms]
    for name in factors:
        # a host has so many variants; more trainings would repeat them. A device's kernels differ each time
        repeat = name == Factor.IMPLEMENTATION.value and not torch.cuda.is_available()
        # seed 0 of a factor alone is seed 0 of everything
        later = range(1, min(seeds, 2 * threads) if repeat else seeds)
        keys += [RunKey(arm=arms[0], series=name, seed=seed) for seed in later]
    return keys


def _claim(folder: Path, train: TrainFunction, arms: Arms, threads: int) -> None:
    """Note what the folder's trainings depend on, or make sure that it is the same.

    Arms may be added, and seeds and factors: a training does not depend on which others there are.
    """
    wanted = _Request(
        train=_name_of(train),
        source_digest=_source_digest(train),
        torch=torch.__version__,
        device=_device(),
        threads=threads,
        arms=_told(arms),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error}. Give another one.") from error
    require_writable(folder / _REQUEST)
    for left in folder.glob(".*.npz.*"):  # a kill while it was being written
        left.unlink(missing_ok=True)
    values, there = dataclasses.asdict(wanted), _read_request(folder / _REQUEST)
    for name, value in values.items():
        if name != "arms" and there.get(name, value) != value:
            raise _differs(folder, name, there[name], value)
    for arm, options in (there.get("arms") or {}).items():
        if wanted.arms.get(arm, options) != options:
            raise _differs(folder, f"arm {arm}", options, wanted.arms[arm])
    values["arms"] = {**(there.get("arms") or {}), **wanted.arms}
    write_whole(folder / _REQUEST, json.dumps(values, indent=1) + "\n")


def _read_request(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise FormatError(f"{path} is not an audit's request ({error}); give another folder.") from error
    return values


def _differs(folder: Path, what: str, there: object, wanted: object) -> OptionError:
    return OptionError(
        f"{folder} holds trainings with {what} {there}, and this audit wants {what} {wanted}. They cannot "
        "be compared; give another folder for the new ones, or delete this one."
    )


def _source_digest(train: TrainFunction) -> str:
    """Of the file that the function stands in: what has changed since may train differently."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(train))
        content = Path(path).read_bytes() if path else b""
    except (TypeError, OSError):
        content = b""
    return hashlib.sha256(content).hexdigest()[:16]


def _told(arms: Arms) -> dict[str, str]:
    """Options as text: a controller among them is no JSON."""
    return {name: repr(None if options is None else dict(options)) for name, options in arms.items()}


def _name_of(train: TrainFunction) -> str:
    return f"{getattr(train, '__module__', '?')}:{getattr(train, '__qualname__', type(train).__name__)}"


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# --- trainings -----------------------------------------------------------------------------------------


def _records(
    folder: Path,
    train: TrainFunction,
    arms: Arms,
    threads: int,
    keys: Sequence[RunKey],
    workers: int,
    on_progress: Progress | None,
) -> list[AuditRecord]:
    """In the order of ``keys``; those without a file are trained first."""
    paths = {key: folder / f"{_file_name(key)}.npz" for key in keys}
    missing = [key for key in keys if not paths[key].exists()]
    done = len(keys) - len(missing)
    for key in _trained(train, arms, threads, missing, paths, workers):
        done += 1
        if on_progress is not None:
            on_progress(done, len(keys), str(key))
    return [load_record(paths[key]) for key in keys]


def _trained(
    train: TrainFunction,
    arms: Arms,
    threads: int,
    missing: Sequence[RunKey],
    paths: Mapping[RunKey, Path],
    workers: int,
) -> Iterator[RunKey]:
    """Every key once its file is there, in whatever order they end."""
    if workers == 1 or len(missing) < 2:
        for key in missing:
            _train_and_save(train, key, arms[key.arm], threads, paths[key])
            yield key
        return
    _require_picklable(train, arms)
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, dead
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(missing)), mp_context=context, initializer=_end_with_parent
    ) as pool:
        waiting = {
            pool.submit(_train_and_save, train, key, arms[key.arm], threads, paths[key]): key
            for key in missing
        }
        try:
            for future in concurrent.futures.as_completed(waiting):
                future.result()
                yield waiting[future]
        finally:  # after an error, only what has begun is finished, and kept
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next training for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _train_and_save(
    train: TrainFunction, key: RunKey, options: Mapping[str, Any] | None, threads: int, path: Path
) -> None:
    save_record(train_once(train, key, options, threads), path)


def _require_picklable(train: TrainFunction, arms: Arms) -> None:
    try:
        pickle.dumps((train, dict(arms)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the training function or an arm cannot be sent to other processes ({error}). Define it at "
            "a module's top level, or give workers=1."
        ) from error


def _file_name(key: RunKey) -> str:
    """The arm's name made safe for files, and told apart from others that would become the same."""
    safe = "".join(letter if letter.isalnum() or letter in "-_=." else "_" for letter in key.arm)
    short = hashlib.sha256(key.arm.encode()).hexdigest()[:6]
    return f"{safe}-{short}-{key.series}-{key.seed}"


# --- operators -----------------------------------------------------------------------------------------


def _with_operators(found: Audit, train: TrainFunction, arms: Arms, threads: int, steps: int) -> Audit:
    """The findings with what broke the controls, the ledger of the first arm, and determinism's cost."""
    controls = tuple(
        control
        if control.equal
        else dataclasses.replace(
            control, first_unequal=first_unequal(train, control.arm, arms[control.arm], threads, steps)
        )
        for control in found.controls
    )
    plain, options = next(iter(arms.items()))
    return dataclasses.replace(
        found,
        controls=controls,
        operators=audit_operators(train, plain, options, threads, steps),
        cost=_step_cost(train, RunKey(arm=plain, series=CONTROL, seed=0), options, threads, steps),
    )


def _step_cost(
    train: TrainFunction, key: RunKey, options: Mapping[str, Any] | None, threads: int, steps: int
) -> StepCost | None:
    """Steps in turn with deterministic algorithms and without; None where no optimizer told of its steps.

    The first step of each round, which includes loading what is loaded late, is not counted.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_ROUNDS):
        for deterministic in times:
            tooling = Tooling(threads=threads, deterministic=deterministic)
            times[deterministic] += train_some(train, key, options, tooling, steps + 1)[1:]
    if not times[True] or not times[False]:
        return None
    return StepCost(
        steps=len(times[True]),
        deterministic_seconds=statistics.median(times[True]),
        seconds=statistics.median(times[False]),
    )
