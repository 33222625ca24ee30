"""Reporting where every process is when a run makes no progress."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
import uuid
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from pytorch_accel_lite.base.validation import check_range
from pytorch_accel_lite.distributed.positions import innermost_function, stack_of, waits_for_others
from pytorch_accel_lite.distributed.ranks import GroupTimeouts, connect
from pytorch_accel_lite.distributed.watch import EXIT_CODE as EXIT_CODE
from pytorch_accel_lite.distributed.watch import end as end_process
from pytorch_accel_lite.run.events import TrainerCallback, set_listening
from pytorch_accel_lite.run.state import TrainerLike

_LONGEST_INTERVAL = 5.0
_stores: Any = dist  # whose stub does not declare the stores


class HangWatchCallback(TrainerCallback):
    """Print where every process is when a run makes no progress for some time, and optionally end the job.

    Progress is a training or evaluation step, or the end of an epoch; choose a time longer than the slowest of them,
    including the callbacks within it and the saving of states. A thread in each process watches, and exchanges
    positions with the others without collectives, so it works while those hang. The report names the processes that
    are behind first::

        No progress for 60 seconds.
          rank 1, epoch 1, step 5: in load_batch of data.py:12
          rank 0, epoch 1, step 5: in _engine_run_backward of graph.py:841

    and continues with the stack of each. A process that cannot answer is named, too. If native code keeps Python from
    running, the process prints its stacks itself.

    A step only counts; it reads no clock.

    :param seconds: how long a run may make no progress
    :param end: after the report, end every process with exit code 75, so that a launcher restarts the job from its last
        training state. The time limit of all process groups is then lowered to a little more than twice ``seconds``,
        in case a process cannot end itself. Both apply only after the first update of a run, which may take longer, for
        example to compile the model; before it, a hang is only reported.
    """

    def __init__(self, seconds: float = 300, end: bool = False) -> None:
        self.seconds = check_range("seconds", seconds, above=0)
        self.end = end
        self._timeouts = GroupTimeouts()
        self._watch: _Watch | None = None
        self.steps = 0  # and ends of epochs, for the watching thread

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._stop()
        self.steps = 0
        set_listening(trainer, self, True, "on_update_end")
        name = trainer.broadcast_object(uuid.uuid4().hex)  # the store may still have the keys of an earlier job
        self._watch = _Watch(self, trainer, connect(f"hang_watch/{name}"))
        self._watch.start()

    def _count(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self.steps += 1

    on_train_epoch_start = on_train_step_end = on_train_batch_skipped = on_train_epoch_end = _count
    on_eval_epoch_start = on_eval_step_end = on_eval_epoch_end = on_training_run_epoch_end = _count

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        set_listening(trainer, self, False, "on_update_end")  # only the first counts
        if self.end and self._watch is not None and not self._watch.may_end:
            self._watch.may_end = True
            self._timeouts.set(2 * self.seconds + 6 * _LONGEST_INTERVAL)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._stop()

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        self._stop(f"has left the run: {type(exception).__name__}: {exception}")

    def _stop(self, reason: str = "") -> None:
        self._timeouts.restore()
        if self._watch is not None:
            self._watch.stop(reason)
        self._watch = None


class _Position(NamedTuple):
    """Where a process is.

    :param waits: whether it seems to wait for other processes
    :param function: its innermost function, in a few words
    :param stack: its stack, as Python prints it
    """

    epoch: int
    step: int
    waits: bool
    function: str
    stack: str


class _Watch(threading.Thread):
    """Looks regularly whether the run makes progress.

    A process that has made none for half of the time keeps its position in the store. The first one that is late prints
    a report of all of them; the store holds the number of reports so far.

    :ivar may_end: whether a report may end the job
    """

    def __init__(self, callback: HangWatchCallback, trainer: TrainerLike, store: Any) -> None:
        super().__init__(name="HangWatchCallback", daemon=True)
        self.may_end = False
        self._callback = callback
        self._trainer = trainer
        self._rank = trainer.ranks.rank
        self._is_shared = store is not None
        self._store = store or _stores.HashStore()
        self._watched = threading.get_ident()
        self._interval = min(callback.seconds / 10, _LONGEST_INTERVAL)
        self._is_over = threading.Event()
        self._steps = 0
        self._since = time.monotonic()
        self._reports = 0
        self._is_reported = self._is_position_stored = False

    def run(self) -> None:
        while not self._is_over.wait(self._interval):
            _dump_stacks_unless_called_again(self._callback.seconds, self.may_end)
            try:
                self._look()
            except RuntimeError:  # the process that serves the store has ended
                self._store, self._is_shared = _stores.HashStore(), False

    def stop(self, reason: str) -> None:
        """End the watch of this process.

        :param reason: for reports of the others, if they are still in the run
        """
        self._is_over.set()
        self.join(2 * _LONGEST_INTERVAL)
        faulthandler.cancel_dump_traceback_later()
        with suppress(RuntimeError):  # the process that serves the store has ended
            self._note_progress()
            if reason:
                self._store.set(f"left/{self._rank}", reason)

    def _look(self) -> None:
        self._note_progress()
        waited = time.monotonic() - self._since
        if waited >= self._callback.seconds / 2:
            self._store.set(str(self._rank), json.dumps(self._position()))
            self._is_position_stored = True
        reports = self._store.add("reports", 0)
        if reports > self._reports:
            self._reports = reports
            self._is_reported = True
            if self.may_end:
                with suppress(RuntimeError):  # the process that reports may serve the store, and have ended
                    self._store.wait([f"{reports}/printed"], timedelta(seconds=4 * _LONGEST_INTERVAL))
                end_process()
        elif waited >= self._callback.seconds and not self._is_reported:
            self._is_reported = True
            if self._store.add(f"{reports + 1}/opened", 1) == 1:  # no other process was first
                self._reports = self._store.add("reports", 1)
                self._report()

    def _note_progress(self) -> None:
        if self._steps == self._callback.steps:
            return
        now = time.monotonic()
        if self._is_reported:
            _print(f"Rank {self._rank} makes progress again after {now - self._since:.0f} seconds.")
        self._steps = self._callback.steps
        self._since = now
        if self._is_position_stored:
            self._store.delete_key(str(self._rank))
        self._is_reported = self._is_position_stored = False

    def _position(self) -> _Position:
        stack = stack_of(self._watched)
        progress = self._trainer.progress
        printed = "".join(traceback.format_list(stack))
        return _Position(progress.epoch, progress.step, waits_for_others(stack), innermost_function(stack), printed)

    def _report(self) -> None:
        ranks = range(self._trainer.ranks.world_size if self._is_shared else 1)
        deadline = time.monotonic() + 2 * self._interval + 2
        while time.monotonic() < deadline and not self._store.check(list(map(str, ranks))):
            time.sleep(0.05)
        positions, silent = {}, {}
        for rank in ranks:
            if self._store.check([f"left/{rank}"]):
                silent[rank] = self._store.get(f"left/{rank}").decode()
            elif self._store.check([str(rank)]):
                positions[rank] = _Position(*json.loads(self._store.get(str(rank))))
            else:
                silent[rank] = _SILENCE
        _print(describe(self._callback.seconds, positions, silent))
        if self.may_end:
            _print(f"The job ends with exit code {EXIT_CODE}.")
            self._store.set(f"{self._reports}/printed", "")
            time.sleep(1)  # if this process serves the store: until the others have read that
            end_process()


_SILENCE = "does not answer: its process has ended, or native code keeps Python from running"


def describe(seconds: float, positions: dict[int, _Position], silent: dict[int, str]) -> str:
    """Return a report: a line for all processes at the same position, then the stacks.

    Processes that are behind, and those that do not wait for others, come first.

    :param positions: the positions of processes by rank
    :param silent: why the others have none, by rank
    """
    by_position: dict[tuple[int, int, bool, str], list[int]] = defaultdict(list)
    for rank, position in sorted(positions.items()):
        by_position[position[:4]].append(rank)
    groups = sorted(by_position.items(), key=lambda item: (item[0][:3], len(item[1])))
    lines = [f"No progress for {seconds:g} seconds."]
    lines += [f"  rank {rank} {reason}" for rank, reason in sorted(silent.items())]
    for (epoch, step, _, function), ranks in groups:
        label = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"  {label} {', '.join(map(str, ranks))}, epoch {epoch}, step {step}: {function}")
    for _, ranks in groups:
        lines += [f"Stack of rank {ranks[0]}:", positions[ranks[0]].stack.rstrip("\n")]
    return "\n".join(lines)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _dump_stacks_unless_called_again(seconds: float, end: bool) -> None:
    """Make C code print the stacks if native code holds Python's lock for so long that this thread cannot run."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it is no file
            faulthandler.dump_traceback_later(seconds + _LONGEST_INTERVAL, exit=end, file=sys.__stderr__)
