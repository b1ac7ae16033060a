"""When memory did run out: where, by how much, and the cheapest change that would fit."""

from __future__ import annotations

import contextlib
import errno
import math
import re
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from squeezebox import planner
from squeezebox.bounds import NoiseBudget
from squeezebox.planning._find import probe
from squeezebox.planning._kinds import check_kinds
from squeezebox.planning._plans import planned
from squeezebox.profiling import free_at_peak, free_bytes
from squeezebox.reports import exact_bytes
from squeezebox.schema import BudgetError, OptionError, OutOfMemoryError, SqueezeboxError
from squeezebox.session import Session
from squeezebox.steps import (
    LossFunction,
    TrainingStep,
    check_sample,
    device_of,
    held_by,
    nbytes_of,
    persistent,
)

# Of torch's allocators for hosts and for CUDA devices, and of numpy's.
_ASKED = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
_FREE = re.compile(r"of which ([\d.]+) ?(bytes|[KMGTP]iB) is free")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


@contextlib.contextmanager
def explain_out_of_memory(
    model: torch.nn.Module,
    *,
    session: Session | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    noise: float = 1e-3,
) -> Iterator[None]:
    """Around a training loop: an error for lack of memory says where, how much lacked, and what would fit.

    Costs nothing until then. The module is read off the stack; in backward, where C++ runs without one, the
    session knows which saved tensor was read last. With ``sample`` and ``loss_fn`` plans are made for what
    memory there is, from small batches that fit it, and the cheapest that does it is named; without, only the
    share of a smaller batch is. Gradients are dropped for that.

    Args:
        model: what is trained, with or without Squeezebox.
        session: its session, if it has one.
        optimizer: whose state counts; the session's, if it has one.
        sample: inputs and target of the batch that is trained.
        loss_fn: see :func:`plan`.
        noise: allowed gradient noise of such a plan.

    Raises:
        OutOfMemoryError: for what torch or numpy could not allocate, from which it follows. Its message
            contains theirs.
        OptionError: at once, if the sample is no pair of inputs and target, or comes without the loss or the
            loss without it; or if the noise or the optimizer is none.
    """
    check_kinds(model, noise, optimizer)
    NoiseBudget(noise=noise)  # refuses what is out of range
    if sample is not None or loss_fn is not None:
        sample, loss_fn = check_sample(sample, loss_fn)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explained = explanation(
            error, model, session=session, optimizer=optimizer, sample=sample, loss_fn=loss_fn, noise=noise
        )
        if explained is None:
            raise
        raise explained from error


def explanation(
    error: BaseException,
    model: torch.nn.Module,
    *,
    session: Session | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    noise: float = 1e-3,
) -> OutOfMemoryError | None:
    """What :func:`explain_out_of_memory` raises for this error; None where memory is not what it lacked."""
    asked = _asked_bytes(error)
    if asked is None:
        return None
    where = _where(error.__traceback__, model, session)
    free = _free_then(error, model)
    first = str(error).strip().splitlines()[0]
    _let_go(error)
    optimizer = (None if session is None else session.engine.optimizer) or optimizer
    if sample is not None and loss_fn is not None:
        step = TrainingStep(model=model, sample=sample, loss_fn=loss_fn, optimizer=optimizer, noise=noise)
        change = _cheapest(step, session)
    else:
        change = _smaller(asked - (free or 0), session)
    known = "" if free is None else f", {exact_bytes(free)} were free: {_short(asked - free)}"
    return OutOfMemoryError(
        f"Out of memory {where}: {exact_bytes(asked)} were asked for{known}. {change} ({first})"
    )


def _asked_bytes(error: BaseException) -> int | None:
    found = None if isinstance(error, OutOfMemoryError) else _ASKED.search(str(error))  # explained already
    if found is None or not isinstance(error, (RuntimeError, MemoryError)):
        return None
    return _bytes(found)


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether memory is what lacked, to this error or to one that it tells of."""
    while error is not None:
        short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if short or _asked_bytes(error) is not None:
            return True
        error = error.__cause__  # not the context: that is the step that failed
    return False


def _short(missing: int) -> str:
    if missing > 0:
        return f"about {exact_bytes(missing)} short"
    return "enough in all, but not in one piece or under another limit"


def _where(trace: TracebackType | None, model: torch.nn.Module, session: Session | None) -> str:
    """Phase and module of the innermost frame that tells."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    owners = [(at, names[id(owner)]) for at, owner in enumerate(map(_owner, frames)) if id(owner) in names]
    inner, name = owners[-1] if owners else (-1, "")
    module = f"module '{name}'" if name else type(model).__name__
    files = [frame.f_code.co_filename.replace("\\", "/") for frame in frames]
    if any(frame.f_code.co_name == "_engine_run_backward" for frame in frames):
        read = session.engine.recorder.hooks.last_read if session is not None else ""
        return f"in backward, in {module}" if owners else _in_backward(read)
    if any("/torch/optim/" in file for file in files[inner + 1 :]):  # it may run forward as its closure
        return "in the optimizer's step"
    return f"in forward, in {module}" if owners else "outside of the model (its loss, or data)"


def _in_backward(read: str) -> str:
    if not read:
        return "in backward"
    module = read.partition(":")[0]
    return f"in backward, in {f'module {module!r}' if module else 'the loss'}, after '{read}' was read"


def _owner(frame: FrameType) -> object:
    return frame.f_locals.get("self")


def _free_then(error: BaseException, model: torch.nn.Module) -> int | None:
    """When it failed: by a device's own words, else by the most that this process ever held; else now."""
    found = _FREE.search(str(error))
    if found is not None:
        return _bytes(found)
    free = [_free(model), free_at_peak() if device_of(model).type == "cpu" else None]
    return min((each for each in free if each is not None), default=None)


def _bytes(found: re.Match[str]) -> int:
    return int(float(found[1]) * 1024 ** _UNITS.index(found[2]))


def _free(model: torch.nn.Module) -> int | None:
    with contextlib.suppress(OptionError):
        return free_bytes(device_of(model))
    return None


def _let_go(error: BaseException) -> None:
    """Free what the failed step's frames hold."""
    for each in (error, error.__context__, error.__cause__):
        if each is not None:
            traceback.clear_frames(each.__traceback__)
            for frame, _ in traceback.walk_tb(each.__traceback__):
                frame.f_locals  # noqa: B018 - before Python 3.13 a copy, which this brings up to date


def _cheapest(step: TrainingStep, session: Session | None) -> str:
    """A plan for the same batch if there is one, else what BudgetError proposes."""
    model, batch = step.model, step.batch
    model.zero_grad(set_to_none=True)
    attached = session is not None and session.engine.installation is not None
    with session.engine.aside() if session is not None and attached else contextlib.nullcontext():
        free = _free(model)
        if free is None:
            return ""
        limit = free + nbytes_of([*held_by(model), *persistent(model, step.optimizer)])
        try:
            known = probe(step, limit // 2)  # room for what is in pieces
        except (SqueezeboxError, RuntimeError, OSError, MemoryError) as error:
            if _is_of_memory(error):  # the trial's own, in whatever words
                return f"Of {exact_bytes(limit)} there was not even enough to try plans on small batches."
            return f"No plan could be tried: {error}"
        try:
            plan = planned(model, planner.at_batch(known, batch), limit, step.noise, batch)
        except BudgetError as error:
            return f"No plan holds this batch in what there is. {error}"
    slower = plan.predicted_seconds / plan.plain_seconds
    return (
        f"The cheapest change that fits: the same batch of {batch} with attach(..., budget={limit}, "
        f"noise={step.noise:g}), whose peak of {exact_bytes(plan.predicted_peak_bytes)} takes "
        f"{slower:.2f} times the plain step's time."
    )


def _smaller(missing: int, session: Session | None) -> str:
    """The share of the batch that would have fitted, by what the last step held."""
    ask = "Give sample= and loss_fn= to explain_out_of_memory() to have plans tried that hold this batch."
    latest = session.engine.records.latest if session is not None else None
    record = latest() if latest is not None else None
    held = 0 if record is None else record.activation_peak_bytes or record.packed_bytes
    if missing <= 0 or missing >= held:
        return ask
    return f"A batch smaller by {math.ceil(100 * missing / held)} % would fit. {ask}"
