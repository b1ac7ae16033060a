"""Devices that are not alike, and the links between them, as a TOML file has them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from squeezebox.schema._errors import FormatError
from squeezebox.schema._files import checked, load_text, write_whole
from squeezebox.schema._pipeline import Link
from squeezebox.schema._sizes import parse_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZES = ("memory_bytes", "bytes_per_second")
_HEAD = """\
# What ranks run on, in the order of processes. memory_bytes is what a rank may hold. speed is samples a
# second of a small network's training: only how speeds compare with one another counts.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a rank runs on: how much it may hold, and samples a second of a small network's training."""

    name: str
    memory_bytes: int
    speed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """The link between two devices, by their names; both ways are alike."""

    between: tuple[str, str]
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Devices in the order of the processes on them, and a link for each two.

    Raises:
        FormatError: a name comes twice, a number is 0, or a link is missing or leads nowhere.
    """

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...]

    def __post_init__(self) -> None:
        for problem in (*self._of_devices(), *self._of_links()):
            raise FormatError(problem)

    def link(self, one: int, other: int) -> Link:
        """Between the devices of these numbers; nothing to pay from a device to itself."""
        names = {self.devices[one].name, self.devices[other].name}
        for link in self.links:
            if {*link.between} == names:
                return Link(bytes_per_second=link.bytes_per_second, latency_seconds=link.latency_seconds)
        return Link(bytes_per_second=float("inf"))

    def chosen(self, numbers: Sequence[int]) -> Devices:
        """Some of them, in this order."""
        devices = tuple(self.devices[number] for number in numbers)
        names = {device.name for device in devices}
        return Devices(devices=devices, links=tuple(each for each in self.links if names >= {*each.between}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them as TOML, whole or not at all; OutputError if the path cannot be written."""
        tables = [
            f'\n[[devices]]\nname = "{each.name}"\nmemory_bytes = {each.memory_bytes}\n'
            f"speed = {each.speed:.6g}\n"
            for each in self.devices
        ]
        tables += [
            f'\n[[links]]\nbetween = ["{each.between[0]}", "{each.between[1]}"]\n'
            f"bytes_per_second = {each.bytes_per_second:.6g}\nlatency_seconds = {each.latency_seconds:.6g}\n"
            for each in self.links
        ]
        write_whole(path, _HEAD + "".join(tables))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Devices:
        """What :meth:`save` or a person wrote; sizes may be texts such as "2GiB".

        Raises:
            FormatError: the file is missing or damaged, or devices and links do not go together.
        """
        again = "'squeezebox devices measure', or correct it"
        return load_text(path, "list of devices", again, lambda text: cls.from_dict(tomllib.loads(text)))

    @classmethod
    def from_dict(cls, values: Any, where: str = "") -> Devices:
        """The devices of a TOML file's values; without links where there is one device."""
        tables = {"links": [], **values} if isinstance(values, dict) else values
        if isinstance(tables, dict):
            tables = {key: _in_bytes(each) for key, each in tables.items()}
        return cls(**checked(cls, tables, where))

    def _of_devices(self) -> list[str]:
        names = [device.name for device in self.devices]
        problems = [] if names else ["there is no device"]
        for device in self.devices:
            if not device.name or names.count(device.name) > 1 or set(device.name) & set('"\\\n'):
                problems.append(f"{names.count(device.name)} devices are called {device.name!r}")
            if not (device.memory_bytes > 0 and device.speed > 0.0):
                problems.append(
                    f"'{device.name}' has {device.memory_bytes} bytes and speed {device.speed:g}, of which "
                    "neither may be 0"
                )
        return problems

    def _of_links(self) -> list[str]:
        wanted = [{*pair} for pair in itertools.combinations([each.name for each in self.devices], 2)]
        found = [{*link.between} for link in self.links]
        problems = [
            f"a link between {' and '.join(sorted(pair))} comes {found.count(pair)} times, or leads nowhere"
            for pair in found
            if pair not in wanted or found.count(pair) > 1
        ]
        problems += [
            f"there is no link between {' and '.join(sorted(pair))}" for pair in wanted if pair not in found
        ]
        problems += [
            f"the link between {' and '.join(link.between)} carries 0 bytes a second"
            for link in self.links
            if not link.bytes_per_second > 0.0
        ]
        return problems


def _in_bytes(tables: Any) -> Any:
    """Tables with sizes as numbers."""
    if not isinstance(tables, list):
        return tables
    return [
        {
            key: parse_size(key, value) if key in _SIZES and isinstance(value, str) else value
            for key, value in each.items()
        }
        if isinstance(each, dict)
        else each
        for each in tables
    ]
