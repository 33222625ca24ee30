"""Watched metrics: checks before a run that they will be recorded, and which values are better."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    EarlyStoppingCallback,
    PrintProgressCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    WatchedMetric,
)
from tests.launching import in_forks, some_of, two_are_enough
from tests.ranks import shared_folder
from tests.shipped_callbacks import RUN, SHIPPED, build
from tests.small_models import adamw_trainer, float64_data, float64_model, listener, make_data, make_trainer, train


class RecordsMae(TrainerCallback):
    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("mae", 1.0)


class Script(Metric):
    """Gives one value of a script after the other."""

    higher_is_better = True

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = list(values)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        pass

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.values.pop(0))


def scores(values: list[float], higher: bool | None = True) -> TrainerCallback:
    """Records given values as ``score``, with a declared direction."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    return MetricsCallback({"score": type("Said", (Script,), {"higher_is_better": higher})(values)})


WATCHERS: dict[str, Any] = {
    "SaveBestModelCallback(watch_metric=": lambda name, *greater: SaveBestModelCallback("best.pt", name, *greater),
    "EarlyStoppingCallback(watch_metric=": lambda name, *greater: EarlyStoppingCallback(9, 0.0, name, *greater),
    "ModelEmaCallback(watch_metric=": lambda name, *greater: callbacks.ModelEmaCallback(
        0.5, True, "ema.pt", name, *greater
    ),
}
BY_NAME = [
    pytest.param(where, marks=pytest.mark.extension("model_ema")) if "Ema" in where else where for where in WATCHERS
]


def steps_of(trainer: Trainer, error: type[Exception], match: str, **kwargs: Any) -> int:
    """Train, expect an error, and return how many steps were made before it."""
    with pytest.raises(error, match=match):
        train(trainer, **kwargs)
    return trainer.progress.step


# --------------------------------------------------------------------------------- which values are better


@pytest.mark.extension("metrics")
@pytest.mark.parametrize(
    ("values", "higher_is_better", "best"), [([1, 3, 2], True, 2), ([2, 1, 3], False, 2), ([3, 1, 2], True, 1)]
)
def test_the_best_model_is_the_best_by_its_metrics_direction(values, higher_is_better, best, here):
    callback = SaveBestModelCallback("best.pt", "score")
    train(make_trainer([scores(values, higher_is_better), callback]), epochs=3, eval_dataset=True)
    assert callback.best_metric_epoch == best
    assert torch.load("best.pt")["score"] == values[best - 1]


@pytest.mark.extension("metrics")
def test_a_run_whose_accuracy_rises_is_not_stopped(here):
    stopping = EarlyStoppingCallback(watch_metric="score")
    trainer = train(make_trainer([scores([0.1, 0.5, 0.9]), stopping]), epochs=3, eval_dataset=True)
    assert trainer.stop_reason is None
    assert stopping.best_metric == pytest.approx(0.9)


@pytest.mark.extension("model_ema", "metrics")
def test_the_kept_averages_are_the_best_by_their_metric(here):
    ema = callbacks.ModelEmaCallback(0.5, watch_metric="ema_model_score", callbacks=[scores([1.0, 3.0, 2.0])])
    train(make_trainer([scores([1.0, 3.0, 2.0]), ema], seed=0), epochs=3, eval_dataset=True)
    assert ema.best_metric == 3.0


NESTED = ["on_train_step_end", "on_train_epoch_end", "on_eval_epoch_end", "on_training_run_epoch_end"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("event", "every"), some_of(some_of(product(NESTED, [1, 2]))))
def test_an_evaluation_within_a_run_adds_no_watched_value(here, event, every):
    """The targets of the test data are the opposite, so the error of the best epoch is the largest there."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    x, y = make_data(12).tensors
    data, test_data = TensorDataset(x, 3 + y), TensorDataset(x, -(3 + y))

    def evaluate_test_data(trainer, **kwargs):
        if trainer.current_run.data.eval_dataset is not test_data:
            trainer.evaluate(test_data)

    def watched(folder, *extra, resume_from=None):
        best = SaveBestModelCallback(here / folder / "best.pt", "error", load_saved_checkpoint=False)
        stopping = EarlyStoppingCallback(1, 0.0, watch_metric="error")
        states = SaveTrainingStateCallback(here / folder / "states", save_every_n_steps=1)
        error = MetricsCallback({"error": MeanAbsoluteError()})
        trainer = make_trainer([error, *extra, best, stopping, states], seed=0)
        how = {"scheduler_interval": "epoch", "scheduler_metric": "error", "eval_every_n_epochs": every}
        plateau = partial(ReduceLROnPlateau, patience=0, threshold=0.1)
        more = {"train_dataset": data, "eval_dataset": data, "create_scheduler_fn": plateau, "resume_from": resume_from}
        train(trainer, 6, batch_size=4, **how, **more)
        rate = trainer.optimizer.param_groups[0]["lr"]
        return best.best_metric, best.best_metric_epoch, trainer.stop_reason, rate, trainer.progress

    plain = watched("plain")
    assert plain[1] == 6
    evaluates = listener(**{event: evaluate_test_data})
    assert watched("nested", evaluates) == plain
    assert watched("resumed", evaluates, resume_from=here / "nested/states/update-000000007") == plain


def test_calling_evaluate_hides_no_value_within_an_epoch(here):
    def evaluate_test_data(trainer, **kwargs):
        if trainer.current_run.data.eval_dataset is not test_data:
            trainer.evaluate(test_data)

    test_data = make_data(4)
    best = SaveBestModelCallback(here / "best.pt", keep=6)
    trainer = make_trainer([best, listener(on_eval_epoch_end=evaluate_test_data)], seed=0)
    train(trainer, 2, batch_size=2, eval_dataset=True, evaluate_every="1 updates")
    assert sorted(path.name for path in here.glob("best-*")) == [f"best-update{n:09d}.pt" for n in range(1, 7)]


def test_a_metric_that_only_nested_evaluations_record_is_watched(here):
    best = SaveBestModelCallback("best.pt", "evaluation_loss")
    evaluates = listener(on_train_epoch_end=lambda trainer, **_: trainer.evaluate(make_data()))
    trainer = train(make_trainer([evaluates, best]), epochs=2, eval_dataset=True)
    assert best.best_metric == min(trainer.run_history["evaluation_loss"])


@pytest.mark.extension("model_ema", "metrics")
@pytest.mark.parametrize("where", BY_NAME)
def test_an_argument_that_contradicts_the_metric_is_an_error(where, here):
    average = callbacks.ModelEmaCallback(save_path="other.pt", prefix="other_", callbacks=[scores([1.0])])
    name = "other_score" if "Ema" in where else "score"
    trainer = make_trainer([average, scores([1.0]), WATCHERS[where](name, False)])
    with pytest.raises(ValueError, match="but according to the metric itself greater is better") as caught:
        train(trainer, eval_dataset=True)
    assert str(caught.value).startswith(f"{where}{name!r}): greater_is_better=False")
    assert trainer.progress.step == 0


def test_greater_losses_are_never_better(here):
    callback = SaveBestModelCallback("best.pt", greater_is_better=True)
    assert steps_of(make_trainer([callback]), ValueError, "the metric itself smaller is better", eval_dataset=True) == 0


@pytest.mark.parametrize("where", BY_NAME)
def test_an_unknown_direction_means_smaller_with_a_warning(where, here):
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("mine", float(t.progress.epoch)))
    watcher = WATCHERS[where]("mine")
    trainer = make_trainer([record, watcher], seed=0)
    with pytest.warns(UserWarning, match="whether greater values are better is unknown") as caught:
        train(trainer, epochs=2, eval_dataset=True)
    assert str(caught[0].message).startswith(where)
    assert "greater_is_better=True or False" in str(caught[0].message)
    assert [warning.filename for warning in caught] == [train.__code__.co_filename]  # the line that calls train()
    if hasattr(watcher, "best_metric"):
        assert watcher.best_metric == 1.0
    else:
        assert (Path("states") / "update-000000003").is_dir()


@pytest.mark.extension("metrics")
@pytest.mark.parametrize(("greater", "best"), [(True, 2), (False, 1)])
def test_the_argument_decides_the_direction_of_a_plain_metric(greater, best, here):
    callback = SaveBestModelCallback("best.pt", "score", greater)
    train(make_trainer([scores([1, 2], None), callback]), epochs=2, eval_dataset=True)
    assert callback.best_metric_epoch == best


@pytest.mark.parametrize("name", ["glossary_accuracy", "lossless_share", "gloss"])
def test_a_word_that_contains_loss_is_no_loss(name, here):
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric(name, 1.0))
    with pytest.warns(UserWarning, match="whether greater values are better is unknown"):
        train(make_trainer([record, SaveBestModelCallback("best.pt", name)]), eval_dataset=True)


@pytest.mark.parametrize("name", ["my_loss", "loss/val", "logloss", "HingeLoss", "aux_losses", "loss2"])
def test_a_loss_of_a_custom_callback_is_better_when_smaller(name, here):
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric(name, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make_trainer([record, SaveBestModelCallback("best.pt", name)]), eval_dataset=True)


def test_a_custom_callback_can_say_which_values_are_better(here):
    class Records(TrainerCallback):
        def configure_run(self, trainer, request, **kwargs):
            request.metrics.record(self, {"mine": True}, in_evaluation=True)

        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("mine", [1.0, 3.0, 2.0][trainer.progress.epoch - 1])

    best = SaveBestModelCallback("best.pt", "b_mine")
    data = {"a": make_data(4), "b": make_data(6)}
    train(make_trainer([best, Records()]), epochs=3, eval_dataset=data)
    assert best.best_metric == 3.0


def test_a_custom_callback_may_declare_what_it_records(here):
    class Records(TrainerCallback):
        def configure_run(self, trainer, request, **kwargs):
            request.metrics.record(self, {"mine": True})

    trainer = make_trainer([Records(), SaveBestModelCallback("best.pt", "mien")])
    assert steps_of(trainer, ValueError, r"'mien'\): the run will not record it. Did you mean 'mine'") == 0


@pytest.mark.extension("metrics")
@pytest.mark.parametrize(
    ("name", "callbacks", "data"),
    [
        ("a_score", [], {"a": make_data(4), "b": make_data(4)}),
        ("train_score", [], make_data(4)),
        ("intermediate_score", [StepBasedEvaluationCallback(2)], make_data(4)),
        ("fold_score", [], make_data(4)),
    ],
    ids=["dataset", "training", "intermediate", "run"],
)
def test_the_direction_is_known_under_each_name_of_a_metric(name, callbacks, data, here):
    from pytorch_accel_lite.callbacks import MetricsCallback

    metrics = MetricsCallback({"score": MulticlassAccuracy(2)}, lambda *_: (torch.zeros(1), torch.zeros(1)), train=True)
    best = SaveBestModelCallback("best.pt", name)
    trainer = make_trainer([metrics, *callbacks, best])
    if name == "fold_score":
        trainer.run_history.set_metric_name_prefix("fold_")
    train(trainer, eval_dataset=data)
    assert best.best_metric is not None
    assert best.state_dict()["greater_is_better"] is True


@pytest.mark.extension("metrics")
def test_the_directions_of_a_collection_are_those_of_its_members(here):
    from pytorch_accel_lite.callbacks import MetricsCallback

    collection = MetricCollection({"mae": MeanAbsoluteError(), "score": Script([1, 2])}, prefix="eval_")
    low = SaveBestModelCallback("low.pt", "eval_mae")
    high = SaveBestModelCallback("high.pt", "eval_score")
    train(make_trainer([MetricsCallback(collection), low, high]), epochs=2, eval_dataset=True)
    assert high.best_metric_epoch == 2
    assert [low.state_dict()["greater_is_better"], high.state_dict()["greater_is_better"]] == [False, True]


@pytest.mark.extension("metrics")
@pytest.mark.parametrize(("mode", "higher"), [("min", True), ("max", False)])
def test_a_plateau_of_the_wrong_direction_is_an_error(mode, higher):
    arguments = {"scheduler_interval": "epoch", "scheduler_metric": "score", "eval_dataset": True, "epochs": 2}
    right = {"min": "max", "max": "min"}[mode]
    trainer = make_trainer([scores([1.0, 2.0], higher)])
    match = f"scheduler_metric='score'.*has mode='{mode}'. Create it with mode='{right}'"
    factory = partial(ReduceLROnPlateau, mode=mode)
    assert steps_of(trainer, ValueError, match, create_scheduler_fn=factory, **arguments) == 0
    train(trainer, create_scheduler_fn=partial(ReduceLROnPlateau, mode=right), **arguments)


@pytest.mark.extension("progress_table", "metrics")
def test_messages_name_the_direction_after_the_epochs_metrics(here, capsys):
    stopping = EarlyStoppingCallback(2, watch_metric="score")
    best = SaveBestModelCallback("best.pt", "score")
    metrics = scores([2 / 3, 1 / 3, 1 / 3])
    train(make_trainer([*DEFAULT_CALLBACKS, metrics, best, stopping]), epochs=9, eval_dataset=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  time: ")]
    assert lines[3].endswith("score: 0.666667")
    assert lines[6].endswith("score: 0.333333")
    assert lines[7] == (
        "score: 0.333333 is no better than 0.666667 (greater is better); 1 of 2 epochs of patience used."
    )
    assert lines[10].endswith("score: 0.333333")
    assert lines[11:] == [
        "Loading the best model: epoch 1, score: 0.666667 (greater is better)",
        lines[12],
        "Best: epoch 1, score 0.666667.",
        "  best model: best.pt",
        "Stopped: score has not improved for 2 epochs (early_stopping_patience). Best 0.666667, greater is better.",
    ]
    assert lines[12].startswith("Stopped in epoch 3, after update 9, in ")


def warnings_of_watched_metrics() -> list[str]:
    """The warnings of this rank about a metric of unknown direction, and one that may not be recorded."""
    with shared_folder() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        best = SaveBestModelCallback(folder / "best.pt", watch_metric="mae")
        trainer = adamw_trainer(float64_model(), callbacks=[RecordsMae, best])
        trainer.train(float64_data(8), 1, float64_data(4))
        stopping = EarlyStoppingCallback(watch_metric="eval_loss_epochs")
        with suppress(ValueError):
            adamw_trainer(float64_model(), callbacks=[RecordsMae, stopping]).train(float64_data(8), 1, float64_data(4))
        return [str(warning.message) for warning in caught if warning.filename == __file__]


@pytest.mark.processes
@two_are_enough
def test_one_process_warns_of_watched_metrics_on_behalf_of_all(ranks):
    first, *others = ranks(warnings_of_watched_metrics)
    assert len(others) == ranks.world_size - 1 > 0
    unknown, unrecorded = first
    assert unknown.startswith("SaveBestModelCallback(watch_metric='mae'): whether greater values are better is unknown")
    assert "the run will not record it, unless RecordsMae does. Did you mean 'eval_loss_epoch'?" in unrecorded
    assert not any(others)


# ------------------------------------------------------------------------- what is known before training


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("where", BY_NAME)
def test_an_unrecorded_metric_is_named_before_training(where, here):
    trainer = make_trainer([scores([1.0]), WATCHERS[where]("scroe", True)])
    expected = f"{where}'scroe'): the run will not record it. Did you mean 'score'? It records: train_loss_epoch, score"
    with pytest.raises(ValueError, match=r"watch_metric='scroe'.: the run will not record it") as caught:
        train(trainer, eval_dataset=True)
    assert str(caught.value).startswith(expected)
    assert trainer.progress.step == 0


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("name", ["eval_loss_epoch", "score", "intermediate_eval_loss"])
@pytest.mark.parametrize("where", [where for where in WATCHERS if "Ema" not in where])
def test_a_metric_of_evaluations_needs_an_eval_dataset(where, name, here):
    callbacks = [scores([1.0]), *([StepBasedEvaluationCallback(1)] if "intermediate" in name else [])]
    trainer = make_trainer([*callbacks, WATCHERS[where](name)])
    with pytest.raises(ValueError, match=r"train\(\) was given no eval_dataset\. Pass one") as caught:
        train(trainer)
    assert str(caught.value).startswith(f"{where}{name!r})")
    assert trainer.progress.step == 0


def test_the_metric_of_a_scheduler_is_checked_too():
    arguments = {"create_scheduler_fn": ReduceLROnPlateau, "scheduler_interval": "epoch"}
    for metric, match, data in (
        ("eval_loss_epoch", r"scheduler_metric='eval_loss_epoch'.*was given no eval_dataset", None),
        ("eval_los_epoch", r"scheduler_metric='eval_los_epoch'.*Did you mean 'eval_loss_epoch'", True),
    ):
        run = arguments | {"scheduler_metric": metric, "eval_dataset": data}
        assert steps_of(make_trainer(), ValueError, match, **run) == 0


def test_losses_of_several_datasets_have_their_names(here):
    trainer = make_trainer([SaveBestModelCallback("best.pt")])
    data = {"a": make_data(4), "b": make_data(4)}
    assert steps_of(trainer, ValueError, "It records: train_loss_epoch, a_eval_loss_epoch", eval_dataset=data) == 0


def test_watching_evaluations_never_made_in_epochs_is_an_error():
    trainer = make_trainer([EarlyStoppingCallback(watch_metric="intermediate_eval_loss")])
    assert steps_of(trainer, ValueError, "'intermediate_eval_loss'.*will not record it", eval_dataset=True) == 0


def test_a_metric_of_a_custom_callback_is_only_warned_of(here):
    record = listener(on_train_epoch_end=lambda t: t.run_history.update_metric("eval_loss_epoch", 1.0))
    best = SaveBestModelCallback("best.pt")
    with pytest.warns(UserWarning, match=r"unless Listener does\. train\(\) was given no eval_dataset"):
        train(make_trainer([record, best]))
    assert best.best_metric == 1.0


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


@pytest.mark.parametrize("name", ["eval_loss_epoch", "eval_square_epoch", "intermediate_eval_loss"])
def test_own_losses_need_data_to_record_evaluations(name, here):
    trainer = make_trainer([SaveBestModelCallback("best.pt", name)], loss_func=own_loss)
    assert steps_of(trainer, ValueError, f"{name}'.*the run will not record it", eval_dataset=None) == 0


def test_own_loss_names_may_be_those_of_training_losses(here):
    def named(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"square": own_loss(outputs, targets)}

    best = SaveBestModelCallback("best.pt", "train_square_epoch", False)
    train(make_trainer([best], loss_func=named))
    assert best.best_metric is not None


def test_the_best_training_loss_is_that_of_the_epochs_end(here, capsys):
    train(make_trainer([SaveBestModelCallback("best.pt", "train_loss_epoch")]))
    assert "a mean over that epoch; the weights are those at its end" in capsys.readouterr().out


@pytest.mark.extension("metrics")
def test_metrics_of_a_custom_trainer_are_not_refused(here):
    from pytorch_accel_lite.callbacks import MetricsCallback

    class Records(Trainer):
        def train_epoch_end(self):
            self.run_history.update_metric("mine_loss", 1.0)

    def parts(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"square": (outputs - targets).square().mean(), "size": outputs.square().mean()}

    best = SaveBestModelCallback("best.pt", "mine_loss")
    train(make_trainer([best], trainer_class=Records))
    assert best.best_metric == 1.0
    best = SaveBestModelCallback("best.pt", "eval_size_epoch", False)
    train(make_trainer([best], loss_func=parts), eval_dataset=True)
    assert best.best_metric is not None
    classes = MetricsCallback(
        {"accuracy": ClasswiseWrapper(MulticlassAccuracy(2, average=None))},
        lambda batch, output: (output["model_outputs"].flatten() > 0, batch[1].flatten() > 0),
    )
    best = SaveBestModelCallback("best.pt", "multiclassaccuracy_1", True)
    train(make_trainer([classes, best]), eval_dataset=True)
    assert best.best_metric is not None


def test_all_that_shipped_callbacks_record_is_known_to_the_run(here):
    """Otherwise watching it would be refused."""

    for kind in SHIPPED:
        trainer = make_trainer([build(kind)])
        train(trainer, eval_dataset=True, **RUN.get(kind.__name__, {}))
        known = trainer.current_run.request.metrics.directions
        assert set(trainer.run_history.get_metric_names()) <= set(known), kind


# ---------------------------------------------------------------------- a metric that did not come after all


@pytest.mark.extension("model_ema")
def test_a_metric_that_was_not_recorded_is_an_error(here):
    own = listener(on_train_step_end=lambda t, **_: None)
    for where, make in WATCHERS.items():
        trainer = make_trainer([own, make("never", True)], seed=0)
        with pytest.raises(ValueError, match=r"Recorded: .*train_loss_epoch, eval_loss_epoch") as caught:
            train(trainer, epochs=4, eval_dataset=True, eval_every_n_epochs=2)
        assert str(caught.value).startswith(f"{where}'never'): the run has not recorded it yet."), caught.value
        assert trainer.progress.epoch == 2


@pytest.mark.extension("model_ema")
def test_a_metric_recorded_after_its_watcher_names_the_order(here):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    callbacks = SaveBestModelCallback("best.pt", "ema_model_eval_loss_epoch"), ModelEmaCallback(0.5, save_path=None)
    match = r"has not recorded it yet\. The callback that records it must come before the one that watches it\."
    with pytest.raises(ValueError, match=match):
        train(make_trainer(callbacks), eval_dataset=True)
    train(make_trainer(callbacks[::-1]), eval_dataset=True)


class ScoredOnFirst(TrainerCallback):
    def on_eval_epoch_end(self, trainer, **kwargs):
        if trainer.accelerator.is_main_process:
            trainer.run_history.update_metric("score", 1.0)


@pytest.mark.processes
def test_a_metric_of_one_process_only_is_named(tmp_path):
    def train_on_two(rank: int) -> None:
        stopping = callbacks.EarlyStoppingCallback(watch_metric="score", greater_is_better=True)
        adamw_trainer(float64_model(), callbacks=[ScoredOnFirst(), stopping]).train(float64_data(8), 1, float64_data(4))

    assert in_forks(train_on_two, tmp_path / "output", 2) == [1, 1]
    assert "and record it on every process, not only on the first." in (tmp_path / "output").read_text()


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("where", BY_NAME)
def test_a_metric_of_several_numbers_is_named(where, here):
    trainer = make_trainer([scores([[0.5, 1.0]]), WATCHERS[where]("score")])
    match = rf"{re.escape(where)}'score'\): its value is \[0.5, 1.0\], but only a single number.*ClasswiseWrapper"
    with pytest.raises(TypeError, match=match):
        train(trainer, eval_dataset=True)


@pytest.mark.extension("metrics")
def test_a_metric_of_several_numbers_is_not_for_a_schedule():
    trainer = make_trainer([scores([[0.5, 1.0]])])
    plateau = {"create_scheduler_fn": partial(ReduceLROnPlateau, mode="max"), "scheduler_interval": "epoch"}
    with pytest.raises(TypeError, match=r"scheduler_metric='score': its value is \[0.5, 1.0\], but only a single"):
        train(trainer, eval_dataset=True, scheduler_metric="score", **plateau)


def test_an_earlier_runs_value_does_not_stand_for_a_missing_one(here):
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("mine", 1.0))
    stopping = EarlyStoppingCallback(watch_metric="mine", greater_is_better=True)
    trainer = train(make_trainer([record, stopping]), eval_dataset=True)
    trainer.callback_handler.clear_callbacks()
    trainer.callback_handler.add_callbacks([listener(), stopping])
    with pytest.raises(ValueError, match=r"'mine'\): the run has not recorded it"):
        train(trainer, eval_dataset=True, reset_run_history=False)


def test_evaluations_within_epochs_may_be_rarer_than_epochs():
    stopping = EarlyStoppingCallback(9, watch_metric="intermediate_eval_loss", patience_in="evaluations")
    trainer = train(make_trainer([StepBasedEvaluationCallback(5), stopping]), epochs=4, eval_dataset=True)
    assert trainer.progress.epochs_completed == 4  # of three updates each
    assert stopping.best_metric is not None


# ------------------------------------------------------------------------------ what is said at the end


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_run_that_fails_is_not_reported_as_finished(error, capsys):
    def fail(trainer: Trainer, **kwargs: Any) -> None:
        raise error

    trainer = make_trainer([PrintProgressCallback, listener(on_train_step_end=fail)])
    with pytest.raises(type(error)):
        train(trainer)
    assert capsys.readouterr().out.splitlines() == ["Starting training run", "Starting epoch 1/1"]
    trainer.callback_handler.callbacks.pop()
    train(trainer)
    assert capsys.readouterr().out.splitlines()[-1] == "Finishing training run"


def test_a_stopped_run_is_reported_as_finished(capsys):
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("enough")

    train(make_trainer([PrintProgressCallback, listener(on_train_step_end=stop)]))
    assert capsys.readouterr().out.splitlines()[-2:] == ["Finishing training run", "Stopped: enough"]


def test_the_best_models_epoch_is_counted_as_in_other_lines(here, capsys):
    scores = iter([3.0, 2.0, 5.0, 1.0, 4.0, 6.0])
    record = listener(on_eval_epoch_end=lambda t, **kwargs: t.run_history.update_metric("score", next(scores)))
    best = SaveBestModelCallback("best.pt", "score", greater_is_better=False, reset_on_train=False)
    trainer = make_trainer([record, best, PrintProgressCallback])
    for _ in range(3):
        train(trainer, epochs=2, eval_dataset=True, reset_run_history=False)
    said = [line for line in capsys.readouterr().out.splitlines() if "poch" in line]
    assert [line.split(",")[0] for line in said] == [
        "Starting epoch 1/2",
        "Starting epoch 2/2",
        "Loading the best model: epoch 2",
        "Starting epoch 1/2",
        "Starting epoch 2/2",
        "Loading the best model: epoch 2",
        "Starting epoch 1/2",
        "Starting epoch 2/2",
        "Loading the best model: epoch 4 of an earlier run",
    ]


def test_numbers_of_any_type_are_compared():
    watched = WatchedMetric(None, "watch_metric", "accuracy", True)
    assert not watched.is_better(np.uint8(3), np.uint8(5))
    assert watched.is_better(np.bool_(True), np.bool_(False))
    assert not watched.is_better(float("nan"), 1.0)


def test_a_metric_of_a_callback_may_be_called_intermediate():
    def record(trainer, **kwargs):
        trainer.run_history.update_metric("intermediate_f1", 1.0)

    stopping = EarlyStoppingCallback(5, watch_metric="intermediate_f1", greater_is_better=True)
    trainer = make_trainer([listener(on_training_run_epoch_end=record), stopping])
    train(trainer, epochs=2, eval_dataset=True, evaluate_every="0.5 epochs")
    assert stopping.best_metric == 1.0
