"""Writing predictions to disk as they are made, for data that do not fit into memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.inspection import find_length, is_overridden
from pytorch_accel_lite.base.paths import folder_path, local_path
from pytorch_accel_lite.base.types import JsonObject, StateDict, Tree
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.checkpoint.files import check_is_shared, load_verified, write_checkpoint, write_text
from pytorch_accel_lite.checkpoint.locks import lock_path
from pytorch_accel_lite.checkpoint.weights import fingerprints, without_compile
from pytorch_accel_lite.data.batches import BatchOutput
from pytorch_accel_lite.data.loader_choice import dataset_of
from pytorch_accel_lite.data.sources import BatchData
from pytorch_accel_lite.data.splitting import ListOfSamples, concatenate, reorder, to_cpu
from pytorch_accel_lite.run import attributes
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import TrainerLike

_DESCRIPTION = "predictions.json"
_SHARD = re.compile(r"shard-\d{12,}-\d{12,}-rank\d+\.pt")


class PredictionWriterCallback(TrainerCallback):
    """Write the outputs of ``predict`` and ``predict_iter`` to a directory, in shards, while they run.

    Each process writes its own shards, with the indices of their samples; :func:`read_predictions` puts them in the
    order of the dataset. Shards are written atomically. If a prediction was killed, the same call resumes it at the
    first sample that has not been written, on any number of processes, and returns only the remaining outputs; damaged
    shards are removed, with a warning. Predictions of other weights in the directory, finished or not, are replaced,
    with a message; ``predictions.json`` has a fingerprint of the weights. To keep memory use low::

        for _ in trainer.predict_iter(dataset):
            pass

    Samples of batches that are left out (:class:`SkipFailedBatchesCallback`) count as written, without an output.

    :param directory: where shards are written; created if missing
    :param shard_size: minimum number of samples in a process's shard
    :param overwrite: remove the shards of an earlier prediction instead of resuming it
    :raises ValueError: if the directory contains predictions for a dataset of another length
    :raises OSError: if the processes do not share the directory
    """

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
        self._clear()
        length = find_length(dataset_of(trainer.eval_dataset))
        if length is None:
            raise TypeError("PredictionWriterCallback needs a dataset with a length.")
        weights = _fingerprint(trainer)
        check_is_shared(self.directory, f"directory={os.fspath(self.directory)!r}", trainer.ranks)
        start, replaced = trainer.ranks.broadcast_object(lambda: self._begin(trainer, length, weights))
        request.first_sample = start
        if replaced:
            trainer.print(
                f"{os.fspath(self.directory)!r} contains predictions of other or unknown weights, which are replaced: "
                f"predicting all {length} samples."
            )
        if start:
            trainer.print(f"{start} of {length} samples have already been predicted; continuing with the rest.")

    def _begin(self, trainer: TrainerLike, length: int, weights: str) -> tuple[int, bool]:
        """Lock the directory, remove predictions of other weights, count the leading samples that are written.

        :param weights: fingerprint of the weights
        :return: that number, and whether predictions of other or unknown weights were removed
        """
        trainer.run.locks.callback(lock_path("directory", self.directory).release)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _DESCRIPTION
        existing = {} if self.overwrite or not path.exists() else _read_description(path)
        if existing.get("length", length) != length:
            raise ValueError(
                f"{os.fspath(self.directory)!r} contains predictions for {existing['length']} samples, not {length}. "
                "Choose another directory, or pass overwrite=True."
            )
        shards = _find_shards(self.directory)
        description = {"length": length, "weights": weights}
        if self.overwrite or existing != description:
            for shard in shards:  # before the new fingerprint is written, which is not that of the shards
                shard.unlink()
            write_text(path, json.dumps(description) + "\n")
            return 0, bool(shards) and not self.overwrite
        written = _remove_damaged(shards)
        done = set(chain.from_iterable(written.values()))
        start = next((index for index in range(length) if index not in done), length)
        for shard, samples in written.items():
            if max(samples) >= start:  # of a process that was ahead of the others
                _shorten(shard, start)
        return start, False

    def on_predict_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        indices = _indices_of_batch(trainer)
        if not indices:  # a filler batch, which only keeps the processes in step
            return
        self._indices += indices
        self._outputs.append(to_cpu(batch_output, len(indices)))
        if len(self._indices) >= self.shard_size:
            self._write(trainer)

    def on_predict_batch_skipped(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._left_out += _indices_of_batch(trainer)

    def on_predict_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._write(trainer)
        trainer.barrier()

    def _write(self, trainer: TrainerLike) -> None:
        samples = self._indices + self._left_out
        if samples and trainer.data_ranks.is_first_sharer:
            name = f"shard-{min(samples):012d}-{max(samples):012d}-rank{trainer.ranks.rank}.pt"
            outputs = concatenate(self._outputs) if self._indices else None
            _write_shard(self.directory / name, self._indices, outputs, self._left_out)
        self._clear()


def _indices_of_batch(trainer: TrainerLike) -> list[int]:
    indices: list[int] | None = trainer.run.batch_indices
    if indices is None:
        raise TypeError("PredictionWriterCallback needs a dataset whose samples have indices, not a stream.")
    return indices


def _read_description(path: Path) -> JsonObject:
    """Read the description of predictions.

    :raises ValueError: if it is something else; names the file
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict) or type(content.get("length")) is not int or content["length"] < 0:
        raise ValueError(
            f"{os.fspath(path)!r} is not the description of predictions that PredictionWriterCallback writes. To "
            "predict again, choose another directory, or pass overwrite=True."
        )
    return content


def _fingerprint(trainer: TrainerLike) -> str:
    """Return a hash of the weights and buffers that predictions depend on. A collective operation if they are sharded.

    They are the model's, and those of the trainer's other modules if its class computes the outputs.
    """
    modules = {"model": trainer.get_model(keep_torch_compile=False)}
    if is_overridden(trainer, "calculate_predict_batch_output"):
        modules |= attributes.modules(trainer)
    with attributes.evaluating_optimizers(trainer):
        numbers = {name: fingerprints(without_compile(module.state_dict())) for name, module in modules.items()}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def _find_shards(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("shard-*.pt") if _SHARD.fullmatch(path.name))


def _remove_damaged(shards: list[Path]) -> dict[Path, list[int]]:
    """Return the samples of each shard, and remove those that are damaged, whose samples are predicted again."""
    samples: dict[Path, list[int]] = {}
    for shard in shards:
        try:
            content = load_verified(shard)
            samples[shard] = [*content["indices"], *content.get("left_out", [])]
        except ValueError as error:
            shard.unlink()
            warn_outside(f"Its samples are predicted again, as the predictions in it cannot be used. {error}")
    return samples


def _shorten(path: Path, end: int) -> None:
    """Remove from a shard all but the first ``end`` samples of the dataset, as the others will be predicted again."""
    shard = load_verified(path)
    positions = [position for position, index in enumerate(shard["indices"]) if index < end]
    left_out = [index for index in shard.get("left_out", []) if index < end]
    if positions or left_out:
        indices = [shard["indices"][position] for position in positions]
        _write_shard(path, indices, reorder(_outputs_of(shard), positions) if positions else None, left_out)
    else:
        path.unlink()


def _write_shard(path: Path, indices: list[int], outputs: Tree, left_out: list[int]) -> None:
    is_list = isinstance(outputs, ListOfSamples)
    outputs = list(outputs) if is_list else outputs
    content = {"indices": indices, "outputs": outputs, "is_list_of_samples": is_list}
    write_checkpoint(content | ({"left_out": left_out} if left_out else {}), path)


def _outputs_of(shard: StateDict) -> Tree:
    outputs = shard["outputs"]
    return ListOfSamples(outputs) if shard.get("is_list_of_samples") else outputs


def read_predictions(directory: str | os.PathLike[str]) -> Tree:
    """Return the predictions in a directory as ``predict`` does: concatenated, in the order of the dataset.

    They lack the samples that were left out because they failed, which a warning names.

    :raises FileNotFoundError: if the directory contains no predictions
    :raises ValueError: if some are missing because the prediction did not finish, or a file is damaged
    """
    description = local_path("directory", directory) / _DESCRIPTION
    if not description.is_file():
        raise FileNotFoundError(f"{os.fspath(directory)!r} contains no predictions.")
    length = _read_description(description)["length"]
    contents = [load_verified(path) for path in _find_shards(local_path("directory", directory))]
    indices = chain.from_iterable(content["indices"] for content in contents)
    positions = {index: position for position, index in enumerate(indices)}  # the latest if predicted twice
    left_out = {index for content in contents for index in content.get("left_out", [])} - positions.keys()
    if any(index >= length for index in positions):
        raise ValueError(
            f"{os.fspath(description)!r} is damaged: it speaks of {length} samples, but the shards next to it hold "
            f"sample {max(positions)}."
        )
    missing = length - len(positions) - len(left_out)
    if missing:
        raise ValueError(
            f"{missing} of {length} predictions are missing in {os.fspath(directory)!r}. Run the prediction again."
        )
    if left_out:
        warn_outside(
            f"{len(left_out)} of {length} samples were left out of the predictions in {os.fspath(directory)!r}, as "
            f"they failed: {sorted(left_out)}. The outputs have no rows for them."
        )
    order = [positions[index] for index in range(length) if index in positions]
    return reorder(concatenate([_outputs_of(content) for content in contents if content["indices"]]), order)


def iterate_predictions(directory: str | os.PathLike[str]) -> Iterator[tuple[list[int], Tree]]:
    """Yield the shards in a directory: sample indices and outputs."""
    for path in _find_shards(local_path("directory", directory)):
        shard = load_verified(path)
        if shard["indices"]:
            yield shard["indices"], _outputs_of(shard)
