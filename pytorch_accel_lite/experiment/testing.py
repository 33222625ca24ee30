"""Testing: every checkpoint by every inference setting by every dataset, with all results on disk."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.callbacks import TrainerCallback, WorstSamplesCallback
from pytorch_accel_lite.callbacks.metrics_file import plain
from pytorch_accel_lite.checkpoint.files import replacing
from pytorch_accel_lite.experiment.weights import find_weights, load_weights, predictions_of, source_of
from pytorch_accel_lite.utils import format_metric

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

Row = dict[str, Any]
_NAME = re.compile(r"[\w.=+-]+")


def run_tests(
    trainer: Trainer,
    datasets: Any,
    checkpoints: Sequence[str] = ("best",),
    inference: Mapping[str, Mapping[str, Any]] | None = None,
    save_dir: str | os.PathLike[str] = "tests",
    *,
    worst: int = 10,
    predictions: bool = True,
    depends_on: Any = None,
    per_device_batch_size: int = 8,
    dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> list[Row]:
    """Test every checkpoint by every inference setting by every dataset. Call it on every process.

    Each combination has a folder, ``save_dir/checkpoint/setting/dataset``, with ``metrics.json``, ``worst.json`` and
    ``predictions/``, which :func:`~pytorch_accel_lite.callbacks.read_predictions` reads. A combination that is finished
    is skipped, unless its checkpoint or its settings have changed; predictions that were interrupted are resumed at the
    first sample that is missing. ``results.md`` and ``results.csv`` have a row for each combination.

    :param trainer: a trainer, with the callbacks that compute the metrics; its weights are replaced
    :param datasets: datasets by name; or one, which is called ``test``
    :param checkpoints: ``"best"``, ``"last"``, ``"average_best_3"`` or ``"average_last_3"`` for the mean of the weights
        of the best or last three, or paths; see ``find_weights``
    :param inference: settings by name, each a dict of attributes of the trainer to set while it is tested, such as
        ``{"beam": {"beam_width": 4, "model.temperature": 0.5}}``; by default one, ``default``, that sets nothing
    :param worst: number of samples with the largest losses that are listed; 0 for none
    :param predictions: whether to write the predictions of all samples
    :param depends_on: what else the results depend on, such as the version of the data, as JSON could hold it: when it
        has changed, everything is tested again
    :return: a row for each combination: ``checkpoint``, ``inference``, ``dataset`` and the metrics
    :raises FileNotFoundError: if there is no such checkpoint
    :raises AttributeError: if the trainer does not have an attribute of a setting
    """
    by_name = datasets if isinstance(datasets, Mapping) else {"test": datasets}
    settings: Mapping[str, Mapping[str, Any]] = inference or {"default": {}}
    for folder in (*by_name, *settings):
        if not _NAME.fullmatch(folder):
            raise ValueError(f"The name {folder!r} cannot be that of a folder. Use letters, digits and _ . = + - only.")
    for attributes in settings.values():
        for attribute in attributes:
            attrgetter(attribute)(trainer)
    names = [_folder_name(name) for name in checkpoints]
    if len(set(names)) < len(names):
        raise ValueError(f"checkpoints={[*checkpoints]} would share folders: {names}. Test them with a save_dir each.")
    found = {_folder_name(name): find_weights(trainer, name, Path(save_dir)) for name in checkpoints}
    reading = {
        "per_device_batch_size": per_device_batch_size,
        "dataloader_kwargs": dataloader_kwargs,
        "collate_fn": collate_fn,
    }
    rows: list[Row] = []
    for checkpoint, path in found.items():
        for setting, attributes in settings.items():
            for name, dataset in by_name.items():
                row = {"checkpoint": checkpoint, "inference": setting, "dataset": name}
                folder = Path(save_dir) / checkpoint / setting / name
                with _attributes(trainer, attributes):
                    about = {"inference": dict(attributes), "depends_on": depends_on}
                    metrics = _test(trainer, path, dataset, folder, worst, predictions, reading, about)
                rows.append(row | metrics)
    trainer.ranks.run_together(lambda: _write_tables(rows, Path(save_dir)), only_first=True)
    return rows


def _folder_name(checkpoint: str) -> str:
    """Return a name for the results of a checkpoint: its own, or for a path its last parts."""
    path = Path(checkpoint)
    return "_".join(path.with_suffix("").parts[-2:]).replace("/", "") if path.exists() else checkpoint


@contextmanager
def _attributes(trainer: Trainer, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a trainer, or of its attributes, within a block."""
    before = {name: attrgetter(name)(trainer) for name in values}

    def put(name: str, value: Any) -> None:
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(trainer) if owner else trainer, last, value)

    try:
        for name, value in values.items():
            put(name, value)
        yield
    finally:
        for name, value in before.items():
            put(name, value)


def _test(
    trainer: Trainer,
    weights: Path,
    dataset: Any,
    folder: Path,
    worst: int,
    predictions: bool,
    reading: dict[str, Any],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Return the metrics of one combination, from its folder if it is finished.

    :param about: what the results depend on besides the weights and the dataset
    """
    source = source_of(weights, worst=worst, predictions=predictions, **about)
    known = trainer.ranks.broadcast_object(lambda: _finished(folder, source))
    if known is not None:
        trainer.print(f"{folder} is finished: skipped")
        return known
    load_weights(trainer, weights)
    if predictions:
        with _callback(trainer, predictions_of(trainer, weights, folder / "predictions", **about)):
            for _ in trainer.predict_iter(dataset, **reading):
                pass
    collector = WorstSamplesCallback(worst) if worst else None
    with _callback(trainer, collector):
        metrics = {name: plain(value) for name, value in trainer.evaluate(dataset, **reading).items()}
    samples = [] if collector is None else [_as_json(sample._asdict()) for sample in collector.samples]

    def write() -> None:
        if samples:
            _write(folder / "worst.json", json.dumps(samples, indent=2))
        _write(folder / "metrics.json", json.dumps({"metrics": metrics, **source}, indent=2))

    trainer.ranks.run_together(write, only_first=True)
    return metrics


def _finished(folder: Path, source: dict[str, Any]) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    except (OSError, ValueError):
        return None
    metrics: dict[str, Any] = content.pop("metrics", {})
    return metrics if content == source else None


@contextmanager
def _callback(trainer: Trainer, callback: TrainerCallback | None) -> Iterator[None]:
    """Add a callback to a trainer within a block."""
    handler = trainer.callback_handler
    if callback is None:
        yield
        return
    handler.add_callback(callback)
    try:
        yield
    finally:
        handler.callbacks.remove(callback)
        handler.listeners.clear()


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else plain(value)


def _write_tables(rows: list[Row], folder: Path) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[format_metric(row[name]) if name in row else "" for name in columns] for row in rows]
    _write(folder / "results.md", "\n".join(f"| {' | '.join(line)} |" for line in lines))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(folder / "results.csv", text.getvalue().rstrip("\n"))


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text + "\n")
