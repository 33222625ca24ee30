"""The sockets of a process group, and how to close their connections while the group is still referenced."""

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
    """Return the sockets of this process: the kernel's name of each, by descriptor."""
    found: dict[int, str] = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def interface_to(host: str) -> str | None:
    """Return the network interface through which this machine reaches a host, or ``None`` for itself."""
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
    """Return the sockets that this process has opened since an earlier ``open_sockets()``."""
    return {number: name for number, name in open_sockets().items() if before.get(number) != name}


def any_is_connected(sockets: Mapping[int, str]) -> bool:
    """Whether any of the sockets is connected, or shut down but not yet closed.

    Args:
        sockets: the kernel's names by descriptor; a descriptor may have been reused since
    """
    for number, name in sockets.items():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_DESCRIPTORS}/{number}") != name:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return True
    return False


def shut_down(sockets: Mapping[int, str], port: int) -> None:
    """Shut down the connections of sockets, whichever threads wait for them.

    Listening sockets are left alone, as gloo would abort the process; so are connections to the given port.

    Args:
        sockets: the kernel's names by descriptor; a descriptor may have been reused since
        port: the port of the job's store
    """
    for number, name in sockets.items():
        with suppress(OSError):  # closed meanwhile, or not connected
            if os.readlink(f"{_DESCRIPTORS}/{number}") != name:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if connection.getpeername()[1] != port:
                    connection.shutdown(socket.SHUT_RDWR)
