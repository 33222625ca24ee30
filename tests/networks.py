"""Two machines, simulated by network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = {"a": "10.211.17.1", "b": "10.211.17.2"}


def namespace(name: str) -> str:
    return f"pal-{os.getpid()}-{name}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    try:
        for name in ADDRESSES:
            ip("netns", "add", namespace(name))
        cable = ["type", "veth", "peer", "name", "eth-b", "netns", namespace("b")]
        ip("-n", namespace("a"), "link", "add", "eth-a", *cable)
    except subprocess.CalledProcessError as error:
        for name in ADDRESSES:
            subprocess.run(["ip", "netns", "del", namespace(name)], check=False, capture_output=True)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode().strip()}")
    try:
        for name, address in ADDRESSES.items():
            ip("-n", namespace(name), "address", "add", f"{address}/24", "dev", f"eth-{name}")
            ip("-n", namespace(name), "link", "set", f"eth-{name}", "up")
            ip("-n", namespace(name), "link", "set", "lo", "up")
        yield
    finally:
        for name in ADDRESSES:
            ip("netns", "del", namespace(name))
