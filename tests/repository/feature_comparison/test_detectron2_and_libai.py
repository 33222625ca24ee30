"""What detectron2 and LiBai have: hooks, training by iterations, numbers in files."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.data import OwnShard
from tests.repository.feature_comparison.noted_runs import said
from tests.repository.feature_comparison.rows import row
from tests.small_models import listener, make_data, make_trainer, train


@pytest.mark.extension("other_libraries")
@row("`build_train_loader`")
def test_a_method_of_detectron2_is_warned_of():
    with said(r"build_train_loader is never called.*create_train_dataloader"):
        type("Other", (Trainer,), {"build_train_loader": lambda self: None})


@row(
    "`before_train` and `after_train`",
    "`before_step` and `after_step`",
    "`after_backward`",
    "the trainer of a hook",
    "hooks run in the order of the list",
)
def test_hooks_run_in_the_order_of_their_list():
    heard: list[str] = []
    names = [
        "on_training_run_start",
        "on_train_step_start",
        "on_backward_end",
        "on_train_step_end",
        "on_training_run_end",
    ]

    def hook(label: str) -> TrainerCallback:
        return listener(**{name: lambda trainer, name=name, **kwargs: heard.append(label + name) for name in names})

    train(make_trainer([hook("a "), hook("b ")]), size=2)
    assert heard == [label + name for name in names for label in ("a ", "b ")]


@pytest.mark.extension("common_mistakes", "other_libraries")
@row("hooks with names of detectron2 are noticed", "`None` in the list is dropped", "what is no hook is refused")
def test_invalid_callbacks_and_unknown_hooks_are_reported():
    class Hook(TrainerCallback):
        def after_step(self):
            pass

    with said("after_step is not an event.*on_train_step_end"):
        train(make_trainer([None, Hook()]))
    with pytest.raises(TypeError, match="is not a TrainerCallback"):
        make_trainer([object()])


@row("no cycle of references keeps a trainer alive")
def test_a_trainer_is_garbage_collected():
    gc.collect()
    gc.disable()
    try:
        trainer = train(make_trainer([listener(on_train_step_end=lambda trainer, **kwargs: None)]))
        left = weakref.ref(trainer)
        del trainer
        assert left() is None
    finally:
        gc.enable()


@row("the last hooks run after an error, too", "telling a finished run from a failed one")
def test_the_last_event_tells_a_failed_run_from_a_finished_one():
    finished: list[bool] = []
    note = listener(on_training_run_end=lambda trainer: finished.append(trainer.is_finished))
    fail = listener(on_train_step_end=lambda trainer, **kwargs: 1 / 0)
    train(make_trainer([note]))
    with pytest.raises(ZeroDivisionError):
        train(make_trainer([note, fail]))
    assert finished == [True, False]


class Endless(torch.utils.data.IterableDataset[Any]):
    """A dataset that repeats one sample for ever."""

    def __iter__(self):
        while True:
            yield make_data()[0]


@pytest.mark.extension("streams")
@row("training by iterations on an endless stream", "a first iteration other than 0")
def test_an_endless_stream_is_trained_on_by_updates():
    rates: list[float] = []
    note = listener(on_train_step_end=lambda trainer, **kwargs: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    create = partial(LambdaLR, lr_lambda=lambda update: 1.0 if 60 + update < 62 else 0.5)
    trainer = make_trainer([note])
    trainer.train(Endless(), max_num_train_steps=4, per_device_batch_size=2, create_scheduler_fn=create)
    assert trainer.progress.update == 4
    assert rates[-1] == 0.05


@row("`run_step` of your own", "a dict of losses is summed, each is recorded")
@pytest.mark.extension("manual_optimization")
def test_an_overridden_step_records_each_of_its_losses():
    class Twice(Trainer):
        def train_step(self, batch):
            for _ in range(2):
                loss = (self.model(batch[0]) - batch[1]).square().mean()
                self.update(loss)
            return {"loss": {"fit": loss, "more": loss}}

    history = train(make_trainer(trainer_class=Twice, loss_func=None)).run_history
    fit, more, both = (history.get_latest_metric(f"train_{name}_epoch") for name in ("fit", "more", "loss"))
    assert fit == more == pytest.approx(both / 2)


@pytest.mark.extension("streams")
@row("a loader is replaced in mid-run", "a loader that wraps another")
def test_a_loader_is_replaced_in_mid_run_or_wrapped():
    class Wraps:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Any:
            return ((x * 2, y) for x, y in self.loader)

    def replace(trainer: Any) -> None:
        if trainer.progress.epochs_completed == 1:
            trainer.train_dataloader = DataLoader(make_data(2), batch_size=2)

    assert train(make_trainer([listener(on_train_epoch_start=replace)]), 2).progress.update == 4
    trainer = make_trainer()
    trainer.train(OwnShard(Wraps(DataLoader(make_data(), batch_size=2))), 1)
    assert trainer.progress.update == 3


@row(
    "`storage.put_scalar`",
    "metrics are gathered every n iterations",
    "metrics are written without keeping the loop",
    "numbers are written to files",
    "a report every n steps",
    "n reports per epoch",
)
@pytest.mark.extension("metrics_file")
def test_logged_numbers_are_written_to_files_at_intervals(tmp_path):
    class Logs(Trainer):
        def calculate_train_batch_loss(self, batch):
            self.log("mean", batch[0].mean())
            self.step_metrics["step"] = self.progress.step
            return super().calculate_train_batch_loss(batch)

    files = [
        callbacks.MetricsFileCallback(tmp_path / "epochs.csv"),
        callbacks.MetricsFileCallback(tmp_path / "two.csv", every="2 updates"),
        callbacks.MetricsFileCallback(tmp_path / "half.csv", every="0.5 epochs"),
    ]
    trainer = train(make_trainer(files, trainer_class=Logs), 2, size=8)
    assert "train_mean_epoch" in trainer.run_history.get_metric_names()
    lines = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.csv")}
    counts = {"epochs.csv": 3, "two_updates.csv": 5, "half_updates.csv": 5}
    assert {name: len(lines[name]) for name in counts} == counts
    assert "step" in lines["two_updates.csv"][0].split(",")


@row("the time for data, the largest of all processes", "timers for steps and epochs")
@pytest.mark.extension("profiling")
def test_times_of_parts_are_recorded():
    names = train(make_trainer([callbacks.TimingCallback(show=False)])).run_history.get_metric_names()
    assert {"time_data", "time_data_max", "time_forward", "time_optimizer", "time_epoch"} <= set(names)


@row("prediction")
def test_a_prediction_is_the_output_of_the_model():
    trainer = make_trainer()
    with torch.no_grad():
        assert torch.equal(trainer.predict(make_data(), 2), trainer.model.eval()(make_data().tensors[0]))
