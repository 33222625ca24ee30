"""Saving training states during a run."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from pytorch_accel_lite.base.arguments import (
    check_positive_int,
    check_positive_number,
    check_range,
    checked_calls,
    optional,
)
from pytorch_accel_lite.base.display import wrapped
from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.modules import are_sharded
from pytorch_accel_lite.base.paths import StrPath, parse_location
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import add_note
from pytorch_accel_lite.checkpoint.disk.background_writer import BackgroundWriter
from pytorch_accel_lite.checkpoint.models.frozen_weights import model_checksums
from pytorch_accel_lite.checkpoint.models.supported_engines import check_states_are_possible
from pytorch_accel_lite.checkpoint.states.state_store import remove_old_states, state_name
from pytorch_accel_lite.checkpoint.stores_by_url import open_store
from pytorch_accel_lite.run.callback_handler import set_own_listening
from pytorch_accel_lite.run.ending import JOB_QUEUES, RunInterruptedError, RunPausedError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.intervals import CountedRun, Interval, parse_interval
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.training_state import TrainingState

# Expected seconds for the first state, and the number of states to average for the next.
_FIRST_PAUSE = 0.05
_NUM_PAUSES = 5


class SavingPace(Interval):
    """An interval that adapts, so that training waits for states no longer than a share of the run's time.

    It is derived from the pauses for the latest states, on the slowest process. If states have taken more or less than
    their share so far, the interval is longer or shorter, by at most a factor of two.
    """

    def __init__(self, share: float) -> None:
        super().__init__(_FIRST_PAUSE / share, "seconds")
        self.pauses: list[float] = []  # seconds, the latest last
        self._share = share
        self._paused = 0.0

    def start(self, run: CountedRun, argument: str = "") -> None:
        """Start counting in a run that has not saved yet."""
        super().start(run)
        self._paused = 0.0

    def note_pause(self, seconds: float, run: CountedRun) -> None:
        """Record how long training has waited for a state, and choose when the next one is due."""
        self._paused += seconds
        usual = self.expect([*self.pauses, seconds][-_NUM_PAUSES:])
        remaining = self._paused / self._share + usual - run.clock
        self.amount = max(min(max(remaining, usual / 2), 2 * usual), 1.0)
        self.advance(run)

    def expect(self, pauses: Sequence[float]) -> float:
        """Expect the next pause to be as long as the mean of some earlier ones; return the resulting interval."""
        self.pauses = list(pauses)
        if pauses:
            self.amount = max(sum(pauses) / len(pauses) / self._share, 1.0)
        return float(self.amount)


@checked_calls("__init__")
class SaveTrainingStateCallback(TrainerCallback):
    """Save training states, from which ``train(resume_from="latest")`` resumes.

    States are written atomically, and the newest complete one is never removed. Non-finite weights are not saved; they
    end the run with ``NonFiniteLossError``. All processes of a job take part. The data order
    is seeded even if the trainer has no seed.

    Args:
        save_dir: directory for states named like ``update-000000123``; other files in it are left alone. Or the URL of
            a folder in a store that fsspec supports, such as ``"s3://bucket/run"``: then the machines of a job need no
            shared disk.
        save_every_n_epochs: save every n epochs
        save_every_n_steps: save every n optimizer updates
        save_every_n_minutes: save when this many minutes have passed since the last state
        save_every: save at an ``Interval``, such as ``"500 updates"``, ``"0.25 epochs"``, ``"100_000 samples"`` or
            ``"10 minutes"``; the three arguments above are short forms. ``"auto"`` saves as often as ``overhead``
            allows, and at most once a second.
        overhead: with ``save_every="auto"``, the fraction of the run's time that training may wait for saving
        save_at_end: save when the run ends or is stopped early
        max_checkpoints: number of newest states to keep; ``None`` keeps all
        save_on_signal: save and end the run cleanly on SIGTERM, SIGUSR1, SIGUSR2 (Slurm's warnings) and Ctrl-C.
            Handlers that the program has installed for them are called afterwards.
        requeue: when SIGUSR1 or SIGUSR2 has ended the run of a Slurm job, return the job to the queue, with ``scontrol
            requeue``. Does nothing after SIGTERM, which ``scancel`` sends, or outside of Slurm.
        asynchronous: let training wait only for a copy in host memory, which is written in the background. Errors are
            raised at the next save or at the end of the run.
        continue_on_error: report an ``OSError`` while saving, such as a full disk, and continue; by default it ends the
            run. Existing states stay intact either way.
        trainable_only: leave out frozen parameters that have not changed since the start of the run, such as those of a
            pretrained model. The resumed program must create these parameters with the same values, or an error is
            raised.
        sharded: let each process write its own shards of the weights and the optimizer's state, so that nothing is
            gathered. ``"auto"`` does so if the weights are sharded; ``True`` raises an error if they are not. By
            default, the first process gathers and writes the whole state. Either way, any number of processes can
            resume, sharded or not.
    """

    affects_training = False

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "training_states",
        save_every_n_epochs: int | None = None,
        save_every_n_steps: int | None = None,
        save_at_end: bool = True,
        max_checkpoints: int | None = None,
        *,
        save_every_n_minutes: float | None = None,
        save_every: str | Interval | None = None,
        overhead: float = 0.02,
        save_on_signal: bool = True,
        requeue: bool = False,
        asynchronous: bool = False,
        continue_on_error: bool = False,
        trainable_only: bool = False,
        sharded: bool | Literal["auto"] = False,
    ) -> None:
        if requeue and not save_on_signal:
            raise ValueError("requeue=True resumes what save_on_signal=True saves: pass both, or neither.")
        if requeue and not JOB_QUEUES:
            raise ValueError(f"requeue=True {missing_extension_text('slurm')}")
        if not isinstance(sharded, bool) and sharded != "auto":
            raise ValueError(f"sharded={sharded!r} must be True, False or 'auto'.")
        self.save_dir = parse_location(save_dir, "save_dir")
        self.save_every_n_epochs = optional(check_positive_int, "save_every_n_epochs", save_every_n_epochs)
        self.save_every_n_steps = optional(check_positive_int, "save_every_n_steps", save_every_n_steps)
        self.save_every_n_minutes = optional(check_positive_number, "save_every_n_minutes", save_every_n_minutes)
        self.overhead = check_range("overhead", overhead, above=0, most=0.5)
        self._pace = SavingPace(self.overhead) if save_every == "auto" else None
        self.save_every = self._pace or optional(parse_interval, "save_every", save_every)
        counts = {"epochs": save_every_n_epochs, "updates": save_every_n_steps, "minutes": save_every_n_minutes}
        self._intervals = [Interval(n, unit) for unit, n in counts.items() if n is not None and n != math.inf]
        if self.save_every is not None:
            self._intervals.append(self.save_every)
        self.save_at_end = save_at_end
        self.max_checkpoints = optional(check_positive_int, "max_checkpoints", max_checkpoints)
        self.save_on_signal = save_on_signal
        self.requeue = requeue
        self.asynchronous = asynchronous
        self.continue_on_error = continue_on_error
        self.trainable_only = trainable_only
        self.sharded = sharded
        self._created_weights: dict[str, int] | None = None
        self._store = open_store(self.save_dir)
        self._writer: BackgroundWriter | None = None
        self._newest_time = 0.0  # of the states in save_dir
        self._clear()

    def _clear(self) -> None:
        self._saved: StateDict | None = None  # the progress saved last
        self._complete: tuple[StrPath, int] | None = None  # path and update of the newest written state
        self._resumed_at: int | None = None  # samples that a resumed run had seen, until it has trained

    @property
    def latest_saved(self) -> StrPath | None:
        """The newest state that the current run has saved or resumed from; ``None`` if there is none."""
        return None if self._complete is None else self._complete[0]

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.saves_training_states = True
        request.ends_at_signals = request.ends_at_signals or self.save_on_signal
        request.state_sources.append(self)
        request.claim_path(self, "save_dir", self.save_dir, "training states", locks=False)  # the store locks it

    def _claim(self, trainer: TrainerLike) -> None:
        """Lock the place of the states until the run ends, and check that all processes reach it."""
        if trainer.ranks.run_together(self._store.lock, only_first=True)[0]:
            trainer.run.cleanup.callback(self._store.unlock)
            self._store.check_is_shared(trainer.ranks)

    def find_latest(self, trainer: TrainerLike) -> TrainingState | None:
        """Return the newest complete state in ``save_dir``, or ``None`` if there is none."""
        self._claim(trainer)
        return self._store.read_latest(trainer.ranks, trainer.print)

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.train_dataloader is None:
            return
        self._claim(trainer)
        if self.trainable_only and trainer.run_config is None:  # before a state is restored
            self._created_weights = model_checksums(trainer.get_model(keep_torch_compile=False))

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        check_states_are_possible(trainer.accelerator)
        if self.sharded is True and not _has_shards(trainer):
            raise ValueError(
                f"sharded=True: the weights of {type(trainer.get_model()).__name__} are not sharded. Shard the model, "
                'with fully_shard for example, or pass sharded="auto", which saves shards if there are any.'
            )
        self._clear()
        path, resumed = self._store.path_for(trainer.progress.update), trainer.run.resumed
        if resumed is not None and os.path.realpath(resumed.directory) == os.path.realpath(path):
            self._complete = path, trainer.progress.update
            if self._store.alive_at is not None:
                trainer.run.goodput.note_sign_of_life(resumed.metadata["saved_at"], self._store.alive_at)
        self._newest_time = trainer.ranks.result_of_first(self._store.newest_time)
        self._resumed_at = trainer.progress.samples or None
        for interval in self._intervals:
            interval.start(trainer.run, "save_every" if interval is self.save_every else "")
        is_within_epochs = any(interval.is_within_epochs for interval in self._intervals)
        set_own_listening(trainer, self, is_within_epochs, "on_train_step_checkpoint")
        if self.asynchronous and trainer.ranks.allows_threads:
            self._writer = BackgroundWriter(trainer.accelerator)
        if self.requeue:
            trainer.ranks.result_of_first(lambda: self._check_requeue(trainer))

    def next_time(self) -> float:
        """Return the time for the next state: later than the times of all other states, even if the clock is wrong."""
        self._newest_time = max(time.time(), self._newest_time + 0.001)
        return self._newest_time

    def _check_requeue(self, trainer: TrainerLike) -> None:
        for name, queue in JOB_QUEUES.items():
            queue.check()
            if queue.was_requeued() and trainer.progress.update == 0 and self._store.names():
                raise RuntimeError(
                    f"{name} has started this job again, and there are training states in "
                    f"{os.fspath(self.save_dir)!r}, but train() was not asked to resume: it would start over each "
                    "time. Pass resume_from='latest'."
                )

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._resumed_at = None

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        if any(interval.is_due(trainer.run) for interval in self._intervals):
            self._save(trainer)

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        is_due = any(interval.is_due(trainer.run) for interval in self._intervals if not interval.is_time)
        if is_due or (self.save_at_end and trainer.run.is_finished):
            self._save(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: object) -> None:
        is_wanted = self.save_at_end or trainer.run.end.pause is not None
        if trainer.train_dataloader is None or not is_wanted:  # it may be an evaluation that was stopped
            return
        if trainer.progress.samples == self._resumed_at:  # the resumed state is still the newest
            trainer.print("No training state was saved: the run was stopped before it had taken a step of its own.")
            return
        if not trainer.run.window.is_between_updates:
            trainer.print(
                "No training state was saved: the run was stopped within an accumulation window or a step, after "
                f"update {trainer.progress.update}. To stop after one, raise StopTrainingError in "
                "on_train_step_checkpoint."
            )
            return
        self._save(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        try:
            self._finish_writing(trainer)
            if trainer.progress.samples == self._resumed_at:  # a killed run may have left old states
                with self._handling_errors(trainer):
                    trainer.ranks.result_of_first(lambda: self._remove_old_states(trainer.progress.update))
        finally:
            self._writer = None
            self._store.unlock()
        end = trainer.run.end
        complete, self._complete = self._complete, None
        if (pause := end.pause) is not None:
            if self.requeue and trainer.accelerator.is_main_process:
                end.last_calls.append(partial(_requeue, trainer, pause))
            end.last_calls.append(partial(_explain_how_to_resume, trainer, complete, pause))

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        try:
            if trainer.ranks.world_size == 1:  # other processes may have failed
                self._finish_writing(trainer)
        finally:
            self._store.unlock()
            complete, self._complete = self._complete, None
            _explain_how_to_resume(trainer, complete, exception)

    def _save(self, trainer: TrainerLike) -> None:
        begin = time.monotonic()
        for interval in self._intervals:
            interval.advance(trainer.run)
        progress = trainer.progress.state_dict() | {"stop_reason": trainer.run.end.reason}
        if progress == self._saved:
            return
        trainer.check_weights()
        with trainer.run.goodput.counting("saving"):
            self._finish_writing(trainer)
        update = trainer.progress.update
        path = self._store.path_for(update)
        options: StateDict = {} if self._created_weights is None else {"created_weights": self._created_weights}
        if self.sharded and _has_shards(trainer):
            options["sharded"] = True

        def finish() -> None:
            self._complete = path, update
            if trainer.ranks.rank == 0:
                self._remove_old_states(update)

        self._saved = progress
        with self._handling_errors(trainer):
            self._store.check_lock(trainer.ranks)
            trainer.save_training_state(path, writer=self._writer, then=finish, **options)
        if self._pace is not None:
            (pause,) = trainer.ranks.max([time.monotonic() - begin])
            self._pace.note_pause(pause, trainer.run)

    def _finish_writing(self, trainer: TrainerLike) -> None:
        if self._writer is not None:
            with self._handling_errors(trainer):
                self._writer.wait()

    def _remove_old_states(self, update: int) -> None:
        remove_old_states(self._store, self.max_checkpoints, protected={state_name(update)})

    @contextmanager
    def _handling_errors(self, trainer: TrainerLike) -> Iterator[None]:
        """Handle ``OSError`` in a block, such as a full disk or missing permissions."""
        try:
            yield
        except OSError as error:
            self._saved = None
            if not self.continue_on_error:
                raise
            trainer.print(f"The training state could not be saved; the run continues. {type(error).__name__}: {error}")

    def state_dict(self) -> StateDict:
        """Return how long training waited for the latest states, with ``save_every="auto"``."""
        return {} if self._pace is None else {"pauses": self._pace.pauses}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``; a state from an earlier version is ignored."""
        if self._pace is not None:
            self._pace.expect(state.get("pauses", ()))


def _requeue(trainer: TrainerLike, pause: RunPausedError) -> None:
    for queue in JOB_QUEUES.values():
        if message := queue.requeue_after(pause):
            trainer.print(message)


def _explain_how_to_resume(trainer: TrainerLike, complete: tuple[StrPath, int] | None, error: BaseException) -> None:
    """Report where an unfinished run was last saved: in a note, or printed if there is no traceback.

    Args:
        complete: path and update of the state
        error: the error that ended the run
    """
    is_interrupt = isinstance(error, (RunInterruptedError, KeyboardInterrupt))
    if complete is None or (is_interrupt and trainer.ranks.rank > 0):  # rank 0 reports an interrupt of all
        return
    path, update = complete
    is_failure = isinstance(error, Exception) and not isinstance(error, RunPausedError)
    how = "To resume it, call train() with the same arguments and"
    if is_failure:  # the same arguments may lead to the same failure
        how = "Correct what has failed, and resume it: call train() with"
    text = f'The run is saved in {os.fspath(path)!r}, after update {update}. {how} resume_from="latest".'
    has_no_traceback = isinstance(error, (RunPausedError, SystemExit)) and getattr(error, "signum", 0) != signal.SIGINT
    if has_no_traceback:
        trainer.print(wrapped(text))
    else:
        add_note(error, text)


def _has_shards(trainer: TrainerLike) -> bool:
    return are_sharded(trainer.get_model(keep_torch_compile=False).parameters())
