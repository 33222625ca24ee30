"""The training loop: a run consists of epochs, an epoch of steps, and each accumulation window ends in an update."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset

from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.origins import warn_outside
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.checkpoint.attribute_states import describe_attributes
from pytorch_accel_lite.checkpoint.capturing import finish_restoring
from pytorch_accel_lite.checkpoint.user_attributes import describe_unsaved, note_started
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.batches import BatchOutput
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.distributed.gradient_averaging import sync_ddp_buffers
from pytorch_accel_lite.loop.evaluation import begin_evaluations, evaluate_all, evaluate_if_due
from pytorch_accel_lite.loop.gradients import gradient_sync
from pytorch_accel_lite.loop.guards.explanations import explaining
from pytorch_accel_lite.loop.guards.modes import call_start, check_global_modes, leaving_as_found
from pytorch_accel_lite.loop.guards.replicas import note_missing_gradients
from pytorch_accel_lite.loop.guards.sanity_check import check_evaluation
from pytorch_accel_lite.loop.lifecycle import ending, sharded_loader
from pytorch_accel_lite.loop.step import warm_up_ddp
from pytorch_accel_lite.optimizers.freezing import stays_in_eval
from pytorch_accel_lite.run import attributes
from pytorch_accel_lite.run.attributes import set_optimizer_modes
from pytorch_accel_lite.run.events import StopTrainingError
from pytorch_accel_lite.run.parts import GlobalModes, TrainingState
from pytorch_accel_lite.run.progress import EpochPhase
from pytorch_accel_lite.run.state import Run, TrainerLike


def begin_training(trainer: TrainerLike, run: Run) -> None:
    """Begin the training of a run."""
    run.control.start_clock()
    if run.data.eval_loader is not None or run.request.evaluate_every is not None:
        begin_evaluations(run)
    run.loop.has_update_schedules = run.evaluates_within_epochs or run.accumulation.changes
    run.stepper.begin(trainer)


def train(trainer: TrainerLike, run: Run) -> None:
    """Train for all epochs of a run, or for the remaining ones if it is resumed."""
    run.loop.is_ours = True
    with ending(trainer, run, "training"):
        try:
            trainer.training_run_start()
            trainer.call_event("on_training_run_start")
            run.loop.global_modes = GlobalModes.now(run.device)
            run.control.sync(now=True)
            _describe_states(trainer, run)
            if run.data.eval_loader is not None:
                check_evaluation(trainer, run)
            is_over = run.resumed is not None and _end_if_complete(trainer, run, run.resumed)
            if is_over or run.epoch_is_trained or not run.progress.is_mid_epoch:
                _finish_resuming(trainer, run)  # within an epoch, the epoch's starting events come first
            while not is_over and (run.progress.is_mid_epoch or not run.is_finished):
                _train_and_evaluate(trainer, run)
        except StopTrainingError:
            _finish_resuming(trainer, run)  # a starting event stopped the run
            raise
    warn_of_weights(trainer, run)


def _train_and_evaluate(trainer: TrainerLike, run: Run) -> None:
    """Train for one epoch and evaluate. A resumed run does what is left of the epoch."""
    begin_epoch(run)
    if run.epoch_phase < EpochPhase.TRAINED:
        own_epoch = trainer._run_train_epoch if "_run_train_epoch" in run.overridden else None
        with explaining(trainer, run, "training"):
            if own_epoch is None:
                run.loop.has_reached_limit = train_epoch(trainer, run, run.data.required_train_loader)
            else:
                run.loop.has_reached_limit = bool(own_epoch(run.data.required_train_loader))
    if run.epoch_phase < EpochPhase.EVALUATED and run.evaluation_is_due:
        evaluate_all(trainer, run)
    if run.epoch_phase < EpochPhase.ENDED:
        trainer._step_after_epoch()
        trainer.training_run_epoch_end()
        run.epoch_phase = EpochPhase.ENDED
        trainer.call_event("on_training_run_epoch_end")
        run.control.sync(now=True)
    trainer.run_history._increment_epoch()
    complete_epoch(trainer, run)


def begin_epoch(run: Run) -> None:
    """Begin the next epoch, unless the current one is incomplete."""
    if not run.progress.is_mid_epoch:
        run.progress.start_epoch()
        run.window.filled = 0


def complete_epoch(trainer: TrainerLike, run: Run) -> None:
    """Count an epoch, its evaluation included, and let callbacks save."""
    if run.loop.evaluations is not None and run.evaluation_is_due:
        run.loop.evaluations.advance(run, ends_epoch=True)
    run.epoch_phase = EpochPhase.TRAINING
    run.progress.epochs_completed = run.progress.epoch
    trainer.call_event("on_epoch_checkpoint")
    run.control.sync(now=True, can_save=True)


def train_epoch(trainer: TrainerLike, run: Run, source: Source) -> bool:
    """Run the steps of an epoch, or the remaining ones, and record its losses.

    Args:
        source: the training batches, usually those of the run

    Returns:
        whether the run has made all its updates, if their number was given
    """
    with _reading(run, source):
        _train_epoch(trainer, run)
    limit = run.request.max_num_train_steps
    return limit is not None and run.progress.update >= limit


def _train_epoch(trainer: TrainerLike, run: Run) -> None:
    trainer.train_epoch_start()
    run.loss_trackers = run.loop.unrecorded = trainer.division.create_trackers()
    if trainer.callback_handler.listeners["on_train_epoch_start"]:
        call_start(trainer, "on_train_epoch_start", "training")
    check_global_modes(trainer, run)
    _finish_resuming(trainer, run)
    progress = run.progress
    limit = run.request.max_num_train_steps or math.inf
    # A callback may have set trainer.train_dataloader.
    run.data.train_loader = loader = sharded_loader(trainer, run, run.data.train_loader, training=True)
    set_optimizer_modes(trainer, training=True)
    least = share_for_batch_norm(trainer, run)
    run.batch_number = progress.step
    length = find_length(loader) if not progress.step else None  # the steps of a resumed epoch may have other sizes
    while not _train_steps(trainer, run, _batches_left(trainer, run, least), limit):
        pass  # read the batches again: an update is repeated, or the data have changed
    run.batch_number = None
    _check_length(run, loader, length if progress.update < limit else None)
    if trainer.check_replicas and run.ranks.world_size > 1:
        trainer.compare_replicas()
    run.control.sync(now=True)
    sync_ddp_buffers(trainer.model, run.ranks)
    set_optimizer_modes(trainer, training=False)
    trainer.train_epoch_end()
    run.record_losses(trainer.run_history, run.data.ranks, "train_{}_epoch")
    run.loop.unrecorded = None
    run.epoch_phase = EpochPhase.TRAINED
    trainer.call_event("on_train_epoch_end")


def _batches_left(trainer: TrainerLike, run: Run, min_share: int) -> Iterator[Batch]:
    """Return the remaining batches of the epoch."""
    progress, loader = run.progress, run.data.required_train_loader
    batches = loader.steps(progress.epoch, progress.samples_in_epoch, progress.step, min_share)
    return iter(leaving_as_found(trainer, run, batches, "training"))


def _train_steps(trainer: TrainerLike, run: Run, batches: Iterator[Batch], limit: float) -> bool:
    """Train on the batches of an epoch, up to a limit of updates, and measure how long training waits for them.

    Returns:
        whether the steps are complete; otherwise the batches have to be read again, because the step repeats an update,
        or the data have changed
    """
    progress, loader = run.progress, run.data.required_train_loader
    with run.goodput.training(loader):
        with run.goodput.counting("data"):  # includes the time in which workers start
            batch = next(batches, None) if progress.update < limit else None
        if batch is not None and progress.step and run.evaluates_within_epochs:
            evaluate_if_due(trainer, run)  # the run was interrupted before or within this evaluation
        is_outdated = loader.is_outdated  # the evaluation may have changed the data
        while batch is not None and not is_outdated:
            if run.stepper.must_warm_up_ddp:
                warm_up_ddp(trainer, run, batch)
            try:
                train_step(trainer, run, batch)
            except Exception as error:
                if not run.stepper.recover(trainer, run, error):
                    raise
                return False
            if run.stepper.must_compare_replicas and progress.update:
                run.stepper.must_compare_replicas = False
                trainer.compare_replicas()
            is_outdated = loader.is_outdated
            if not is_outdated:
                begin = time.perf_counter()
                batch = next(batches, None) if progress.update < limit else None
                loader.seconds_waited += time.perf_counter() - begin
    return not is_outdated


def train_step(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Accumulate the gradients of a batch; at the end of an accumulation window, update the weights."""
    step, window = run.progress.step, run.window  # step is a number; run.stepper trains
    listeners = trainer.callback_handler.listeners
    window.filled = window.filled % window.steps + 1
    window.is_ending = batch.is_last or window.filled == window.steps
    run.batch, run.batch_number = batch, step
    if listeners["on_train_step_start"]:
        trainer.call_event("on_train_step_start")
    window.is_in_step = True
    forward_backward = run.stepper.forward_backward if window.steps == 1 else _accumulate
    output = forward_backward(trainer, run, batch)
    updates = window.is_ending and window.has_gradients  # without gradients if all batches were skipped
    if updates:
        if run.stepper.must_compare_replicas:
            note_missing_gradients(trainer, run)
        run.stepper.update(trainer, run)
    run.progress.step += 1
    window.is_in_step = False
    if output is not None and listeners["on_train_step_end"]:
        # A step of several shares combines them in the run's batch.
        trainer.call_event("on_train_step_end", batch=run.batch.data, batch_output=output, step=step)
    if updates:
        if listeners["on_update_end"]:
            trainer.call_event("on_update_end", step=step)
        if run.loop.has_update_schedules:
            _follow_schedules(trainer, run, batch)
        if listeners["on_train_step_checkpoint"]:
            trainer.call_event("on_train_step_checkpoint", step=step)
        if run.control.must_sync:
            run.control.sync(can_save=True)
    run.batch, run.batch_number = None, run.progress.step


def _accumulate(trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
    """Compute the gradients of a batch, and after the last batch of a window, average them over the processes."""
    with gradient_sync(trainer.accelerator, trainer.model, run.window.is_ending):
        return run.stepper.forward_backward(trainer, run, batch)


def _follow_schedules(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Set the size of the next window. Evaluate if an evaluation within the epoch is due, except at the epoch's end."""
    run.stepper.set_accumulation(run, run.accumulation.after(run.progress.update))
    if run.evaluates_within_epochs:
        evaluate_if_due(trainer, run, ends_epoch=batch.is_last)


# ------------------------------------------------------------------- what the loop does at its ends


@contextmanager
def _reading(run: Run, source: Source) -> Iterator[None]:
    """Let a run read other training batches within a block, if they are not its own."""
    own = run.data.train_loader
    if source is own:
        yield
        return
    run.data.train_loader = source
    try:
        yield
    finally:
        if run.data.train_loader is not source:
            run.data.train_loader.stop_workers()
        run.data.train_loader = own


def _check_length(run: Run, loader: Source, length: int | None) -> None:
    """Check that an epoch had batches. Warn if a stream ended before its length, on which schedules rely."""
    steps = run.progress.step
    if not steps:
        raise ValueError("train_dataset gave no batch in this epoch: is it empty or exhausted?")
    # A stream that divides itself among the processes may have the length of all data.
    is_stream = run.data.ranks.world_size == 1 and isinstance(getattr(loader.source, "dataset", None), IterableDataset)
    if length is not None and is_stream and steps + loader.source.num_workers < length:  # each may drop one
        warn_outside(
            f"The training data ended after {steps} steps of this epoch, but their length is {length} steps, by which "
            "schedules and the remaining time are computed. Return the true length in __len__ of the dataset, or "
            "define none, and pass max_num_train_steps."
        )


def warn_of_weights(trainer: TrainerLike, run: Run) -> None:
    """Warn of weights that are not finite at the end of a run."""
    if run.progress.update and not attributes.weights_are_finite(trainer) and run.ranks.rank == 0:
        warn_outside(
            f"The run has ended, after update {run.progress.update}, with weights that are infinite or NaN. Lower the "
            "learning rate, clip the gradients (gradient_clip_norm=1.0), or skip such updates (GradientSpikeCallback), "
            "and train again, or resume from an earlier state."
        )


def _describe_states(trainer: TrainerLike, run: Run) -> None:
    """Print which attributes training states include, if states are saved, once starting events may have added some.

    Also prints a message if it is known that a resumed run cannot read the same data.
    """
    if not (run.request.saves_training_states or run.resumed is not None):
        return
    note_started(trainer)
    for described in (describe_attributes(trainer), describe_unsaved(trainer)):
        if described:
            trainer.print(described)
    if obstacle := getattr(run.data.train_loader, "obstacle", ""):
        trainer.print(
            "If this run is interrupted, the resumed one will not see the same training data as it would have without "
            f"the interruption: {obstacle}."
        )


def _finish_resuming(trainer: TrainerLike, run: Run) -> None:
    """Restore what the starting events may have reset, and then the random generators."""
    if run.resumed is not None:
        finish_restoring(trainer, run.resumed)
        run.resumed = None


def _end_if_complete(trainer: TrainerLike, run: Run, state: TrainingState) -> bool:
    """Return whether a resumed run has nothing left to do; if so, end it and print why."""
    about = state.metadata
    if about["stop_reason"] is not None and not about["interrupted"] and not _continues_after_stop(trainer, run, about):
        run.end.reason, run.end.stopped_by = about["stop_reason"], about.get("stopped_by")
        return True
    ends_its_epoch = run.progress.is_mid_epoch and run.progress.update == run.request.max_num_train_steps
    if run.is_finished and not ends_its_epoch:
        trainer.print("Nothing left to do: the run had finished. Increase num_epochs to continue it.")
        return True
    return False


def _continues_after_stop(trainer: TrainerLike, run: Run, about: JsonObject) -> bool:
    """Return whether a stopped run continues, because it is longer or lacks the callback that stopped it; print why."""
    length = "num_epochs" if run.request.max_num_train_steps is None else "max_num_train_steps"
    before, now = about["run_config"].get(length), getattr(run.required_config, length)
    source = about.get("stopped_by")
    if None not in (before, now) and now > before:
        trainer.print(f"The run was stopped, but is trained further: {length} was {before} and is {now} now.")
        return True
    callbacks = [callback._as_created() for callback in trainer.callback_handler]  # noqa: SLF001
    if source is not None and source not in callbacks:
        trainer.print(f"The run was stopped by {source}, but is trained further without it.")
        return True
    change = "" if source is None else f", or pass {source.partition('(')[0]} with other arguments or not at all"
    trainer.print(
        f"Nothing left to do: the run was stopped: {about['stop_reason'].rstrip('.')}. To train it further, increase "
        f"{length}{change}."
    )
    return False


def share_for_batch_norm(trainer: TrainerLike, run: Run) -> int:
    """Return the smallest number of samples, other than none, that a process may get in a step: two with batch norm.

    Call it on every process at the start of an epoch, with the model in training mode. Warns if the epoch ends with a
    batch of a single sample.
    """
    norms = {name: module for name, module in trainer.model.named_modules() if isinstance(module, _BatchNorm)}
    return _smallest_for_batch_norm(trainer, run, norms) if norms else 1


def _smallest_for_batch_norm(trainer: TrainerLike, run: Run, norms: dict[str, _BatchNorm]) -> int:
    ranks = run.ranks
    alone = [
        f"{type(norm).__name__} {name.removeprefix('module.')!r}"
        for name, norm in norms.items()
        if _uses_own_batch(norm, ranks.world_size)
    ]
    limit, progress = run.request.max_num_train_steps, run.progress
    steps = math.inf if limit is None else progress.step + (limit - progress.update) * run.window.steps
    if alone and ranks.rank == 0 and run.data.required_train_loader.ends_in_one_sample(steps):
        warn_outside(
            f"The last batch of an epoch has a single sample, and the model has batch norm in training mode "
            f"({alone[0]}): torch raises an error where that leaves it a single value for each channel, and elsewhere "
            "the statistics of one sample are poor. Leave that batch out with train_dataloader_kwargs="
            "{'drop_last': True}, or choose another per_device_batch_size."
        )
    return 2 if ranks.max([bool(alone)])[0] else 1


def _uses_own_batch(norm: nn.Module, world_size: int) -> bool:
    """Whether a batch norm normalises with the statistics of this process's batch."""
    if isinstance(norm, nn.SyncBatchNorm) and world_size > 1:
        return False
    return norm.running_mean is None or (norm.training and not stays_in_eval(norm))
