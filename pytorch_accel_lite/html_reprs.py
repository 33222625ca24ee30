"""HTML representations of trainers, histories, run configs, results of tools and worst samples in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.reprs import parts_of, short
from pytorch_accel_lite.templates import render
from pytorch_accel_lite.utils import format_metric

if TYPE_CHECKING:
    from pytorch_accel_lite.callbacks.worst_samples import WorstSamplesCallback
    from pytorch_accel_lite.experiment.comparison import RunComparison
    from pytorch_accel_lite.experiment.cross_validation import CrossValidation
    from pytorch_accel_lite.history import InMemoryRunHistory
    from pytorch_accel_lite.run_config import TrainerRunConfig
    from pytorch_accel_lite.tools.diagnosis import Diagnosis
    from pytorch_accel_lite.tools.memory import MemoryEstimate
    from pytorch_accel_lite.trainer import Trainer

_MOST_EPOCHS = 50


def of_trainer(trainer: Trainer) -> str | None:
    """Show the model, optimizer, device and callbacks of a trainer."""
    if "current_run" not in vars(trainer):  # its constructor has not finished
        return None
    parts = parts_of(trainer)
    listening = "\n".join(map(repr, trainer.callback_handler)) or "none"
    rows = {"model": parts.pop("model"), "parameters": parts.pop("parameters"), "loss_func": short(trainer.loss_func)}
    return _table(type(trainer).__name__, (rows | parts | {"callbacks": listening}).items())


def of_history(history: InMemoryRunHistory) -> str:
    """Show the last value of every metric in each epoch."""
    state = history.state_dict()
    by_metric = {
        name: dict(zip(state["epochs"][name], values, strict=True)) for name, values in state["metrics"].items()
    }
    epochs = sorted({epoch for values in by_metric.values() for epoch in values})
    rows = [
        (epoch, *(_cell(values[epoch]) if epoch in values else "" for values in by_metric.values()))
        for epoch in epochs[-_MOST_EPOCHS:]
    ]
    left_out = len(epochs) - len(rows)
    notes = [f"The last {len(rows)} epochs of {len(epochs)}; to_dict() has all."] if left_out else []
    title = type(history).__name__ + ("" if rows else ": nothing has been recorded yet")
    return _table(title, rows, ["epoch", *by_metric] if rows else [], notes)


def of_run_config(config: TrainerRunConfig) -> str:
    """Show the notable settings of a run."""
    return _table(type(config).__name__, [(name, short(value, name)) for name, value in config.notable().items()])


def of_diagnosis(found: Diagnosis) -> str:
    """Show where the time of a step is spent, with advice."""
    return _table(found.summary(), found.parts(), notes=found.advice or ["Nothing stands out."])


def of_memory(found: MemoryEstimate) -> str:
    """Show what the peak of a device's memory consists of, with advice."""
    return _table(found.summary(), found.rows(), notes=found.advice)


def of_worst_samples(worst: WorstSamplesCallback) -> str:
    """Show the samples with the largest losses."""
    columns, *rows = worst.table()
    return _table(repr(worst), rows, columns)


def of_cross_validation(result: CrossValidation) -> str:
    """Show the metrics of each fold, and their mean and deviation."""
    columns, *rows = result.table()
    return _table(result.title, rows, columns)


def of_comparison(found: RunComparison) -> str:
    """Show the metrics of runs, and the settings that differ."""
    tables = [found.of_metrics(), *([found.of_settings()] if found.differences else [])]
    titles = f"{len(found.runs)} runs", "Settings that differ"
    return "".join(
        _table(title, [[cell.text for cell in row] for row in part.rows], part.columns)
        for title, part in zip(titles, tables, strict=False)
    )


def _cell(value: Any) -> str:
    return format_metric(value) if getattr(value, "ndim", 0) == 0 and not isinstance(value, str) else short(value)


def _table(title: str, rows: Iterable[Sequence[Any]], columns: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Return an HTML table; without columns, its rows are names and values."""
    return render("table.html", title=title, rows=list(rows), columns=columns, notes=notes)
