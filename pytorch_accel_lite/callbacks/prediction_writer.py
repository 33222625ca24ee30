"""Predictions written to disk while they are made, for data that do not fit into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.batches import concatenate, to_cpu
from pytorch_accel_lite.checkpoint.files import load_plain, write_checkpoint
from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.utils import check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer

_ABOUT = "predictions.json"


class PredictionWriterCallback(TrainerCallback):
    """Writes what ``predict`` and ``predict_iter`` return to a folder, in shards, while they run.

    Every process writes its own shards, with the indices of their samples; :func:`read_predictions` puts them in the
    order of the dataset. A shard is there whole or not at all. A prediction that was killed goes on, when it is made
    again, after the last sample before which all have been written, with any number of processes; what is returned
    then is only the rest. To keep little in memory::

        for _ in trainer.predict_iter(dataset):
            pass

    :param directory: the folder; made when it is missing
    :param shard_size: samples of a process in a shard, at least
    :param overwrite: remove what an earlier prediction has left, instead of going on with it
    :raises ValueError: when the folder holds predictions for a dataset of another length
    """

    def __init__(
        self, directory: str | os.PathLike[str] = "predictions", shard_size: int = 1024, overwrite: bool = False
    ) -> None:
        self.directory = Path(directory)
        self.shard_size = check_positive_int("shard_size", shard_size)
        self.overwrite = overwrite
        self._clear()

    def _clear(self) -> None:
        self._indices: list[int] = []
        self._outputs: list[Any] = []

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        if request.kind != "prediction":
            return
        self._clear()
        try:
            length = len(trainer.eval_dataset)
        except TypeError as error:
            raise TypeError("PredictionWriterCallback needs a dataset with a length.") from error
        (start,) = trainer.ranks.run_together(lambda: self._begin(length), only_first=True)
        request.first_sample = start
        if start:
            trainer.print(f"{start} of {length} samples have been predicted already; going on with the rest.")

    def _begin(self, length: int) -> int:
        """Return how many samples from the first on have been written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        about = self.directory / _ABOUT
        if self.overwrite:
            for path in self.directory.glob("shard-*.pt"):
                path.unlink()
        elif about.exists() and (before := json.loads(about.read_text())["length"]) != length:
            raise ValueError(
                f"{os.fspath(self.directory)!r} holds predictions for {before} samples, not {length}. Choose another "
                "directory, or pass overwrite=True."
            )
        about.write_text(json.dumps({"length": length}) + "\n")
        written = {index for path in self.directory.glob("shard-*.pt") for index in load_plain(path)["indices"]}
        return next((index for index in range(length) if index not in written), length)

    def on_predict_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        indices = trainer.current_run.batch_indices
        if indices is None:
            raise TypeError("PredictionWriterCallback needs a dataset whose samples have indices, and no stream.")
        if not indices:  # a batch that only keeps this process in step
            return
        self._indices += indices
        self._outputs.append(to_cpu(batch_output))
        if len(self._indices) >= self.shard_size:
            self._write(trainer)

    def on_predict_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._write(trainer)
        trainer.barrier()

    def _write(self, trainer: Trainer) -> None:
        if self._indices:
            shard = {"indices": self._indices, "outputs": concatenate(self._outputs)}
            name = f"shard-{self._indices[0]:012d}-{self._indices[-1]:012d}-rank{trainer.ranks.rank}.pt"
            write_checkpoint(shard, self.directory / name)
        self._clear()


def read_predictions(directory: str | os.PathLike[str]) -> Any:
    """Return the predictions in a folder as ``predict`` would have: concatenated, in the order of the dataset.

    :raises FileNotFoundError: when the folder holds none
    :raises ValueError: when some are missing: the prediction has not come to its end
    """
    about = Path(directory) / _ABOUT
    if not about.is_file():
        raise FileNotFoundError(f"{os.fspath(directory)!r} holds no predictions.")
    length = json.loads(about.read_text())["length"]
    indices = list[int]()
    outputs = list[Any]()
    for index, output in iterate_predictions(directory):
        indices += index
        outputs.append(output)
    place = {index: position for position, index in enumerate(indices)}  # of a sample predicted twice, the latest
    missing = length - len(place)
    if missing:
        raise ValueError(f"{missing} of {length} predictions are missing in {os.fspath(directory)!r}. Predict again.")
    order = torch.tensor([place[index] for index in range(length)], dtype=torch.int64)
    return _reorder(concatenate(outputs), order)


def iterate_predictions(directory: str | os.PathLike[str]) -> Iterator[tuple[list[int], Any]]:
    """Yield the shards in a folder: the indices of the samples, and their outputs. A sample may be in two of them."""
    for path in sorted(Path(directory).glob("shard-*.pt")):
        shard = load_plain(path)
        yield shard["indices"], shard["outputs"]


def _reorder(outputs: Any, order: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs[order]
    if isinstance(outputs, dict):
        return {key: _reorder(value, order) for key, value in outputs.items()}
    values = [_reorder(value, order) for value in outputs]
    return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)
