"""The audit: which trainings are made, one after another or side by side, and kept as they end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import multiprocessing
import os
import pickle
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from squeezebox import codecs
from squeezebox.auditing._folder import Arms, claim, path_of, require_same_samples, train_and_save
from squeezebox.auditing._operators import audit_operators, first_unequal
from squeezebox.auditing._run import (
    Factor,
    RunKey,
    Tooling,
    TrainFunction,
    train_some,
)
from squeezebox.planning import attach
from squeezebox.reports import (
    CONTROL,
    EVERYTHING,
    Audit,
    AuditRecord,
    StepCost,
    analyse,
)
from squeezebox.schema import OptionError
from squeezebox.steps import Progress

FACTORS = tuple(each.value for each in Factor)
# of attach's options, those that can be tried on another model
_OF_ANY_MODEL = ("noise", "controller", "exact", "codec", "speed", "checks_per_refresh")
_ROUNDS = 3  # of timed steps, deterministic and not in turn


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
        out: a folder for finished trainings. Those found there are not trained again.
        arms: options of :func:`squeezebox.attach` by the arm's name, None for plain training. The first arm
            is the one that the others are compared with. Default: plain, and squeezed with ``noise=1e-3``.
        seeds: trainings of every series, at least 3.
        factors: those of "initialisation", "order", "augmentation" and "implementation" to vary alone.
        margin: in standard deviations of the first arm's score between seeds; a smaller mean difference
            counts as none.
        workers: processes that train at the same time. With more than one, ``train`` and the arms' options
            must be importable or plain, as for ``multiprocessing``.
        threads: of torch in each training, except where implementation varies (default: those of the
            trainings in ``out``, else the cores, shared among the workers). Part of what results depend on.
        steps: of the first arm's training that are repeated operator by operator for the ledger, and timed
            for determinism's cost; 0 leaves both out. Counted by the optimizer given to ``run.attach``;
            without one the whole training is repeated, and not timed.
        on_progress: called with (done, total, what was done).

    Returns:
        The findings; ``str()`` is a page, ``to_dict()`` has everything.

    Raises:
        OptionError: an argument or an arm's option is out of range; ``out`` holds trainings of another
            request, and in what it differs; ``train`` returns something else than ``run.finish(...)``, or
            two trainings held out different samples; a process was killed.
        OutputError: ``out`` cannot be written.
    """
    chosen: Arms = {"plain": None, "squeezed": {"noise": 1e-3}} if arms is None else arms
    _check(chosen, seeds, factors, margin, workers, threads, steps)
    _check_arms(chosen)
    for dtype in (torch.float32, torch.bfloat16):  # every training packs from its first step on
        codecs.require(dtype)
    folder = Path(out)
    request = claim(folder, train, chosen, threads, workers)
    keys = _keys(list(chosen), seeds, factors, request.threads)
    records = _records(folder, train, chosen, request.threads, keys, workers, on_progress)
    facts = {
        "train": request.train,
        "arms": request.arms,
        "seeds": seeds,
        "threads": request.threads,
        "torch": request.torch,
        "device": request.device,
        "trainings": len(keys),
        "training_seconds": statistics.median(record.seconds for record in records),
    }
    found = analyse(records, margin, facts)
    return _with_operators(found, train, chosen, request.threads, steps) if steps else found


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
        (len(set(factors)) < len(factors), f"a factor is there twice in {', '.join(factors)}."),
        (
            not 0.0 < margin < math.inf,
            f"margin {margin} is not finite and above 0; give 1 for one deviation between seeds.",
        ),
        (workers < 1, f"workers {workers} is below 1."),
        (threads is not None and threads < 1, f"threads {threads} is below 1."),
        (steps < 0, f"steps {steps} is below 0; give 0 for no ledger."),
    )
    for wrong, message in checks:
        if wrong:
            raise OptionError(message)


def _check_arms(arms: Arms) -> None:
    """Refuse at once what a later arm's first training would end in, as far as options alone tell."""
    for arm, options in arms.items():
        given = {name: value for name, value in (options or {}).items() if name in _OF_ANY_MODEL}
        model = torch.nn.utils.skip_init(torch.nn.Linear, 1, 1)  # draws nothing
        try:
            attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **given).detach()
        except OptionError as error:
            raise OptionError(f"arm '{arm}': {error}") from error


def _keys(arms: Sequence[str], seeds: int, factors: Sequence[str], threads: int) -> list[RunKey]:
    """Seed by seed, so that an audit cut short has whole pairs; the first arm's everything comes first."""
    keys = [RunKey(arm=arm, series=EVERYTHING, seed=seed) for seed in range(seeds) for arm in arms]
    keys += [RunKey(arm=arm, series=CONTROL, seed=0) for arm in arms]
    for name in factors:
        # a host has no more variants; more trainings would repeat them. A device's kernels differ each time
        repeat = name == Factor.IMPLEMENTATION.value and not torch.cuda.is_available()
        # seed 0 of a factor alone is seed 0 of everything
        later = range(1, min(seeds, 2 * threads) if repeat else seeds)
        keys += [RunKey(arm=arms[0], series=name, seed=seed) for seed in later]
    return keys


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
    paths = {key: path_of(folder, key) for key in keys}
    there = [key for key in keys if paths[key].exists()]
    missing = [key for key in keys if key not in there]
    found: dict[RunKey, AuditRecord] = {}
    for key in itertools.chain(there, _trained(train, arms, threads, missing, paths, workers)):
        found[key] = AuditRecord.load(paths[key])
        first = next(iter(found))
        require_same_samples(first, found[first], key, found[key])
        if on_progress is not None and key in missing:
            on_progress(len(found), len(keys), str(key))
    return [found[key] for key in keys]


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
            train_and_save(train, key, arms[key.arm], threads, paths[key])
            yield key
        return
    _require_picklable(train, arms)
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, dead
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(missing)), mp_context=context, initializer=_end_with_parent
    ) as pool:
        waiting = {
            pool.submit(train_and_save, train, key, arms[key.arm], threads, paths[key]): key
            for key in missing
        }
        try:
            for future in concurrent.futures.as_completed(waiting):
                future.result()
                yield waiting[future]
        except BrokenProcessPool as error:
            raise OptionError(
                f"a training's process was killed, most likely for memory, with {workers} at a time. "
                "Finished trainings are kept: run again with fewer workers. If none began, put the call of "
                'squeezebox.audit under if __name__ == "__main__":.'
            ) from error
        finally:  # after an error, only what has begun is finished, and kept
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next training without end."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _require_picklable(train: TrainFunction, arms: Arms) -> None:
    try:
        pickle.dumps((train, dict(arms)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the training function or an arm cannot be sent to other processes ({error}). Define it at "
            "a module's top level, or give workers=1."
        ) from error


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
    """Steps in turn with deterministic algorithms and without; None where no optimizer reported its steps.

    The first step of each round, which includes loading what is loaded late, is not counted.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_ROUNDS):
        for deterministic in times:
            tooling = Tooling(threads=threads, deterministic=deterministic)
            seconds = train_some(train, key, options, tooling, steps + 1)[1:]
            if not seconds:
                return None
            times[deterministic] += seconds
    return StepCost(
        steps=len(times[True]),
        deterministic_seconds=statistics.median(times[True]),
        seconds=statistics.median(times[False]),
    )
