"""Short trial runs: fewer batches in training and evaluation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.utils import LIMIT_BATCHES_VARIABLE, check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer


class LimitBatchesCallback(TrainerCallback):
    """Limits the batches of each epoch of training and of each evaluation.

    Progress bars, the run config and placeholders agree with the limit. Trainers have it by themselves when the
    environment variable ``PT_ACC_LIMIT_BATCHES`` is set; see also :class:`pytorch_accel_lite.utils.LimitBatches`.

    :param num_batches: batches that each process reads
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = check_positive_int("num_batches", num_batches)

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        request.max_batches = self.num_batches


def limit_from_environment() -> list[TrainerCallback]:
    """Return a :class:`LimitBatchesCallback` when ``PT_ACC_LIMIT_BATCHES`` asks for one."""
    value = os.environ.get(LIMIT_BATCHES_VARIABLE, "none")
    if value.lower() in ("", "none"):
        return []
    try:
        return [LimitBatchesCallback(int(value))]
    except ValueError:
        raise ValueError(
            f"The environment variable {LIMIT_BATCHES_VARIABLE}={value!r} must be a whole number of at least 1, or "
            "none."
        ) from None


class LimitEvalStepsCallback(TrainerCallback):
    """Limits the batches of evaluations. Where there are several limits, the smallest counts.

    :param num_eval_steps: batches that each process reads
    :param limit_intermediate_only: only limit evaluations in the middle of a training epoch
    """

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        self.num_eval_steps = check_positive_int("num_eval_steps", num_eval_steps)
        self.limit_intermediate_only = limit_intermediate_only
        self._limit_before: int | None = None

    def _applies(self, is_intermediate: bool) -> bool:
        return is_intermediate or not self.limit_intermediate_only

    # The argument may be given by its position, too, as subclasses written for the ancestor do.
    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        loader = trainer.eval_dataloader
        if self._applies(is_intermediate):
            self._limit_before = loader.limit
            loader.limit = self.num_eval_steps if loader.limit is None else min(loader.limit, self.num_eval_steps)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        loader = trainer.eval_dataloader
        before = self._limit_before
        if self._applies(is_intermediate):  # of several such callbacks the first found the largest limit, or none
            loader.limit = None if before is None or loader.limit is None else max(before, loader.limit)
