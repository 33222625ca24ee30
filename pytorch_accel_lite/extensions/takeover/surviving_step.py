"""The training step of logical processes in a job that loses processes: an update is made as a whole, or again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pytorch_accel_lite.extending import Batch, BatchOutput, Run, TrainerLike, capture_generators, restore_generators
from pytorch_accel_lite.extensions.logical import LogicalStep, LogicalWindow, SharedLossTrackers
from pytorch_accel_lite.extensions.takeover.joining import enter, let_in
from pytorch_accel_lite.extensions.takeover.membership import Membership, RepeatError
from pytorch_accel_lite.extensions.takeover.surviving_ranks import SurvivingRanks


class _Sums(NamedTuple):
    """The running losses of the logical processes of one process, which the others keep in case it is lost."""

    first: int
    by_number: list[dict[str, tuple[float, float]]]
    is_wanted: bool


class _Before(NamedTuple):
    """What an update that is interrupted has changed."""

    progress: dict[str, int]
    sums: _Sums
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    generators: dict[str, Any]


class SurvivingWindow(LogicalWindow):
    """An accumulation window that ends when all processes have its gradients.

    With them, the processes exchange the running losses of their shares. Nothing else of an update communicates, and
    nothing before that changes what all of them have in common.

    :ivar trackers: the running losses of the epoch
    :ivar is_wanted: whether other processes are to be let in before the next update
    """

    trackers: SharedLossTrackers | None = None
    is_wanted = False

    def finish(self, optimizer: Any) -> Any:
        """Give the parameters their gradients, once all processes have them."""
        membership = SurvivingRanks.membership
        try:
            factor = super().finish(optimizer)
            outcome = membership.exchange(self.sums_of_shares(membership))
        except RuntimeError as error:
            if not membership.recover(error):
                raise RepeatError from error
            outcome = membership.outcome
        else:
            membership.complete(outcome)
        membership.is_in_update = membership.is_in_action = False
        self._keep(outcome, membership)
        return factor

    def sums_of_shares(self, membership: Membership) -> _Sums:
        """Return the running losses of the shares of this process."""
        assert self.trackers is not None
        by_number, wanted = self.trackers.local_sums(), membership.watcher.is_wanted
        return _Sums(self.trackers.first_local, by_number, wanted)

    def _keep(self, outcome: Sequence[_Sums], membership: Membership) -> None:
        """Keep the losses of all shares."""
        assert self.trackers is not None
        local = self.trackers.first_local
        for sums in outcome:
            if sums.first != local or len(outcome) != membership.world_size:
                self.trackers.load_sums(sums.by_number, sums.first)
        if len(outcome) != membership.world_size:
            self.trackers.add_up_local()
        self.is_wanted = any(sums.is_wanted for sums in outcome)


class SurvivingStep(LogicalStep):
    """The training steps of the logical processes of this process. An interrupted update is repeated."""

    window_kind = SurvivingWindow
    _window: SurvivingWindow
    _before: _Before | None = None

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        self._generation = SurvivingRanks.membership.generation
        self._lets_in = False

    def begin(self, trainer: TrainerLike) -> None:
        """Let other processes in during the first training of the program, which they begin with, too."""
        super().begin(trainer)
        membership = SurvivingRanks.membership
        self._lets_in = membership.trainings == 0
        membership.trainings += 1
        if not self._lets_in:
            membership.store.say("closed")

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass of each logical process, and add up their gradients.

        :raises RepeatError: if the batch was read when there were other processes
        """
        if run.window.filled == 1:
            self._begin_update(trainer, run)
        return super().forward_backward(trainer, run, batch)

    def _begin_update(self, trainer: TrainerLike, run: Run) -> None:
        window, membership = self._window, SurvivingRanks.membership
        if membership.generation is None:
            enter(run, membership)
        elif window.is_wanted and self._lets_in:
            window.is_wanted = False
            let_in(trainer, run, membership)
        if self._generation is not membership.generation:
            self._generation = membership.generation
            raise RepeatError
        assert isinstance(run.loss_trackers, SharedLossTrackers)
        window.trackers = run.loss_trackers
        self._find_buffers()
        buffers = self._buffers()
        self._before = _Before(
            run.progress.state_dict(),
            window.sums_of_shares(membership),
            [(buffer, buffer.detach().clone()) for buffer in buffers],
            capture_generators(),
        )
        membership.is_in_update = membership.is_in_action = True

    def recover(self, trainer: TrainerLike, run: Run, error: Exception) -> bool:
        """After the loss of a process, restore what was before the update, which is then repeated."""
        window, membership, before = self._window, SurvivingRanks.membership, self._before
        is_repeat = isinstance(error, RepeatError)
        if not (membership.is_in_update or is_repeat):
            return False
        if membership.is_in_update:
            membership.is_in_update = membership.is_in_action = False
            if not is_repeat:
                if not isinstance(error, RuntimeError):
                    return False
                membership.recover(error)
            assert before is not None
            self._restore(run, before)
        window.restart()
        window.filled, self._before = 0, None
        run.batch = None
        return True

    def _restore(self, run: Run, before: _Before) -> None:
        trackers = run.loss_trackers
        assert isinstance(trackers, SharedLossTrackers)
        run.progress.load_state_dict(before.progress)
        trackers.load_sums(before.sums.by_number, before.sums.first)
        trackers.unweighed.clear()
        trackers.add_up_local()
        with torch.no_grad():
            for buffer, value in before.buffers:
                buffer.copy_(value)
        restore_generators(before.generators)
