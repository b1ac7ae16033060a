"""Checkpoints in the format of torch.distributed.checkpoint: each rank writes a part that is one by itself.

The directory around the parts is a checkpoint of all, and appears only when all are written.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from squeezebox.pipeline._health import Assembly
from squeezebox.schema import FormatError, OutputError

_COMPLETE = re.compile(r"batch-(\d+)$")
_METADATA = ".metadata"
_SUMS = "crc32.json"  # of a part's files
_READ_BYTES = 1 << 20


def write(directory: Path, batch: int, number: int, state: Mapping[str, Any], assembly: Assembly) -> None:
    """Write this process's part of a checkpoint.

    Args:
        directory: where checkpoints go, one directory each; the same for all ranks, or a disk of their own.
        batch: how many batches have been trained on.
        number: this process's among all.
        state: nested dicts of tensors and plain values. Where ranks have the same key, the first one's on
            this disk counts for all; each reads its own again if :class:`Checkpoint` is given its number.
        assembly: of all processes.

    Raises:
        OutputError: this rank's file could not be written; earlier checkpoints are as they were.
    """
    partial, complete = directory / f".batch-{batch}.partial", directory / f"batch-{batch}"
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was cut off
    assembly.meet(f"cleared {batch}")
    with _reported(f"the checkpoint of rank {number} could not be written to {partial}"):
        shutil.rmtree(complete, ignore_errors=True)  # on some nodes only, so nobody reads it
        part = _write_part(partial / _part(number), state)
    parts = assembly.gather(_text_of(part), f"waits until rank {{}} has written {batch}")
    with _reported(f"{partial} could not be completed"):
        here = [each for each in range(len(parts)) if (partial / _part(each)).exists()]
        whole = _together([*map(_metadata_of, parts)], here)
        _write_file(partial / _METADATA, pickle.dumps(whole), number)
    assembly.meet(f"listed {batch}")
    with _reported(f"{partial} could not be renamed to {complete}"):
        with contextlib.suppress(FileNotFoundError):  # where ranks share a disk, another one has been faster
            partial.rename(complete)
    assembly.meet(f"completed {batch}")


def is_there(directory: Path, batch: int, assembly: Assembly) -> str:
    """Why a checkpoint cannot be written, as it is there already for all ranks; "" if it can."""
    complete = directory / f"batch-{batch}"
    if not all(assembly.gather(complete.exists())):
        return ""
    return (
        f"{complete} is there already, of an earlier run or of another one. Remove it, or name another "
        "directory."
    )


def newest(directory: Path, assembly: Assembly) -> int | None:
    """How many batches the newest checkpoint has seen that is complete for all ranks; None without one."""
    found = [_COMPLETE.match(path.name) for path in directory.glob("batch-*")]
    complete = assembly.gather(sorted(int(match[1]) for match in found if match))
    return max(set(complete[0]).intersection(*complete[1:]), default=None)


def has(directory: Path, batch: int) -> bool:
    """Whether a checkpoint is complete here."""
    return (directory / f"batch-{batch}").exists()


def require_whole(directory: Path, batch: int, is_own: Callable[[int], bool]) -> None:
    """Refuse files that are not as they were written; those of earlier versions have no sums to compare with.

    Args:
        directory: of checkpoints.
        batch: of one that is complete.
        is_own: which processes' parts to look at, as far as they are here.

    Raises:
        FormatError: names a file that has changed.
    """
    for path in (directory / f"batch-{batch}").glob(f"rank-*/{_SUMS}"):
        if not is_own(int(path.parent.name.removeprefix("rank-"))):
            continue
        with _readable(path.parent):
            for name, wanted in json.loads(path.read_text()).items():
                found = _sum_of(path.parent / name)
                if found != wanted:
                    raise ValueError(f"{name} has the CRC-32 {found:08x}, and {wanted:08x} was written")


def _sum_of(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            found = zlib.crc32(data, found)
    return found


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, AssertionError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise FormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Where nodes have disks of "
            "their own, put the rank-... folders of all together on each, or resume stages with the plan "
            "that they were saved by. Else resume from another checkpoint: load(directory, batch=...)."
        ) from error


class Checkpoint:
    """A checkpoint to read, of all that was saved, or with a process's ``number`` of what that has saved.

    Raises:
        FormatError: it is missing or damaged.
    """

    def __init__(self, directory: Path, batch: int, number: int | None = None) -> None:
        folder = directory / f"batch-{batch}"
        self.path = folder if number is None else folder / _part(number)
        self._reader = FileSystemReader(self.path)
        with _readable(self.path):
            self._metadata = self._reader.read_metadata()

    def forms(self, prefix: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor whose key begins so, by the rest of its key."""
        return {
            key.removeprefix(prefix): (tuple(each.size), each.properties.dtype)
            for key, each in self._metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(each, TensorStorageMetadata)
        }

    def read(self, values: dict[str, Any]) -> None:
        """Read values by their keys: tensors in place.

        Raises:
            FormatError: one is not there or damaged.
        """
        planner = _Planner()
        with _readable(self.path):
            planner.set_up_planner(values, self._metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            (plan,) = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def nested(self, *path: str, only: Collection[str] | None = None) -> Any:
        """All that lies below a path of keys, or only below some of the next keys, as it was saved.

        Lists come as dicts by numbers.
        """
        depth, found = len(path), dict[str, Any]()
        places = {
            key: place
            for key, place in (self._metadata.planner_data or {}).items()
            if place[:depth] == path and (only is None or place[depth] in only)
        }
        for key in places:
            form = self._metadata.state_dict_metadata[key]
            found[key] = None
            if isinstance(form, TensorStorageMetadata):
                found[key] = torch.empty(form.size, dtype=form.properties.dtype, device="cpu")
        self.read(found)
        root: dict[str, Any] = {}
        for key, place in places.items():
            if len(place) == depth:
                return found[key]
            inner = root
            for name in place[depth:-1]:
                inner = inner.setdefault(name, {})
            inner[place[-1]] = found[key]
        return root


class _Planner(DefaultLoadPlanner):
    """Loads plain values only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def packed(value: Any) -> Tensor:
    """Plain values and tensors as bytes in a tensor."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """What :func:`packed` was given."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def _part(number: int) -> str:
    return f"rank-{number}"


def _write_part(folder: Path, state: Mapping[str, Any]) -> Metadata:
    """A checkpoint of one process: torch.distributed.checkpoint.save() step by step, without its messages."""
    folder.mkdir(parents=True)
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [results.wait()])
    sums = {path.name: _sum_of(path) for path in sorted(folder.iterdir())}
    _write_file(folder / _SUMS, json.dumps(sums).encode(), 0)
    return metadata


def _together(parts: list[Metadata], here: list[int]) -> Metadata:
    """Metadata of all parts. Where two have the same key, the first one that is ``here`` counts."""
    whole = dataclasses.replace(parts[0], state_dict_metadata={}, planner_data={}, storage_data={})
    for number, part in sorted(enumerate(parts), key=lambda each: (each[0] in here, -each[0])):
        whole.state_dict_metadata |= part.state_dict_metadata
        whole.planner_data |= part.planner_data
        whole.storage_data |= {
            index: dataclasses.replace(place, relative_path=f"{_part(number)}/{place.relative_path}")
            for index, place in part.storage_data.items()
        }
    return whole


def _text_of(metadata: Metadata) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(metadata))).decode()


def _metadata_of(text: str) -> Metadata:
    metadata: Metadata = pickle.loads(zlib.decompress(base64.b64decode(text)))
    return metadata


def _write_file(path: Path, data: bytes, number: int) -> None:
    """Whole or not at all, though other processes write the same."""
    own = path.with_name(f"{path.name}-{number}")
    with open(own, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    own.replace(path)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise OutputError(
            f"{what}: {error}. Earlier checkpoints are as they were; make room or name another directory."
        ) from error
