"""How many bits each saved value of a compiled graph gets, by the keys that a plan uses."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from squeezebox.capture._compiled._codes import BITS, half_steps
from squeezebox.capture._layouts import Scale
from squeezebox.capture._onlooker import Onlooker
from squeezebox.capture._rules import Rule
from squeezebox.schema import PlanError, Role

_RESULTS = frozenset({"result", "result0", "output", "out"})  # what an operator saves of its own result
_SAME_OPERATOR = {
    "threshold": ("relu",),
    "mm": ("addmm", "mm", "linear"),
    "addmm": ("addmm", "linear"),
    "nativebatchnormlegitfunctional": ("nativebatchnorm", "cudnnbatchnorm", "miopenbatchnorm"),
    "nativebatchnorm": ("nativebatchnorm", "cudnnbatchnorm", "miopenbatchnorm"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BitRule:
    """Bits by key ("module.path:Operator.attribute"); None keeps a tensor. ``default`` is for all others."""

    default: int | None
    by_key: Mapping[str, int | None] = field(default_factory=dict)


class Matcher:
    """Finds the rule of a saved tensor of a compiled graph.

    A tensor takes the rules of the operators that read it, given by module path and name, itself or through
    what backward computes from it; of several, the most bits. So one that only exists in the fused graph
    takes its consumers' rules.
    """

    def __init__(self, rule: BitRule) -> None:
        self._default = rule.default
        self._by_reader: dict[tuple[str, str], list[int | None]] = {}
        self._by_maker: dict[tuple[str, str], list[int | None]] = {}
        for key, bits in rule.by_key.items():
            path, _, reader = key.rpartition(":")
            operator, _, attribute = reader.partition("#")[0].partition(".")
            place = path, operator.lower()
            self._by_reader.setdefault(place, []).append(bits)
            if attribute in _RESULTS:
                self._by_maker.setdefault(place, []).append(bits)
        self._matched = False

    def __call__(self, node: fx.Node, taken: fx.Node, gradients: Container[fx.Node]) -> int | None:
        """Bits for forward's ``node``, which backward takes as ``taken``; ``gradients`` hang on gradients."""
        if not self._by_reader:
            return self._default
        found = list(_rules(self._by_maker, node))
        for reader in _readers(taken, gradients):
            found.extend(_rules(self._by_reader, reader))
        self._matched = self._matched or bool(found)
        packed = [bits for bits in found if bits is not None]
        return max(packed) if packed else None if found else self._default

    def check(self) -> None:
        """Raises PlanError if there are rules and no tensor has one."""
        if self._by_reader and not self._matched:
            path, operator = next(iter(self._by_reader))
            raise PlanError(
                f"none of the plan's {len(self._by_reader)} places (such as '{path}:{operator}') reads a "
                "tensor that the compiled graph saves: it was made for another model. Make one for this "
                "model with squeezebox.plan(), or give bits= instead."
            )


def _readers(taken: fx.Node, gradients: Container[fx.Node]) -> Iterator[fx.Node]:
    """All that is computed from a saved tensor, up to the first nodes that hang on gradients."""
    waiting, seen = [taken], {taken}
    while waiting:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if user not in gradients:
                    waiting.append(user)


def _rules(table: Mapping[tuple[str, str], list[int | None]], node: fx.Node) -> Iterator[int | None]:
    path, name = module_path(node), operator_name(node)
    for same in _SAME_OPERATOR.get(name, (name,)):
        yield from table.get((path, same), ())


def operator_name(node: fx.Node) -> str:
    """The autograd operator in lower case and without underscores, such as ``nativelayernorm``."""
    target = node.meta.get("original_aten", node.target)
    name = str(getattr(target, "_opname", getattr(target, "__name__", target)))
    return name.removesuffix("_backward").removesuffix("_backward_data").replace("_", "")


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose forward the node belongs to; '' for the model itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return dotted(next(reversed(stack.values()))[0]) if stack else ""


def dotted(written: str) -> str:
    """``L['self'].blocks._modules['0'].norm``, as a tracer writes it, as ``blocks.0.norm``."""
    words = re.findall(r"\w+", re.sub(r"\b(?:getattr|_modules)\b", "", written))
    return ".".join(words[2:] if words[:1] == ["L"] else words[1:])


class HalfSteps:
    """Looks on for the root-mean-square bound of every saved tensor at every number of bits.

    In the unit that the error law uses for the tensor: absolute, or a channel's or row's standard deviation.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, dict[int, float]] = {}
        self.saved_bytes: dict[str, int] = {}
        self.numel: dict[str, int] = {}
        self._geometry: dict[str, tuple[Any, Any]] = {}

    @property
    def onlooker(self) -> Onlooker:
        """What a store shows an eager step to."""
        return Onlooker(saving=self._saving, offered=self._offered)

    def _saving(self, row: Any, tensor: Any, derive: object) -> None:
        if tensor.is_floating_point() and tensor.numel() and row.key not in self.by_key:
            self.saved_bytes[row.key] = row.saved_bytes
            self.numel[row.key] = row.saved_bytes // tensor.element_size()
            self._geometry[row.key] = (tensor.size(), tensor.stride())
            self._measure(row, tensor, None)

    def _offered(
        self, row: Any, codec: str, flat: Any, scale: Scale | None, highest: float, *_: object
    ) -> None:
        if scale is not None:
            self._measure(row, flat.as_strided(*self._geometry[row.key]), scale)
        known = self.by_key[row.key].items()
        self.by_key[row.key] = {bits: rms for bits, rms in known if math.sqrt(3.0) * rms <= highest}

    def _measure(self, row: Any, tensor: Any, scale: Scale | None) -> None:
        self.by_key[row.key] = {bits: _rms_half_step(tensor, row.rule, scale, bits) for bits in BITS}


def _rms_half_step(tensor: Any, rule: Rule, scale: Scale | None, bits: int) -> float:
    channel = 1 if tensor.dim() > 2 and rule.role in _IMAGES else None
    found = half_steps(tensor, bits, channel=channel)
    if scale is not None:
        found = torch.empty_like(tensor).copy_(found)
        scale.divide(found)
    return float(found.square().mean().sqrt())


_IMAGES = frozenset({Role.CONV_INPUT, Role.BATCH_NORM_INPUT, Role.RELU_OUTPUT, Role.POOL_INPUT})
