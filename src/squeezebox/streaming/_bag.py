"""A training step on several images of different sizes, of which each may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from squeezebox.schema import OptionError
from squeezebox.streaming._given import require_modes
from squeezebox.streaming._held import modules_of
from squeezebox.streaming._rows import is_continuous
from squeezebox.streaming._step import StreamedStep


class BagStep:
    """Loss and gradients of a bag of images of any sizes, each computed strip by strip.

    ``step(images, target)`` adds to gradients what ``loss_fn(head([encoder(image) for image in images]),
    target).backward()`` would. What the encoder gives has no rows, such as a vector for an image. First all
    images are encoded without gradients; head and loss give the derivatives by what was encoded; then each
    image takes a :class:`StreamedStep` with these. That is a forward more than all images take at once.

    For attention over all pixels of all images, the encoder gives an image's weighted mean and the logsumexp
    of its scores; the softmax of the images' logsumexps weighs their means.

    Args:
        encoder: of one image, for StreamedStep; it is traced once for each shape.
        head: a module of the list of what the encoder gave, run as a whole.
        loss_fn: ``loss_fn(output, target)`` gives one number.
        options: of :class:`StreamedStep`, such as ``memory="1GiB"``; not ``checkpoint``.

    Raises:
        OptionError: an option is out of range, or checkpoint is given.
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Module, loss_fn: Callable[[Any, Any], Tensor], **options: Any
    ) -> None:
        if options.get("checkpoint") is not None:
            raise OptionError("checkpoint= keeps one image's step, and not a bag's; leave it out.")
        self._encoder, self._head, self._loss_fn = encoder, head, loss_fn
        self._step = StreamedStep(encoder, _product, **options)

    def __call__(self, images: Sequence[Any], target: Any) -> Tensor:
        """One step. An exception leaves gradients and buffers as they were.

        Args:
            images: as StreamedStep takes one; at least one.
            target: what the loss takes.

        Returns:
            The loss, without a graph.

        Raises:
            OptionError: there is no image, or the loss gives more than one number.
            UnsupportedModelError: the encoder cannot be streamed exactly, or gives a value for every row.
            BudgetError, OutputError: as StreamedStep.
        """
        require_modes()
        device = next((each.device for each in self._encoder.parameters()), torch.device("cpu"))
        with self._all_or_nothing(), torch.enable_grad():
            buffers = [each.clone() for each in self._encoder.buffers()]
            draws, encoded = [], []
            for image in self._required(images):
                draws.append(_random(device))
                encoded.append(pytree.tree_map_only(Tensor, _leaf, self._encode(image)))
            loss = self._loss_fn(self._head(encoded), target)
            if loss.numel() != 1:
                raise OptionError(f"loss_fn gives {loss.numel()} numbers; give one, such as their mean.")
            loss.backward()
            after = _random(device)
            for buffer, value in zip(self._encoder.buffers(), buffers, strict=True):
                buffer.copy_(value)
            for image, draw, each in zip(images, draws, encoded, strict=True):
                _draw_again(draw, device)  # the same dropout behind pooling
                self._step(image, [leaf.grad.flatten() for leaf in _derived(each)])
            _draw_again(after, device)
        return loss.detach().reshape(())

    def predict(self, images: Sequence[Any]) -> Any:
        """What the head gives for a bag, without gradients."""
        with torch.no_grad():
            return self._head([self._encode(image) for image in self._required(images)])

    def _encode(self, image: Any) -> Any:
        return self._step.evaluate([(image, None)], _encoded)[0]

    def _required(self, images: Sequence[Any]) -> Sequence[Any]:
        if len(images) == 0:
            raise OptionError("the bag has no image; give at least one.")
        return images

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Gradients are added at the end; where it fails, they and the buffers are as before."""
        modules = [self._encoder, self._head, *modules_of(self._loss_fn)]
        parameters = list({parameter for each in modules for parameter in each.parameters()})
        buffers = [buffer for each in modules for buffer in each.buffers()]
        values, before = [each.clone() for each in buffers], [each.grad for each in parameters]
        for each in parameters:
            each.grad = None
        is_done = False
        try:
            yield
            is_done = True
        finally:
            for each, gradient in zip(parameters, before, strict=True):
                if not is_done or each.grad is None:
                    each.grad = gradient
                elif gradient is not None:
                    each.grad = gradient + each.grad
            if not is_done:
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)


def _encoded(output: Any, target: None) -> Any:
    return output


def _product(output: Any, gradients: list[Tensor]) -> Any:
    """Has the gradients by what was encoded as its own."""
    pairs = zip(_floating(output), gradients, strict=True)
    return sum((leaf.flatten() * gradient).sum() for leaf, gradient in pairs)


def _floating(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [each for each in leaves if isinstance(each, Tensor) and is_continuous(each)]


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(is_continuous(value))


def _derived(encoded: Any) -> list[Any]:
    leaves = _floating(encoded)
    for each in leaves:
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    return leaves


def _random(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _draw_again(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
