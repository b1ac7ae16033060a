"""How far each operator of a step can reach, proven from the ranges of what it is given."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from squeezebox.doctor._intervals import Arguments, Interval, widened
from squeezebox.doctor._rules import CONSTANTS, EMPTY, RULES, rounded_terms, running_moments, terms_of
from squeezebox.doctor._step import arguments
from squeezebox.profiling import Modules
from squeezebox.reports import RangeCheck
from squeezebox.schema import CheckedRanges, OptionError, Overflow

_HALF = {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
_INT8, _INT32 = 127, 2**31 - 1
_FARTHEST = torch.finfo(torch.float64).max  # files have no infinity
aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Reached:
    """One operator's results: what is proven and what was seen of each tensor, None where no rule knows.

    ``terms`` are the products that one element adds up.
    """

    operator: str
    module: str
    proven: tuple[Interval | None, ...]
    seen: tuple[Interval, ...]
    is_proven: bool
    dtype: torch.dtype
    terms: int


class Ranges(TorchDispatchMode):
    """Goes along with a step; ``reached`` has its operators in order.

    Each element of a parameter may be up to ``margin`` times as large as it is. Those of inputs, and of what
    an operator without a rule makes, may lie anywhere in the range of all, ``margin`` times as far.
    """

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reached: list[Reached] = []
        self._margin, self._modules = margin, Modules()
        self._known: Any = WeakIdKeyDictionary()  # intervals by storage
        self._weights: Any = WeakIdKeyDictionary()  # storages of parameters that no operator has changed

    def __enter__(self) -> Ranges:
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*error)

    def of(self, value: Any) -> Interval:
        """The interval of a tensor's storage or of a number."""
        if not isinstance(value, Tensor):
            number = float(value)
            return Interval(number, number)
        storage = value.untyped_storage()
        if storage not in self._known:
            self._known[storage] = self._seen(value)
            if isinstance(value, torch.nn.Parameter):
                self._weights[storage] = True
        found: Interval = self._known[storage]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, inputs = func.overloadpacket, tree_leaves((args, kwargs))
        has_rule = func is not aten.view.dtype and not any(map(_is_complex, inputs))
        rule = RULES.get(_functional(packet)) if has_rule else None
        before = {id(each): self.of(each) for each in inputs if isinstance(each, Tensor)}
        told = Arguments(args, kwargs, lambda v: before.get(id(v)) or self.of(v), self._sums)
        found: Any = None if rule is None else rule(told)
        out = func(*args, **kwargs)
        leaves = tree_leaves(out)  # where no gradient is wanted there is none
        results = [each for each in leaves if isinstance(each, Tensor)]
        if found is None and packet in CONSTANTS:
            found = tuple(self._seen(each, margin=1.0) for each in results)
        elif packet in EMPTY:
            found = Interval(0.0, 0.0)
        elif type(found) is tuple:
            found = tuple(
                each for each, leaf in itertools.zip_longest(found, leaves) if isinstance(leaf, Tensor)
            )
        written = _written(func, args, kwargs)
        if results or written:
            terms, rounded = terms_of(packet, args), rounded_terms(packet, args)
            self._note(func, results or written, found, terms, rounded)
        for each in written if results and rule is None else ():
            self._join(each, self._seen(each))
        if packet is aten.native_batch_norm and args[5]:
            for each, moment in zip(args[3:5], running_moments(told), strict=True):
                if each is not None:
                    self._join(each, widened(moment, args[0].numel(), each.dtype))
        return out

    def _join(self, tensor: Tensor, interval: Interval) -> None:
        """What was written to some of a storage's elements, in addition to what was there before."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage)
        self._known[storage] = interval if known is None else known.with_(interval)
        self._weights.pop(storage, None)

    def _note(self, func: Any, results: Sequence[Tensor], found: Any, terms: int, rounded: int) -> None:
        listed = found if type(found) is tuple else [found] * len(results)
        proven = [
            None if each is None else widened(Interval(*each), rounded, result.dtype)
            for each, result in zip(listed, results, strict=True)
        ]
        is_view, module = func.is_view, self._modules.current()
        for result, each in zip(results, proven, strict=True):
            if is_view and each is not None and result.untyped_storage() in self._known:
                continue
            self._join(result, self._seen(result) if each is None else each)
        self.reached.append(
            Reached(
                operator=func.overloadpacket.__name__,
                module=module,
                proven=tuple(proven),
                seen=tuple(self._seen(each, margin=1.0) for each in results),
                is_proven=None not in proven,
                dtype=results[0].dtype,
                terms=terms,
            )
        )

    def assume(self, tensor: Tensor, interval: Interval) -> None:
        """The tensor's elements may be any of these."""
        self._known[tensor.untyped_storage()] = interval

    def _seen(self, tensor: Tensor, margin: float | None = None) -> Interval:
        if tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.is_complex():
            return Interval(0.0, 0.0)
        if tensor.dtype == torch.bool:
            return Interval(0.0, 1.0)
        sign = -1.0 if tensor.is_neg() else 1.0  # of a view that negates, which is not read as such here
        grown = _found(tensor.detach()).scaled(sign)
        return grown.with_(grown.scaled(margin or self._margin)) if tensor.is_floating_point() else grown

    def _sums(self, tensor: Tensor, dims: Sequence[int]) -> float:
        if tensor.untyped_storage() not in self._weights:
            return math.inf
        return float(tensor.detach().double().abs().sum([*dims]).max()) * self._margin


def _found(tensor: Tensor) -> Interval:
    """From the least to the largest number in it; 0 where nothing in it is a number."""
    low, high = map(float, torch.aminmax(tensor))
    if not math.isnan(low):
        return Interval(low, high)
    numbers = tensor[~tensor.isnan()]
    return _found(numbers) if numbers.numel() else Interval(0.0, 0.0)


def _functional(packet: Any) -> Any:
    """The operator that an in-place one is like."""
    name = packet.__name__
    if packet in RULES or name.startswith("__") or not name.endswith("_"):
        return packet
    return getattr(aten, name.removesuffix("_"), packet)


def _is_complex(value: Any) -> bool:
    """An interval has no room for it."""
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """Arguments that the operator changes, by its schema."""
    values = [
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.is_write
    ]
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def check_ranges(
    step: Callable[..., object], *, batch: Callable[[], object] | None = None, margin: float = 2.0
) -> RangeCheck:
    """Run a step once, and prove how far each of its operators can reach.

    Inputs may be any numbers within the ranges that are seen, ``margin`` times as far, and each element of a
    parameter up to ``margin`` times as large. From there on intervals go along with the step, forward and
    backward. A product has as many terms as it adds up, or the largest sum of a weight's magnitudes. Named
    is the first operator that can overflow fp16, bf16 or its own type of integers, and the power of two that
    what goes in must be divided by. For products of int8 codes it is int32, by the terms that they add up.

    Args:
        step: takes one training step.
        batch: makes what ``step`` is called with; None: nothing.
        margin: from 1.

    Raises:
        OptionError: the margin is below 1 or not finite.
        Exception: whatever ``step`` or ``batch`` raises.
    """
    if not 1.0 <= margin < math.inf:
        raise OptionError(f"margin {margin:g} is no factor from 1; 2 allows for twice what is seen.")
    given = arguments(batch)
    with Ranges(margin) as ranges:
        step(*given)
    return RangeCheck(checked_ranges(ranges.reached, margin))


def checked_ranges(reached: Sequence[Reached], margin: float) -> CheckedRanges:
    """What of these operators can leave a type."""
    found: dict[str, list[tuple[int, Reached, float, float, int]]] = {}
    for number, each in enumerate(reached):
        for name, reach, most, parts in _limits(each):
            if reach > most:
                shift = math.ceil(math.log2(reach / most) / parts) if math.isfinite(reach) else 0
                found.setdefault(name, []).append((number, each, reach, most, shift))
    return CheckedRanges(
        margin=margin,
        operators=len(reached),
        proven=sum(each.is_proven for each in reached),
        overflows=tuple(
            Overflow(
                type=name,
                operator=each.operator,
                module=each.module,
                number=number,
                reach=min(reach, _FARTHEST),
                most=most,
                shift=shift,
                count=len(listed),
            )
            for name, listed in found.items()
            for number, each, reach, most, shift in listed[:1]
        ),
        unproven=dict(Counter(each.operator for each in reached if not each.is_proven)),
    )


def _limits(each: Reached) -> list[tuple[str, float, float, int]]:
    """(type, reach, the type's most, factors of it that may be shifted) of one operator's results."""
    reach = max((found.reach for found in each.proven if found is not None), default=0.0)
    if not each.dtype.is_floating_point:
        if each.dtype == torch.bool:
            return []
        type_ = torch.iinfo(each.dtype)
        low = min((found.low for found in each.proven if found is not None), default=0.0)
        return [(type_.dtype, reach if low >= type_.min else math.inf, float(type_.max), 1)]
    limits = [(name, reach, most, 1) for name, most in _HALF.items()]
    return [*limits, ("int32", float(each.terms) * _INT8**2, float(_INT32), 2)]
