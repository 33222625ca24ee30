"""What a search over settings found: its trials, their curves, and how each setting matters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.environment import import_extra
from pytorch_accel_lite.plotting.figures import COLOURS, INK, choose_scale, finish, new_figure, save
from pytorch_accel_lite.plotting.panels import NothingToPlotError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Trials = Sequence[Any]

_WIDTH, _HEIGHT = 3.6, 2.9  # inches of a panel
_COMPLETE, _PRUNED, _BEST = COLOURS[0], COLOURS[6], COLOURS[1]


def plot_search(study: Any, path: str | os.PathLike[str] | None = None, metric: str = "value") -> Figure:
    """Plot an Optuna study: the value of each trial, their curves over the epochs, and the values by each setting.

    Trials that were pruned are shown with the last value that they reported. Needs the extra ``plot``.

    :param study: a study with one objective
    :param path: where to save the picture; ``None`` does not save it
    :param metric: name of the objective, for the axes
    :raises NothingToPlotError: if no trial has been completed
    """
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    if not complete:
        raise NothingToPlotError("Nothing to plot: no trial of the study has been completed yet.")
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED" and trial.intermediate_values]
    maximises = study.direction.name == "MAXIMIZE"
    settings = dict.fromkeys(name for trial in complete for name in trial.params)
    panels: list[Callable[[Any], None]] = [lambda axis: _draw_trials(axis, complete, pruned, maximises)]
    if any(len(trial.intermediate_values) > 1 for trial in complete):
        panels.append(lambda axis: _draw_curves(axis, complete, pruned, study.best_trial))
    panels += [partial(_draw_setting, name=name, complete=complete, pruned=pruned) for name in settings]
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    rows = -(-len(panels) // columns)
    figure = new_figure((columns * _WIDTH, rows * _HEIGHT))
    for number, draw in enumerate(panels):
        axis = figure.add_subplot(rows, columns, number + 1)
        draw(axis)
        axis.set_ylabel(metric)
    return save(figure, path)


def _value(trial: Any) -> float:
    """Return the value of a trial; of one that was pruned, the last that it reported."""
    return float(trial.intermediate_values[max(trial.intermediate_values)] if trial.value is None else trial.value)


def _draw_trials(axis: Any, complete: Trials, pruned: Trials, maximises: bool) -> None:
    best = list(accumulate(map(_value, complete), max if maximises else min))
    numbers = [trial.number for trial in complete]
    (line,) = axis.plot(numbers, best, drawstyle="steps-post", color=_BEST, linewidth=1.4)
    handles = [line, *_scatter(axis, lambda trial: float(trial.number), complete, pruned)]
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("trial")
    finish(axis, "trials", ["best so far", "completed", "pruned"][: len(handles)], handles)


def _draw_curves(axis: Any, complete: Trials, pruned: Trials, best: Any) -> None:
    kinds = (("pruned", pruned, _PRUNED, 1.0), ("completed", complete, _COMPLETE, 1.0), ("best", [best], _BEST, 2.0))
    handles, labels = [], []
    for label, trials, colour, width in kinds:
        for trial in trials:
            epochs, values = zip(*sorted(trial.intermediate_values.items()), strict=True)
            (line,) = axis.plot(epochs, values, color=colour, linewidth=width, marker="o", markersize=2.5)
        if trials:
            handles.append(line)
            labels.append(label)
    choose_scale(axis, [list(trial.intermediate_values.values()) for trial in [*complete, *pruned]])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("epoch")
    finish(axis, "curves", labels, handles)


def _draw_setting(axis: Any, name: str, complete: Trials, pruned: Trials) -> None:
    complete, pruned = ([trial for trial in trials if name in trial.params] for trials in (complete, pruned))
    space = complete[0].distributions[name]
    choices = getattr(space, "choices", None)

    def position(trial: Any) -> float:
        value = trial.params[name]
        return choices.index(value) if choices else value  # type: ignore[no-any-return]

    _scatter(axis, position, complete, pruned)
    if choices:
        axis.set_xticks(range(len(choices)), list(map(str, choices)))
        axis.set_xlim(-0.5, len(choices) - 0.5)
    elif getattr(space, "log", False):
        axis.set_xscale("log")
        if space.high < 100 * space.low:  # few powers of ten to label
            ticker = import_extra("matplotlib.ticker", "plot", "plot_search()")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
    finish(axis, name, [])


def _scatter(axis: Any, position: Callable[[Any], float], complete: Trials, pruned: Trials) -> list[Any]:
    """Draw the values of trials, those that were pruned hollow; return the handles for a legend.

    :param position: returns the horizontal position of a trial
    """
    handles = []
    for trials, style in ((complete, {"color": _COMPLETE}), (pruned, {"fc": "none", "ec": INK, "alpha": 0.6})):
        if trials:
            x, y = list(map(position, trials)), list(map(_value, trials))
            handles.append(axis.scatter(x, y, s=26, zorder=3, linewidths=1.2, **style))
    choose_scale(axis, [list(map(_value, [*complete, *pruned]))])
    return handles
