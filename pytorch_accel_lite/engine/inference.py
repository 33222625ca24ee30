"""Computing batches without training: what evaluation and prediction share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from pytorch_accel_lite.base.batches import complete_output
from pytorch_accel_lite.base.devices import mixed_precision
from pytorch_accel_lite.base.modules import reshard, unwrap
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.base.run_settings import RunRequest
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.distributed.stop_coordinator import StopCoordinator
from pytorch_accel_lite.engine.lifecycle import create_config, create_eval_loaders, entering
from pytorch_accel_lite.engine.prepared_model import prepare_model
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.optimizers.attributes import evaluating_optimizers


@contextmanager
def inference_run(
    trainer: TrainerLike, request: RunRequest, dataset: Any, batch_size: int, loader_kwargs: Any, collate_fn: Any
) -> Iterator[Run]:
    """Enter an evaluation or prediction run, with its loaders and the model prepared.

    An outer run is left unchanged. Without one, an evaluation becomes the latest run.
    """
    batch_size = int(batch_size)
    run = trainer.current_run.derive()
    run.data.eval_dataset = dataset
    run.data.collate_fn = collate_fn
    with entering(trainer, run, "evaluate()" if request.kind == "evaluation" else "predict()"):
        if run.outer is None:
            run.data.train_loader = run.data.train_loader_kwargs = run.end.reason = None
            run.control = StopCoordinator(trainer.ranks)
        trainer.callback_handler.configure_run(trainer, request)
        requested = replace(run.request, max_batches=request.max_batches, first_sample=request.first_sample)
        run.request = request if run.outer is None else requested
        create_eval_loaders(trainer, run, batch_size, loader_kwargs)
        prepare_model(trainer, training=False)
        if run.outer is None:
            run.config = create_config(trainer, run, batch_size)
            run.before = None if request.kind == "evaluation" else run.before
        yield run


def compute_batches(
    trainer: TrainerLike, run: Run, batches: Iterable[Batch], compute: Callable[[Any], Any], is_evaluation: bool = True
) -> Iterator[tuple[Batch, Any]]:
    """Yield each batch with what a step method returns for it."""
    listeners = trainer.callback_handler.listeners
    run.batch_number = 0
    for number, batch in enumerate(batches, start=1):
        run.batch = batch
        if trainer.logical is not None:
            trainer.logical.begin_share(batch)
        if is_evaluation and listeners["on_eval_step_start"]:
            trainer.call_event("on_eval_step_start")
        with mixed_precision(trainer.accelerator):
            output = compute(batch.data)
        if is_evaluation:
            complete_output(output, batch.data, batch.num_samples, "calculate_eval_batch_loss", training=False)
        yield batch, output
        del output
        run.batch, run.batch_number = None, number
    run.batch_number = None


@contextmanager
def inference(trainer: TrainerLike) -> Iterator[None]:
    """Compute without gradients in a block, by the bare model, with optimizers in evaluation mode."""
    with evaluating_optimizers(trainer), unwrapped_model(trainer), torch.no_grad():
        yield


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


def preserving_randomness(trainer: TrainerLike, run: Run) -> AbstractContextManager[None]:
    """Preserve the generators of an outer run; without one, only those that seeded reading of data changes."""
    if run.outer is not None or trainer.logical is not None:
        return preserving_generators()
    return nullcontext() if run.data.seed is None else preserving_generators("python", "numpy")
