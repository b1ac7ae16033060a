"""Bits for every saved value of a compiled graph, and codes as tensor functions that a compiler can fuse.

A row of elements shares one step. One code means exactly zero; the others are the middles of equal steps on
either side of it, as many below and above zero as the row needs. So zeros stay zero, signs stay, and
``|x - unpack(pack(x))| <= step / 2`` for every element, up to the rounding of the tensor's own dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

import squeezebox.codecs  # noqa: F401  (registers the operators used below)
from squeezebox.capture._layouts import Scale
from squeezebox.capture._onlooker import Onlooker
from squeezebox.capture._rules import Rule
from squeezebox.schema import PlanError, Role

BITS = (8, 4, 2)
_LEAST_ROW = 128  # elements that share a step, so that the steps weigh little


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one tensor is packed: ``order`` lists its dims from the outermost in memory to the innermost.

    In that order ``rows`` are the dims of which all elements share a step, and ``split`` is the dim whose
    equal parts lie in the same bytes.
    """

    bits: int
    order: tuple[int, ...]
    rows: tuple[int, ...]
    split: int = 0


def layout_of(shape: Sequence[int], order: Sequence[int], bits: int, *, channel: int | None = None) -> Layout:
    """The layout of a tensor; ``channel`` is the dim of an image's channels, None where there is none.

    Images get a step a channel and sample, or a channel where samples are small; others a step for each run
    of trailing dims. The bits become 8 where no dim divides into 8 / bits parts.
    """
    sizes = [shape[dim] for dim in order]
    parts = [place for place, size in enumerate(sizes) if size % (8 // bits) == 0]
    if not parts:
        bits, parts = 8, [0]
    return Layout(bits=bits, order=tuple(order), rows=_rows(shape, order, channel), split=parts[0])


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Dims from the outermost in memory to the innermost."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def _rows(shape: Sequence[int], order: Sequence[int], channel: int | None) -> tuple[int, ...]:
    if channel is not None:
        within = [dim for dim in range(len(shape)) if dim not in (0, channel)]
        wide = within if math.prod(shape[dim] for dim in within) >= _LEAST_ROW else [0, *within]
        return tuple(sorted(order.index(dim) for dim in wide))
    numel, first = 1, len(order)
    while first > 0 and numel < _LEAST_ROW:
        first -= 1
        numel *= shape[order[first]]
    return tuple(range(first, len(order)))


def pack(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8, 8 / bits in a byte), step (float32) and number of codes below zero (uint8) of each row.

    A row with a NaN or an infinity has no finite step, and nothing finite comes back of it.
    """
    values = x.permute(layout.order).to(torch.float32)
    step, below = _steps(values, layout)
    above = float((1 << layout.bits) - 1) - below
    magnitude = (values.abs() / step).ceil().clamp(min=1.0)
    signed = torch.minimum(torch.maximum(values.sign() * magnitude, -below), above)
    codes = torch.where(values == 0.0, below, signed + below)
    return pack_lanes(codes, layout.bits, layout.split), step, below.to(torch.uint8)


def _steps(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Of each row: the step, and how many codes lie below zero.

    ``step <= (high - low) / (2**bits - 2)``: rounding one side's share of that many codes up leaves the other
    side enough of the one that is left over.
    """
    levels = float((1 << layout.bits) - 1)
    low = values.amin(layout.rows, keepdim=True).clamp(max=0.0)
    high = values.amax(layout.rows, keepdim=True).clamp(min=0.0)
    share = -low / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    below = (share.clamp(max=1.0) * (levels - 1.0)).ceil()  # a device's quotients are not quite right
    below = torch.where(low < 0.0, below.clamp(min=1.0), below)
    above = levels - below
    return torch.maximum(-low / below.clamp(min=1.0), high / above), below


def half_steps(x: Tensor, bits: int, *, channel: int | None = None) -> Tensor:
    """The bound of every element at ``bits`` bits, broadcastable to ``x``."""
    layout = layout_of(tuple(x.shape), memory_order(x.stride()), bits, channel=channel)
    step, _ = _steps(x.detach().permute(layout.order).to(torch.float32), layout)
    return 0.5 * step.permute(_inverse(layout.order))


def unpack(codes: Tensor, step: Tensor, below: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`pack`, within half a step."""
    lanes = unpack_lanes(codes, layout.bits, layout.split)
    signed = lanes.to(torch.float32) - below.to(torch.float32)
    values = (signed - 0.5 * signed.sign()) * step
    return values.to(dtype).permute(_inverse(layout.order))


def pack_lanes(codes: Tensor, bits: int, split: int) -> Tensor:
    """Several codes a byte: the equal parts of dim ``split``, the first in the lowest bits.

    ``codes`` are whole floats: sums of them are what compilers vectorise best.
    """
    if bits == 8:
        return codes.to(torch.uint8)
    parts = codes.unflatten(split, (8 // bits, -1))
    packed: Tensor = parts.select(split, 0)
    for lane in range(1, 8 // bits):
        packed = packed + parts.select(split, lane) * float(1 << (lane * bits))
    return packed.to(torch.uint8)


def unpack_lanes(packed: Tensor, bits: int, split: int) -> Tensor:
    """The inverse of :func:`pack_lanes`, as integers."""
    if bits == 8:
        return packed
    shape = [1] * (packed.dim() + 1)
    shape[split] = 8 // bits
    shifts = (torch.arange(8 // bits, device=packed.device, dtype=torch.int32) * bits).view(shape)
    lanes = (packed.unsqueeze(split).to(torch.int32) >> shifts) & ((1 << bits) - 1)
    return lanes.flatten(split, split + 1)


def pack_indices(indices: Tensor, layout: Layout) -> Tensor:
    """Whole numbers below 2^bits, several a byte."""
    return pack_lanes(indices.permute(layout.order).to(torch.float32), layout.bits, layout.split)


def unpack_indices(packed: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`pack_indices`."""
    return unpack_lanes(packed, layout.bits, layout.split).to(dtype).permute(_inverse(layout.order))


def pack_flags(flags: Tensor, layout: Layout) -> Tensor:
    """Eight booleans a byte; where no dim divides by 8 (``layout.bits`` is 8), flat in groups of 256.

    By way of floats: in what Inductor generates, bytes to and from booleans take many times longer.
    """
    ones = flags.permute(layout.order).to(torch.float32)
    if layout.bits == 1:
        return pack_lanes(ones, 1, layout.split)
    packed: Tensor = torch.ops.squeezebox.pack_codes(ones.to(torch.uint8).reshape(-1), 1)
    return packed


def unpack_flags(packed: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """The inverse of :func:`pack_flags`."""
    if layout.bits == 1:
        ones = unpack_lanes(packed, 1, layout.split)
    else:
        sizes = [shape[dim] for dim in layout.order]
        ones = torch.ops.squeezebox.unpack_codes(packed, 1, math.prod(sizes)).view(sizes)
    return (ones.to(torch.float32) > 0.5).permute(_inverse(layout.order))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda place: order[place]))


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
