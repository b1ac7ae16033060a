"""One training step as its user runs it: model, samples and loss."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from squeezebox.capture import is_plain
from squeezebox.memory import Elsewhere, lacks_memory
from squeezebox.schema import OptionError, SqueezeboxError, arguments, in_one_line
from squeezebox.steps._models import modules_of, random_states, restored, tensors_in, ungraded

LossFunction = Callable[[Any, Any], torch.Tensor]


def check_sample(sample: Any, loss_fn: LossFunction | None) -> tuple[tuple[Any, Any], LossFunction]:
    """Both; a part of something larger is copied, as batches will be tensors of their own.

    Raises:
        OptionError: they are no inputs and target, or no batch.
    """
    if not isinstance(sample, (tuple, list)) or len(sample) != 2 or loss_fn is None:
        raise OptionError("a training step is known by sample=(inputs, target) and loss_fn=; give both.")
    rows = next((tensor.shape[0] for tensor in tensors_in(sample[0]) if tensor.dim()), None)
    if rows == 0:
        raise OptionError(f"the sample has {described(sample[0])} as inputs, which is no batch; give rows.")
    if any(map(_is_part, tensors_in(sample))):
        sample = mapped(lambda tensor: _copied(tensor) if _is_part(tensor) else tensor, tuple(sample))
    return (sample[0], sample[1]), loss_fn


def check_optimizer(optimizer: object) -> None:
    """OptionError where it is given and no optimizer, but a name or a class."""
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)):
        raise OptionError(
            f"optimizer is {optimizer!r}, not a torch.optim.Optimizer. Give the one that steps the model's "
            "parameters, such as torch.optim.SGD(model.parameters(), lr=0.1), or leave it out."
        )


def _is_part(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def batch_of(sample: tuple[Any, Any]) -> int:
    """First size of the first of the sample's inputs that has one; 0 if none has."""
    return next((tensor.shape[0] for tensor in tensors_in(sample[0]) if tensor.dim()), 0)


def resize(sample: tuple[Any, Any], batch: int, size: int) -> tuple[Any, Any]:
    """The sample with ``size`` instead of ``batch`` rows, cut off or repeated."""
    if size == batch:
        return sample

    def resized(tensor: torch.Tensor, multiple: bool) -> torch.Tensor:
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows == 0 or rows % batch or (rows > batch and not multiple):
            return tensor
        needed = rows // batch * size
        with torch.no_grad():
            repeated = torch.cat([tensor] * math.ceil(needed / rows)) if needed > rows else tensor
            return repeated[:needed].clone().requires_grad_(tensor.requires_grad)

    inputs, target = sample
    return mapped(lambda t: resized(t, False), inputs), mapped(lambda t: resized(t, True), target)


def mapped(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The same tuples, lists and dictionaries with their tensors changed."""
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, Mapping):
        return {key: mapped(change, value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        changed = [mapped(change, value) for value in values]
        return type(values)(*changed) if hasattr(values, "_fields") else type(values)(changed)
    return values


def apart(values: Any) -> Any:
    """The same values cut off from whatever made them, so that backward ends there."""
    if not any(tensor.requires_grad for tensor in tensors_in(values)):
        return values
    return mapped(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), values)


def described(values: Any) -> str:
    """Shapes and dtypes of the tensors within."""
    found = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors_in(values)]
    return ", ".join(found) or f"no tensor ({type(values).__name__})"


@contextlib.contextmanager
def explained(inputs: Any, target: Any) -> Iterator[None]:
    """Errors of the model or the loss say what they were given."""
    try:
        yield
    except SqueezeboxError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        if lacks_memory(error):
            raise
        raise OptionError(
            f"the model or the loss fails on the sample with inputs {described(inputs)} and target "
            f"{described(target)}: {in_one_line(error)}. Give sample=(inputs, target) as a "
            "training step gets them; several inputs are a tuple, or a dict by the model's keywords."
        ) from error


def check_loss(loss: Any) -> None:
    """Refuse what backward cannot start from."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor {described(loss)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise OptionError(f"loss_fn returned {what}; backward starts from one number, such as its mean.")
    if not loss.requires_grad:
        raise OptionError(
            "loss_fn returned a tensor that does not depend on any parameter by differentiable operations "
            "(detached, argmax, frozen parameters, or inside torch.no_grad()), so there is no backward."
        )


Progress = Callable[[int, int, str], None]  # units done, of how many, and what the last one was


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingStep:
    """A model, a sample of (inputs, target), their loss, and the optimizer, if it is known.

    ``noise`` is what may be lost in it (0: nothing); ``folder`` where tensors may be moved to, instead of the
    usual one; ``on_progress`` is called while it is measured. ``moves_weights``: a plan for it
    may move frozen ones to the folder, or pack them. ``splits_weights``: it holds those in 16 bits that are
    only read through a cast. ``slices_gradients``: its updates are in backward, where a large layer's
    gradient may be made some rows at a time.
    """

    model: torch.nn.Module
    sample: tuple[Any, Any]
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer | None = None
    noise: float = 0.0
    folder: Elsewhere | None = None
    on_progress: Progress | None = None
    moves_weights: bool = False
    splits_weights: bool = False
    slices_gradients: bool = False

    @property
    def batch(self) -> int:
        """First size of the first of its inputs that has one; 0 if none has."""
        return batch_of(self.sample)

    def of_size(self, size: int) -> TrainingStep:
        """The same with another batch, of which rows are cut off or repeated."""
        return dataclasses.replace(self, sample=resize(self.sample, self.batch, size))

    def loss_of(self, *outputs: Any) -> torch.Tensor:
        """Of what the model returned."""
        return self.loss_fn(outputs[0] if len(outputs) == 1 else outputs, self.sample[1])

    def loss(self, call: Callable[..., Any]) -> torch.Tensor:
        """``call`` is the model, or takes its place."""
        by_place, by_name = arguments(self.model, self.sample[0])
        return self.loss_of(call(*by_place, **by_name))

    def gradients(
        self, call: Callable[..., Any], used: Mapping[torch.nn.Parameter, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Of the model's parameters, or from ``used`` where backward put them there; nothing of it stays."""
        with self.restored():
            self.model.zero_grad(set_to_none=True)
            loss = self.loss(call)
            with ungraded(loss, self.model):
                loss.backward()
            used = used or {}
            found = [used.get(parameter, parameter.grad) for parameter in self.model.parameters()]
            return [gradient for gradient in found if gradient is not None]

    def loss_modules(self) -> list[torch.nn.Module]:
        """Modules that the loss computes with, but for the model and its parts."""
        own = {*self.model.modules()}
        return [each for each in dict.fromkeys(modules_of(self.loss_fn)) if each not in own]

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Put gradients of the model, its and the loss's buffers, and random states back afterwards."""
        return restored(self.model, *self.loss_modules())

    def is_random(self) -> bool:
        """Whether forward draws random numbers."""
        before = random_states(self.model)
        with self.restored():
            self.loss(self.model)
            return not all(map(torch.equal, before, random_states(self.model)))
