"""One sample of torch's databases: a step in plain PyTorch against the same step under a session."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import squeezebox

_SEED = 1
_AGAIN = 4  # plain steps of each kind that are compared before a difference is blamed on the session
_M_PERTURB = -6  # of glibc's malloc.h
_PLAIN_FAILS = (RuntimeError, AssertionError)  # it has no second derivative, or none for such inputs


class Sample(nn.Module):
    """A call, or a module's forward, of copies of its inputs: what it saves is nobody else's."""

    def __init__(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call, self.values = call, (list(args), kwargs)

    def inputs(self) -> list[Tensor]:
        """Leaves for one step."""
        given = (leaf for leaf in tree_leaves(self.values) if isinstance(leaf, Tensor))
        return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]

    def forward(self, *tensors: Tensor) -> Any:
        copies = (tensor.clone() for tensor in tensors)
        args, kwargs = tree_map_only(Tensor, lambda _: next(copies), self.values)
        return self.call(*args, **kwargs)


@dataclass
class Step:
    """What one step has given, in order."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    second: list[Tensor | None] = field(default_factory=list)

    def equals(self, other: Step) -> bool:
        """To the bit."""
        return not self.difference(other)

    def difference(self, other: Step) -> str:
        """What differs first, or nothing."""
        for name in ("outputs", "gradients", "second"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if len(mine) != len(theirs) or not all(map(equal, mine, theirs)):
                return name
        return ""


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    """The same to the bit; any NaN equals any other."""
    if one is None or other is None:
        return one is other
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    one, other = _real(one), _real(other)
    if not one.is_floating_point():
        return torch.equal(one, other)
    same = (one == other) & (one.signbit() == other.signbit())
    return bool((same | (one.isnan() & other.isnan())).all())


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def stepped(model: Sample, *, second: bool) -> Step:
    """Forward, gradients of inputs and parameters, and theirs; buffers are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.manual_seed(_SEED)
    try:
        return _step(model, second)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _step(model: Sample, second: bool) -> Step:
    inputs = model.inputs()
    wanted = [tensor for tensor in (*inputs, *model.parameters()) if tensor.requires_grad]
    outputs = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    found = Step(outputs=[tensor.detach() for tensor in outputs])
    ends = [tensor for tensor in outputs if tensor.requires_grad]
    if ends and wanted:
        found.gradients = _gradients(ends, wanted, create_graph=second)
        ends = [each for each in found.gradients if each is not None and each.requires_grad]
        if second and ends:
            found.second = _gradients(ends, wanted, create_graph=False)
    return found


def _gradients(ends: list[Tensor], wanted: list[Tensor], *, create_graph: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(_SEED)
    given = [torch.randn(end.shape, generator=generator, dtype=torch.float64).to(end.dtype) for end in ends]
    return list(torch.autograd.grad(ends, wanted, given, allow_unused=True, create_graph=create_graph))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a sample: "equal", "skipped" (plain steps fail, or differ) or "refused"; and why."""

    kind: str
    why: str = ""


def compared(model: Sample, *, second: bool, **options: Any) -> Outcome:
    """A step under ``attach(**options)`` against a plain one; AssertionError where it is not as promised.

    Without ``noise`` all is equal to the bit. With it outputs are, and gradients finite where plain's are.
    Two steps are made then: one with statistics of bounds that were guessed, one with those that follow.
    """
    try:
        plain = stepped(model, second=second)
    except _PLAIN_FAILS as error:
        if not second:
            return Outcome("skipped", f"plain fails: {type(error).__name__}")
        return compared(model, second=False, **options)
    noisy = "noise" in options
    holds = _is_close if noisy else Step.equals
    try:
        found = _attached(model, 2 if noisy else 1, second, options)
    except squeezebox.UnsupportedModelError as error:
        return Outcome("refused", str(error))
    if all(holds(plain, each) for each in found):
        return Outcome("equal")
    if _differs_by_itself(model, plain, second):
        return Outcome("skipped", "plain differs from run to run")
    differences = [plain.difference(each) for each in found]
    raise AssertionError(f"not as in plain PyTorch: {', '.join(filter(None, differences))}")


def _attached(model: Sample, steps: int, second: bool, options: dict[str, Any]) -> list[Step]:
    """Steps under a session that leaves no tensor alone for being small."""
    session = squeezebox.attach(model, **options)
    session.engine.store.small_bytes = 0
    try:
        return [stepped(model, second=second) for _ in range(steps)]
    finally:
        session.detach()


def _is_close(plain: Step, noisy: Step) -> bool:
    """Equal outputs; gradients of the same kind, finite where the plain ones are."""
    if not Step(plain.outputs).equals(Step(noisy.outputs)):
        return False
    same_count = len(plain.gradients) == len(noisy.gradients)
    return same_count and all(map(_as_finite, plain.gradients, noisy.gradients))


def _as_finite(plain: Tensor | None, noisy: Tensor | None) -> bool:
    if plain is None or noisy is None:
        return plain is noisy
    if (plain.shape, plain.dtype, plain.layout) != (noisy.shape, noisy.dtype, noisy.layout):
        return False
    return bool((_real(noisy).isfinite() | ~_real(plain).isfinite()).all())


def _differs_by_itself(model: Sample, plain: Step, second: bool) -> bool:
    """Whether plain steps differ from run to run, or with what is in memory that nobody has written.

    Such as ``linalg.lstsq`` of driver gelsy, which reads pivots there that are zero or not.
    """
    for byte in (0x00, 0x01, 0xFF, None):
        with _new_memory_of(byte):
            if any(not plain.equals(stepped(model, second=second)) for _ in range(_AGAIN)):
                return True
    return False


@contextmanager
def _new_memory_of(byte: int | None) -> Iterator[None]:
    """Within it the C library's memory is new with this byte everywhere; glibc can, others leave it."""
    perturb = getattr(ctypes.CDLL(None), "mallopt", None)
    if perturb is None or byte is None:
        yield
        return
    perturb(_M_PERTURB, (byte ^ 0xFF) or 0x100)  # it takes the complement, and 0 for leaving it
    try:
        yield
    finally:
        perturb(_M_PERTURB, 0)
