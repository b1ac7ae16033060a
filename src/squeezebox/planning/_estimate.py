"""What a plain step would hold, on fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from squeezebox.capture import observing, refuse_transforms, saved_bytes
from squeezebox.profiling import Simulation, fake_like, loads_named, simulate
from squeezebox.reports import Estimate
from squeezebox.schema import OptionError
from squeezebox.steps import LossFunction, batch_of, check_loss, check_sample, device_of, resize

INPUT_SHAPE = (3, 224, 224)
BATCH = 32


def estimate(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    input_shape: Sequence[int] | None = None,
    batch: int | None = None,
    sample: tuple[Any, Any] | Callable[[], tuple[Any, Any]] | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: str | torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] = "sgd-momentum",
    dtype: torch.dtype | str | None = None,
    input_dtype: torch.dtype | str | None = None,
    run: bool = True,
    load: str = "balanced",
) -> Estimate:
    """Say what a plain training step would hold, without training and without using the memory.

    Forward, loss, backward and the optimizer's step run on fake tensors, which compute nothing; the model's
    forward hooks see these too. On a CPU
    convolutions and their like are run all the same, each on a few samples of zeros, for what they take and
    give back before they return. Where sizes follow from what a router chooses, the estimate assumes a
    ``load``. Where they follow from other values, a copy of the model takes the step on the sample: that uses
    the memory. The estimate says which.

    Args:
        model: a module (left alone), or a function or class that makes one.
        input_shape: one sample's shape, without the batch (default: 3, 224, 224).
        batch: samples a step (default: 32).
        sample: instead of these: inputs (a tensor, a tuple, or a dict by the model's keywords) and target, of
            which shapes and dtypes are read; or a function that makes them, without using memory. With
            values, on real devices, a step can be taken on it.
        loss_fn: ``loss_fn(output, target)`` is what backward starts from (default: the sum of all outputs).
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw"; the model's own; or what makes one of parameters.
        dtype: of the model and floating-point inputs, such as "bfloat16" (default: as they are).
        input_dtype: of the input, such as "int64" for tokens (default: ``dtype``).
        run: whether a copy may take that step on the sample; without, an error says what fake tensors cannot.
        load: how tokens choose experts: "balanced", in turn; "worst", all of them the same ones.

    Raises:
        OptionError: an argument is out of range, or the model does not take such an input.
        UnsupportedModelError: called inside a transform of torch.func, or where hooks are disabled.
    """
    simulation, why_real = simulated(
        model,
        input_shape=input_shape,
        batch=batch,
        sample=sample,
        loss_fn=loss_fn,
        optimizer=optimizer,
        dtype=dtype,
        input_dtype=input_dtype,
        run=run,
        load=load,
    )
    named = optimizer if isinstance(optimizer, str) else simulation.optimizer
    return _as_estimate(simulation, saved_bytes(simulation.watched), named, why_real)


def simulated(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    input_shape: Sequence[int] | None = None,
    batch: int | None = None,
    sample: tuple[Any, Any] | Callable[[], tuple[Any, Any]] | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: str | torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] = "sgd-momentum",
    dtype: torch.dtype | str | None = None,
    input_dtype: torch.dtype | str | None = None,
    run: bool = True,
    load: str = "balanced",
    size: int | None = None,
    trains: bool = True,
) -> tuple[Simulation, str]:
    """The step that :func:`estimate` tells of, and why it was taken on real tensors ("" if it was not).

    The other arguments are its own.

    Args:
        model: see :func:`estimate`.
        input_shape: see above.
        batch: see above.
        sample: see above.
        loss_fn: see above.
        optimizer: see above.
        dtype: see above.
        input_dtype: see above.
        run: see above.
        load: see above.
        size: samples instead of the batch that these say: some of them, or the same ones again.
        trains: without, there is only a forward, in evaluation mode and without autograd.
    """
    refuse_transforms()
    loads_named(load)
    kind, input_kind = _dtype_named(dtype), _dtype_named(input_dtype)
    if kind is not None and not kind.is_floating_point:
        raise OptionError(f"dtype {kind} has no gradients; give one such as float32 or bfloat16.")
    if input_shape is not None and not isinstance(input_shape, Sequence):
        raise OptionError(
            f"input_shape {input_shape!r} is no sequence of sizes; give one such as (3, 224, 224)."
        )
    if sample is not None and (input_shape, batch, input_dtype) != (None, None, None):
        raise OptionError("sample says input_shape, batch and input_dtype already; give it without these.")
    shape = (BATCH if batch is None else batch, *(INPUT_SHAPE if input_shape is None else input_shape))
    _check(shape)

    def repeated(given: tuple[Any, Any]) -> tuple[Any, Any]:
        return given if size is None else resize(given, batch_of(given), size)

    def make_sample(fake: torch.nn.Module) -> tuple[Any, Any]:
        if sample is None:
            of_input = input_kind or _dtype_of(fake, kind, len(shape))
            return torch.zeros((size or shape[0], *shape[1:]), dtype=of_input, device=device_of(fake)), None
        given, _ = check_sample(sample() if callable(sample) else sample, loss_fn or _no_loss)
        return repeated(fake_like(given, kind))

    def values() -> tuple[Any, Any] | None:
        given = None if not run else sample() if callable(sample) else sample
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        if given is None or any(type(each.data) is not torch.Tensor or each.is_meta for each in tensors):
            return None
        return repeated(_of_kind(given, kind))

    return simulate(
        model,
        sample=make_sample,
        loss_fn=functools.partial(_checked, loss_fn) if loss_fn is not None and trains else loss_fn,
        optimizer=optimizer,
        dtype=kind,
        watch=observing,
        values=values,
        load=load,
        trains=trains,
    )


def _as_estimate(simulation: Simulation, saved: dict[str, int], optimizer: str, why_real: str) -> Estimate:
    peak = simulation.trace.peak()
    shapes = simulation.input_shapes
    return Estimate(
        input_shape=shapes[0][1:] if shapes else (),
        batch=shapes[0][0] if shapes and shapes[0] else 0,
        optimizer=optimizer,
        parameter_bytes=simulation.parameter_bytes,
        gradient_bytes=simulation.gradient_bytes,
        buffer_bytes=simulation.buffer_bytes,
        optimizer_bytes=simulation.optimizer_bytes,
        input_bytes=simulation.input_bytes,
        saved_bytes=sum(saved.values()),
        saved=saved,
        peak_bytes=peak.nbytes,
        peak_phase=peak.call.phase if peak.call is not None else "forward",
        peak=peak,
        why_real=why_real,
        assumed_load=simulation.load,
    )


def _checked(loss_fn: LossFunction, output: Any, target: Any) -> torch.Tensor:
    """The loss; OptionError where backward cannot start from it."""
    loss = loss_fn(output, target)
    check_loss(loss)
    return loss


def _no_loss(output: Any, target: Any) -> torch.Tensor:
    """Stands for the sum of all outputs where a sample is checked."""
    raise NotImplementedError


def _check(shape: tuple[int, ...]) -> None:
    if not all(isinstance(size, Integral) for size in shape):
        raise OptionError(f"batch and input shape are no whole numbers: {', '.join(map(repr, shape))}.")
    if shape[0] < 1:
        raise OptionError(f"batch {shape[0]} is below 1: a step needs at least one sample.")
    if any(size < 1 for size in shape):
        raise OptionError(f"input shape {shape[1:]} has a size below 1; give sizes such as (3, 224, 224).")


def _dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype):
        return found
    raise OptionError(f"'{dtype}' is no dtype of torch; name one such as float32, bfloat16 or int64.")


def _of_kind(sample: Any, kind: torch.dtype | None) -> tuple[Any, Any]:
    """Inputs and target, what is floating-point in that dtype."""

    def cast_to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(kind) if kind is not None and tensor.is_floating_point() else tensor

    inputs, target = tree_map_only(torch.Tensor, cast_to, sample)
    return inputs, target


def _dtype_of(model: torch.nn.Module, kind: torch.dtype | None, dims: int) -> torch.dtype:
    """Of the input: tokens for a model that embeds them and takes a shape like 128."""
    if dims == 2 and any(isinstance(module, torch.nn.Embedding) for module in model.modules()):
        return torch.int64
    own = next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())
    return kind or own
