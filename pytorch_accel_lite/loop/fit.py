"""``train()``, from its settings to its loop: the outline, then its parts in order. ``training.py`` has the loop."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial

import torch
from accelerate.utils import DistributedType

from pytorch_accel_lite.base.arguments import refuse_class
from pytorch_accel_lite.base.random_generators import capture_generators, restore_generators, seed_run
from pytorch_accel_lite.base.user_code import is_from_this_package, is_overridden
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.checkpoint.disk.locks import lock_path
from pytorch_accel_lite.checkpoint.find_state import find_state
from pytorch_accel_lite.checkpoint.states.capture_and_restore import check_history
from pytorch_accel_lite.checkpoint.states.settings_in_states_seam import settings_recorder
from pytorch_accel_lite.distributed.shutdown import open_trainers
from pytorch_accel_lite.loop import custom_loops, training
from pytorch_accel_lite.loop.guards.arguments_and_datasets import check_optimizers, check_training
from pytorch_accel_lite.loop.guards.same_on_all_ranks import check_same_on_all_ranks, settings_of_optimizer
from pytorch_accel_lite.loop.inference import choose_inference_step
from pytorch_accel_lite.loop.lifecycle import entering, find_sharding
from pytorch_accel_lite.loop.loaders_and_lengths import (
    check_gives_batches,
    create_config,
    set_eval_loaders,
    set_train_loader,
)
from pytorch_accel_lite.loop.model_setup import apply_model_options, prepare_model
from pytorch_accel_lite.loop.resuming import begin_resuming, note_changes, undo_changes
from pytorch_accel_lite.loop.scheduling import begin_schedule
from pytorch_accel_lite.optimizers.optimizer_parts import is_created
from pytorch_accel_lite.optimizers.optimizer_steps import clear_gradients, forget_unscaled
from pytorch_accel_lite.run.accumulation import Accumulation, GradientWindow
from pytorch_accel_lite.run.ending import RunInterruptedError, ending_at_signals, exit_after_signal
from pytorch_accel_lite.run.history import InMemoryRunHistory
from pytorch_accel_lite.run.latest_records import TrainingRecord
from pytorch_accel_lite.run.notes_and_checks_seam import RUN_CHECKS
from pytorch_accel_lite.run.request_and_config import TrainerRunConfig
from pytorch_accel_lite.run.run import Run, TrainerLike


def fit(trainer: TrainerLike, run: Run, resume_from: str | os.PathLike[str] | None, reset_run_history: bool) -> None:
    """Train in a run, from the beginning or from a state."""
    call = "train()" if resume_from is None else "train(resume_from=...)"
    with run.goodput.running(), entering(trainer, run, call):
        configure(trainer, run)
        lock_paths(run)
        check_metrics(trainer, run)
        resume_from = run.ranks.state_to_join() or resume_from  # a process that joins others begins from their state
        note_attributes(trainer, run, is_resumed=resume_from is not None)
        if resume_from is not None:
            run.resumed = find_state(trainer, run.request.state_sources, resume_from)
        prepare_data(trainer, run)
        prepare_training(trainer, run)
        begin_schedule(trainer, run)
        begin_history(trainer, run, reset_run_history)
        record_settings(trainer, run)
        begin_resuming(trainer, run)
        with ending_at_signals(partial(_interrupt, run)) if run.request.ends_at_signals else nullcontext():
            training.begin_training(trainer, run)
            if is_overridden(trainer, "_run_training"):
                custom_loops.run_custom_loop(trainer, run)
            else:
                training.train(trainer, run)
    pause = run.end.pause
    exit_after_signal(pause if isinstance(pause, RunInterruptedError) else run.control.interruption)


def _interrupt(run: Run, interruption: RunInterruptedError) -> None:
    """Request the end of a run because of a signal, which takes the place of a pause of another kind under way."""
    run.control.request(interruption)
    if run.end.pause is not None and not isinstance(run.end.pause, RunInterruptedError):
        run.end.pause = interruption


def configure(trainer: TrainerLike, run: Run) -> None:
    """Let the callbacks declare what they need from a run, and check the resulting request."""
    request, callbacks = run.request, trainer.callback_handler.callbacks
    of_users = [one for one in (trainer, *callbacks) if not is_from_this_package(type(one))]
    if of_users and run.ranks.rank == 0:
        for check in RUN_CHECKS.of_user_code:
            check(of_users)
    trainer.callback_handler.configure_run(trainer, request, is_outermost=True)
    if request.auto_microbatch or request.skips_in_evaluation or request.skips_failed_batches:
        choose_inference_step(trainer, run, request)
    check_training(trainer.optimizer, trainer.accelerator, request)  # again, as callbacks may have changed it
    refuse_class("loss_func", trainer.loss_func)


def lock_paths(run: Run) -> None:
    """Keep other runs from writing to the paths that callbacks have claimed, until this run ends.

    Raises:
        RuntimeError: on all processes, if another run writes to one of the paths
    """

    def lock() -> None:
        for path, argument in run.request.locked_paths.items():
            run.cleanup.callback(lock_path(argument, path).release)

    if run.request.locked_paths:
        run.ranks.run_together(lock, only_first=True)


def check_metrics(trainer: TrainerLike, run: Run) -> None:
    """Check, as far as can be known now, that the run records the metrics being watched."""
    request = run.request
    if request.scheduler_metric is not None:
        request.metrics.require(f"scheduler_metric={request.scheduler_metric!r}", request.scheduler_metric)
    request.metrics.settle(trainer)
    if isinstance(trainer.run_history, InMemoryRunHistory):
        trainer.run_history.directions = request.metrics.directions


def note_attributes(trainer: TrainerLike, run: Run, is_resumed: bool) -> None:
    """Note which attributes of users the program has created by now, for the training states of the run.

    If the run resumes on a trainer that has trained, what the trainer's last run has changed is undone before.
    """
    saves_states = run.request.saves_training_states or is_resumed
    if is_resumed and run.previous is not None:
        undo_changes(trainer, run.previous.training_run)
    if saves_states:
        check_history(trainer.run_history)
        run.cleanup.callback(note_changes, trainer, run)
    if saves_states or run.request.paths:
        run.user_attributes.note_created(trainer)
    run.user_attributes.note_modules(trainer)


def prepare_data(trainer: TrainerLike, run: Run) -> None:
    """Seed the generators, and create the loaders, whose order may depend on the seed or on the resumed state."""
    _set_seeds(trainer, run)
    data = run.data
    check_gives_batches(set_train_loader(trainer, run), "train_dataset")
    data.eval_arguments = data.eval_arguments._replace(
        dataset=data.eval_dataset, collate_fn=data.collate_fn, auto_microbatch=run.request.auto_microbatch
    )
    if data.eval_dataset is not None:
        set_eval_loaders(trainer, run)
    apply_model_options(trainer)  # before the event, so that copies made by callbacks have them too
    # If a callback requests the end of the run, the request waits until the run has started and can end in order.
    trainer.callback_handler.call_event_passing_stops("on_dataloaders_created", run.control.request, trainer)


def _set_seeds(trainer: TrainerLike, run: Run) -> None:
    """Seed the generators, and find the seed of the data order, which a resumed run takes from its state."""
    run.data.seed = trainer.seed
    if trainer.seed is not None:
        if any(other.is_running for other in open_trainers() if other is not trainer):  # its run continues after this
            run.cleanup.callback(restore_generators, capture_generators())
        seed_run(trainer.seed, alike=trainer.division.has_fixed_shares)
    state = run.resumed
    if state is not None:
        run.data.first_epoch = state.metadata.get("first_epoch", 1)
        if state.metadata["data_seed"] is not None:
            run.data.seed = state.metadata["data_seed"]
    if run.data.seed is None and (run.request.saves_training_states or run.data.ranks.replicas > 1):
        run.data.seed = run.ranks.result_of_first(lambda: int(torch.randint(2**62, ()).item()))
    if run.data.ranks.replicas > 1:  # processes that share a batch must draw the same dropout
        restore_generators(run.data.ranks.broadcast_to_sharers(capture_generators()))


def prepare_training(trainer: TrainerLike, run: Run) -> None:
    """Prepare the model and the optimizer, and make the config of the run, its accumulation window and its step."""
    had_optimizer = is_created(trainer.optimizer)
    run.sharding = find_sharding(trainer, run)  # now, as a callback may have sharded the model
    if run.sharding is not None:
        run.sharding.prepare_training(trainer, run)
    prepare_model(trainer, training=True)
    has_copies = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED  # of the weights, in its optimizer
    if not had_optimizer and not has_copies:
        check_optimizers(trainer)
    run.config = create_config(trainer, run)
    run.latest.training = TrainingRecord(run.config, run.end, run.data.eval_arguments)
    if run.ranks.world_size > 1:
        options = settings_of_optimizer(trainer.optimizer) if trainer.check_replicas else {}
        check_same_on_all_ranks(run.config.to_dict() | options, run.ranks)
    _create_window(run, run.config)
    # What a run that failed within a window may have left.
    clear_gradients(trainer.optimizer)
    forget_unscaled(trainer.accelerator.scaler)
    trainer.accelerator.sync_gradients = True
    # This also disables compile_step, if it does not work with what the run uses.
    run.training_step = trainer._create_step(run)


def _create_window(run: Run, config: TrainerRunConfig) -> None:
    """Create the accumulation window of a run. Warn of a change of its size that the run does not reach."""
    run.accumulation = accumulation = Accumulation(run.request.gradient_accumulation_steps)
    nominal_size, updates = config.train_per_device_batch_size, config.max_num_train_steps
    run.window = GradientWindow(run.data.ranks, run.device, accumulation.window_size_after(0), nominal_size)
    if updates is not None and 0 < updates <= accumulation.last_change and run.ranks.rank == 0:
        warn_outside(
            f"gradient_accumulation_steps={run.request.gradient_accumulation_steps!r} has a change that is never "
            f"reached: the run has {updates} updates."
        )


def begin_history(trainer: TrainerLike, run: Run, reset: bool) -> None:
    """Clear the history, or continue it; if the run before has ended within an epoch, in a new epoch."""
    previous = run.previous
    run.previous = None  # this run has started, and remains the latest after its end
    run.cleanup.callback(trainer.run_history.set_between_epochs, False)
    if reset:
        trainer.run_history.reset()
    elif previous is not None and previous.progress.is_mid_epoch:
        trainer.run_history._increment_epoch()


def record_settings(trainer: TrainerLike, run: Run) -> None:
    """Record the settings for training states, before a state changes them."""
    if trainer.accelerator.is_main_process and (run.resumed is not None or run.request.saves_training_states):
        run.recorded_settings = settings_recorder().record(trainer)
