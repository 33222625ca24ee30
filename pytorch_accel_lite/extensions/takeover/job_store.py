"""What the supervisor and the processes of a job tell each other, by texts in a store that the supervisor holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_stores: Any = dist  # its type stubs lack the stores
_PATIENCE = timedelta(seconds=60)
_LATEST = "takeover/latest"


@dataclass(frozen=True)
class Generation:
    """The processes of a job between two changes.

    :param number: counted from 1
    :param members: their numbers, by rank. A process that replaces another one has a number of its own.
    :param came: those that were not there before, and have to be given the state of the run
    """

    number: int
    members: list[int]
    came: list[int] = field(default_factory=list)


class JobStore:
    """The texts of a job by key.

    :param store: a connection to torch's store; each thread needs its own
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    @classmethod
    def create(cls) -> JobStore:
        """Create the store of a job, in the process that supervises it."""
        return cls(_stores.TCPStore("127.0.0.1", 0, None, True, _PATIENCE, wait_for_workers=False))

    @classmethod
    def connect(cls, port: int) -> JobStore:
        """Connect to the store of a job on this machine."""
        return cls(_stores.TCPStore("127.0.0.1", port, None, False, _PATIENCE, wait_for_workers=False))

    @property
    def port(self) -> int:
        """The port on which the store is."""
        return int(self.store.port)

    def publish(self, generation: Generation) -> None:
        """Begin a generation."""
        self.store.set(f"takeover/generation/{generation.number}", json.dumps(asdict(generation)))
        self.store.set(_LATEST, str(generation.number))

    def latest(self) -> Generation:
        """Return the latest generation, waiting for the first."""
        return Generation(**json.loads(self.store.get(f"takeover/generation/{int(self.store.get(_LATEST))}")))

    def after(self, generation: Generation) -> Generation | None:
        """Return the latest generation if it is after one."""
        follows = self.store.check([f"takeover/generation/{generation.number + 1}"])
        return self.latest() if follows else None

    def arrive(self, generation: Generation, member: int) -> None:
        """Say that a process is ready for a generation."""
        self.store.set(f"takeover/here/{generation.number}/{member}", "")

    def has_arrived(self, generation: Generation, member: int) -> bool:
        """Whether a process is ready for a generation."""
        return bool(self.store.check([f"takeover/here/{generation.number}/{member}"]))

    def have_arrived(self, generation: Generation) -> bool:
        """Whether all processes of a generation are ready for it."""
        return bool(self.store.check([f"takeover/here/{generation.number}/{member}" for member in generation.members]))

    def say(self, key: str, text: str = "") -> None:
        """Set a text."""
        self.store.set(f"takeover/{key}", text)

    def said(self, key: str) -> str | None:
        """Return a text, or ``None`` if it has not been set."""
        key = f"takeover/{key}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def count(self, key: str, more: int = 0) -> int:
        """Add to a number, and return it."""
        return int(self.store.add(f"takeover/{key}", more))
