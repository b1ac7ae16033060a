"""A plan as text and as JSON: what is done with every saved tensor; and why a budget cannot be met."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from squeezebox.reports._notebook import frontier_drawing, memory_drawing, notebook
from squeezebox.reports._report import bits_of, listed, offloaded, updates
from squeezebox.reports._saved import Saved
from squeezebox.schema import (
    Action,
    FormatError,
    MemoryParts,
    Moment,
    OffloadRecord,
    OptimizerPlan,
    Option,
    PlannedPeak,
    PlanPoint,
    Region,
    Role,
    Shortage,
    StepCurve,
    WeightsPlan,
    checked,
    checked_flat,
    human_bytes,
    plain_fields,
    plain_flat,
)

_EVENTS = {
    "save": "while '{}' is packed",
    "saved": "after '{}' was packed",
    "freed": "after '{}' was packed and let go",
    "use": "while '{}' is unpacked",
    "used": "in the operator that reads '{}'",
    "release": "after '{}' was read",
    "lend": "while a frozen weight is read",
    "lent": "in the operator that reads a frozen weight",
    "given back": "after a frozen weight was read",
    "gradient": "where a parameter is updated",
    "updated": "after a parameter was updated",
}


def explain(shortage: Shortage, plain_peak_bytes: int | None = None) -> str:
    """What is missing, what the peak is made of, and what would fit; the plain step's peak if it is known."""
    plain = "" if plain_peak_bytes is None else f"a plain step takes {human_bytes(plain_peak_bytes)}, and "
    fits = plain_peak_bytes is not None and plain_peak_bytes <= shortage.budget_bytes
    ways = [
        *(["a plan without states=True, such as the plain step"] if fits else []),
        *_ways(shortage),
        f"a budget of {shortage.parts.total_bytes} bytes",
    ]
    return (
        f"Budget {human_bytes(shortage.budget_bytes)} is too small: {plain}the smallest plan found at noise "
        f"{shortage.noise:g} takes {human_bytes(shortage.parts.total_bytes)}, {where(shortage.moment)} "
        f"({_listed(shortage.parts)}). What would fit: {'; '.join(ways)}."
    )


def explain_floor(budget_bytes: int, parts: MemoryParts) -> str:
    """That a budget is below what a step holds whatever is done with saved tensors."""
    return (
        f"Budget {human_bytes(budget_bytes)} is too small: {_listed(parts)} take {parts.total_bytes} bytes, "
        "whatever is done with saved tensors. Put gradients and optimizer state under it too, with "
        "states=True, raise it well above that, or make the model smaller."
    )


def exact_bytes(nbytes: int) -> str:
    """``1.50 GiB (1610612736 bytes)``; below 1 KiB only the bytes."""
    return f"{human_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def where(moment: Moment) -> str:
    """``in backward, in the operator that reads 'head:Addmm.mat1'``."""
    if moment.phase == "optimizer":
        return "in the optimizer's step"
    event = _EVENTS.get(moment.event, "at its start").format(moment.key)
    return f"in {'the loss' if moment.phase == 'loss' else moment.phase}, {event}"


def named(parts: MemoryParts) -> dict[str, int]:
    """Bytes of the parts that there are, by what they are called."""
    names = {
        "parameters and buffers": parts.parameter_bytes,
        "the sample": parts.input_bytes,
        "gradients": parts.gradient_bytes,
        "optimizer state": parts.state_bytes,
        "saved tensors": parts.saved_bytes,
        "temporaries": parts.temporary_bytes,
    }
    return {name: nbytes for name, nbytes in names.items() if nbytes}


def _listed(parts: MemoryParts) -> str:
    return listed([f"{name} {human_bytes(nbytes)}" for name, nbytes in named(parts).items()])


def _ways(shortage: Shortage) -> Iterator[str]:
    """The changes that would fit, the cheapest first."""
    if shortage.peak_bytes_but_loss is not None:
        yield (
            "compute the loss in slices (outside of the loss the peak is "
            f"{human_bytes(shortage.peak_bytes_but_loss)})"
        )
    if shortage.more_noise is not None and shortage.noise > 0.0:
        yield f"allow noise {shortage.more_noise:g}"
    if shortage.stateless_peak_bytes is not None and shortage.parts.state_bytes > 0:
        yield (
            "an optimizer without state, such as SGD without momentum (peak "
            f"{human_bytes(shortage.stateless_peak_bytes)})"
        )
    if shortage.smaller_batch is not None:
        yield f"a batch of about {shortage.smaller_batch}"


PLAN_VERSION = 2
_LATER: dict[str, Any] = {
    "peak": None,
    "arena": False,
    "offload": None,
    "optimizer": None,
    "weights": None,
    "assumed_load": "",
    "worst_peak_bytes": None,
    "curve": None,
    "frontier": [],
    "clock_seconds": 0.0,
    "output_bytes": 0,
    "accumulate": 1,
    "without": [],
    "time_limit": None,
}  # what files of earlier releases lack


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """One saved tensor as the plan's profile saw it, and the option chosen for it."""

    key: str
    saved_bytes: int
    option: Option

    def to_dict(self) -> dict[str, Any]:
        """Key, size and the option's fields, side by side."""
        return plain_flat(self, "option")

    @classmethod
    def from_dict(cls, values: Any, where: str) -> PlannedTensor:
        """The tensor of such values; FormatError names the field that is wrong, which lies at ``where``."""
        return cls(**checked_flat(cls, "option", values, where))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan(Saved):
    """How every saved tensor of a training step is held. ``str()`` explains it; sizes are bytes.

    ``budget_bytes`` is None where the plan takes as little memory as the noise allows.
    ``plain_peak_bytes`` and ``plain_seconds`` are those of a step without Squeezebox. ``clock_seconds`` is
    what such steps differed by: here, plans that differ by less are equally fast. ``output_bytes`` is what
    the model returns, which the peak counts as let go before backward. ``accumulate`` backward passes add
    up to an update. ``without`` names the actions that it was not to take, and ``time_limit`` is the one
    that it was made for.
    ``predicted_noise`` is what a step on the plan's sample had, or by the law (:func:`squeezebox.max_batch`).
    ``late_values`` names tensors of which a later operator reads more than the first one, and its role.
    ``region`` are the first layers, if they are worked in slices of the batch. ``peak`` says where the
    predicted peak lies and what is live then; its parts add up to it (None in files of earlier releases).
    With ``arena``, packed tensors are counted with their places. ``offload`` says where tensors are moved to,
    and what memory that takes on top of the peak. ``optimizer`` says what becomes of gradients and of the
    optimizer's state, and ``weights`` what becomes of frozen parameters, where the plan was made with
    ``states=True`` and there are such.
    ``assumed_load`` is the load of experts that was asked for, "" where routers chose by themselves.
    ``worst_peak_bytes``, where that is "worst", is what a step under the plan took with all tokens at the
    same experts.
    ``curve`` are the bytes over the step, plain and under the plan. ``frontier``, where it was asked for, is
    what the fastest plans of other budgets take, lowest peak first.
    """

    KIND, AGAIN = "plan", "'squeezebox plan' or squeezebox.plan(...).save(path)"

    model: str
    budget_bytes: int | None
    noise: float
    plain_peak_bytes: int
    plain_seconds: float
    predicted_peak_bytes: int
    predicted_seconds: float
    predicted_noise: float
    late_values: dict[str, str]
    tensors: tuple[PlannedTensor, ...]
    region: Region | None = None
    peak: PlannedPeak | None = None
    arena: bool = False
    offload: OffloadRecord | None = None
    optimizer: OptimizerPlan | None = None
    weights: WeightsPlan | None = None
    assumed_load: str = ""
    worst_peak_bytes: int | None = None
    curve: StepCurve | None = None
    frontier: tuple[PlanPoint, ...] = ()
    clock_seconds: float = 0.0
    output_bytes: int = 0
    accumulate: int = 1
    without: tuple[str, ...] = ()
    time_limit: float | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        plain = PlanPoint(peak_bytes=self.plain_peak_bytes, seconds=self.plain_seconds)
        chosen = PlanPoint(peak_bytes=self.predicted_peak_bytes, seconds=self.predicted_seconds)
        return notebook(
            str(self),
            memory_drawing(self.curve, self.budget_bytes) if self.curve else "",
            frontier_drawing(self.frontier, chosen, plain) if self.frontier else "",
        )

    def __getitem__(self, key: str) -> Option:
        """How the tensor of that key is held."""
        return self.options[key]

    @property
    def options(self) -> dict[str, Option]:
        """How each tensor is held, by its key."""
        return {tensor.key: tensor.option for tensor in self.tensors}

    def keys(self, *actions: Action) -> frozenset[str]:
        """Of the tensors that are held in one of these ways."""
        return frozenset(tensor.key for tensor in self.tensors if tensor.option.action in actions)

    @property
    def lasting_bytes(self) -> int:
        """Bytes of the memory that goes from one step to the next."""
        return sum(tensor.option.held_bytes for tensor in self.tensors if tensor.option.lasting)

    @property
    def bounds(self) -> dict[str, float]:
        """Error bounds of the tensors that are packed by value; 0 where nothing is lost."""
        return {
            tensor.key: tensor.option.bound
            for tensor in self.tensors
            if tensor.option.bound > 0.0 or tensor.option.codec == "lossless"
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written by :meth:`save`."""
        return {"version": PLAN_VERSION, **plain_fields(self)}

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> StepPlan:
        """The plan of such values; FormatError names the field that is wrong, which lies at ``where``."""
        if not isinstance(values, dict) or "version" not in values:
            raise FormatError("it has no version, as every plan has")
        if values["version"] != PLAN_VERSION:
            raise FormatError(f"version is {values['version']!r}, and this Squeezebox reads {PLAN_VERSION}")
        plan = cls(**checked(cls, {**_LATER, **values}, where, besides=["version"]))
        _check_keys([tensor.key for tensor in plan.tensors])
        _check_late_values(plan.late_values)
        return plan

    def diff(self, other: StepPlan) -> str:
        """What ``other`` does differently: a line for every tensor held in another way, then totals.

        Tensors are in this plan's order, then those that only ``other`` has.
        """
        mine = {tensor.key: tensor.option for tensor in self.tensors}
        theirs = {tensor.key: tensor.option for tensor in other.tensors}
        peaks = [human_bytes(plan.predicted_peak_bytes) for plan in (self, other)]
        keys = [key for key in {**mine, **theirs} if _held(mine.get(key)) != _held(theirs.get(key))]
        width = max((len(key) for key in keys), default=0)
        return "\n".join(
            [
                *(f"{key:<{width}}  {_held(mine.get(key))} -> {_held(theirs.get(key))}" for key in keys),
                f"{len(keys)} of {len(mine | theirs)} tensors differ",
                f"peak   {' -> '.join(peaks)}",
                f"time   {self.predicted_seconds:.3f} s -> {other.predicted_seconds:.3f} s",
                f"noise  {self.predicted_noise:.1e} -> {other.predicted_noise:.1e}",
            ]
        )

    def __str__(self) -> str:
        limit = "as little as possible" if self.budget_bytes is None else human_bytes(self.budget_bytes)
        rows = [
            f"plan for {self.model}: budget {limit}, noise {self.noise:g}",
            f"peak   {human_bytes(self.predicted_peak_bytes):>10}  plain "
            f"{human_bytes(self.plain_peak_bytes)}",
            *(_parts(self.peak) if self.peak is not None else ()),
            *(
                [output_held(self.output_bytes)]
                if _WORTH * self.output_bytes > self.predicted_peak_bytes
                else []
            ),
            f"time   {self.predicted_seconds:>8.3f} s  plain {self.plain_seconds:.3f} s{_clock(self)}",
            f"noise  {self.predicted_noise:>10.1e}",
            *(updates(self.optimizer) if self.optimizer is not None else ()),
            *(_weights(self.weights) if self.weights is not None else ()),
            *([offloaded(self.offload, list(_files(self)))] if self.offload else []),
            *([_load(self)] if self.assumed_load else []),
            *([f"{self.region} in {self.region.slices} slices of the batch"] if self.region else []),
            "",
        ]
        width = max((len(tensor.key) for tensor in self.tensors), default=0)
        return "\n".join([*rows, *(_line(tensor, width) for tensor in self.tensors)])


_WORTH = 100  # an output is named from a hundredth of the peak


def output_held(output_bytes: int) -> str:
    """What a loop that holds the model's output adds, and how not to."""
    return (
        f"a loop that holds the model's output through backward takes up to {human_bytes(output_bytes)} "
        "more: write loss_fn(model(x), y).backward(), or del the output before backward()"
    )


def _clock(plan: StepPlan) -> str:
    """What a line of seconds ends with where they do not tell the plan from plain PyTorch."""
    if abs(plan.predicted_seconds - plan.plain_seconds) >= plan.clock_seconds:
        return ""
    return f", which differ by less than plain steps did here ({plan.clock_seconds:.3f} s)"


def _files(plan: StepPlan) -> Iterator[str]:
    """What each file has that a session under the plan opens."""
    if any(each.action is Action.OFFLOAD and each.codec != "host" for each in plan.options.values()):
        yield "saved tensors"
    if plan.optimizer is not None and plan.optimizer.moved_bytes:
        yield "optimizer state" if plan.optimizer.in_backward else "gradients with optimizer state"
    if plan.weights is not None and plan.weights.moved_bytes:
        yield "frozen weights"


def _load(plan: StepPlan) -> str:
    worst = plan.worst_peak_bytes
    return "measured at a balanced load of experts" + (
        "" if worst is None else f"; with all tokens at the same ones the peak is {human_bytes(worst)}"
    )


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """The plan that :meth:`StepPlan.save` wrote.

    Raises:
        FormatError: the file is missing, damaged, or of another version; names the field that is wrong.
    """
    return StepPlan.load(path)


def _check_keys(keys: list[str]) -> None:
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise FormatError(f"tensors[{number}].key is '{key}', as that of tensors[{keys.index(key)}]")


def _check_late_values(values: dict[str, str]) -> None:
    for key, role in values.items():
        if role not in [each.value for each in Role]:
            raise FormatError(f"late_values['{key}'] is {role!r}, which is no role of a saved tensor")


def _parts(peak: PlannedPeak) -> Iterator[str]:
    yield f"  {where(Moment(phase=peak.phase, event=peak.event, key=peak.key))}, with"
    parts = named(peak.parts)
    width = max(map(len, parts))
    yield from (f"  {name:<{width}}  {human_bytes(nbytes):>10}" for name, nbytes in parts.items())


def _weights(plan: WeightsPlan) -> Iterator[str]:
    """What becomes of frozen parameters."""
    if plan.packed:
        yield (
            f"{len(plan.packed)} frozen weights in {bits_of(plan.packed)} bits: "
            f"{human_bytes(plan.packed_bytes)}, weight noise {plan.weight_noise:.1e}"
        )
    if plan.moved:
        total = human_bytes(plan.weight_bytes)
        yield f"{human_bytes(plan.moved_bytes)} of {total} of frozen weights in a file"
    if plan.seconds:
        yield f"reading and unpacking frozen weights takes {1e3 * plan.seconds:.1f} ms a step"


def _held(option: Option | None) -> str:
    """An option in a few words."""
    if option is None:
        return "not there"
    how = option.codec if option.action is Action.KEEP else f"{option.action.value} {option.codec}".rstrip()
    sources = f" from {', '.join(option.sources)}" if option.sources else ""
    bound = f" {option.bound:.1e}" if option.bound else ""
    return f"{how}{sources}{bound} {human_bytes(option.held_bytes)}"


def _line(tensor: PlannedTensor, width: int) -> str:
    option = tensor.option
    smaller = f"{tensor.saved_bytes / option.held_bytes:.1f}x" if option.held_bytes else ""
    detail = f"{option.codec} {option.bound:.1e}" if option.bound else option.codec
    if option.sources:
        detail = f"from {', '.join(option.sources)}" + (", and its signs" if option.codec else "")
    return (
        f"{tensor.key:<{width}}  {human_bytes(tensor.saved_bytes):>10}  {option.action.value:<10} "
        f"{human_bytes(option.held_bytes):>10}  {smaller:>6}  {1e3 * option.seconds:>6.1f} ms  {detail}"
    )
