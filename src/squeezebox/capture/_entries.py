"""What is noted of a saved storage, and what autograd holds instead of a tensor that sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox import codecs
from squeezebox.capture._layouts import Scale
from squeezebox.capture._lineage import Origin, Recipe
from squeezebox.capture._rules import OTHER, Rule
from squeezebox.memory import HostSlot, Slot
from squeezebox.schema import Role, SavedTensor


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
    reads_values: bool = False  # somebody does, so that they are there
    packed: dict[str, int] = field(default_factory=dict)
    bound: float = 0.0  # in the unit the controller gave it
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
    """One saved storage. ``packed`` maps a form ("values", "sign", ...) to packed bytes."""

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "kept",
        "numel",
        "origin",
        "packed",
        "ready",
        "recipe",
        "row",
        "scaled",
        "slot",
        "storage",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, row: Row) -> None:
        storage = tensor.untyped_storage()
        self.storage = StorageWeakRef(storage)
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.numel = storage.nbytes() // tensor.element_size()
        self.packed: dict[str, codecs.Packed] = {}
        self.kept: torch.Tensor | None = None
        self.slot: Slot | HostSlot | None = None
        self.origin: Origin | None = None
        self.recipe: Recipe | None = None
        self.ready: torch.Tensor | None = None  # flat; made again, or wanted by a recipe before its own use
        self.device = tensor.device
        self.scaled = False  # whether the bound of its values is in units of the
        self.row = row

    @property
    def scale(self) -> Scale | None:
        """Each channel's or row's."""
        if not self.scaled:
            return None
        packed = self.packed["values"]
        return Scale(factors=packed.payload[-1], inner=int(packed.meta["inner"]))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of this entry's storage with the contents that were packed."""
        return not self.storage.expired() and self.version == tensor._version and self.dtype == tensor.dtype


class Handle:
    """What autograd holds instead of one saved tensor."""

    __slots__ = ("entry", "exact", "form", "geometry", "override", "rule", "step", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, step: object) -> None:
        self.step = step
        self.tensor: torch.Tensor | None = tensor
        self.geometry = _geometry(tensor)
        self.version = tensor._version
        self.rule = OTHER
        self.form = "borrowed"
        self.entry: Entry | None = None
        self.exact: torch.Tensor | None = None  # kept beside the packed form where a check is due
        self.override: torch.Tensor | None = None  # what a check or a probe wants backward to read

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor while it is there."""
        return 0 if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its storage seen through strides, and nothing else."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (), (), 0
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
