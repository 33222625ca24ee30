"""The scope of a run: how it nests in another one, computes, and ends."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Literal

from pytorch_accel_lite.base.display import wrapped
from pytorch_accel_lite.base.machine import deterministic_kernels
from pytorch_accel_lite.base.modules import tensor_parallel_size
from pytorch_accel_lite.distributed import shutdown
from pytorch_accel_lite.distributed.accelerator import in_effect
from pytorch_accel_lite.distributed.job_observers_seam import observed
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.loop.accelerates_gather import gathering_uneven_batches
from pytorch_accel_lite.loop.guards.same_on_all_ranks import check_same_call
from pytorch_accel_lite.loop.model_setup import check_model_has_values, release_model
from pytorch_accel_lite.optimizers.scheduled_options import note_initial_options, note_options
from pytorch_accel_lite.run.ending import NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.run.notes_and_checks_seam import add_error_notes
from pytorch_accel_lite.run.run import SHARDING, Run, Sharding, TrainerLike
from pytorch_accel_lite.run.trained_objects import set_optimizer_modes


@contextmanager
def entering(trainer: TrainerLike, run: Run, call: str) -> Iterator[None]:
    """Make a run the trainer's current one, and restore the previous run afterwards.

    A run that has started stays as the latest one: see ``Run.previous``.

    Args:
        call: the method that begins the run, which every process must call
    """
    run.previous = trainer.current_run
    run.outer = trainer.current_run if trainer.current_run in trainer.open_runs else None
    trainer.open_runs.append(run)
    trainer.current_run = run
    try:
        with (
            ExitStack() as run.cleanup,
            in_effect(trainer.accelerator),
            deterministic_kernels(trainer.deterministic),
            trainer.division.computing(run.device),
            _begun_together(trainer, run, call),
        ):
            if run.outer is None:
                if (sharding := find_sharding(trainer, run)) is not None:
                    sharding.begin_run(trainer, run)
                check_model_has_values(trainer)
            yield
        shutdown.record_end(failed=False)
    except BaseException as error:
        shutdown.record_end(failed=not isinstance(error, GeneratorExit))  # the caller stopped iterating
        raise
    finally:
        if trainer.current_run is run and run.previous is not None:
            trainer.current_run = run.previous
        run.previous = None
        run.resumed = None
        if run.schedule.initial_options:
            note_initial_options(trainer.optimizer, run.schedule.initial_options)
            note_options(trainer.optimizer)
        # This also ends predictions that were started within the run and not iterated to their end.
        trainer.open_runs[:] = [other for other in trainer.open_runs if other is not run and other.outer is not run]
        run.outer = None
        if not trainer.open_runs:
            set_optimizer_modes(trainer, training=False)
            release_model(trainer)
        for loader in run.data.made_loaders:
            loader.stop_workers()


def find_sharding(trainer: TrainerLike, run: Run) -> Sharding | None:
    """Return what a run does differently because its model is or will be sharded; ``None`` if it will not be.

    Raises:
        ValueError: if the extension for it is missing
    """
    accelerator = trainer.accelerator
    is_or_will_be = trainer.is_sharded or tensor_parallel_size(accelerator) > 1 or "parallelize_model" in run.overridden
    return SHARDING.get("A run of a sharded model") if is_or_will_be else None


@contextmanager
def _begun_together(trainer: TrainerLike, run: Run, call: str) -> Iterator[None]:
    """Check that all processes begin the run, and let it be observed within a block."""
    if run.ranks.is_alone:
        yield
        return
    with gathering_uneven_batches(trainer):
        check_same_call(trainer, call, run.data.train_dataset, run.data.eval_dataset)
        with observed(trainer), naming_call(trainer.ranks):
            yield


@contextmanager
def ending(trainer: TrainerLike, run: Run, kind: Literal["training", "evaluation"]) -> Iterator[None]:
    """Fire the ending events after a block. If it is stopped early, print the reason and notify the callbacks.

    The reason of a stop is printed last; the reason of a pause is printed at once, because saving takes time. Stops and
    errors within an outer run are left to the outer run.
    """
    stopped = None
    ended = kind == "evaluation"  # errors do not fire the ending events of an evaluation
    method_was_called = False
    try:
        try:
            with naming_call(run.ranks) if run.ranks.world_size > 1 else nullcontext():
                yield
        except StopTrainingError as stop:
            stopped = stop
            if run.outer is None:
                _note_stop(trainer, run, stop)
        if kind == "training":
            set_optimizer_modes(trainer, training=False)
            run.training_step.end(trainer, run)
            method_was_called = True
            trainer.training_run_end()
            ended = True
            _call_ending_event(trainer, run, "on_training_run_end")
        else:
            trainer.evaluation_run_end()
            _call_ending_event(trainer, run, "on_evaluation_run_end")
        run.end.make_last_calls()
    except BaseException as error:
        end_failed_run(trainer, run, error, ended, method_was_called)
        raise
    if stopped is not None and run.outer is not None:
        raise stopped


def _note_stop(trainer: TrainerLike, run: Run, stop: StopTrainingError) -> None:
    """Note why a run is stopped, print it, and notify the callbacks."""
    run.end.note(stop)
    reason = run.end.reason or ""
    if run.end.pause is not None:
        trainer.print(reason)
    else:
        text = wrapped(reason if reason.startswith("Stop") else f"Stopped: {reason}")
        run.end.last_calls.append(partial(trainer.print, text))
    _call_ending_event(trainer, run, "on_stop_training_error")
    run.record_interrupted_epoch(trainer.run_history)  # after a state has been saved


def _call_ending_event(trainer: TrainerLike, run: Run, event: str) -> None:
    """Fire an event while the run is ending, ignoring requests to stop it."""
    try:
        trainer.call_event(event)
        run.control.sync(now=True)
    except StopTrainingError as stop:
        run.end.reason = run.end.reason or str(stop)


def end_failed_run(
    trainer: TrainerLike, run: Run, error: BaseException, ended: bool, method_was_called: bool = False
) -> None:
    """Call the events of a run that an error ends; the caller raises the error itself.

    Does nothing within an outer run, which may catch the error. A rank that fails alone does not fire the ending
    events, because they may communicate with ranks that have not failed.

    Args:
        ended: whether ``on_training_run_end`` has been fired already; one of its listeners may have failed
        method_was_called: whether ``training_run_end()`` has been called already; it may have failed itself
    """
    if run.outer is not None:
        return
    add_error_notes(error, trainer, run, run.kind)
    run.end.has_failed = True
    run.control.forget()
    together = run.ranks.world_size == 1 or isinstance(error, NonFiniteLossError)
    problems = trainer.callback_handler.call_event_despite_errors("on_exception", trainer, exception=error)
    if together and not ended:
        try:
            run.record_interrupted_epoch(trainer.run_history)
            if not method_was_called:
                trainer.training_run_end()
        except Exception as failure:
            problems.append(failure)
        problems += trainer.callback_handler.call_event_despite_errors("on_training_run_end", trainer)
    elif together:
        problems += trainer.callback_handler.call_event_after_error("on_training_run_end", trainer)
    for problem in problems:
        text = "".join(traceback.format_exception(problem))
        with suppress(OSError):  # a closed output must not hide the error itself
            trainer.print(f"While the run was being ended by {error!r}, another error occurred:\n{text}")
