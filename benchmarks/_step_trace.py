"""One training step of a benchmark network on fake tensors: operators, and the storages they make.

Goes in: a name of `benchmarks.models`. Comes out: buffers as the step frees them, and operators with what
they read and write. Nothing is computed and no memory is used, so sizes may be those of the papers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import models
from squeezebox.schema import Buffer, Operator

Make = Callable[[], tuple[torch.nn.Module, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A step: `backward` is the number of the first operator after forward and loss."""

    buffers: tuple[Buffer, ...]
    operators: tuple[Operator, ...]
    backward: int

    @property
    def nbytes(self) -> dict[str, int]:
        return {each.name: each.nbytes for each in self.buffers}

    @property
    def kept(self) -> set[str]:
        """What outlives the step: gradients, and the loss."""
        return {each.name for each in self.buffers if each.upper > len(self.operators)}


def trace(name: str, batch: int = 32, **sizes: Any) -> Trace:
    """One step with momentum, from dropped gradients to the optimizer's step; the state is there already."""
    model = models.build(name, **sizes)
    with FakeTensorMode() as mode:
        _fake(model, mode)
        inputs, target = _sample(name, batch, sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        _step(model, inputs, target, optimizer)
        optimizer.zero_grad(set_to_none=True)
        recorder = _Recorder()
        with recorder:
            backward = _step(model, inputs, target, optimizer, recorder)
        return Trace(buffers=recorder.buffers(), operators=tuple(recorder.operators), backward=backward)


def _fake(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace the model's tensors by fake ones, tied ones by the same."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = known.setdefault(id(tensor), mode.from_tensor(tensor))


def _sample(name: str, batch: int, sizes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "gpt":
        tokens = torch.zeros(batch, sizes.get("context", 256), dtype=torch.int64)
        return tokens, tokens
    shape = (batch, 224, 224) if name == "unet" else (batch,)
    return torch.zeros(batch, 3, 224, 224), torch.zeros(shape, dtype=torch.int64)


def _step(
    model: torch.nn.Module,
    inputs: torch.Tensor,
    target: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    recorder: _Recorder | None = None,
) -> int:
    output = model(inputs)
    if output.dim() == 3:  # (batch, length, vocabulary)
        output, target = output.flatten(0, 1), target.flatten()
    loss = cross_entropy(output, target)
    del output
    backward = len(recorder.operators) if recorder else 0
    loss.backward()
    optimizer.step()
    return backward


class _Recorder(TorchDispatchMode):
    """Numbers operators, and names the storages they make `t0`, `t1` and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._names: dict[int, str] = {}  # by address, of those alive
        self._rows: dict[str, list[int]] = {}  # lower, upper, nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = self._known(tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        number = len(self.operators)
        writes = [self._named(leaf.untyped_storage(), number) for leaf in _tensors(out)]
        name = f"{number} {func.name().split('::')[-1]}"
        fresh = tuple(dict.fromkeys(each for each in writes if each not in reads or func._schema.is_mutable))
        self.operators.append(Operator(name=name, stream="main", reads=tuple(reads), writes=fresh))
        return out

    def buffers(self) -> tuple[Buffer, ...]:
        end = len(self.operators) + 1
        rows = ((name, *row) for name, row in self._rows.items() if row[2])
        return tuple(
            Buffer(name=name, lower=lower, upper=end if upper < 0 else upper, nbytes=nbytes)
            for name, lower, upper, nbytes in rows
        )

    def _known(self, leaves: list[Any]) -> dict[str, None]:
        addresses = [leaf.untyped_storage()._cdata for leaf in _tensors(leaves)]
        return dict.fromkeys(self._names[each] for each in addresses if each in self._names)

    def _named(self, storage: torch.UntypedStorage, number: int) -> str:
        address = storage._cdata
        if address not in self._names:
            name = f"t{len(self._rows)}"
            self._names[address] = name
            self._rows[name] = [number, -1, storage.nbytes()]
            weakref.finalize(storage, self._gone, address, name).atexit = False
        return self._names[address]

    def _gone(self, address: int, name: str) -> None:
        """Freed after as many operators as have returned by now; the one that made it always has."""
        del self._names[address]
        self._rows[name][1] = max(len(self.operators), self._rows[name][0] + 1)


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def deep_gpt(tensors: int) -> Trace:
    """A GPT with as many blocks as make at least so many tensors a step."""
    two, four = (len(_gpt(depth).buffers) for depth in (2, 4))
    return _gpt(2 + math.ceil((tensors - two) / ((four - two) / 2)))


def _gpt(depth: int) -> Trace:
    return trace("gpt", 4, num_classes=256, width=64, heads=4, depth=depth, context=64)
