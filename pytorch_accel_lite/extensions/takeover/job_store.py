"""The key-value store through which the supervisor and the processes of a job communicate."""

from __future__ import annotations

import io
import json
import tarfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import torch.distributed as dist

_stores: Any = dist  # its type stubs lack the stores
_PATIENCE = timedelta(seconds=60)
_LATEST = "takeover/latest"
_POLLING = 0.02
_PART = 1 << 24  # bytes of a value


class Key(Enum):
    """The keys of the store: what each value means, who writes it and who reads it.

    Some are followed by numbers, such as that of a process, or of a training of the program.
    """

    #: Set by the supervisor if other processes may join the job.
    OPEN = "open"
    #: Set by the supervisor, or by a process that exits normally: newcomers are too late.
    ENDING = "ending"
    #: From a run to the supervisor: the number of processes that it can use.
    MOST_PROCESSES = "most"
    #: Set by a run whose model is sharded: its program restarts when its processes change.
    SHARDED = "sharded"
    #: By generation: a process asks for the next one, as a connection is lost although no process has ended.
    LOST_CONNECTIONS = "asked"
    #: From a newcomer to all: the number of the training that it waits to join.
    READY = "ready"
    #: From rank 0 to a newcomer: the state from which it joins, and the generation.
    STATE = "state"
    #: The files of that state, for a newcomer on another machine, by newcomer and generation.
    SENT = "sent"
    #: The files of the final state of a training, for newcomers that arrive after it.
    ENDED = "ended"
    #: From a process or the supervisor: why a process fails.
    FAILED = "failed"
    #: From each process to the supervisor: its progress.
    PROGRESS = "progress"


@dataclass(frozen=True)
class Generation:
    """The set of processes of a job between two changes.

    Args:
        number: counted from 1
        members: the numbers of the processes, by rank. A process that replaces another has a number of its own.
        machines: for each process, the number of its machine
        came: the numbers of the new processes, which need the state of the run
    """

    number: int
    members: list[int]
    machines: list[int] = field(default_factory=list)
    came: list[int] = field(default_factory=list)


class JobStore:
    """The values of a job, by key.

    Args:
        store: a connection to torch's store; each thread needs its own
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    @classmethod
    def create(cls) -> JobStore:
        """Create the store of a job, in the process that supervises it."""
        return cls(_stores.TCPStore("127.0.0.1", 0, None, True, _PATIENCE, wait_for_workers=False))

    @classmethod
    def connect(cls, host: str, port: int) -> JobStore:
        """Connect to the store of a job."""
        return cls(_stores.TCPStore(host, port, None, False, _PATIENCE, wait_for_workers=False))

    @property
    def port(self) -> int:
        """The port of the store."""
        return int(self.store.port)

    def publish(self, generation: Generation) -> None:
        """Publish a generation as the latest."""
        self.store.set(f"takeover/generation/{generation.number}", json.dumps(asdict(generation)))
        self.store.set(_LATEST, str(generation.number))

    def wait_for_first(self) -> None:
        """Wait until the job begins, however long that takes."""
        while not self.store.check([_LATEST]):
            time.sleep(_POLLING)

    def latest(self) -> Generation:
        """Return the latest generation, waiting for the first."""
        return Generation(**json.loads(self.store.get(f"takeover/generation/{int(self.store.get(_LATEST))}")))

    def after(self, generation: Generation) -> Generation | None:
        """Return the latest generation, or ``None`` if it is this one."""
        follows = self.store.check([f"takeover/generation/{generation.number + 1}"])
        return self.latest() if follows else None

    def arrive(self, generation: Generation, member: int) -> None:
        """Record that a process is ready for a generation."""
        self.store.set(f"takeover/here/{generation.number}/{member}", "")

    def has_arrived(self, generation: Generation, member: int) -> bool:
        """Whether a process is ready for a generation."""
        return bool(self.store.check([f"takeover/here/{generation.number}/{member}"]))

    def have_arrived(self, generation: Generation) -> bool:
        """Whether all processes of a generation are ready for it."""
        return bool(self.store.check([f"takeover/here/{generation.number}/{member}" for member in generation.members]))

    def put(self, key: Key, text: str = "", *numbers: int) -> None:
        """Set a value."""
        self.store.set(_path(key, *numbers), text)

    def get(self, key: Key, *numbers: int) -> str | None:
        """Return a value, or ``None`` if it has not been set."""
        path = _path(key, *numbers)
        return self.store.get(path).decode() if self.store.check([path]) else None

    def put_folder(self, key: Key, folder: str, *numbers: int) -> None:
        """Store the files of a folder, for processes on other machines."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, ".")
        content = packed.getvalue()
        starts = range(0, len(content), _PART)
        for part, start in enumerate(starts):
            self.store.set(_path(key, *numbers, part), content[start : start + _PART])
        self.put(key, str(len(starts)), *numbers)

    def get_folder(self, key: Key, folder: str, *numbers: int) -> None:
        """Write the files stored by ``put_folder()`` to a folder."""
        count = int(self.get(key, *numbers) or 0)
        content = b"".join(self.store.get(_path(key, *numbers, part)) for part in range(count))
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")

    def drop_folder(self, key: Key, *numbers: int) -> None:
        """Delete the files stored by ``put_folder()``."""
        for part in range(int(self.get(key, *numbers) or 0)):
            self.store.delete_key(_path(key, *numbers, part))


def _path(key: Key, *numbers: int) -> str:
    return "/".join(["takeover", key.value, *map(str, numbers)])
