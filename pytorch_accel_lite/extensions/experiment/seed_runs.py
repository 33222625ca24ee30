"""Runs of a setting under a seed: trained in this process, or in new ones."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed

from pytorch_accel_lite.callbacks import SaveBestModelCallback, TrainerCallback
from pytorch_accel_lite.checkpoint import no_link
from pytorch_accel_lite.extensions.experiment.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.results import (
    added_callbacks,
    as_number,
    check_is_new,
    read_finished,
    train_to_end,
    write_json,
)
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import format_metric, result_of_first

#: What a function that describes a setting returns: an experiment, or a trainer and the arguments of its ``train``.
Made = Experiment | tuple[Trainer, Mapping[str, Any]]

#: The file with the output of a run in a new process.
OUTPUT = "output.txt"
_RESULT = "result.json"


class NeededMetric(TrainerCallback):
    """Makes a run that would not record a metric raise an error at its start."""

    affects_training = False

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def configure_run(self, trainer: Any, request: Any, **kwargs: Any) -> None:
        """Require the metric."""
        if request.kind == "training":
            request.metrics.require(f"metric={self.metric!r}", self.metric)


class SeedRun(NamedTuple):
    """One setting under one seed."""

    make: Callable[[int, Path], Made]
    name: str
    seed: int
    folder: Path
    metric: str

    def value_in(self, result: Mapping[str, Any]) -> float:
        """Return the value of the metric.

        Raises:
            ValueError: if the metric is not a finite number
        """
        value = result["metrics"].get(self.metric)
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(
                f"metric={self.metric!r} is {value} in {self.name} under seed {self.seed}, but only finite numbers can "
                f"be compared. The metrics of this run are {', '.join(result['metrics'])}."
            )
        return value

    def train(self, seen: weakref.WeakSet[Any]) -> dict[str, Any]:
        """Train, and return the result, which is also written to the folder.

        Args:
            seen: the trainers and models of other runs
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        set_seed(self.seed)
        made: Any = self.make(self.seed, self.folder)
        if isinstance(made, Experiment):
            made = made.trainer, {"train_dataset": made.train_dataset, **made.train_arguments}
        source = f"{self.name}({self.seed}, {os.fspath(self.folder)!r})"
        if not isinstance(made, tuple) or len(made) != 2:
            kind = type(made).__name__
            raise TypeError(f"{source} returned a {kind}, not a trainer and a dict of the arguments of its train().")
        trainer, arguments = made
        with trainer:
            check_is_new(trainer, seen, source, "an earlier run, which has been trained already")
            if trainer.seed != self.seed:
                raise ValueError(
                    f"{source} returned a trainer with seed={trainer.seed}, so both settings would see the data in "
                    "different orders. Pass the seed to it: Trainer(..., seed=seed)."
                )
            trainer.print(f"{self.name} under seed {self.seed}")
            with added_callbacks(trainer, NeededMetric(self.metric)):
                train_to_end(trainer, self.folder, "call compare_seeds again to continue", **arguments)
            directions = trainer.current_run.request.metrics.directions
            result = {"metrics": _final_metrics(trainer), "greater_is_better": {**directions}}
            trainer.ranks.run_together(lambda: write_json(self.folder / _RESULT, result), only_first=True)
        self.value_in(result)
        return result


def _final_metrics(trainer: Trainer) -> dict[str, float | str]:
    """Return the newest value of each metric, or if the best model was loaded at the end, its values."""
    savers = [each for each in trainer.callbacks if isinstance(each, SaveBestModelCallback)]
    best = next((each for each in savers if each.load_saved_checkpoint and each.best_metric is not None), None)
    metrics: dict[str, Any] = {}
    history: Any = trainer.run_history
    for row in history.rows():
        if best is None or row["epoch"] <= best.best_metric_epoch:
            metrics |= row
    if best is not None:  # may be from an evaluation within an epoch, whose row has only its last evaluation
        watched = history[best.watch_metric]
        place = watched.index(best.best_metric)
        metrics |= {name: values[place] for name, values in history.to_dict().items() if len(values) == len(watched)}
    return {name: as_number(value) for name, value in metrics.items() if name != "epoch"}


def results_of(runs: list[SeedRun], processes: int | None) -> list[dict[str, Any]]:
    """Return the results of runs. Runs that are not finished are trained first."""
    results: dict[Path, Any] = result_of_first(lambda: {it.folder: read_finished(it.folder / _RESULT) for it in runs})
    missing = [run for run in runs if results[run.folder] is None]
    if processes is None:
        seen: weakref.WeakSet[Any] = weakref.WeakSet()
        for run in missing:
            results[run.folder] = run.train(seen)
    else:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = [*islice(cycle(gpus.split(",")), processes)]
        with ThreadPoolExecutor(processes) as threads:
            trained = threads.map(partial(_train_in_new_process, devices=devices), missing)
            results |= {run.folder: result for run, result in zip(missing, trained, strict=True)}
    return [results[run.folder] for run in runs]


def _train_in_new_process(run: SeedRun, devices: list[str]) -> dict[str, Any]:
    """Train a run in a new process, which has its own precision and other process-wide state.

    Args:
        devices: the GPUs that no run uses at present
    """
    device = devices.pop()
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            result = pool.submit(_train_quietly, run, device).result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"The process of {run.name} under seed {run.seed} was killed, perhaps for memory, or could not begin. What "
            f"it printed is in {run.folder / OUTPUT}. Call compare_seeds again to continue."
        ) from error
    finally:
        devices.append(device)
    print(f"{run.name} under seed {run.seed}: {run.metric} {format_metric(run.value_in(result))}")
    return result


def _train_quietly(run: SeedRun, device: str) -> dict[str, Any]:
    """Train a run on one of the GPUs, if there are any, with its output in a file."""
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # before anything uses the GPUs
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / OUTPUT, "a", opener=no_link) as output, redirect_stdout(output), redirect_stderr(output):
        return run.train(weakref.WeakSet())
