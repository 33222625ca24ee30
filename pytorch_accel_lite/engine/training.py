"""The training loop: a run consists of epochs, an epoch of steps, and each accumulation window ends in an update."""

from __future__ import annotations

import math

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.events import StopTrainingError
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.checkpoint.beside_model import describe_attributes
from pytorch_accel_lite.checkpoint.trainer_state import finish_restoring
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.distributed.averaging import sync_ddp_buffers
from pytorch_accel_lite.engine.batch_norm_shares import smallest_share
from pytorch_accel_lite.engine.evaluation import evaluate_all, sanity_evaluation
from pytorch_accel_lite.engine.first_batch import warn_of_sum
from pytorch_accel_lite.engine.lifecycle import add_note, create_loader, ending
from pytorch_accel_lite.engine.losses import create_trackers
from pytorch_accel_lite.engine.resuming import has_nothing_left
from pytorch_accel_lite.engine.run import ENDED, EVALUATED, TRAINED, Run
from pytorch_accel_lite.engine.scheduling import step_after_epoch
from pytorch_accel_lite.engine.step import warm_up_ddp
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.optimizers.attributes import set_optimizer_modes
from pytorch_accel_lite.optimizers.gradients import gradient_sync


def train(trainer: TrainerLike, run: Run) -> None:
    """Train for all epochs of a run, or for the remaining ones if it is resumed."""
    run.control.start_clock()
    run.step.must_examine_batch = trainer.ranks.rank == 0
    if run.step.must_examine_batch:
        warn_of_sum(trainer)
    with ending(trainer, run, "training"):
        try:
            trainer.training_run_start()
            trainer.call_event("on_training_run_start")
            run.control.sync(now=True)
            _describe_states(trainer, run)
            over = _is_over(trainer, run)
            if (run.request.sanity_eval_batches or run.request.metrics.may_lack_loss) and not over:
                sanity_evaluation(trainer, run)
            if over or run.epoch_phase or not run.progress.is_mid_epoch:
                _finish_resuming(trainer, run)
            while not over and (run.progress.is_mid_epoch or not run.is_finished):
                _train_and_evaluate(trainer, run)
        except StopTrainingError:
            _finish_resuming(trainer, run)  # stopped by a starting event, the run ends with what the callbacks had
            raise
    if run.progress.update and not attributes.weights_are_finite(trainer) and trainer.ranks.rank == 0:
        warn_outside(
            f"The run has ended, after update {run.progress.update}, with weights that are infinite or NaN. Lower the "
            "learning rate, clip the gradients (gradient_clip_norm=1.0), or skip such updates (GradientSpikeCallback), "
            "and train again, or resume from an earlier state."
        )


def _train_and_evaluate(trainer: TrainerLike, run: Run) -> None:
    """Train for one epoch and evaluate, or do what is left of that if the run was stopped in the meantime."""
    if not run.progress.is_mid_epoch:
        run.progress.start_epoch()
    if run.epoch_phase < TRAINED:
        trainer._run_train_epoch(run.data.train_loader)
    if run.epoch_phase < EVALUATED and run.evaluation_is_due:
        evaluate_all(trainer, run)
    if run.epoch_phase < ENDED:
        step_after_epoch(trainer, run)
        trainer.training_run_epoch_end()
        run.epoch_phase = ENDED
        trainer.call_event("on_training_run_epoch_end")
        run.control.sync(now=True)
    run.epoch_phase = 0
    run.progress.epochs_completed = run.progress.epoch
    trainer.run_history._increment_epoch()
    trainer.call_event("on_epoch_checkpoint")
    run.control.sync(now=True, can_save=True)


def train_epoch(trainer: TrainerLike, run: Run) -> None:
    """Run the steps of an epoch, or the remaining ones, and record its losses."""
    trainer.train_epoch_start()
    run.loss_trackers = run.unrecorded = create_trackers(trainer)
    trainer.call_event("on_train_epoch_start")
    _finish_resuming(trainer, run)
    progress = run.progress
    limit = run.request.max_num_train_steps or math.inf
    loader = create_loader(trainer, run, run.data.train_loader, training=True)  # a callback may have replaced it
    run.data.train_loader = loader
    done = progress.samples_in_epoch, progress.step
    set_optimizer_modes(trainer, training=True)
    batches = loader.steps(progress.epoch, *done, run.request.measures_waiting, smallest_share(trainer, run))
    while progress.update < limit and (batch := next(batches, None)) is not None:
        if run.step.must_warm_up_ddp:
            warm_up_ddp(trainer, run, batch)
        train_step(trainer, run, batch)
        if run.step.must_compare_replicas and progress.update:
            run.step.must_compare_replicas = False
            trainer.compare_replicas()
    run.batch = None
    if not progress.step:
        raise ValueError("train_dataset gave no batch in this epoch: is it empty or exhausted?")
    if trainer.check_replicas and trainer.ranks.world_size > 1:
        trainer.compare_replicas()
    run.control.sync(now=True)
    sync_ddp_buffers(trainer.model, trainer.ranks)
    set_optimizer_modes(trainer, training=False)
    trainer.train_epoch_end()
    run.record_losses(trainer.run_history, run.data.ranks, "train_{}_epoch")
    run.unrecorded = None
    run.epoch_phase = TRAINED
    trainer.call_event("on_train_epoch_end")


def train_step(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Accumulate the gradients of a batch; at the end of an accumulation window, update the weights."""
    step = run.progress.step
    listeners = trainer.callback_handler.listeners
    ends_window = batch.is_last or (step + 1) % run.window.steps == 0
    run.batch = batch
    if listeners["on_train_step_start"]:
        trainer.call_event("on_train_step_start")
    run.window.is_in_step = True
    try:
        if run.window.steps == 1:
            output = run.step.forward_backward(trainer, run, batch)
        else:
            with gradient_sync(trainer.accelerator, trainer.model, ends_window):
                output = run.step.forward_backward(trainer, run, batch)
        updates = ends_window and run.window.sizes is not None  # None: all its batches were skipped
        if updates:
            run.step.update(trainer, run)
    except Exception as error:
        add_note(error, trainer, run, "training")
        raise
    run.progress.step += 1
    run.window.is_in_step = False
    if output is not None and listeners["on_train_step_end"]:
        # Logical processes have put their shares together in the run's batch.
        trainer.call_event("on_train_step_end", batch=run.batch.data, batch_output=output, step=step)
    if updates:
        if listeners["on_update_end"]:
            trainer.call_event("on_update_end", step=step)
        if listeners["on_train_step_checkpoint"]:
            trainer.call_event("on_train_step_checkpoint", step=step)
        if run.control.must_sync:
            run.control.sync(can_save=True)


def _describe_states(trainer: TrainerLike, run: Run) -> None:
    """Print which attributes training states include, if any are saved; the starting events may have added some."""
    saves = run.request.saves_training_states or run.resumed is not None
    if saves and (described := describe_attributes(trainer)):
        trainer.print(described)


def _is_over(trainer: TrainerLike, run: Run) -> bool:
    """Whether a resumed run has nothing left to do; prints the reason."""
    if run.resumed is None:
        return False
    return has_nothing_left(trainer, run, run.resumed)


def _finish_resuming(trainer: TrainerLike, run: Run) -> None:
    """Restore what must come last: anything that the starting events may have reset, and the random generators."""
    if run.resumed is not None:
        finish_restoring(trainer, run.resumed)
        run.resumed = None
