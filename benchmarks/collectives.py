"""What it costs two processes to agree about a number in a step: a plain loop with each way to do so.

    torchrun --nproc_per_node 2 -m benchmarks.collectives [--rounds 14] [--steps 384]

Every way trains the same model with ``DistributedDataParallel`` through gloo, on the same ready batches, in turns, and
exchanges a number besides, in each step or every few. An exchange is begun a step ahead, and its result is read before
the step that it is for: that is as cheap as torch allows. The times of each block of steps are measured within the run,
with as many exchanges in each. The table shows the CPU time of all processes and threads, as a ratio to the loop that
exchanges nothing: of the lowest tenth of the blocks, which other programs on the machine disturb least, and of their
median. The loop that exchanges nothing takes part twice, as the control.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from benchmarks.report import footnote, in_rounds
from benchmarks.streams import BATCH, IN_BLOCK, Seconds, train_by_hand

MESSAGE = 64  # bytes, of a socket
Finish = Callable[[], None]
Begin = Callable[[torch.Tensor], Finish]  # begins to exchange a number, and returns what waits for the others'


def all_reduce(group: Any, number: torch.Tensor) -> Finish:
    work = dist.all_reduce(number, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        number.item()

    return finish


def all_gather(group: Any, number: torch.Tensor) -> Finish:
    found = [torch.empty_like(number) for _ in range(dist.get_world_size())]
    work = dist.all_gather(found, number, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        sum(each.item() for each in found)

    return finish


def send_and_receive(group: Any, number: torch.Tensor) -> Finish:
    other, theirs = 1 - dist.get_rank(), torch.empty_like(number)
    works = [dist.isend(number, other, group), dist.irecv(theirs, other, group)]

    def finish() -> None:
        for work in works:
            if work is not None:
                work.wait()
        theirs.item()

    return finish


def through_socket(connection: socket.socket, number: torch.Tensor) -> Finish:
    connection.sendall(int(number).to_bytes(MESSAGE, "little"))

    def finish() -> None:
        if len(connection.recv(MESSAGE, socket.MSG_WAITALL)) < MESSAGE:
            raise ConnectionError("The other process has closed its connection.")

    return finish


def connect() -> socket.socket:
    """Return a connection to the other process over the loopback."""
    address: list[Any] = [None]
    if dist.get_rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = [server.getsockname()]
            dist.broadcast_object_list(address)
            connection, _ = server.accept()
    else:
        dist.broadcast_object_list(address)
        connection = socket.create_connection(tuple(address[0]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Agreed:
    """Batches, with an exchange of their sizes every few steps, begun a step ahead."""

    def __init__(self, batches: Iterable[Any], begin: Begin, every: int) -> None:
        self._batches, self._begin, self._every = batches, begin, every

    def __iter__(self) -> Iterator[Any]:
        before: tuple[Any, Finish | None] | None = None
        for step, batch in enumerate(self._batches):
            begun = self._begin(torch.tensor(len(batch[0]))) if step % self._every == 0 else None
            if before is not None:
                yield self._finished(*before)
            before = batch, begun
        if before is not None:
            yield self._finished(*before)

    def _finished(self, batch: Any, finish: Finish | None) -> Any:
        if finish is not None:
            finish()
        return batch


def ways(batches: list[Any], connection: socket.socket) -> dict[str, Callable[[], Seconds]]:
    """Return the plain loops, by what they exchange; the first is the one to compare with."""
    group = dist.new_group(backend="gloo")

    def train(begin: Begin | None = None, every: int = 1) -> Seconds:
        return train_by_hand(Agreed(batches, begin, every) if begin else batches, images=False)

    reduce, sockets = partial(all_reduce, group), partial(through_socket, connection)
    return {
        "none": train,
        "none, again (control)": train,
        "`all_reduce` in each step": partial(train, reduce),
        "`all_gather` in each step": partial(train, partial(all_gather, group)),
        "`isend` and `irecv` in each step": partial(train, partial(send_and_receive, group)),
        f"{MESSAGE} bytes through a socket of one's own in each step": partial(train, sockets),
        **{f"`all_reduce` every {every} steps": partial(train, reduce, every) for every in (2, 4, 8, 16)},
    }


def cpu_times(seconds: Seconds) -> tuple[float, float]:
    """Return the microseconds of CPU time of a step on all processes: of the lowest tenth of the blocks, and median."""
    cpu = torch.tensor([block for _, block in seconds], dtype=torch.float64)
    dist.all_reduce(cpu)
    return cpu.quantile(0.1).item() * 1e6 / IN_BLOCK, cpu.quantile(0.5).item() * 1e6 / IN_BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=24 * IN_BLOCK)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to check that everything works")
    arguments = parser.parse_args()
    rounds, steps = (1, 3 * IN_BLOCK) if arguments.quick else (arguments.rounds, arguments.steps)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != 2:
        parser.error(f"2 processes are needed, not {accelerator.num_processes}: start it with torchrun, as shown above")
    few = [(torch.randn(BATCH, 64), torch.randint(10, (BATCH,))) for _ in range(8)]
    with connect() as connection:
        chosen = ways(list(islice(cycle(few), steps)), connection)
        seconds: dict[str, Seconds] = {name: [] for name in chosen}
        for _ in range(rounds):
            for name, train in chosen.items():
                accelerator.wait_for_everyone()
                seconds[name] += train()
    found = {name: cpu_times(blocks) for name, blocks in seconds.items()}
    base = next(iter(found.values()))
    accelerator.print("| exchanged | CPU time, microseconds a step | ratio of the lowest tenth | of the median |")
    accelerator.print("|---|---|---|---|")
    for name, times in found.items():
        ratios = [f"{time / before:.2f}" for time, before in zip(times, base, strict=True)]
        accelerator.print(f"| {name} | {times[1]:.0f} | {' | '.join(ratios)} |")
    details = f"gloo, 2 processes of one thread each, {steps // IN_BLOCK - 1} blocks of {IN_BLOCK} steps in each round"
    accelerator.print(footnote(in_rounds(rounds), details))


if __name__ == "__main__":
    main()
