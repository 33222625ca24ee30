"""The training loop: a run consists of epochs, an epoch of steps, and each accumulation window ends in an update."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.modules import mixed_precision
from pytorch_accel_lite.base.user_code import is_overridden
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.loader_base import ShardedLoader
from pytorch_accel_lite.data.outputs import total_loss
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.distributed.gradient_sync import no_sync_within_window, sync_ddp_buffers
from pytorch_accel_lite.loop.evaluation import EvaluationKind, begin_evaluations, evaluate_all, evaluate_if_due
from pytorch_accel_lite.loop.guards.arguments_and_datasets import check_optimizers
from pytorch_accel_lite.loop.guards.batch_norm import min_share_for_batch_norm
from pytorch_accel_lite.loop.guards.epoch_checks import check_num_steps, steps_of_stream, warn_of_nonfinite_weights
from pytorch_accel_lite.loop.guards.modes import call_start_event, check_global_modes, restoring_mode_between_batches
from pytorch_accel_lite.loop.guards.same_on_all_ranks import note_missing_gradients
from pytorch_accel_lite.loop.lifecycle import ending
from pytorch_accel_lite.loop.resuming import (
    end_resuming,
    ending_resumption_at_latest,
    options_before_epoch,
    print_state_contents,
    resumed_run_is_over,
)
from pytorch_accel_lite.loop.scheduling import warn_of_left_schedule
from pytorch_accel_lite.loop.snapshot import leaving_no_trace
from pytorch_accel_lite.run.notes_and_checks_seam import RUN_CHECKS, adding_error_notes
from pytorch_accel_lite.run.progress import EpochPhase, GlobalModes
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import set_optimizer_modes


def begin_training(trainer: TrainerLike, run: Run) -> None:
    """Start the clock, plan the evaluations and the first update, and let the step prepare for its first batch."""
    run.control.start_clock()
    run.control.syncs_each_update = trainer.division.has_fixed_shares
    begin_evaluations(run)
    run.loop.has_update_schedules = run.evaluates_within_epochs or run.accumulation.changes
    _plan_first_update(trainer, run)
    run.training_step.begin(trainer, run)


def _plan_first_update(trainer: TrainerLike, run: Run) -> None:
    """Plan what only the first update needs: a warm-up of DDP before it, and a comparison of replicas after it."""
    run.loop.must_compare_replicas = trainer.check_replicas and run.ranks.world_size > 1
    run.loop.updates_at_start = run.progress.update
    reorders = isinstance(trainer.model, DistributedDataParallel) and run.ranks.world_size > 2
    run.loop.must_warm_up_ddp = reorders and not run.window.is_guarded and run.progress.update > 0


def train(trainer: TrainerLike, run: Run) -> None:
    """Train for all epochs of a run, or for the remaining ones if it is resumed."""
    run.loop.uses_builtin_loop = True
    with ending(trainer, run, "training"), ending_resumption_at_latest(trainer, run):
        _call_starting_events(trainer, run)
        is_over = resumed_run_is_over(trainer, run)
        while not is_over and (not run.is_finished or run.progress.is_mid_epoch):
            _run_epoch(trainer, run)
    warn_of_nonfinite_weights(trainer, run)


def _call_starting_events(trainer: TrainerLike, run: Run) -> None:
    """Fire the starting events of a run, then note, print and check what they may have changed."""
    trainer.training_run_start()
    trainer.call_event("on_training_run_start")
    run.loop.global_modes = GlobalModes.now(run.device)
    run.control.sync(now=True)
    print_state_contents(trainer, run)
    for check in RUN_CHECKS.before_training:
        check(trainer, run)


def _run_epoch(trainer: TrainerLike, run: Run) -> None:
    """Train for one epoch and evaluate. A resumed run does what is left of the epoch."""
    begin_epoch(trainer, run)
    if run.epoch_phase < EpochPhase.TRAINED:
        _run_steps(trainer, run)
    if run.epoch_phase < EpochPhase.EVALUATED and run.evaluation_is_due:
        evaluate_all(trainer, run, EvaluationKind.OF_RUN)
    if run.epoch_phase < EpochPhase.ENDED:
        trainer._step_after_epoch()
        trainer.training_run_epoch_end()
        run.epoch_phase = EpochPhase.ENDED
        trainer.call_event("on_training_run_epoch_end")
        run.control.sync(now=True)
    trainer.run_history._increment_epoch()
    complete_epoch(trainer, run)


def _run_steps(trainer: TrainerLike, run: Run) -> None:
    """Run the steps of an epoch, or the user's method for them."""
    with adding_error_notes(trainer, run, "training"):
        if is_overridden(trainer, "_run_train_epoch"):  # now, as a callback may have replaced it
            run.end.has_reached_limit = bool(trainer._run_train_epoch(run.data.required_train_loader))
        else:
            run.end.has_reached_limit = train_epoch(trainer, run)


def begin_epoch(trainer: TrainerLike, run: Run) -> None:
    """Begin the next epoch, unless the current one is incomplete."""
    if not run.progress.is_mid_epoch or run.epoch_is_trained:
        end_resuming(trainer, run)  # otherwise after the starting events of the epoch
    if not run.progress.is_mid_epoch:
        run.progress.start_epoch()
        trainer.run_history.set_between_epochs(False)
        run.window.filled = 0


def complete_epoch(trainer: TrainerLike, run: Run) -> None:
    """Count an epoch, its evaluation included, and let callbacks save."""
    if run.evaluation_interval is not None and run.evaluation_is_due:
        run.evaluation_interval.advance(run, ends_epoch=True)
    run.epoch_phase = EpochPhase.TRAINING
    run.progress.epochs_completed = run.progress.epoch
    trainer.run_history.set_between_epochs(True)
    trainer.call_event("on_epoch_checkpoint")
    run.control.sync(now=True, can_save=True)


def train_epoch(trainer: TrainerLike, run: Run) -> bool:
    """Run the steps of an epoch, or the remaining ones, and record its losses.

    Returns:
        whether the run has made all its updates, if their number was given
    """
    limit, progress = run.request.max_num_train_steps or math.inf, run.progress
    _begin_train_epoch(trainer, run)
    loader = run.data.required_train_loader
    min_share = min_share_for_batch_norm(trainer, run)
    run.batch_number = progress.step
    length = steps_of_stream(run, loader)  # now, as a stream may learn its length by being read
    has_ended = False
    while not has_ended:
        loader = run.data.required_train_loader  # a callback may have replaced it
        left = loader.steps(progress.epoch, progress.samples_in_epoch, progress.step, min_share)
        batches = iter(restoring_mode_between_batches(trainer, run, left, "training"))
        has_ended = _steps_until_reread(trainer, run, loader, batches, limit)
    run.batch_number = None
    check_num_steps(run, loader, length if progress.update < limit else None)
    _end_train_epoch(trainer, run)
    return progress.update >= limit


def _begin_train_epoch(trainer: TrainerLike, run: Run) -> None:
    """Fire the starting events of the steps of an epoch."""
    # The two starting events may reset what a state has restored, so a resumed run restores it once more after them.
    options, model_before = options_before_epoch(trainer, run), trainer.model
    trainer.train_epoch_start()
    run.loss_trackers = run.unrecorded_losses = trainer.division.create_trackers()
    call_start_event(trainer, "on_train_epoch_start", "training")
    check_global_modes(trainer, run)
    if trainer.model is not model_before and not run.progress.step:
        run.loop.must_warm_up_ddp = False  # the interrupted run, too, began this epoch with a new wrapper
    if trainer.prepared_model is not None:  # a callback may have replaced the model or the optimizer
        if trainer.model is not trainer.prepared_model.model:
            check_optimizers(trainer)
        if trainer.optimizer is not trainer.prepared_model.optimizer:
            warn_of_left_schedule(trainer)
    # Noted here, as a run whose state is restored no longer knows that it is resumed.
    run.loop.must_sync_at_start = run.resumed is not None
    end_resuming(trainer, run, options)
    set_optimizer_modes(trainer, training=True)


def _end_train_epoch(trainer: TrainerLike, run: Run) -> None:
    """Compare the processes after the steps of an epoch, record its losses, and fire the ending events."""
    if trainer.check_replicas and run.ranks.world_size > 1:
        trainer.compare_replicas()
    run.control.sync(now=True)
    sync_ddp_buffers(trainer.model, run.ranks)
    set_optimizer_modes(trainer, training=False)
    trainer.train_epoch_end()
    run.record_losses(trainer.run_history, "train_{}_epoch")
    run.unrecorded_losses = None
    run.epoch_phase = EpochPhase.TRAINED
    trainer.call_event("on_train_epoch_end")


def _steps_until_reread(
    trainer: TrainerLike, run: Run, loader: ShardedLoader, batches: Iterator[Batch], limit: float
) -> bool:
    """Train on the batches of an epoch, up to a limit of updates, and measure how long training waits for them.

    Returns:
        whether the epoch has ended; otherwise the batches left must be read again, because the step repeats an update,
        or the data have changed
    """
    progress = run.progress
    with run.goodput.training(loader):
        with run.goodput.counting("data"):  # includes the time in which workers start
            batch = next(batches, None) if progress.update < limit else None
        if batch is not None and progress.step and run.evaluates_within_epochs:
            evaluate_if_due(trainer, run)  # the run was interrupted before or within this evaluation
            if loader.is_outdated:  # a callback of the evaluation has changed the data
                return False
        if batch is not None and run.loop.must_warm_up_ddp:
            _warm_up_ddp(trainer, run, batch)
        while batch is not None:
            try:
                run_step(trainer, run, batch)
            except Exception as error:
                if not run.training_step.recover(trainer, run, error):
                    raise
                return False
            if run.loop.must_compare_replicas and progress.update > run.loop.updates_at_start:
                run.loop.must_compare_replicas = False
                trainer.compare_replicas()
            if loader.is_outdated:
                return False
            begin = time.perf_counter()
            batch = next(batches, None) if progress.update < limit else None
            loader.seconds_waited += time.perf_counter() - begin
    return True


def _warm_up_ddp(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Run one forward and backward pass that changes nothing except ``DistributedDataParallel``.

    The wrapper rearranges gradients after its first backward pass. With three or more processes, the order of their
    sums, and so the last bits, depend on it: a resumed run must have had that first pass, too.
    """
    run.loop.must_warm_up_ddp = False
    with leaving_no_trace(trainer):
        trainer.backward_step(loss_of(trainer, batch))


def loss_of(trainer: TrainerLike, batch: Batch) -> torch.Tensor:
    """Return only the loss of a batch, computed as in a training step, outside of one."""
    trainer.current_run.batch = batch
    compute = trainer.compiled_forward or trainer.calculate_train_batch_loss
    with mixed_precision(trainer.accelerator):
        return total_loss(compute(batch.data)["loss"])


def run_step(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Accumulate the gradients of a batch; at the end of an accumulation window, update the weights."""
    step_number, window = run.progress.step, run.window
    listeners = trainer.callback_handler.listeners
    window.filled = window.filled % window.steps + 1
    window.is_ending = batch.is_last or window.filled == window.steps
    run.batch, run.batch_number = batch, step_number
    run.training_step.gradient_norm = None
    if listeners["on_train_step_start"]:
        call_event = partial(_call_and_sync, trainer, run) if run.loop.must_sync_at_start else trainer.call_event
        call_event("on_train_step_start")
    window.is_in_step = True
    forward_backward = run.training_step.forward_backward if window.steps == 1 else _accumulate
    output = forward_backward(trainer, run, batch)
    updates = window.is_ending and window.has_gradients  # without gradients if all batches were skipped
    if updates:
        if run.loop.must_compare_replicas:
            note_missing_gradients(trainer, run)
        run.training_step.apply_update(trainer, run)
    run.progress.step += 1
    window.is_in_step = False
    if output is not None and listeners["on_train_step_end"]:
        # A step of several shares combines them in the run's batch.
        trainer.call_event("on_train_step_end", batch=run.batch.data, batch_output=output, step=step_number)
    if updates:
        if listeners["on_update_end"]:
            trainer.call_event("on_update_end", step=step_number)
        if run.loop.has_update_schedules:
            _follow_schedules(trainer, run, batch)
        if listeners["on_train_step_checkpoint"]:
            trainer.call_event("on_train_step_checkpoint", step=step_number)
        if run.control.must_sync:
            run.control.sync(can_save=True)
    run.batch, run.batch_number = None, run.progress.step


def _call_and_sync(trainer: TrainerLike, run: Run, event: str) -> None:
    """Call an event of the first step of a resumed run, and stop all processes at once if its callbacks ask for it."""
    trainer.call_event(event)
    run.loop.must_sync_at_start = False
    run.control.sync(now=True)


def _accumulate(trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
    """Compute the gradients of a batch, and after the last batch of a window, average them over the processes."""
    with no_sync_within_window(trainer.accelerator, trainer.model, run.window.is_ending):
        return run.training_step.forward_backward(trainer, run, batch)


def _follow_schedules(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Set the size of the next window. Evaluate if an evaluation within the epoch is due, except at the epoch's end."""
    run.training_step.set_accumulation(trainer, run, run.accumulation.window_size_after(run.progress.update))
    if run.evaluates_within_epochs:
        evaluate_if_due(trainer, run, ends_epoch=batch.is_last)
