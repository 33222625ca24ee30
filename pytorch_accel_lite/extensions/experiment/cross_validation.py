"""Cross-validation: a model for each fold of a dataset, tested on the samples that it was not trained on."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import re
import shutil
import statistics
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch.utils.data import Subset

from pytorch_accel_lite.checkpoint import folder_path
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr
from pytorch_accel_lite.extensions.experiment.results import (
    Results,
    as_number,
    as_one_line,
    check_is_new,
    check_is_same,
    read_finished,
    read_json,
    text_table,
    train_to_end,
    write_json,
    write_predictions,
)
from pytorch_accel_lite.extensions.predictions import PredictionWriterCallback, read_predictions
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import format_value, result_of_first

#: The indices of the samples that a fold trains on, and of those that it tests.
Split = tuple[list[int], list[int]]

_SPLITS = "splits.json"
_RESULT = "fold.json"


@dataclass(frozen=True)
class Fold:
    """One fold of a cross-validation.

    Args:
        name: ``fold-1``, ``fold-2`` and so on, which is also the name of its folder
        train_indices: indices of the samples that its model was trained on
        test_indices: indices of the samples that its model was tested on
        metrics: the metrics of the test samples by name, as ``evaluate`` returned them
        folder: the folder of the fold, with all its files
    """

    name: str
    train_indices: list[int] = field(repr=False)
    test_indices: list[int] = field(repr=False)
    metrics: dict[str, Any]
    folder: Path

    @property
    def predictions(self) -> Any:
        """The outputs for the samples of ``test_indices``, in this order; see ``Trainer.predict()``.

        Samples of batches that ``SkipFailedBatchesCallback`` has left out have none.
        """
        return read_predictions(self.folder / "predictions")


@dataclass(frozen=True, repr=False)
class CrossValidation(Results):
    """The results of ``cross_validate()``. Printing it shows a table.

    Args:
        splitter: a description of the splitter
        size: number of samples in the dataset
        folds: the folds, in order
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
        """The sample standard deviation (with ``n - 1``) over the folds of each metric."""
        return self._summarised_by(_stdev_or_nan)

    def _summarised_by(self, summary: Callable[[list[float]], float]) -> dict[str, float]:
        columns = {name: [fold.metrics.get(name, "") for fold in self.folds] for name in self.folds[0].metrics}
        return {name: summary(values) for name, values in columns.items() if str not in map(type, values)}

    @property
    def predictions(self) -> Any:
        """The outputs for all samples in the order of the dataset, each from the model that was not trained on it.

        Raises:
            ValueError: if the folds do not test each sample once, as with repeated or random splits, or some samples
                have been left out
        """
        indices = [index for fold in self.folds for index in fold.test_indices]
        if sorted(indices) != list(range(self.size)):
            raise ValueError(
                f"{self.splitter} does not test each of the {self.size} samples exactly once, so there is no single "
                "prediction for each. Use those of each fold: result.folds[0].test_indices and .predictions."
            )
        order = np.argsort(indices).tolist()
        parts = [fold.predictions for fold in self.folds]
        for fold, part in zip(self.folds, parts, strict=True):
            rows = len(part) if isinstance(part, list) else len(torch.utils._pytree.tree_leaves(part)[0])
            if rows != len(fold.test_indices):
                raise ValueError(
                    f"{fold.name} has {rows} predictions for {len(fold.test_indices)} test samples, as some have been "
                    "left out. Use SkipFailedBatchesCallback only in other phases, or the predictions of each fold."
                )
        if isinstance(parts[0], list) and type(parts[0]) is not list:  # one output for each sample
            samples = [sample for part in parts for sample in part]
            return type(parts[0])(samples[position] for position in order)
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


def _stdev_or_nan(values: Sequence[float]) -> float:
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

    The held-out samples are also the ``eval_dataset`` of the training. The weights at the end of the training are
    tested, which with a ``SaveBestModelCallback`` are the best ones. With several processes, call this function on
    each.

    Args:
        make_trainer: called with the folder of each fold, returns a new trainer with a new model; its callbacks write
            into that folder, as in ``SaveTrainingStateCallback(folder / "states")``
        dataset: a dataset with a length and indices
        splitter: a splitter of scikit-learn, such as ``KFold(5)``, or pairs of training and test indices
        y: for splitters that need them, such as ``StratifiedKFold``: the label of each sample
        groups: for splitters that need them, such as ``GroupKFold``: the group of each sample
        save_dir: where the results are written, with a folder for each fold; results of an earlier cross-validation are
            removed
        resume: whether to continue a cross-validation that was killed: its split and its finished folds are read, and
            the interrupted fold resumes from its training state if its trainer saves training states
        seed: seeds all generators before each trainer is created, so that the initial weights of a fold do not depend
            on the folds before it; give the trainer a seed, too
        predictions: whether to predict the samples that were held out
        train_arguments: arguments of ``Trainer.train()``, such as ``num_epochs``

    Raises:
        RunPausedError: if a callback pauses a training, such as a ``TimeLimitCallback``; resume it later
        ValueError: if the splitter cannot split the dataset, or a fold tests what it trains on; if ``make_trainer``
            returns the same trainer or model again; if the cross-validation in ``save_dir`` had other arguments
    """
    folder = folder_path("save_dir", save_dir)
    _check_arguments(make_trainer, dataset, splitter)
    for name in {"train_dataset", "eval_dataset"} & train_arguments.keys():
        raise TypeError(f"cross_validate() sets {name} itself, for each fold. Leave it out.")
    _check_names_of(train_arguments, make_trainer)
    named = as_one_line(splitter) if hasattr(splitter, "split") else "the given indices"
    if seed is not None:
        set_seed(seed)
    settings = {"splitter": named, "samples": len(dataset), "seed": seed}
    settings |= {"y": _checksum_of_values(y), "groups": _checksum_of_values(groups)}
    settings |= {name: as_one_line(value) for name, value in train_arguments.items()}
    splits = result_of_first(
        lambda: _find_splits(folder, settings, resume, splitter, lambda: _split(splitter, len(dataset), y, groups))
    )
    folds: list[Fold] = []
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    for number, (train, test) in enumerate(splits, 1):
        fold_folder = folder / f"fold-{number}"
        metrics = result_of_first(partial(_finished, fold_folder, predictions))
        if metrics is None:
            if seed is not None:
                set_seed(seed)
            trainer = make_trainer(fold_folder)
            consequence = "an earlier fold, which has been trained on samples that it would now be tested on"
            check_is_new(trainer, seen, f"make_trainer({os.fspath(fold_folder)!r})", consequence)
            with trainer:
                trainer.print(f"Fold {number} of {len(splits)}: {len(train)} samples to train on, {len(test)} to test")
                train_set, test_set = Subset(dataset, train), Subset(dataset, test)
                metrics = _run(trainer, fold_folder, train_set, test_set, resume, predictions, train_arguments)
        folds.append(Fold(fold_folder.name, train, test, metrics, fold_folder))
    return CrossValidation(named, len(dataset), folds)


def _check_arguments(make_trainer: object, dataset: object, splitter: object) -> None:
    """Check arguments before the results of an earlier cross-validation are removed."""
    if isinstance(make_trainer, Trainer) or not callable(make_trainer):
        raise TypeError(
            f"make_trainer={short_repr(make_trainer)} must be a function that returns a new trainer for each fold."
        )
    try:
        inspect.signature(make_trainer).bind(Path())
    except TypeError as error:
        raise TypeError(
            f"make_trainer={short_repr(make_trainer)} must take one argument, the folder of the fold: {error}. "
            "Write: def make_trainer(folder): ..."
        ) from None
    except ValueError:  # a function without a signature
        pass
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(f"dataset={short_repr(dataset)} must be a dataset with a length and indices, not a loader.")
    is_splitter = not isinstance(splitter, (str, type)) and (
        hasattr(splitter, "split") or isinstance(splitter, Iterable)
    )
    if not is_splitter:
        raise TypeError(
            f"splitter={splitter!r} must be a splitter of scikit-learn, such as KFold(5), or pairs of training and "
            "test indices."
        )


def _check_names_of(train_arguments: dict[str, Any], make_trainer: Callable[[Path], Trainer]) -> None:
    """Check that ``train()`` has these arguments, before the results of an earlier cross-validation are removed."""
    unknown = {name: train_arguments[name] for name in train_arguments.keys() - _parameters(Trainer.train).keys()}
    if not unknown:
        return
    with tempfile.TemporaryDirectory() as folder, make_trainer(Path(folder)) as trainer:  # its class may have others
        own = _parameters(trainer.train)
    if unknown.keys() - own.keys() and all(parameter.kind != parameter.VAR_KEYWORD for parameter in own.values()):
        Trainer.train(trainer, [], **unknown)  # raises the error


def _parameters(method: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method).parameters


# ------------------------------------------------------------------------------------------------------ the split


def _checksum_of_values(values: object) -> str | None:
    """Return a checksum of labels or groups as text."""
    return None if values is None else hashlib.sha256(repr(np.asarray(values).tolist()).encode()).hexdigest()[:8]


def _find_splits(
    folder: Path, settings: dict[str, Any], resume: bool, splitter: Any, create: Callable[[], list[Split]]
) -> list[Split]:
    """Return the split of the cross-validation that is resumed, or create and write a new split.

    Args:
        settings: settings that a resumed cross-validation must share with the original
    """
    path = folder / _SPLITS
    if resume and path.exists():
        content = read_json(path)
        try:
            before, splits = dict(content["about"]), [(train, test) for train, test in content["splits"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the splits of a cross-validation. Remove it.") from error
        if not hasattr(splitter, "split") and create() != splits:  # a splitter may split differently each time
            before["splitter"] = "other indices"
        check_is_same(folder, before, settings, "a cross-validation")
        return splits
    splits = create()
    if path.exists():
        for old in folder.glob("fold-*"):
            if re.fullmatch(r"fold-\d+", old.name) and old.is_dir():  # not a plot of the folds, say
                shutil.rmtree(old)
    write_json(path, {"about": settings, "splits": splits})
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
    """Return the metrics of a fold; ``None`` if it is not finished."""
    lacks_predictions = needs_predictions and not (folder / "predictions").is_dir()
    metrics: dict[str, Any] | None = None if lacks_predictions else read_finished(folder / _RESULT)
    return metrics


def _run(
    trainer: Trainer, folder: Path, train: Any, test: Any, resume: bool, predictions: bool, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Train and test the model of a fold, and return its metrics.

    Args:
        arguments: further arguments of ``Trainer.train()``
    """
    again = "call cross_validate again with resume=True"
    train_to_end(trainer, folder, again, resume, train_dataset=train, eval_dataset=test, **arguments)
    names = ("per_device_batch_size", "collate_fn", "eval_dataloader_kwargs")
    reading = {name.removeprefix("eval_"): arguments[name] for name in names if name in arguments}
    metrics = {key: as_number(value) for key, value in trainer.evaluate(test, **reading).items()}
    if predictions:
        writer = PredictionWriterCallback(folder / "predictions", overwrite=True)
        write_predictions(trainer, test, writer, **reading)
    trainer.ranks.run_together(lambda: write_json(folder / _RESULT, metrics), only_first=True)
    return metrics
