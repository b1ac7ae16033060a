"""The errors of lossy tensors on their way down to the parameters: all together, and one tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from squeezebox import codecs
from squeezebox.bounds import gradient_energy, propagate
from squeezebox.capture._entries import Handle, Row
from squeezebox.capture._held import Held, Packed
from squeezebox.capture._layouts import flattened
from squeezebox.capture._store import Store
from squeezebox.schema import Check, CodecError, Injection, NodeStatistics, OptionError

Gradients = tuple[torch.Tensor | None, ...]
Instead = Mapping[Handle, torch.Tensor]
Target = tuple[int | None, int, bool]  # node number and its input, or the leaf's identity; whether it is one

_FINER = 4.0  # a rest is known to a quarter of the bound; its rounding adds a sixteenth to its energy


class TotalError:
    """What a step's gradients are off by, without a second step.

    While it is packed, every lossy tensor leaves what packing lost, held within a quarter of its bound: about
    two bits an element. With it backward runs once more, operator by operator, next to the lossy one, and the
    difference of the two goes on to the next operators; errors that meet are added, as gradients are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rests: WeakKeyDictionary[Held, codecs.Packed] = WeakKeyDictionary()
        self._uses: Counter[int] = Counter()  # of a leaf, by its identity
        self._arrived: dict[tuple[int, int], torch.Tensor] = {}
        self._shared: dict[int, list[torch.Tensor]] = {}  # sums of leaves that are used more than once
        self._error = self._signal = 0.0
        self._failed = False

    def expect(self, targets: Iterable[Target]) -> None:
        """A node that will hand gradients to these was made."""
        self._uses.update(index for _, index, leaf in targets if leaf)

    def keep(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Keep what packing lost of a tensor that has just been packed."""
        held = handle.held
        if self._failed or not isinstance(held, Packed) or held in self._rests or held.row.bound == 0.0:
            return
        try:
            self._rests[held] = _rest(held, tensor)
        except (CodecError, OptionError, ArithmeticError):
            self.fail()

    def fail(self) -> None:
        """An error is not known, or nobody asks, so their sum is not: nothing more is done for it."""
        self._failed = True
        self._rests.clear()
        self._arrived.clear()

    def pass_on(
        self,
        number: int,
        node: Any,
        targets: list[Target],
        handles: Iterable[Handle],
        grad_inputs: Gradients,
        grad_outputs: Gradients,
        *,
        repeatable: bool,
    ) -> None:
        """The node's backward has run: see what it makes of errors that arrived, and adds to them."""
        if self._failed:
            return
        arrived = tuple(self._arrived.pop((number, each), None) for each in range(len(grad_outputs)))
        own = [handle for handle in handles if handle.held in self._rests]
        errors: Gradients = (None,) * len(grad_inputs)
        if repeatable and own:
            exact = tuple(_less(*pair) for pair in zip(grad_outputs, arrived, strict=True))
            del arrived  # of large tensors each counts
            errors = repeat(node, exact, {each: self._exact(each) for each in own})
            del exact
            errors = _turned(grad_inputs, errors, grad_outputs)
        elif any(error is not None for error in arrived):
            errors = repeat(node, arrived) if repeatable else _as_signal(grad_inputs, grad_outputs, arrived)
        for target, error, gradient in zip(targets, errors, grad_inputs, strict=False):
            self._send(target, error, gradient)

    @property
    def noise(self) -> float | None:
        """Squared error of all parameter gradients over their squared norm; None if it is not known."""
        self._add_shared()
        if self._failed or self._signal <= 0.0:
            return None
        return self._error / (1.0 + _FINER**-2) / self._signal

    def close(self) -> None:
        """Let go of all tensors."""
        self._rests.clear()
        self._arrived.clear()
        self._add_shared()

    def _add_shared(self) -> None:
        for gradient, error in self._shared.values():
            self._signal += energy_of(gradient)
            self._error += energy_of(error)
        self._shared.clear()

    def _exact(self, handle: Handle) -> torch.Tensor:
        assert handle.held is not None
        packed = self._rests[handle.held]
        flat = codecs.get(packed.codec).unpack(packed).view(-1)
        rest = flat.as_strided(*handle.geometry)
        lossy = self._store.unpack(handle)
        return rest.add_(lossy) if _is_dense(rest) else rest + lossy

    def _send(self, to: Target, error: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
        target, index, leaf = to
        if leaf and gradient is not None:
            self._end(index, error, gradient)
        elif target is not None and error is not None:
            known = self._arrived.get((target, index))
            self._arrived[target, index] = error if known is None else known + error

    def _end(self, leaf: int, error: torch.Tensor | None, gradient: torch.Tensor) -> None:
        if self._uses[leaf] < 2:
            self._signal += energy_of(gradient)
            self._error += energy_of(error)
            return
        gradient = _dense(gradient)
        error = torch.zeros_like(gradient) if error is None else _dense(error)
        known = self._shared.get(leaf)
        self._shared[leaf] = [gradient, error] if known is None else [known[0] + gradient, known[1] + error]


def _rest(held: Packed, tensor: torch.Tensor) -> codecs.Packed:
    """What packing lost of a tensor, packed."""
    packed, scale = held.packed, held.scale
    rest = codecs.get(packed.codec).unpack(packed).view(-1).neg_().add_(flattened(tensor))
    hints = codecs.Hints() if scale is None else codecs.Hints(scale=scale.factors, inner=scale.inner)
    codec = codecs.get("blocks" if packed.codec == "blocks" else "entropy")
    return codec.pack(rest, held.row.bound / _FINER, hints)


def repeat(node: Any, gradients: Gradients, instead: Instead = MappingProxyType({})) -> Gradients:
    """The node's backward once more, reading other tensors ``instead`` of what handles hold."""
    for handle, tensor in instead.items():
        handle.override = tensor
    try:
        result = node(*gradients)
    finally:
        for handle in instead:
            handle.override = None
    results = result if isinstance(result, tuple) else (result,)
    return tuple(_summed(each, *to) for each, to in zip(results, node.next_functions, strict=False))


def differences(perturbed: Gradients, base: Gradients) -> Gradients:
    """One less the other, where both are."""
    return tuple(
        None if one is None or other is None else one - other
        for one, other in zip(perturbed, base, strict=True)
    )


def energy_of(gradient: torch.Tensor | None) -> float:
    """Squared L2 norm."""
    return 0.0 if gradient is None else codecs.energy(gradient)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _less(gradient: torch.Tensor | None, error: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or error is None else gradient - error


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no two elements share a place, for certain."""
    return torch._debug_has_internal_overlap(tensor) == 0


def _turned(gradients: Gradients, exact: Gradients, given: Gradients) -> Gradients:
    """What gradients have beyond the exact ones, in the memory of these where nobody else has it.

    An operator may hand on what it was ``given``, as a sum does, and the same to several.
    """
    there = [each for each in (*gradients, *exact, *given) if each is not None]
    users = Counter(each.untyped_storage().data_ptr() for each in there if each.layout is torch.strided)

    def beyond(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        is_own = other.layout is torch.strided and users[other.untyped_storage().data_ptr()] == 1
        if is_own and _is_dense(other):
            return other.neg_().add_(one)
        return one - other

    pairs = zip(gradients, exact, strict=True)
    return tuple(None if one is None or other is None else beyond(one, other) for one, other in pairs)


def _as_signal(grad_inputs: Gradients, grad_outputs: Gradients, arrived: Gradients) -> Gradients:
    """Through an operator that cannot be repeated errors go as the gradient itself does."""
    signal = sum(energy_of(gradient) for gradient in grad_outputs)
    share = (sum(energy_of(error) for error in arrived) / signal) ** 0.5 if signal else 0.0
    return tuple(None if gradient is None else share * gradient for gradient in grad_inputs)


def _summed(gradient: torch.Tensor | None, target: Any, number: int) -> torch.Tensor | None:
    """What the engine makes of a gradient on its way: summed over the dims that the operator broadcast."""
    if gradient is None or target is None:
        return gradient
    metadata = target._input_metadata[number]
    shape = tuple(metadata.shape)
    return (gradient if gradient.shape == shape else gradient.sum_to_size(shape)).to(metadata.dtype)


class Traces:
    """Carries each tensor's error with the gradient, node by node, and sums what reaches parameters."""

    def __init__(self) -> None:
        self._arrived: dict[int, dict[tuple[str, int], torch.Tensor]] = {}  # node -> (key, input) -> error
        self._energies: dict[str, float] = {}  # key -> squared error that reached parameters
        self._bounds: dict[str, float] = {}
        self._begun: set[tuple[str, int]] = set()  # keys and the nodes whose reading is traced
        self._lost: set[str] = set()  # keys whose error came to an operator that cannot be repeated

    def start(self, row: Row, number: int, targets: Sequence[Target], errors: Gradients) -> None:
        """A node's reading of the row's tensor put these errors into its gradients."""
        self._bounds[row.key] = row.bound
        self._begun.add((row.key, number))
        self._send(row.key, targets, errors)

    def pass_on(
        self, number: int, node: Any, targets: Sequence[Target], count: int, *, repeatable: bool
    ) -> None:
        """Carry what arrived at a node's ``count`` outputs through it: backward is linear in the gradient."""
        arrived = self._arrived.pop(number, None)
        if arrived is None:
            return
        if not repeatable:
            self._lost.update(key for key, _ in arrived)
            return
        for key in dict.fromkeys(key for key, _ in arrived):
            errors = tuple(arrived.pop((key, each), None) for each in range(count))
            self._send(key, targets, repeat(node, errors))

    def checks(self, step: int, nodes: Sequence[NodeStatistics]) -> Iterator[Check]:
        """What has reached the parameters, and what the law predicts of it."""
        total = gradient_energy(nodes)
        costs = propagate([replace(node, injections=self._injections(node)) for node in nodes])
        for key, energy in self._energies.items():
            if total > 0.0 and key in costs and key not in self._lost:
                yield Check(
                    key=key,
                    step=step,
                    layer=False,
                    measured=energy / total,
                    predicted=costs[key] * self._bounds[key] ** 2,
                )

    def clear(self) -> None:
        """Let go of all tensors."""
        self._arrived.clear()

    def _injections(self, node: NodeStatistics) -> tuple[Injection, ...]:
        """Without what others, who read the same tensors, put in."""
        return tuple(each for each in node.injections if (each.key, node.number) in self._begun)

    def _send(self, key: str, targets: Sequence[Target], errors: Gradients) -> None:
        for (target, index, leaf), error in zip(targets, errors, strict=False):
            if error is None:
                continue
            if leaf:
                self._energies[key] = self._energies.get(key, 0.0) + energy_of(error)
            elif target is not None:
                there = self._arrived.setdefault(target, {})
                known = there.get((key, index))
                there[key, index] = error if known is None else known + error
