"""A training step on fake tensors: every allocation and its end, without the memory."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from squeezebox.schema import OptionError

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw")
Watch = Callable[[torch.nn.Module, torch.Tensor], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Bytes of one training step from the second on, when optimizer state is there and gradients are not.

    What operators take and give back before they return (blocked copies in convolutions) is not seen.
    ``peak_phase`` is ``"forward"``, ``"backward"`` or ``"optimizer"``.
    """

    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    input_bytes: int
    peak_bytes: int
    peak_phase: str


def simulate(
    model: torch.nn.Module | Callable[[], Any],
    *,
    input_shape: Sequence[int],
    batch: int,
    optimizer: str,
    dtype: torch.dtype | None,
    input_dtype: torch.dtype | None,
    watch: Watch,
) -> Simulation:
    """Run forward, the sum of all outputs and backward on fake tensors, and add the optimizer's step.

    Args:
        model: a module, which is left alone, or what makes one; that is built on the
            meta device where it can be, so that it uses no memory either.
        input_shape: one sample's shape, without the batch.
        batch: samples a step.
        optimizer: one of OPTIMIZERS, without weight decay.
        dtype: of parameters, buffers and a floating-point input; None leaves the model as it is.
        input_dtype: of the input (None: ``dtype``).
        watch: gives the context in which forward runs, from the fake model and its input.

    Raises:
        OptionError: an argument is out of range, or the model does not take such an input.
    """
    _check(input_shape, batch, optimizer)
    original = _made(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = _fake_copy(original, dtype).train()
        inputs = torch.zeros((batch, *input_shape), dtype=input_dtype or dtype or _dtype(fake))
        live = _Liveness([*fake.parameters(), *fake.buffers(), inputs])
        state = _state_bytes(fake, optimizer)
        with live:
            _step(fake, inputs, live, watch)
        gradients = [p.grad for p in fake.parameters() if p.grad is not None]
        gradient_bytes = _nbytes(gradients)
        live.note("optimizer", gradient_bytes + _transient_bytes(gradients, optimizer))
        parts = {
            "parameter_bytes": _nbytes(fake.parameters()),
            "buffer_bytes": _nbytes(fake.buffers()),
            "input_bytes": _nbytes([inputs]),
            "optimizer_bytes": state,
        }
    return Simulation(
        **parts,
        gradient_bytes=gradient_bytes,
        peak_bytes=sum(parts.values()) + live.peak_bytes,
        peak_phase=live.peak_phase,
    )


def _check(input_shape: Sequence[int], batch: int, optimizer: str) -> None:
    if batch < 1:
        raise OptionError(f"batch {batch} is below 1: a step needs at least one sample.")
    if any(size < 1 for size in input_shape):
        raise OptionError(
            f"input shape {tuple(input_shape)} has a size below 1; give sizes such as (3, 224, 224)."
        )
    if optimizer not in OPTIMIZERS:
        raise OptionError(f"no optimizer '{optimizer}'; there are {', '.join(OPTIMIZERS)}.")


def _made(model: torch.nn.Module | Callable[[], Any]) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    try:
        with torch.device("meta"):
            made = model()
    except (RuntimeError, NotImplementedError):  # it reads values while it is built: so let it have some
        made = model()
    if isinstance(made, torch.nn.Module):
        return made
    name = getattr(model, "__name__", repr(model))
    raise OptionError(
        f"'{name}' returned a {type(made).__name__}, not a torch.nn.Module; name a function or class that "
        "returns the model."
    )


def _fake_copy(model: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """The model with every tensor replaced by a fake one, on the CPU if it is on no device yet."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        device = "cpu" if tensor.is_meta else tensor.device
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
    for module in model.modules():
        others = [*module.buffers(recurse=False), *vars(module).values()]
        for tensor in others:
            if isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = fake(tensor)
    return copy.deepcopy(model, memo)


def _step(model: torch.nn.Module, inputs: torch.Tensor, live: _Liveness, watch: Watch) -> None:
    try:
        with _quiet(), watch(model, inputs):
            loss = _loss(model(inputs))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise OptionError(
            f"the model's forward fails on an input of shape {tuple(inputs.shape)} and dtype {inputs.dtype}: "
            f"{error}. Check the input's shape and dtype; a model that reads tensors' values in Python "
            "cannot be estimated."
        ) from error
    live.phase = "backward"
    loss.backward()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of failures on fake tensors: they are raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _loss(outputs: Any) -> torch.Tensor:
    """The sum of every output that a gradient can flow from."""
    found = [leaf for leaf in _leaves(outputs) if leaf.requires_grad]
    if not found:
        raise OptionError(
            f"the model's output ({type(outputs).__name__}) has no tensor that requires gradients, so there "
            "is no backward to estimate; unfreeze a parameter."
        )
    return torch.stack([leaf.sum() for leaf in found]).sum() if len(found) > 1 else found[0].sum()


def _leaves(outputs: Any) -> Iterator[torch.Tensor]:
    values = outputs.values() if isinstance(outputs, dict) else tree_leaves(outputs)
    return (leaf for leaf in values if isinstance(leaf, torch.Tensor))


class _Liveness(TorchDispatchMode):
    """Adds up the storages that operators make, until each one is gone."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.peak_bytes = 0
        self.peak_phase = "forward"
        self._live_bytes = 0
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._add(leaf.untyped_storage())
        self.note(self.phase, self._live_bytes)
        return out

    def note(self, phase: str, nbytes: int) -> None:
        """So much was live at some moment of ``phase``."""
        if nbytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = nbytes, phase

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._storages:
            self._storages[address] = weakref.finalize(storage, self._remove, address, storage.nbytes())
            self._live_bytes += storage.nbytes()

    def _remove(self, address: int, nbytes: int) -> None:
        del self._storages[address]
        self._live_bytes -= nbytes


def _state_bytes(model: torch.nn.Module, optimizer: str) -> int:
    """What torch's optimizers keep: one momentum, or two moments and a step count a parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer == "sgd":
        return 0
    return _nbytes(trained) if optimizer == "sgd-momentum" else 2 * _nbytes(trained) + 4 * len(trained)


def _transient_bytes(gradients: Sequence[torch.Tensor], optimizer: str) -> int:
    """Adam's root and quotient, of one parameter at a time on a CPU."""
    largest = max((_nbytes([gradient]) for gradient in gradients), default=0)
    return 2 * largest if optimizer.startswith("adam") else 0


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.get_default_dtype())
