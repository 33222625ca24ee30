"""Cross-validation: a model for each fold of a dataset, tested on the samples that it was not trained on."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import shutil
import statistics
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch.utils.data import Subset

from pytorch_accel_lite.base.environment import import_extra
from pytorch_accel_lite.base.events import RunPausedError
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.reprs import table
from pytorch_accel_lite.base.splitting import concatenate, reorder
from pytorch_accel_lite.base.text import did_you_mean
from pytorch_accel_lite.callbacks import PredictionWriterCallback, read_predictions
from pytorch_accel_lite.callbacks.run_page import format_column
from pytorch_accel_lite.checkpoint.files import replacing
from pytorch_accel_lite.distributed.collectives import result_of_first
from pytorch_accel_lite.experiment.text_tables import text_table
from pytorch_accel_lite.trainer import Trainer

if TYPE_CHECKING:
    import pandas as pd

#: The indices of a fold's samples to train on and to test.
Split = tuple[list[int], list[int]]

_SPLITS = "splits.json"
_RESULT = "fold.json"
#: Arguments of ``train`` that are cross_validate's own.
_OWN = {"train_dataset", "eval_dataset", "resume_from"}
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
class CrossValidation:
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
        return {name: statistics.fmean(values) for name, values in self._numbers().items()}

    @property
    def deviation(self) -> dict[str, float]:
        """The standard deviation over the folds of each metric (that of a sample: divided by ``n - 1``)."""
        return {name: _deviation(values) for name, values in self._numbers().items()}

    def _numbers(self) -> dict[str, list[float]]:
        columns = {name: [fold.metrics.get(name) for fold in self.folds] for name in self.folds[0].metrics}
        return {
            name: [float(value) for value in values]  # type: ignore[arg-type]
            for name, values in columns.items()
            if all(isinstance(value, (int, float)) for value in values)
        }

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
        places = np.argsort(np.asarray(indices)).tolist()
        return reorder(concatenate([fold.predictions for fold in self.folds]), places)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each fold, with ``fold``, the numbers of samples, and the metrics."""
        return [
            {"fold": fold.name, "train": len(fold.train_indices), "test": len(fold.test_indices), **fold.metrics}
            for fold in self.folds
        ]

    def to_dataframe(self) -> pd.DataFrame:
        """Return :meth:`rows` as a ``pandas.DataFrame`` indexed by fold. Needs the extra ``dataframe``."""
        pandas = import_extra("pandas", "dataframe", "to_dataframe()")
        return pandas.DataFrame(self.rows()).set_index("fold")

    def table(self) -> list[list[str]]:
        """Return the rows as text, after the names of the columns and before the mean and the deviation."""
        rows = self.rows()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        rows += [{"fold": "mean", **self.mean}, {"fold": "deviation", **self.deviation}]
        texts = [format_column([row.get(name) for row in rows]) for name in columns]
        return [columns, *map(list, zip(*texts, strict=True))]

    @property
    def title(self) -> str:
        """What was validated, in a line."""
        return f"{len(self.folds)} folds of {self.size} samples by {self.splitter}"

    def __repr__(self) -> str:
        return "\n".join([f"Cross-validation: {self.title}", *text_table(self.table())])

    def _repr_html_(self) -> str:
        columns, *rows = self.table()
        return table(self.title, rows, columns)


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
    :raises TypeError: if the dataset has no length, or an argument of ``train`` is unknown
    :raises ValueError: if the splitter cannot split the dataset, or a fold tests what it trains on; if ``make_trainer``
        returns the same trainer or model again; if the cross-validation in ``save_dir`` had other arguments
    """
    _check_arguments(make_trainer, dataset, train_arguments)
    folder = Path(save_dir)
    named = _describe(splitter)
    if seed is not None:
        set_seed(seed)
    about = {"splitter": named, "samples": len(dataset), "seed": seed}
    about |= {name: _fingerprint(values) for name, values in (("y", y), ("groups", groups)) if values is not None}
    about |= {name: _as_setting(value) for name, value in train_arguments.items()}
    is_drawn = hasattr(splitter, "split")
    splits = result_of_first(
        lambda: _find_splits(folder, about, resume, is_drawn, lambda: _split(splitter, len(dataset), y, groups))
    )
    validation = _Validation(make_trainer, dataset, folder, resume, seed, predictions, train_arguments)
    folds = []
    for number, (train, test) in enumerate(splits, 1):
        name = f"fold-{number}"
        metrics = validation.run(name, f"{number} of {len(splits)}", train, test)
        folds.append(Fold(name, train, test, metrics, folder / name))
    return CrossValidation(named, len(dataset), folds)


# ------------------------------------------------------------------------------------------------------ arguments


def _check_arguments(make_trainer: Any, dataset: Any, train_arguments: dict[str, Any]) -> None:
    if isinstance(make_trainer, Trainer) or not callable(make_trainer):
        raise TypeError(
            f"make_trainer={make_trainer!r} must be a function of a folder that returns a new trainer, as each fold "
            "trains a new model."
        )
    try:
        inspect.signature(make_trainer).bind(Path())
    except TypeError as error:
        raise TypeError(f"make_trainer must take the folder of a fold as its only argument: {error}.") from error
    is_array = isinstance(dataset, (torch.Tensor, np.ndarray, dict, str))
    if is_array or find_length(dataset) is None or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"dataset: {type(dataset).__name__} cannot be divided into folds. Pass one dataset with __len__ and "
            "__getitem__, such as TensorDataset(inputs, targets)."
        )
    known = [name for name in inspect.signature(Trainer.train).parameters if name not in _OWN | {"self"}]
    for name in train_arguments:
        if name in _OWN:
            raise TypeError(f"{name} is not an argument of cross_validate, which sets it for each fold.")
        if name not in known:
            raise TypeError(f"{name} is not an argument of Trainer.train.{did_you_mean(name, known)}")


def _describe(splitter: Any) -> str:
    """Return the splitter in words, the same whenever it is created with the same arguments."""
    text = repr(splitter) if hasattr(splitter, "split") else "the given indices"
    return type(splitter).__name__ if " at 0x" in text else " ".join(text.split())


def _as_setting(value: Any) -> Any:
    """Return an argument as JSON can hold it, the same whenever it is created alike; of other objects, their class."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_setting(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_setting(item) for item in value]
    if isinstance(value, functools.partial):
        return {"partial": [_as_setting(part) for part in (value.func, value.args, value.keywords)]}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _fingerprint(values: Any) -> str:
    """Return a text that differs for other labels or groups."""
    content = repr(np.asarray(values).tolist()).encode()
    return f"{find_length(values)} values ({hashlib.sha256(content).hexdigest()[:8]})"


def _find_splits(
    folder: Path, about: dict[str, Any], resume: bool, is_drawn: bool, make: Callable[[], list[Split]]
) -> list[Split]:
    """Return the split of a cross-validation that is resumed, or make one, and write it.

    :param about: what must be the same if it is resumed
    :param is_drawn: whether a splitter makes it, perhaps another one each time
    """
    path = folder / _SPLITS
    if resume and path.exists():
        content = json.loads(path.read_text())
        before = content["about"]
        for name in {**before, **about}:
            if before.get(name) != about.get(name):
                raise ValueError(
                    f"save_dir={os.fspath(folder)!r} has a cross-validation with {name}={before.get(name)}, not "
                    f"{about.get(name)}. Resume it with the same arguments, or choose another save_dir."
                )
        splits = [(train, test) for train, test in content["splits"]]
        if not is_drawn and make() != splits:
            raise ValueError(
                f"save_dir={os.fspath(folder)!r} has a cross-validation with other indices than those of splitter. "
                "Resume it with the same, or choose another save_dir."
            )
        return splits
    splits = make()
    if path.exists():
        for old in folder.glob("fold-*"):
            if old.is_dir():  # not a plot of them, say
                shutil.rmtree(old)
    _write(path, {"about": about, "splits": splits})
    return splits


def _split(splitter: Any, size: int, y: Any, groups: Any) -> list[Split]:
    for name, values in (("y", y), ("groups", groups)):
        if values is not None and find_length(values) != size:
            raise ValueError(f"{name} must have one element for each of the {size} samples, not {find_length(values)}.")
    labels, groups = (None if values is None else np.asarray(values) for values in (y, groups))
    if not hasattr(splitter, "split") and not isinstance(splitter, Iterable):
        raise TypeError(
            f"splitter={splitter!r} must have a method split, as KFold(5) of sklearn.model_selection does, or be a "
            "list of pairs of training and test indices."
        )
    try:
        pairs = splitter.split(np.zeros((size, 1)), labels, groups) if hasattr(splitter, "split") else splitter
        result = [(_indices(train), _indices(test)) for train, test in pairs]
    except (ValueError, TypeError) as error:
        missing = [name for name, values in (("y", y), ("groups", groups)) if values is None]
        remedy = f" It may need {' or '.join(missing)}, with one element for each sample." if missing else ""
        raise ValueError(f"splitter={_describe(splitter)} cannot split the dataset: {error}{remedy}") from error
    _check_splits(result, size)
    return result


def _indices(values: Any) -> list[int]:
    indices = np.asarray(values)
    if indices.shape == (0,):  # whose type tells nothing
        return []
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"a split must consist of indices, not of {indices.dtype} with shape {indices.shape}.")
    return [int(index) for index in indices]


def _check_splits(splits: list[Split], size: int) -> None:
    if not splits:
        raise ValueError("splitter gave no fold.")
    for number, (train, test) in enumerate(splits, 1):
        both = set(train) & set(test)
        outside = [index for index in {*train, *test} if not 0 <= index < size]
        if not train or not test:
            raise ValueError(f"splitter: fold {number} has {len(train)} samples to train on and {len(test)} to test.")
        if both:
            raise ValueError(
                f"splitter: fold {number} would be tested on {len(both)} of the samples that it is trained on, such as "
                f"sample {min(both)}."
            )
        if outside:
            raise ValueError(f"splitter: fold {number} has the index {outside[0]}, but the dataset has {size} samples.")


# ---------------------------------------------------------------------------------------------------------- folds


@dataclass
class _Validation:
    """What all folds have in common, and how one is run."""

    make_trainer: Callable[[Path], Trainer]
    dataset: Any
    folder: Path
    resume: bool
    seed: int | None
    predictions: bool
    train_arguments: dict[str, Any]

    def __post_init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []

    def run(self, name: str, place: str, train: list[int], test: list[int]) -> dict[str, Any]:
        """Train and test the model of a fold, and return its metrics; those of a fold that is finished are read."""
        folder = self.folder / name
        known = result_of_first(lambda: self._finished(folder))
        if known is not None:
            return known
        if self.seed is not None:
            set_seed(self.seed)
        trainer = self._new_trainer(folder)
        trainer.print(f"Fold {place}: {len(train)} samples to train on, {len(test)} to test")
        with trainer:
            held_out = Subset(self.dataset, test)
            saves_states = any(hasattr(callback, "find_latest") for callback in trainer.callback_handler)
            trainer.train(
                Subset(self.dataset, train),
                eval_dataset=held_out,
                resume_from="latest" if self.resume and saves_states else None,
                **self.train_arguments,
            )
            if (pause := trainer.current_run.end.pause) is not None:
                raise RunPausedError(f"{pause} {name} is not finished: call cross_validate again with resume=True.")
            given = self.train_arguments
            reading = {name: given[key] for key, name in _FOR_EVALUATION.items() if key in given}
            metrics = {key: _as_json(value) for key, value in trainer.evaluate(held_out, **reading).items()}
            if self.predictions:
                writer = PredictionWriterCallback(folder / "predictions", overwrite=True)
                trainer.callback_handler.add_callback(writer)
                for _ in trainer.predict_iter(held_out, **reading):
                    pass
            trainer.ranks.run_together(lambda: _write(folder / _RESULT, metrics), only_first=True)
        return metrics

    def _finished(self, folder: Path) -> dict[str, Any] | None:
        path = folder / _RESULT
        if not path.exists() or (self.predictions and not (folder / "predictions").is_dir()):
            return None
        print(f"{folder} is finished: skipped")
        metrics: dict[str, Any] = json.loads(path.read_text())
        return metrics

    def _new_trainer(self, folder: Path) -> Trainer:
        trainer = self.make_trainer(folder)
        if not isinstance(trainer, Trainer):
            raise TypeError(f"make_trainer({os.fspath(folder)!r}) returned {trainer!r}, which is not a Trainer.")
        made = [trainer, trainer.get_model(keep_torch_compile=False)]
        for reference in self._seen:
            if any(reference() is part for part in made):
                raise ValueError(
                    f"make_trainer({os.fspath(folder)!r}) returned the {type(reference()).__name__} of an earlier "
                    "fold, which has been trained on samples that it would now be tested on. Create a new one each "
                    "time."
                )
        self._seen += map(weakref.ref, made)
        return trainer


def _as_json(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def _write(path: Path, content: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n")
