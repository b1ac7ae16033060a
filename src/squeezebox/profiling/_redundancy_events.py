"""A recorded step as plain data, and what is known of its operators."""

from __future__ import annotations

import enum
import functools
import hashlib
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

_TRIFLE = 16  # bytes


class Place(NamedTuple):
    """The innermost line of Python outside torch and Squeezebox, and the innermost module."""

    file: str
    line: int
    function: str
    module: str


class View(NamedTuple):
    """What a strided tensor sees of a storage; storages are numbered, and numbers never used again."""

    storage: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether elements share memory because a size was expanded."""
        return any(size > 1 and stride == 0 for size, stride in zip(self.sizes, self.strides, strict=True))


class Trait(enum.Flag):
    """What is known of one call."""

    NONE = 0
    RANDOM = enum.auto()
    EFFECT = enum.auto()  # more than tensors comes of it: numbers for the host, shapes, messages
    OVERWRITES = enum.auto()  # what it writes in place, it does not read
    UNINITIALISED = enum.auto()
    DIFFERENTIATED = enum.auto()  # autograd may keep its tensors
    RECOMPUTED = enum.auto()  # by checkpointing, on purpose
    OWN = enum.auto()  # Squeezebox's, not the user's
    OPAQUE = enum.auto()  # tensors that are not strided, or an operator from elsewhere than torch


@dataclass(kw_only=True, slots=True)
class Event:
    """One operator. ``fresh`` are results in storages of their own; ``waited_bytes`` if the host waits."""

    time: int
    step: int
    operator: str
    place: Place
    phase: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    fresh: tuple[View, ...]
    arguments: Hashable | None  # all but the tensors; None where they cannot be compared
    traits: Trait
    seconds: float = 0.0
    waited_bytes: int | None = None

    @property
    def written_bytes(self) -> int:
        """Into new storages and in place."""
        return sum(view.nbytes for view in (*self.fresh, *self.writes))

    @property
    def is_trifle(self) -> bool:
        """Whether it works on a number or two."""
        return self.written_bytes + sum(view.nbytes for view in self.reads) <= _TRIFLE


@dataclass(kw_only=True, slots=True)
class Life:
    """A storage; ``died`` is the time of the operator before its end, None if it outlived the recording."""

    nbytes: int
    device: str
    owned: bool = False  # a module's parameter or buffer
    died: int | None = None
    escaped: bool = False  # numpy or an address has it: reads and writes are not seen


@dataclass(kw_only=True, slots=True)
class StepEvents:
    """Steps one after another; ``ends`` has the time at which each was over."""

    device: torch.device
    events: list[Event] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def of_step(self, step: int) -> list[Event]:
        """Its operators."""
        return [event for event in self.events if event.step == step]

    def covers(self, view: View) -> bool:
        """Whether the view is all of its storage."""
        return view.nbytes == self.lives[view.storage].nbytes and not view.overlaps_itself

    def escaped(self, views: tuple[View, ...]) -> bool:
        """Whether others than torch have any of them."""
        return any(self.lives[view.storage].escaped for view in views)


_OVERWRITING = {
    "aten::zero_",
    "aten::fill_",
    "aten::copy_",
    "aten::_foreach_zero_",
    "aten::_foreach_copy_",
    "aten::normal_",
    "aten::uniform_",
}
_UNINITIALISED = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
_UNINITIALISED |= {"aten::new_empty_strided", "aten::empty_permuted"}
_REBINDING = {"aten::set_", "aten::resize_", "aten::resize_as_"}  # tensors get another storage, or size
_LITERALS = {"aten::lift_fresh", "aten::lift_fresh_copy"}  # what torch.tensor() has made of Python's numbers
_MASKED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_NORMALISING = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
# Those write to running values, though their schemas do not say so, if argument _TRAINING says so.
_RUNNING: set[int | str] = {3, 4, "running_mean", "running_var"}
_TRAINING = 5


class OperatorFacts(NamedTuple):
    """Of one operator: which arguments it writes to, and what holds for every call."""

    name: str
    written: frozenset[int | str]  # positions and names
    traits: Trait

    def written_by(self, args: tuple[Any, ...]) -> frozenset[int | str]:
        """Which arguments this call writes to."""
        evaluates = self.name in _NORMALISING and not args[_TRAINING]
        return frozenset() if evaluates else self.written

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Equal for equal arguments, tensors apart but for literals; None if they cannot be compared."""
        return _digest(args[0]) if self.is_literal else _comparable((args, kwargs))

    @property
    def is_literal(self) -> bool:
        """Whether it hands over what torch.tensor() has made of Python's numbers."""
        return self.name in _LITERALS


@functools.cache
def facts_of(func: Any) -> OperatorFacts:
    """From its schema and tags, and from the tables above."""
    schema, name = func._schema, func._schema.name
    written = set(_RUNNING) if name in _NORMALISING else set[int | str]()
    overwrites = name in _OVERWRITING
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
            overwrites = overwrites or argument.kwarg_only
    traits = Trait.OVERWRITES if overwrites else Trait.NONE
    drawn = any("Generator" in str(argument.type) for argument in schema.arguments)
    if drawn or torch.Tag.nondeterministic_seeded in func.tags:
        traits |= Trait.RANDOM
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        traits |= Trait.EFFECT
    if func.namespace != "aten" or name in _REBINDING:
        traits |= Trait.OPAQUE | Trait.EFFECT
    if name in _UNINITIALISED:
        traits |= Trait.UNINITIALISED
    return OperatorFacts(name, frozenset(written), traits)


def waited_bytes(
    facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any], as_device: bool
) -> int | None:
    """Bytes that the host waits for, or would if tensors here were ``as_device``; None if it does not."""
    tensors = list(tensors_in((args, kwargs)))
    devices = {tensor.device.type for tensor in tensors} | _named_device(kwargs)
    if facts.name in _COPIES:
        waits = len(devices) > 1 and "cpu" in devices and not _is_non_blocking(args, kwargs)
        return tensors[-1].nbytes if waits else None
    if devices <= {"cpu"} and not as_device:
        return None
    if facts.name in _LITERALS:
        return tensors[0].nbytes if devices - {"cpu"} else None  # torch.tensor(..., device=...) has copied it
    if facts.name in _MASKED:
        masks = [each for each in tensors[1:] if each.dtype in (torch.bool, torch.uint8)]
        return 8 if masks else None
    if facts.name == "aten::_local_scalar_dense":
        return tensors[0].element_size()
    return 8 if Trait.EFFECT in facts.traits and Trait.OPAQUE not in facts.traits else None


def _named_device(kwargs: dict[str, Any]) -> set[str]:
    named = kwargs.get("device")
    return set() if named is None else {torch.device(named).type}


def _is_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """All that are in there."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _comparable(values: Any) -> Hashable | None:
    """Equal for equal arguments, tensors and generators apart."""
    leaves, spec = tree_flatten(values)
    plain = tuple("tensor" if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves)
    found = (str(spec), plain)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _digest(tensor: torch.Tensor) -> Hashable | None:
    if tensor.is_meta:
        return None
    plain = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
    return (tensor.shape, tensor.dtype, tensor.device, hashlib.blake2b(plain.numpy().tobytes()).digest())
