"""Processes that a launcher has started: checking them, reporting errors to the launcher, exiting if it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from functools import cache, wraps
from inspect import signature
from types import TracebackType

import accelerate
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.distributed.lost_processes import is_about_lost_process

_PR_SET_PDEATHSIG = 1
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_HEAD_START = 3.0  # seconds for the launcher to notice the rank that failed first, and to end the others


def check_launch(accelerator: Accelerator) -> None:
    """Raise an error if the accelerator does not see all launched processes, or ignores how it was configured."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise RuntimeError(
            f"The launcher started WORLD_SIZE={launched} processes, but Accelerate sees "
            f"{accelerator.num_processes}: each rank would train on its own. Accelerate's state was created before the "
            "trainer, by an Accelerator or a PartialState. On a machine without a GPU, create these with cpu=True, or "
            "leave it to the Trainer: pass no accelerator, and create no such state before the trainer."
        )
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and accelerator.is_main_process:
        warn_outside(
            f"torchrun may restart this job {restarts} time(s), but all attempts share one store, where restarted "
            "processes find the addresses of dead ones and fail or hang. Launch it with the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if wants_fsdp and accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(
            f"An FSDP plugin was configured, but Accelerate runs {accelerator.distributed_type.value} on "
            f"{accelerator.num_processes} {accelerator.device.type} process(es) and would ignore it. Start several "
            "processes with accelerate launch on a machine with GPUs, or leave the plugin out."
        )


@wraps(accelerate.notebook_launcher)
def notebook_launcher(*args: object, **kwargs: object) -> None:
    """Call Accelerate's ``notebook_launcher``. If a trainer exists, raise a clearer error than Accelerate's own."""
    processes = signature(accelerate.notebook_launcher).bind_partial(*args, **kwargs).arguments.get("num_processes")
    if (processes or 1) > 1 and AcceleratorState._shared_state:
        raise ValueError(
            f"notebook_launcher(num_processes={processes}): an earlier cell has created a Trainer or an Accelerator, "
            "after which a notebook cannot start processes. Restart the kernel, and create the model and the trainer "
            "only in the function that is launched."
        )
    accelerate.notebook_launcher(*args, **kwargs)


def respect_launcher() -> None:
    """Under torchrun, report the error that ends this process to the launcher, and exit if the launcher is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _report_uncaught_errors()
        if sys.platform.startswith("linux"):
            die_with_parent()


@cache
def _report_uncaught_errors() -> None:
    """Make the launcher's summary name the first error, rather than the errors it caused on other ranks."""
    show = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if is_about_lost_process(error):
            time.sleep(_HEAD_START)
        try:
            raise error
        except BaseException:
            with suppress(OSError):  # the disk may be full
                record_error(error)

    sys.excepthook = report


def record_error(error: BaseException) -> None:
    """Record the error that is being handled, for the launcher to show."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if _ERROR_FILE in os.environ:
        get_error_handler().record_exception(error)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent exited before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
