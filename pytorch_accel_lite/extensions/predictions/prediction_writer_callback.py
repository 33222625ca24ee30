"""Writing predictions to disk as they are made, for data that do not fit into memory."""

from __future__ import annotations

import hashlib
import json
import operator
import os

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from pytorch_accel_lite.checkpoint import folder_path
from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import (
    ListOfSamples,
    dataset_of,
    find_length,
    infer_batch_size,
    to_cpu,
)
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import evaluating_optimizers, other_modules
from pytorch_accel_lite.extension_tools.plain_types import Tree
from pytorch_accel_lite.extension_tools.states_and_files import weight_checksums, without_compile
from pytorch_accel_lite.extensions.predictions.prediction_shards import PredictionFolder


class PredictionWriterCallback(TrainerCallback):
    """Write the outputs of ``predict`` and ``predict_iter`` to a directory, in shards, while they run.

    Each process writes its own shards, with the indices of their samples; ``read_predictions()`` puts them in the
    order of the dataset. Shards are written atomically. If a prediction was killed, the same call resumes it at the
    first sample that has not been written, on any number of processes, and returns only the remaining outputs; damaged
    shards are removed, with a warning. Predictions of other weights in the directory, finished or not, are replaced,
    with a message; ``predictions.json`` has a checksum of the weights. Other data of the same length are not
    recognised: give each dataset a directory of its own. With a sampler, which has an order of its own, a prediction
    that was killed begins again. To keep memory use low::

        for _ in trainer.predict_iter(dataset):
            pass

    Samples of batches that are left out (``SkipFailedBatchesCallback``) count as written, without an output.

    Args:
        directory: where shards are written; created if missing
        shard_size: minimum number of samples in a process's shard
        overwrite: remove the shards of an earlier prediction instead of resuming it

    Raises:
        ValueError: if the directory contains predictions for a dataset of another length
        OSError: if the processes do not share the directory
    """

    affects_training = False

    def __init__(
        self, directory: str | os.PathLike[str] = "predictions", shard_size: int = 1024, overwrite: bool = False
    ) -> None:
        self.directory = folder_path("directory", directory)
        self.shard_size = check_positive_int("shard_size", shard_size)
        self.overwrite = overwrite
        self._clear()

    def _clear(self) -> None:
        self._indices: list[int] = []
        self._outputs: list[Tree] = []
        self._left_out: list[int] = []

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if request.kind != "prediction":
            return
        length = find_length(dataset_of(trainer.eval_dataset))
        if length is None:
            raise TypeError("PredictionWriterCallback needs a dataset with a length.")
        weights = _checksum_of_weights(trainer)
        folder = PredictionFolder(self.directory)
        folder.check_is_shared(trainer.ranks)
        in_order = _reads_in_order(trainer)
        start, replaced = trainer.ranks.result_of_first(
            lambda: folder.begin(length, weights, self.overwrite, in_order, trainer.run.cleanup)
        )
        self._clear()  # only now, as a prediction that writes there already may be what refuses this one
        request.first_sample = start
        if replaced:
            trainer.print(
                f"{os.fspath(self.directory)!r} contains {replaced}, which are replaced: predicting all {length} "
                "samples."
            )
        if start:
            trainer.print(
                f"{start} of {length} samples have already been predicted; continuing with the rest. If the data are "
                "others of this length, pass overwrite=True, or another directory."
            )

    def on_predict_step_end(self, trainer: TrainerLike, batch_output: Tree, **kwargs: object) -> None:
        indices = _indices_of_batch(trainer)
        if not indices:  # a filler batch, which only keeps the processes in step
            return
        outputs = to_cpu(batch_output, len(indices))
        is_list = isinstance(outputs, ListOfSamples)
        rows = len(outputs) if is_list else infer_batch_size(outputs, len(indices))
        if rows != len(indices):
            raise ValueError(
                f"PredictionWriterCallback cannot tell which of {len(indices)} samples the {rows} rows of an output "
                "are. Let collate_fn and the model return a row for each sample."
            )
        self._indices += indices
        self._outputs.append(outputs)
        if len(self._indices) >= self.shard_size:
            self._write(trainer)

    def on_predict_batch_skipped(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._left_out += _indices_of_batch(trainer)

    def on_predict_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._write(trainer)
        trainer.barrier()

    def _write(self, trainer: TrainerLike) -> None:
        if trainer.data_ranks.is_first_sharer:
            folder = PredictionFolder(self.directory)
            folder.write(trainer.ranks.rank, self._indices, self._outputs, self._left_out)
        self._clear()


def _reads_in_order(trainer: TrainerLike) -> bool:
    """Whether a prediction reads the samples in the order of the dataset, and not in that of a sampler."""
    dataset, kwargs = trainer.run.data.eval_dataset, trainer.run.data.eval_arguments.loader_kwargs or {}
    sampler, batch_sampler = kwargs.get("sampler"), kwargs.get("batch_sampler")
    if isinstance(dataset, DataLoader):
        sampler, batch_sampler = dataset.sampler, dataset.batch_sampler
    return isinstance(sampler, (SequentialSampler, type(None))) and type(batch_sampler) in (BatchSampler, type(None))


def _indices_of_batch(trainer: TrainerLike) -> list[int]:
    indices = trainer.run.batch_indices
    if indices is None:
        raise TypeError("PredictionWriterCallback needs a dataset whose samples have indices, not a stream.")
    try:
        return [operator.index(index) for index in indices]  # which may be of numpy or torch
    except TypeError:
        raise TypeError(f"PredictionWriterCallback needs integers as indices of samples, not {indices!r}.") from None


def _checksum_of_weights(trainer: TrainerLike) -> str:
    """Return a hash of the weights and buffers that predictions depend on. A collective operation if they are sharded.

    These are the model's, and those of the trainer's other modules if its class computes the outputs itself.
    """
    modules = {"model": trainer.get_model(keep_torch_compile=False)}
    if is_overridden(trainer, "calculate_predict_batch_output"):
        modules |= other_modules(trainer)
    with evaluating_optimizers(trainer):
        numbers = {name: weight_checksums(without_compile(module.state_dict())) for name, module in modules.items()}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()
