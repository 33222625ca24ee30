"""Plots show the recorded values and have no side effects."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torchmetrics import R2Score

from pytorch_accel_lite import InMemoryRunHistory, TrainerPlaceholderValues
from pytorch_accel_lite.extending import MONITORS
from pytorch_accel_lite.plotting import plot_schedule
from pytorch_accel_lite.schedulers import schedule_values
from tests.launching import run_code
from tests.small_models import listener, make_data, make_trainer, train


def filled() -> InMemoryRunHistory:
    """Three epochs of two metrics, of which the second is missing in the second epoch, as a trainer fills it."""
    history = InMemoryRunHistory()
    for epoch, accuracy in enumerate([0.5, None, 0.75], start=1):
        history.update_metric("train_loss_epoch", 1 / epoch)
        history.update_metric("eval_loss_epoch", 2 / epoch)
        if accuracy is not None:
            history.update_metric("accuracy", accuracy)
        history._increment_epoch()
    return history


def recorded(**metrics: Any) -> InMemoryRunHistory:
    """A history with a list of values, one an epoch, for each metric."""
    history = InMemoryRunHistory()
    for epoch in range(max(map(len, metrics.values()))):
        for name, values in metrics.items():
            for value in np.atleast_1d(values[epoch]) if epoch < len(values) else ():
                history.update_metric(name, float(value))
        history._increment_epoch()
    return history


def panels(figure: Figure) -> dict[str, Any]:
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def legend(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()] if axis.get_legend() else []


def test_chosen_metrics_alone_are_drawn():
    history = recorded(train_loss_epoch=[1], eval_loss_epoch=[1], accuracy=[1])
    (axis,) = history.plot(metrics=["accuracy"]).axes
    assert axis.get_title(loc="left") == "accuracy"
    assert axis.get_legend() is None


@pytest.mark.extension("metrics")
def test_the_best_epoch_of_an_evaluation_is_marked():
    from pytorch_accel_lite.callbacks import MetricsCallback

    data = make_data(8)
    accuracy = MetricsCallback({"r2": R2Score()})  # of which greater values are better
    trainer = train(make_trainer([accuracy]), epochs=3, eval_dataset=data)
    history = trainer.run_history
    history._metrics |= {"eval_loss_epoch": [0.5, 0.25, math.nan], "r2": [0.1, 0.2, 0.7]}
    drawn = panels(history.plot())
    assert legend(drawn["loss"]) == ["train", "eval: best 0.25 in epoch 2"]
    assert legend(drawn["r2"]) == ["eval: best 0.7 in epoch 3"]
    (ring,) = drawn["loss"].collections
    assert ring.get_offsets().tolist() == [[2, 0.25]]


def test_curves_that_share_a_panel_look_alike_in_all_panels():
    names = [f"set{number}" for number in range(20)]
    metrics = {"train_loss_epoch": [2.0, 1.0], "eval_loss_epoch": [2.0, 1.0], "accuracy": [0.5, 0.6]}
    for prefix in ("ema_model", *names):
        metrics |= {f"{prefix}_eval_loss_epoch": [3.0, 2.0], f"{prefix}_accuracy": [0.2, 0.4]}
    drawn = panels(recorded(**metrics).plot())
    assert list(drawn) == ["loss", "accuracy"]
    looks = [
        {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axis.lines} for axis in drawn.values()
    ]
    assert looks[0].keys() == {"train", "eval", "ema model", *names}
    assert len(set(looks[0].values())) == 23
    assert looks[1].items() <= looks[0].items()


def test_monitors_share_panels_by_unit(monkeypatch):
    seconds, rates = ("time of an epoch", "seconds"), ("throughput", "samples per second")
    for name, panel in {"time": seconds, "samples_per_second": rates}.items():
        monkeypatch.delitem(MONITORS, name, raising=False)
        monkeypatch.setitem(MONITORS, name, panel)
    parts = ["data", "forward", "backward", "optimizer", "evaluation", "saving", "callbacks"]
    times = {f"time_{part}": [0.1, 0.2] for part in parts} | {"time_data_max": [0.3, 0.3], "time_epoch": [1, 2]}
    drawn = panels(
        recorded(
            **times,
            memory_allocated_mib=[100, 101],
            memory_reserved_mib=[120, 120],
            lr_0=[1e-2, 1e-3],
            lr_1=[1e-5, 1e-6],
            samples_per_second_epoch=[12000, 13000],
            train_loss_epoch=[1.0, 0.5],
        ).plot()
    )
    assert [(title, axis.get_ylabel()) for title, axis in drawn.items()] == [
        ("loss", ""),
        ("learning rate", ""),
        ("memory", "MiB"),
        ("time of an epoch", "seconds"),
        ("throughput", "samples per second"),
    ]
    assert legend(drawn["memory"]) == ["allocated", "reserved"]
    assert legend(drawn["learning rate"]) == ["group 0", "group 1"]
    assert drawn["learning rate"].get_yscale() == "log"
    assert drawn["memory"].get_ylim()[0] == 0
    assert legend(drawn["time of an epoch"]) == [*parts, "data, slowest process", "time of an epoch"]


def test_a_curve_that_falls_over_decades_has_a_logarithmic_axis():
    falling, flat = [0.5**k for k in range(14)], [1 / (k + 1) for k in range(14)]
    for values, scale in ((falling, "log"), (flat, "linear"), ([*falling[:-1], 0.0], "linear")):
        assert recorded(train_loss_epoch=values).plot().axes[0].get_yscale() == scale


@pytest.mark.parametrize("scale", [1e-3, 1e-9, 1e-12])
def test_ticks_of_small_values_differ(scale):
    axis = recorded(train_loss_epoch=[scale, 3 * scale]).plot().axes[0]
    ticks = axis.yaxis.get_major_formatter().format_ticks(axis.get_yticks())
    assert len(set(ticks)) == len(ticks)


def test_ticks_of_a_diverged_loss_leave_room_for_it():
    axis = recorded(train_loss_epoch=[1e30, 3e30]).plot().axes[0]
    assert max(map(len, axis.yaxis.get_major_formatter().format_ticks(axis.get_yticks()))) < 10


@pytest.mark.parametrize("epochs", [1, 2, 13, 100])
def test_ticks_are_at_whole_epochs(epochs):
    ticks = recorded(train_loss_epoch=[1.0] * epochs).plot().axes[0].get_xticks().tolist()
    assert 1 <= len(ticks) <= 12
    assert all(tick == int(tick) for tick in ticks)


def test_evaluations_within_an_epoch_are_plotted_within_it():
    (axis,) = recorded(intermediate_eval_loss=[[4, 3], [2, 1]], eval_loss_epoch=[2, 1]).plot().axes
    places = {line.get_label(): list(line.get_xdata()) for line in axis.lines}
    assert places == {"intermediate": [0.5, 1, 1.5, 2], "eval": [1, 2]}


def test_legends_lie_above_the_curves_and_below_the_titles():
    metrics = {f"train_{name}_loss": [1.0, 2.0] for name in ("a", "b")} | {"lr_0": [1.0, 1.0], "lr_1": [0.5, 0.4]}
    for number in range(9):
        metrics[f"set{number}_eval_loss"] = [2.0, 1.0]
    figure = recorded(**metrics).plot()
    figure.draw_without_rendering()
    for axis in figure.axes:
        if axis.get_legend() is not None:
            box = axis.get_legend().get_window_extent()
            assert box.y0 >= axis.get_window_extent().y1
            (title,) = [
                text for text in axis.get_children() if getattr(text, "get_text", str)() == axis.get_title("left")
            ]
            assert title.get_window_extent().y0 >= box.y1


def test_plot_schedule_shows_a_schedule_before_training(tmp_path):
    from torch.optim.lr_scheduler import OneCycleLR

    plan = partial(OneCycleLR, max_lr=0.5, total_steps=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)
    used: list[float] = []
    watch = listener(on_optimizer_step_start=lambda t: used.append(t.optimizer.param_groups[0]["lr"]))
    train(make_trainer([watch]), epochs=2, create_scheduler_fn=plan)
    assert schedule_values(plan, 6, 0.1, num_epochs=2) == [used]
    figure = plot_schedule(plan, 6, 0.1, 2, tmp_path / "schedule.png")
    assert list(figure.axes[0].lines[0].get_ydata()) == used
    assert (tmp_path / "schedule.png").stat().st_size > 5000


def test_a_plot_of_a_schedule_refuses_a_run_of_0_updates():
    with pytest.raises(ValueError, match="num_updates=0 must be at least 1"):
        plot_schedule(print, 0)


def test_titles_of_a_row_are_at_one_height_and_no_panel_is_empty():
    curves = {"train_loss": [2.0, 1.0], "eval_loss": [2.0, 1.0], "accuracy": [0.5, 0.6], "lr": [0.1, 0.1]}
    figure = recorded(**curves, unknown=[math.nan, math.inf]).plot()
    figure.draw_without_rendering()
    titles = [axis.get_title("left") for axis in figure.axes]
    assert sorted(titles) == ["accuracy", "learning rate", "loss"]
    places = [axis.get_position() for axis in figure.axes]
    heights = [[c.get_window_extent().y0 for c in axis.get_children() if getattr(c, "get_text", str)() == title]
               for axis, title in zip(figure.axes, titles, strict=True)]  # fmt: skip
    assert heights[0] == pytest.approx(heights[1])
    assert places[2].width > 1.8 * places[0].width
    with pytest.raises(ValueError, match="no metric has a finite value"):
        recorded(unknown=[math.nan]).plot()


def test_the_plot_has_a_panel_for_each_metric(tmp_path):
    from matplotlib.figure import Figure

    path = tmp_path / "plots" / "curves.png"
    figure = filled().plot(path)
    assert isinstance(figure, Figure)
    assert path.read_bytes().startswith(b"\x89PNG")
    panels = {axis.get_title(loc="left"): axis.get_lines() for axis in figure.axes}
    assert panels.keys() == {"loss", "accuracy"}
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panels["loss"]}
    assert curves == {"train": ([1, 2, 3], [1, 1 / 2, 1 / 3]), "eval": ([1, 2, 3], [2, 1, 2 / 3])}
    (accuracy,) = panels["accuracy"]
    assert (list(accuracy.get_xdata()), list(accuracy.get_ydata())) == ([1, 3], [0.5, 0.75])


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_a_plot_can_be_saved_in_other_formats(tmp_path, suffix):
    filled().plot(tmp_path / f"curves.{suffix}")
    assert (tmp_path / f"curves.{suffix}").stat().st_size > 1000


def test_a_plot_omits_non_numbers_and_shows_tensors():
    history = filled()
    history.update_metric("confusion", [[1, 2], [3, 4]])
    history.update_metric("comment", "good")
    history.update_metric("f1", torch.tensor(0.5))
    titles = {axis.get_title(loc="left") for axis in history.plot().axes}
    assert titles == {"loss", "accuracy", "f1"}


def test_a_plot_leaves_pyplot_unchanged_without_a_display(monkeypatch):
    import matplotlib

    monkeypatch.delenv("DISPLAY", raising=False)
    # As a plain dict: rcParams itself chooses a backend when it is asked for it.
    before = dict.__getitem__(matplotlib.rcParams, "backend")
    pyplot = sys.modules.get("matplotlib.pyplot")
    figures = pyplot.get_fignums() if pyplot else []
    filled().plot()
    assert dict.__getitem__(matplotlib.rcParams, "backend") is before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == figures


def test_metrics_to_plot_may_come_from_a_generator():
    figure = filled().plot(metrics=(name for name in ["accuracy"]))
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["accuracy"]


def test_an_empty_plot_is_an_error():
    with pytest.raises(ValueError, match="Nothing to plot"):
        InMemoryRunHistory().plot()


@pytest.mark.programs
def test_without_the_extra_a_plot_says_what_to_install():
    script = """
from tests.launching import forget
forget("matplotlib", installed=False)
from pytorch_accel_lite.tracking import InMemoryRunHistory
history = InMemoryRunHistory()
history.update_metric("loss", 1)
try:
    history.plot()
except ImportError as error:
    print(error)
"""
    (plot,) = run_code(script).splitlines()
    assert re.search("plot.. needs matplotlib. Install it with: pip install '?matplotlib", plot)
