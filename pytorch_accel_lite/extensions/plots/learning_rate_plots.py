"""Plots of learning rates: a range test, and a preview of a schedule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytorch_accel_lite.extension_tools.optimizers_and_gradients import CreateScheduler
from pytorch_accel_lite.extensions.plots.figure_style import (
    INK,
    Axes,
    choose_scale,
    finish,
    line_style,
    new_figure,
    save,
)
from pytorch_accel_lite.extensions.schedule_preview import schedule_values
from pytorch_accel_lite.schedulers import ScheduleName

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_range_test(
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggestion: float | None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Plot the losses of a learning rate range test."""
    labels = ["loss of each update", "smoothed"]
    figure = new_figure((6.4, 4))
    axis: Axes = figure.add_subplot()
    colour = line_style(0)["color"]
    handles = [axis.plot(lrs, losses, color=colour, alpha=0.35, linewidth=1)[0]]
    handles += axis.plot(lrs, smoothed, color=colour, linewidth=2)
    if suggestion is not None:
        labels.append(f"suggestion: {suggestion:.2g}")
        handles.append(axis.axvline(suggestion, color=line_style(1)["color"], linestyle="--"))
    low = min(smoothed)
    high = max(smoothed)
    axis.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))  # single losses may be outliers
    axis.set_xscale("log")
    axis.set(xlabel="learning rate", ylabel="loss")
    finish(axis, "learning rate range test", labels, handles)
    return save(figure, path)


def plot_schedule(
    create_scheduler_fn: ScheduleName | CreateScheduler,
    num_updates: int,
    lr: float | Sequence[float] = 1.0,
    num_epochs: int = 1,
    path: str | os.PathLike[str] | None = None,
    *,
    warmup_steps: float = 0,
) -> Figure:
    """Plot the learning rates of a schedule, without training.

    Args:
        create_scheduler_fn: as for ``train()``; placeholders in a ``functools.partial`` are resolved
        num_updates: number of optimizer updates in the run
        lr: learning rate of the optimizer, or one for each parameter group
        num_epochs: number of epochs in the run, for placeholders that count them and for timm's schedulers in epochs;
            if there are several, their ends are marked
        path: where to save the picture; ``None`` does not save it
        warmup_steps: as for ``train()``, for a schedule by name
    """
    curves = schedule_values(create_scheduler_fn, num_updates, lr, num_epochs, warmup_steps)
    labels = [f"group {number}" for number in range(len(curves))] if len(curves) > 1 else []
    figure = new_figure((6.4, 3.6))
    axis: Axes = figure.add_subplot()
    updates = range(1, num_updates + 1)
    handles = [axis.plot(updates, values, **line_style(number))[0] for number, values in enumerate(curves)]
    if 1 < num_epochs <= 30:
        for epoch in range(1, num_epochs):
            axis.axvline(num_updates * epoch / num_epochs, color=INK, linewidth=0.6, linestyle=":")
    choose_scale(axis, curves)
    axis.set(xlabel="update" if num_epochs == 1 else "update (dotted: ends of epochs)", ylabel="learning rate")
    finish(axis, "learning rate schedule", labels, handles)
    return save(figure, path)
