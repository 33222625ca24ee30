"""Setting up a training run: what its callbacks need, its data, its model and step, and where it starts."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.origins import warn_outside
from pytorch_accel_lite.base.randomness import capture_generators, restore_generators, seed_run
from pytorch_accel_lite.checkpoint.capture_and_restore import check_history, find_state
from pytorch_accel_lite.checkpoint.locks import lock_path
from pytorch_accel_lite.checkpoint.recorded_settings import record_settings
from pytorch_accel_lite.checkpoint.settings_comparison import compare_settings
from pytorch_accel_lite.checkpoint.user_attributes import note_created_attributes
from pytorch_accel_lite.data.loader import LoaderKwargs
from pytorch_accel_lite.loop.deepspeed import configure_deepspeed, uses_deepspeed
from pytorch_accel_lite.loop.guards.arguments import (
    check_optimizers,
    check_same_on_all_ranks,
    check_training,
    settings_of_optimizer,
)
from pytorch_accel_lite.loop.guards.epochs_from_one import warn_of_comparisons
from pytorch_accel_lite.loop.inference_steps import choose_inference_step
from pytorch_accel_lite.loop.loaders import create_eval_loaders, create_train_loader
from pytorch_accel_lite.loop.preparing import apply_model_options, prepare_model
from pytorch_accel_lite.loop.resolving import create_config
from pytorch_accel_lite.loop.scheduling import check_length, must_recreate, resume_schedule, warn_of_other_schedule
from pytorch_accel_lite.optimizers.operations import clear_gradients, is_created
from pytorch_accel_lite.run.history import InMemoryRunHistory
from pytorch_accel_lite.run.parts import Training
from pytorch_accel_lite.run.state import Run, TrainerLike
from pytorch_accel_lite.run.window import Accumulation, GradientWindow


def configure(trainer: TrainerLike, run: Run) -> None:
    """Let the callbacks declare what they need from a run, and check the resulting request."""
    request = run.request
    if run.ranks.rank == 0:
        trainer.callback_handler.warn_of_unknown_events()
        warn_of_comparisons([trainer, *trainer.callback_handler.callbacks])
    trainer.callback_handler.configure_run(trainer, request)
    choose_inference_step(trainer, run, request)
    _lock_paths(trainer, run)
    check_training(trainer.optimizer, trainer.accelerator, request)  # again, as callbacks may have changed the request
    _check_metrics(trainer, run)


def _lock_paths(trainer: TrainerLike, run: Run) -> None:
    """Keep other runs from writing to the paths that callbacks have claimed, until this run ends.

    Raises:
        RuntimeError: on all processes, if another run writes to one of the paths
    """

    def lock() -> None:
        for path, argument in run.request.locked_paths.items():
            run.cleanup.callback(lock_path(argument, path).release)

    if run.request.locked_paths:
        run.ranks.run_together(lock, only_first=True)


def _check_metrics(trainer: TrainerLike, run: Run) -> None:
    """Check, as far as can be known now, that the run records the metrics being watched."""
    request = run.request
    if request.scheduler_metric is not None:
        request.metrics.require(f"scheduler_metric={request.scheduler_metric!r}", request.scheduler_metric)
    request.metrics.settle(trainer)
    if isinstance(trainer.run_history, InMemoryRunHistory):
        trainer.run_history.directions = request.metrics.directions


class LoaderArguments(NamedTuple):
    """How a run reads its data.

    Args:
        batch_size: number of samples in a batch of one process
        train_kwargs: the user's arguments for the training loader
        eval_kwargs: the user's arguments for the evaluation loaders
    """

    batch_size: int
    train_kwargs: LoaderKwargs | None
    eval_kwargs: LoaderKwargs | None


def prepare_data(
    trainer: TrainerLike, run: Run, loader_arguments: LoaderArguments, resume_from: str | os.PathLike[str] | None
) -> None:
    """Find the state to resume from, seed the generators, and create the loaders, whose order may depend on both."""
    request = run.request
    if request.saves_training_states or resume_from is not None:
        check_history(trainer.run_history)
    if request.saves_training_states or resume_from is not None or request.paths:
        run.created_attributes = note_created_attributes(trainer)
    if resume_from is not None:
        run.resumed = find_state(trainer, request.state_sources, resume_from)
    _seed(trainer, run)
    create_train_loader(trainer, run, loader_arguments.batch_size, loader_arguments.train_kwargs)
    if run.data.eval_dataset is not None:
        create_eval_loaders(trainer, run, loader_arguments.batch_size, loader_arguments.eval_kwargs)
    apply_model_options(trainer)  # before the event, so that copies made by callbacks have them too
    # If a callback requests the end of the run, the request waits until the run has started and can end in order.
    trainer.callback_handler.call_each("on_dataloaders_created", run.control.request, trainer)


def _seed(trainer: TrainerLike, run: Run) -> None:
    """Seed the generators, and find the seed of the data order, which a resumed run takes from its state."""
    run.data.seed = trainer.seed
    if trainer.seed is not None:
        seed_run(trainer.seed, alike=trainer.division.seeds_alike)
    state = run.resumed
    if state is not None:
        run.data.seed = state.metadata["data_seed"]
        run.data.first_epoch = state.metadata.get("first_epoch", 1)
    elif trainer.seed is None and (run.request.saves_training_states or run.data.ranks.replicas > 1):
        run.data.seed = run.ranks.broadcast_object(lambda: int(torch.randint(2**62, ()).item()))
    if run.data.ranks.replicas > 1:  # processes that share a batch must draw the same dropout
        restore_generators(run.data.ranks.broadcast_to_sharers(capture_generators()))  # type: ignore[attr-defined]


def prepare_training(trainer: TrainerLike, run: Run, batch_size: int) -> None:
    """Prepare the model and the optimizer, and make the config of the run, its accumulation window and its step."""
    had_optimizer = is_created(trainer.optimizer)
    configure_deepspeed(trainer, run, batch_size)
    prepare_model(trainer, training=True)
    if not had_optimizer and not uses_deepspeed(trainer.accelerator):  # DeepSpeed's optimizer has copies of the weights
        check_optimizers(trainer)
    run.config = create_config(trainer, run, batch_size)
    run.latest.training = Training(run.config, run.end, run.data.eval_dataset)
    if run.ranks.world_size > 1:
        options = settings_of_optimizer(trainer.optimizer) if trainer.check_replicas else {}
        check_same_on_all_ranks(run.config.to_dict() | options, run.ranks)
    run.accumulation = Accumulation(run.request.gradient_accumulation_steps)
    nominal_size = run.config.train_per_device_batch_size
    run.window = GradientWindow(run.data.ranks, run.device, run.accumulation.after(0), nominal_size)
    updates = run.config.max_num_train_steps
    if updates is not None and 0 < updates <= run.accumulation.last_change and run.ranks.rank == 0:
        warn_outside(
            f"gradient_accumulation_steps={run.request.gradient_accumulation_steps!r} has a change that is never "
            f"reached: the run has {updates} updates."
        )
    clear_gradients(trainer.optimizer)  # a run that failed within a window may have left gradients
    trainer.accelerator.sync_gradients = True
    run.stepper = trainer._create_step(run)


def begin_or_resume(trainer: TrainerLike, run: Run, reset_run_history: bool) -> None:
    """Start from the beginning or from a training state."""
    was_mid_epoch = run.previous is not None and run.previous.progress.is_mid_epoch
    run.stay()
    if reset_run_history:
        trainer.run_history.reset()
    elif was_mid_epoch:
        trainer.run_history._increment_epoch()
    state = run.resumed
    if trainer.accelerator.is_main_process and (state is not None or run.request.saves_training_states):
        run.recorded_settings = record_settings(trainer)
    if state is not None:
        warn_of_other_schedule(trainer, state)
        run.schedule.is_recreated = must_recreate(trainer, run, state)
        trainer.load_training_state(state.directory)
        run.stepper.set_accumulation(run, run.accumulation.after(run.progress.update))
        run.goodput.resume(state.metadata.get("goodput", {}), state.metadata["saved_at"])
    if trainer.scheduler is not None:
        check_length(trainer, run)
    if state is not None and run.schedule.is_recreated:
        resume_schedule(trainer, run, state)
    if state is not None and trainer.accelerator.is_main_process and (changes := compare_settings(trainer, state)):
        trainer.print(changes)
    run.stepper.must_compare_replicas = trainer.check_replicas and run.ranks.world_size > 1
    reorders = isinstance(trainer.model, DistributedDataParallel) and run.ranks.world_size > 2
    run.stepper.must_warm_up_ddp = reorders and not run.window.is_guarded and run.progress.update > 0
