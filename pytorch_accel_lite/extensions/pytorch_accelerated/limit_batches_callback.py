"""Limits on the number of batches in training and evaluation, for short trial runs."""

from __future__ import annotations

import os

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int

#: The environment variable that limits every trainer.
LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"


class LimitBatchesCallback(TrainerCallback):
    """Limit the number of batches in each training epoch and each evaluation.

    If several limits apply, the smallest wins.

    Progress bars, the run config and placeholders reflect the limit. Setting the environment variable
    ``PT_ACC_LIMIT_BATCHES`` adds this callback to every trainer; see also
    ``pytorch_accel_lite.utils.LimitBatches``.

    Args:
        num_batches: number of batches that each process reads
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = check_positive_int("num_batches", num_batches)

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        limits = (self.num_batches, request.max_batches)
        request.max_batches = min(limit for limit in limits if limit is not None)


def limit_from_environment() -> list[TrainerCallback]:
    """Return a list with a ``LimitBatchesCallback`` if ``PT_ACC_LIMIT_BATCHES`` is set, or an empty list."""
    value = os.environ.get(LIMIT_BATCHES_ENV_VAR, "none")
    if value.lower() in ("", "none"):
        return []
    try:
        return [LimitBatchesCallback(int(value))]
    except ValueError:
        raise ValueError(
            f"The environment variable {LIMIT_BATCHES_ENV_VAR}={value!r} must be an integer of at least 1, or none."
        ) from None


class LimitEvalStepsCallback(TrainerCallback):
    """Limit the number of batches in evaluations. If several limits apply, the smallest wins.

    Args:
        num_eval_steps: number of batches that each process reads
        limit_intermediate_only: limit only those of ``StepBasedEvaluationCallback`` and ``run_evaluation()``, not the
            run's own, also if ``evaluate_every`` lets these take place within epochs
    """

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        self.num_eval_steps = check_positive_int("num_eval_steps", num_eval_steps)
        self.limit_intermediate_only = limit_intermediate_only
        self._limit_before: int | None = None

    def _applies(self, is_intermediate: bool) -> bool:
        return is_intermediate or not self.limit_intermediate_only

    # Subclasses written for pytorch-accelerated pass is_intermediate by position.
    def on_eval_epoch_start(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: object) -> None:
        loader = trainer.run.data.required_eval_loader
        if self._applies(is_intermediate):
            self._limit_before = loader.limit
            loader.limit = self.num_eval_steps if loader.limit is None else min(loader.limit, self.num_eval_steps)

    def on_eval_epoch_end(self, trainer: TrainerLike, is_intermediate: bool = False, **kwargs: object) -> None:
        loader = trainer.run.data.required_eval_loader
        previous = self._limit_before
        if self._applies(is_intermediate):  # the first such callback has noted the limit before all of them
            loader.limit = None if previous is None or loader.limit is None else max(previous, loader.limit)


class LimitBatches:
    """Limits trainers created within ``with LimitBatches(n):`` to n batches per process, epoch and evaluation."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = check_positive_int("num_batches", num_batches)
        self._before: str | None = None

    def __enter__(self) -> LimitBatches:
        self._before = os.environ.get(LIMIT_BATCHES_ENV_VAR)
        os.environ[LIMIT_BATCHES_ENV_VAR] = str(self.num_batches)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[LIMIT_BATCHES_ENV_VAR]
        else:
            os.environ[LIMIT_BATCHES_ENV_VAR] = self._before
