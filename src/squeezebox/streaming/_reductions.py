"""Reductions over the streamed axis: a state for each strip, merged to the whole image's value.

Moments are merged as in Chan, Golub and LeVeque (1979). ``gradient`` is the derivative of the whole image's
value, so that strips' gradients add up to the whole image's; what of it is the same for all strips is
computed once, by ``slope``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from squeezebox.streaming._rows import Call, Rows, is_narrow, widened

State = tuple[Any, ...]
"""Tensors, and counts."""


class Reduction(Protocol):
    """A reduction over the streamed axis, and maybe others."""

    def partial(self, x: Tensor, start: int) -> State:
        """The state of one strip, whose first row is ``start``."""

    def merge(self, first: State, second: State) -> State:
        """The state of both."""

    def finish(self, state: State) -> Any:
        """The value of the whole image, from the state of all strips."""

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """What ``gradient`` needs of the loss's derivatives by the values, of which one at least is known."""

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """The loss's derivative by a strip ``x``, whose first row is ``start``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Sum or mean: ``scale`` is one over the number of elements for a mean.

    Elements are cast to ``cast`` before they are added, if that is given.
    """

    dims: tuple[int, ...]
    keepdim: bool
    scale: float
    dtype: torch.dtype
    cast: torch.dtype | None = None

    def partial(self, x: Tensor, start: int) -> State:
        """The sum, in double precision across strips."""
        x = x if self.cast is None else x.to(self.cast)
        total = x.sum(self.dims, keepdim=self.keepdim, dtype=torch.float32 if is_narrow(x) else None)
        return (total.double() if total.is_floating_point() else total,)

    def merge(self, first: State, second: State) -> State:
        """Added."""
        return (first[0] + second[0],)

    def finish(self, state: State) -> Tensor:
        """The sum or mean."""
        total: Tensor = state[0]
        return (total * self.scale if self.scale != 1.0 else total).to(self.dtype)

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """The same for every element, whatever the state."""
        (seed,) = seeds
        assert seed is not None
        return (_kept(seed * self.scale, self.dims, self.keepdim),)

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """The slope."""
        gradient: Tensor = slope[0].to(x.dtype).expand_as(x)
        return gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Variance and mean."""

    dims: tuple[int, ...]
    keepdim: bool
    correction: float
    dtype: torch.dtype

    def partial(self, x: Tensor, start: int) -> State:
        """Count, mean, and sum of squared deviations."""
        variance, mean = torch.var_mean(widened(x), self.dims, correction=0, keepdim=True)
        count = x.numel() // variance.numel()
        return count, mean.double(), variance.double() * count

    def merge(self, first: State, second: State) -> State:
        """Equation 2.1 of Chan, Golub and LeVeque."""
        (n, mean, squares), (m, other, others) = first, second
        total, apart = n + m, other - mean
        squares = squares + others + apart.square() * (n * m / total)
        return total, mean + apart * (m / total), squares

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        """Variance and mean, in this order."""
        count, mean, squares = state
        both = squares / max(count - self.correction, 0.0), mean
        variance, mean = (each if self.keepdim else _squeezed(each, self.dims) for each in both)
        return variance.to(self.dtype), mean.to(self.dtype)

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """The mean, 2 / (n - correction) of the variance's derivative, and 1 / n of the mean's."""
        count, mean, _ = state
        by_variance, by_mean = (
            torch.zeros_like(mean) if seed is None else _kept(seed, self.dims, self.keepdim).double()
            for seed in seeds
        )
        found = mean, 2.0 * by_variance / (count - self.correction), by_mean / count
        return tuple(each.to(self.dtype) for each in found)

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """2 (x - mean) / (n - correction) of the variance's derivative, 1 / n of the mean's."""
        mean, by_square, by_mean = slope
        return torch.addcmul(by_mean, x - mean, by_square)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extreme:
    """Largest or smallest element; its gradient is shared evenly among equals, as torch does."""

    dims: tuple[int, ...]
    keepdim: bool
    largest: bool

    def partial(self, x: Tensor, start: int) -> State:
        """The element, and how many equal it."""
        value = x.amax(self.dims, keepdim=True) if self.largest else x.amin(self.dims, keepdim=True)
        return value, (x == value).sum(self.dims, keepdim=True)

    def merge(self, first: State, second: State) -> State:
        """The greater one, with the count of those who have it."""
        choose = torch.maximum if self.largest else torch.minimum
        value = choose(first[0], second[0])
        return value, first[1] * (first[0] == value) + second[1] * (second[0] == value)

    def finish(self, state: State) -> Tensor:
        """The element."""
        return state[0] if self.keepdim else _squeezed(state[0], self.dims)

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """The element, and the share of each who equals it."""
        (seed,) = seeds
        assert seed is not None
        return state[0], _kept(seed, self.dims, self.keepdim) / state[1]

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """To those who equal it."""
        value, share = slope
        gradient: Tensor = (x == value) * share
        return gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSumExp:
    """Logarithm of the sum of exponentials; its gradient is softmax."""

    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype

    def partial(self, x: Tensor, start: int) -> State:
        """The largest element, and the sum of exponentials of what others are below it."""
        x = widened(x)
        largest = x.amax(self.dims, keepdim=True).double()
        return largest, (x - _finite(largest).to(x.dtype)).exp().sum(self.dims, keepdim=True).double()

    def merge(self, first: State, second: State) -> State:
        """Both sums below the larger of both."""
        largest = torch.maximum(first[0], second[0])
        sums = (total * (top - _finite(largest)).exp() for top, total in (first, second))
        return largest, sum(sums)

    def finish(self, state: State) -> Tensor:
        """The logarithm."""
        value = (_finite(state[0]) + state[1].log()).to(self.dtype)
        return value if self.keepdim else _squeezed(value, self.dims)

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """The logarithm, and the loss's derivative by it."""
        (seed,) = seeds
        assert seed is not None
        whole = _finite(_finite(state[0]) + state[1].log())
        return whole.to(self.dtype), _kept(seed, self.dims, self.keepdim)

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """The seed times softmax."""
        whole, seed = slope
        gradient: Tensor = (x - whole).exp() * seed
        return gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """The ``count`` largest or smallest elements in order, without their places.

    Where more elements than are chosen equal the last of them, they share its gradient evenly.
    """

    dim: int
    count: int
    largest: bool

    def partial(self, x: Tensor, start: int) -> State:
        """The elements, and how many more equal the last."""
        none = torch.zeros_like(x.narrow(self.dim, 0, 1), dtype=torch.int64)
        return self._chosen(x, none)

    def merge(self, first: State, second: State) -> State:
        """Those of both."""
        both = torch.cat([first[0], second[0]], self.dim)
        last = self._last(self._of(both))
        left = sum(more * (self._last(values) == last) for values, more in (first, second))
        return self._chosen(both, left)

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        """The elements; nothing reads the places."""
        return state[0], torch.zeros_like(state[0], dtype=torch.int64)

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """The elements, the lowest first, and what each element that equals one of them gets."""
        (values, more), seed = state, seeds[0]
        assert seed is not None
        seed = seed.narrow(self.dim, 0, values.shape[self.dim])  # of a strip that is measured alone
        values, more, seed = (each.movedim(self.dim, -1) for each in (values, more, seed))
        group = torch.zeros_like(values, dtype=torch.int64)
        group[..., 1:] = (values[..., 1:] != values[..., :-1]).cumsum(-1)
        counts = torch.zeros_like(group).scatter_add(-1, group, torch.ones_like(group))
        counts.scatter_add_(-1, group[..., -1:], more)
        shares = torch.zeros_like(seed).scatter_add(-1, group, seed) / counts.clamp(min=1)
        found = values, shares.gather(-1, group)
        return tuple((each.flip(-1) if self.largest else each).contiguous() for each in found)

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """To those who equal one of the elements."""
        values, shares = slope
        rows = x.movedim(self.dim, -1).contiguous()
        place = torch.searchsorted(values, rows).clamp(max=values.shape[-1] - 1)
        found = torch.where(values.gather(-1, place) == rows, shares.gather(-1, place), 0.0)
        return found.to(x.dtype).movedim(-1, self.dim)

    def _chosen(self, x: Tensor, left: Tensor) -> State:
        """Of elements, and of ``left`` others that equal their last."""
        values = self._of(x)
        last = self._last(values)
        equal = (x == last).sum(self.dim, keepdim=True) - (values == last).sum(self.dim, keepdim=True)
        return values, equal + left

    def _of(self, x: Tensor) -> Tensor:
        return x.topk(min(self.count, x.shape[self.dim]), self.dim, self.largest).values

    def _last(self, values: Tensor) -> Tensor:
        return values.narrow(self.dim, values.shape[self.dim] - 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """All rows as they are, for what needs them at once."""

    rows: Rows
    shape: tuple[int, ...]

    def partial(self, x: Tensor, start: int) -> State:
        """The rows, and where they begin."""
        return x, start

    def merge(self, first: State, second: State) -> State:
        """All rows so far, in a tensor of the whole shape."""
        whole: Tensor = first[0]
        if whole.shape != self.shape:
            whole = whole.new_empty(self.shape)
            self._part(whole, *first).copy_(self.rows.apart(first[0]))
        self._part(whole, *second).copy_(self.rows.apart(second[0]))
        return whole, 0

    def finish(self, state: State) -> Tensor:
        """The tensor."""
        whole: Tensor = state[0]
        return whole

    def slope(self, state: State, seeds: tuple[Tensor | None, ...]) -> State:
        """The loss's derivative by all rows."""
        return seeds

    def gradient(self, x: Tensor, slope: State, start: int) -> Tensor:
        """That by a strip's own."""
        return self._part(slope[0], x, start).reshape(x.shape)

    def _part(self, whole: Tensor, x: Tensor, start: int) -> Tensor:
        apart = self.rows.apart(whole)
        return apart.narrow(self.rows.dim + 1, start, self.rows.apart(x).shape[self.rows.dim + 1])


def gathered(x: Tensor) -> Tensor:
    """The operator in a graph that :class:`Gathered` is."""
    return x


def _finite(largest: Tensor) -> Tensor:
    """Zero where there is nothing but minus infinity."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def reduction(call: Call) -> Reduction | None:
    """The reduction that a node is, if it takes the streamed axis away; None if it does not.

    Raises:
        UnsupportedModelError: it takes only a part of a merged axis away (never so for what views make).
    """
    build = _BUILDERS.get(call.target)
    if build is None and call.target is not gathered:
        return None
    ((source, rows),) = call.inputs.items()
    shape = source.meta["val"].shape
    if build is None:
        return Gathered(rows=rows, shape=tuple(shape))
    arguments = call.args[1] if len(call.args) > 1 else None
    named = call.node.kwargs.get("dim", arguments)
    if call.target is _aten.topk.default:
        named = call.args[2] if len(call.args) > 2 else -1
    dims = _dims(named if call.target not in _WHOLE else None, len(shape))
    if rows.dim not in dims:
        return None
    return build(call, dims, tuple(shape))


def _sum(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Sum:
    cast: Any = call.node.kwargs.get("dtype")
    dtype = call.node.meta["val"].dtype
    return Sum(dims=dims, keepdim=_keepdim(call), scale=1.0, dtype=dtype, cast=cast)


def _mean(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    summed = _sum(call, dims, shape)
    return replace(summed, scale=1.0 / prod(shape[dim] for dim in dims))


def _moments(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    correction: Any = call.node.kwargs.get("correction", 1)
    keepdim = bool(call.node.kwargs.get("keepdim", False))
    dtype = call.node.meta["val"][0].dtype
    correction = 1 if correction is None else correction
    return Moments(dims=dims, keepdim=keepdim, correction=float(correction), dtype=dtype)


def _largest(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    return Extreme(dims=dims, keepdim=_keepdim(call), largest=True)


def _smallest(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    return Extreme(dims=dims, keepdim=_keepdim(call), largest=False)


def _logsumexp(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    return LogSumExp(dims=dims, keepdim=_keepdim(call), dtype=call.node.meta["val"].dtype)


def _ranked(call: Call, dims: tuple[int, ...], shape: tuple[int, ...]) -> Reduction:
    if any(user.args[1] == 1 and user.users for user in call.node.users):
        raise call.refuse("the indices that it gives would be those within a strip")
    largest = bool(call.args[3]) if len(call.args) > 3 else True
    return Ranked(dim=dims[0], count=int(call.args[1]), largest=largest)


_aten = torch.ops.aten
_BUILDERS: dict[Any, Callable[[Call, tuple[int, ...], tuple[int, ...]], Reduction]] = {
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.var_mean.correction: _moments,
    _aten.logsumexp.default: _logsumexp,
    _aten.amax.default: _largest,
    _aten.amin.default: _smallest,
    _aten.max.default: _largest,
    _aten.min.default: _smallest,
    _aten.topk.default: _ranked,
}
_WHOLE = (_aten.sum.default, _aten.mean.default, _aten.max.default, _aten.min.default)


def _keepdim(call: Call) -> bool:
    return bool(call.args[2] if len(call.args) > 2 else call.node.kwargs.get("keepdim", False))


def _dims(named: Any, ndim: int) -> tuple[int, ...]:
    listed = [named] if isinstance(named, int) else [*(named or range(ndim))]
    return tuple(sorted(dim % ndim for dim in listed))


def _kept(value: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """With the reduced dimensions as 1."""
    if not keepdim:
        for dim in dims:
            value = value.unsqueeze(dim)
    return value


def _squeezed(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    return value.squeeze(dims)
