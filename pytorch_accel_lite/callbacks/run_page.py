"""The pages of a run: its record in readable form."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pytorch_accel_lite.base.environment import install_command
from pytorch_accel_lite.base.templates import render
from pytorch_accel_lite.base.text import format_metric
from pytorch_accel_lite.callbacks.epochs import format_duration
from pytorch_accel_lite.plotting.panels import best_of, direction_of, place_of_each


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    is_best: bool = False


class Table(NamedTuple):
    """A table.

    :param numbers: indices of the columns that hold numbers, which are right-aligned
    """

    columns: list[str]
    rows: list[list[Cell]]
    numbers: set[int]


def pages(record: Mapping[str, Any], curves: Sequence[str]) -> dict[str, str]:
    """Return the pages of a run by file name.

    :param record: the contents of ``run.json``
    :param curves: plots of its metrics, as SVG
    """
    attempts = record["attempts"]
    outcome, _, reason = attempts[-1]["outcome"].partition(": ")
    main, monitors = _metrics(record)
    command = record["command"]
    values = {
        "name": record["name"],
        "outcome": attempts[-1]["outcome"],
        "status": outcome,
        "reason": reason,
        "error": attempts[-1].get("traceback", "").rstrip(),
        "lead": _lead(record),
        "results": _results(record),
        "facts": _facts(record),
        "tables": {"Epochs": main} if record["metrics"] else {},
        "command": f"cd {shlex.quote(record['folder'])}\n{shlex.join(command)}" if command else "",
        "how_to_resume": _how_to_resume(record),
        "details": _details(record, monitors),
    }
    how_to_plot = install_command("plot", "matplotlib") if record["metrics"] else ""
    return {
        "summary.md": render("run.md", **values),
        "summary.html": render("run.html", **values, curves=curves, how_to_plot=how_to_plot),
    }


def _lead(record: Mapping[str, Any]) -> str:
    progress = record["progress"]
    epochs = record["config"].get("num_epochs")
    of_all = f" of {epochs}" if isinstance(epochs, int) else ""
    parts = [
        format_duration(sum(attempt.get("seconds", 0) for attempt in record["attempts"])),
        f"{progress['epochs_completed']}{of_all} epochs",
        f"{progress['update']:,} updates",
        f"{progress['samples']:,} samples",
        f"started {_moment(record['attempts'][0]['started'])}",
    ]
    return " · ".join(parts)


def _moment(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M UTC")


def _results(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the best and final values of each metric with a known direction; final only for training metrics."""
    names = _names(record)
    results = []
    for name, (_, _, is_monitor, label) in place_of_each(names).items():
        direction = direction_of(name, record["directions"])
        if is_monitor or direction is None:
            continue
        rows = [row for row in record["metrics"] if name in row]
        texts = format_column([row[name] for row in rows])
        best = None if label.endswith("train") else best_of([_number(row[name]) for row in rows], direction)
        notes = ["final"] if best is None else [f"best, epoch {rows[best]['epoch']}", f"final {texts[-1]}"]
        value = texts[-1 if best is None else best]
        results.append({"name": name.removesuffix("_epoch").replace("_", " "), "value": value, "notes": notes})
    return sorted(results, key=lambda result: len(result["notes"]), reverse=True)[:12]


def _facts(record: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    """Return what is said of the training and of its environment, by name."""
    config, git, processes = record["config"], record["git"], record["processes"]
    batch, total = config.get("train_per_device_batch_size"), config.get("train_total_batch_size")
    batch_size = "" if batch is None else f"{batch} per process"
    if total != batch:
        batch_size += f", {total} in an update"
    training = [
        *((name.capitalize(), record[name]) for name in ("model", "loss", "optimizer", "schedule")),
        ("Batch size", batch_size),
        ("Precision", "float32" if config.get("mixed_precision") == "no" else str(config.get("mixed_precision"))),
        ("Seed", str(config.get("seed"))),
    ]
    environment = [
        ("Device", record["device"] + (f", {processes} processes" if processes > 1 else "")),
        ("Host", record["host"]),
        ("Folder", record["folder"]),
        ("Git commit", git["commit"] + ", with changes" * git["has_changes"] if git else "no repository"),
        ("Versions", ", ".join(f"{name} {number}" for name, number in record["versions"].items())),
    ]
    return [training, environment]


def _how_to_resume(record: Mapping[str, Any]) -> str:
    if not record["states"]:
        return "The run cannot be resumed: it saves no training states. Add a SaveTrainingStateCallback to save them."
    again = "The same command resumes the run" if record["command"] else "The run was started in a notebook; it resumes"
    where = ", ".join(record["states"])
    return f'{again} from the newest training state in {where}, with train(..., resume_from="latest").'


def _details(record: Mapping[str, Any], monitors: Table) -> dict[str, Table]:
    details = {"Monitors": monitors} if len(monitors.columns) > 1 else {}
    attempts = [
        (_moment(it["started"]), format_duration(it.get("seconds", 0)), f"{it['from_update']:,}", it["outcome"])
        for it in record["attempts"]
    ]
    settings = [(name, format_metric(value)) for name, value in record["config"].items()]
    details["Attempts"] = _plain_table(["started", "duration", "from update", "outcome"], attempts, {1, 2})
    details["Configuration"] = _plain_table(["name", "value"], settings)
    return details


def _plain_table(columns: list[str], rows: Iterable[Iterable[str]], numbers: Iterable[int] = ()) -> Table:
    return Table(columns, [[Cell(text) for text in row] for row in rows], set(numbers))


def _names(record: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in record["metrics"] for name in row) if name != "epoch"]


def _metrics(record: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return a table of the metrics and the learning rate, and a table of the other monitors."""
    places = place_of_each(_names(record))
    main = [name for name, (title, _, is_monitor, _) in places.items() if not is_monitor or title == "learning rate"]
    others = [name for name in places if name not in main]
    return _table(record, main), _table(record, others)


def _table(record: Mapping[str, Any], names: Iterable[str]) -> Table:
    """Return a table with a row for each epoch and the best value of each column marked."""
    columns = ["epoch", *names]
    directions = record["directions"]
    unmarked = {"epoch"} | {name for name, panel in place_of_each(columns).items() if panel[3].endswith("train")}
    filled = []
    for name in columns:
        values = [row.get(name) for row in record["metrics"]]
        best = None if name in unmarked else best_of([_number(v) for v in values], direction_of(name, directions))
        filled.append([Cell(text, index == best) for index, text in enumerate(format_column(values))])
    return Table(columns, [list(row) for row in zip(*filled, strict=True)], set(range(len(columns))))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def format_column(values: Sequence[Any]) -> list[str]:
    """Return the values of a column as text, numbers with the same number of decimals, at least four digits."""
    sizes = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value)]
    power = math.floor(math.log10(max(sizes))) if any(sizes) else 0
    decimals = 3 - power if power < -1 else max(4 - max(power, 0), 0)
    form = f",.{decimals}f" if -4 <= power < 9 else ".4g"
    return ["" if value is None else _text(value, form) for value in values]


def _text(value: Any, form: str) -> str:
    if isinstance(value, float):
        text = format(value, form)
        return f"{value:.1e}" if value and not text.strip("-0.") else text
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
