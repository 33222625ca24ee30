"""``LogMetricsCallback`` prints each metric once."""

from __future__ import annotations

from typing import Any

import pytest
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import LogMetricsCallback
from tests.small_models import listener, make_data, make_trainer, train


class Collecting(LogMetricsCallback):
    """Collects the values that it has to log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, trainer, metrics):
        self.logged.append(dict(metrics))


def test_each_metric_of_a_run_is_printed_once(capsys):
    trainer = make_trainer([LogMetricsCallback])
    train(trainer, epochs=3, eval_dataset=True)
    out = capsys.readouterr().out
    assert out.count("train_loss_epoch:") == out.count("eval_loss_epoch:") == 3
    for values in trainer.run_history.to_dict().values():
        for value in values:
            assert out.count(f"{value:.6g}") >= 1


def test_logged_metrics_equal_the_history(capsys):
    collecting = Collecting()
    trainer = train(make_trainer([collecting]), epochs=2, eval_dataset=True)
    assert capsys.readouterr().out == ""
    rebuilt: dict[str, list[float]] = {}
    for metrics in collecting.logged:
        for name, value in metrics.items():
            rebuilt.setdefault(name, []).append(value)
    assert rebuilt == trainer.run_history.to_dict()


@pytest.mark.parametrize("event", ["on_eval_epoch_end", "on_training_run_epoch_end"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_metrics_recorded_at_an_ending_event_are_logged_once(event, order):
    collecting = Collecting()
    recording = listener(**{event: lambda t, **_: t.run_history.update_metric("mine", t.progress.epoch)})
    callbacks = [recording, collecting] if order == "before" else [collecting, recording]
    train(make_trainer(callbacks), epochs=2, eval_dataset=True)
    assert [metrics["mine"] for metrics in collecting.logged if "mine" in metrics] == [1, 2]


def test_metrics_of_an_evaluation_are_logged_once():
    collecting = Collecting()
    trainer = train(make_trainer([collecting]), epochs=2, eval_dataset=True)
    collecting.logged.clear()
    metrics = trainer.evaluate()
    assert collecting.logged == [metrics]


def test_a_second_run_logs_only_its_own_metrics():
    for reset in (True, False):
        collecting = Collecting()
        trainer = train(make_trainer([collecting]), epochs=2)
        collecting.logged.clear()
        train(trainer, epochs=2, reset_run_history=reset)
        values = trainer.run_history.get_metric_values("train_loss_epoch")[-2:]
        assert collecting.logged == [{"train_loss_epoch": value} for value in values]


def test_metrics_of_a_stopped_epoch_are_logged():
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("enough")

    collecting = Collecting()
    trainer = train(make_trainer([listener(on_eval_epoch_end=stop), collecting]), eval_dataset=True)
    names = [name for metrics in collecting.logged for name in metrics]
    assert sorted(names) == ["eval_loss_epoch", "train_loss_epoch"] == sorted(trainer.run_history.get_metric_names())


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_training_run_epoch_end", "on_epoch_checkpoint"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_evaluation_in_a_callback_hides_no_metric_of_the_run(event, is_first):
    from pytorch_accel_lite.callbacks import MetricsCallback

    tested = []
    tests = listener(**{event: lambda trainer, **_: tested.append(trainer.evaluate(make_data(6))["mse"])})
    log = Collecting()
    trainer = make_trainer(
        [MetricsCallback({"mse": MeanSquaredError()}), *([tests, log] if is_first else [log, tests])]
    )
    train(trainer, 2, eval_dataset=make_data(4))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert [row[name] for row in log.logged if name in row] == trainer.run_history[name]
    logged = [row["mse"] for row in log.logged if "mse" in row]
    assert sorted(logged) == sorted([*trainer.run_history["mse"], *tested])
