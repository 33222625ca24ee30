"""The card of a saved model, which describes its training and its results, and how to load it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_accel_lite.checkpoint import replacing, write_text
from pytorch_accel_lite.extending import ADAPTERS, CompanionWriter, LoadedWeights, Run, SavedModel, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import dataset_of, find_length, is_named
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import is_monitor, panels_by_metric
from pytorch_accel_lite.extension_tools.modules_and_devices import class_of
from pytorch_accel_lite.extension_tools.states_and_files import is_of_peft, is_of_timm
from pytorch_accel_lite.extension_tools.texts_and_pages import Column, render, to_number
from pytorch_accel_lite.extensions.plots import NothingToPlotError
from pytorch_accel_lite.extensions.reports.run_log_callback import RunLogCallback, describe_model, setup_of
from pytorch_accel_lite.extensions.reports.run_page import TEMPLATES, environment_facts, training_facts
from pytorch_accel_lite.tracking import InMemoryRunHistory
from pytorch_accel_lite.utils import format_metric, format_value

_FILE = "README.md"  # the Hugging Face Hub shows this file
_MARKER = (
    "<!-- Written by save_model() of pytorch_accel_lite, which replaces this file as long as it has this line. -->"
)
# Settings of a run that are omitted from the table of settings, because other parts of the card have them.
_OMITTED = ("train_", "eval_", "num_", "max_num_", "is_", "mixed_precision", "seed")


class ModelCard(CompanionWriter):
    """Writes the card of a model, ``README.md``, with a plot of the metrics."""

    def check(self, card_data: Mapping[str, object]) -> None:
        """Check that the metadata can be written.

        Raises:
            TypeError: if it cannot
        """
        try:
            json.dumps({**card_data})
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"card_data={card_data!r} must be a dict of the card's metadata, such as {{'license': 'mit'}}, of "
                f"texts, numbers, and lists and dicts of them: {error}."
            ) from error

    def write(self, trainer: TrainerLike, saved: SavedModel) -> None:
        """Write the card, unless there is a README that ``save_model()`` did not write."""
        card = saved.folder / _FILE
        if card.exists() and _MARKER.encode() not in card.read_bytes():
            warn_outside(
                f"{f'{os.fspath(saved.location)}/{_FILE}'!r} was not written by save_model(), so it is kept. Rename "
                "it to get a model card, or copy what it should say from a card in another directory."
            )
        else:
            write_text(card, _card_of(trainer, saved))


def _card_of(trainer: TrainerLike, saved: SavedModel) -> str:
    card_data: dict[str, Any] = {"model_name": Path(saved.location).resolve().name, **saved.card_data}
    run, model, folder = trainer.run, trainer.get_model(keep_torch_compile=False), saved.folder
    history = trainer.run_history if isinstance(trainer.run_history, InMemoryRunHistory) else InMemoryRunHistory()
    latest = run.latest
    loaded = latest.loaded if latest.loaded is not None and latest.loaded.update == trainer.progress.update else None
    row = _row_of_weights(history, loaded) if trainer.progress.update else {}
    before, later = _numbers(row), _numbers(latest.evaluation.metrics if latest.evaluation else {})
    kind, settings = class_of(model), list(_settings(trainer))
    return render(
        TEMPLATES / "model_card.md",
        metadata=_metadata(run, before, later, card_data),
        marker=_MARKER,
        name=card_data["model_name"],
        description=describe_model(trainer),
        progress=trainer.progress,
        training=latest.training,
        loaded=loaded,
        trainable_only=saved.trainable_only,
        epoch=row.get("epoch"),
        saved=before,
        later=later,
        format_value=format_value,
        format_metric=format_metric,
        has_curves=_draw_curves(history, folder / "curves.png"),
        kind=kind.__name__,
        module=_public_module(kind),
        is_pretrained=(folder / "config.json").exists() and hasattr(kind, "from_pretrained"),  # saved by transformers
        is_adapters=is_of_peft(model) and (folder / ADAPTERS).exists(),
        is_of_timm=is_of_timm(model) and (folder / "config.json").exists(),
        settings=[Column("setting", [name for name, _ in settings]), Column("value", [text for _, text in settings])],
        model=model,
    )


def _row_of_weights(history: InMemoryRunHistory, loaded: LoadedWeights | None) -> dict[str, Any]:
    """Return the metrics of the epoch whose weights the model has; an empty dict if the epoch is unknown."""
    expected: dict[str, Any] = {} if loaded is None else {"epoch": None, **loaded.numbers}
    names = {"epoch", *history.curves()}
    rows = [{name: value for name, value in row.items() if name in names} for row in history.rows()]
    return next((row for row in reversed(rows) if expected.items() <= row.items()), {})


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, with the same names from ``train`` as from ``evaluate``."""
    numbers = {
        name.removesuffix("_epoch").replace("evaluation_", "eval_"): to_number(value)
        for name, value in metrics.items()
        if name != "epoch" and not is_monitor(name)
    }
    return {name: x for name, x in numbers.items() if isinstance(x, (int, float)) and math.isfinite(x)}


def _metadata(run: Run, saved: Mapping[str, float], later: Mapping[str, float], card_data: Mapping[str, Any]) -> str:
    """Return the metadata of a card as YAML, as the Hugging Face Hub reads it."""
    from huggingface_hub import EvalResult, ModelCardData  # takes longer to import than all of this package

    training, evaluation = run.latest.training, run.latest.evaluation
    datasets = [training.eval_arguments.dataset] if training is not None else []
    datasets += [evaluation.eval_dataset] if evaluation is not None else []
    parts = {name.replace("_", " ") for data in datasets if is_named(data) for name in data}
    same_data = len(datasets) == 2 and _are_same(*datasets)
    by_split = {"validation": {**saved, **later}} if same_data else {"validation": saved, "test": later}
    panels = panels_by_metric([*saved, *later])
    datasets_in_card = card_data.get("datasets") or "evaluation-data"
    dataset = datasets_in_card if isinstance(datasets_in_card, str) else datasets_in_card[0]
    results = [
        EvalResult(
            task_type=card_data.get("pipeline_tag", "other"),
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_config=None if data == "eval" else data,
            dataset_split=split,
            metric_type=title.replace(" ", "_"),
            metric_name=title,
            metric_value=value,
        )
        for split, numbers in by_split.items()
        for name, value in numbers.items()
        for title, _, _, data in [panels[name]]
        if data in {"eval", *parts}  # not metrics of training or of averaged weights
    ]
    entries = {"library_name": "pytorch", "tags": ["pytorch-accel-lite"], "eval_results": results or None, **card_data}
    yaml: str = ModelCardData(**entries).to_yaml()
    return yaml


def _draw_curves(history: InMemoryRunHistory, path: Path) -> bool:
    """Draw the curves of the metrics; return ``False`` if there are none, or matplotlib is not installed."""
    with suppress(ImportError, NothingToPlotError), replacing(path) as temporary:
        history.plot().savefig(temporary, format="png", dpi=150)
        return True
    return False


def _public_module(kind: type) -> str:
    """Return the shortest name of a module that exports a class; empty if a program on its own defines the class."""
    parts = kind.__module__.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    having = [name for name in modules if getattr(sys.modules.get(name), kind.__qualname__, None) is kind]
    return having[0] if having and having[0] != "__main__" else ""


def _settings(trainer: TrainerLike) -> Iterator[tuple[str, str]]:
    """Yield the settings and the environment of the latest training, by name."""
    run, training = trainer.run, trainer.run.latest.training
    if training is None:
        return
    datasets = {
        "Training data": run.data.train_dataset,
        "Evaluation data": training.eval_arguments.dataset,
        "Data evaluated afterwards": run.latest.evaluation and run.latest.evaluation.eval_dataset,
    }
    yield from ((name, _describe_data(data)) for name, data in datasets.items() if data is not None)
    record = setup_of(trainer, training.config.to_dict())
    for name, value in (*training_facts(record), *environment_facts(record)):
        if value:
            yield name, value
    for name, setting in training.config.notable().items():
        if not name.startswith(_OMITTED):
            yield name.replace("_", " ").capitalize(), format_metric(setting)
    for log in trainer.callback_handler:
        for name, value in log.config.items() if isinstance(log, RunLogCallback) else ():
            yield name, format_metric(value)


def _are_same(first: object, second: object) -> bool:
    """Whether two evaluations read the same data. Two loaders of a dataset may read different parts of it."""
    return first is second or dataset_of(first) is second or first is dataset_of(second)


def _describe_data(data: Any) -> str:
    if is_named(data):
        return "; ".join(f"{name}: {_describe_data(part)}" for name, part in data.items())
    data = dataset_of(data)  # a loader's length is that of its batches
    length = find_length(data)
    return type(data).__name__ + ("" if length is None else f", {length:,} samples")
