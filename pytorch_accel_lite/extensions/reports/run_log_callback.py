"""A record of a run: its setup, its results, and the command to repeat it."""

from __future__ import annotations

import base64
import inspect
import json
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.checkpoint import folder_path, write_text
from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_dict, check_text, optional, warn_outside
from pytorch_accel_lite.extension_tools.modules_and_devices import class_of
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    TrainerOptimizer,
    parts_of_optimizer,
    schedulers_in,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import in_notebook
from pytorch_accel_lite.extensions.plots import NothingToPlotError, svg_panels
from pytorch_accel_lite.extensions.reports.run_page import ShownPicture, pages, shown_outputs
from pytorch_accel_lite.extensions.reports.show_outputs_callback import ShowOutputsCallback
from pytorch_accel_lite.extensions.reports.time_budget import TimeBudget
from pytorch_accel_lite.tracking import InMemoryRunHistory
from pytorch_accel_lite.utils import as_json, format_metric

_PACKAGES = ("pytorch-accel-lite", "torch", "accelerate", "torchmetrics", "numpy", "timm", "transformers")


class RunLogCallback(TrainerCallback):
    """Keep a record of a run: ``run.json`` for programs, ``summary.md`` and ``summary.html`` for people.

    The record covers the results (duration, outcome, best and final metrics, all metrics of all epochs), the setup
    (model, optimizer, schedule, configuration), the environment (versions, device, host, git commit if run in a
    repository), and the commands to repeat and resume the run. The page is a single file that includes the curves
    (extra ``plot``; without it, only tables) and adapts to dark and light screens and to phones.

    The files are written at the start and the end of the run. After epochs they are replaced, atomically, as long as
    writing takes less than a fiftieth of the time. Resuming a run adds an attempt to its record; a new run in the same
    directory replaces it.

    Args:
        directory: where the files are written
        config: your own hyper-parameters, shown with the run's configuration
        name: heading of the page; defaults to the name of the directory, or for ``run_log`` or ``log``, of the
            directory above it
    """

    affects_training = False

    def __init__(
        self,
        directory: str | os.PathLike[str] = "run_log",
        config: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.directory = folder_path("directory", directory)
        self.config = check_dict("config", config)
        folder = self.directory.resolve()
        named = folder.parent if folder.name in ("log", "run_log") else folder
        self.name = optional(check_text, "name", name) or named.name
        self._record: dict[str, Any] = {}
        self._start = time.monotonic()
        self._budget = TimeBudget(1 / 50, expected=0.5)

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        """Check that no other callback writes to the directory."""
        request.claim_path(self, "directory", self.directory, "page of the run")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Write the setup of the run."""
        trainer.ranks.run_together(lambda: self._begin(trainer), only_first=True)

    def on_processes_changed(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Continue the record on the process that is now rank 0."""
        if trainer.is_running and trainer.accelerator.is_main_process and not self._record:
            self._begin(trainer)

    def _begin(self, trainer: TrainerLike) -> None:
        self._start = time.monotonic()
        self._budget = TimeBudget(1 / 50, expected=0.5)
        attempts = self._earlier_attempts() if trainer.progress.update else []
        configuration = {} if trainer.run_config is None else trainer.run_config.to_dict()
        request = trainer.run.request
        self._record = {
            "name": self.name,
            "command": launch_command(trainer),
            "folder": os.getcwd(),
            "states": [os.fspath(source.save_dir) for source in request.state_sources if hasattr(source, "save_dir")],
            "host": socket.gethostname(),
            **setup_of(trainer, {**configuration, **self.config}),
            "directions": request.metrics.directions,
            "attempts": [*attempts, {"started": _now(), "from_update": trainer.progress.update, "outcome": "running"}],
        }
        self._write(trainer)

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        path = self.directory / "run.json"
        try:
            attempts: list[dict[str, Any]] = json.loads(path.read_bytes())["attempts"]
            for attempt in attempts:
                texts = attempt["started"], attempt["outcome"]  # the page shows these
                attempt["outcome"] = "killed" if "running" in texts else attempt["outcome"]
            return [*attempts]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            warn_outside(
                f"{os.fspath(path)!r} does not hold the record of a run ({type(error).__name__}: {error}), so the "
                "earlier attempts of the resumed run are lost. It is replaced."
            )
            return []

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Write the results so far if there is time for it."""
        if trainer.accelerator.is_main_process and self._budget.is_due:
            self._write(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Write the results of an evaluation during or after the run."""
        if self._record and trainer.accelerator.is_main_process and (not self._is_running or self._budget.is_due):
            self._write(trainer)

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        """Write the error that ends the run."""
        outcome, *_ = f"failed: {type(exception).__name__}: {exception}".splitlines()
        self._end(trainer, outcome[:200], "".join(traceback.format_exception(exception)))

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Write how the run has ended."""
        reason = trainer.run.end.reason
        self._end(trainer, "finished" if reason is None else f"stopped: {reason}")

    def _end(self, trainer: TrainerLike, outcome: str, trace: str | None = None) -> None:
        if not trainer.accelerator.is_main_process or not self._is_running:  # or on_exception has recorded an error
            return
        attempt = self._record["attempts"][-1]
        attempt |= {"ended": _now(), "seconds": self._seconds(), "outcome": outcome}
        attempt |= {"traceback": trace} if trace else {}
        self._write(trainer)

    @property
    def _is_running(self) -> bool:
        return bool(self._record) and self._record["attempts"][-1]["outcome"] == "running"

    def _seconds(self) -> float:
        return round(time.monotonic() - self._start, 2)

    def _write(self, trainer: TrainerLike) -> None:
        if self._is_running:
            self._record["attempts"][-1]["seconds"] = self._seconds()
        history = trainer.run_history
        rows = history.rows() if hasattr(history, "rows") else []
        sources = [callback for callback in trainer.callback_handler if isinstance(callback, ShowOutputsCallback)]
        self._record |= {
            "progress": trainer.progress.state_dict(),
            "metrics": rows,
            "goodput": trainer.run.goodput.to_dict(),
            "outputs": sorted(chain.from_iterable(each.shown for each in sources), key=itemgetter("update")),
        }
        with self._budget.measured():
            text = json.dumps(as_json(self._record), indent=2, allow_nan=False)
            curves = _curves(trainer) if rows else []
            shown = pages(json.loads(text), curves, self._pictures())
            for name, content in {"run.json": text + "\n", **shown}.items():
                write_text(self.directory / name, content)

    def _pictures(self) -> dict[str, ShownPicture]:
        """Return the images among the outputs, by path. Images whose files are gone are left out."""
        pictures = {}
        for path in chain.from_iterable(each.get("pictures", {}).values() for each in shown_outputs(self._record)):
            with suppress(OSError):
                data = base64.b64encode(Path(path).read_bytes()).decode()
                link = quote(os.path.relpath(path, self.directory))
                pictures[path] = ShownPicture(f"data:image/png;base64,{data}", link)
        return pictures


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def setup_of(trainer: TrainerLike, config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a record that describes the training, its settings, and its hardware and software."""
    return {
        "git": git_commit(),
        "versions": versions(),
        "processes": trainer.ranks.world_size,
        "device": device_name(trainer),
        **describe_parts(trainer),
        "config": config,
    }


def git_commit() -> dict[str, Any] | None:
    """Return the commit of the current directory's repository, and whether tracked files have changes."""
    try:
        commit, changes = (
            subprocess.run(["git", *command], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "has_changes": bool(changes)}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter to training."""
    result = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def _curves(trainer: TrainerLike) -> list[str]:
    """Return the curves of the run history as SVG, or an empty list without matplotlib or numbers."""
    history = trainer.run_history
    if not isinstance(history, InMemoryRunHistory):
        return []
    try:
        return svg_panels(history.curves(), history.directions)
    except (ImportError, NothingToPlotError):
        return []


def device_name(trainer: TrainerLike) -> str:
    """Return the device, with the name of a GPU."""
    device = trainer.device
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def launch_command(trainer: TrainerLike) -> list[str] | None:
    """Return the command line that started this program, or ``None`` in a notebook.

    A launched process knows only its own command line. The command line of its launcher is reconstructed for torchrun.
    """
    if in_notebook():
        return None
    if trainer.ranks.world_size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return sys.orig_argv
    names = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    program = sys.orig_argv[1:]
    program = program[program[:1] == ["-u"] :]
    return [*variables, "torchrun", "--standalone", "--nproc_per_node", str(trainer.ranks.world_size), *program]


def describe_parts(trainer: TrainerLike) -> dict[str, str]:
    """Return one-line descriptions of the model, the loss, the optimizer and the schedule."""
    loss = trainer.loss_func
    single: TrainerOptimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    optimizers = parts_of_optimizer(trainer.optimizer) or {"": single}
    schedulers = {name: getattr(part, "scheduler", part) for name, part in schedulers_in(trainer.scheduler).items()}
    schedules = {name: _describe_scheduler(part) for name, part in schedulers.items() if part is not None}
    described = {name: describe_optimizer(part) for name, part in optimizers.items() if part is not None}
    return {
        "model": describe_model(trainer),
        "loss": getattr(loss, "__name__", type(loss).__name__) if loss is not None else "computed by the training step",
        "optimizer": _by_name(described) or "none of its own",
        "schedule": _by_name(schedules) or "none: the learning rate is constant",
    }


def describe_model(trainer: TrainerLike) -> str:
    """Return the class of the model and its number of parameters."""
    model = trainer.get_model(keep_torch_compile=False)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters() if not isinstance(p, UninitializedParameter)]
    trainable = sum(size for size, requires_grad in sizes if requires_grad)
    total = sum(size for size, _ in sizes)
    count = f"{total:,} parameters" + (f", {trainable:,} of them trainable" if trainable != total else "")
    return f"{class_of(model).__name__}, {count}"


def _by_name(described: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {text}" if name else text for name, text in described.items())


def describe_optimizer(optimizer: Any) -> str:
    """Return an optimizer's class, its initial learning rate, and its other settings that differ from the defaults."""
    groups = optimizer.param_groups
    initial = [group.get("initial_lr", group.get("lr")) for group in groups]
    rates = [float(rate) for rate in initial if rate is not None]  # some optimizers choose their rate themselves
    settings = []
    if rates:
        lowest, highest = format_metric(min(rates)), format_metric(max(rates))
        settings.append(f"lr={lowest}" if lowest == highest else f"lr={lowest} to {highest}")
    settings += _changed_arguments(optimizer, {name: value for name, value in groups[0].items() if name != "lr"})
    count = f", {len(groups)} parameter groups" if len(groups) > 1 else ""
    return f"{type(optimizer).__name__}({', '.join(settings)}){count}"


def _describe_scheduler(scheduler: Any) -> str:
    """Return a scheduler's class, and its settings that differ from the defaults, if its attributes show them."""
    values = {name: getattr(scheduler, name, None) for name in inspect.signature(type(scheduler)).parameters}
    hidden = ("last_epoch", "verbose")  # the position, and a setting that torch has dropped
    shown = {
        name: value for name, value in values.items() if isinstance(value, (int, float, str)) and name not in hidden
    }
    settings = ", ".join(_changed_arguments(scheduler, shown))
    return f"{type(scheduler).__name__}({settings})" if settings else type(scheduler).__name__


def _changed_arguments(instance: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the arguments of an instance's class whose values differ from the defaults."""
    parameters = inspect.signature(type(instance)).parameters
    return [
        f"{name}={format_metric(value)}"
        for name, value in values.items()
        if name in parameters and name != "params" and value != parameters[name].default
    ]
