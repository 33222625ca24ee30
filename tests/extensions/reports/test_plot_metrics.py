"""PlotMetricsCallback: the plot that a run keeps up to date."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from PIL import Image

from pytorch_accel_lite import InMemoryRunHistory
from pytorch_accel_lite.callbacks import PlotMetricsCallback
from pytorch_accel_lite.extensions.reports import time_budget
from tests.small_models import listener, make_trainer, train


def test_metrics_are_plotted_after_each_epoch(tmp_path, monkeypatch):
    seen = []
    path = tmp_path / "plots" / "metrics.png"
    hours = itertools.count(step=3600)  # each look at the clock is an hour later
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    look = listener(on_training_run_epoch_end=lambda t: seen.append(path.exists()))
    train(make_trainer([look, PlotMetricsCallback(path)]), epochs=60, eval_dataset=True)
    assert seen[0] is False
    assert True in seen
    with Image.open(path) as image:
        assert image.width > 300


def test_short_runs_are_drawn_once_at_the_end(tmp_path):
    path, drawn = tmp_path / "metrics.svg", []
    look = listener(on_training_run_epoch_end=lambda t: drawn.append(path.exists()))
    train(make_trainer([look, PlotMetricsCallback(path, ["train_loss_epoch"])]), epochs=3)
    assert drawn == [False] * 3  # drawing takes many times as long as an epoch
    assert path.exists()


def test_a_run_without_numbers_is_not_ended_by_their_plot(tmp_path):
    class Words(InMemoryRunHistory):
        def update_metric(self, metric_name, metric_value):
            super().update_metric(metric_name, "words")

    trainer = make_trainer([PlotMetricsCallback(tmp_path / "m.png")], run_history=Words())
    assert train(trainer, epochs=2).progress.epochs_completed == 2
    assert not (tmp_path / "m.png").exists()


def test_a_missing_metric_is_reported_before_training(tmp_path):
    trainer = make_trainer([PlotMetricsCallback(tmp_path / "m.png", ["train_los_epoch"])])
    with pytest.raises(ValueError, match=r"'train_los_epoch'.*Did you mean 'train_loss_epoch'"):
        train(trainer)
    assert trainer.progress.update == 0


def test_metrics_are_drawn_once_they_have_values(tmp_path):
    drawn: list[list[str]] = []

    class Noting(InMemoryRunHistory):
        def plot(self, path=None, metrics=None):
            drawn.append(metrics)
            return super().plot(path, metrics)

    plot = PlotMetricsCallback(tmp_path / "m.png", ["eval_loss_epoch", "train_loss_epoch"], every="2 updates")
    train(make_trainer([plot], run_history=Noting()), epochs=4, eval_dataset=True, eval_every_n_epochs=2)
    assert drawn[0] == []
    assert ["train_loss_epoch"] in drawn
    assert drawn[-1] == ["eval_loss_epoch", "train_loss_epoch"]


def test_metrics_of_an_earlier_run_are_drawn(tmp_path):
    trainer = make_trainer([PlotMetricsCallback(tmp_path / "m.png", ["eval_loss_epoch"])])
    train(trainer, eval_dataset=True)
    train(trainer, reset_run_history=False)
    assert (tmp_path / "m.png").exists()


def test_metrics_to_draw_are_a_list_of_names():
    with pytest.raises(TypeError, match=r"metrics='loss' must be a list of names. Write: metrics=\['loss'\]"):
        PlotMetricsCallback(metrics="loss")
    with pytest.raises(TypeError, match=r"metrics=\[1\] must be a list of names"):
        InMemoryRunHistory().curves([1])


def test_an_unsupported_picture_format_is_refused_early():
    with pytest.raises(ValueError, match=r"path='a.xyz' must end in a format of pictures: .*\.svg"):
        PlotMetricsCallback("a.xyz")


def test_metrics_are_drawn_at_intervals(tmp_path):
    drawn: list[bool] = []
    plot = PlotMetricsCallback(tmp_path / "curves.png", every="5 updates")
    look = listener(on_update_end=lambda trainer, **kwargs: drawn.append((tmp_path / "curves.png").exists()))
    train(make_trainer([plot, look]), epochs=3, evaluate_every="2 updates", eval_dataset=True)
    assert drawn == [False] * 5 + [True] * 4  # in the sixth update, it is there


def test_plot_metrics_refuses_invalid_intervals():
    with pytest.raises(ValueError, match=r"^every='often' must be"):
        PlotMetricsCallback(every="often")
