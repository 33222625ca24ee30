"""The ``Ranks`` of trainers in a job that survives the loss of processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from accelerate import Accelerator

from pytorch_accel_lite.extending import Ranks, Snapshot, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_overridden
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import count_values, shorten_to
from pytorch_accel_lite.extension_tools.processes import MACHINERY, open_trainers
from pytorch_accel_lite.extensions.logical import LogicalProcesses, SharedLossTrackers
from pytorch_accel_lite.extensions.takeover.joining_processes import wait_for_state
from pytorch_accel_lite.extensions.takeover.membership import Change, Membership

T = TypeVar("T")
MACHINERY.add(__file__)


class SurvivingRanks(Ranks):
    """Ranks that are updated in place when processes are lost or join.

    Attributes:
        membership: the membership of this process in the job
    """

    allows_threads = is_observed = False  # the supervisor finds stuck processes itself
    membership: ClassVar[Membership]
    _all: ClassVar[weakref.WeakSet[SurvivingRanks]] = weakref.WeakSet()

    def __init__(self, accelerator: Accelerator, purpose: str = "control") -> None:
        self._all.add(self)
        self.refresh()

    def refresh(self) -> None:
        """Adopt the current membership."""
        membership = self.membership
        self.rank, self.world_size = membership.rank, membership.world_size
        self.members = range(self.world_size)
        self.generation = 0 if membership.generation is None else membership.generation.number
        if self.world_size > 1:
            self._control = membership.control

    @classmethod
    def refresh_all(cls) -> None:
        """Make all trainers adopt the current membership."""
        for ranks in cls._all:
            ranks.refresh()
        for trainer in survivors():
            cls.membership.change_state(vars(trainer.accelerator.state))
            trackers = [run.unrecorded_losses for run in trainer.open_runs]
            shared = [each for each in trackers if isinstance(each, SharedLossTrackers)]
            for each in shared:
                each.catch_up()
            assert isinstance(trainer.division, LogicalProcesses)  # see survivors()
            trainer.division.divide(trainer.ranks)
            for each in shared if not cls.membership.is_in_update else ():
                each.add_up_local()

    @classmethod
    def announce(cls, change: Change) -> None:
        """Fire ``on_processes_changed`` in all trainers."""
        for trainer in survivors():
            trainer.current_run.goodput.note_takeover(change.seconds)
            if change.came:
                for run in trainer.open_runs:
                    run.control.realign()
            trainer.call_event("on_processes_changed", left=change.left, came=change.came)

    @property
    def is_alone(self) -> bool:
        return False

    def state_to_join(self) -> str | None:
        self.membership.trainings += 1
        if self.membership.generation is None:
            return wait_for_state(self.membership)
        restart = self.membership.restart
        if not restart.is_before_training:
            return None
        restart.is_before_training = False
        return self.result_of_first(lambda: restart.state)

    def repeat_if_process_lost(self, action: Callable[[], T], changes: object = None) -> T:
        keep = None if changes is None else partial(_undo_of_evaluation, cast(TrainerLike, changes))
        return self.membership.do(action, keep)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        return self.membership.do(lambda: super(SurvivingRanks, self)._reduce(values, operation))

    def begin_gathering(self, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
        gathered = self.membership.do(lambda: super(SurvivingRanks, self).begin_gathering(numbers)())
        return lambda: gathered

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        before = tensor.clone()
        return self.membership.do(lambda: super(SurvivingRanks, self).sum_on_device(tensor.copy_(before)))

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        every = list(tensors)
        if every:
            self.membership.do(lambda: super(SurvivingRanks, self).copy_from_first(every))

    def all_gather_object(self, value: Any, only_first: bool = False) -> list[Any]:
        return self.membership.do(lambda: super(SurvivingRanks, self).all_gather_object(value, only_first))

    def run_together(self, action: Callable[[], T], only_first: bool = False) -> list[T]:
        if only_first and self.membership.generation is None:  # the others have already written it
            return [None]  # type: ignore[list-item]
        return self.membership.do(lambda: super(SurvivingRanks, self).run_together(action, only_first))

    def result_of_first(self, make: Callable[[], T]) -> T:
        return make() if self.membership.generation is None else super().result_of_first(make)

    def barrier(self, timeout: timedelta | None = None) -> None:
        self.membership.do(lambda: super(SurvivingRanks, self).barrier(timeout))


def _undo_of_evaluation(trainer: TrainerLike) -> Callable[[], None]:
    """Return a function that undoes an evaluation: what it has recorded, and what callbacks have learned from it."""
    run, history = trainer.current_run, trainer.run_history
    trackers = run.loss_trackers
    counts = count_values(history)
    before = Snapshot()
    before.keep_generators()
    # The package's own callbacks only note that there was an evaluation, and a copy may take as much memory as a model.
    before.keep_states(
        cast(Any, callback)
        for callback in trainer.callback_handler
        if hasattr(callback, "load_state_dict") and is_overridden(callback, "on_eval_epoch_end")
    )

    def undo() -> None:
        shorten_to(history, counts)
        run.loss_trackers = trackers
        before.close()

    return undo


def survivors() -> list[TrainerLike]:
    """Return the open trainers, which continue when processes change.

    Raises:
        RuntimeError: if one of them cannot continue
    """
    trainers = cast(list[TrainerLike], open_trainers())
    for trainer in trainers:
        if not isinstance(trainer.division, LogicalProcesses):
            raise RuntimeError(
                f"A process was lost, and {type(trainer).__name__} cannot go on without it: its results depend on the "
                "number of processes. Create it with a seed and logical_processes=."
            )
    return trainers
