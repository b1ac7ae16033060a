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
_TYPES = ("", "cpu", "cuda")
_HEAD = """\
# What ranks run on, in the order of processes. memory_bytes is what a rank may hold. speed is samples a
# second of a small network's training: only how speeds compare with one another counts. The other figures
# are for squeezebox estimate --devices, which takes those of this machine, times the speed, without them.
"""
_RATES = ("flops_per_second", "bytes_per_second", "call_seconds")
_UNSAID = {**dict.fromkeys(_RATES, 0.0), "over_roofline": [], "type": ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a rank runs on: how much it may hold, and samples a second of a small network's training.

    ``flops_per_second`` and ``bytes_per_second`` are those of a large product and of an addition in float32,
    ``call_seconds`` is an operator's on few elements; 0 where unknown. ``over_roofline`` is how many times as
    long as these say steps of networks took there: the least, the median and the most; () where none was run.
    ``type`` is torch's: "cpu", whose processes keep freed memory, or "cuda"; "" where nobody said.
    """

    name: str
    memory_bytes: int
    speed: float
    flops_per_second: float = 0.0
    bytes_per_second: float = 0.0
    call_seconds: float = 0.0
    over_roofline: tuple[float, ...] = ()
    type: str = ""

    @property
    def is_rated(self) -> bool:
        """Whether a step's seconds there follow from its operators."""
        return self.flops_per_second > 0.0 and self.bytes_per_second > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """The link between two devices, by their names; both ways are alike."""

    between: tuple[str, str]
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Devices in the order of the processes on them, and a link for each two, or no links at all.

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

    def require_links(self) -> None:
        """Raise FormatError where a link between two of them is missing."""
        for problem in self._missing_links():
            raise FormatError(f"{problem}, which a pipeline needs; 'squeezebox devices measure' finds it")

    def chosen(self, numbers: Sequence[int]) -> Devices:
        """Some of them, in this order."""
        devices = tuple(self.devices[number] for number in numbers)
        names = {device.name for device in devices}
        return Devices(devices=devices, links=tuple(each for each in self.links if names >= {*each.between}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them as TOML, whole or not at all; OutputError if the path cannot be written."""
        tables = [
            f'\n[[devices]]\nname = "{each.name}"\nmemory_bytes = {each.memory_bytes}\n'
            f"speed = {each.speed:.6g}\n{_rates(each)}"
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
            if isinstance(tables.get("devices"), list):
                tables["devices"] = [_completed(each) for each in tables["devices"]]
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
            if device.type not in _TYPES:
                problems.append(f"'{device.name}' is of type {device.type!r}, which is none of {_TYPES[1:]}")
            problems += _of_band(device)
        return problems

    def _of_links(self) -> list[str]:
        found = [{*link.between} for link in self.links]
        problems = [
            f"a link between {' and '.join(sorted(pair))} comes {found.count(pair)} times, or leads nowhere"
            for pair in found
            if pair not in self._pairs() or found.count(pair) > 1
        ]
        problems += self._missing_links() if found else []
        problems += [
            f"the link between {' and '.join(link.between)} carries 0 bytes a second"
            for link in self.links
            if not link.bytes_per_second > 0.0
        ]
        return problems

    def _missing_links(self) -> list[str]:
        found = [{*link.between} for link in self.links]
        return [
            f"there is no link between {' and '.join(sorted(pair))}"
            for pair in self._pairs()
            if pair not in found
        ]

    def _pairs(self) -> list[set[str]]:
        return [{*pair} for pair in itertools.combinations([each.name for each in self.devices], 2)]


def _of_band(device: Device) -> list[str]:
    band = device.over_roofline
    if not band or (len(band) == 3 and 0.0 < band[0] <= band[1] <= band[2]):
        return []
    return [
        f"'{device.name}' has over_roofline {[*band]}, which is not the least, the median and the most that "
        "steps took over what its rates say"
    ]


def _rates(device: Device) -> str:
    """The lines of what is known of it."""
    found = [(name, getattr(device, name)) for name in _RATES]
    lines = [f'type = "{device.type}"\n'] if device.type else []
    lines += [f"{name} = {value:.6g}\n" for name, value in found if value]
    band = ", ".join(f"{value:.4g}" for value in device.over_roofline)
    return "".join(lines) + (f"over_roofline = [{band}]\n" if band else "")


def _completed(device: Any) -> Any:
    """A device with what a file may leave out."""
    return {**_UNSAID, **device} if isinstance(device, dict) else device


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
