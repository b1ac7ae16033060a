"""Operators that make a row from neighbouring rows: convolution, pooling, padding, resampling.

Output rows [a, b) of a window of ``kernel`` taps, ``stride``, ``dilation`` and ``padding`` read the input
rows [a stride - padding, (b - 1) stride - padding + (kernel - 1) dilation + 1); what of them lies outside the
image is padding, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from squeezebox.streaming._rows import Call, Need, Operator, Rows, Strip, shape_of

_aten = torch.ops.aten


class Known(torch.autograd.Function):
    """``apply(output, x, weight, bias, rest)``, ``rest`` as behind these in torch.ops.aten.convolution."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]
    ) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes, ctx.rest = None if bias is None else list(bias.shape), rest
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Of input, weight and bias, as wanted."""
        x, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[1:4]]
        found = _aten.convolution_backward.default(gradient, x, weight, ctx.bias_sizes, *ctx.rest, wanted)
        return None, *found, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """A sliding window along the streamed axis, whose input has ``count`` rows."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    count: int

    @property
    def span(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Rows within and without the image."""
        first = start * self.stride - self.padding
        return first, first + (stop - start - 1) * self.stride + self.span

    def within(self, start: int, stop: int) -> tuple[int, int]:
        first, last = self.reads(start, stop)
        return max(first, 0), min(last, self.count)

    def fetch(self, strip: Strip, source: Node, rows: Rows, start: int, stop: int, fill: float) -> Tensor:
        """The rows that are read, with ``fill`` for those outside the image."""
        first, last = self.reads(start, stop)
        inner, outer = max(first, 0), min(last, self.count)
        return padded(strip.rows(source, inner, outer), rows.dim, inner - first, last - outer, fill)


def padded(tensor: Tensor, dim: int, before: int, after: int, fill: float = 0.0) -> Tensor:
    """Rows of ``fill`` before and after."""
    if not before and not after:
        return tensor
    return functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [before, after], value=fill)


def _spatial(call: Call, rows: Rows, dims: int) -> int:
    """Which of the operator's ``dims`` spatial axes is streamed."""
    node, _ = call.source()
    axis = rows.dim - (len(shape_of(node)) - dims)
    if axis < 0:
        raise call.refuse("the streamed axis is not one of its spatial ones")
    return axis


def _at(values: Any, axis: int) -> int:
    if isinstance(values, int):
        return int(values)
    return int(values[axis] if len(values) > 1 else values[0])


def _replaced(values: Any, axis: int, dims: int, new: int) -> list[int]:
    listed = [_at(values, place) for place in range(dims)]
    listed[axis] = new
    return listed


def _windowed(
    source: Node, rows: Rows, window: _Window, count: int, run: Callable[[Strip, int, int], Any]
) -> Operator:
    def needs(start: int, stop: int) -> list[Need]:
        return [(source, *window.within(start, stop))]

    return Operator(rows=Rows(dim=rows.dim, count=count), needs=needs, run=run)


def _require_reached(call: Call, window: _Window) -> None:
    if window.padding >= window.span:
        raise call.refuse(f"its padding of {window.padding} is as wide as its window of {window.span}")


def convolved(call: Call) -> Operator:
    """Convolution, transposed or not, of any stride, dilation, padding and groups."""
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = call.args
    source, rows = call.source()
    dims = weight.meta["val"].dim() - 2
    axis = _spatial(call, rows, dims)
    window = _Window(
        kernel=weight.meta["val"].shape[2 + axis],
        stride=_at(stride, axis),
        padding=_at(padding, axis),
        dilation=_at(dilation, axis),
        count=rows.count,
    )
    inner = _replaced(padding, axis, dims, 0)
    if transposed:
        outer = _replaced(extra, axis, dims, 0)
        rest: tuple[Any, ...] = (stride, inner, dilation, True, outer, groups)
        return _transposed(call, window, source, rows, (weight, bias, rest))
    _require_reached(call, window)

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        part = window.fetch(strip, source, rows, start, stop, 0.0)
        values = part, strip.value(weight), strip.value(bias)
        rest = stride, inner, dilation, False, extra, groups
        known = strip.known(call.node, start, stop)
        result: Tensor = (
            _aten.convolution.default(*values, *rest) if known is None else Known.apply(known, *values, rest)  # type: ignore[no-untyped-call]
        )
        return result

    return _windowed(source, rows, window, call.shape[rows.dim], run)


def _transposed(
    call: Call, window: _Window, source: Node, rows: Rows, arguments: tuple[Any, Any, tuple[Any, ...]]
) -> Operator:
    """Input row i adds to the output rows i stride - padding + dilation j."""
    weight, bias, rest = arguments

    def within(start: int, stop: int) -> tuple[int, int]:
        first = -(-(start + window.padding - window.span + 1) // window.stride)
        last = (stop - 1 + window.padding) // window.stride + 1
        first = min(max(first, 0), rows.count - 1)
        return first, max(min(last, rows.count), first + 1)

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        first, last = within(start, stop)
        values = strip.rows(source, first, last), strip.value(weight)
        begin = first * window.stride - window.padding
        end = begin + (last - first - 1) * window.stride + window.span
        if begin <= start and stop <= end:
            whole: Tensor = _aten.convolution.default(*values, strip.value(bias), *rest)
            return whole.narrow(rows.dim, start - begin, stop - start)
        reached = _aten.convolution.default(*values, None, *rest)  # the rows beyond have only the bias
        return _biased(_placed(reached, rows.dim, begin, start, stop), strip.value(bias), rows.dim)

    def needs(start: int, stop: int) -> list[Need]:
        return [(source, *within(start, stop))]

    return Operator(rows=Rows(dim=rows.dim, count=call.shape[rows.dim]), needs=needs, run=run)


def _placed(part: Tensor, dim: int, begin: int, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of what has ``part`` from ``begin`` on and zeros elsewhere."""
    first = min(max(begin, start), stop)
    last = max(min(begin + part.shape[dim], stop), first)
    inner = part.narrow(dim, first - begin if last > first else 0, last - first)
    return padded(inner, dim, first - start, stop - last)


def _biased(x: Tensor, bias: Any, dim: int) -> Tensor:
    return x if bias is None else x + bias.view([-1] + [1] * (x.dim() - 2))


def max_pooled(call: Call) -> Operator:
    """Largest element of every window; padding is never the largest."""
    return _pooled(call, call.args[4] if len(call.args) > 4 else 1, -torch.inf, _largest)


def _largest(call: Call, part: Tensor, sizes: Any, axis: int, counts: Any) -> Any:
    kernel, stride, padding = sizes
    dilation = call.args[4] if len(call.args) > 4 else 1
    ceil = bool(call.args[5]) if len(call.args) > 5 else False
    return call.target(part, kernel, stride, padding, dilation, ceil)


def average_pooled(call: Call) -> Operator:
    """Mean of every window; at the image's borders fewer rows are counted where the operator says so."""
    return _pooled(call, 1, 0.0, _mean)


def _mean(call: Call, part: Tensor, sizes: Any, axis: int, counts: Callable[[bool], list[int]]) -> Tensor:
    kernel, stride, padding = sizes
    given = tuple(call.args[4:])
    ceil, include, divisor = given + (False, True, None)[len(given) :]
    result: Tensor = call.target(part, kernel, stride, padding, ceil, include, divisor)
    found = counts(bool(include))
    if divisor is not None or all(count == kernel[axis] for count in found):
        return result
    factors = torch.tensor(
        [kernel[axis] / count for count in found], dtype=result.dtype, device=result.device
    )
    return result * factors.view([-1] + [1] * (len(kernel) - 1 - axis))


def _pooled(call: Call, dilation: Any, fill: float, pool: Callable[..., Any]) -> Operator:
    source, rows = call.source()
    node, dims = call.node, 2
    kernel = node.args[1]
    stride = node.args[2] if len(node.args) > 2 and node.args[2] else kernel
    padding = node.args[3] if len(node.args) > 3 else 0
    axis = _spatial(call, rows, dims)
    window = _Window(
        kernel=_at(kernel, axis),
        stride=_at(stride, axis),
        padding=_at(padding, axis),
        dilation=_at(dilation, axis),
        count=rows.count,
    )
    value = node.meta["val"]
    count = (value[0] if isinstance(value, tuple) else value).shape[rows.dim]
    whole = [_at(kernel, place) for place in range(dims)], [_at(stride, place) for place in range(dims)]
    sizes = (*whole, _replaced(padding, axis, dims, 0))

    def run(strip: Strip, start: int, stop: int) -> Any:
        part = window.fetch(strip, source, rows, start, stop, fill)

        def counts(include: bool) -> list[int]:
            return [_counted(window, row, include) for row in range(start, stop)]

        return pool(call, part, sizes, axis, counts)

    return _windowed(source, rows, window, count, run)


def _counted(window: _Window, row: int, include: bool) -> int:
    """How many rows a window's mean is over."""
    first = row * window.stride - window.padding
    if include:
        return min(first + window.kernel, window.count + window.padding) - first
    return min(first + window.kernel, window.count) - max(first, 0)


def constant_padded(call: Call) -> Operator:
    """Padded with a constant, or cropped where the padding is negative."""
    source, rows = call.source()
    pads: list[int] = [int(pad) for pad in call.args[1]]
    fill = call.args[2] if len(call.args) > 2 else 0.0
    place = 2 * (source.meta["val"].dim() - 1 - rows.dim)
    before = pads[place] if place < len(pads) else 0
    others = [0 if place <= number < place + 2 else pad for number, pad in enumerate(pads)]

    def within(start: int, stop: int) -> tuple[int, int]:
        first = min(max(start - before, 0), rows.count - 1)
        return first, max(min(stop - before, rows.count), first + 1)

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        first, last = within(start, stop)
        begin, end = max(first, start - before), min(last, stop - before)
        part = strip.rows(source, first, last).narrow(
            rows.dim, min(begin - first, last - first), max(end - begin, 0)
        )
        missing = stop - start - max(end - begin, 0)
        ahead = min(max(begin - (start - before), 0), missing)
        part = padded(part, rows.dim, ahead, missing - ahead, fill)
        return functional.pad(part, others, value=fill) if any(others) else part

    return Operator(
        rows=Rows(dim=rows.dim, count=call.shape[rows.dim]),
        needs=lambda start, stop: [(source, *within(start, stop))],
        run=run,
    )


def sliced(call: Call) -> Operator:
    """Every ``step``-th row of a part, which may be all: ``x[..., first:last:step, :]``."""
    source, rows = call.source()
    first = int(call.args[2] or 0) if len(call.args) > 2 else 0
    first = min(max(first + rows.count if first < 0 else first, 0), rows.count)
    step = int(call.args[4]) if len(call.args) > 4 else 1

    def within(start: int, stop: int) -> tuple[int, int]:
        return first + start * step, first + (stop - 1) * step + 1

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        part: Tensor = strip.rows(source, *within(start, stop))
        return part if step == 1 else part[(slice(None),) * rows.dim + (slice(None, None, step),)]

    return Operator(
        rows=Rows(dim=rows.dim, count=call.shape[rows.dim]),
        needs=lambda start, stop: [(source, *within(start, stop))],
        run=run,
    )


def joined(call: Call) -> Operator:
    """One behind another: ``torch.cat`` along the streamed axis, as circular padding and roll are."""
    sources: list[Node] = [*call.args[0]]
    if any(node not in call.inputs or call.inputs[node].merged for node in sources):
        raise call.refuse("what it joins does not have the streamed axis apart")
    dim = call.inputs[sources[0]].dim
    counts = [call.inputs[node].count for node in sources]
    begins = [0, *accumulate(counts)]

    def parts(start: int, stop: int) -> list[Need]:
        cut = [
            (node, max(start - begin, 0), min(stop - begin, count))
            for node, begin, count in zip(sources, begins, counts, strict=False)
        ]
        return [(node, first, last) for node, first, last in cut if first < last]

    return Operator(
        rows=Rows(dim=dim, count=begins[-1]),
        needs=parts,
        run=lambda strip, start, stop: torch.cat([strip.rows(*part) for part in parts(start, stop)], dim),
    )


def flipped(call: Call) -> Operator:
    """In the opposite order."""
    source, rows = call.source()
    count = rows.count
    return Operator(
        rows=rows,
        needs=lambda start, stop: [(source, count - stop, count - start)],
        run=lambda strip, start, stop: strip.rows(source, count - stop, count - start).flip(call.args[1]),
    )


def shuffled(call: Call) -> Operator:
    """Channels into pixels: ``factor`` rows from each."""
    source, rows = call.source()
    factor = int(call.args[1])
    _spatial(call, rows, 2)

    def within(start: int, stop: int) -> tuple[int, int]:
        return start // factor, -(-stop // factor)

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        first, last = within(start, stop)
        part: Tensor = _aten.pixel_shuffle.default(strip.rows(source, first, last), factor)
        return part.narrow(rows.dim, start - first * factor, stop - start)

    return Operator(
        rows=Rows(dim=rows.dim, count=rows.count * factor),
        needs=lambda start, stop: [(source, *within(start, stop))],
        run=run,
    )


def unshuffled(call: Call) -> Operator:
    """Pixels into channels: one row from ``factor``."""
    source, rows = call.source()
    factor = int(call.args[1])
    _spatial(call, rows, 2)

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        part: Tensor = _aten.pixel_unshuffle.default(
            strip.rows(source, start * factor, stop * factor), factor
        )
        return part

    return Operator(
        rows=Rows(dim=rows.dim, count=rows.count // factor),
        needs=lambda start, stop: [(source, start * factor, stop * factor)],
        run=run,
    )
