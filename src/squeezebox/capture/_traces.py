"""True errors of checked tensors, one tensor at a time, on their way down to the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from squeezebox.bounds import gradient_energy, propagate
from squeezebox.capture._entries import Row
from squeezebox.capture._total import Gradients, Target, energy_of, repeat
from squeezebox.schema import Check, Injection, NodeStatistics


class Traces:
    """Carries each tensor's error with the gradient, node by node, and sums what reaches parameters."""

    def __init__(self) -> None:
        self._arrived: dict[int, dict[tuple[str, int], torch.Tensor]] = {}  # node -> (key, input) -> error
        self._energies: dict[str, float] = {}  # key -> squared error that reached parameters
        self._bounds: dict[str, float] = {}
        self._begun: set[tuple[str, int]] = set()  # keys and the nodes whose reading is traced

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
        if arrived is None or not repeatable:
            return
        for key in dict.fromkeys(key for key, _ in arrived):
            errors = tuple(arrived.pop((key, each), None) for each in range(count))
            self._send(key, targets, repeat(node, errors))

    def checks(self, step: int, nodes: Sequence[NodeStatistics]) -> Iterator[Check]:
        """What has reached the parameters, and what the law predicts of it."""
        total = gradient_energy(nodes)
        costs = propagate([replace(node, injections=self._injections(node)) for node in nodes])
        for key, energy in self._energies.items():
            if total > 0.0 and key in costs:
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
