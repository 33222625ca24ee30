"""Setting up a training run: its data, its prepared model and its starting point."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite import attributes
from pytorch_accel_lite.checks.arguments import (
    check_all_are_optimized,
    check_resume,
    check_same_on_all_ranks,
    check_training,
    warn_of_what_is_not_trained,
)
from pytorch_accel_lite.checks.callback_methods import warn_of_unknown_events
from pytorch_accel_lite.events import EVENTS
from pytorch_accel_lite.gradients import GradientWindow
from pytorch_accel_lite.history import InMemoryRunHistory
from pytorch_accel_lite.loops.evaluation import create_eval_loaders
from pytorch_accel_lite.optimizers import clear_gradients, is_made, needs_closure, optimized_parameters
from pytorch_accel_lite.randomness import capture_generators, restore_generators, seed_run
from pytorch_accel_lite.run import Run, apply_model_options, create_config, create_loader, prepare_model
from pytorch_accel_lite.utils import is_overridden

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


def check_optimizers(trainer: Trainer, stacklevel: int = 4) -> None:
    """Check, as far as possible, that the optimizers cover all parameters that are meant to be trained.

    If a factory has not created the optimizer yet, this is checked once it has.
    """
    if not is_made(trainer.optimizer):
        return
    model = trainer.get_model(keep_torch_compile=False)
    modules = [model, *attributes.modules(trainer).values()]
    optimized = attributes.all_optimized_parameters(trainer)
    check_all_are_optimized(model, trainer.optimizer, optimized)
    own = optimized_parameters(trainer.optimizer)
    warn_of_what_is_not_trained(modules, trainer.loss_func, own, optimized, stacklevel)


def find_data(
    trainer: Trainer,
    run: Run,
    batch_size: int,
    train_loader_kwargs: dict[str, Any] | None,
    eval_loader_kwargs: dict[str, Any] | None,
    resume_from: str | os.PathLike[str] | None,
) -> None:
    """Find the state to resume from, seed the generators, and create the loaders, whose order may depend on it."""
    request = run.request
    check_resume(resume_from)
    warn_of_unknown_events(trainer, EVENTS)
    trainer.callback_handler.configure_run(trainer, request)
    check_training(trainer.optimizer, trainer.accelerator, request, trainer.create_scheduler_fn)  # with their changes
    _check_metrics(trainer, run)
    if request.saves_training_states or resume_from is not None:
        from pytorch_accel_lite.checkpoint.snapshot import check_history, warn_of_project_configuration

        check_history(trainer.run_history)
        warn_of_project_configuration(trainer.accelerator)
    state = None
    if resume_from is not None:
        from pytorch_accel_lite.checkpoint.snapshot import find_state

        run.resumed = state = find_state(trainer, request.state_sources, resume_from)
    run.data_seed = trainer.seed
    if trainer.seed is not None:
        seed_run(trainer.seed, alike=trainer.logical is not None)
    if state is not None:
        run.data_seed = state.metadata["data_seed"]
        run.first_epoch = state.metadata.get("first_epoch", 1)
    elif trainer.seed is None and (request.saves_training_states or run.data_ranks.replicas > 1):
        run.data_seed = trainer.ranks.broadcast_object(lambda: int(torch.randint(2**62, ()).item()))
    if run.data_ranks.replicas > 1:  # processes that compute a batch together drop out the same units
        restore_generators(run.data_ranks.alike(capture_generators()))  # type: ignore[attr-defined]
    create_train_loader(trainer, run, batch_size, train_loader_kwargs)
    if run.eval_dataset is not None:
        create_eval_loaders(trainer, run, batch_size, eval_loader_kwargs)
    apply_model_options(trainer)  # before the event, so that copies made by callbacks have them too
    # A request to end the run waits until the run has started, as there is nothing yet that could end in order.
    trainer.callback_handler.call_each("on_dataloaders_created", run.control.request, trainer)


def _check_metrics(trainer: Trainer, run: Run) -> None:
    """Check, as far as can be known now, that the run records the metrics being watched."""
    request = run.request
    if request.scheduler_metric is not None:
        request.metrics.require(f"scheduler_metric={request.scheduler_metric!r}", request.scheduler_metric)
    request.metrics.settle(trainer)
    if isinstance(trainer.run_history, InMemoryRunHistory):
        trainer.run_history.directions = request.metrics.directions
    if request.sanity_eval_batches and run.eval_dataset is None:
        raise ValueError(
            f"sanity_eval_batches={request.sanity_eval_batches} needs an eval_dataset. Pass one to train()."
        )


def create_train_loader(trainer: Trainer, run: Run, batch_size: int, loader_kwargs: dict[str, Any] | None) -> None:
    """Create the loader of the training batches."""
    source = trainer.create_train_dataloader(batch_size, loader_kwargs)
    run.train_loader = create_loader(trainer, run, source, training=True)


def begin_training(trainer: Trainer, run: Run, batch_size: int) -> None:
    """Prepare the model and the optimizer, and set up the accumulation window."""
    request = run.request
    ranks = trainer.ranks
    had_optimizer = is_made(trainer.optimizer)
    prepare_model(trainer, training=True)
    if not had_optimizer:
        check_training(trainer.optimizer, trainer.accelerator, request, trainer.create_scheduler_fn)
        check_optimizers(trainer, stacklevel=5)
    run.config = create_config(trainer, run, batch_size)
    check_same_on_all_ranks(run.config.to_dict(), ranks)
    run.window = GradientWindow(
        run.data_ranks, trainer.device, request.gradient_accumulation_steps, run.config.train_per_device_batch_size
    )
    if ranks.world_size > 1:
        from pytorch_accel_lite.loops.in_step import keep_in_step

        keep_in_step(trainer, run)
    clear_gradients(trainer.optimizer)  # a run that failed within a window may have left some
    trainer.accelerator.sync_gradients = True
    if request.auto_microbatch or request.skips_failed_batches:
        if trainer.is_sharded:
            raise ValueError(
                "auto_microbatch=True and SkipFailedBatchesCallback do not work with weights that are sharded by "
                f"{trainer.accelerator.distributed_type.value}: a step that fails on one process cannot be undone."
            )
        from pytorch_accel_lite.loops.guarded import guarded_step

        run.window.is_guarded = ranks.world_size > 1
        run.special_step = guarded_step
    _begin_scheme(trainer, run)
    if trainer.logical is not None:
        trainer.logical.begin_training(trainer, run)


def _begin_scheme(trainer: Trainer, run: Run) -> None:
    """Let the user's own step, or an update that computes gradients again, take the place of the usual step."""
    if is_overridden(trainer, "train_step"):
        from pytorch_accel_lite.schemes.own_step import begin_own_step

        begin_own_step(trainer, run)
    if is_overridden(trainer, "optimizer_step") or needs_closure(trainer.optimizer):
        from pytorch_accel_lite.schemes.closures import begin_replay

        begin_replay(trainer, run)


def start_or_resume(trainer: Trainer, run: Run, reset_run_history: bool) -> None:
    """Start from the beginning or from a training state."""
    was_mid_epoch = run.before is not None and run.before.progress.is_mid_epoch
    run.before = None  # frees the previous run and its data
    if reset_run_history:
        trainer.run_history.reset()
    elif was_mid_epoch:
        trainer.run_history._increment_epoch()
    state = run.resumed
    if state is not None:
        from pytorch_accel_lite.loops import resuming

        resuming.warn_of_other_schedule(trainer, state)
        run.recreates_schedule = resuming.schedule_was_for_others(trainer, run, state)
        trainer.load_training_state(state.directory)
        resuming.align_windows(run, state)
    if trainer.scheduler is not None:
        from pytorch_accel_lite.checks.schedules import check_length

        check_length(trainer, run)
    if state is not None and run.recreates_schedule:
        resuming.resume_schedule(trainer, run, state)
    run.must_compare_replicas = trainer.check_replicas and trainer.ranks.world_size > 1
    reorders = isinstance(trainer.model, DistributedDataParallel) and trainer.ranks.world_size > 2
    run.must_warm_up_ddp = reorders and not run.window.is_guarded and run.progress.update > 0
