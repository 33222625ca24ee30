"""Predictions on disk: a directory with shards of outputs, each with the indices of its samples."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from accelerate.utils import honor_type

from pytorch_accel_lite.checkpoint import local_path, write_checkpoint, write_text
from pytorch_accel_lite.extending import JsonObject, Ranks, check_is_shared, load_verified, lock_path
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import ListOfSamples, concatenate
from pytorch_accel_lite.extension_tools.plain_types import StateDict, Tree

_DESCRIPTION = "predictions.json"
_SHARD = re.compile(r"shard-\d{12,}-\d{12,}-rank\d+\.pt")


class PredictionFolder:
    """A directory into which the processes of a job write their predictions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check_is_shared(self, ranks: Ranks) -> None:
        """Check that all processes write to the same directory. Call it on every process."""
        check_is_shared(self._path, f"directory={os.fspath(self._path)!r}", ranks)

    def begin(self, length: int, weights: str, overwrite: bool, in_order: bool, locks: ExitStack) -> tuple[int, str]:
        """Lock the directory, remove predictions of other weights, and count the leading samples already written.

        Args:
            length: the number of samples of the dataset
            weights: checksum of the weights
            overwrite: whether to remove predictions of the same weights, too
            in_order: whether the samples are predicted in the order of the dataset; if not, those that are missing
                cannot be told by their position, so incomplete predictions are removed, too
            locks: frees the directory when it is closed

        Returns:
            the number of samples, and what was removed though ``overwrite`` did not ask for it; empty for nothing
        """
        locks.callback(lock_path("directory", self._path).release)
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / _DESCRIPTION
        existing = {} if overwrite or not path.exists() else _read_description(path)
        if existing.get("length", length) != length:
            raise ValueError(
                f"{os.fspath(self._path)!r} contains predictions for {existing['length']} samples, not {length}. "
                "Choose another directory, or pass overwrite=True."
            )
        shards = _find_shards(self._path)
        description = {"length": length, "weights": weights}
        if overwrite or existing != description:
            for shard in shards:  # before the new checksum is written, as the shards have another
                shard.unlink()
            write_text(path, json.dumps(description) + "\n")
            return 0, "predictions of other or unknown weights" if shards and not overwrite else ""
        written = _remove_damaged(shards)
        done = set(chain.from_iterable(written.values()))
        start = next((index for index in range(length) if index not in done), length)
        if start < length and not in_order:
            for shard in written:
                shard.unlink()
            return 0, "incomplete predictions in the order of a sampler" if written else ""
        for shard, samples in written.items():
            if max(samples) >= start:  # from a process that was ahead of the others
                _shorten(shard, start)
        return start, ""

    def write(self, rank: int, indices: list[int], outputs: list[Tree], left_out: list[int]) -> None:
        """Write a shard, unless it would be empty.

        Args:
            indices: indices of the samples, in the order of the outputs
            outputs: the outputs of batches
            left_out: the indices of samples without an output, because they failed
        """
        if samples := indices + left_out:
            name = f"shard-{min(samples):012d}-{max(samples):012d}-rank{rank}.pt"
            _write_shard(self._path / name, indices, concatenate(outputs) if indices else None, left_out)


def _read_description(path: Path) -> JsonObject:
    """Read the description of predictions.

    Raises:
        ValueError: if the file is something else; names it
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


def _find_shards(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("shard-*.pt") if _SHARD.fullmatch(path.name))


def _remove_damaged(shards: list[Path]) -> dict[Path, list[int]]:
    """Return the samples of each shard. Damaged shards are removed, and their samples predicted again."""
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
    """Remove from a shard all but the first ``end`` samples of the dataset. The others will be predicted again."""
    shard = load_verified(path)
    positions = [position for position, index in enumerate(shard["indices"]) if index < end]
    left_out = [index for index in shard.get("left_out", []) if index < end]
    if positions or left_out:
        indices = [shard["indices"][position] for position in positions]
        _write_shard(path, indices, _reorder(_outputs_of(shard), positions) if positions else None, left_out)
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


def _reorder(outputs: Tree, order: Sequence[int]) -> Tree:
    """Return the samples of nested outputs in another order.

    Args:
        order: the positions of the samples in ``outputs``, in the new order
    """
    if isinstance(outputs, ListOfSamples):
        return ListOfSamples(outputs[position] for position in order)
    if isinstance(outputs, torch.Tensor):
        return outputs[torch.tensor(order, dtype=torch.int64)]
    if isinstance(outputs, Mapping):
        return {key: _reorder(value, order) for key, value in outputs.items()}
    return honor_type(outputs, (_reorder(value, order) for value in outputs))


def read_predictions(directory: str | os.PathLike[str]) -> Tree:
    """Return the predictions in a directory as ``predict`` does: concatenated, in the order of the dataset.

    Samples that failed are missing; a warning names them.

    Raises:
        FileNotFoundError: if the directory contains no predictions
        ValueError: if some are missing because the prediction did not finish, or a file is damaged
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
    return _reorder(concatenate([_outputs_of(content) for content in contents if content["indices"]]), order)


def iterate_predictions(directory: str | os.PathLike[str]) -> Iterator[tuple[list[int], Tree]]:
    """Yield the shards in a directory: sample indices and outputs."""
    for path in _find_shards(local_path("directory", directory)):
        shard = load_verified(path)
        if shard["indices"]:
            yield shard["indices"], _outputs_of(shard)
