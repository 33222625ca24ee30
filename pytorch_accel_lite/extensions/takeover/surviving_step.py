"""The training step of logical processes in a job that loses processes: an update is made as a whole, or again."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from pytorch_accel_lite.extending import Batch, BatchOutput, Run, TrainerLike, capture_generators, restore_generators
from pytorch_accel_lite.extending_callbacks import seed_all
from pytorch_accel_lite.extensions.logical import KeepsShares, LogicalStep, LogicalWindow, SharedLossTrackers
from pytorch_accel_lite.extensions.takeover.beginning_again import note_states
from pytorch_accel_lite.extensions.takeover.copies_of_shards import ShardsOfRun
from pytorch_accel_lite.extensions.takeover.enclosures import Enclosures, read
from pytorch_accel_lite.extensions.takeover.job_store import Key
from pytorch_accel_lite.extensions.takeover.joining import enter, keep_end, let_in, let_in_by_beginning_again
from pytorch_accel_lite.extensions.takeover.membership import RepeatError
from pytorch_accel_lite.extensions.takeover.surviving_ranks import SurvivingRanks

#: A state of a callback, for one logical process.
StateDict: TypeAlias = dict[str, Any]
_MOST_KEPT = 1 << 24  # bytes of gradients that each process keeps, so that they need no exchange of their own


class _Kept(NamedTuple):
    """What a process keeps of its logical processes. The others have a copy, in case the process is lost.

    Args:
        first: the number of the process's first logical process
        losses: the running losses of each logical process
        of_callbacks: what each callback in ``SurvivingWindow.keepers`` keeps of the logical processes
    """

    first: int
    losses: list[dict[str, tuple[float, float]]]
    of_callbacks: list[list[StateDict]]


@dataclass
class _Before:
    """What an update that is interrupted has changed.

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
    """An accumulation window that ends when all processes have its gradients.

    With them, the processes gather what they keep of their shares. Nothing else of an update communicates after that,
    and nothing before it changes what all of them have in common.

    Attributes:
        trackers: the running losses of the epoch
        keepers: the callbacks that keep something of each logical process
        is_wanted: whether other processes are to be let in before the next update
    """

    trackers: SharedLossTrackers | None = None
    keepers: Sequence[KeepsShares] = ()
    is_wanted = False

    def __init__(self, trainer: TrainerLike, steps: int, batch_size: int, count: int) -> None:
        super().__init__(trainer, steps, batch_size, count)
        self._enclosures = Enclosures()
        self._are_small = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) <= _MOST_KEPT

    def restart(self) -> None:
        """Begin the window again, with the logical processes divided among the processes as they are now."""
        super().restart()
        self._enclosures = Enclosures()

    def begin(self, trackers: SharedLossTrackers, keepers: Sequence[KeepsShares]) -> None:
        """Begin an update."""
        self.trackers, self.keepers = trackers, keepers
        self.sums.room = self._enclosures.room if self._are_small else 0

    @property
    def has_exchanged(self) -> bool:
        """Whether all processes have begun this update, as they have exchanged gradients."""
        return self.sums.has_slices

    def finish_sums(self) -> None:
        """Give the parameters their gradients, once all processes have them."""
        membership = SurvivingRanks.membership
        if self.sums.room and self.sums.has_slices:
            self.sums.finish(self._gather_last)
            return
        self.sums.finish()
        if membership.world_size > 1:
            self._gather_last(torch.zeros(self._enclosures.room, dtype=torch.uint8))
            return
        membership.complete()
        membership.is_in_update = membership.is_in_action = False
        self.is_wanted = membership.watcher.is_wanted

    def _gather_last(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what each process sends, in rows, and keep what the others keep, which travels at the end of it."""
        membership, enclosures = SurvivingRanks.membership, self._enclosures
        value = pickle.dumps(tuple(self.of_shares()))
        rows: torch.Tensor | None = None
        is_repaired = False
        try:
            while True:
                enclosures.enclose(sent, membership.watcher.is_wanted, value)
                last = membership.gather(sent)
                rows = last if rows is None else rows
                if (is_wanted := enclosures.read_flags(last)) is not None:
                    break
                sent = torch.zeros(enclosures.room, dtype=torch.uint8)
        except RuntimeError as error:
            if not membership.recover(error):
                raise RepeatError from error
            assert membership.outcome is not None
            last, is_repaired = membership.outcome, True
            rows = last if rows is None else rows
            is_wanted = enclosures.read_flags(last)
        else:
            membership.complete(last)
        membership.is_in_update = membership.is_in_action = False
        self.is_wanted = bool(is_wanted)
        self._keep(last, is_repaired)
        return rows

    def of_shares(self) -> _Kept:
        """Return what is kept of the shares of this process."""
        assert self.trackers is not None
        of_callbacks = [keeper.states_of_shares() for keeper in self.keepers]
        return _Kept(self.trackers.first_local, self.trackers.local_sums(), of_callbacks)

    def load(self, kept: _Kept) -> None:
        """Take over what is kept of the shares of a process."""
        assert self.trackers is not None
        self.trackers.load_sums(kept.losses, kept.first)
        for keeper, states in zip(self.keepers, kept.of_callbacks, strict=True):
            keeper.load_states_of_shares(states, kept.first)

    def _keep(self, rows: torch.Tensor, is_repaired: bool) -> None:
        """Keep what others keep of their shares. If only trackers do, it is read when a process is lost.

        Args:
            is_repaired: whether the shares have been divided otherwise since
        """
        assert self.trackers is not None
        enclosed = self._enclosures.cut(rows)
        if is_repaired:
            self._load_all(enclosed)
            self.trackers.add_up_local()
            return
        del enclosed[SurvivingRanks.membership.rank]
        if self.keepers:
            self._load_all(enclosed)
        else:
            self.trackers.postpone(partial(self._load_all, enclosed))

    def _load_all(self, enclosed: Sequence[bytes]) -> None:
        for each in enclosed:
            self.load(_Kept(*pickle.loads(read(each))))


class SurvivingStep(LogicalStep):
    """The training steps of the logical processes of this process. An interrupted update is repeated."""

    window_kind = SurvivingWindow
    _window: SurvivingWindow
    _before: _Before | None = None
    _shards: ShardsOfRun | None = None
    _seed: int | None = None  # of all generators at the end of the latest step

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        if SurvivingRanks.membership.stands_in:
            SurvivingRanks.membership.check_is_first_training()
        super().__init__(trainer, run)
        self._generation = SurvivingRanks.membership.generation

    def begin(self, trainer: TrainerLike) -> None:
        """Say for how many processes there is work."""
        super().begin(trainer)
        SurvivingRanks.membership.store.say(Key.MOST_PROCESSES, str(self._logical.count))
        note_states(trainer, SurvivingRanks.membership)
        if trainer.is_sharded:
            SurvivingRanks.membership.store.say(Key.SHARDED)
            self._shards = SurvivingRanks.membership.shards = ShardsOfRun(
                trainer, trainer.current_run, SurvivingRanks.membership
            )

    def end(self, trainer: TrainerLike) -> None:
        """Keep the state of the end for processes that come later."""
        membership = SurvivingRanks.membership
        if membership.is_open and membership.generation is not None and not trainer.is_sharded:
            keep_end(trainer, membership)
        if self._shards is not None:
            self._shards.end()

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass of each logical process, and add up their gradients.

        Raises:
            RepeatError: if the batch was read when there were other processes
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
        elif membership.stands_in and self._shards is not None:
            self._shards.begin_again()
        elif window.is_wanted:
            window.is_wanted = False
            (let_in_by_beginning_again if trainer.is_sharded else let_in)(trainer, run, membership)
        if self._generation is not membership.generation:
            self._generation = membership.generation
            raise RepeatError
        assert isinstance(run.loss_trackers, SharedLossTrackers)
        keepers = [callback for callback in trainer.callback_handler if _keeps_shares(cast(type, type(callback)))]
        window.begin(run.loss_trackers, cast(list[KeepsShares], keepers))
        kept = window.of_shares()
        if keepers:
            kept = kept._replace(of_callbacks=copy.deepcopy(kept.of_callbacks))
        # In an epoch, each step begins with the generators as the one before it has seeded them.
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
            for buffer, value in before.buffers or ():
                buffer.copy_(value)
        if before.seed is None:
            restore_generators(before.generators)
        else:
            seed_all(before.seed)


@cache
def _keeps_shares(kind: type) -> bool:
    return issubclass(kind, KeepsShares)
