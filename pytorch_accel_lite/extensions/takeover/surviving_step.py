"""The training step of logical processes in a job that loses processes: an update is made as a whole, or again."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from pytorch_accel_lite.extending import Batch, BatchOutput, Run, TrainerLike, capture_generators, restore_generators
from pytorch_accel_lite.extensions.logical import KeepsShares, LogicalStep, LogicalWindow, SharedLossTrackers
from pytorch_accel_lite.extensions.takeover.beginning_again import note_states
from pytorch_accel_lite.extensions.takeover.joining import enter, keep_end, let_in, let_in_by_beginning_again
from pytorch_accel_lite.extensions.takeover.membership import Membership, RepeatError
from pytorch_accel_lite.extensions.takeover.surviving_ranks import SurvivingRanks

#: A state of a callback, for one logical process.
StateDict: TypeAlias = dict[str, Any]


class _Kept(NamedTuple):
    """What one process keeps of its logical processes, and the others, too, in case it is lost.

    Args:
        first: number of the first of them
        losses: the running losses of each
        of_callbacks: what each of ``SurvivingWindow.keepers`` keeps of them
        is_wanted: whether it knows of others that are to be let in
    """

    first: int
    losses: list[dict[str, tuple[float, float]]]
    of_callbacks: list[list[StateDict]]
    is_wanted: bool


class _Before(NamedTuple):
    """What an update that is interrupted has changed."""

    progress: dict[str, int]
    kept: _Kept
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    generators: dict[str, Any]


class SurvivingWindow(LogicalWindow):
    """An accumulation window that ends when all processes have its gradients.

    With them, the processes exchange what they keep of their shares. Nothing else of an update communicates, and
    nothing before that changes what all of them have in common.

    Attributes:
        trackers: the running losses of the epoch
        keepers: the callbacks that keep something of each logical process
        is_wanted: whether other processes are to be let in before the next update
    """

    trackers: SharedLossTrackers | None = None
    keepers: Sequence[KeepsShares] = ()
    is_wanted = False

    def finish(self, optimizer: Any) -> Any:
        """Give the parameters their gradients, once all processes have them."""
        membership = SurvivingRanks.membership
        try:
            factor = super().finish(optimizer)
            outcome = membership.exchange(self.of_shares(membership))
        except RuntimeError as error:
            if not membership.recover(error):
                raise RepeatError from error
            outcome = membership.outcome
        else:
            membership.complete(outcome)
        membership.is_in_update = membership.is_in_action = False
        self._keep(outcome, membership)
        return factor

    def of_shares(self, membership: Membership) -> _Kept:
        """Return what is kept of the shares of this process."""
        assert self.trackers is not None
        of_callbacks = [keeper.states_of_shares() for keeper in self.keepers]
        return _Kept(self.trackers.first_local, self.trackers.local_sums(), of_callbacks, membership.watcher.is_wanted)

    def load(self, kept: _Kept) -> None:
        """Take over what is kept of the shares of a process."""
        assert self.trackers is not None
        self.trackers.load_sums(kept.losses, kept.first)
        for keeper, states in zip(self.keepers, kept.of_callbacks, strict=True):
            keeper.load_states_of_shares(states, kept.first)

    def _keep(self, outcome: Sequence[_Kept], membership: Membership) -> None:
        """Keep what is of the shares of other processes, or has been."""
        assert self.trackers is not None
        are_others = len(outcome) != membership.world_size
        local = self.trackers.first_local
        for kept in outcome:
            if are_others or kept.first != local:
                self.load(kept)
        if are_others:
            self.trackers.add_up_local()
        self.is_wanted = any(kept.is_wanted for kept in outcome)


class SurvivingStep(LogicalStep):
    """The training steps of the logical processes of this process. An interrupted update is repeated."""

    window_kind = SurvivingWindow
    _window: SurvivingWindow
    _before: _Before | None = None

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        self._generation = SurvivingRanks.membership.generation

    def begin(self, trainer: TrainerLike) -> None:
        """Say for how many processes there is work."""
        super().begin(trainer)
        SurvivingRanks.membership.store.say("most", str(self._logical.count))
        note_states(trainer, SurvivingRanks.membership)
        if trainer.is_sharded:
            SurvivingRanks.membership.store.say("sharded")

    def end(self, trainer: TrainerLike) -> None:
        """Keep the state of the end for processes that come later."""
        membership = SurvivingRanks.membership
        if membership.is_open and membership.generation is not None and not trainer.is_sharded:
            keep_end(trainer, membership)

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass of each logical process, and add up their gradients.

        Raises:
            RepeatError: if the batch was read when there were other processes
        """
        if run.window.filled == 1:
            self._begin_update(trainer, run)
        return super().forward_backward(trainer, run, batch)

    def _begin_update(self, trainer: TrainerLike, run: Run) -> None:
        window, membership = self._window, SurvivingRanks.membership
        if membership.generation is None:
            enter(run, membership)
        elif window.is_wanted:
            window.is_wanted = False
            (let_in_by_beginning_again if trainer.is_sharded else let_in)(trainer, run, membership)
        if self._generation is not membership.generation:
            self._generation = membership.generation
            raise RepeatError
        assert isinstance(run.loss_trackers, SharedLossTrackers)
        window.trackers = run.loss_trackers
        window.keepers = [callback for callback in trainer.callback_handler if isinstance(callback, KeepsShares)]
        self._find_buffers()
        buffers = self._buffers()
        self._before = _Before(
            run.progress.state_dict(),
            copy.deepcopy(window.of_shares(membership)),
            [(buffer, buffer.detach().clone()) for buffer in buffers],
            capture_generators(),
        )
        membership.is_in_update = membership.is_in_action = True
        membership.begun_at = time.monotonic()

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
        self._window.load(before.kept)
        trackers.unweighed.clear()
        trackers.add_up_local()
        with torch.no_grad():
            for buffer, value in before.buffers:
                buffer.copy_(value)
        restore_generators(before.generators)
