"""Worst samples, snapshots and plots show what there is, and change nothing."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import R2Score

from pytorch_accel_lite import InMemoryRunHistory, Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import MetricsCallback, ModelEmaCallback, WorstSamplesCallback
from pytorch_accel_lite.plotting import plot_schedule
from pytorch_accel_lite.schedulers import CosineLrScheduler
from pytorch_accel_lite.schedulers.preview import schedule_values
from tests.tasks import Stream, listener, make_data, make_trainer, quiet_trainer, regression_data, small_model, train


def classes(size: int = 40, pixels: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 1, pixels, pixels, generator=generator)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


# ---------------------------------------------------------------------------------------- worst samples


def test_the_worst_samples_are_those_with_the_largest_losses(capsys):
    model, data = classifier(), classes()
    worst = WorstSamplesCallback(5, show=True)
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, callbacks=[worst])
    trainer.evaluate(data, per_device_batch_size=7)
    x, y = data.tensors
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    expected = losses.sort(descending=True).indices[:5].tolist()
    assert [sample.index for sample in worst.samples] == expected
    assert [sample.loss for sample in worst.samples] == pytest.approx(losses[expected].tolist())
    assert [sample.prediction for sample in worst.samples] == model(x).argmax(1)[expected].tolist()
    assert [sample.target for sample in worst.samples] == y[expected].tolist()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["index", "loss", "prediction", "target"]
    assert lines[1].split()[0] == str(expected[0])
    assert len(lines) == 6


def test_worst_samples_work_for_several_outputs_and_a_nan(capsys):
    x = torch.randn(4, 5)
    y = torch.zeros(4, 2)
    y[2, 0] = math.nan
    worst = WorstSamplesCallback(10, show=True)
    trainer = Trainer(nn.Linear(5, 2), nn.MSELoss(), None, callbacks=[worst])
    trainer.evaluate(TensorDataset(x, y), per_device_batch_size=3)
    assert len(worst.samples) == 4
    assert worst.samples[0].index == 2
    assert math.isnan(worst.samples[0].loss)
    assert capsys.readouterr().out.splitlines()[1].split() == ["2", "nan", *["tensor", "(2,)"] * 2]
    by_hand = (trainer.model(x) ** 2).mean(1)
    for sample in worst.samples[1:]:
        assert sample.loss == pytest.approx(by_hand[sample.index].item())
        assert torch.equal(sample.prediction, trainer.model(x)[sample.index].detach()) or sample.prediction.shape == (
            2,
        )


def test_a_custom_loss_and_streams_and_evaluations_by_name():
    worst = WorstSamplesCallback(2, loss=lambda outputs, targets: (outputs - targets).abs().squeeze(1))
    trainer = make_trainer([worst])
    train(trainer, eval_dataset={"a": make_data(6), "b": make_data(3)})
    assert {sample.dataset for sample in worst.samples} <= {"a", "b"}
    assert len(worst.samples) == 2
    trainer.evaluate(Stream(), per_device_batch_size=2)
    assert [sample.index for sample in worst.samples] == [None, None]


def test_predictions_in_a_dict_are_those_of_each_sample():
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"size": self.linear(x), "corners": x[:, :2]}

    model, data = Boxes(), make_data(10)
    worst = WorstSamplesCallback(
        3,
        transform=lambda batch, batch_output: (batch_output["model_outputs"], batch[1]),
        loss=lambda outputs, targets: (outputs["size"] - targets).abs().squeeze(1),
    )
    trainer = Trainer(model, lambda outputs, targets: (outputs["size"] - targets).mean(), None, callbacks=[worst])
    trainer.evaluate(data, per_device_batch_size=4)
    assert len(worst.samples) == 3
    for sample in worst.samples:
        x, y = data[sample.index]
        expected = model(x[None])
        assert sample.loss == pytest.approx((expected["size"] - y).abs().item(), rel=1e-5)
        assert torch.equal(sample.prediction["corners"].flatten(), x[:2])
        torch.testing.assert_close(sample.prediction["size"].flatten(), expected["size"].flatten())


@pytest.mark.parametrize("loss_func", [nn.functional.mse_loss, partial(nn.functional.mse_loss, reduction="sum")])
def test_the_functions_of_torch_give_a_loss_for_each_sample(loss_func):
    found = []
    for loss in (loss_func, nn.MSELoss()):
        worst = WorstSamplesCallback(3)
        make_trainer([worst], loss_func=loss).evaluate(make_data())
        found.append(worst.samples)
    assert found[0] == found[1] != []


@pytest.mark.parametrize(
    ("loss_func", "arguments", "message"),
    [
        (lambda outputs, targets: (outputs - targets).mean(), {}, "cannot get per-sample losses from .* Pass loss="),
        (torch.dist, {}, "cannot get per-sample losses from .*built-in"),  # Python does not know its arguments
        (nn.MSELoss(), {"loss": nn.functional.mse_loss}, "must return one value for each of 2 samples, not"),
    ],
)
def test_a_loss_without_values_for_samples_is_refused(loss_func, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer([WorstSamplesCallback(**arguments)], loss_func=loss_func).evaluate(
            make_data(), per_device_batch_size=2
        )


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def test_images_are_drawn_as_a_sheet(tmp_path):
    data = classes()
    worst = WorstSamplesCallback(7)
    Trainer(classifier(), nn.CrossEntropyLoss(), None, callbacks=[worst]).evaluate(data, per_device_batch_size=8)
    figure = worst.plot(data, tmp_path / "sheets" / "worst.png", classes=["ant", "bee", "cat"])
    first = worst.samples[0]
    named = ["ant", "bee", "cat"]
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0].startswith(f"predicted {named[first.prediction]}, true {named[first.target]}\nloss ")
    assert len(titles) == 7
    assert pixels(tmp_path / "sheets" / "worst.png").shape[1] > 500
    with pytest.raises(ValueError, match="Nothing to draw"):
        WorstSamplesCallback().plot(data)


@pytest.mark.parametrize("averaged", [False, True])
def test_images_of_several_datasets_are_drawn_by_their_names(averaged):
    model, worst = nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), WorstSamplesCallback(4)
    named = {name: TensorDataset(torch.full((2, 1, 4, 4), level), torch.ones(2, 1)) for name, level in LEVELS.items()}
    watched = "ema_model_left_eval_loss_epoch"
    callback = ModelEmaCallback(save_path=None, watch_metric=watched, callbacks=[worst]) if averaged else worst
    train(make_trainer([callback], model=model), train_dataset=named["left"], eval_dataset=named)
    figure = worst.plot(named)  # all four samples: a picture of each dataset is of one shade
    shown = sorted(float(axis.images[0].get_array().max()) for axis in figure.axes if axis.images)
    assert shown == pytest.approx([0.25, 0.25, 0.75, 0.75])
    with pytest.raises(KeyError, match="right_side"):
        worst.plot({"left": named["left"]})


LEVELS = {"left": 0.25, "right_side": 0.75}


def worst_samples() -> Any:
    """Twice, with fewer samples than ranks too; by hand on the whole set."""
    found, expected = [], []
    for size in (23, 2):
        data, model, worst = regression_data(size), small_model(), WorstSamplesCallback(6)
        quiet_trainer(model, callbacks=[worst]).evaluate(data, per_device_batch_size=2)
        losses = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1], reduction="none")[:, 0]
        found.append([sample.index for sample in worst.samples])
        expected.append(losses.sort(descending=True).indices[:6].tolist())
    return {"found": found, "expected": expected}


@pytest.mark.processes
def test_the_worst_samples_of_all_processes_are_found(ranks):
    for result in ranks(worst_samples):
        assert result["found"] == result["expected"]


# -------------------------------------------------------------------------------------------- snapshots


# ------------------------------------------------------------------------------------------------ plots


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


def test_the_best_epoch_of_an_evaluation_is_marked():
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


def test_monitors_share_panels_by_unit():
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
        ("throughput", "samples per second"),
        ("memory", "MiB"),
        ("time of an epoch", "seconds"),
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


@pytest.mark.parametrize("epochs", [1, 2, 13, 100])
def test_whole_epochs_are_marked(epochs):
    ticks = recorded(train_loss_epoch=[1.0] * epochs).plot().axes[0].get_xticks().tolist()
    assert 1 <= len(ticks) <= 12
    assert all(tick == int(tick) for tick in ticks)


def test_evaluations_within_an_epoch_lie_in_its_course():
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


def test_a_schedule_is_seen_before_it_is_used(tmp_path):
    from torch.optim.lr_scheduler import OneCycleLR

    plan = partial(OneCycleLR, max_lr=0.5, total_steps=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)
    used: list[float] = []
    watch = listener(on_optimizer_step_start=lambda t: used.append(t.optimizer.param_groups[0]["lr"]))
    train(make_trainer([watch]), epochs=2, create_scheduler_fn=plan)
    assert schedule_values(plan, 6, 0.1, num_epochs=2) == [used]
    figure = plot_schedule(plan, 6, 0.1, 2, tmp_path / "schedule.png")
    assert list(figure.axes[0].lines[0].get_ydata()) == used
    assert (tmp_path / "schedule.png").stat().st_size > 5000


def test_schedules_of_groups_and_of_timm_are_seen():
    from timm.scheduler import StepLRScheduler

    assert schedule_values(partial(StepLRScheduler, decay_t=1, decay_rate=0.5), 6, [1.0, 0.1], num_epochs=3) == [
        [1, 1, 0.5, 0.5, 0.25, 0.25], [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    ]  # fmt: skip
    ours = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, warmup_starting_lr=0.01)
    (values,) = schedule_values(ours, 10, 0.1, num_epochs=5)
    assert max(values) == pytest.approx(0.1)
    assert values[0] < values[1] <= values[2] > values[-1]


@pytest.mark.parametrize(
    ("provoke", "error", "message"),
    [
        (lambda: WorstSamplesCallback(0), ValueError, "k=0 must be at least 1"),
        (lambda: plot_schedule(print, 0), ValueError, "num_updates=0 must be at least 1"),
    ],
)
def test_plots_refuse_bad_counts(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()


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
