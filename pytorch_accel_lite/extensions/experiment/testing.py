"""Testing every combination of a checkpoint, an inference setting and a dataset, with all results on disk."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pytorch_accel_lite.checkpoint import as_file_name, folder_path, local_path, write_text
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_int
from pytorch_accel_lite.extension_tools.data_and_batches import DEFAULT_BATCH_SIZE, is_named
from pytorch_accel_lite.extensions.experiment.chosen_weights import (
    find_weights,
    load_weights,
    predictions_of,
    source_of,
)
from pytorch_accel_lite.extensions.experiment.results import Row, added_callbacks, write_json, write_predictions
from pytorch_accel_lite.extensions.worst_samples import WorstSamplesCallback
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import as_cell, as_json


def run_tests(
    trainer: Trainer,
    datasets: Any,
    checkpoints: Sequence[str] = ("best",),
    inference: Mapping[str, Mapping[str, Any]] | None = None,
    save_dir: str | os.PathLike[str] = "tests",
    *,
    worst: int = 10,
    worst_by: Callable[[Any, Any], Any] | None = None,
    predictions: bool = True,
    shard_size: int = 1024,
    depends_on: Any = None,
    per_device_batch_size: int = DEFAULT_BATCH_SIZE,
    dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> list[Row]:
    """Test every combination of a checkpoint, an inference setting and a dataset. Call it on every process.

    Each combination has a folder, ``save_dir/checkpoint/setting/dataset``, with ``metrics.json``, ``worst.json`` and
    ``predictions/``, which ``read_predictions()`` reads. A combination that is finished is skipped, unless its
    checkpoint or its settings have changed. Predictions that were interrupted are resumed at the first missing sample;
    metrics are computed again. ``results.csv`` has a row for each combination. If the trainer has a
    ``SkipFailedBatchesCallback`` for evaluations and predictions, batches that fail are left out, and ``metrics.json``
    lists those of the evaluation as ``left_out``.

    Args:
        trainer: a trainer, with the callbacks that compute the metrics; its weights are replaced
        datasets: datasets by name; or a single dataset, which is called ``test``
        checkpoints: ``"best"``, ``"last"``, ``"average_best_3"`` or ``"average_last_3"`` for the mean of the weights of
            the best or last three, or paths; see ``find_weights``
        inference: settings by name, each a dict of attributes of the trainer to set while it is tested, such as
            ``{"beam": {"beam_width": 4, "model.temperature": 0.5}}``; by default a single setting, ``default``, that
            sets nothing
        worst: number of the worst samples that are listed; 0 for none
        worst_by: called as ``worst_by(model_outputs, targets)``; returns a value for each sample, larger for worse
            ones. Defaults to the loss function. Targets are the second element of a batch, its ``labels``, or the
            batch.
        predictions: whether to write the predictions of all samples
        shard_size: minimum number of samples of a process in a file of predictions; a test that was killed predicts at
            most this many samples again
        depends_on: what else the results depend on, such as the version of the data, in JSON types: if it has changed,
            everything is tested again

    Returns:
        a row for each combination, with ``checkpoint``, ``inference``, ``dataset`` and the metrics

    Raises:
        FileNotFoundError: if there is no such checkpoint
        ValueError: if the trainer does not have an attribute of a setting
    """
    if isinstance(checkpoints, (str, os.PathLike)):
        name = os.fspath(checkpoints)
        raise TypeError(f"checkpoints={name!r} must be a list. Write: checkpoints=[{name!r}].")
    check_int("worst", worst, least=0)
    by_name = datasets if is_named(datasets) else {"test": datasets}
    settings = inference or {"default": {}}
    for setting, attributes in settings.items():
        for attribute in attributes:
            _owner(trainer, setting, attribute)
    weights = {_folder_name(name): find_weights(trainer, name) for name in checkpoints}
    if len(weights) < len(checkpoints):
        raise ValueError(f"checkpoints={[*checkpoints]} would share the folder of one. Test them with a save_dir each.")
    reading = {
        "per_device_batch_size": per_device_batch_size,
        "dataloader_kwargs": dataloader_kwargs,
        "collate_fn": collate_fn,
    }
    folder = folder_path("save_dir", save_dir)
    test = _Test(trainer, folder, reading, worst, worst_by, predictions, shard_size)
    rows: list[Row] = []
    for checkpoint, paths in weights.items():
        for setting, attributes in settings.items():
            for name, dataset in by_name.items():
                row = {"checkpoint": checkpoint, "inference": setting, "dataset": name}
                depends = {"inference": dict(attributes), "depends_on": depends_on}
                with _naming_test(row), _attributes(trainer, setting, attributes):
                    part = folder / checkpoint / as_file_name(setting) / as_file_name(name)
                    rows.append(row | test.run(paths, dataset, part, depends))
    trainer.ranks.run_together(lambda: _write_table(rows, folder), only_first=True)
    return rows


def _owner(trainer: Trainer, setting: str, attribute: str) -> tuple[Any, str]:
    """Return the object whose attribute a setting sets, and the name of the attribute in this object."""
    path, _, name = attribute.rpartition(".")
    try:
        owner = attrgetter(path)(trainer) if path else trainer
        getattr(owner, name)
    except AttributeError as error:
        raise ValueError(f"inference: the setting {setting!r} sets {attribute!r}, but {error}.") from error
    return owner, name


def _folder_name(checkpoint: str) -> str:
    """Return the folder name for the results of a checkpoint: its name, or the last parts of its path."""
    path = local_path("checkpoints", checkpoint, "what is read")
    if not path.exists():
        return checkpoint
    path = path.resolve() if path.name in ("", "..") else path
    return as_file_name("_".join(path.with_suffix("").parts[-2:]).replace("/", ""))


@contextmanager
def _naming_test(row: Row) -> Iterator[None]:
    """Add a note that says what is being tested to an error in a ``with`` block."""
    try:
        yield
    except Exception as error:
        names = ", ".join(f"{kind} {name!r}" for kind, name in row.items())
        error.add_note(f"In testing {names}.")
        raise


@contextmanager
def _attributes(trainer: Trainer, setting: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a trainer, or of objects that it holds, for the duration of a ``with`` block."""
    with ExitStack() as before:
        for attribute, value in values.items():
            owner, name = _owner(trainer, setting, attribute)
            before.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@dataclass(eq=False, repr=False)
class _Test:
    """The common settings of all combinations; see ``run_tests()``.

    Args:
        trainer: the trainer that evaluates and predicts
        folder: the folder of all results
        reading: the arguments with which each dataset is read
        worst: number of worst samples to show; 0 for none
        worst_by: returns a value for each sample, larger for worse ones; ``None`` for the loss
        predictions: whether to write the predictions
        shard_size: minimum number of samples of a process in a file of predictions
    """

    trainer: Trainer
    folder: Path
    reading: dict[str, Any]
    worst: int
    worst_by: Callable[[Any, Any], Any] | None
    predictions: bool
    shard_size: int

    def run(self, paths: Sequence[Path], dataset: Any, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of one combination, from its folder if it is finished.

        Args:
            paths: the paths of its weights
            settings: what the results depend on besides the weights and the dataset
        """
        trainer = self.trainer
        value_name = self.worst_by and _name_of(self.worst_by)
        source = source_of(paths, worst=self.worst, worst_by=value_name, predictions=self.predictions, **settings)
        finished = trainer.ranks.result_of_first(lambda: _finished(folder, source))
        if finished is not None:
            trainer.print(f"{folder} is finished: skipped")
            return finished
        load_weights(trainer, paths, self.folder / f"{folder.parts[-3]}.pt")
        if self.predictions:
            writer = predictions_of(trainer, paths, folder / "predictions", settings, self.shard_size)
            write_predictions(trainer, dataset, writer, **self.reading)
        transform = None if value_name is None else _outputs_and_targets
        collector = WorstSamplesCallback(self.worst, self.worst_by, transform) if self.worst else None
        with added_callbacks(trainer, collector):
            metrics: dict[str, Any] = as_json(trainer.evaluate(dataset, **self.reading))
        skipped = trainer.current_run.skipped
        failures = [] if skipped is None else [batch.failure for batch in skipped.batches]
        left_out = {"left_out": as_json(failures)} if failures else {}
        label = "loss" if value_name is None else value_name.rpartition(".")[2]
        worst = [] if collector is None else [sample._asdict() for sample in collector.samples]
        samples = [{label if key == "loss" else key: item for key, item in sample.items()} for sample in worst]

        def write() -> None:
            lines = ",\n".join(json.dumps(sample) for sample in as_json(samples))
            write_text(folder / "worst.json", f"[\n{lines}\n]\n")
            write_json(folder / "metrics.json", {"metrics": metrics, **left_out, **source}, indent=2)

        trainer.ranks.run_together(write, only_first=True)
        return metrics


def _outputs_and_targets(batch: Any, output: Mapping[str, Any]) -> tuple[Any, Any]:
    outputs = output.get("model_outputs", output)
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    if isinstance(batch, Mapping):
        return outputs, batch.get("labels", batch)
    return outputs, batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else batch


def _name_of(function: Callable[..., Any]) -> str:
    """Return a name of a function that is the same in each process, unlike its ``repr``, which has an address."""
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<lambda>", "value")


def _finished(folder: Path, source: dict[str, Any]) -> dict[str, Any] | None:
    try:
        content: Any = json.loads((folder / "metrics.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    metrics: dict[str, Any] = content.pop("metrics", {})
    content.pop("left_out", None)
    return metrics if content == source else None


def _write_table(rows: list[Row], folder: Path) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(as_cell, columns))
    writer.writerows([as_cell(row.get(name, "")) for name in columns] for row in rows)
    write_text(folder / "results.csv", text.getvalue())
