"""Loading the weights of an experiment: the best, the last, an average of several, or those of a file or state."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import local_path, read_checkpoint, read_learned, write_checkpoint, write_text
from pytorch_accel_lite.extensions.predictions import PredictionWriterCallback
from pytorch_accel_lite.trainer import Trainer

_AVERAGE = re.compile(r"average_(best|last)_([1-9]\d*)")
_LEARNED = ("model_state_dict", "loss_func_state_dict", "attribute_state_dicts")


def find_weights(trainer: Trainer, name: str | os.PathLike[str]) -> list[Path]:
    """Return the path of the named weights, or several paths of weights to average. Call it on every process.

    Args:
        name: ``"best"`` for the weights of the ``SaveBestModelCallback``, ``"last"`` for the weights in the newest
            training state of the ``SaveTrainingStateCallback``, ``"average_best_3"`` or ``"average_last_3"`` for the
            mean of the best or last three, or the path of a checkpoint, a training state, or safetensors

    Raises:
        FileNotFoundError: if there are no such weights, or too few to average
    """
    average = _AVERAGE.fullmatch(os.fspath(name))
    if average or name in ("best", "last"):
        kind, count = (average[1], int(average[2])) if average else (os.fspath(name), 1)
        return trainer.ranks.result_of_first(lambda: _find_several(trainer, kind, count))
    path = local_path("weights", name, "what is read")
    if not path.exists():
        raise FileNotFoundError(f"There are no weights at {os.fspath(name)!r}. Pass best, last, or another path.")
    return [path]


def _find_several(trainer: Trainer, kind: str, count: int) -> list[Path]:
    """Return the paths of the best or the last weights, in this order, all of the same callback.

    Of several callbacks, the first one that has saved enough best models counts, or the one with the newest state.
    """
    candidates: list[list[Path]] = []
    for callback in trainer.callbacks:
        if isinstance(callback, SaveBestModelCallback) and kind == "best":
            candidates.append(callback.find_saved()[:count])
        if isinstance(callback, SaveTrainingStateCallback) and kind == "last":
            if isinstance(callback.save_dir, str):
                raise ValueError(f"Fetch the last state from {callback.save_dir!r} first, and pass its directory.")
            manifests = sorted(callback.save_dir.glob("update-*/manifest.json"), reverse=True)
            manifests.sort(key=os.path.getmtime, reverse=True)  # states of the same time stay sorted by name
            candidates.append([path.parent for path in manifests[:count]])
    if complete := [paths for paths in candidates if len(paths) == count]:
        return complete[0] if kind == "best" else max(complete, key=lambda paths: os.path.getmtime(paths[0]))
    saver = "SaveBestModelCallback(keep" if kind == "best" else "SaveTrainingStateCallback(max_checkpoints"
    raise FileNotFoundError(
        f"There are {max(map(len, candidates), default=0)} of the {count} {kind} weights: they are saved by a {saver}="
        f"{count}) while the experiment trains. Train it first, or pass the path of a checkpoint or a training state."
    )


def load_weights(trainer: Trainer, paths: Sequence[Path], average: Path) -> None:
    """Load the weights of the model, the loss function and trainer attributes from any file that has them.

    Warns if the file has only the weights of the model although other parts were trained, too.

    Args:
        average: where the mean is written if there are several paths

    Raises:
        ValueError: if the weights belong to another model; lists what differs
    """
    path = paths[0]
    if len(paths) > 1:
        path = average
        trainer.ranks.run_together(lambda: _write_average(paths, average), only_first=True)
    content = trainer.load_checkpoint(path, load_optimizer=False, load_scheduler=False)
    model = trainer.get_model(keep_torch_compile=False)
    in_model = set(map(id, model.parameters()))
    modules = {name: part for name, part in vars(trainer).items() if isinstance(part, nn.Module)}
    trained = {name: {id(p) for p in part.parameters() if p.requires_grad} for name, part in modules.items()}
    others = [name for name, ids in trained.items() if ids - in_model]
    if others and not content.keys() & {*_LEARNED[1:]}:
        warnings.warn(
            f"{os.fspath(path)!r} holds only the weights of the model. What is trained beside it stays as it is: "
            f"{', '.join(others)}. Pass a checkpoint or a training state, which hold that too.",
            stacklevel=3,
        )


def _write_average(paths: Sequence[Path], target: Path) -> None:
    """Write the mean of all floating-point tensors. Other values are taken from the first file."""
    contents = [read_learned(path) if path.is_dir() else read_checkpoint(path) for path in paths]
    write_checkpoint({name: _mean([content.get(name, {}) for content in contents]) for name in _LEARNED}, target)


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values]) for key in first if all(key in value for value in values)}
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        total = sum((value.double() for value in values[1:]), first.double())
        return (total / len(values)).to(first.dtype)
    return first


def source_of(paths: Sequence[Path], **settings: Any) -> dict[str, Any]:
    """Return what identifies the weights that gave some results: their paths, and when they were written."""
    changed = [max(file.stat().st_mtime_ns for file in [path, *path.glob("*")]) for path in paths]
    source = {"weights": [*map(os.fspath, paths)], "changed": changed, **settings}
    return json.loads(json.dumps(source, default=repr))  # type: ignore[no-any-return]


def predictions_of(
    trainer: Trainer, paths: Sequence[Path], directory: Path, settings: Mapping[str, Any], shard_size: int = 1024
) -> PredictionWriterCallback:
    """Return a callback that writes predictions to a directory, or resumes those of the same weights and settings."""
    text = json.dumps(source_of(paths, settings=settings))
    settings_file = directory / "settings.json"

    def clear() -> None:
        if not (settings_file.is_file() and settings_file.read_text() == text):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            write_text(settings_file, text)

    trainer.ranks.run_together(clear, only_first=True)
    return PredictionWriterCallback(directory, shard_size)
