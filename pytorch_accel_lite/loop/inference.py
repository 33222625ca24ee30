"""Evaluation and prediction, what they share: their run, and how it computes batches without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from accelerate import Accelerator

from pytorch_accel_lite.base.modules import mixed_precision, reshard, unwrap
from pytorch_accel_lite.base.random_generators import preserving_generators
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.user_code import overridden_methods
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.outputs import complete_output
from pytorch_accel_lite.data.sources import BatchData
from pytorch_accel_lite.loop.guards.modes import restoring_mode_between_batches
from pytorch_accel_lite.loop.lifecycle import entering
from pytorch_accel_lite.loop.loaders_and_lengths import create_config, set_eval_loaders
from pytorch_accel_lite.loop.model_setup import prepare_model
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import InferenceStep, Run, TrainerLike
from pytorch_accel_lite.run.run_data import DataArguments, SkippedBatches
from pytorch_accel_lite.run.trained_objects import evaluating_optimizers

#: A step method, which returns its output for a batch.
Compute: TypeAlias = Callable[[BatchData], Tree]
#: Creates what computes the batches of a run that may fail.
INFERENCE_STEP: Slot[Callable[[TrainerLike, Run], InferenceStep]] = Slot("failed_batches")


@contextmanager
def inference_run(trainer: TrainerLike, request: RunRequest, arguments: DataArguments) -> Iterator[Run]:
    """Enter an evaluation or prediction run, with its loaders and the model prepared.

    An outer run is left unchanged. Without an outer run, an evaluation becomes the latest run.
    """
    latest = trainer.current_run
    run = latest.derive() if latest in trainer.open_runs else latest.derive_after()
    run.kind = request.kind
    run.overridden = overridden_methods(trainer)
    run.data.eval_dataset, run.data.eval_arguments = arguments.dataset, arguments
    run.data.collate_fn = arguments.collate_fn
    with entering(trainer, run, "evaluate()" if request.kind == "evaluation" else "predict()"):
        trainer.callback_handler.configure_run(trainer, request, is_outermost=run.outer is None)
        run.request = request if run.outer is None else _within_another_run(run.request, request)
        choose_inference_step(trainer, run, request)
        set_eval_loaders(trainer, run)
        prepare_model(trainer, training=False)
        if run.outer is None:
            run.config = create_config(trainer, run)
            if request.kind == "evaluation":
                run.previous = None  # it remains the latest run
        yield run


def _within_another_run(outer: RunRequest, request: RunRequest) -> RunRequest:
    """Return the request of an evaluation or a prediction within another run: of that run, but for what is read."""
    return replace(
        outer,
        max_batches=request.max_batches,
        first_sample=request.first_sample,
        auto_microbatch=outer.auto_microbatch or request.auto_microbatch,
    )


def choose_inference_step(trainer: TrainerLike, run: Run, request: RunRequest) -> None:
    """Choose how a run computes the batches of its evaluations, or of its prediction.

    Raises:
        ValueError: if batches may fail, and the extension is missing
    """
    is_prediction = request.kind == "prediction"
    skips = request.skips_in_prediction if is_prediction else request.skips_in_evaluation
    splits = run.request.auto_microbatch
    run.skipped = SkippedBatches("prediction" if is_prediction else "evaluation") if skips else None
    run.inference_step = None
    if splits or skips or request.skips_failed_batches:
        create = INFERENCE_STEP.get("auto_microbatch=True" if splits else "Skipping batches that fail")
        if skips or (splits and not is_prediction):
            run.inference_step = create(trainer, run)


def compute_batches(
    trainer: TrainerLike, run: Run, batches: Iterable[Batch], compute: Compute, is_evaluation: bool = True
) -> Iterator[tuple[Batch, Tree]]:
    """Yield each batch with its output from a step method, or with ``SKIPPED`` if the batch failed and is skipped."""
    listeners = trainer.callback_handler.listeners
    compute_batch = partial(_compute, trainer.accelerator, compute, is_evaluation)
    run.batch_number = 0
    batches = restoring_mode_between_batches(trainer, run, batches, "evaluation" if is_evaluation else "prediction")
    for number, batch in enumerate(batches, start=1):
        run.batch = batch
        if trainer.division.has_fixed_shares:
            trainer.division.begin_share(batch)
        if is_evaluation and listeners["on_eval_step_start"]:
            trainer.call_event("on_eval_step_start")
        if run.inference_step is None:
            output = compute_batch(batch)
        else:
            output = run.inference_step.compute(trainer, run, batch, compute_batch)
        yield batch, output
        del output
        run.batch, run.batch_number = None, number
    run.batch_number = None


def _compute(accelerator: Accelerator, compute: Compute, is_evaluation: bool, batch: Batch) -> Tree:
    if accelerator.native_amp:
        with mixed_precision(accelerator):
            output = compute(batch.data)
    else:  # entering an empty context costs time
        output = compute(batch.data)
    if is_evaluation:
        output = complete_output(output, batch.data, batch.num_samples, "calculate_eval_batch_loss", training=False)
    return output


@contextmanager
def inference(trainer: TrainerLike) -> Iterator[None]:
    """Within a block, compute without gradients, with the bare model, and with optimizers in evaluation mode."""
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
    """Preserve the generators of an outer run; without one, only the generators that seeded reading changes."""
    if run.outer is not None or trainer.division.has_fixed_shares:
        return preserving_generators()
    return nullcontext() if run.data.seed is None else preserving_generators("python", "numpy")
