"""A folder that says what a run was, how it went, and how to repeat it."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import platform
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.callbacks.metrics_file import plain
from pytorch_accel_lite.checkpoint.files import replacing
from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.utils import TimeBudget, format_metric, install_command

if TYPE_CHECKING:
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer

_PACKAGES = ("pytorch-accel-lite", "torch", "accelerate", "torchmetrics", "numpy", "timm", "transformers")


class RunLogCallback(TrainerCallback):
    """Keeps a folder on a run: ``run.json`` for programs, ``summary.md`` and ``summary.html`` for people.

    They hold the run's configuration and yours, the command line, versions, the git commit (when the program is run in
    a repository), host and processes, every attempt with its beginning, end and outcome, and all metrics. The page is
    one file with its curves in it (extra ``plot``; without it, only tables). All is replaced whole after each epoch;
    the curves are drawn again when that takes less than a fiftieth of the time, and at the end.

    A run that is resumed adds an attempt; another run in the same folder replaces it.

    :param directory: the folder
    :param config: hyper-parameters of yours, to be shown with the run's configuration
    """

    def __init__(self, directory: str | os.PathLike[str] = "run_log", config: Mapping[str, Any] | None = None) -> None:
        self.directory = Path(directory)
        self.config = dict(config or {})
        self._record: dict[str, Any] = {}
        self._picture = ""
        self._drawn = 0
        self._pace = TimeBudget(1 / 50)

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.claim_path(self, "directory", self.directory, "page of the run")

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.ranks.run_together(lambda: self._begin(trainer), only_first=True)

    def _begin(self, trainer: Trainer) -> None:
        self._picture = ""
        self._drawn = 0
        self._pace = TimeBudget(1 / 50)
        attempts = self._earlier_attempts() if trainer.progress.update else []
        configuration = {} if trainer.run_config is None else trainer.run_config.to_dict()
        self._record = {
            "command": sys.orig_argv,
            "folder": os.getcwd(),
            "git": _git(),
            "versions": {"python": platform.python_version(), **_versions()},
            "host": socket.gethostname(),
            "processes": trainer.ranks.world_size,
            "device": str(trainer.device),
            "model": type(trainer.get_model(keep_torch_compile=False)).__name__,
            "optimizer": repr(trainer.optimizer),
            "config": {**configuration, **self.config},
            "attempts": [*attempts, {"started": _now(), "from_update": trainer.progress.update, "outcome": "running"}],
        }
        self._write(trainer)

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        try:
            attempts: list[dict[str, Any]] = json.loads((self.directory / "run.json").read_text())["attempts"]
        except (OSError, ValueError, KeyError):
            return []
        for attempt in attempts:
            if attempt["outcome"] == "running":
                attempt["outcome"] = "killed"
        return attempts

    def on_epoch_checkpoint(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.accelerator.is_main_process:
            self._write(trainer)

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self._record and trainer.accelerator.is_main_process:
            self._write(trainer)

    def on_exception(self, trainer: Trainer, **kwargs: Any) -> None:
        error = kwargs["exception"]
        outcome, *_ = f"failed: {type(error).__name__}: {error}".splitlines()
        self._end(trainer, outcome[:200], "".join(traceback.format_exception(error)))

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        reason = trainer.current_run.stop_reason
        self._end(trainer, "finished" if reason is None else f"stopped: {reason}")

    def _end(self, trainer: Trainer, outcome: str, trace: str | None = None) -> None:
        if not trainer.accelerator.is_main_process or not self._record:
            return
        attempt = self._record["attempts"][-1]
        if attempt["outcome"] != "running":  # an error has been noted before the ending event
            return
        attempt |= {"ended": _now(), "outcome": outcome, **({"traceback": trace} if trace else {})}
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        history = trainer.run_history
        rows = history.rows() if hasattr(history, "rows") else []
        progress = {"progress": trainer.progress.state_dict(), "metrics": rows}
        record = json.dumps(_as_json(self._record | progress), indent=2, allow_nan=False)
        # Drawing may take longer than a short epoch: it gets a fiftieth of the time, and is done at the end anyway.
        ends = self._record["attempts"][-1]["outcome"] != "running"
        recorded = sum(len(history.get_metric_values(name)) for name in history.get_metric_names())
        if rows and recorded != self._drawn and (ends or self._pace.is_due):
            with self._pace.measured():
                self._picture = _curves(trainer)
                self._drawn = recorded
        for name, text in (
            ("run.json", record + "\n"),
            ("summary.md", _markdown(json.loads(record))),
            ("summary.html", _page(json.loads(record), self._picture)),
        ):
            with replacing(self.directory / name) as temporary:
                temporary.write_text(text)


def _as_json(value: Any) -> Any:
    """Return a nested value as JSON can hold it: keys as texts, and so what is neither text nor a finite number."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return plain(value)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git() -> dict[str, Any] | None:
    """Return the commit of the current folder's repository, and whether files differ from it."""
    try:
        commit, changes = (
            subprocess.run(["git", *command], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "has_changes": bool(changes)}


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _curves(trainer: Trainer) -> str:
    """Return the plot of the run history as the text of an SVG picture; nothing without matplotlib or numbers."""
    try:
        figure = trainer.run_history.plot()  # type: ignore[attr-defined]
    except (ImportError, ValueError, AttributeError):
        return ""
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return base64.b64encode(picture.getvalue()).decode()


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    git = record["git"]
    commit = "none" if git is None else git["commit"] + (", with changes" if git["has_changes"] else "")
    progress = record["progress"]
    return [
        ("Outcome", record["attempts"][-1]["outcome"]),
        (
            "Progress",
            f"epoch {progress['epochs_completed']}, update {progress['update']}, {progress['samples']} samples",
        ),
        ("Model", record["model"]),
        ("Device", f"{record['device']}, {record['processes']} process(es) on {record['host']}"),
        ("Command", " ".join(record["command"])),
        ("Folder", record["folder"]),
        ("Git commit", commit),
        ("Versions", ", ".join(f"{name} {number}" for name, number in record["versions"].items())),
    ]


def _tables(record: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables of a summary: their title, their columns and their rows."""
    columns = list(dict.fromkeys(name for row in record["metrics"] for name in row))
    metrics = [[format_metric(row.get(name, "")) for name in columns] for row in record["metrics"]]
    attempts = [[a["started"], a.get("ended", ""), str(a["from_update"]), a["outcome"]] for a in record["attempts"]]
    config = [[name, format_metric(value)] for name, value in record["config"].items()]
    return [
        ("Metrics", columns, metrics),
        ("Attempts", ["started", "ended", "from update", "outcome"], attempts),
        ("Configuration", ["name", "value"], config),
    ]


def _markdown(record: dict[str, Any]) -> str:
    def cells(values: list[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |\n"

    text = "# Training run\n\n" + "".join(f"- **{name}**: {value}\n" for name, value in _facts(record))
    for title, columns, rows in _tables(record):
        if rows:
            text += (
                f"\n## {title}\n\n" + cells(columns) + "|" + "---|" * len(columns) + "\n" + "".join(map(cells, rows))
            )
    trace = record["attempts"][-1].get("traceback")
    return text + (f"\n## Error\n\n```\n{trace}```\n" if trace else "")


_STYLE = """
:root { color-scheme: light dark; --line: #d8dce2; --soft: #6b7280; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f47; --soft: #9aa3af; --card: #22262c; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
img { width: 100%; height: auto; background: white; border: 1px solid var(--line); border-radius: 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
pre { background: var(--card); padding: 1rem; overflow-x: auto; border-radius: 6px; }
"""


def _page(record: dict[str, Any], curves: str) -> str:
    escape = html.escape
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(record))
    parts = [f"<h1>Training run</h1><dl>{facts}</dl>"]
    trace = record["attempts"][-1].get("traceback")
    if trace:
        parts.append(f"<h2>Error</h2><pre>{escape(trace)}</pre>")
    if curves:
        source = f"data:image/svg+xml;base64,{curves}"
        parts.append(f'<h2>Curves</h2><img alt="Curves of all metrics over the epochs" src="{source}">')
    elif record["metrics"]:
        parts.append(f"<p>For curves: <code>{escape(install_command('plot', 'matplotlib'), quote=False)}</code></p>")
    for title, columns, rows in _tables(record):
        if rows:
            head = "".join(f"<th>{escape(name)}</th>" for name in columns)
            body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            parts.append(f'<h2>{title}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Training run</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
