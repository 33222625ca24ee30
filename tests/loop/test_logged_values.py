"""Values logged by steps and callbacks: means over an epoch; evaluations without a loss."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveTrainingStateCallback
from pytorch_accel_lite.data import OwnShard
from tests.ranks import IN_ORDER, global_batch, rank, shared_folder
from tests.shared_trainings import SPLITTING
from tests.small_models import float64_data, float64_model, listener, make_data, make_trainer, train


class LogsNumbers(Trainer):
    """Logs in its steps."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        self.log("index", batch[0])
        self.log("weighted", torch.tensor(2.0), weight=3)
        return super().calculate_train_batch_loss(batch)

    def calculate_eval_batch_loss(self, batch: Any) -> Any:
        self.log("index", batch[0])
        return super().calculate_eval_batch_loss(batch)


class LogsTheLoss(TrainerCallback):
    """Logs in the events of a step."""

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        trainer.log("from_callback", batch_output["loss"])


class LogsByRank(Trainer):
    """Logs a number in every step, one only on the first rank, one under a name for each rank, one in some steps."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        update = self.progress.update
        self.log("everywhere", 1.0 + rank())
        self.log(f"of_{rank()}", 10.0 * (1 + rank()))
        if rank() == 0:
            self.log("first", float(update))
        if update >= 3:
            self.log("late" if rank() else "later", 7.0)
        return super().calculate_train_batch_loss(batch)


class EvaluatesByError(Trainer):
    """Has no loss in evaluations."""

    def calculate_eval_batch_loss(self, batch: Any) -> Any:
        self.log("error", batch[0])
        return {"loss": None}


def logged_numbers() -> dict[str, Any]:
    """The recorded values of 11 samples in batches of 4."""
    x = torch.arange(11.0, dtype=torch.float64)[:, None]
    data = TensorDataset(x, x)
    model = float64_model(features=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = LogsNumbers(model, nn.MSELoss(), optimizer, callbacks=[LogsTheLoss])
    trainer.train(data, 2, data, per_device_batch_size=global_batch(4), train_dataloader_kwargs=IN_ORDER)
    trainer.evaluate(data)
    return {name: list(values) for name, values in trainer.run_history.to_dict().items()}


def test_logged_numbers_are_means_over_samples(two_ranks):
    alone = logged_numbers()
    assert alone["train_index_epoch"] == [sum(range(11)) / 11] * 2
    assert alone["eval_index_epoch"] == [sum(range(11)) / 11] * 2
    assert alone["evaluation_index"] == [5.0]
    assert alone["train_weighted_epoch"] == [2.0, 2.0]
    assert alone["train_from_callback_epoch"] == pytest.approx(alone["train_loss_epoch"])
    for found in two_ranks(logged_numbers):
        assert found.keys() == alone.keys()
        for name, values in found.items():
            assert values == pytest.approx(alone[name]), name


def rows_of_ranks_that_log_differently() -> list[dict[str, float]]:
    """The rows of seven samples, whose last batches are fillers on some ranks."""
    with shared_folder() as folder:
        log = callbacks.MetricsFileCallback(folder / "m.jsonl", every_n_updates=1)
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = LogsByRank(model, nn.MSELoss(), optimizer, callbacks=[log])
        trainer.train(float64_data(7), 2, per_device_batch_size=1, train_dataloader_kwargs=IN_ORDER)
        trainer.barrier()
        rows = (folder / "m_updates.jsonl").read_text().splitlines()
        trainer.barrier()
    return [json.loads(row) for row in rows]


@pytest.mark.extension("metrics_file")
def test_rows_have_the_numbers_of_all_ranks_under_any_names(two_ranks):
    of_first, of_second = two_ranks(rows_of_ranks_that_log_differently)
    assert of_first == of_second
    assert [row["of_0"] for row in of_first] == [10.0] * 8
    assert [row["of_1"] for row in of_first[:3]] == [20.0] * 3
    assert [row["everywhere"] for row in of_first[:3]] == [1.5] * 3
    assert [row["first"] for row in of_first] == [float(update) for update in range(8)]
    assert ["late" in row for row in of_first[:3]] == [False] * 3
    assert [row["late"] for row in of_first[4:7]] == [row["later"] for row in of_first[4:7]] == [7.0] * 3


class TimeFirst(Trainer):
    """Batches whose samples are in the second dimension, so that only the step knows how many there are."""

    logs_in_step = True

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        shapes = [(5, 1, 4), (2, 3, 4)]
        return OwnShard([(torch.full(shape, float(shape[1])), torch.zeros(*shape[:2], 1)) for shape in shapes])

    create_eval_dataloader = create_train_dataloader

    def calculate_train_batch_loss(self, batch):
        value = batch[0].mean() + 0 * self.model(batch[0]).mean()
        if self.logs_in_step:
            self.log("same", value)
        return {"loss": value, "batch_size": batch[0].shape[1]}

    calculate_eval_batch_loss = calculate_train_batch_loss


@pytest.mark.extension("streams")
@pytest.mark.parametrize("event", [None, "on_train_step_start", "on_backward_end", "on_train_step_end"])
@pytest.mark.parametrize("kwargs", [{}, SPLITTING, {"gradient_accumulation_steps": 2}])
def test_logged_numbers_are_weighed_by_the_steps_batch_size(event, kwargs):
    def log(trainer, **_):
        trainer.log("same", trainer.current_run.batch.data[0].mean())

    trainer = make_trainer([] if event is None else [listener(**{event: log})], trainer_class=TimeFirst)
    trainer.logs_in_step = event is None
    trainer.train([0], 1, eval_dataset=[0] if event is None else None, **kwargs)
    found = {name: values[0] for name, values in trainer.run_history.to_dict().items()}
    names = ["train_loss_epoch", "train_same_epoch", *(["eval_loss_epoch", "eval_same_epoch"] if event is None else [])]
    assert found == dict.fromkeys(names, (1 * 1 + 3 * 3) / (1 + 3))


def test_numbers_of_a_custom_batch_are_weighed_by_the_step():
    class Texts(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return DataLoader(["a", "b", "c", "d"], batch_sampler=[[0], [1, 2, 3]], collate_fn=list)

        def calculate_train_batch_loss(self, batch):
            self.log("length", float(len(batch)))
            return {"loss": self.model(torch.ones(len(batch), 4)).mean(), "batch_size": len(batch)}

    trainer = make_trainer(trainer_class=Texts)
    trainer.train([0], 1)
    assert trainer.run_history.get_latest_metric("train_length_epoch") == (1 * 1 + 3 * 3) / 4


def test_a_logged_number_keeps_its_value():
    class Counts(Trainer):
        def calculate_train_batch_loss(self, batch):
            count = torch.ones(())
            self.log("count", count)
            count.add_(1)
            return super().calculate_train_batch_loss(batch)

    assert train(make_trainer(trainer_class=Counts)).run_history.get_latest_metric("train_count_epoch") == 1.0


@pytest.mark.parametrize(
    "value", ["text", None, 1j, [1.0], torch.ones(2, dtype=torch.complex64), np.complex64(1), np.ones(2)]
)
def test_logging_anything_but_a_number_is_refused(value):
    late = listener(on_train_step_end=lambda trainer, **_: trainer.log("x", value))
    with pytest.raises(TypeError, match=re.escape(f"log('x', {value!r}): the value must be a real number")):
        train(make_trainer([late]))


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_logged_value_needs_a_name(name):
    log = listener(on_train_step_end=lambda trainer, **_: trainer.log(name, 1.0))
    with pytest.raises(TypeError, match=re.escape(f"log(name={name!r}): the name must be a string that is not empty")):
        train(make_trainer([log]))


@pytest.mark.parametrize("value", [
    True, 1, np.float32(1), np.ones(()), np.ones(1), torch.ones(2, 3), torch.ones(1), torch.ones(2, dtype=torch.bool),
    torch.tensor([0, 2]), torch.tensor(1), torch.tensor(True),
])  # fmt: skip
def test_numbers_of_all_kinds_are_logged(value):
    late = listener(on_train_step_end=lambda trainer, **_: trainer.log("x", value))
    assert train(make_trainer([late])).run_history.get_latest_metric("train_x_epoch") == 1.0


@pytest.mark.extension("failed_batches")
def test_values_logged_by_a_failed_step_are_dropped():
    class FailsOnce(Trainer):
        attempts = 0

        def calculate_train_batch_loss(self, batch):
            self.log("ones", 1.0)
            self.log("index", batch[0].mean())
            self.attempts += 1
            if self.attempts in (1, 4):
                raise torch.OutOfMemoryError("out of memory")
            return super().calculate_train_batch_loss(batch)

    x = torch.arange(8.0)[:, None]
    model = nn.Linear(1, 1)
    trainer = FailsOnce(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-3), callbacks=[])
    order = {"shuffle": False}  # the mean of the batch that fails is not that of all
    trainer.train(TensorDataset(x, x), 1, per_device_batch_size=4, auto_microbatch=True, train_dataloader_kwargs=order)
    assert trainer.num_microbatches == 4
    assert trainer.run_history.get_latest_metric("train_index_epoch") == 3.5
    assert trainer.run_history.get_latest_metric("train_ones_epoch") == 1.0


def test_a_prediction_records_nothing_that_is_logged():
    log = listener(on_predict_step_end=lambda trainer, **_: trainer.log("confidence", 0.5))
    trainer = make_trainer([log])
    assert len(trainer.predict(make_data(6), 2)) == 6
    assert trainer.run_history.to_dict() == make_trainer().run_history.to_dict()
    assert not trainer.loss_trackers.unweighed


def test_logging_outside_of_a_step_is_refused():
    trainer = make_trainer()
    with pytest.raises(RuntimeError, match=r"log\('mae'\) adds to the mean of an epoch"):
        trainer.log("mae", 1.0)
    late = listener(on_train_epoch_end=lambda trainer: trainer.log("mae", 1.0))
    with pytest.raises(RuntimeError, match=r"can only be called in a step.*update_metric"):
        train(make_trainer([late]))


@pytest.mark.parametrize("name", ["loss", "kl"])
def test_the_name_of_a_loss_is_refused(name):
    class Parts(Trainer):
        def calculate_train_batch_loss(self, batch):
            loss = super().calculate_train_batch_loss(batch)["loss"]
            if self.progress.step:
                self.log(name, 1.0)
            return {"loss": {"kl": loss, "rest": loss}}

    with pytest.raises(ValueError, match=f"'{name}' is already a loss of the step"):
        train(make_trainer(trainer_class=Parts))


def test_the_name_of_a_loss_is_refused_for_a_logged_number():
    class Parts(Trainer):
        def calculate_train_batch_loss(self, batch):
            self.log("kl", 100.0)
            loss = super().calculate_train_batch_loss(batch)["loss"]
            return {"loss": {"kl": loss, "rest": loss}}

        calculate_eval_batch_loss = calculate_train_batch_loss

    trainer = make_trainer(trainer_class=Parts)
    with pytest.raises(ValueError, match="'kl' is already a loss of the step"):
        trainer.train(make_data(), 1)
    with pytest.raises(ValueError, match="'kl' is already a loss of the step"):
        trainer.evaluate(make_data())


def test_logged_numbers_are_resumed_with_their_epoch(tmp_path):
    def run(folder, **kwargs):
        logs = listener(on_train_step_end=lambda t, batch, **_: t.log("index", batch[0].mean()))
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1, max_checkpoints=None)
        trainer = train(make_trainer([logs, states], seed=1), epochs=2, **kwargs)
        return trainer.run_history.get_metric_values("train_index_epoch")

    whole = run("whole")
    for state in [path for path in (tmp_path / "whole").iterdir() if path.is_dir()]:
        assert run("again", resume_from=state) == whole


@pytest.mark.extension("metrics_file")
def test_rows_of_a_resumed_run_have_values_from_before(tmp_path):
    def log(trainer: Trainer, **_: object) -> None:
        if trainer.progress.update % 4 == 0:
            trainer.log("rare", float(trainer.progress.update))

    def run(folder: str, **kwargs):
        files = callbacks.MetricsFileCallback(tmp_path / folder / "m.jsonl", every_n_updates=1)
        states = SaveTrainingStateCallback(tmp_path / folder / "states", save_every_n_steps=1)
        train(make_trainer([listener(on_backward_start=log), files, states], seed=1), epochs=3, **kwargs)
        rows = (tmp_path / folder / "m_updates.jsonl").read_text().splitlines()
        return {row["update"]: row for row in map(json.loads, rows)}

    whole = run("whole")
    assert [row["rare"] for row in whole.values()] == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    for state in sorted((tmp_path / "whole" / "states").glob("update-*")):
        for update, row in run(f"after {state.name}", resume_from=state).items():
            assert row == whole[update]


@pytest.mark.extension("metrics_file")
def test_the_latest_value_reaches_loggers_by_update(tmp_path):
    logs = listener(on_backward_start=lambda t, step, **_: t.log("noise", float(step)))
    files = callbacks.MetricsFileCallback(tmp_path / "metrics.jsonl", every_n_updates=1)
    train(make_trainer([logs, files]))
    rows = [json.loads(line) for line in (tmp_path / "metrics_updates.jsonl").read_text().splitlines()]
    assert [row["noise"] for row in rows] == [0.0, 1.0, 2.0]


# --------------------------------------------------------------------------------------- what steps return


def test_step_metrics_are_of_training_in_any_mode():
    class OtherModes(Trainer):
        def train_epoch_start(self):
            self.model.eval()

        def eval_epoch_start(self):
            self.model.train()

        def calculate_train_batch_loss(self, batch):
            self.log("trained", 1.0)
            return super().calculate_train_batch_loss(batch)

        def calculate_eval_batch_loss(self, batch):
            self.log("evaluated", 1.0)
            return super().calculate_eval_batch_loss(batch)

    for event in ("on_train_step_end", "on_train_epoch_end"):  # an evaluation within the epoch is none of its steps
        evaluates = listener(**{event: lambda trainer, **_: trainer.run_evaluation()})
        trainer = train(make_trainer([evaluates], trainer_class=OtherModes), eval_dataset=True)
        assert trainer.step_metrics == {"trained": 1.0}


@pytest.mark.extension("failed_batches")
def test_numbers_of_a_batch_that_was_split_are_averaged():
    class Splits(Trainer):
        def calculate_train_batch_loss(self, batch):
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("out of memory")
            self.log("index", batch[0])
            self.log("size", len(batch[0]))
            return super().calculate_train_batch_loss(batch)

    x = torch.arange(5.0)[:, None]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Splits(model, nn.MSELoss(), optimizer, callbacks=[])
    trainer.train(TensorDataset(x, x), 1, per_device_batch_size=5, auto_microbatch=True)
    assert trainer.run_history.get_latest_metric("train_index_epoch") == 2.0
    assert trainer.run_history.get_latest_metric("train_size_epoch") == pytest.approx((1 + 1 + 1 + 2 * 2) / 5)


# --------------------------------------------------------------------------------------- evaluations without a loss


def evaluations_without_loss() -> dict[str, Any]:
    """The recorded and returned values of evaluations with and without logged numbers."""
    x = torch.arange(11.0, dtype=torch.float64)[:, None]
    data = TensorDataset(x, x)
    model = float64_model(features=1)
    trainer = EvaluatesByError(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[])
    trainer.train(data, 1, data, per_device_batch_size=global_batch(4))
    history = {name: list(values) for name, values in trainer.run_history.to_dict().items()}
    evaluated = trainer.evaluate(data)
    trainer.log = lambda name, value: None
    return {"history": history, "evaluated": evaluated, "nothing": trainer.evaluate(data)}


def test_an_evaluation_without_a_loss_records_what_it_logs(two_ranks):
    for found in (evaluations_without_loss(), *two_ranks(evaluations_without_loss)):
        assert found["history"] == {
            "train_loss_epoch": [found["history"]["train_loss_epoch"][0]],
            "eval_error_epoch": [5.0],
        }
        assert found["evaluated"] == {"evaluation_error": 5.0}
        assert found["nothing"] == {}


def test_watching_a_loss_that_an_evaluation_lacks_is_an_error():
    class Without(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": None}

    trainer = make_trainer([EarlyStoppingCallback()], trainer_class=Without)
    with pytest.raises(ValueError, match=r"EarlyStoppingCallback.*eval_loss_epoch.*: the evaluation returned no loss"):
        train(trainer, epochs=3, eval_dataset=True)
    assert trainer.progress.epoch == 1


def test_a_missing_loss_func_is_an_error_with_advice():
    class Forgets(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"outputs": 1}

    with pytest.raises(ValueError, match="Return 'loss': None to evaluate without a loss"):
        make_trainer(trainer_class=Forgets).evaluate(make_data())
    with pytest.raises(TypeError, match="'loss' must be a tensor, not NoneType"):
        train(
            make_trainer(trainer_class=type("T", (Trainer,), {"calculate_train_batch_loss": lambda *_: {"loss": None}}))
        )


def test_the_dataset_that_is_evaluated_is_known_by_name():
    names = []
    trainer = make_trainer([listener(on_eval_step_end=lambda t, **_: names.append(t.eval_dataset_name))])
    train(trainer, eval_dataset={"clean": make_data(2), "noisy": make_data(2)})
    trainer.evaluate(make_data(2))
    assert names == ["clean", "noisy", None]
    assert trainer.eval_dataset_name is None


def test_plain_steps_and_evaluations_note_the_size_of_a_batch():
    """As ``note_batch_size()`` does, which both inline to save a call in every step."""

    class Logs(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            self.log("mean", batch[0])  # waits for the size of the batch
            return super().calculate_train_batch_loss(batch) | {"batch_size": 7}

        def calculate_eval_batch_loss(self, batch: Any) -> Any:
            self.log("mean", batch[0])
            return super().calculate_eval_batch_loss(batch) | {"batch_size": 9}

    sizes: list[int] = []

    def look(trainer: Trainer, batch_output: Any, **_: Any) -> None:
        trackers = trainer.run.loss_trackers
        assert trackers.latest_batch[0] is trainer.run.batch
        assert not trackers.unweighed
        sizes.append(trackers.latest_batch[1])

    callback = listener(on_backward_start=look, on_eval_step_end=look)
    train(make_trainer([callback], trainer_class=Logs), size=4, eval_dataset=True)
    assert sizes == [7, 7, 9, 9]
