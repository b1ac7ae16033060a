"""From a model and a sample to a rewritten model, and back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from squeezebox.capture import check_supported, observing, refuse_transforms, saved_bytes
from squeezebox.profiling import fake_like, simulate
from squeezebox.reports import Rewrite, Rewrites
from squeezebox.rewriting._check import Outcome, error, in_double, is_equal, outcomes, tolerance
from squeezebox.rewriting._install import install, program_of, uninstall
from squeezebox.rewriting._program import Place, Program
from squeezebox.rewriting._rules import PLAIN_ONLY, RULES
from squeezebox.rewriting._search import Cost, Found, best
from squeezebox.schema import AttachError, OptionError, SqueezeboxError
from squeezebox.steps import LossFunction, TrainingStep, check_sample, explained

T = TypeVar("T")
_RULES = {rule.name: rule for rule in RULES}
_DOUBLE = 1e-8  # by how much two orders of sums may differ in float64, in a network that amplifies rounding
_NEARLY = 4.0  # times the model's own distance from float64


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A model under rewrites, until :meth:`undo`; ``str()`` is their table."""

    model: torch.nn.Module
    rewrites: Rewrites

    def undo(self) -> None:
        """Leave the model as it was. Safe to call twice.

        Raises:
            AttachError: a session was attached since; detach that first.
        """
        uninstall(self.model)

    def __str__(self) -> str:
        return str(self.rewrites)


def rewrite(
    model: torch.nn.Module,
    *,
    sample: tuple[Any, Any] | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: str | torch.optim.Optimizer = "sgd-momentum",
    without: Collection[str] = (),
    rewrites: Rewrites | None = None,
) -> Rewritten:
    """Compute parts of a model in ways that need less memory, checked on a sample.

    Estimates say which patterns of docs/rewrite.md lower the peak of a training step, or what it saves. Each
    that does is tried on the sample, in training and evaluation mode: outputs, loss, gradients and buffers
    must be the model's, to the bit where the table says "exact" and within rounding elsewhere: 1e-5 of a
    tensor's largest value in float32, or as near to float64 as the model itself is. One that fails is not
    applied, and its row says why. Weights, their names and ``state_dict()`` stay as they are, and so does all
    code around the model. Make plans afterwards.

    Args:
        model: any module, on one device. It is changed in place; :meth:`Rewritten.undo` takes that back.
        sample: (inputs, target) as a training step gets them; several inputs are a tuple or a dict.
        loss_fn: ``loss_fn(output, target)`` is what backward starts from.
        optimizer: for the estimates, as in :func:`squeezebox.estimate`.
        without: names of rewrites that are not to be tried, or not to be applied of those in ``rewrites``.
        rewrites: what was found before, from :func:`squeezebox.load_rewrites`; nothing is searched then. With
            ``sample`` and ``loss_fn`` they are checked again.

    Raises:
        AttachError: the model is rewritten already, or has a session; a session comes afterwards.
        OptionError: an argument is out of range, ``rewrites`` are of another model, or the model fails on
            the sample.
        UnsupportedModelError: the model is compiled, on several devices, or its forward is replaced.
    """
    refuse_transforms()
    check_supported(model)
    if program_of(model) is not None:
        raise AttachError("the model is rewritten already; undo() that first.")
    unknown = sorted({*without, *((row.rule for row in rewrites.rows) if rewrites else ())} - {*_RULES})
    if unknown:
        raise OptionError(f"there is no rewrite '{unknown[0]}'; there are {', '.join(_RULES)}.")
    if rewrites is not None:
        rewrites = _fitting(model, rewrites, without)
    if rewrites is not None and sample is None:
        if loss_fn is not None:
            raise OptionError(
                "loss_fn= is given without sample=; give both to check the rewrites, or neither."
            )
        install(model, Program(RULES, _places(rewrites.applied)))
        return Rewritten(model, rewrites)
    given, loss = check_sample(sample, loss_fn)
    step = TrainingStep(model=model, sample=given, loss_fn=loss)
    before = _outcomes(step)
    if rewrites is None:
        rewrites = _searched(step, optimizer, [name for name in _RULES if name not in without])
    checked = _checked(step, before, rewrites)
    if checked.applied:
        install(model, Program(RULES, _places(checked.applied)))
    return Rewritten(model, checked)


def proposed(step: TrainingStep, seconds: float) -> Rewrites | None:
    """What would lower a planned step's peak by estimate, none of it checked; None where nothing does.

    Of a long search, what was found when the ``seconds`` were over.
    """
    if program_of(step.model) is not None:
        return None
    try:
        check_supported(step.model)
        names = [name for name in _RULES if name not in PLAIN_ONLY]
        found = _searched(step, step.optimizer or "sgd", names, seconds)
    except TimeoutError:
        return None
    except (SqueezeboxError, RuntimeError, ValueError, TypeError, IndexError):  # of the model on fake tensors
        return None
    return found if found.peak_bytes < found.plain_bytes else None


def _fitting(model: torch.nn.Module, rewrites: Rewrites, without: Collection[str]) -> Rewrites:
    """The table for this model, which must have its modules, but for what is to be left out."""
    names = {name for name, _ in model.named_modules()}
    strange = [where for row in rewrites.applied for where in row.where if where not in names]
    if strange:
        raise OptionError(
            f"the rewrites are of another model: this one has no module '{strange[0]}'. Find its own by "
            "squeezebox.rewrite(model, sample=..., loss_fn=...)."
        )
    left_out = [row for row in rewrites.applied if row.rule in without]
    return _of_rows(
        rewrites,
        [_with(row, row.error, "left out by without=") if row in left_out else row for row in rewrites.rows],
    )


def _of_rows(rewrites: Rewrites, rows: Collection[Rewrite]) -> Rewrites:
    """The same with these rows, whose peak is that of the first ones, up to one that is not applied."""
    peak = rewrites.plain_bytes
    for row in rows:
        if not row.refused and row.before_bytes == peak:
            peak = row.after_bytes
    return Rewrites(plain_bytes=rewrites.plain_bytes, peak_bytes=peak, rows=tuple(rows))


def _outcomes(step: TrainingStep) -> list[Outcome]:
    with explained(step.sample[0], step.sample[1]):
        found = outcomes(step)
    return found


def _places(rows: Iterable[Rewrite]) -> set[Place]:
    return {(row.rule, where) for row in rows for where in row.where}


def _searched(
    step: TrainingStep,
    optimizer: str | torch.optim.Optimizer,
    names: Collection[str],
    seconds: float = math.inf,
) -> Rewrites:
    """Rows that lower the peak, or what is saved; none of them checked yet.

    No estimate is begun that would end, as long as the first took, after the ``seconds``; TimeoutError where
    there is none of the model as it is.
    """
    rules = [_RULES[name] for name in names]
    begun = time.perf_counter()

    def cost_of(program: Program | None) -> Cost:
        return _under(step.model, program, lambda: _estimated(step, optimizer))

    scout = Program(rules, None)
    together = cost_of(scout)
    took = time.perf_counter() - begun
    places: dict[str, list[str]] = {}
    for name, where in sorted(scout.happened("fused")):
        places.setdefault(name, []).append(where)

    def cost(members: frozenset[str]) -> Cost:
        if members == frozenset(places):
            return together
        if time.perf_counter() - begun + took > seconds:
            raise TimeoutError
        wanted = {(name, where) for name in members for where in places[name]}
        return cost_of(Program(rules, wanted) if wanted else None)

    return _as_rewrites(best(places, cost), places)


def _estimated(step: TrainingStep, optimizer: str | torch.optim.Optimizer) -> Cost:
    simulation, _ = simulate(
        step.model,
        sample=lambda _: fake_like(step.sample, None),
        loss_fn=step.loss_fn,
        optimizer=optimizer,
        dtype=None,
        watch=observing,
        values=lambda: step.sample,
        load="balanced",
    )
    return simulation.trace.peak().nbytes, sum(saved_bytes(simulation.watched).values())


def _as_rewrites(found: Found, places: dict[str, list[str]]) -> Rewrites:
    pairs = zip(found.members, found.costs, found.costs[1:], strict=False)
    rows = tuple(
        Rewrite(
            rule=name,
            where=tuple(places[name]),
            exact=_RULES[name].exact,
            before_bytes=before[0],
            after_bytes=after[0],
        )
        for name, before, after in pairs
    )
    return Rewrites(plain_bytes=found.costs[0][0], peak_bytes=found.peak_bytes, rows=rows)


def _checked(step: TrainingStep, before: list[Outcome], rewrites: Rewrites) -> Rewrites:
    """Each row on its own, and then all that passed together."""
    rows = [_checked_row(step, before, row) for row in rewrites.applied]
    passed = [row for row in rows if not row.refused]
    if len(passed) > 1:
        whole = _failure(step, before, passed)[1]
        if whole:
            why = f"together with the others, {whole}"
            rows = [_with(row, row.error, row.refused or why) for row in rows]
    return _of_rows(rewrites, rows)


def _checked_row(step: TrainingStep, before: list[Outcome], row: Rewrite) -> Rewrite:
    return _with(row, *_failure(step, before, [row]))


def _with(row: Rewrite, measured: float | None, refused: str) -> Rewrite:
    return Rewrite(
        rule=row.rule,
        where=row.where,
        exact=row.exact,
        before_bytes=row.before_bytes,
        after_bytes=row.after_bytes,
        error=measured,
        refused=refused,
    )


def _failure(
    step: TrainingStep, before: list[Outcome], rows: Collection[Rewrite]
) -> tuple[float | None, str]:
    """The rows' error on the sample, and why they are not to be applied, "" if they are."""
    program = Program(RULES, _places(rows))
    try:
        after = _under(step.model, program, lambda: outcomes(step))
    except (RuntimeError, ValueError, TypeError, IndexError) as problem:
        return None, f"the step fails with it ({type(problem).__name__}: {str(problem).rstrip('.')})"
    measured, allowed = error(before, after), tolerance(step.model, before)
    if not program.happened("fused"):
        return measured, "the step on the sample does not come to it"
    if all(row.exact for row in rows) and not is_equal(before, after):
        return measured, f"it should be equal to the bit, and differs by {measured:.1e}"
    if measured <= allowed:
        return measured, ""
    why = _beyond_rounding(step, program, before, after)
    told = f"it differs by {measured:.1e}, more than the {allowed:.0e} of rounding; {why}"
    return measured, told if why else ""


def _beyond_rounding(
    step: TrainingStep, program: Program, before: list[Outcome], after: list[Outcome]
) -> str:
    """Why a difference is more than a network that amplifies rounding makes of it; "" where it is not.

    In float64 both must agree, and in its own dtype the rewritten model must be about as near to float64 as
    the model itself is.
    """
    try:
        double = in_double(step)
        exact = outcomes(double)
        again = _under(double.model, program, lambda: outcomes(double))
    except (RuntimeError, ValueError, TypeError) as problem:
        return f"in float64 the step fails ({type(problem).__name__})"
    apart, own, rewritten = error(exact, again), error(exact, before), error(exact, after)
    if not apart <= _DOUBLE:
        return f"in float64 by {apart:.1e}"
    if not rewritten <= _NEARLY * own:
        return f"from float64's result by {rewritten:.1e} where the model itself does by {own:.1e}"
    return ""


def _under(model: torch.nn.Module, program: Program | None, do: Callable[[], T]) -> T:
    """Do it while the model runs the program."""
    if program is None:
        return do()
    install(model, program)
    try:
        return do()
    finally:
        uninstall(model)
