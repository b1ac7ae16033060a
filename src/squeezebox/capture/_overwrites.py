"""Saved tensors that were overwritten past autograd's notice, as through ``.data``, before backward."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from squeezebox.capture._entries import is_plain
from squeezebox.capture._path import ModulePath
from squeezebox.capture._readings import saved_attributes
from squeezebox.capture._rules import operator_name

_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), "") for file in (torch.__file__, os.path.dirname(__file__))
)
_UNREAD = ("running_mean", "running_var")  # which batch norms save and, in training, do not read
_WRITTEN = {"MkldnnRnnLayer": ("result3",)}  # a workspace, in which its backward writes


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a tensor was when it was saved."""

    checksum: int
    version: int
    module: str
    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overwrite:
    """A saved tensor that backward found to be another: by whose operator, and where that was called."""

    operator: str
    shape: tuple[int, ...]
    nbytes: int
    stamp: Stamp

    def __str__(self) -> str:
        stamp = self.stamp
        module = f" in module '{stamp.module}'" if stamp.module else ""
        return (
            f"a tensor of shape {self.shape} that {self.operator} saved{module} at {stamp.file}:{stamp.line} "
            "was overwritten before its backward in a way that autograd does not see, such as through .data: "
            "gradients are wrong, with and without Squeezebox. Make a new tensor, or clone it before use."
        )


def stamp(tensor: torch.Tensor, module: str) -> Stamp | None:
    """Of a tensor that is being saved; None of one without plain memory."""
    checksum = _checksum(tensor)
    if checksum is None:
        return None
    frame = _caller(sys._getframe(1))
    code = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else ("<unknown>", 0, "")
    return Stamp(checksum, tensor._version, module, *code)


def overwritten(mark: Stamp, tensor: torch.Tensor, reading: Callable[[], Any]) -> Overwrite | None:
    """What happened to a tensor since; ``reading`` says which attribute of the running node it is."""
    if tensor._version != mark.version or _checksum(tensor) in (mark.checksum, None):
        return None
    node: Any = torch._C._current_autograd_node()
    operator = "an operator" if node is None else operator_name(node.name()).removesuffix("Backward")
    theirs = _UNREAD if getattr(node, "_saved_training", False) else _WRITTEN.get(operator, ())
    if theirs and reading() in theirs:
        return None
    return Overwrite(operator=operator, shape=tuple(tensor.shape), nbytes=tensor.nbytes, stamp=mark)


def attribute_of(wanted: object, read: Callable[[Any, str], list[Any]]) -> str:
    """Which of the tensors that it saved the node whose backward runs has asked for; '' if of none."""
    node: Any = torch._C._current_autograd_node()
    for attribute in saved_attributes(type(node)):
        if any(each is wanted for each in read(node, attribute)):
            return attribute
    return ""


class Overwrites:
    """A context around a step without a session: finds every saved tensor that was overwritten."""

    def __init__(self) -> None:
        self.found: list[Overwrite] = []
        self._reading: list[_Saved] | None = None
        self._path = ModulePath(None)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Overwrites:
        self._path.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._path.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        held = tensor.detach()
        return _Saved(held, stamp(held, self._path.current))

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if self._reading is not None:
            self._reading.append(saved)
        elif saved.stamp is not None:
            found = overwritten(saved.stamp, saved.tensor, lambda: attribute_of(saved, self._read))
            self.found += [] if found is None else [found]
        return saved.tensor

    def _read(self, node: Any, attribute: str) -> list[_Saved]:
        self._reading = []
        try:
            getattr(node, f"_saved_{attribute}")
        finally:
            found, self._reading = self._reading, None
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    tensor: torch.Tensor
    stamp: Stamp | None


def _checksum(tensor: torch.Tensor) -> int | None:
    """Of its elements' bytes; the modes of others do not see it read them."""
    if not is_plain(tensor.data) or tensor.device.type == "meta":
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        storage = tensor.untyped_storage().nbytes()
        if tensor.numel() == 0 or storage == 0:  # a shard that is away
            return None
        once = tensor.detach().resolve_conj().resolve_neg()
        for dim, stride in enumerate(once.stride()):
            once = once.narrow(dim, 0, 1) if stride == 0 else once
        once = torch.view_as_real(once) if once.is_complex() else once
        return zlib.crc32(once.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame
