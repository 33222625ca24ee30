"""Cross-validation: a model for each fold of a dataset, tested on the samples that it was not trained on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch.utils.data import Subset

from pytorch_accel_lite.callbacks import PredictionWriterCallback, RunPausedError, read_predictions
from pytorch_accel_lite.experiment.results import Results, text_table, write_json, write_predictions
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import format_value, result_of_first

#: The indices of a fold's samples to train on and to test.
Split = tuple[list[int], list[int]]

_SPLITS = "splits.json"
_RESULT = "fold.json"
_FOR_EVALUATION = {
    "per_device_batch_size": "per_device_batch_size",
    "collate_fn": "collate_fn",
    "eval_dataloader_kwargs": "dataloader_kwargs",
}


@dataclass(frozen=True)
class Fold:
    """One fold of a cross-validation.

    :param name: ``fold-1``, ``fold-2`` and so on, which is also the name of its folder
    :param train_indices: indices of the samples that its model was trained on
    :param test_indices: indices of the samples that its model was tested on
    :param metrics: what ``evaluate`` returned for them, by name
    :param folder: its folder, with everything that was written
    """

    name: str
    train_indices: list[int] = field(repr=False)
    test_indices: list[int] = field(repr=False)
    metrics: dict[str, Any]
    folder: Path

    @property
    def predictions(self) -> Any:
        """The outputs for the samples of ``test_indices``, in this order; see :meth:`Trainer.predict`."""
        return read_predictions(self.folder / "predictions")


@dataclass(frozen=True, repr=False)
class CrossValidation(Results):
    """The results of :func:`cross_validate`. Printing it shows a table.

    :param splitter: what divided the dataset, in words
    :param size: number of samples in the dataset
    :param folds: the folds, in order
    """

    splitter: str
    size: int
    folds: list[Fold]

    @property
    def mean(self) -> dict[str, float]:
        """The mean over the folds of each metric that is a number."""
        return self._summarised_by(statistics.fmean)

    @property
    def deviation(self) -> dict[str, float]:
        """The standard deviation over the folds of each metric (that of a sample: divided by ``n - 1``)."""
        return self._summarised_by(_deviation)

    def _summarised_by(self, summary: Callable[[list[float]], float]) -> dict[str, float]:
        columns = {name: [fold.metrics.get(name, "") for fold in self.folds] for name in self.folds[0].metrics}
        return {name: summary(values) for name, values in columns.items() if str not in map(type, values)}

    @property
    def predictions(self) -> Any:
        """The outputs for all samples in the order of the dataset, each of the model that was not trained on it.

        :raises ValueError: if the folds do not test each sample once, as with repeated or random splits
        """
        indices = [index for fold in self.folds for index in fold.test_indices]
        if sorted(indices) != list(range(self.size)):
            raise ValueError(
                f"{self.splitter} does not test each of the {self.size} samples exactly once, so there is no single "
                "prediction for each. Use those of each fold: result.folds[0].test_indices and .predictions."
            )
        order = np.argsort(indices).tolist()
        parts = [fold.predictions for fold in self.folds]
        if isinstance(parts[0], list) and type(parts[0]) is not list:  # one output for each sample
            samples = [sample for part in parts for sample in part]
            return type(parts[0])(samples[place] for place in order)
        return torch.utils._pytree.tree_map(lambda *tensors: torch.cat(tensors)[order], *parts)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each fold, with ``fold``, the numbers of samples, and the metrics."""
        return [
            {"fold": fold.name, "train": len(fold.train_indices), "test": len(fold.test_indices), **fold.metrics}
            for fold in self.folds
        ]

    def __repr__(self) -> str:
        rows = self.rows()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        rows += [{"fold": "mean", **self.mean}, {"fold": "deviation", **self.deviation}]
        cells = [[name, *(format_value(row.get(name)) or str(row.get(name, "")) for row in rows)] for name in columns]
        title = f"Cross-validation: {len(self.folds)} folds of {self.size} samples by {self.splitter}"
        return "\n".join([title, *text_table(cells)])


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def cross_validate(
    make_trainer: Callable[[Path], Trainer],
    dataset: Any,
    splitter: Any,
    *,
    y: Any = None,
    groups: Any = None,
    save_dir: str | os.PathLike[str] = "cross_validation",
    resume: bool = False,
    seed: int | None = None,
    predictions: bool = True,
    **train_arguments: Any,
) -> CrossValidation:
    """Train a model on each fold of a dataset, and test it on the samples that were held out.

    They are also the ``eval_dataset`` of its training. What is tested are the weights at the end of the training: the
    best ones with a ``SaveBestModelCallback``. With several processes, call it on each.

    :param make_trainer: called with the folder of each fold, returns a new trainer with a new model; its callbacks
        write into that folder, as in ``SaveTrainingStateCallback(folder / "states")``
    :param dataset: a dataset with a length and indices
    :param splitter: a splitter of scikit-learn, such as ``KFold(5)``, or pairs of training and test indices
    :param y: for splitters that need them, such as ``StratifiedKFold``: the label of each sample
    :param groups: for splitters that need them, such as ``GroupKFold``: the group of each sample
    :param save_dir: where the results are written, with a folder for each fold; those of an earlier cross-validation
        are removed
    :param resume: continue a cross-validation that was killed: its split and its finished folds are read, and a fold
        that was being trained resumes from its training state, if its trainer saves any
    :param seed: with it, all generators are seeded before each trainer is created, so that its initial weights do not
        depend on the folds before it; give the trainer a seed, too
    :param predictions: whether to predict the samples that were held out
    :param train_arguments: arguments of :meth:`Trainer.train`, such as ``num_epochs``
    :raises RunPausedError: if a callback pauses a training, such as a ``TimeLimitCallback``; resume it later
    :raises ValueError: if the splitter cannot split the dataset, or a fold tests what it trains on; if ``make_trainer``
        returns the same trainer or model again; if the cross-validation in ``save_dir`` had other arguments
    """
    folder = Path(save_dir)
    named = _described(splitter) if hasattr(splitter, "split") else "the given indices"
    if seed is not None:
        set_seed(seed)
    about = {"splitter": named, "samples": len(dataset), "seed": seed, "y": _checksum(y), "groups": _checksum(groups)}
    about |= {name: _described(value) for name, value in train_arguments.items()}
    splits = result_of_first(
        lambda: _find_splits(folder, about, resume, splitter, lambda: _split(splitter, len(dataset), y, groups))
    )
    folds: list[Fold] = []
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    for number, (train, test) in enumerate(splits, 1):
        of_fold = folder / f"fold-{number}"
        metrics = result_of_first(partial(_finished, of_fold, predictions))
        if metrics is None:
            if seed is not None:
                set_seed(seed)
            with _new_trainer(make_trainer, of_fold, seen) as trainer:
                trainer.print(f"Fold {number} of {len(splits)}: {len(train)} samples to train on, {len(test)} to test")
                of_train, of_test = Subset(dataset, train), Subset(dataset, test)
                metrics = _run(trainer, of_fold, of_train, of_test, resume, predictions, train_arguments)
        folds.append(Fold(of_fold.name, train, test, metrics, of_fold))
    return CrossValidation(named, len(dataset), folds)


# ------------------------------------------------------------------------------------------------------ the split


def _described(value: Any) -> Any:
    """Return an argument as JSON can hold it, the same whenever it is created alike, in one line."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return value if isinstance(value, (int, float, type(None))) else " ".join(text.split())


def _checksum(values: Any) -> str | None:
    """Return a text that differs for other labels or groups."""
    return None if values is None else hashlib.sha256(repr(np.asarray(values).tolist()).encode()).hexdigest()[:8]


def _find_splits(
    folder: Path, about: dict[str, Any], resume: bool, splitter: Any, make: Callable[[], list[Split]]
) -> list[Split]:
    """Return the split of a cross-validation that is resumed, or make one, and write it.

    :param about: what must be the same if it is resumed
    """
    path = folder / _SPLITS
    if resume and path.exists():
        content = json.loads(path.read_text())
        before, splits = content["about"], [(train, test) for train, test in content["splits"]]
        is_drawn = hasattr(splitter, "split")  # and perhaps another one each time
        if not is_drawn and make() != splits:
            before["splitter"] = "other indices"
        for name in {**before, **about}:
            if before.get(name) != about.get(name):
                raise ValueError(
                    f"save_dir={os.fspath(folder)!r} has a cross-validation with {name}={before.get(name)}, not "
                    f"{about.get(name)}. Resume it with the same arguments, or choose another save_dir."
                )
        return splits
    splits = make()
    if path.exists():
        for old in folder.glob("fold-*"):
            if old.is_dir():  # not a plot of them, say
                shutil.rmtree(old)
    write_json(path, {"about": about, "splits": splits})
    return splits


def _split(splitter: Any, size: int, y: Any, groups: Any) -> list[Split]:
    labels, groups = (None if values is None else np.asarray(values) for values in (y, groups))
    pairs = splitter.split(np.zeros((size, 1)), labels, groups) if hasattr(splitter, "split") else splitter
    splits = [(_indices(train), _indices(test)) for train, test in pairs]
    for number, (train, test) in enumerate(splits, 1):
        if wrong := {*train} & {*test} or {*train, *test} - {*range(size)}:
            raise ValueError(
                f"splitter: fold {number} has sample {min(wrong)} to train on and to test, or a dataset of {size} "
                "samples does not have it."
            )
    return splits


def _indices(values: Any) -> list[int]:
    indices = np.asarray(values)
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"a split must consist of indices, not of {indices.dtype} with shape {indices.shape}.")
    return [int(index) for index in indices]


# ---------------------------------------------------------------------------------------------------------- folds


def _finished(folder: Path, needs_predictions: bool) -> dict[str, Any] | None:
    """Return the metrics of a fold that is finished."""
    path = folder / _RESULT
    if not path.exists() or (needs_predictions and not (folder / "predictions").is_dir()):
        return None
    print(f"{folder} is finished: skipped")
    metrics: dict[str, Any] = json.loads(path.read_text())
    return metrics


def _new_trainer(make_trainer: Callable[[Path], Trainer], folder: Path, seen: weakref.WeakSet[Any]) -> Trainer:
    """Return the trainer of a fold.

    :param seen: the trainers and models of the folds before it
    """
    trainer = make_trainer(folder)
    for part in (trainer, trainer.get_model(keep_torch_compile=False)):
        if part in seen:
            raise ValueError(
                f"make_trainer({os.fspath(folder)!r}) returned the {type(part).__name__} of an earlier fold, "
                "which has been trained on samples that it would now be tested on. Create a new one each time."
            )
        seen.add(part)
    return trainer


def _run(
    trainer: Trainer, folder: Path, train: Any, test: Any, resume: bool, predictions: bool, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Train and test the model of a fold, and return its metrics.

    :param arguments: further arguments of :meth:`Trainer.train`
    """
    saves_states = any(hasattr(callback, "find_latest") for callback in trainer.callbacks)
    trainer.train(train, eval_dataset=test, resume_from="latest" if resume and saves_states else None, **arguments)
    if (pause := trainer.current_run.end.pause) is not None:
        raise RunPausedError(f"{pause} {folder.name} is not finished: call cross_validate again with resume=True.")
    reading = {name: arguments[key] for key, name in _FOR_EVALUATION.items() if key in arguments}
    metrics = {key: _as_number(value) for key, value in trainer.evaluate(test, **reading).items()}
    if predictions:
        writer = PredictionWriterCallback(folder / "predictions", overwrite=True)
        write_predictions(trainer, test, writer, **reading)
    trainer.ranks.run_together(lambda: write_json(folder / _RESULT, metrics), only_first=True)
    return metrics


def _as_number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
