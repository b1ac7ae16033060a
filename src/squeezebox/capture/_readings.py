"""What a node that an operator made says of the tensors it saved: their roles, and what codecs must know."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from squeezebox import codecs
from squeezebox.capture._entries import Handle
from squeezebox.capture._graph import per_dim
from squeezebox.capture._rules import OTHER, Rule, rule_for
from squeezebox.schema import Role


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One tensor that a node saved as one of its attributes, and what its backward reads of it."""

    attribute: str
    handle: Handle
    rule: Rule


def readings_of(
    node: Any, operator: str, function: str, readers: Collection[tuple[str, Handle]]
) -> list[Reading]:
    """What the backward of the node reads of each handle; ``function`` is torch's that was called."""
    handles = dict(readers)
    found = []
    for attribute, handle in readers:
        rule = _rule(operator, attribute, function, handle)
        found.append(Reading(attribute, handle, OTHER if _is_lone(rule, node, handles) else rule))
    return found


def _rule(operator: str, attribute: str, function: str, handle: Handle) -> Rule:
    if handle.tensor is None:
        return OTHER
    return rule_for(operator, attribute, function, kind=codecs.kind_of(handle.tensor.dtype))


_INVERSE = {Role.BATCH_NORM_INPUT: "inverse_by_channel", Role.NORM_INPUT: "inverse_by_row"}


def options_of(reading: Reading, node: Any, handles: Mapping[str, Handle]) -> dict[str, Any]:
    """What a codec, or who chooses its bound, must know of the operator; ``handles`` by attribute."""
    rule = reading.rule
    if rule.codec == "interval":
        return {"lower": float(node._saved_min_val), "upper": float(node._saved_max_val)}
    if rule.role in _INVERSE:
        inverse = _inverse(node, handles)
        return {} if inverse is None else {_INVERSE[rule.role]: inverse}
    if rule.role is Role.ATTENTION:
        query, key = handles["query"].tensor, handles["key"].tensor
        if query is None or key is None:  # a weight that is elsewhere
            return {}
        measures = {"logits": functools.partial(_logits, node, query, key)}
        if reading.attribute in ("query", "key"):
            measures["highest"] = functools.partial(_highest, node, query, key)
        return measures
    if rule.codec != "pool-index":
        return {}
    names = ("kernel_size", "stride", "padding", "dilation")
    options: dict[str, Any] = {name: per_dim(getattr(node, f"_saved_{name}"), 2) for name in names}
    options["stride"] = options["stride"] or options["kernel_size"]
    options["input_shape"] = handles["self"].geometry[0]
    return options


def _inverse(node: Any, handles: Mapping[str, Handle]) -> torch.Tensor | None:
    """One over the deviations that a normalisation saved; None in evaluation."""
    handle = handles.get("result1" if "Rms" in node.name() else "result2")
    inverse = None if handle is None else handle.tensor
    return inverse if inverse is not None and inverse.numel() else None


def _is_lone(rule: Rule, node: Any, handles: Mapping[str, Handle]) -> bool:
    """Whether each row that is normalised has one element: its result is always the same, whatever it is.

    What an error costs there rises with its fourth power, so no bound would settle.
    """
    if rule.role is not Role.NORM_INPUT:
        return False
    inverse = _inverse(node, handles)
    return inverse is not None and inverse.numel() == math.prod(handles["input"].geometry[0])


def _logits(node: Any, query: torch.Tensor | None, key: torch.Tensor | None) -> float:
    """Root mean square that the logits of an attention have where query and key are unrelated."""
    if query is None or key is None:
        return 1.0
    width = math.sqrt(query.shape[-1]) * _root_mean_square(query) * _root_mean_square(key)
    return _scale(node, query) * width


_LOGIT_ERROR = 0.5  # where rows are longest; evenly spread errors then deviate by 0.29


def _highest(node: Any, query: torch.Tensor | None, key: torch.Tensor | None) -> float:
    """The bound at which errors of query and key move no logit far; 0 where the two are not there.

    Backward takes exponentials of logits ``scale * q . k``, so what an error beyond this costs has no limit.
    Deviations of e in the elements of k deviate a logit by ``scale * |q| * e``.
    """
    if query is None or key is None:
        return 0.0
    longest = math.hypot(*(_longest_row(each) for each in (query, key)))
    return _LOGIT_ERROR / (_scale(node, query) * longest) if longest > 0.0 else math.inf


def _longest_row(tensor: torch.Tensor) -> float:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype).max())


def _scale(node: Any, query: torch.Tensor) -> float:
    return float(node._saved_scale if node._saved_scale is not None else query.shape[-1] ** -0.5)


def _root_mean_square(tensor: torch.Tensor) -> float:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=dtype)) / math.sqrt(max(tensor.numel(), 1))
