"""Exchanges of a few numbers between processes. Each has a purpose, so that different exchanges are never paired."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from inspect import currentframe
from types import CodeType
from typing import Any, ClassVar, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from pytorch_accel_lite.base.user_code import OWN_FILES
from pytorch_accel_lite.distributed.message_encoding import decode, encode
from pytorch_accel_lite.distributed.stack_frames import MACHINERY, describe_call

MACHINERY.add(__file__)
#: The most numbers of a process in an exchange. Every exchange has this size: gloo ends processes whose sizes differ.
CAPACITY = 14
_EXPLANATION = -1  # the purpose of exchanges in which processes tell each other where they are


class OtherCallError(RuntimeError):
    """The processes are in different calls, each of which waits for the others. Never skipped as a failed batch."""


class ControlGroup:
    """A gloo group whose exchanges begin with a number for their purpose.

    Args:
        group: the process group
        members: the processes of the group, by their ranks in the job

    Attributes:
        circumstances: a text to add to the description of this process's position, such as that it has left a run
    """

    circumstances: ClassVar[str] = ""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self.group = group
        self.members = members
        self._begun = 0
        self._explained = 0  # number of exchanges begun before the last explanation
        self._failure = ""

    def begin(self, numbers: torch.Tensor, purpose: int) -> Callable[[], torch.Tensor]:
        """Start exchanging a few numbers, and return a function that waits for the numbers of all processes.

        Args:
            numbers: at most ``CAPACITY`` numbers of type int64, equally many on each process
            purpose: the purpose, see ``find_purpose()``
        """
        tag = purpose * 16 + len(numbers)
        received, work = self._send(tag, numbers)
        number = self._begun

        def finish() -> torch.Tensor:
            work.wait()
            if received[:, 0].tolist().count(tag) != len(self.members):
                self._explain(number)
            return received[:, 2 : 2 + len(numbers)]

        return finish

    def _send(self, tag: int, numbers: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start an exchange. Return the rows for what the processes send, and what waits until they are filled."""
        sent = torch.zeros(2 + CAPACITY, dtype=torch.int64)
        sent[0] = tag
        sent[2 : 2 + len(numbers)] = numbers
        received = torch.empty(len(self.members), 2 + CAPACITY, dtype=torch.int64)
        work = dist.all_gather([*received], sent, group=self.group, async_op=True)
        self._begun += 1
        return received, work

    def _explain(self, number: int) -> NoReturn:
        """Raise an error that says in which call each process is. All processes get here.

        Some processes get here later, because they wait for an earlier exchange or have already begun others.
        """
        if number > self._explained:
            while (self._exchange(_EXPLANATION) != _EXPLANATION).any():
                pass
            self._explained = self._begun
            calls = self._gather(describe_call(traceback.extract_stack()) + self.circumstances)
            self._failure = "".join(f"\n  rank {rank}: {call}" for rank, call in zip(self.members, calls, strict=True))
        of_updates = " Where a process has nothing to learn from, pass a loss of zero to update(): 0 * loss."
        raise OtherCallError(
            f"The processes are in different calls, each of which waits for the other processes:{self._failure}\n"
            "Make the same calls in the same order on every process, even if only one of them uses the results."
            f"{of_updates if ': in update()' in self._failure else ''}"
        )

    def _exchange(self, tag: int) -> torch.Tensor:
        received, work = self._send(tag, torch.empty(0))
        work.wait()
        return received[:, 0]

    def _gather(self, text: str) -> list[str]:
        encoded = encode(text)
        longest = int(self._exchange(len(encoded)).max())
        padded = torch.cat([encoded, encoded.new_zeros(longest - len(encoded))])
        received = [torch.empty_like(padded) for _ in self.members]
        dist.all_gather(received, padded, group=self.group)
        return [decode(each) for each in received]


_purposes: dict[tuple[CodeType, CodeType], int] = {}


def find_purpose() -> int:
    """Return a number for the purpose of the current exchange, from the method of ``Ranks`` and its caller.

    The caller counts because a user's code may call the same method in different places, for example in a branch for
    the first process.
    """
    method: Any = currentframe()
    caller = method.f_back
    while caller.f_code.co_filename in MACHINERY:
        method, caller = caller, caller.f_back
    key = method.f_code, caller.f_code
    if key not in _purposes:
        name = caller.f_code.co_filename
        place = f"{name.removeprefix(OWN_FILES)} {caller.f_code.co_qualname}" if name.startswith(OWN_FILES) else ""
        _purposes[key] = crc32(f"{method.f_code.co_name} {place}".encode())
    return _purposes[key]
