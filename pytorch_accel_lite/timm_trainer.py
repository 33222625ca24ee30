"""A trainer for timm's schedulers."""

from __future__ import annotations

from pytorch_accel_lite.checks.arguments import accepts
from pytorch_accel_lite.run_attributes import Offered
from pytorch_accel_lite.run_config import RunRequest
from pytorch_accel_lite.trainer import Trainer


class TrainerWithTimmScheduler(Trainer):
    """A :class:`Trainer` for timm's schedulers, stepped as timm's own training script does (extra ``timm``).

    ``step_update(num_updates)`` is called after every update, and ``step(epoch, metric)`` after every epoch, with the
    number of finished epochs and the latest loss. The scheduler's own ``t_in_epochs`` says which takes effect.
    """

    @Offered
    def num_updates(self) -> int:
        """The number of updates made in this run, or, when it was resumed with others in an epoch, in one like that."""
        return self.progress.update + self.current_run.schedule_shift

    def scheduler_step(self) -> None:
        """Tell the scheduler of an update."""
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.num_updates)

    def advance_scheduler(self, num_updates: int) -> None:
        """Tell a new scheduler of the updates before."""
        self.scheduler.step_update(num_updates=num_updates)

    def training_run_epoch_end(self) -> None:
        """Tell the scheduler of the end of an epoch."""
        if self.scheduler is not None:
            self.scheduler.step(self.progress.epoch, next(iter(self.current_run.recorded_losses.values()), None))

    def _check_scheduler(self, request: RunRequest) -> None:
        super()._check_scheduler(request)
        if request.scheduler_interval != "update":
            raise ValueError(
                f"scheduler_interval={request.scheduler_interval!r}: TrainerWithTimmScheduler steps timm's schedulers "
                "after updates and epochs, as they need it. Leave scheduler_interval and scheduler_metric out."
            )
        scheduler = self.scheduler
        takes = scheduler is None or (hasattr(scheduler, "step_update") and accepts(scheduler.step, 1, 0.0))
        if not takes:
            raise TypeError(
                f"create_scheduler_fn returned {type(scheduler).__name__}, which is not stepped as timm's schedulers "
                "are: step_update(num_updates), step(epoch, metric). Use Trainer for it."
            )
