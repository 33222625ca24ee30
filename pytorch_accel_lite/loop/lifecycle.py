"""How runs begin, nest and end: their data, settings, starting points and ending events."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.backends import deterministic_kernels
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.origins import warn_outside
from pytorch_accel_lite.base.randomness import capture_generators, restore_generators, seed_run
from pytorch_accel_lite.base.text import wrapped
from pytorch_accel_lite.checkpoint.capturing import check_history, find_state
from pytorch_accel_lite.checkpoint.locks import lock_path
from pytorch_accel_lite.checkpoint.recorded_settings import compare_settings, record_settings
from pytorch_accel_lite.checkpoint.user_attributes import note_created
from pytorch_accel_lite.data import ShardedLoader, shard
from pytorch_accel_lite.data.loader import LoaderKwargs
from pytorch_accel_lite.data.loader_choice import dataset_of
from pytorch_accel_lite.data.named_datasets import NamedSampler, describe_lengths
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.distributed import shutdown, watch
from pytorch_accel_lite.distributed.accelerators import in_effect
from pytorch_accel_lite.loop.collectives import gathering_uneven_batches
from pytorch_accel_lite.loop.deepspeed import configure_deepspeed, uses_deepspeed
from pytorch_accel_lite.loop.guards.arguments import (
    check_optimizers,
    check_same_call,
    check_same_on_all_ranks,
    check_training,
    settings_of_optimizer,
)
from pytorch_accel_lite.loop.guards.epochs_from_one import warn_of_comparisons
from pytorch_accel_lite.loop.guards.explanations import explain
from pytorch_accel_lite.loop.preparing import apply_model_options, prepare_model, release_model
from pytorch_accel_lite.loop.scheduling import check_length, must_recreate, resume_schedule, warn_of_other_schedule
from pytorch_accel_lite.loop.sharded_models import begin_sharded
from pytorch_accel_lite.loop.skipped_batches import prepare_skipping
from pytorch_accel_lite.optimizers.operations import clear_gradients, is_created
from pytorch_accel_lite.optimizers.rates import learning_rates, note_initial_options
from pytorch_accel_lite.run.attributes import set_optimizer_modes
from pytorch_accel_lite.run.events import NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.run.history import InMemoryRunHistory
from pytorch_accel_lite.run.parts import Training
from pytorch_accel_lite.run.settings import RunRequest, TrainerRunConfig
from pytorch_accel_lite.run.state import Run, TrainerLike
from pytorch_accel_lite.run.window import Accumulation, GradientWindow

# ------------------------------------------------------------------------------------------- the data of a run


def configure(trainer: TrainerLike, run: Run) -> None:
    """Let the callbacks declare what they need from a run, and check the resulting request."""
    request = run.request
    if run.ranks.rank == 0:
        trainer.callback_handler.warn_of_unknown_events()
        warn_of_comparisons([trainer, *trainer.callback_handler.callbacks])
    trainer.callback_handler.configure_run(trainer, request)
    prepare_skipping(trainer, run, request)
    _lock_paths(trainer, run)
    check_training(trainer.optimizer, trainer.accelerator, request)  # again, as callbacks may have changed the request
    _check_metrics(trainer, run)


class LoaderArguments(NamedTuple):
    """How a run reads its data.

    Args:
        batch_size: number of samples in a batch of one process
        of_train: the user's arguments for the training loader
        of_eval: the user's arguments for the evaluation loaders
    """

    batch_size: int
    of_train: LoaderKwargs | None
    of_eval: LoaderKwargs | None


def prepare_data(
    trainer: TrainerLike, run: Run, loaders: LoaderArguments, resume_from: str | os.PathLike[str] | None
) -> None:
    """Find the state to resume from, seed the generators, and create the loaders, whose order may depend on both."""
    request = run.request
    if request.saves_training_states or resume_from is not None:
        check_history(trainer.run_history)
    if request.saves_training_states or resume_from is not None or request.paths:
        run.created_attributes = note_created(trainer)
    if resume_from is not None:
        run.resumed = find_state(trainer, request.state_sources, resume_from)
    _seed(trainer, run)
    create_train_loader(trainer, run, loaders.batch_size, loaders.of_train)
    if run.data.eval_dataset is not None:
        create_eval_loaders(trainer, run, loaders.batch_size, loaders.of_eval)
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


def create_train_loader(trainer: TrainerLike, run: Run, batch_size: int, loader_kwargs: LoaderKwargs | None) -> None:
    """Create the loader of the training batches."""
    source = trainer.create_train_dataloader(batch_size, loader_kwargs)
    run.data.train_loader = sharded_loader(trainer, run, source, training=True)
    run.data.train_dataset = dataset_of(run.data.train_dataset)
    sampler = getattr(run.data.train_loader, "sampler", None)
    if isinstance(sampler, NamedSampler) and (lengths := describe_lengths(sampler)):
        trainer.print(lengths)


def create_eval_loaders(trainer: TrainerLike, run: Run, batch_size: int, loader_kwargs: LoaderKwargs | None) -> None:
    """Create the loaders of the evaluation dataset, or of several by name."""
    run.data.eval_loader = None
    run.data.eval_loaders = {}
    dataset = run.data.eval_dataset
    for name, part in dataset.items() if isinstance(dataset, dict) else [("", dataset)]:
        if isinstance(dataset, dict) and not (name and isinstance(name, str)):
            raise ValueError(f"eval_dataset has the key {name!r}, but keys name the metrics: use non-empty strings.")
        run.data.eval_dataset = part  # read by overrides of create_eval_dataloader
        source = trainer.create_eval_dataloader(batch_size, loader_kwargs)
        run.data.eval_loader = sharded_loader(trainer, run, source, training=False)
        if find_length(run.data.eval_loader) == 0:
            raise ValueError(
                "eval_dataset gives no batch: with drop_last=True it must hold at least one batch for every process."
            )
        if name:
            run.data.eval_loaders[name] = run.data.eval_loader
    if isinstance(dataset, dict):
        run.data.eval_dataset = {name: dataset_of(part) for name, part in dataset.items()}
    else:
        run.data.eval_dataset = dataset_of(dataset)


def sharded_loader(trainer: TrainerLike, run: Run, source: Source, training: bool) -> ShardedLoader:
    """Return a loader that gives this process its share of a source of batches, with the options of the run.

    A source that is already a ``ShardedLoader`` is returned unchanged.
    """
    has_fixed_shares = trainer.division.has_fixed_shares
    takes_equal_steps = training or (trainer.is_sharded and not has_fixed_shares)
    evens_shares = trainer.is_sharded and has_fixed_shares and run.ranks.world_size > 1
    loader = shard(
        source,
        run.data.ranks,
        run.device,
        run.data.seed,
        training=takes_equal_steps,
        limit=run.request.max_batches,
        channels_last=trainer.channels_last,
        shares=trainer.division.shares,
        evens_shares=evens_shares,
        yields_failures=run.request.skips_failed_batches if training else run.skipped is not None,
        divides=training,
        first_epoch=run.data.first_epoch,
    )
    if loader is not source:
        run.data.made_loaders.add(loader)
        data = "training" if training else "evaluation"
        if loader.shared_by:
            trainer.print(f"Each process reads its own part of the {data} data, as sharded by {loader.shared_by}.")
        elif loader.undivided:
            trainer.print(
                f"Each process reads all {data} batches of its own {loader.undivided}: they are not divided among the "
                "processes. If all have the same batches, keep a part on each, such as "
                "batches[run.ranks.rank::run.ranks.world_size], or use a Dataset. If each has its own, pass "
                "OwnShard(batches), which says so."
            )
    return loader


# ------------------------------------------------------------------------------- its model, settings and start


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


def create_config(trainer: TrainerLike, run: Run, batch_size: int) -> TrainerRunConfig:
    """Return the settings of a run from ``create_run_config``, which users of pytorch-accelerated override."""
    request = run.request
    if "_create_run_config" not in run.overridden:
        return resolve_run_config(trainer, run, request, batch_size)
    return trainer._create_run_config(
        per_device_batch_size=batch_size,
        num_epochs=request.num_epochs,
        gradient_accumulation_steps=request.gradient_accumulation_steps,
        max_num_train_steps=request.max_num_train_steps,
        gradient_clip_value=request.gradient_clip_value,
    )


def resolve_run_config(trainer: TrainerLike, run: Run, request: RunRequest, batch_size: int) -> TrainerRunConfig:
    """Derive the settings of a run from its request and the length of its data.

    Raises:
        ValueError: if the training data do not fill a single batch
    """
    accelerator = trainer.accelerator
    data = run.data
    steps = find_length(data.train_loader)
    if steps == 0:
        raise ValueError(
            "train_dataset gives no batch: with drop_last=True it must hold at least one batch for every process. "
            "Lower the batch size, or omit drop_last."
        )
    accumulation = Accumulation(request.gradient_accumulation_steps)
    is_evaluation = data.train_loader is None
    updates_per_epoch = 0 if is_evaluation else None if steps is None else accumulation.updates_after(steps)
    request = _limit(request, accumulation, steps)
    processes = trainer.division.count or data.ranks.world_size
    train_batch_size = (data.train_loader_kwargs or {}).get("batch_size") or batch_size
    eval_batch_size = (data.eval_loader_kwargs or {}).get("batch_size") or batch_size
    return TrainerRunConfig(
        num_epochs=request.num_epochs,
        max_num_train_steps=request.max_num_train_steps,
        gradient_accumulation_steps=request.gradient_accumulation_steps,
        gradient_clip_value=request.gradient_clip_value,
        gradient_clip_norm=request.gradient_clip_norm,
        scheduler_interval=request.scheduler_interval,
        scheduler_metric=request.scheduler_metric,
        eval_every_n_epochs=request.eval_every_n_epochs,
        evaluate_every=request.evaluate_every,
        auto_microbatch=request.auto_microbatch,
        train_per_device_batch_size=train_batch_size,
        train_dl_kwargs=data.train_loader_kwargs,
        eval_per_device_batch_size=eval_batch_size,
        eval_dl_kwargs=data.eval_loader_kwargs,
        train_total_batch_size=train_batch_size * processes * accumulation.after(0),
        eval_total_batch_size=eval_batch_size * processes,
        num_update_steps_per_epoch=updates_per_epoch,
        is_local_process_zero=accelerator.is_local_main_process,
        is_world_process_zero=accelerator.is_main_process,
        is_distributed=accelerator.num_processes > 1,
        mixed_precision=accelerator.mixed_precision,
        num_processes=accelerator.num_processes,
        seed=trainer.seed,
        logical_processes=trainer.division.count,
        deterministic=trainer.deterministic,
    )


def _limit(request: RunRequest, accumulation: Accumulation, steps: int | None) -> RunRequest:
    """Derive epochs from updates, or updates from epochs of ``steps`` steps; updates take precedence."""
    updates, epochs = request.max_num_train_steps, request.num_epochs
    if updates is not None:
        return replace(request, num_epochs=None if steps is None else accumulation.epochs_for(updates, steps))
    if steps is None or epochs is None:
        return request
    return replace(request, max_num_train_steps=accumulation.updates_in(epochs, steps))


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


# ------------------------------------------------------------------------------------------ its scope and end


@contextmanager
def entering(trainer: TrainerLike, run: Run, call: str) -> Iterator[None]:
    """Make a run the trainer's current one, and restore the previous run afterwards.

    A run that has started stays as the latest one: see ``Run.stay()``.

    Args:
        call: the method that begins the run, which every process must call
    """
    run.previous = trainer.current_run
    run.outer = trainer.current_run if trainer.current_run in trainer.open_runs else None
    trainer.open_runs.append(run)
    trainer.current_run = run
    try:
        with ExitStack() as run.cleanup, computing(trainer), _with_the_others(trainer, run, call):
            if run.outer is None and (run.ranks.world_size > 1 or "parallelize_model" in run.overridden):
                begin_sharded(trainer, run)
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
            run.schedule.final_rates = learning_rates(trainer.optimizer)
        # This also ends predictions that were started within the run and not iterated to their end.
        trainer.open_runs[:] = [other for other in trainer.open_runs if other is not run and other.outer is not run]
        run.outer = None
        if not trainer.open_runs:
            set_optimizer_modes(trainer, training=False)
            release_model(trainer)
        for loader in run.data.made_loaders:
            loader.stop_workers()


@contextmanager
def _with_the_others(trainer: TrainerLike, run: Run, call: str) -> Iterator[None]:
    """Check that all processes begin the run, and watch the run within a block."""
    if run.ranks.is_alone:
        yield
        return
    with gathering_uneven_batches(trainer):
        check_same_call(trainer, call, run.data.train_dataset, run.data.eval_dataset)
        with watch.watching(trainer):
            yield


@contextmanager
def computing(trainer: TrainerLike) -> Iterator[None]:
    """Within a block, apply the settings of torch and Accelerate that a trainer requests."""
    with (
        in_effect(trainer.accelerator),
        nullcontext() if trainer.deterministic is None else deterministic_kernels(trainer.deterministic),
        trainer.division.computing(trainer.device),
    ):
        yield


@contextmanager
def ending(trainer: TrainerLike, run: Run, kind: Literal["training", "evaluation"]) -> Iterator[None]:
    """Fire the ending events after a block. If it is stopped early, print the reason and notify the callbacks.

    The reason of a stop is printed last; the reason of a pause is printed at once, because saving takes time. Stops and
    errors within an outer run are left to the outer run.
    """
    stopped = None
    ended = kind == "evaluation"  # errors do not fire the ending events of an evaluation
    try:
        try:
            with watch.naming_call(run.ranks) if run.ranks.world_size > 1 else nullcontext():
                yield
        except StopTrainingError as stop:
            stopped = stop
            if run.outer is None:
                _note_stop(trainer, run, stop)
        ended = True
        if kind == "training":
            set_optimizer_modes(trainer, training=False)
            run.stepper.end(trainer)
            trainer.training_run_end()
            _call_ending_event(trainer, run, "on_training_run_end")
        else:
            trainer.evaluation_run_end()
            _call_ending_event(trainer, run, "on_evaluation_run_end")
        run.end.make_last_calls()
    except BaseException as error:
        close_failed(trainer, run, error, ended)
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
        run.end.last_calls.append(lambda: trainer.print(text))
    _call_ending_event(trainer, run, "on_stop_training_error")
    run.record_interrupted_epoch(trainer.run_history, run.data.ranks)  # after a state has been saved


def _call_ending_event(trainer: TrainerLike, run: Run, event: str) -> None:
    """Fire an event while the run is ending, ignoring requests to stop it."""
    try:
        trainer.call_event(event)
        if run.ranks.world_size > 1:
            run.control.sync(now=True)
    except StopTrainingError as stop:
        run.end.reason = run.end.reason or str(stop)


def close_failed(trainer: TrainerLike, run: Run, error: BaseException, ended: bool) -> None:
    """Notify the callbacks that an error ends the run; the caller raises the error itself.

    Does nothing within an outer run, which may catch the error. A rank that fails alone does not fire the ending
    events, because they may communicate with ranks that have not failed.

    Args:
        ended: whether the ending events have already begun; one of their listeners may have failed
    """
    if run.outer is not None:
        return
    explain(error, trainer, run, run.kind)
    run.end.has_failed = True
    run.control.forget()
    together = run.ranks.world_size == 1 or isinstance(error, NonFiniteLossError)
    problems = trainer.callback_handler.notify_all("on_exception", trainer, exception=error)
    if together and not ended:
        try:
            run.record_interrupted_epoch(trainer.run_history, run.data.ranks)
            trainer.training_run_end()
        except Exception as failure:
            problems.append(failure)
        problems += trainer.callback_handler.notify_all("on_training_run_end", trainer)
    elif together:
        problems += trainer.callback_handler.notify_rest("on_training_run_end", trainer)
    for problem in problems:
        text = "".join(traceback.format_exception(problem))
        with suppress(OSError):  # a closed output must not hide the error itself
            trainer.print(f"While the run was being ended by {error!r}, another error occurred:\n{text}")
