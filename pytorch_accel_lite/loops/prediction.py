"""Prediction: the model's outputs for a dataset, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.attributes import evaluating_optimizers
from pytorch_accel_lite.batches import find_batch_size
from pytorch_accel_lite.data import FailedRead
from pytorch_accel_lite.distributed.prepared import evaluation_mode, mixed_precision, sync_ddp_buffers
from pytorch_accel_lite.loops.evaluation import is_skipped, unwrapped_model
from pytorch_accel_lite.loops.inference import inference_run, preserving_randomness
from pytorch_accel_lite.pieces import concatenate, to_cpu
from pytorch_accel_lite.run import Run, close_failed
from pytorch_accel_lite.run_config import RunRequest

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


def predict(
    self: Trainer,
    dataset: Any,
    per_device_batch_size: int = 8,
    dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the model's outputs for every sample, in the order of the dataset, on the CPU.

    Takes the same arguments as :meth:`evaluate`, and can be called in the same places.

    :param dataset: a dataset with or without targets, which are ignored
    :return: the outputs of the model, concatenated over all samples: a tensor of shape ``(len(dataset), ...)``, or
        tuples, lists or dicts of such tensors; the same on every process
    """
    parts = list(self.predict_iter(dataset, per_device_batch_size, dataloader_kwargs, collate_fn))
    if not parts:
        raise ValueError(
            f"dataset gave no batch: {type(dataset).__name__} is empty or exhausted, or a PredictionWriterCallback "
            "has already written all predictions: read them with read_predictions()."
        )
    return concatenate(parts)


def predict_iter(
    self: Trainer,
    dataset: Any,
    per_device_batch_size: int = 8,
    dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Yield the outputs of :meth:`predict` in parts, in the order of the dataset and the same on every process.

    Only a few batches are in memory at any time. Iterate to the end on every process. Meanwhile the model is in
    evaluation mode, except within another run, where its own mode is restored between the parts.
    """
    self._check_data("dataset", dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
    if isinstance(dataset, dict):
        raise TypeError(f"dataset: predict takes one dataset, not a dict of {sorted(dataset)}. Call it for each.")
    request = RunRequest("prediction", num_epochs=1)
    with inference_run(self, request, dataset, per_device_batch_size, dataloader_kwargs, collate_fn) as run:
        outputs = _outputs(self, run)
        try:
            self.call_event("on_predict_run_start")
            sync_ddp_buffers(self.model, self.ranks)
            with evaluation_mode(self.model) if run.outer is None else nullcontext():
                while parts := _next_parts(self, run, outputs):
                    with _suspended(self, run):
                        yield concatenate(parts)
            self.call_event("on_predict_run_end")
        except GeneratorExit:  # the caller stopped iterating
            self.call_event("on_predict_run_end")
            raise
        except BaseException as error:
            close_failed(self, run, error, ended=True)
            raise


def _next_parts(trainer: Trainer, run: Run, outputs: Iterator[Any]) -> list[Any]:
    """Return the next outputs of every process that has any left."""
    with preserving_randomness(trainer, run), evaluation_mode(trainer.model), evaluating_optimizers(trainer):
        mine = next(outputs, None)
    return [part for part in trainer.data_ranks.all_gather_object(mine) if part is not None]


def _outputs(trainer: Trainer, run: Run) -> Iterator[Any]:
    """Yield this process's outputs, batch by batch, on the CPU."""
    logical = trainer.logical
    shares: list[Any] = []
    for batch in run.eval_loader.steps(run.progress.epoch, run.request.first_sample):
        run.batch = batch
        if logical is not None:
            logical.begin_share(batch)
        with unwrapped_model(trainer), torch.no_grad(), mixed_precision(trainer.accelerator):
            try:
                if isinstance(batch.data, FailedRead):
                    raise batch.data.error
                output = trainer.calculate_predict_batch_output(batch.data)
            except Exception as error:
                if not is_skipped(error, trainer, run, "prediction"):
                    raise
                continue
        trainer.call_event("on_predict_step_end", batch=batch.data, batch_output=output)
        if batch.num_samples != 0:
            size = find_batch_size(batch.data, batch.num_samples) if type(output) is list else None
            shares.append(to_cpu(output, size))
            if batch.share is None or batch.share.ends_step:
                yield concatenate(shares) if len(shares) > 1 else shares[0]
                shares.clear()


@contextmanager
def _suspended(trainer: Trainer, run: Run) -> Iterator[None]:
    """Make the run around a prediction the current one while a part of the prediction is being used."""
    if run.before is not None:
        trainer.current_run = run.before
    try:
        yield
    finally:
        if run in trainer.open_runs:
            run.before = trainer.current_run
            trainer.current_run = run
