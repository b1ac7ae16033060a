"""A plan as text and as JSON: what is done with every saved tensor, and what it should come to."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from squeezebox.reports._report import human_bytes, write_whole
from squeezebox.schema import Action, FormatError, Option, Region

PLAN_VERSION = 1
_OPTION = [item.name for item in dataclasses.fields(Option)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """One saved tensor as the plan's profile saw it, and the option chosen for it."""

    key: str
    saved_bytes: int
    option: Option


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """How every saved tensor of a training step is held. ``str()`` explains it; sizes are bytes.

    ``budget_bytes`` is None where the plan takes as little memory as the noise allows.
    ``plain_peak_bytes`` and ``plain_seconds`` are those of a step without Squeezebox.
    ``late_values`` names tensors of which a later operator reads more than the first one, and its role.
    ``region`` are the first layers, if they are worked in slices of the batch.
    """

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

    @property
    def kept(self) -> frozenset[str]:
        """Keys of the tensors that are held themselves."""
        return frozenset(tensor.key for tensor in self.tensors if tensor.option.action is Action.KEEP)

    @property
    def offloaded(self) -> frozenset[str]:
        """Keys of the tensors that are moved to a file."""
        return frozenset(tensor.key for tensor in self.tensors if tensor.option.action is Action.OFFLOAD)

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
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        rows = [
            {"key": tensor.key, "saved_bytes": tensor.saved_bytes, **_plain(tensor.option)}
            for tensor in self.tensors
        ]
        region = dataclasses.asdict(self.region) if self.region is not None else None
        return {"version": PLAN_VERSION, **values, "region": region, "tensors": rows}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan whole or not at all; OutputError if the path cannot be written."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        limit = "as little as possible" if self.budget_bytes is None else human_bytes(self.budget_bytes)
        rows = [
            f"plan for {self.model}: budget {limit}, noise {self.noise:g}",
            f"peak   {human_bytes(self.predicted_peak_bytes):>10}  plain "
            f"{human_bytes(self.plain_peak_bytes)}",
            f"time   {self.predicted_seconds:>8.3f} s  plain {self.plain_seconds:.3f} s",
            f"noise  {self.predicted_noise:>10.1e}",
            *([f"{self.region} in {self.region.slices} slices of the batch"] if self.region else []),
            "",
        ]
        width = max((len(tensor.key) for tensor in self.tensors), default=0)
        return "\n".join([*rows, *(_line(tensor, width) for tensor in self.tensors)])


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """The plan that :meth:`StepPlan.save` wrote.

    Raises:
        FormatError: the file is missing, damaged, or of a newer version.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return _from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"'{path}' is no plan that this Squeezebox can read: {type(error).__name__}: {error}. Make it "
            "anew with squeezebox.plan(...).save(path)."
        ) from error


def _from_dict(values: Mapping[str, Any]) -> StepPlan:
    if values["version"] != PLAN_VERSION:
        raise FormatError(
            f"the plan has version {values['version']}; this Squeezebox reads version {PLAN_VERSION}. "
            "Upgrade squeezebox, or make the plan anew."
        )
    names = [item.name for item in dataclasses.fields(StepPlan) if item.name not in ("tensors", "region")]
    tensors = tuple(
        PlannedTensor(key=str(row["key"]), saved_bytes=int(row["saved_bytes"]), option=_option(row))
        for row in values["tensors"]
    )
    return StepPlan(
        **{name: values[name] for name in names}, tensors=tensors, region=_region(values["region"])
    )


def _region(values: Mapping[str, Any] | None) -> Region | None:
    if values is None:
        return None
    names = ("functions", "modules", "keys")
    lists = {name: tuple(str(item) for item in values[name]) for name in names}
    return Region(**lists, slices=int(values["slices"]), output_bytes=int(values["output_bytes"]))


def _option(row: Mapping[str, Any]) -> Option:
    return Option(**{**{name: row[name] for name in _OPTION}, "action": Action(row["action"])})


def _plain(option: Option) -> dict[str, Any]:
    return {**{name: getattr(option, name) for name in _OPTION}, "action": option.action.value}


def _line(tensor: PlannedTensor, width: int) -> str:
    option = tensor.option
    ratio = tensor.saved_bytes / max(option.held_bytes, 1)
    detail = f"{option.codec} {option.bound:.1e}" if option.bound else option.codec
    return (
        f"{tensor.key:<{width}}  {human_bytes(tensor.saved_bytes):>10}  {option.action.value:<10} "
        f"{human_bytes(option.held_bytes):>10}  {ratio:>5.1f}x  {1e3 * option.seconds:>6.1f} ms  {detail}"
    )
