"""What is noted of a saved storage, and what autograd holds instead of a tensor that sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from squeezebox import codecs
from squeezebox.capture._layouts import Scale
from squeezebox.capture._lineage import Origin, Recipe
from squeezebox.capture._rules import OTHER, Rule
from squeezebox.memory import HostSlot, Slot
from squeezebox.schema import CaptureError, Role, SavedTensor

if TYPE_CHECKING:
    from squeezebox.capture._overwrites import Stamp


FLAGS = frozenset({"sign", "positive"})  # forms of one bit an element; see Rule


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
        self.ready: torch.Tensor | None = None  # flat; recomputed, or wanted by a recipe before its own use
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

    @property
    def keeps_sign(self) -> bool:
        """Whether its packed values tell which elements are positive."""
        return codecs.get(self.packed["values"].codec).preserves_sign

    def drop_flags(self) -> None:
        """Let go of what its values tell too."""
        for flag in FLAGS:
            self.packed.pop(flag, None)
        self.row.packed.pop("sign", None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of this entry's storage with the contents that were packed."""
        return not self.storage.expired() and self.version == tensor._version and self.dtype == tensor.dtype


class Handle:
    """What autograd holds instead of one saved tensor."""

    __slots__ = (
        "entry",
        "exact",
        "form",
        "geometry",
        "override",
        "rule",
        "stamp",
        "step",
        "tensor",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, step: object) -> None:
        self.step = step
        self.tensor: torch.Tensor | None = tensor
        self.geometry = _geometry(tensor)
        self.version = tensor._version
        self.rule = OTHER
        self.form = "borrowed"
        self.entry: Entry | None = None
        self.exact: torch.Tensor | None = None  # kept with the packed form where a check is due
        self.stamp: Stamp | None = None  # where overwriting is looked for
        self.override: torch.Tensor | None = None  # what a check or a probe wants backward to read

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


def at_version(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The tensor, if it is as it was saved."""
    if tensor._version != version:
        raise CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it "
            f"was saved (version {version}, now {tensor._version}), so its gradient would be wrong. "
            "Replace the in-place operation by one that makes a new tensor."
        )
    return tensor


def as_saved(handle: Handle, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    """The unpacked tensor; autograd itself would not notice one of another shape or dtype."""
    shape, stride, _ = handle.geometry
    if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
        shape,
        stride,
        entry.dtype,
        entry.device,
    ):
        raise CaptureError(
            f"a tensor saved as {entry.dtype} of shape {shape} and strides {stride} on {entry.device} was "
            f"unpacked as {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device}: this is a bug in the codec of '{entry.row.key}'"
        )
    return tensor


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (), (), 0
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
