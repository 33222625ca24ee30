"""How runs begin, nest and end: loaders, the prepared model, the ending events."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pytorch_accel_lite.base.events import NonFiniteLossError, RunPausedError, StopTrainingError
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.loss_checks import watch_first_call
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.run_settings import TrainerRunConfig
from pytorch_accel_lite.data import ShardedLoader, shard
from pytorch_accel_lite.distributed import shutdown
from pytorch_accel_lite.distributed.collectives import gathering_uneven_batches
from pytorch_accel_lite.engine.arguments import check_same_call
from pytorch_accel_lite.engine.explanations import explain
from pytorch_accel_lite.engine.prepared_model import PreparedModel
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.sharded_models import begin_sharded
from pytorch_accel_lite.optimizers.attributes import set_optimizer_modes
from pytorch_accel_lite.optimizers.rates import learning_rates, note_initial_options

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run


def create_loader(trainer: TrainerLike, run: Run, source: Any, training: bool) -> ShardedLoader:
    """Return a loader that gives this process its share of a source of batches, with the options of the run."""
    accelerate = trainer.accelerator.dataloader_config
    loader = shard(
        source,
        run.data.ranks,
        trainer.device,
        run.data.seed,
        training or trainer.is_sharded,
        limit=run.request.max_batches,
        channels_last=trainer.channels_last,
        shares=None if trainer.logical is None else trainer.logical.shares,
        yields_failures=run.request.skips_failed_batches if training else run.request.on_failed_batch is not None,
        divides=training,
        first_epoch=run.data.first_epoch,
        split_batches=accelerate.split_batches,
        dispatch_batches=accelerate.dispatch_batches,
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
                "batches[trainer.ranks.rank::trainer.ranks.world_size], or use a Dataset. If each has its own, return "
                "OwnShard(batches), which says so."
            )
    return loader


def create_config(trainer: TrainerLike, run: Run, batch_size: int) -> TrainerRunConfig:
    """Return the settings of a run, from the method that users of pytorch-accelerated override, with its arguments."""
    names = ("num_epochs", "gradient_accumulation_steps", "max_num_train_steps", "gradient_clip_value")
    requested = {name: getattr(run.request, name) for name in names}
    return trainer._create_run_config(per_device_batch_size=batch_size, **requested)


@contextmanager
def entering(trainer: TrainerLike, run: Run, call: str) -> Iterator[None]:
    """Make a run the trainer's current one, and restore the previous run afterwards.

    A run that has started sets its ``before`` to ``None``, and stays as the latest one.

    :param call: the method that begins the run, which every process must call
    """
    run.before = trainer.current_run
    run.outer = trainer.current_run if trainer.current_run in trainer.open_runs else None
    trainer.open_runs.append(run)
    trainer.current_run = run
    try:
        with computing(trainer), gathering_uneven_batches(trainer):
            datasets = {"train_dataset": run.data.train_dataset, "eval_dataset": run.data.eval_dataset}
            check_same_call(trainer.ranks, call, datasets, trainer.callback_handler.callback_list, trainer.seed)
            begin_sharded(trainer, run)
            yield
        shutdown.note_end(failed=False)
    except BaseException as error:
        shutdown.note_end(failed=not isinstance(error, GeneratorExit))  # the caller has stopped iterating
        raise
    finally:
        if trainer.current_run is run and run.before is not None:
            trainer.current_run = run.before
        run.before = None
        run.resumed = None
        if run.schedule.initial_options:
            note_initial_options(trainer.optimizer, run.schedule.initial_options)
            run.schedule.rates_left = learning_rates(trainer.optimizer)
        # This also ends predictions that were started within it and not iterated to their end.
        trainer.open_runs[:] = [other for other in trainer.open_runs if other is not run and other.outer is not run]
        run.outer = None
        if not trainer.open_runs:
            set_optimizer_modes(trainer, training=False)
            release_model(trainer)
        for loader in run.data.made_loaders:
            loader.stop_workers()


@contextmanager
def computing(trainer: TrainerLike) -> Iterator[None]:
    """Let the settings of torch that a trainer has asked for hold in a block."""
    with (
        trainer.backend_settings.in_force(),
        nullcontext() if trainer.logical is None else trainer.logical.computing_identically(trainer),
    ):
        yield


def prepare_model(trainer: TrainerLike, training: bool) -> None:
    """Prepare the model and the optimizer with Accelerate, unless they are prepared already."""
    prepared = trainer.prepared_model
    is_same = prepared is not None and (trainer.model, trainer.optimizer) == (prepared.model, prepared.optimizer)
    if prepared is not None and (is_same or not prepared.outlives_runs):
        return
    if isinstance(trainer.loss_func, nn.Module):
        trainer.loss_func.to(trainer.device)
        watch_first_call(trainer.loss_func)
    apply_model_options(trainer)
    averages = is_overridden(trainer, "train_step") or trainer.logical is not None  # the step does so by itself
    prepared = PreparedModel(trainer.accelerator, trainer.model, trainer.optimizer, training and not averages)
    trainer.prepared_model = prepared
    trainer.model = prepared.model
    if training or prepared.outlives_runs:
        prepared.make_optimizer(trainer.accelerator)
    trainer.optimizer = prepared.optimizer


def apply_model_options(trainer: TrainerLike) -> None:
    """Change the memory format of the model and compile it, in place and as requested, unless it is compiled."""
    model = trainer.get_model()
    if trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    if trainer.compile_model is not False and model._compiled_call_impl is None:
        model.compile(**({} if trainer.compile_model is True else trainer.compile_model))


def release_model(trainer: TrainerLike) -> None:
    """Release the model and the optimizer, unless their weights exist only in prepared form."""
    prepared = trainer.prepared_model
    if prepared is not None and not prepared.outlives_runs:
        trainer.model, trainer.optimizer = prepared.release(trainer.model)
        trainer.prepared_model = None


@contextmanager
def ending(trainer: TrainerLike, run: Run, kind: Literal["training", "evaluation"]) -> Iterator[None]:
    """Fire the ending events after a block. If it is stopped early, print the reason and notify the callbacks.

    The reason is printed after the metrics of the epoch, which callbacks then show; that of a pause is printed at once,
    as saving takes time. Stops and errors within an outer run are left to that run.
    """
    stopped = None
    ended = kind == "evaluation"  # errors do not fire its ending events
    try:
        try:
            yield
        except StopTrainingError as stop:
            stopped = stop
            if run.outer is None:
                run.end.reason = str(stop) or type(stop).__name__
                run.end.stopped_by = stop.raised_by
                run.end.pause = stop if isinstance(stop, RunPausedError) else None
                if run.end.pause is not None:
                    trainer.print(run.end.reason)
                _call_ending_event(trainer, run, "on_stop_training_error")
                if run.end.pause is None:
                    trainer.print(run.end.reason)
                run.record_interrupted_epoch(trainer.run_history, run.data.ranks)  # once a state has been saved
        ended = True
        if kind == "training":
            set_optimizer_modes(trainer, training=False)
        getattr(trainer, f"{kind}_run_end")()
        _call_ending_event(trainer, run, f"on_{kind}_run_end")
        for message in run.end.messages:
            message()
    except BaseException as error:
        close_failed(trainer, run, error, ended)
        raise
    if stopped is not None and run.outer is not None:
        raise stopped


def _call_ending_event(trainer: TrainerLike, run: Run, event: str) -> None:
    """Fire an event while the run is ending, ignoring requests to stop it."""
    try:
        trainer.call_event(event)
        if trainer.ranks.world_size > 1:
            run.control.sync(now=True)
    except StopTrainingError as stop:
        run.end.reason = run.end.reason or str(stop)


def add_note(error: Exception, trainer: TrainerLike, run: Run, phase: str) -> None:
    """Add a note to the error of a step, with the place, the data and advice.

    :param phase: ``"training"``, ``"evaluation"`` or ``"prediction"``
    """
    if not isinstance(error, (StopTrainingError, NonFiniteLossError)):
        explain(error, trainer, run, phase)


def close_failed(trainer: TrainerLike, run: Run, error: BaseException, ended: bool) -> None:
    """Notify the callbacks that an error ends the run; the caller raises the error itself.

    Does nothing within an outer run, which may catch the error. A rank that fails alone does not fire the ending
    events, as they may communicate with ranks that have not failed.

    :param ended: whether the ending events have already begun; one of their listeners may have failed
    """
    if run.outer is not None:
        return
    run.control.forget()
    together = trainer.ranks.world_size == 1 or isinstance(error, NonFiniteLossError)
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
