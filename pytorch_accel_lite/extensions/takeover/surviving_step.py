"""The training step of logical processes under ``launch``: an update that a lost process interrupts is repeated."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from pytorch_accel_lite.extending import Batch, BatchOutput, Run, TrainerLike
from pytorch_accel_lite.extension_tools.random_numbers import capture_generators, restore_generators, seed_all
from pytorch_accel_lite.extensions.logical import KeepsShares, LogicalStep, LogicalWindow, SharedLossTrackers
from pytorch_accel_lite.extensions.takeover.job_store import Key
from pytorch_accel_lite.extensions.takeover.joining_processes import admit, admit_by_restart, enter, save_final_state
from pytorch_accel_lite.extensions.takeover.membership import RepeatError
from pytorch_accel_lite.extensions.takeover.piggyback import Piggyback, value_of
from pytorch_accel_lite.extensions.takeover.program_restart import note_existing_states
from pytorch_accel_lite.extensions.takeover.shard_replicas import RunShards
from pytorch_accel_lite.extensions.takeover.surviving_ranks import SurvivingRanks

#: The state of a callback for one logical process.
StateDict: TypeAlias = dict[str, Any]
_MOST_KEPT = 1 << 24  # bytes of parameters up to which the state of the shares travels with the last gradients


class _Kept(NamedTuple):
    """The state of the logical processes of one process. The other processes hold a copy, in case it is lost.

    Args:
        first: the number of the process's first logical process
        losses: the running losses of each logical process
        of_callbacks: for each callback in ``SurvivingWindow.keepers``, its states of the logical processes
    """

    first: int
    losses: list[dict[str, tuple[float, float]]]
    of_callbacks: list[list[StateDict]]


@dataclass
class _Before:
    """The state before an update, to restore it if the update is interrupted.

    Args:
        seed: the seed from which all generators are restored; ``None`` if their states are kept
        generators: the states of the generators, if they are kept
        buffers: the buffers of the model, each with its copy, once they have been copied
    """

    progress: dict[str, int]
    kept: _Kept
    seed: int | None
    generators: StateDict
    buffers: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class SurvivingWindow(LogicalWindow):
    """An accumulation window that is complete when all processes have its gradients.

    The same exchange gathers the states of the processes' shares. Nothing in an update communicates after it, and
    nothing before it changes state that the processes share.

    Attributes:
        trackers: the running losses of the epoch
        keepers: the callbacks that keep a state for each logical process
        must_regroup: whether new processes are to be admitted before the next update
    """

    trackers: SharedLossTrackers | None = None
    keepers: Sequence[KeepsShares] = ()
    must_regroup = False

    def __init__(self, trainer: TrainerLike, steps: int, batch_size: int, count: int) -> None:
        super().__init__(trainer, steps, batch_size, count)
        self._piggyback = Piggyback()
        self._are_small = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) <= _MOST_KEPT

    def restart(self) -> None:
        """Begin the window again, with the logical processes divided among the current processes."""
        super().restart()
        self._piggyback = Piggyback()

    def begin(self, trackers: SharedLossTrackers, keepers: Sequence[KeepsShares]) -> None:
        """Begin an update."""
        self.trackers, self.keepers = trackers, keepers
        self.sums.room = self._piggyback.room if self._are_small else 0

    @property
    def has_exchanged(self) -> bool:
        """Whether the processes have exchanged gradients, so that all have begun this update."""
        return self.sums.has_slices

    def finish_sums(self) -> None:
        """Give the parameters their gradients, once all processes have them."""
        membership = SurvivingRanks.membership
        if self.sums.room and self.sums.has_slices:
            self.sums.finish(self._gather_last)
            return
        self.sums.finish()
        if membership.world_size > 1:
            self._gather_last(torch.zeros(self._piggyback.room, dtype=torch.uint8))
            return
        membership.complete()
        membership.is_in_update = membership.is_in_action = False
        self.must_regroup = membership.closer.must_regroup

    def _gather_last(self, sent: torch.Tensor) -> torch.Tensor:
        """All-gather messages in rows; the states of the shares travel at the end of each message."""
        membership, piggyback = SurvivingRanks.membership, self._piggyback
        value = pickle.dumps(tuple(self.of_shares()))
        rows: torch.Tensor | None = None
        is_repaired = False
        try:
            while True:
                piggyback.attach(sent, membership.closer.must_regroup, value)
                last = membership.gather(sent)
                rows = last if rows is None else rows
                tails = piggyback.tails(last)
                if (must_regroup := piggyback.read_flags(tails)) is not None:
                    break
                sent = torch.zeros(piggyback.room, dtype=torch.uint8)
        except RuntimeError as error:
            if not membership.recover(error):
                raise RepeatError from error
            assert membership.outcome is not None
            last, is_repaired = membership.outcome, True
            rows = last if rows is None else rows
            tails = piggyback.tails(last)
            must_regroup = piggyback.read_flags(tails)
        else:
            membership.complete(last)
        membership.is_in_update = membership.is_in_action = False
        self.must_regroup = bool(must_regroup)
        self._keep(tails, is_repaired)
        return rows

    def of_shares(self) -> _Kept:
        """Return the state of the shares of this process."""
        assert self.trackers is not None
        of_callbacks = [keeper.states_of_shares() for keeper in self.keepers]
        return _Kept(self.trackers.first_local, self.trackers.local_sums(), of_callbacks)

    def load(self, kept: _Kept) -> None:
        """Load the state of the shares of a process."""
        assert self.trackers is not None
        self.trackers.load_sums(kept.losses, kept.first)
        for keeper, states in zip(self.keepers, kept.of_callbacks, strict=True):
            keeper.load_states_of_shares(states, kept.first)

    def _keep(self, tails: list[bytes], is_repaired: bool) -> None:
        """Keep the states of the other processes' shares. Those of loss trackers alone are only read after a loss.

        Args:
            is_repaired: whether the shares were redivided after the messages were sent
        """
        assert self.trackers is not None
        if is_repaired:
            self._load_all(tails)
            self.trackers.add_up_local()
            return
        del tails[SurvivingRanks.membership.rank]
        if self.keepers:
            self._load_all(tails)
        else:
            self.trackers.postpone(partial(self._load_all, tails))

    def _load_all(self, tails: Sequence[bytes]) -> None:
        for tail in tails:
            self.load(_Kept(*pickle.loads(value_of(tail))))


class SurvivingStep(LogicalStep):
    """Trains on the logical processes of this process, and repeats an update that a lost process interrupts."""

    window_kind = SurvivingWindow
    _window: SurvivingWindow
    _before: _Before | None = None
    _shards: RunShards | None = None
    _seed: int | None = None  # the seed of all generators at the end of the latest step

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        if SurvivingRanks.membership.bypasses_meshes:
            SurvivingRanks.membership.check_is_first_training()
        super().__init__(trainer, run)

    def begin_replicas(self, trainer: TrainerLike, run: Run) -> None:
        """Start with the same values on all processes, of which some may be lost meanwhile."""
        super().begin_replicas(trainer, run)
        self._generation = SurvivingRanks.membership.generation

    def begin(self, trainer: TrainerLike, run: Run) -> None:
        """Publish how many processes the run can use."""
        super().begin(trainer, run)
        SurvivingRanks.membership.store.put(Key.MOST_PROCESSES, str(self._logical.count))
        note_existing_states(trainer, SurvivingRanks.membership)
        if trainer.is_sharded:
            SurvivingRanks.membership.store.put(Key.SHARDED)
            self._shards = SurvivingRanks.membership.shards = RunShards(trainer, run, SurvivingRanks.membership)

    def end(self, trainer: TrainerLike, run: Run) -> None:
        """Save the final state for processes that join during a later training."""
        membership = SurvivingRanks.membership
        if membership.is_open and membership.generation is not None and not trainer.is_sharded:
            save_final_state(trainer, membership)
        if self._shards is not None:
            self._shards.end()

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass of each logical process, and add up their gradients.

        Raises:
            RepeatError: if the batch was read for an earlier division among the processes
        """
        if run.window.filled == 1:
            self._begin_update(trainer, run)
        output = super().forward_backward(trainer, run, batch)
        assert batch.share is not None
        self._seed = batch.share.seed
        if self._window.has_exchanged:
            SurvivingRanks.membership.drop_outcome()
        return output

    def _begin_update(self, trainer: TrainerLike, run: Run) -> None:
        window, membership = self._window, SurvivingRanks.membership
        if membership.generation is None:
            enter(run, membership)
        elif membership.bypasses_meshes and self._shards is not None:
            self._shards.save_and_restart()
        elif window.must_regroup:
            window.must_regroup = False
            (admit_by_restart if trainer.is_sharded else admit)(trainer, run, membership)
        if self._generation is not membership.generation:
            self._generation = membership.generation
            raise RepeatError
        assert isinstance(run.loss_trackers, SharedLossTrackers)
        keepers = [callback for callback in trainer.callback_handler if _keeps_shares(cast(type, type(callback)))]
        window.begin(run.loss_trackers, cast(list[KeepsShares], keepers))
        kept = window.of_shares()
        if keepers:
            kept = kept._replace(of_callbacks=copy.deepcopy(kept.of_callbacks))
        # Within an epoch, each step starts with the generators that the previous step has seeded.
        seed = self._seed if run.progress.step else None
        generators = {} if seed is not None else capture_generators()
        self._before = _Before(vars(run.progress).copy(), kept, seed, generators)
        membership.is_in_update = membership.is_in_action = True
        membership.begun_at = time.monotonic()

    def _copy_buffers(self) -> list[torch.Tensor]:
        copies = super()._copy_buffers()
        if self._before is not None and self._before.buffers is None:
            self._before.buffers = [*zip(self._buffers(), copies, strict=True)]
        return copies

    def recover(self, trainer: TrainerLike, run: Run, error: Exception) -> bool:
        """After the loss of a process, restore the state before the update, so that it can be repeated."""
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
            for buffer, value in before.buffers or ():
                buffer.copy_(value)
        if before.seed is None:
            restore_generators(before.generators)
        else:
            seed_all(before.seed)


@cache
def _keeps_shares(kind: type) -> bool:
    return issubclass(kind, KeepsShares)
