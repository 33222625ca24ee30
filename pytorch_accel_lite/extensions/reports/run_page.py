"""The pages of a run, ``summary.md`` and ``summary.html``, which show its record."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_accel_lite.extending import MetricPanel
from pytorch_accel_lite.extension_tools.arguments_and_errors import install_command
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import (
    best_of,
    describe_fractions,
    direction_of,
    panels_by_metric,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import Column, escape_unprintable, format_duration, render
from pytorch_accel_lite.utils import format_metric, format_value

TEMPLATES = Path(__file__).with_name("templates")
_SHOWN_OUTPUTS = 20  # number of latest outputs on a page


class ShownPicture(NamedTuple):
    """An image on a page.

    Args:
        data: the contents of the file, as a data URL
        link: the path of the file, relative to the page, as a URL
    """

    data: str
    link: str


def shown_outputs(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs that the pages show, the latest first."""
    outputs: list[dict[str, Any]] = record.get("outputs", [])
    return outputs[: -_SHOWN_OUTPUTS - 1 : -1]


def pages(
    record: Mapping[str, Any], curves: Sequence[str], pictures: Mapping[str, ShownPicture] | None = None
) -> dict[str, str]:
    """Return the pages of a run by file name.

    Args:
        record: the contents of ``run.json``
        curves: plots of its metrics, as SVG
        pictures: the images among its outputs, by path
    """
    attempts = record["attempts"]
    outcome, _, reason = attempts[-1]["outcome"].partition(": ")
    main, monitors = _metric_tables(record)
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
        "outputs": shown_outputs(record),
        "pictures": pictures or {},
        "command": f"cd {shlex.quote(record['folder'])}\n{shlex.join(command)}" if command else "",
        "how_to_resume": _how_to_resume(record),
        "details": _details(record, monitors),
    }
    how_to_plot = install_command("plot", "matplotlib") if record["metrics"] else ""
    return {
        "summary.md": render(TEMPLATES / "run.md", **values),
        "summary.html": render(TEMPLATES / "run.html", **values, curves=curves, how_to_plot=how_to_plot),
    }


def _lead(record: Mapping[str, Any]) -> str:
    progress = record["progress"]
    epochs = record["config"].get("num_epochs")
    planned = f" of {epochs}" if isinstance(epochs, int) else ""
    parts = [
        format_duration(sum(attempt.get("seconds", 0) for attempt in record["attempts"])),
        f"{progress['epochs_completed']}{planned} epochs",
        f"{progress['update']:,} updates",
        f"{progress['samples']:,} samples",
        f"started {_date(record['attempts'][0]['started'])}",
    ]
    return " · ".join(parts)


def _date(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M UTC")


def _results(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the best and final values of metrics of known direction; of training metrics, only the final value."""
    directions = record["directions"]
    results = []
    for name, panel in panels_by_metric(_metric_names(record)).items():
        if panel.is_monitor or direction_of(name, directions) is None:
            continue
        rows = [row for row in record["metrics"] if name in row]
        best = best_of([row[name] for row in rows], name, panel, directions)
        value, final = (_text(rows[index][name]) for index in (-1 if best is None else best, -1))
        notes = ["final"] if best is None else [f"best, epoch {rows[best]['epoch']}", f"final {final}"]
        results.append(
            {"name": escape_unprintable(name.removesuffix("_epoch").replace("_", " ")), "value": value, "notes": notes}
        )
    return sorted(results, key=lambda result: len(result["notes"]), reverse=True)[:12]


def _facts(record: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    """Return the facts about the training and about its environment, by name."""
    location = [("Host", record["host"]), ("Folder", record["folder"])]
    return [training_facts(record), [*location, *environment_facts(record)]]


def environment_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts about the hardware and the software of a training, by name."""
    git, processes = record["git"], record["processes"]
    return [
        ("Device", record["device"] + (f", {processes} processes" if processes > 1 else "")),
        ("Git commit", git["commit"] + ", with changes" * git["has_changes"] if git else "no repository"),
        ("Versions", ", ".join(f"{name} {number}" for name, number in record["versions"].items())),
    ]


def training_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts about a training, except its environment, by name."""
    config = record["config"]
    batch, total = config.get("train_per_device_batch_size"), config.get("train_total_batch_size")
    batch_size = "" if batch is None else f"{batch} per process"
    if total != batch:
        batch_size += f", {total} in an update"
    return [
        *((name.capitalize(), record[name]) for name in ("model", "loss", "optimizer", "schedule")),
        ("Batch size", batch_size),
        ("Precision", "float32" if config.get("mixed_precision") == "no" else str(config.get("mixed_precision"))),
        ("Seed", str(config.get("seed"))),
        ("Time", _describe_time(record.get("goodput", {}))),
    ]


def _describe_time(goodput: Mapping[str, Any]) -> str:
    return describe_fractions(goodput.get("fractions", {}), goodput.get("counts", {}).get("takeovers", 0))


def _how_to_resume(record: Mapping[str, Any]) -> str:
    if not record["states"]:
        return "The run cannot be resumed: it saves no training states. Add a SaveTrainingStateCallback to save them."
    start = "The same command resumes the run" if record["command"] else "The run was started in a notebook; it resumes"
    locations = ", ".join(record["states"])
    return f'{start} from the newest training state in {locations}, with train(..., resume_from="latest").'


def _details(record: Mapping[str, Any], monitors: list[Column]) -> dict[str, list[Column]]:
    attempts, config = record["attempts"], record["config"]
    details = {"Monitors": monitors} if len(monitors) > 1 else {}
    return details | {
        "Attempts": [
            Column("started", [_date(attempt["started"]) for attempt in attempts]),
            Column("duration", [format_duration(attempt.get("seconds", 0)) for attempt in attempts], True),
            Column("from update", [f"{attempt['from_update']:,}" for attempt in attempts], True),
            Column("outcome", [attempt["outcome"] for attempt in attempts]),
        ],
        "Configuration": [
            Column("name", [*map(escape_unprintable, config)]),
            Column("value", [format_metric(v) for v in config.values()]),
        ],
    }


def _metric_names(record: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in record["metrics"] for name in row) if name != "epoch"]


def _metric_tables(record: Mapping[str, Any]) -> tuple[list[Column], list[Column]]:
    """Return a table of the metrics and the learning rate, and a table of the other monitors."""
    panels = panels_by_metric(_metric_names(record))
    others = {name: panel for name, panel in panels.items() if panel.is_monitor and panel.title != "learning rate"}
    return _table(record, {name: panels[name] for name in panels if name not in others}), _table(record, others)


def _table(record: Mapping[str, Any], panels: Mapping[str, MetricPanel]) -> list[Column]:
    """Return a table of some metrics, with a row for each epoch and the best value of each column marked."""
    columns = [Column("epoch", [_text(row["epoch"]) for row in record["metrics"]], True)]
    for name, panel in panels.items():
        values = [row.get(name) for row in record["metrics"]]
        columns.append(
            Column(
                escape_unprintable(name),
                list(map(_text, values)),
                True,
                best_of(values, name, panel, record["directions"]),
            )
        )
    return columns


def _text(value: Any) -> str:
    return "" if value is None else format_value(value) or escape_unprintable(value)
