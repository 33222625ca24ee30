"""Evaluation of one or several datasets, within a training run or on its own. Every sample counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.base.batches import complete_output
from pytorch_accel_lite.base.events import NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.mixed_precision import mixed_precision
from pytorch_accel_lite.base.modules import preserving_modes, reshard, unwrap
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.data import Batch, FailedRead
from pytorch_accel_lite.distributed.averaging import sync_ddp_buffers
from pytorch_accel_lite.engine.lifecycle import add_note, create_loader
from pytorch_accel_lite.engine.losses import create_trackers
from pytorch_accel_lite.engine.run import EVALUATED, Run
from pytorch_accel_lite.optimizers.attributes import evaluating_optimizers


def create_eval_loaders(trainer: TrainerLike, run: Run, batch_size: int, loader_kwargs: dict[str, Any] | None) -> None:
    """Create the loaders of the evaluation dataset, or of several by name."""
    run.data.eval_loader = None
    run.data.eval_loaders = {}
    dataset = run.data.eval_dataset
    is_dict = isinstance(dataset, dict)
    for name, part in dataset.items() if is_dict else [("", dataset)]:
        if is_dict and not (name and isinstance(name, str)):
            raise ValueError(f"eval_dataset has the key {name!r}, but keys name the metrics: use non-empty strings.")
        run.data.eval_dataset = part  # read by overrides of create_eval_dataloader
        source = trainer.create_eval_dataloader(batch_size, loader_kwargs)
        run.data.eval_loader = create_loader(trainer, run, source, training=False)
        if find_length(run.data.eval_loader) == 0:
            raise ValueError(
                "eval_dataset gives no batch: with drop_last=True it must hold at least one batch for every process."
            )
        if name:
            run.data.eval_loaders[name] = run.data.eval_loader
    run.data.eval_dataset = dataset


@contextmanager
def prefixed(trainer: TrainerLike, prefix: str) -> Iterator[None]:
    """Prefix the names of the metrics recorded in a block."""
    history = trainer.run_history
    before = history.metric_name_prefix
    history.set_metric_name_prefix(f"{before}{prefix}")
    try:
        yield
    finally:
        history.set_metric_name_prefix(before)


def evaluate_all(
    trainer: TrainerLike, run: Run, is_training: bool = True, is_intermediate: bool = False
) -> dict[str, float]:
    """Evaluate on all evaluation datasets; with several, their names prefix the names of the metrics."""
    if not run.data.eval_loaders and run.data.eval_loader is not None:
        with _loss_in_evaluation_mode(trainer):
            trainer._run_eval_epoch(run.data.eval_loader, is_training, is_intermediate)
        return run.recorded_losses
    losses: dict[str, float] = {}
    try:
        for name, loader in run.data.eval_loaders.items():
            run.data.eval_loader = loader
            run.data.eval_dataset_name = name
            with prefixed(trainer, f"{name}_"), _loss_in_evaluation_mode(trainer):
                trainer._run_eval_epoch(loader, is_training, is_intermediate)
            losses |= {f"{name}_{metric}": loss for metric, loss in run.recorded_losses.items()}
    finally:
        run.data.eval_dataset_name = None
    return losses


@contextmanager
def _loss_in_evaluation_mode(trainer: TrainerLike) -> Iterator[None]:
    """Set a loss module to evaluation mode for a block, then restore the modes of its parts outside the model."""
    of_loss = set(trainer.loss_func.modules()) if isinstance(trainer.loss_func, nn.Module) else set()
    with preserving_modes(of_loss - set(trainer.model.modules())):
        for module in of_loss:
            module.training = False
        yield


def evaluation_epoch(trainer: TrainerLike, run: Run, source: Any, is_training: bool, is_intermediate: bool) -> None:
    """Evaluate on one dataset and record its losses."""
    trainer.eval_epoch_start()
    run.loss_trackers = create_trackers(trainer)
    trainer.call_event("on_eval_epoch_start", is_intermediate=is_intermediate)
    loader = create_loader(trainer, run, source, training=False)
    sync_ddp_buffers(trainer.model, trainer.ranks)
    run.data.has_fillers = loader.options.fill
    batch = None
    with (
        evaluating_optimizers(trainer),
        unwrapped_model(trainer),
        nullcontext() if trainer.logical is None else preserving_generators(),
        torch.no_grad(),
    ):
        for batch in loader.steps(run.progress.epoch):
            _evaluate_batch(trainer, run, batch)
        if run.data.has_fillers and batch is not None and not batch.is_last:  # the others have one batch more
            _evaluate_batch(trainer, run, batch._replace(num_samples=0))
    run.batch, run.data.has_fillers = None, True
    trainer.eval_epoch_end()
    name = "intermediate_eval_{}" if is_intermediate else "eval_{}_epoch" if is_training else "evaluation_{}"
    run.record_losses(trainer.run_history, run.data.ranks, name)
    if is_training and not is_intermediate and source is run.data.all_eval_loaders[-1]:
        run.epoch_phase = EVALUATED
    trainer.call_event("on_eval_epoch_end", is_intermediate=is_intermediate)
    run.control.sync(now=True)


def _evaluate_batch(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Compute the losses of a batch and add them up."""
    run.batch = batch
    hears = trainer.callback_handler.listeners
    if trainer.logical is not None:
        trainer.logical.begin_share(batch)
    if hears["on_eval_step_start"]:
        trainer.call_event("on_eval_step_start")
    try:
        if isinstance(batch.data, FailedRead):
            raise batch.data.error
        with mixed_precision(trainer.accelerator):
            output = trainer.calculate_eval_batch_loss(batch.data)
        complete_output(output, batch.data, batch.num_samples, "calculate_eval_batch_loss", training=False)
    except Exception as error:
        if not is_skipped(error, trainer, run, "evaluation"):
            raise
        return
    trackers = run.loss_trackers
    trackers.measured = batch, output["batch_size"]
    if trackers.unweighed:
        trackers.weigh()
    if batch.num_samples != 0:
        trackers.add(output)
    if hears["on_eval_step_end"]:
        trainer.call_event("on_eval_step_end", batch=batch.data, batch_output=output)


def is_skipped(error: Exception, trainer: TrainerLike, run: Run, phase: str) -> bool:
    """Report the failed batch of an evaluation or prediction that skips such; otherwise, add a note to its error."""
    report = run.request.on_failed_batch
    indices = run.batch_indices
    if report is None or indices is None or isinstance(error, (StopTrainingError, NonFiniteLossError)):
        add_note(error, trainer, run, phase)
        return False
    text = f"{type(error).__name__}: {error}"
    of_worker = "Original Traceback" in text  # its last line has the error itself
    report([*indices], text.rstrip().rpartition("\n")[2] if of_worker else text)
    return True


@contextmanager
def unwrapped_model(trainer: TrainerLike) -> Iterator[None]:
    """Bypass ``DistributedDataParallel``, whose forward pass communicates.

    Ranks may then have different numbers of batches. Synchronise their buffers beforehand.
    """
    wrapped = trainer.model
    is_sharded = trainer.is_sharded
    if not is_sharded:
        trainer.model = unwrap(wrapped)
    try:
        yield
    finally:
        trainer.model = wrapped
        if is_sharded:
            reshard(wrapped)
