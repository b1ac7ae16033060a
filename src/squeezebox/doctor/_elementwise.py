"""Rules of operators that go element by element, move elements, or add them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from squeezebox.doctor._intervals import Arguments, Interval, Rule, added, around, hull, times

aten: Any = torch.ops.aten


def _monotone(function: Callable[[float], float]) -> Rule:
    return lambda a: Interval(function(a[0].low), function(a[0].high))


def _dipping(function: Callable[[float], float], at: float) -> Callable[[Arguments], Interval]:
    """Of a function that falls up to ``at`` and rises from there on."""

    def rule(a: Arguments) -> Interval:
        low, high = a[0]
        ends = [function(low), function(high)]
        return hull(*ends, function(at)) if low < at < high else hull(*ends)

    return rule


def _floor(x: float) -> float:
    return float(math.floor(x)) if math.isfinite(x) else x


def _ceil(x: float) -> float:
    return -_floor(-x)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700.0 else math.inf


def _sigmoid(x: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * x))


def _silu(x: float) -> float:
    return x * _sigmoid(x) if math.isfinite(x) else max(x, 0.0)


def _gelu_erf(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2.0)) if math.isfinite(x) else max(x, 0.0)


def _gelu_tanh(x: float) -> float:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * min(max(x, -99.0), 99.0) ** 3)
    return 0.5 * x * (1.0 + math.tanh(inner)) if math.isfinite(x) else max(x, 0.0)


def _gelu(a: Arguments) -> Interval:
    """Of x < 0, kernels round 1 + erf or 1 + tanh, near 0: that is a share of x, not of the result."""
    by_tanh = a.given(1, "approximate", "none") == "tanh"
    found = (_dipping(_gelu_tanh, -0.752461) if by_tanh else _dipping(_gelu_erf, -0.751792))(a)
    lost = 5.0 * torch.finfo(torch.float32).eps * min(max(-a[0].low, 0.0), 9.0)  # below -9, all is 0
    return Interval(found.low - lost, found.high if found.high >= 0.0 else min(found.high + lost, 0.0))


def _add(a: Arguments) -> Interval:
    return added(a[0], a[1].scaled(float(a.given(2, "alpha", 1))))


def _subtract(a: Arguments) -> Interval:
    return added(a[0], a[1].scaled(-float(a.given(2, "alpha", 1))))


def _subtract_from(a: Arguments) -> Interval:
    return added(a[1], a[0].scaled(-float(a.given(2, "alpha", 1))))


def _reciprocal(one: Interval) -> Interval:
    if one.low <= 0.0 <= one.high:
        return Interval(-math.inf if one.low < 0.0 else 0.0, math.inf)
    return hull(1.0 / one.low, 1.0 / one.high)


def _divide(a: Arguments) -> Interval:
    found = times(a[0], _reciprocal(a[1]))
    mode = a.kwargs.get("rounding_mode")
    return found if mode is None else Interval(_floor(found.low), _ceil(found.high))


def _raised(x: float, exponent: float) -> float:
    try:
        return float(x**exponent)
    except OverflowError:
        return math.inf if x > 0.0 or exponent % 2 == 0 else -math.inf


def _power(a: Arguments) -> Interval:
    exponent, (low, high) = a.args[1], a[0]
    if not isinstance(exponent, (int, float)) or (low < 0.0 and exponent != int(exponent)) or exponent < 0:
        return around(math.inf)
    ends = [_raised(low, exponent), _raised(high, exponent)]
    return hull(*ends, 0.0) if low < 0.0 < high else hull(*ends)


def _clamp(a: Arguments) -> Interval:
    low, high = a[0]
    least, most = a.given(1, "min", None), a.given(2, "max", None)
    for bound, choose in ((least, max), (most, min)):
        if bound is not None:
            limit = a.of(bound)
            low, high = choose(low, limit.low), choose(high, limit.high)
    return Interval(low, high)


def _lesser(a: Arguments) -> Interval:
    return Interval(min(a[0].low, a[1].low), min(a[0].high, a[1].high))


def _greater(a: Arguments) -> Interval:
    return Interval(max(a[0].low, a[1].low), max(a[0].high, a[1].high))


def _known_numbers(a: Arguments) -> Interval:
    """What is not a number becomes 0, and infinities what is given or the largest."""
    found = a[0].with_(a.of(a.given(1, "nan", None) or 0.0))
    for place, name in ((2, "posinf"), (3, "neginf")) if math.isinf(a[0].reach) else ():
        value = a.given(place, name, None)
        found = found if value is None else found.with_(a.of(value))
    return found


def _rounded(a: Arguments) -> Interval:
    """To integers, or to a number of decimals: a tie may go either way, as rounding moved it."""
    decimals = a.given(1, "decimals", 0)
    if not decimals:
        return Interval(*(float(round(x)) if math.isfinite(x) else x for x in a[0]))
    half = 0.5 * 10.0**-decimals
    return added(a[0], Interval(-half, half))


def _absolute(a: Arguments) -> Interval:
    low, high = a[0]
    return Interval(0.0 if low <= 0.0 <= high else min(abs(low), abs(high)), a[0].reach)


def _same(a: Arguments) -> Interval:
    return a[0]


def or_zero(a: Arguments) -> Interval:
    """The argument's elements, or zeros in their place."""
    return a[0].with_(Interval(0.0, 0.0))


def _chosen(a: Arguments) -> Interval:
    return a[1].with_(a[2])


def _filled(a: Arguments) -> Interval:
    return a[0].with_(a[2])


def _joined(a: Arguments) -> Interval:
    found = [a.of(each) for each in a.args[0]]
    return Interval(min(each.low for each in found), max(each.high for each in found))


def count(tensor: Tensor, dims: Any) -> int:
    """How many elements one sum along these dims takes, all of them for None."""
    if dims is None or dims == []:
        return max(tensor.numel(), 1)
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return math.prod(tensor.shape[dim] for dim in listed) if tensor.dim() else 1


def _sum(a: Arguments) -> Interval:
    terms = count(a.args[0], a.given(1, "dim", None)) if a.args[0].numel() else 0
    return a[0].scaled(float(terms))


def _and(a: Arguments) -> Interval:
    """Of integers: no more than one that is not negative."""
    least = [each.high for each in (a[0], a[1]) if each.low >= 0.0]
    return Interval(0.0, min(least)) if least else _power_of_two(a)


def _power_of_two(a: Arguments) -> Interval:
    """Of integers: no bit is set that neither has room for."""
    both = a[0].with_(a[1])
    if math.isinf(both.reach):
        return both
    reach = 2.0 ** math.ceil(math.log2(both.reach + 1.0))
    return Interval(-reach if both.low < 0.0 else 0.0, reach - 1.0)


def _shifted_left(a: Arguments) -> Interval:
    return times(a[0], Interval(_raised(2.0, a[1].low), _raised(2.0, a[1].high)))


def _shifted_right(a: Arguments) -> Interval:
    low, high = times(a[0], Interval(_raised(2.0, -a[1].high), _raised(2.0, -a[1].low)))
    return Interval(_floor(low), _floor(high))


def _flag(a: Arguments) -> Interval:
    return Interval(0.0, 1.0)


_SAME = """
    view reshape _unsafe_view t transpose permute expand slice select unsqueeze squeeze clone detach alias
    contiguous _to_copy flip repeat roll index index_select gather embedding diagonal as_strided amax amin
    mean unfold unbind split split_with_sizes chunk _reshape_alias narrow masked_select max_pool2d
    _adaptive_avg_pool2d upsample_nearest2d lift_fresh movedim swapaxes view_as
"""
_FLAGS = """
    eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite any all signbit is_nonzero
"""
ELEMENTWISE: Mapping[Any, Rule] = {
    **{getattr(aten, name): _same for name in _SAME.split() if hasattr(aten, name)},
    **{getattr(aten, name): _flag for name in _FLAGS.split() if hasattr(aten, name)},
    aten.relu: _monotone(lambda x: max(x, 0.0)),
    aten.tanh: _monotone(math.tanh),
    aten.sigmoid: _monotone(_sigmoid),
    aten.exp: _monotone(_exp),
    aten.sqrt: _monotone(lambda x: math.sqrt(max(x, 0.0))),
    aten.floor: _monotone(_floor),
    aten.ceil: _monotone(_ceil),
    aten.round: _rounded,
    aten.sign: _monotone(lambda x: float((x > 0.0) - (x < 0.0))),
    aten.gelu: _gelu,
    aten.silu: _dipping(_silu, -1.2784645),
    aten.abs: _absolute,
    aten.neg: lambda a: a[0].scaled(-1.0),
    aten.reciprocal: lambda a: _reciprocal(a[0]),
    aten.add: _add,
    aten.sub: _subtract,
    aten.rsub: _subtract_from,
    aten.mul: lambda a: times(a[0], a[1]),
    aten.div: _divide,
    aten.pow: _power,
    aten.clamp: _clamp,
    aten.clamp_min: _clamp,
    aten.minimum: _lesser,
    aten.maximum: _greater,
    aten.nan_to_num: _known_numbers,
    aten.where: _chosen,
    aten.masked_fill: _filled,
    aten.copy: lambda a: a[1],
    aten.cat: _joined,
    aten.stack: _joined,
    aten.constant_pad_nd: lambda a: a[0].with_(a.of(a.given(2, "value", 0))),
    aten.sum: _sum,
    aten.bitwise_and: _and,
    aten.__and__: _and,
    aten.bitwise_or: _power_of_two,
    aten.__or__: _power_of_two,
    aten.bitwise_xor: _power_of_two,
    aten.__xor__: _power_of_two,
    aten.bitwise_left_shift: _shifted_left,
    aten.__lshift__: _shifted_left,
    aten.bitwise_right_shift: _shifted_right,
    aten.__rshift__: _shifted_right,
}
