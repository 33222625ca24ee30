"""A worker process of a job: set-up before its program runs, and shutdown afterwards."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from pytorch_accel_lite.extending import FENCES, replace_step
from pytorch_accel_lite.extension_tools.processes import use_ranks
from pytorch_accel_lite.extensions.logical import LogicalStep
from pytorch_accel_lite.extensions.takeover.connection_closer import Waker
from pytorch_accel_lite.extensions.takeover.group_sockets import interface_to
from pytorch_accel_lite.extensions.takeover.job_store import Key
from pytorch_accel_lite.extensions.takeover.joining_processes import run_alone
from pytorch_accel_lite.extensions.takeover.membership import Membership
from pytorch_accel_lite.extensions.takeover.new_groups import distinguish_meshes, watch_new_groups
from pytorch_accel_lite.extensions.takeover.program_restart import has_sharded_trainer, join_sharded, restart_program
from pytorch_accel_lite.extensions.takeover.surviving_ranks import SurvivingRanks
from pytorch_accel_lite.extensions.takeover.surviving_step import SurvivingStep


@dataclass(frozen=True)
class Order:
    """What a new process needs to know to take part in a job.

    Args:
        number: the number of the process, the same in all generations
        host: the address of the job's store, as seen from the machine of the process
        port: the port of the store
        comes_later: whether the process joins a job that is already running
        program: the arguments of Python: a script, or ``-m`` and a module, and the arguments of that
        wakes: the read and write descriptors of the pipe that wakes the process when a generation begins
    """

    number: int
    host: str
    port: int
    comes_later: bool
    program: list[str]
    wakes: Sequence[int] = ()


def run(order: Order) -> None:
    """Take part in a job as a worker process, and run its program."""
    torch.set_num_threads(1)
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR=order.host, MASTER_PORT=str(order.port))
    if (interface := interface_to(order.host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    membership = SurvivingRanks.membership = Membership(order.number, order.host, order.port, Waker(order.wakes))
    membership.redivide, membership.announce = SurvivingRanks.refresh_all, SurvivingRanks.announce
    membership.holds_shards = has_sharded_trainer
    use_ranks(SurvivingRanks)
    replace_step(LogicalStep, SurvivingStep)
    FENCES.append(membership.check)
    watch_new_groups(membership)
    distinguish_meshes(membership)
    sys.excepthook = _report_to(membership)
    if order.comes_later and membership.store.get(Key.SHARDED) is not None:
        join_sharded(membership)
    elif order.comes_later:
        run_alone()
    else:
        membership.join()
        membership.announce_change(membership.begun_at)  # nobody is told: no run has begun
    atexit.register(_leave, membership)
    while not _run_to_the_end(order.program, membership):
        restart_program(membership)


def _run_to_the_end(program: list[str], membership: Membership) -> bool:
    """Run a program; return ``False`` if it was interrupted and has to restart."""
    first, *arguments = program
    path = [*sys.path]
    try:
        if first == "-m":
            sys.argv = [*arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*program]
            sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name="__main__")
    except BaseException as error:
        if not (membership.restart.is_due or (isinstance(error, Exception) and membership.lost_shards(error))):
            raise
        sys.path[:] = path
        return False
    return True


def _leave(membership: Membership) -> None:
    """Shut down together with the other processes, unless this one has failed."""
    if hasattr(sys, "last_type"):  # an error has been printed
        membership.closer.stop()
    else:
        membership.leave()
        SurvivingRanks.refresh_all()


def _report_to(membership: Membership):  # type: ignore[no-untyped-def]
    show = sys.excepthook

    def report(kind, error, trace):  # type: ignore[no-untyped-def]
        show(kind, error, trace)
        text = str(error).partition("\n")[0]
        with suppress(RuntimeError):
            membership.store.put(Key.FAILED, f"{kind.__name__}: {text}", membership.number)

    return report
