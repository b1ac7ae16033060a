"""What a caller gets of an image by rows: predictions as strips make them, and the image's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from squeezebox.schema import OptionError
from squeezebox.streaming._files import overlap, release
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._rows import Part
from squeezebox.streaming._spool import Layout, Store


class Outputs:
    """The outputs of one image, in the caller's arrays where there are some, else in new tensors.

    Args:
        streamed: whose program's outputs they are.
        out: None, or arrays in the outputs' form, None among them for a new tensor.
        device: of new tensors.

    Raises:
        OptionError: an array has another shape or type than the output, cannot be written, or is none.
    """

    def __init__(self, streamed: Streamed, out: Any, device: torch.device) -> None:
        program = streamed.program
        self._nodes, self._form = program.outputs, program.form
        given, form = pytree.tree_flatten(out)
        if out is None:
            given = [None] * len(self._nodes)
        elif form != self._form:
            names = pytree.tree_unflatten(["array"] * len(self._nodes), self._form)
            raise OptionError(
                f"out is a {type(out).__name__} of {len(given)} parts, and the model gives "
                f"{len(self._nodes)}; give {'one array' if names == 'array' else names}."
            )
        self.given = given
        self._arrays = [
            self._array(node, array, node in streamed.maps, device)
            for node, array in zip(self._nodes, given, strict=True)
        ]

    def _array(self, node: Any, array: Any, has_rows: bool, device: torch.device) -> Tensor | None:
        if array is not None:
            return writable("out", array, node.meta["val"])
        value = node.meta["val"] if has_rows else None
        return None if value is None else torch.empty(value.shape, dtype=value.dtype, device=device)

    @property
    def arrays(self) -> list[tuple[Node, Tensor]]:
        """Where each output's values go; an output may be given twice."""
        pairs = zip(self._nodes, self._arrays, strict=True)
        return [(node, array) for node, array in pairs if array is not None]

    def values(self, known: Mapping[Node, Any]) -> Any:
        """All of them, of which those without rows are ``known``."""
        found = []
        for node, given, array in zip(self._nodes, self.given, self._arrays, strict=True):
            value = known[node] if node in known else node if array is None else array
            value = value.detach() if isinstance(value, Tensor) else value
            if array is not None and node in known:
                array.copy_(value)
            found.append(value if given is None else given)
        return pytree.tree_unflatten(found, self._form)


class Onto:
    """A store, and arrays of the caller's: ``maps`` are written, and ``gradients`` added to.

    ``files`` are the arrays as they were given: of mapped ones no pages stay in the process.
    """

    def __init__(
        self,
        store: Store,
        content: Layout,
        streamed: Streamed,
        maps: list[tuple[Node, Tensor]],
        gradients: Mapping[Node, Tensor],
        files: Sequence[Any],
    ) -> None:
        self._store, self._stored, self._streamed = store, content.tensors, streamed
        self._files = files
        self._maps = [(node, array) for node, array in maps if node in streamed.maps]
        self._gradients = gradients

    def read(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
        """The store's."""
        return self._store.read(node, start, stop, columns)

    def write(self, node: Node, start: int, x: Tensor, columns: Part | None = None) -> None:
        """To every array of the node, and to the store if it keeps the node."""
        for each, array in self._maps:
            if each is node:
                part, apart = self._parts(array, node, start, x, columns)
                part.copy_(apart)
                self._release()
        if node in self._stored:
            self._store.write(node, start, x, columns)

    def gradient(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor | None:
        """The store's."""
        return self._store.gradient(node, start, stop, columns)

    def add(self, node: Node, start: int, gradient: Tensor, columns: Part | None = None) -> None:
        """To the array of the node, or to the store."""
        array = self._gradients.get(node)
        if array is None:
            self._store.add(node, start, gradient, columns)
        else:
            part, apart = self._parts(array, node, start, gradient, columns)
            part.add_(apart.to(array.device))
            self._release()

    def _release(self) -> None:
        for array in self._files:
            release(array)

    def _parts(
        self, array: Tensor, node: Node, start: int, x: Tensor, columns: Part | None
    ) -> tuple[Tensor, Tensor]:
        """Where a part lies in an array, and the part, both with the streamed axis apart."""
        rows = self._streamed.rows[node]
        apart = rows.apart(x)
        stop = start + apart.shape[rows.dim + 1]
        return self._streamed.part(node, rows.apart(array), start, stop, columns), apart


def writable(name: str, array: Any, value: Any) -> Tensor:
    """The array as a tensor with the same memory.

    Raises:
        OptionError: it is no array like ``value``, a tensor; or it cannot be written.
    """
    shape = getattr(value, "shape", None)
    if shape is None:
        raise OptionError(f"{name} has an array where the model gives {value!r}; give None there.")
    wanted = f"{tuple(shape)} of {value.dtype}"
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise OptionError(f"{name} is read-only; open it with mode='r+' or 'w+', as {wanted}.")
        try:
            array = torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{name} must be {wanted}, in this machine's order: {error}") from error
    if not isinstance(array, Tensor):
        raise OptionError(f"{name} is a {type(array).__name__}; give a tensor or a numpy array of {wanted}.")
    if array.shape != shape or array.dtype != value.dtype:
        raise OptionError(f"{name} is {tuple(array.shape)} of {array.dtype}; it must be {wanted}.")
    if any(size > 1 and stride == 0 for size, stride in zip(array.shape, array.stride(), strict=True)):
        raise OptionError(f"{name} has one place for several elements, as after expand(); make it {wanted}.")
    return array.detach()


def require_apart(name: str, array: Any, read: Iterable[Any]) -> None:
    """OptionError where an array that is written shares memory or a file with one that is read meanwhile."""
    for other in read:
        if overlap(array, other):
            raise OptionError(
                f"{name} shares memory with what the step reads, which would change while strips are made; "
                "give another array."
            )
