"""Which of this machine's networks gloo is to use, where several machines train."""

from __future__ import annotations

import os
import socket
import struct
import sys

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux: an interface's IPv4 address


def name_interface() -> None:
    """Name the interface that leads to the first rank, where torchrun started this and the user named none.

    gloo would take the address of the host's own name, which many systems resolve to 127.0.1.1: no other
    machine reaches that. What leads nowhere, or stays within this machine, is left to gloo.
    """
    given = os.environ
    if "TORCHELASTIC_RUN_ID" not in given or "GLOO_SOCKET_IFNAME" in given or sys.platform != "linux":
        return
    own = _own_address(given.get("MASTER_ADDR", ""))
    found = [name for _, name in socket.if_nameindex() if own and _address_of(name) == own]
    if found:
        given["GLOO_SOCKET_IFNAME"] = found[0]


def _own_address(other: str) -> str | None:
    """The address from which this machine would send to the other; None if none, or if it is only ours."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((other, 9))  # sends nothing
        except OSError:
            return None
        own: str = asked.getsockname()[0]
    return None if own.startswith("127.") else own


def _address_of(interface: str) -> str | None:
    import fcntl

    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
