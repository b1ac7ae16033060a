"""What a place that tensors are offloaded to has to offer: a disk's folder, or a neighbour's memory."""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Protocol


class Area(ABC):
    """Bytes elsewhere, at offsets. What fails raises OSError, a future's result too.

    ``direct``: what is written there leaves nothing in the system's cache. ``fills_anything``: reading fills
    memory at any address and of any size, rather than pages.
    """

    direct: bool
    fills_anything: bool

    @abstractmethod
    def reserve(self, offset: int, nbytes: int) -> None:
        """Have these bytes set aside, so that writing them finds room."""

    @abstractmethod
    def begin_write(self, data: memoryview, offset: int) -> Future[None]:
        """Begin to write all of ``data``, which must stay until that is done."""

    @abstractmethod
    def begin_read(self, data: memoryview, offset: int) -> Future[None]:
        """Begin to fill all of ``data``, which must stay until that is done."""

    @abstractmethod
    def finish(self, *, wait: bool) -> None:
        """Begin nothing more; ``wait`` for what was begun."""

    @abstractmethod
    def close(self) -> None:
        """Give the bytes back; so does the last reference to it."""


class Elsewhere(ABC):
    """Where tensors are offloaded to. It can be a key, and its text names it.

    Attributes:
        path: its name.
        filesystem: what it is reached by; "" where nobody says.
        kind: the name of the option that moves tensors there: "file" or "neighbour".
        most_bytes: that it has for tensors; None: as many as a disk has.
        advice: what to do where it is full, and where bytes do not come back.
    """

    __slots__ = ()
    path: str
    filesystem: str
    kind: str
    most_bytes: int | None
    advice: tuple[str, str]

    @property
    @abstractmethod
    def frees_memory(self) -> bool:
        """Whether what is moved there leaves this machine's memory."""

    @property
    @abstractmethod
    def keeps_state(self) -> bool:
        """Whether more may be there than a step's tensors: no other process can take it away."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that are free there; OSError if nobody can tell."""

    @abstractmethod
    def open(self) -> Area:
        """A new area; OSError if there is none."""


class _Closable(Protocol):
    def close(self) -> None: ...


def close_at_exit(made: _Closable) -> None:
    """Have it closed when Python ends, if it is still there."""
    reference = weakref.ref(made)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
