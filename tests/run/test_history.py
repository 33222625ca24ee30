"""The records of a run: metrics, running means, progress and settings."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError

from pytorch_accel_lite import (
    InMemoryRunHistory,
    LossTracker,
    Progress,
    RunHistory,
    StopTrainingError,
    Trainer,
    TrainerRunConfig,
)
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, SaveTrainingStateCallback
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


# --------------------------------------------------------------------------------------------- history


def test_a_new_history_is_empty_and_at_epoch_one():
    history = InMemoryRunHistory()
    assert isinstance(history, RunHistory)
    assert list(history.get_metric_names()) == []
    assert list(history.get_metric_values("anything")) == []
    assert history.current_epoch == 1
    assert history.metric_name_prefix == ""
    assert history.to_dict() == {}


def test_values_are_returned_in_the_order_of_recording():
    history = InMemoryRunHistory()
    for value in (3, 1, 2):
        history.update_metric("score", value)
    history.update_metric("other", "text")
    assert list(history.get_metric_values("score")) == [3, 1, 2]
    assert history.get_latest_metric("score") == 2
    assert history.get_latest_metric("other") == "text"
    assert list(history.get_metric_names()) == ["score", "other"]


def test_any_value_can_be_recorded_and_is_returned_unchanged():
    history = InMemoryRunHistory()
    matrix = torch.eye(2)
    for value in (math.nan, {"a": 1}, matrix):
        history.update_metric("things", value)
    assert history.get_latest_metric("things") is matrix
    assert history.get_metric_values("things")[1] == {"a": 1}


@pytest.mark.parametrize("method", ["get_latest_metric", "delete_metric"])
def test_an_unknown_metric_is_an_error_that_lists_the_known_ones(method):
    history = filled()
    with pytest.raises(ValueError, match="No values have been recorded for the metric 'eval_loss'") as caught:
        getattr(history, method)("eval_loss")
    message = str(caught.value)
    assert "Did you mean 'eval_loss_epoch'?" in message
    assert "train_loss_epoch, eval_loss_epoch, accuracy" in message


def test_an_unknown_metric_resembling_nothing_gets_no_suggestion():
    with pytest.raises(ValueError, match="for the metric 'zebra'") as caught:
        filled().get_latest_metric("zebra")
    assert "Did you mean" not in str(caught.value)


def test_a_metric_of_an_empty_history_is_an_error():
    with pytest.raises(ValueError, match="Recorded: nothing yet"):
        InMemoryRunHistory().get_latest_metric("loss")


def test_the_prefix_goes_before_names_recorded_from_then_on():
    history = InMemoryRunHistory()
    history.update_metric("loss", 1)
    history.set_metric_name_prefix("ema_")
    assert history.metric_name_prefix == "ema_"
    history.update_metric("loss", 2)
    assert history.get_latest_metric("loss") == 1
    assert history.get_latest_metric("ema_loss") == 2
    history.set_metric_name_prefix()
    history.update_metric("loss", 3)
    assert history.to_dict() == {"loss": [1, 3], "ema_loss": [2]}


def test_a_run_records_its_losses_under_the_prefix():
    trainer = make_trainer()
    trainer.run_history.set_metric_name_prefix("first_")
    train(trainer, eval_dataset=True)
    assert list(trainer.run_history.get_metric_names()) == ["first_train_loss_epoch", "first_eval_loss_epoch"]


def test_a_deleted_metric_is_forgotten_and_can_be_recorded_again():
    history = filled()
    history.delete_metric("accuracy")
    assert list(history.get_metric_names()) == ["train_loss_epoch", "eval_loss_epoch"]
    assert list(history.get_metric_values("accuracy")) == []
    history.update_metric("accuracy", 1)
    assert list(history.get_metric_values("accuracy")) == [1]


def test_reset_forgets_metrics_and_returns_to_epoch_one():
    history = filled()
    assert history.current_epoch == 4
    history.reset()
    assert (history.current_epoch, history.to_dict()) == (1, {})


def test_a_history_becomes_a_dict_of_lists():
    history = filled()
    assert dict(history) == dict(history.items()) == history.to_dict()


def test_to_dict_of_a_history_returns_a_copy():
    history = filled()
    copied = history.to_dict()
    copied["accuracy"].append(1)
    copied["new"] = []
    assert history.to_dict() == {
        "train_loss_epoch": [1, 1 / 2, 1 / 3],
        "eval_loss_epoch": [2, 1, 2 / 3],
        "accuracy": [0.5, 0.75],
    }


def test_asking_for_an_unknown_metric_does_not_create_it():
    history = InMemoryRunHistory()
    assert list(history.get_metric_values("mine")) == []
    assert list(history.get_metric_names()) == []


def test_changing_the_values_of_a_metric_leaves_the_history():
    history = InMemoryRunHistory()
    history.update_metric("score", 3)
    history["score"].append(0.0)
    history.get_metric_values("score").clear()
    assert history["score"] == [3]
    assert history.rows() == [{"epoch": 1, "score": 3}]


def test_names_of_metrics_are_ordered_and_work_like_a_set():
    history = InMemoryRunHistory()
    history.update_metric("score", 3)
    history.update_metric("other", 4)
    names = history.get_metric_names()
    assert list(names) == ["score", "other"]
    assert names == {"other", "score"}
    assert names - {"score"} == {"other"}
    for name in names:  # of which recording another one makes no more
        history.update_metric(f"mean_{name}", 1.0)
    assert len(names) == 2
    assert len(history.get_metric_names()) == 4


def test_the_table_has_a_row_per_epoch_and_a_column_per_metric():
    table = filled().to_dataframe()
    assert table.index.name == "epoch"
    assert list(table.index) == [1, 2, 3]
    assert list(table.columns) == ["train_loss_epoch", "eval_loss_epoch", "accuracy"]
    assert table["train_loss_epoch"].tolist() == [1, 1 / 2, 1 / 3]
    assert table["accuracy"].isna().tolist() == [False, True, False]
    assert table.loc[3, "accuracy"] == 0.75


def test_the_table_shows_the_last_of_several_values_of_an_epoch():
    history = InMemoryRunHistory()
    history.update_metric("score", 1)
    history.update_metric("score", 2)
    assert history.to_dataframe()["score"].tolist() == [2]


def test_the_table_of_an_empty_history_is_empty():
    assert len(InMemoryRunHistory().to_dataframe()) == 0


def test_the_table_of_a_run_is_that_of_its_epochs():
    trainer = train(make_trainer(), epochs=3, eval_dataset=True)
    table = trainer.run_history.to_dataframe()
    assert list(table.index) == [1, 2, 3]
    assert {name: table[name].tolist() for name in table} == trainer.run_history.to_dict()


def test_evaluating_after_a_run_adds_no_epoch_to_the_table():
    trainer = train(make_trainer(), epochs=2)
    trainer.evaluate(make_data())
    assert list(trainer.run_history.to_dataframe().index) == [1, 2]


def record_epoch(trainer: Trainer, **kwargs: object) -> None:
    trainer.run_history.update_metric("mine", trainer.progress.epoch)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ("on_epoch_checkpoint", [1, 2]),
        ("on_training_run_epoch_end", [1, 2]),
        ("on_train_epoch_start", [1, 2]),
        ("on_training_run_end", [None, 2]),
        ("on_training_run_start", [0, None]),
    ],
)
def test_a_value_belongs_to_the_epoch_in_which_it_is_recorded(event, expected):
    trainer = train(make_trainer([listener(**{event: record_epoch})]), epochs=2)
    assert [row.get("mine") for row in trainer.run_history.rows()] == expected
    assert trainer.run_history.current_epoch == 3


@pytest.mark.parametrize("place", [0, 1])
def test_a_value_recorded_after_an_epoch_is_in_its_state(place, tmp_path):
    """If its callback comes before the one that saves. The run is resumed twice: at last, nothing is left to do."""

    def trained(**kwargs: Any) -> Trainer:
        callbacks: list[Any] = [SaveTrainingStateCallback(tmp_path)]
        callbacks.insert(place, listener(on_epoch_checkpoint=record_epoch, on_training_run_end=record_epoch))
        return train(make_trainer(callbacks, seed=1), **kwargs)

    trained(epochs=2)
    for resumed in (trained(epochs=3, resume_from="latest"), trained(epochs=3, resume_from="latest")):
        found = {row["epoch"]: row.get("mine") for row in resumed.run_history.rows()}
        assert found == {1: 1, 2: 2 if place == 0 else None, 3: 3}
        assert resumed.run_history.current_epoch == 4


def test_a_value_recorded_after_an_epoch_as_its_loss_is_an_error():
    callback = listener(on_epoch_checkpoint=lambda t: t.run_history.update_metric("train_loss_epoch", 1.0))
    with pytest.raises(ValueError, match="'train_loss_epoch', so epoch 1 would have two values"):
        train(make_trainer([callback]), epochs=1)


def test_evaluating_after_a_second_run_is_in_its_last_epoch():
    trainer = train(make_trainer(), epochs=2)
    train(trainer, epochs=1, reset_run_history=False)
    trainer.evaluate(make_data())
    assert [row["epoch"] for row in trainer.run_history.rows() if "evaluation_loss" in row] == [3]


def test_a_second_run_with_the_history_continues_its_epochs():
    trainer = train(make_trainer(), epochs=2)
    train(trainer, epochs=1, reset_run_history=False)
    assert list(trainer.run_history.to_dataframe().index) == [1, 2, 3]
    train(trainer, epochs=1)
    assert list(trainer.run_history.to_dataframe().index) == [1]


@pytest.mark.programs
def test_without_the_extra_a_table_says_what_to_install():
    script = """
from tests.launching import forget
forget("pandas", installed=False)
from pytorch_accel_lite.tracking import InMemoryRunHistory
history = InMemoryRunHistory()
history.update_metric("loss", 1)
try:
    history.to_dataframe()
except ImportError as error:
    print(error)
"""
    (table,) = run_code(script).splitlines()
    assert re.search("to_dataframe.. needs pandas. Install it with: pip install '?pandas", table)


class ListHistory(RunHistory):
    """A history of the user's own, with nothing but what the base class asks for."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, object]] = []
        self.epoch = 1
        self.prefix = ""

    def get_metric_names(self):
        return dict.fromkeys(name for _, name, _ in self.rows)

    def get_metric_values(self, metric_name):
        return [value for _, name, value in self.rows if name == metric_name]

    def get_latest_metric(self, metric_name):
        return self.get_metric_values(metric_name)[-1]

    def update_metric(self, metric_name, metric_value):
        self.rows.append((self.epoch, self.prefix + metric_name, metric_value))

    def delete_metric(self, metric_name):
        self.rows = [row for row in self.rows if row[1] != metric_name]

    def set_metric_name_prefix(self, prefix=""):
        self.prefix = prefix

    @property
    def metric_name_prefix(self):
        return self.prefix

    @property
    def current_epoch(self):
        return self.epoch

    def _increment_epoch(self):
        self.epoch += 1

    def _set_epoch(self, epoch):
        self.epoch = epoch

    def reset(self):
        self.__init__()


def test_a_users_history_is_used():
    history = ListHistory()
    trainer = make_trainer(DEFAULT_CALLBACKS, run_history=history)
    train(trainer, epochs=2, eval_dataset=True)
    assert [(epoch, name) for epoch, name, _ in history.rows] == [
        (1, "train_loss_epoch"),
        (1, "eval_loss_epoch"),
        (2, "train_loss_epoch"),
        (2, "eval_loss_epoch"),
    ]
    assert trainer.evaluate().keys() == {"evaluation_loss"}


def test_a_users_empty_history_is_used():
    class Sized(InMemoryRunHistory):
        def __len__(self):
            return len(self.get_metric_names())

    history = Sized()
    assert make_trainer(run_history=history).run_history is history


# ---------------------------------------------------------------------------------------- running means


@pytest.mark.parametrize(("updates", "average", "total", "count", "last"), [
    ([], 0, 0, 0, 0),
    ([(2.0, 3), (4.0, 1)], 2.5, 10.0, 4, 4.0),
    ([(1.0,), (2.0,)], 1.5, 3.0, 2, 2.0),  # each counts once
    ([(1.0, 1), (torch.tensor(2.0), 1), (6.0, 1)], 3.0, 9.0, 3, 6.0),
])  # fmt: skip
def test_a_running_mean_weighs_by_batch_size(updates, average, total, count, last):
    tracker = LossTracker()
    for update in updates:
        tracker.update(*update)
    assert tracker.average == average
    assert (tracker.total_loss, tracker.running_count, tracker.loss_value) == (total, count, last)


@pytest.mark.parametrize("weight", [3, torch.tensor(3), torch.tensor(3.0)], ids=["int", "int tensor", "float tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_running_mean_of_tensors_is_summed_in_float64(dtype, weight):
    tracker = LossTracker()
    for value in (0.1, 0.2, 0.7):
        tracker.update(torch.tensor(value, dtype=dtype), weight)
    expected = sum(float(torch.tensor(value, dtype=dtype)) for value in (0.1, 0.2, 0.7)) / 3
    assert tracker.average == pytest.approx(expected, rel=1e-14)
    assert isinstance(tracker.total_loss, float)  # in host memory a number; on a device a tensor
    assert isinstance(tracker.average, float)


def test_small_losses_are_not_lost_in_a_large_sum():
    tracker = LossTracker()
    tracker.update(torch.tensor(1.0), 2**26)
    for _ in range(100):
        tracker.update(torch.tensor(1.0), 1)
    assert float(tracker.total_loss) == 2**26 + 100


def test_sums_of_losses_stay_on_the_device_without_being_read():
    tracker = LossTracker()
    for _ in range(2):
        tracker.update(torch.ones((), device="meta"), 4)  # a device that cannot be read
    assert tracker.total_loss.device.type == "meta"
    assert tracker.running_count == 8


@pytest.mark.parametrize("weight", [4, torch.ones(1, device="meta")], ids=["number", "tensor"])
def test_a_loss_of_one_element_may_have_any_shape(weight):
    tracker = LossTracker()
    tracker.update(torch.ones(1, device="meta"), weight)
    assert tracker.total_loss.shape == ()
    tracker = LossTracker()
    tracker.update(torch.full((1, 1), 2.0), 4)
    assert tracker.total_loss == 8.0


def test_a_running_mean_keeps_no_graph():
    loss = torch.tensor(2.0, requires_grad=True) * 1
    tracker = LossTracker()
    tracker.update(loss, 5)
    tracker.update(loss, 5)
    assert tracker.total_loss == 20.0
    assert tracker.loss_value == 2.0
    assert loss.requires_grad
    assert loss.item() == 2.0


def test_a_loss_changed_in_place_later_does_not_change_the_mean():
    loss = torch.tensor(2.0)
    tracker = LossTracker()
    tracker.update(loss, 1)
    loss.zero_()
    assert tracker.average == 2.0


def test_a_reset_running_mean_starts_at_zero():
    tracker = LossTracker()
    tracker.update(torch.tensor(5.0), 2)
    tracker.reset()
    assert tracker.average == 0
    tracker.update(1.0, 2)
    assert tracker.average == 1.0


# --------------------------------------------------------------------------------------------- progress


def test_progress_counts_steps_updates_and_samples():
    trainer = make_trainer()
    train(trainer, epochs=2, size=5, batch_size=2, gradient_accumulation_steps=2)
    assert trainer.progress == Progress(epoch=2, epochs_completed=2, step=3, update=4, samples_in_epoch=5, samples=10)


def test_progress_restarts_in_every_run():
    trainer = train(make_trainer(), epochs=3)
    train(trainer, epochs=1, size=4)
    assert (trainer.progress.epoch, trainer.progress.update, trainer.progress.samples) == (1, 2, 4)


def test_progress_survives_a_state_round_trip():
    progress = Progress(epoch=3, epochs_completed=2, step=5, update=17, samples_in_epoch=40, samples=200)
    state = progress.state_dict()
    restored = Progress()
    restored.load_state_dict(state)
    assert restored == progress
    state["update"] = 0
    assert progress.update == 17


def test_a_state_with_an_unknown_count_is_an_error_that_names_it():
    progress = Progress()
    with pytest.raises(KeyError, match=r"\['batches', .* are missing or unknown") as caught:
        progress.load_state_dict({"epoch": 1, "batches": 2})
    assert "samples_in_epoch" in str(caught.value)
    assert progress == Progress()


def test_a_state_with_a_missing_count_is_an_error_that_names_it():
    state = Progress(update=3).state_dict()
    del state["samples"]
    with pytest.raises(KeyError, match=r"\['samples'\] are missing or unknown"):
        Progress(samples=9).load_state_dict(state)


# ------------------------------------------------------------------------------------------- run config


def test_the_run_config_has_the_requested_values():
    trainer = make_trainer(seed=5)
    train(
        trainer,
        epochs=3,
        size=9,
        batch_size=2,
        gradient_accumulation_steps=2,
        gradient_clip_value=0.5,
        gradient_clip_norm=2.0,
        eval_dataset=make_data(4),
        eval_dataloader_kwargs={"batch_size": 4},
    )
    config = trainer.run_config
    assert isinstance(config, TrainerRunConfig)
    expected = {
        "num_epochs": 3,
        "train_per_device_batch_size": 2,
        "eval_per_device_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clip_value": 0.5,
        "gradient_clip_norm": 2.0,
        "train_total_batch_size": 4,
        "eval_total_batch_size": 4,
        "num_update_steps_per_epoch": 3,
        "num_local_update_steps_per_epoch": 3,
        "max_num_train_steps": 9,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "is_distributed": False,
        "mixed_precision": "no",
        "num_processes": 1,
        "seed": 5,
    }
    values = config.to_dict()
    assert {name: values[name] for name in expected} == expected
    assert values.keys() == {field.name for field in dataclasses.fields(config)}
    assert values["train_dl_kwargs"]["shuffle"] is False
    assert values["train_dl_kwargs"]["batch_size"] == 2
    assert values["eval_dl_kwargs"]["batch_size"] == 4


def test_the_run_config_cannot_be_changed():
    config = train(make_trainer()).run_config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_epochs = 5


def test_to_dict_of_a_run_config_returns_a_copy():
    config = train(make_trainer()).run_config
    values = config.to_dict()
    values["num_epochs"] = 99
    values["train_dl_kwargs"]["batch_size"] = 99
    assert config.num_epochs == 1
    assert config.train_dl_kwargs["batch_size"] == 2


def test_the_users_dataloader_arguments_are_not_changed():
    arguments = {"shuffle": False}
    trainer = train(make_trainer(), train_dataloader_kwargs=arguments)
    assert arguments == {"shuffle": False}
    assert trainer.run_config.train_dl_kwargs is not arguments


def test_each_run_has_its_own_config():
    trainer = train(make_trainer(), epochs=2)
    first = trainer.run_config
    train(trainer, epochs=3)
    assert (first.num_epochs, trainer.run_config.num_epochs) == (2, 3)


def test_the_run_config_is_none_before_the_first_run():
    assert make_trainer().run_config is None


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("is_reloaded", [False, True])
def test_later_evaluations_do_not_change_a_runs_values(is_reloaded):
    from pytorch_accel_lite.callbacks import MetricsCallback

    x = torch.arange(12.0).view(-1, 1)
    easy, hard = TensorDataset(x, x), TensorDataset(x, x + 9)
    model = nn.Linear(1, 1)
    error = MetricsCallback({"error": MeanAbsoluteError()})
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), [error])
    trainer.train(easy, 2, eval_dataset=easy)
    [first, last] = trainer.run_history["error"]
    found = [trainer.evaluate(hard), trainer.evaluate(hard)]
    history = trainer.run_history
    if is_reloaded:
        state = history.state_dict()
        history = InMemoryRunHistory()
        history.load_state_dict(state)
    assert found[0] == found[1]
    assert history["error"] == [first, last, found[0]["error"], found[1]["error"]]  # the ancestor's users read the last
    assert history.curves()["error"] == ([1, 2], [first, last])
    assert "evaluation_loss" not in history.curves()
    assert history.curves(["evaluation_loss"]) == {"evaluation_loss": ([2, 2], [found[0]["evaluation_loss"]] * 2)}
    assert [row["error"] for row in history.rows()] == [first, last]
    assert history.rows(2)[0]["evaluation_loss"] == found[0]["evaluation_loss"]
    assert history.current_epoch == 3


def test_nested_evaluations_after_a_run_use_its_last_epoch():
    x = torch.ones(4, 1)
    data = TensorDataset(x, x)
    inner = []

    def evaluate_again(trainer, **_):
        if not inner:
            inner.append(None)
            trainer.evaluate(data)

    model = nn.Linear(1, 1)
    again = listener(on_evaluation_run_end=evaluate_again)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), [again])
    trainer.train(data, 3)
    trainer.evaluate(data)
    epochs, losses = trainer.run_history.curves(["evaluation_loss"])["evaluation_loss"]
    assert epochs == [3, 3]
    assert losses[0] == losses[1]
    assert trainer.run_history.current_epoch == 4


def test_a_history_of_evaluations_alone_has_curves_and_rows():
    trainer = Trainer(nn.Linear(1, 1), nn.MSELoss(), None, callbacks=[])
    x = torch.ones(4, 1)
    found = trainer.evaluate(TensorDataset(x, x))
    assert trainer.run_history.curves() == {"evaluation_loss": ([1], [found["evaluation_loss"]])}
    assert trainer.run_history.rows() == [{"epoch": 1, **found}]


def test_a_subclass_may_reset_what_its_constructor_creates():
    class Own(InMemoryRunHistory):
        def __init__(self):
            super().__init__()
            self.notes = ["new"]

        def reset(self):
            self.notes.clear()
            super().reset()

    history = Own()
    train(make_trainer(run_history=history))
    assert history.notes == []
    assert len(history["train_loss_epoch"]) == 1


def test_a_history_refuses_invalid_names_and_values():
    history = InMemoryRunHistory()
    with pytest.raises(TypeError, match="metric_value=None is not a value of 'a'"):
        history.update_metric("a", None)
    with pytest.raises(TypeError, match="metric_name=3 must be the name"):
        history.update_metric(3, 1.0)
    assert not list(history)


def test_a_run_resumes_whose_history_was_reset_before_saving(tmp_path):
    def stopped(trainer, **kwargs):
        raise StopTrainingError("enough")

    trainer = train(make_trainer([listener(on_update_end=stopped)], seed=1))
    trainer.run_history.reset()
    trainer.save_training_state(tmp_path)
    resumed = train(make_trainer(seed=1), epochs=2, resume_from=tmp_path)
    assert resumed.progress.epoch == 2
