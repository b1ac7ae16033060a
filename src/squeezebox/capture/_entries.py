"""What is noted of a saved storage, what autograd holds instead, and tensors that somebody else holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox import codecs
from squeezebox.capture._lineage import Geometry, Origin
from squeezebox.capture._rules import OTHER, Rule
from squeezebox.memory import Absent, Lender
from squeezebox.schema import Role, SavedTensor

if TYPE_CHECKING:
    from squeezebox.capture._held import Held, Packed, Sign
    from squeezebox.capture._overwrites import Stamp


@dataclass(slots=True)
class Row:
    """The report's view of one entry; outlives it."""

    key: str
    module: str
    rule: Rule
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    roles: list[Role] = field(default_factory=list)
    exact: bool = False  # held so whatever may be lost
    reads_values: bool = False  # somebody does, so that they are there
    packed: dict[str, int] = field(default_factory=dict)
    bound: float = 0.0  # in the unit the controller gave it
    scaled: bool = False  # which is each channel's or row's standard deviation
    absolute_bound: float = 0.0
    slot: int | None = None  # in a device's arena, which alone knows the bytes

    @property
    def dense(self) -> bool:
        """Whether zeros carry no meaning."""
        return self.rule.dense

    @property
    def reads_sign(self) -> bool:
        """Whether backward asks which elements are positive."""
        return Role.RELU_OUTPUT in self.roles

    @property
    def packed_bytes(self) -> int:
        """Bytes held for the storage in all its packed forms."""
        return sum(self.packed.values())

    def freeze(self, noise_share: float | None, use: codecs.ArenaUse | None) -> SavedTensor:
        """The row as the report's frozen noun; ``use`` is that of the device's arena."""
        on_device = 0 if self.slot is None or use is None else use.tensors[self.slot]
        return SavedTensor(
            key=self.key,
            role=self.rule.role,
            roles=tuple(dict.fromkeys(self.roles)),
            module=self.module,
            shape=self.shape,
            dtype=self.dtype,
            saved_bytes=self.saved_bytes,
            packed_bytes=self.packed_bytes + on_device,
            codec="+".join(self.packed) or "none",
            bound=self.absolute_bound,
            noise_share=noise_share,
        )


class Entry:
    """One saved storage, and what is held of it.

    All of its values, signs by whether NaN counts as positive, and what exact codecs hold, by their options.
    """

    def __init__(self, tensor: torch.Tensor, row: Row) -> None:
        storage = tensor.untyped_storage()
        self.storage = StorageWeakRef(storage)
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.numel = storage.nbytes() // tensor.element_size()
        self.values: Held | None = None
        self.signs: dict[bool, Sign] = {}
        self.parts: dict[str, Packed] = {}
        self.origin: Origin | None = None
        self.device = tensor.device
        self.row = row

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of this entry's storage with the contents that were packed."""
        return not self.storage.expired() and self.version == tensor._version and self.dtype == tensor.dtype


class Step:
    """Lives as long as a handle of it does."""

    __slots__ = ("__weakref__", "is_over")

    def __init__(self) -> None:
        self.is_over = False  # another one has begun


@dataclass(slots=True, eq=False)
class Handle:
    """What autograd holds instead of one saved tensor."""

    step: Step
    tensor: torch.Tensor | None
    geometry: Geometry
    version: int
    rule: Rule = OTHER
    is_pending: bool = False  # whether it is still to be said what is held
    entry: Entry | None = None
    held: Held | None = None  # None: the tensor itself, or nothing, where backward reads its shape
    exact: torch.Tensor | None = None  # kept with what is held where a check is due
    stamp: Stamp | None = None  # where overwriting is looked for
    override: torch.Tensor | None = None  # what a check or a probe wants backward to read
    lender: Lender | None = None  # of a weight that is elsewhere: backward gets it from there again

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor while it is there."""
        return 0 if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


def held_exactly(refused: Mapping[str, str]) -> tuple[str, ...]:
    """One note for each reason why tensors, by key, were to be packed and are kept."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in refused.items():
        by_reason.setdefault(reason, []).append(key)
    return tuple(
        f"{len(keys)} tensor{'s' * (len(keys) > 1)} ('{keys[0]}' first) held exactly: {reason}"
        for reason, keys in by_reason.items()
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its storage seen through strides, and nothing else."""
    strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def plain_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor, if it is plain."""
    return (tensor,) if is_plain(tensor.data) else ()


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Shape, strides and offset of one that has them."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (), (), 0
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


class Owned:
    """Parameters, buffers, the caller's inputs, by storage; and small parts of what is there before forward.

    Args:
        has_storage: whether a tensor is its storage seen through strides. All others count as owned.
    """

    def __init__(self, has_storage: Callable[[torch.Tensor], bool] = is_plain) -> None:
        self._has_storage = has_storage
        self._storages: dict[int, StorageWeakRef] = {}
        self._made: set[int] = set()  # storages that forward has made, of tensors without a gradient

    def add(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Name more of them; those are returned that have a storage."""
        owned = [
            tensor
            for given in tensors
            for tensor in (given.parts() if isinstance(given, Absent) else (given,))
            if self._has_storage(tensor)
            or (type(tensor) is torch.nn.Parameter and self._has_storage(tensor.data))
        ]
        for tensor in owned:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)
        return owned

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of them, or a view of a parameter."""
        if not self._has_storage(tensor) or isinstance(tensor._base, torch.nn.Parameter):
            return True
        owner = self._storages.get(tensor.untyped_storage()._cdata)
        return (owner is not None and not owner.expired()) or self._is_part(tensor)

    def _is_part(self, tensor: torch.Tensor) -> bool:
        """Whether it is at most half of something larger: a batch's labels of a data set's, say."""
        base = tensor._base
        if base is None or base.requires_grad or tensor.requires_grad:
            return False
        storage = tensor.untyped_storage()
        return (
            2 * tensor.numel() * tensor.element_size() <= storage.nbytes()
            and storage._cdata not in self._made
        )

    def note_made(self, out: Any) -> None:
        """Forward's operator has returned this."""
        if isinstance(out, torch.Tensor):
            if not out.requires_grad and out._base is None and self._has_storage(out):
                self._made.add(out.untyped_storage()._cdata)
        elif isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
            for each in out:
                self.note_made(each)

    def clear(self) -> None:
        """Forget all."""
        self._storages.clear()
        self._made.clear()
