"""Watching for runs that make no progress: starts ``RunWatch`` with a training run, and stops it with the run."""

from __future__ import annotations

import uuid
from functools import partial

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import set_own_listening
from pytorch_accel_lite.extensions.hang_watch.run_watch import Progressed, RunWatch


class HangWatchCallback(TrainerCallback):
    """Print where every process is if a run makes no progress for some time, and optionally end the job.

    Progress is a training or evaluation step, or the end of an epoch; choose a time longer than the slowest of them,
    including the callbacks within it and the saving of states. A thread in each process watches, and exchanges
    positions with the others without collectives, so it works while those hang. The report names the processes that
    are behind first::

        No progress for 60 seconds.
          rank 1, epoch 1, step 5: in load_batch of data.py:12
          rank 0, epoch 1, step 5: in _engine_run_backward of graph.py:841

    and continues with the stack of each. A process that cannot answer is named, too. If native code keeps Python from
    running, the process prints its stacks itself.

    A step only increments a counter; it reads no clock.

    Args:
        seconds: how long a run may make no progress
        end: after the report, end every process with exit code 75, so that a launcher restarts the job from its last
            training state. The time limit of all process groups is then lowered to a little more than twice
            ``seconds``, in case a process cannot end itself. Both apply only after the first update of a run, which may
            take longer, for example to compile the model; before it, a hang is only reported.

    Attributes:
        steps: number of steps and ends of epochs so far, which the watching thread reads
    """

    affects_training = False

    def __init__(self, seconds: float = 300, end: bool = False) -> None:
        self.seconds = check_range("seconds", seconds, above=0)
        self.end = end
        self._watch: RunWatch | None = None
        self.steps = 0  # steps and ends of epochs, for the watching thread

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._stop()
        self.steps = 0
        set_own_listening(trainer, self, True, "on_update_end")
        name = trainer.broadcast_object(uuid.uuid4().hex)  # the store may still have the keys of an earlier job
        self._watch = RunWatch(self.seconds, trainer.ranks, partial(self._progressed, trainer), name)
        self._watch.start()

    def _progressed(self, trainer: TrainerLike) -> Progressed:
        return Progressed(self.steps, trainer.progress.epoch, trainer.progress.step)

    def _count(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self.steps += 1

    on_train_epoch_start = on_train_step_end = on_train_batch_skipped = on_train_epoch_end = _count
    on_eval_epoch_start = on_eval_step_end = on_eval_epoch_end = on_training_run_epoch_end = _count

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        set_own_listening(trainer, self, False, "on_update_end")  # only the first counts
        if self.end and self._watch is not None:
            self._watch.allow_ending()

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._stop()

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        self._stop(f"has left the run: {type(exception).__name__}: {exception}")

    def _stop(self, reason: str = "") -> None:
        if self._watch is not None:
            self._watch.stop(reason)
        self._watch = None
