"""A trainer for timm's schedulers."""

from __future__ import annotations

from pytorch_accel_lite.run_attributes import Offered
from pytorch_accel_lite.run_config import RunRequest
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import accepts


class TrainerWithTimmScheduler(Trainer):
    """A :class:`Trainer` for timm's schedulers, stepped as in timm's own training script. Needs the extra ``timm``.

    Calls ``step_update(num_updates)`` after every update, and ``step(epoch, metric)`` after every epoch, with the
    number of finished epochs and the latest loss. The scheduler's ``t_in_epochs`` determines which takes effect.
    """

    @Offered
    def num_updates(self) -> int:
        """The number of updates so far, scaled if the run was resumed with a different number of updates per epoch."""
        return self.progress.update + self.current_run.schedule_shift

    def scheduler_step(self) -> None:
        """Step the scheduler after an update."""
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.num_updates)

    def advance_scheduler(self, num_updates: int) -> None:
        """Step a new scheduler to its position after a number of updates."""
        self.scheduler.step_update(num_updates=num_updates)

    def training_run_epoch_end(self) -> None:
        """Step the scheduler after an epoch."""
        if self.scheduler is not None:
            self.scheduler.step(self.progress.epoch, next(iter(self.current_run.recorded_losses.values()), None))

    def _check_scheduler(self, request: RunRequest) -> None:
        super()._check_scheduler(request)
        if request.scheduler_interval != "update":
            raise ValueError(
                f"scheduler_interval={request.scheduler_interval!r}: TrainerWithTimmScheduler steps timm's schedulers "
                "after both updates and epochs, as needed. Omit scheduler_interval and scheduler_metric."
            )
        scheduler = self.scheduler
        takes = scheduler is None or (hasattr(scheduler, "step_update") and accepts(scheduler.step, 1, 0.0))
        if not takes:
            raise TypeError(
                f"create_scheduler_fn returned {type(scheduler).__name__}, which is not stepped like timm's "
                "schedulers, by step_update(num_updates) and step(epoch, metric). Use Trainer for it."
            )
