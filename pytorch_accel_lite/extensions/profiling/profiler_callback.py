"""Traces of the operations of some steps."""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any

import torch

from pytorch_accel_lite.checkpoint import folder_path
from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, check_range


class ProfilerCallback(TrainerCallback):
    """Write ``torch.profiler`` traces of some steps of a run, to open in Perfetto or chrome://tracing.

    Args:
        output_dir: where traces are written, as ``rank0.TIME.pt.trace.json``
        wait: number of steps to skip before each trace
        warmup: number of steps before each trace that are profiled but discarded
        active: number of steps in a trace
        repeat: number of traces
        profile_kwargs: further arguments for ``torch.profiler.profile``, such as ``profile_memory=True``

    Attributes:
        schedule: the profiler's action in each step, from ``wait``, ``warmup``, ``active`` and ``repeat``
    """

    affects_training = False

    def __init__(
        self,
        output_dir: str | os.PathLike[str] = "profiles",
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        **profile_kwargs: Any,
    ) -> None:
        self.output_dir = folder_path("output_dir", output_dir)
        check_range("wait", wait)
        check_range("warmup", warmup)
        check_positive_int("active", active)
        check_positive_int("repeat", repeat)
        self.schedule = partial(_action, wait=wait, warmup=warmup, active=active, repeat=repeat)
        self.profile_kwargs = profile_kwargs
        self._skipped = wait + warmup
        self._active = active
        self._profiler: torch.profiler.profile | None = None

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.ranks.run_together(lambda: self.output_dir.mkdir(parents=True, exist_ok=True), only_first=True)
        write = torch.profiler.tensorboard_trace_handler(os.fspath(self.output_dir), f"rank{trainer.ranks.rank}")
        self._profiler = torch.profiler.profile(schedule=self.schedule, on_trace_ready=write, **self.profile_kwargs)
        self._profiler.start()

    def on_train_step_end(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._profiler is not None and self._profiler.step_num <= self._skipped:
            trainer.print(
                f"ProfilerCallback has written no trace: the run had {self._profiler.step_num} steps, and the first "
                f"{self._skipped} are not recorded. Pass a smaller wait or warmup."
            )
        if self._profiler is not None and self._profiler.step_num % (self._skipped + self._active) == self._skipped:
            self._profiler.on_trace_ready = None  # a trace has begun, but holds no step
        self._stop()

    def on_exception(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


_schedule = cache(torch.profiler.schedule)  # which warns if there is no warmup


def _action(step: int, **schedule: int) -> torch.profiler.ProfilerAction:
    """Return what a schedule of torch does in a step. Unlike this function, the schedule cannot be pickled."""
    action: torch.profiler.ProfilerAction = _schedule(**schedule)(step)
    return action
