"""The sockets that a process group has opened, and how to end them while others still refer to the group."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

_SIOCGIFADDR = 0x8915
_DESCRIPTORS = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Return the sockets of this process: what the system calls each, by its descriptor."""
    found: dict[int, str] = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # it has been closed meanwhile
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def interface_to(host: str) -> str | None:
    """Return the network interface by which this machine reaches another one, or ``None`` for itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
                if address == own and not address.startswith("127."):
                    return name
    return None


def opened_since(before: Mapping[int, str]) -> dict[int, str]:
    """Return the sockets that this process has opened since it had others."""
    return {number: name for number, name in open_sockets().items() if before.get(number) != name}


def any_is_connected(sockets: Mapping[int, str]) -> bool:
    """Whether any of some sockets is still a connection, or one that has been ended but not closed.

    Args:
        sockets: what the system calls each, by its descriptor, which may have become another one's
    """
    for number, name in sockets.items():
        with suppress(OSError):  # it has been closed
            if os.readlink(f"{_DESCRIPTORS}/{number}") != name:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return True
    return False


def shut_down(sockets: Mapping[int, str], port: int) -> None:
    """End the connections of sockets, whoever waits for them, from any thread.

    Those that listen are left alone, as gloo would end the process; likewise what is connected to a port.

    Args:
        sockets: what the system calls each, by its descriptor, which may have become another one's
    """
    for number, name in sockets.items():
        with suppress(OSError):  # it has been closed, or is not connected
            if os.readlink(f"{_DESCRIPTORS}/{number}") != name:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if connection.getpeername()[1] != port:
                    connection.shutdown(socket.SHUT_RDWR)
