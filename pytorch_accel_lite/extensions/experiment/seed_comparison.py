"""Comparing two settings under several seeds: whether the difference of a metric is real or chance."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pytorch_accel_lite.checkpoint import folder_path
from pytorch_accel_lite.extensions.experiment.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.results import (
    Results,
    as_one_line,
    check_is_same,
    read_json,
    text_table,
    write_json,
)
from pytorch_accel_lite.extensions.experiment.run_folders import settings_of_run
from pytorch_accel_lite.extensions.experiment.seed_runs import OUTPUT, Made, SeedRun, results_of
from pytorch_accel_lite.utils import as_json, format_metric, format_value, import_extra, result_of_first

Setting = str | os.PathLike[str] | Callable[[int, Path], Made]

_SETTINGS = "settings.json"
_COMPARISON = "comparison.json"


class MeanDifference(NamedTuple):
    """An interval for the mean of a difference, by a t-test.

    Args:
        low: lower end of the interval
        high: upper end of the interval
        p_value: how probable a difference at least as large would be if the settings did not differ
    """

    low: float
    high: float
    p_value: float


@dataclass(frozen=True, repr=False)
class SeedComparison(Results):
    """Two settings under the same seeds, as returned by ``compare_seeds()``. Printing it shows a table.

    All differences are the second setting minus the first.

    Args:
        names: names of both settings
        metric: the metric that is compared
        greater_is_better: whether greater values of it are better; ``None`` if unknown
        seeds: the seeds
        values: the values of the metric under each seed, for both settings
        confidence: confidence level of the intervals
        settings: the settings that differ, with both values; empty unless ``a`` and ``b`` are files
    """

    names: tuple[str, str]
    metric: str
    greater_is_better: bool | None
    seeds: list[int]
    values: tuple[list[float], list[float]]
    confidence: float
    settings: dict[str, tuple[Any, Any]]

    @property
    def differences(self) -> list[float]:
        """The difference under each seed."""
        return [second - first for first, second in zip(*self.values, strict=True)]

    @property
    def difference(self) -> float:
        """The mean of the differences."""
        return statistics.fmean(self.differences)

    @property
    def paired(self) -> MeanDifference:
        """The interval of the mean difference, from the differences under each seed (paired t-test)."""
        return self._interval("ttest_rel")

    @property
    def unpaired(self) -> MeanDifference:
        """The interval that the difference would have if the runs had no seeds in common (Welch's t-test)."""
        return self._interval("ttest_ind", equal_var=False)

    def _interval(self, test: str, **options: Any) -> MeanDifference:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # SciPy warns if all differences are the same
            result = getattr(_statistics(), test)(*reversed(self.values), **options)
            low, high = result.confidence_interval(self.confidence)
        return MeanDifference(float(low), float(high), float(result.pvalue))

    @property
    def gain(self) -> float:
        """The width of the unpaired interval divided by the width of the paired interval."""
        (low, high, _), (unpaired_low, unpaired_high, _) = self.paired, self.unpaired
        return (unpaired_high - unpaired_low) / (high - low) if high > low else math.inf

    @property
    def conclusion(self) -> str:
        """``"greater"`` or ``"smaller"`` for the second setting, ``"undecided"``, or ``"identical"`` in all runs."""
        if not any(self.differences):
            return "identical"
        low, high, _ = self.paired
        return "greater" if low > 0 else "smaller" if high < 0 else "undecided"

    @property
    def better(self) -> str | None:
        """The name of the better setting; ``None`` if undecided, or if it is unknown which values are better."""
        if self.conclusion not in ("greater", "smaller") or self.greater_is_better is None:
            return None
        return self.names[self.greater_is_better == (self.conclusion == "greater")]

    @property
    def verdict(self) -> str:
        """The conclusion in words."""
        first, second = self.names
        if self.conclusion == "identical":
            return f"No difference: what differs between {first} and {second} leaves {self.metric} exactly as it is."
        low, high, _ = self.paired
        interval = f"{self._level} interval from {low:.3g} to {high:.3g}"
        if self.conclusion == "undecided":
            return (
                f"Undecided: the difference of {self.metric} may be chance ({interval}). If it is real, more seeds can "
                f"show it, such as {2 * len(self.seeds)}; the runs that are finished are kept."
            )
        by = f"by {abs(self.difference):.3g} ({interval})" + (f"; {self.better} is better" if self.better else "")
        return f"Real: {self.metric} is {self.conclusion} in {second} than in {first}, {by}."

    @property
    def _level(self) -> str:
        return f"{100 * self.confidence:.4g}%"

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each seed, with ``seed``, the values of both settings, and ``difference``."""
        columns = zip(self.seeds, *self.values, self.differences, strict=True)
        return [dict(zip(("seed", *self.names, "difference"), row, strict=True)) for row in columns]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and properties in JSON types: the contents of ``comparison.json``."""
        names = ("conclusion", "better", "verdict", "difference", "differences", "gain")
        intervals = {"paired": self.paired._asdict(), "unpaired": self.unpaired._asdict()}
        content: dict[str, Any] = as_json({**vars(self), **intervals, **{name: getattr(self, name) for name in names}})
        return content

    def __repr__(self) -> str:
        cells = [["seed", *map(str, self.seeds), "mean", "deviation"]]
        for name, column in zip((*self.names, "difference"), (*self.values, self.differences), strict=True):
            summarised = [*column, statistics.fmean(column), statistics.stdev(column)]
            cells.append([name, *map(format_value, summarised)])
        tests = [["difference", "paired", "unpaired"], [f"{self._level} interval"], ["p-value"]]
        for low, high, p_value in (self.paired, self.unpaired):
            tests[1].append(f"{low:.3g} to {high:.3g}")
            tests[2].append(f"{p_value:.3g}")
        title = f"{self.metric} of {self.names[0]} and {self.names[1]} under {len(self.seeds)} seeds"
        differing = [f"  {key}: {format_metric(a)} -> {format_metric(b)}" for key, (a, b) in self.settings.items()]
        without = [f"Without pairing, the interval is {self.gain:.3g} times as wide."] * math.isfinite(self.gain)
        tables = [*text_table(cells), "", *text_table(tests)]
        return "\n".join([title, *differing, "", *tables, "", *without, self.verdict])


def _statistics() -> ModuleType:
    return import_extra("scipy.stats", "stats", "compare_seeds()")


def compare_seeds(
    a: Setting,
    b: Setting,
    *,
    seeds: int | Sequence[int] = 5,
    metric: str = "eval_loss_epoch",
    overrides: Mapping[str, Any] | Sequence[str] = (),
    confidence: float = 0.95,
    processes: int | None = None,
    save_dir: str | os.PathLike[str] = "seed_comparison",
) -> SeedComparison:
    """Train two settings under the same seeds, and test whether the difference of a metric is real or chance.

    Under a seed, both settings have the same initial weights, data order and augmentation, unless these are what
    differs. The runs are therefore paired, which makes the interval of the difference narrower.

    The value of a run is the metric after its last epoch, or with a ``SaveBestModelCallback`` the metric of its best
    model. A second call trains the runs that are missing; a run that was interrupted resumes from its training state if
    it saves training states. If a launcher started several processes, call this function on each.

    Args:
        a: the path of an experiment file; or a function that is called with a seed and the folder of the run, and
            returns an ``Experiment``, or a new trainer with this seed and the arguments of its ``train``: ``return
            trainer, {"train_dataset": data, "num_epochs": 3}``
        b: the setting to compare ``a`` with, in the same form
        seeds: number of seeds, which count from 0; or a list of seeds
        metric: name of the metric in the run history
        overrides: values that override those of both files, as in ``Experiment.from_file()``
        confidence: confidence level of the intervals
        processes: how many runs are trained at the same time, each in a new process and on one of the GPUs in turn;
            functions must then be defined in a module, and the output of a run is in ``output.txt`` in its folder. By
            default all runs are trained in this process.
        save_dir: where everything is written: the folders of the runs, as in ``a/seed-0``, and ``comparison.json``

    Raises:
        ValueError: before training, if an argument is wrong, or both settings are the same; if ``save_dir`` has runs of
            other settings; if no run records the metric, or its value is not finite
        ExperimentError: if something in a file is wrong
        ImportError: if SciPy is not installed (extra ``stats``)
        RunPausedError: if a callback pauses a training, such as a ``TimeLimitCallback``
    """
    _statistics()  # so that a missing SciPy is an error before any training
    numbers = _check_seeds(seeds)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be between 0 and 1, such as 0.95.")
    if processes is not None:
        _check_processes(processes, (a, b))
    if overrides and callable(a) and callable(b):
        raise ValueError(f"overrides={overrides!r} are those of files, but a and b are functions. Omit them.")
    folder = folder_path("save_dir", save_dir)
    makes: list[Any] = [_FromFile(x, overrides) if isinstance(x, (str, os.PathLike)) else x for x in (a, b)]
    about = {part: _settings_of(part, make, numbers[0], folder) for part, make in zip("ab", makes, strict=True)}
    first, second = about.values()
    differing = {key: (first.get(key), second.get(key)) for key in first | second if first.get(key) != second.get(key)}
    if not differing:
        raise ValueError(
            f"a={a!r} and b={b!r} are the same setting, so every difference would be zero. Let them differ in what is "
            "to be compared."
        )
    result_of_first(partial(_claim, folder, about))
    are_files = all(isinstance(make, _FromFile) for make in makes)
    names = _names_of_settings(makes)
    runs = [
        SeedRun(make, name, seed, folder / part / f"seed-{seed}", metric)
        for seed in numbers
        for make, name, part in zip(makes, names, "ab", strict=True)
    ]
    results = results_of(runs, processes)
    values = [run.value_in(result) for run, result in zip(runs, results, strict=True)]
    direction = results[0]["greater_is_better"].get(metric)
    of_both = values[::2], values[1::2]
    comparison = SeedComparison(names, metric, direction, numbers, of_both, confidence, differing if are_files else {})
    result_of_first(lambda: write_json(folder / _COMPARISON, comparison.to_dict(), indent=2))
    return comparison


# ------------------------------------------------------------------------------------------------------ arguments


def _check_seeds(seeds: Any) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds) if isinstance(seeds, Sequence) else []
    is_valid = all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in numbers)
    if not is_valid or len({*numbers}) < max(2, len(numbers)):
        raise ValueError(
            f"seeds={seeds!r} must be a number of at least 2, or a list of at least 2 different seeds from 0 on: how "
            "much chance matters shows only in several runs."
        )
    return numbers


def _check_processes(processes: int, settings: tuple[Setting, Setting]) -> None:
    if processes < 1:
        raise ValueError(f"processes={processes!r} must be at least 1, or None to train in this process.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"processes={processes}: a launcher has started the processes already. Omit the argument.")
    try:
        pickle.dumps(settings)
    except Exception as error:
        raise ValueError(
            f"a or b cannot be sent to a new process: {error}. Pass functions of a module, not lambdas or functions "
            "within functions, or leave processes at None."
        ) from error


class _FromFile(NamedTuple):
    """A setting that is described by a file."""

    path: str | os.PathLike[str]
    overrides: Mapping[str, Any] | Sequence[str]

    def __call__(self, seed: int, folder: Path) -> Experiment:
        own = {"trainer.seed": seed, "output_dir": str(folder), "overwrite": "true"}
        if isinstance(self.overrides, Mapping):
            return Experiment.from_file(self.path, {**self.overrides, **own})
        return Experiment.from_file(self.path, [*self.overrides, *(f"--{key}={value}" for key, value in own.items())])


def _settings_of(part: str, make: Any, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of ``a`` or ``b``, as far as they are known."""
    if isinstance(make, _FromFile):
        settings = settings_of_run(make(seed, folder).config, {})
        return {key: value for key, value in settings.items() if key != "trainer.seed"}
    if not callable(make):
        raise ValueError(
            f"{part}={make!r} must be the path of an experiment file, or a function that returns a trainer."
        )
    try:
        inspect.signature(make).bind(seed, folder)
    except TypeError as error:
        raise TypeError(
            f"{part}={make!r} must take two arguments: {error}. Write: def {part}(seed, folder): ..."
        ) from None
    except ValueError:  # a function without a signature
        pass
    return {"function": make}


def _claim(folder: Path, about: dict[str, dict[str, Any]]) -> None:
    """Write both settings into a folder, or check that the runs in the folder were trained with them."""
    path, size = folder / _SETTINGS, int(os.environ.get("WORLD_SIZE", "1"))
    named = {f"{part}.{key}": value for part, settings in about.items() for key, value in settings.items()}
    now = json.loads(json.dumps({**named, "WORLD_SIZE": size}, default=as_one_line))
    if path.exists() and any(file.name != OUTPUT for file in folder.glob("[ab]/*/*")):  # if runs have begun
        check_is_same(folder, read_json(path), now, "runs")
    write_json(path, now)


def _names_of_settings(makes: list[Any]) -> tuple[str, str]:
    """Return a name for each setting: that of its file or function, or ``a`` and ``b`` if these are the same."""
    first, second = (
        Path(make.path).stem if isinstance(make, _FromFile) else getattr(make, "__name__", part)
        for part, make in zip("ab", makes, strict=True)
    )
    return ("a", "b") if first == second else (first, second)
