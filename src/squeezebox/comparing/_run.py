"""One run of a side under hooks: what passes each place is kept, compared, or put in place of what came."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from squeezebox.capture import in_backward
from squeezebox.comparing._sides import Side
from squeezebox.comparing._tape import Call, Kind, Maker, Place, Tape
from squeezebox.comparing._values import copied, difference, energy_between

Forces = Callable[[Place], bool]


class Run:
    """A run of one side. Without a reference it keeps what passes; with one it compares, and may force.

    Args:
        side: what runs.
        backward: whether gradients are looked at too.
        reference: what another run kept.
        names: which of the reference's calls each call is; by default the one of its own name.
        forces: places at which the reference's values go on in place of what came.
        written: the reference's calls that write to what they are given, which gets no view around it.
        jitter: whether forced gradients are off by a rounding.
    """

    def __init__(
        self,
        side: Side,
        *,
        backward: bool,
        reference: Tape | None = None,
        names: Mapping[Call, Call] = MappingProxyType({}),
        forces: Forces = lambda place: False,
        written: Container[Call] = (),
        jitter: bool = False,
    ) -> None:
        self.tape = Tape()
        self._side, self._backward, self._reference = side, backward, reference
        self._names, self._forces, self._jitter = names, forces, jitter
        self._written = written
        self._running: list[tuple[str, int, list[tuple[torch.Tensor, int]]]] = []  # and versions of inputs
        self._last = ""  # the stage before
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, batch: Any) -> Tape:
        """Run forward, and backward where the output has gradients."""
        with self._hooked(), torch.set_grad_enabled(self._backward):
            value = tree_map(copied, batch)
            for name, stage in self._side.stages:
                arguments, keywords = self._enter(name, value if isinstance(value, tuple) else (value,), {})
                value = self._leave(name, stage(*arguments, **keywords))
                self._last = name
            self.tape.output = tree_map(copied, value)
            outputs = [leaf for leaf in tree_flatten(value)[0] if _is_graded(leaf)]
            self.tape.has_gradients = bool(outputs)
            if outputs:
                torch.autograd.backward(outputs, list(map(self._first_gradient, outputs)))
        return self.tape

    def _first_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Of a loss 1; of other outputs random, so that every element of them counts."""
        if output.numel() == 1:
            return torch.ones_like(output)
        return torch.randn(output.shape, generator=self._generator).to(output)

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for layer in self._side.layers:
                if layer.seen:
                    enter = functools.partial(self._before, layer.name)
                    leave = functools.partial(self._after, layer.name)
                    hooks.callback(layer.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    hooks.callback(layer.module.register_forward_hook(leave).remove)
                for name, parameter in layer.module.named_parameters(recurse=False):
                    if self._backward and parameter.requires_grad:
                        place = self._place(layer.name, 0, Kind.PARAMETER_GRADIENT, name)
                        passed = functools.partial(
                            self._pass_gradient, place, Maker(layer.name, f"gradient of {name}")
                        )
                        hooks.callback(parameter.register_hook(passed).remove)
            yield

    def _before(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return self._enter(name, args, kwargs)

    def _after(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return self._leave(name, output)

    # --- what passes ---------------------------------------------------------------------------------

    def _enter(self, name: str, args: Any, kwargs: Any) -> Any:
        """The arguments that a call gets in place of those that came."""
        again = in_backward()  # checkpointing repeats a forward: its values are forced as they were before
        call = self._counts[name, again]
        self._counts[name, again] += 1
        caller = self._running[-1][0] if self._running else self._last
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        versions = [(each, each._version) for each in given if not each.is_inference()]
        maker = Maker(caller, f"code before {name}")
        place = self._place(name, call, Kind.INPUT)
        # the batch itself is not compared
        passed = self._pass(place, maker, (args, kwargs), again) if caller else (args, kwargs)
        self._running.append((name, call, versions))
        if again or not torch.is_grad_enabled() or place[:2] in self._written:
            return passed
        taps: dict[int, torch.Tensor] = {}
        tap = functools.partial(self._tap, taps, place._replace(kind=Kind.INPUT_GRADIENT), name)
        return tree_map(tap, passed)

    def _tap(self, taps: dict[int, torch.Tensor], place: Place, name: str, leaf: Any) -> Any:
        """A view of a tensor, whose gradient is the one that this layer's call contributes."""
        if not _is_graded(leaf):
            return leaf
        if id(leaf) not in taps:
            place = place._replace(part=str(len(taps) or ""))
            taps[id(leaf)] = view = leaf.view_as(leaf)
            what = f"gradient of input {place.part}".rstrip()
            view.register_hook(functools.partial(self._pass_gradient, place, Maker(name, what)))
        return taps[id(leaf)]

    def _leave(self, name: str, output: Any) -> Any:
        """What a call returns in place of its output."""
        again = in_backward()
        _, call, versions = self._running.pop()
        place = self._place(name, call, Kind.OUTPUT)
        if any(tensor._version != version for tensor, version in versions):
            self.tape.written.add((name, call))
        passed = self._pass(place, Maker(name, "output"), output, again)
        if again:
            return passed
        self.tape.shapes[name, call] = " ".join(
            str([*t.shape]) for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)
        )
        caller = self._running[-1][0] if self._running else ""
        maker = (
            Maker(caller, f"backward of code after {name}")
            if caller
            else Maker(name, "backward of its output")
        )
        graded = {id(leaf): leaf for leaf in tree_flatten(passed)[0] if _is_graded(leaf)}
        for number, leaf in enumerate(graded.values()):
            there = place._replace(kind=Kind.OUTPUT_GRADIENT, part=str(number or ""))
            leaf.register_hook(functools.partial(self._pass_gradient, there, maker))
        return passed

    def _place(self, layer: str, call: int, kind: Kind, part: str = "") -> Place:
        return Place(*self._names.get((layer, call), (layer, call)), kind, part)

    def _pass(self, place: Place, maker: Maker, value: Any, again: bool) -> Any:
        """A stage's values are compared whatever they are; between layers it is tensors that both have."""
        leaves, form = tree_flatten(value)
        whole = not self._running and not again
        looked = [n for n, leaf in enumerate(leaves) if whole or isinstance(leaf, torch.Tensor)]
        came = [leaves[n] for n in looked]
        if self._reference is None:
            if not again:
                self.tape.values[place] = list(map(copied, came))
                self.tape.random[place] = _random_states()
                self.tape.makers[place] = maker
            return value
        expected = self._reference.values.get(place)
        if expected is None:
            return value
        if self._forces(place):
            _set_random_states(self._reference.random[place])
        common = max(len(came), len(expected)) if whole else min(len(came), len(expected))
        found = difference(expected[:common], came[:common])
        if not again:
            self.tape.differences[place] = found
            self.tape.makers[place] = maker
        if not found.size or not self._forces(place):
            return value
        for n, values in zip(looked, expected, strict=False):
            leaves[n] = _swapped(leaves[n], values)
        return tree_unflatten(leaves, form)

    def _pass_gradient(self, place: Place, maker: Maker, gradient: torch.Tensor) -> torch.Tensor | None:
        """What goes on in place of a gradient; None for itself."""
        if self._reference is None:
            self.tape.values[place] = [copied(gradient)]
            self.tape.makers[place] = maker
            return None
        kept = self._reference.values.get(place)
        if kept is None:
            return None
        expected: torch.Tensor = kept[0]
        found = self.tape.differences[place] = difference([expected], [gradient])
        self.tape.makers[place] = maker
        forced = self._forces(place) and expected.shape == gradient.shape
        if place.kind is Kind.PARAMETER_GRADIENT and not forced:
            self.tape.gradient_error += energy_between([expected], [gradient])
        if not forced or not (found.size or self._jitter):
            return None
        expected = expected.to(gradient)
        if self._jitter:
            noise = torch.rand(expected.shape, generator=self._generator).to(expected) - 0.5
            expected = expected * (1 + 2 * torch.finfo(expected.dtype).eps * noise)
        return expected


class _Swap(torch.autograd.Function):
    """One tensor's values in place of another's, whose gradient goes on to the other."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The values."""
        ctx.like = found.shape, found.dtype
        return _laid_out(found, values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient; zeros where the shape is another."""
        shape, dtype = ctx.like
        return (
            gradient.to(dtype) if gradient.shape == shape else gradient.new_zeros(shape, dtype=dtype)
        ), None


def _swapped(found: Any, expected: Any) -> Any:
    """The expected value, on the device of what came and in its precision."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return copied(expected)
    both = found.is_floating_point() and expected.is_floating_point()
    values = expected.to(found.device, found.dtype if both else expected.dtype)
    if _is_graded(found) and values.is_floating_point():
        swapped: torch.Tensor = _Swap.apply(found, values)  # type: ignore[no-untyped-call]
        return swapped
    return _laid_out(found, values)


def _laid_out(found: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of the values with the other's strides, on which kernels and random masks depend."""
    return (
        torch.empty_like(found, dtype=values.dtype).copy_(values)
        if found.shape == values.shape
        else values.clone()
    )


def _is_graded(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def _set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
