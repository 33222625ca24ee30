"""Evaluations and predictions within a run do not change it."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchmetrics import MeanAbsoluteError

from pytorch_accel_lite import CallbackHandler, StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import CAN_SHARD, SOAK
from tests.sharded import gathered, large_model, mesh_of, sharding_accelerator
from tests.small_models import (
    Broken,
    Rows,
    adamw_trainer,
    equal_weights,
    float64_data,
    listener,
    make_data,
    make_trainer,
    same_bits,
    train,
    weights,
)

HAS_TUNING = hasattr(Trainer, "find_lr")


class UsesIt(TrainerCallback):
    """Calls a sharded model's trainer within its run."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_step_end(self, trainer, **kwargs):
        self.calls += 1
        assert trainer.is_running
        assert trainer.is_sharded
        with pytest.raises(RuntimeError, match="cannot be called within a run"):
            trainer.train(float64_data(8), 1)
        if HAS_TUNING:
            with pytest.raises(RuntimeError, match="cannot be called within a run"):
                trainer.find_lr(float64_data(8))
        indices = trainer.batch_indices
        trainer.evaluate(float64_data(5), 2)
        trainer.predict(float64_data(5), 2)
        assert trainer.batch_indices == indices


def _used_again(create_trainer: Callable[[list[Any]], Trainer]) -> dict[str, torch.Tensor]:
    """The final weights, the same with and without use within the run and between two runs."""
    found = []
    for uses in (False, True):
        callback = UsesIt()
        trainer = create_trainer([callback] if uses else [])
        assert not trainer.is_running
        trainer.train(float64_data(22), 1, float64_data(9), 3, gradient_accumulation_steps=2, gradient_clip_norm=1)
        assert callback.calls == (4 if uses else 0)
        assert not trainer.is_running
        if uses:
            before = gathered(trainer.get_model().state_dict())
            metrics = trainer.evaluate(float64_data(9), 3)
            assert metrics["evaluation_loss"] == trainer.run_history.get_latest_metric("eval_loss_epoch")
            assert trainer.predict(float64_data(9), 3).shape == (9, 1)
            assert not HAS_TUNING or len(trainer.find_lr(float64_data(22), 3, num_steps=12).lrs) > 3
            assert not trainer.is_running
            assert equal_weights(gathered(trainer.get_model().state_dict()), before)
        trainer.train(float64_data(22), 1, float64_data(9), 3, gradient_accumulation_steps=2)
        found.append(gathered(trainer.get_model().state_dict()))
    assert equal_weights(*found)
    return found[0]


HERE = {"num_workers": 0}
EVENTS = ("on_train_step_start", "on_train_step_end", "on_update_end", "on_train_epoch_end")


def dropout_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).double()


class Nested(TrainerCallback):
    """Runs something at an event of a training run."""

    def __init__(self, event: str, action: Any) -> None:
        self.runs = 0
        self._within = False

        def run(trainer: Any, **kwargs: Any) -> None:
            if not self._within:
                self._within, self.runs = True, self.runs + 1
                action(trainer)
                self._within = False

        setattr(self, event, run)


class Witness(TrainerCallback):
    """Records what a later callback sees of the run at the same event."""

    def __init__(self, event: str) -> None:
        self.seen: list[dict[str, Any]] = []

        def look(trainer: Any, **kwargs: Any) -> None:
            self.seen.append({
                "batch_indices": trainer.batch_indices,
                "recorded_losses": dict(trainer.recorded_losses),
                "run_config": trainer.run_config,
                "progress": copy.copy(trainer.progress),
                "running_loss": trainer.running_loss,
                "training": [module.training for module in trainer.model.modules()],
                "losses": sorted(trainer.loss_trackers),
                "loaders": (id(trainer.train_dataloader), id(trainer.eval_dataloader)),
                "data": (id(trainer.train_dataset), id(trainer.eval_dataset), trainer.collate_fn),
                "is_running": trainer.is_running,
                "stop_reason": trainer.stop_reason,
            })  # fmt: skip

        setattr(self, event, look)


def evaluate(trainer: Any) -> None:
    found = trainer.evaluate(Rows(float64_data(9)), 4, HERE)
    assert found.keys() == {"evaluation_loss"}


def predict(trainer: Any) -> None:
    assert trainer.predict(Rows(float64_data(9)), 4, HERE).shape == (9, 1)


def predict_a_part(trainer: Any) -> None:
    parts = trainer.predict_iter(Rows(float64_data(9)), 4, HERE)
    next(parts)
    parts.close()


def run(event: str, action: Any, seed: int | None) -> tuple[Any, Witness, Nested]:
    model, nested, witness = dropout_model(), Nested(event, action), Witness(event)
    trainer = adamw_trainer(model, callbacks=[nested, witness], seed=seed)
    torch.manual_seed(1)
    trainer.train(
        Rows(float64_data(22)), 2, Rows(float64_data(7)), 4, gradient_accumulation_steps=2,
        gradient_clip_norm=0.5,
        train_dataloader_kwargs=HERE, eval_dataloader_kwargs=HERE,
    )  # fmt: skip
    return trainer, witness, nested


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", [5, *[None] * SOAK])
@pytest.mark.parametrize("action", [evaluate, predict, predict_a_part])
@pytest.mark.parametrize("event", EVENTS)
def test_a_nested_run_does_not_change_the_outer_run(event, action, seed):
    plain, expected, _ = run(event, lambda trainer: None, seed)
    trainer, witness, nested = run(event, action, seed)
    assert nested.runs == len(witness.seen) > 1
    for own in ("loaders", "data"):
        assert len({seen[own] for seen in witness.seen}) == len({seen[own] for seen in expected.seen})
    for seen, wanted in zip(witness.seen, expected.seen, strict=True):
        for own in ("loaders", "data"):
            del seen[own], wanted[own]
        assert repr(seen.pop("run_config")) == repr(wanted.pop("run_config"))
        assert seen == wanted
    assert equal_weights(weights(trainer.model), weights(plain.model))
    history = trainer.run_history.to_dict()
    history.pop("evaluation_loss", None)
    assert history == plain.run_history.to_dict()


def test_a_nested_evaluation_does_not_change_recorded_losses():
    def look(trainer):
        evaluate(trainer)
        assert trainer.recorded_losses.keys() == {"train_loss_epoch"}

    run("on_train_epoch_end", look, None)


def test_a_run_may_be_nested_in_an_evaluation_of_a_run():
    model, seen = dropout_model(), []

    class Predicts(TrainerCallback):
        def on_eval_step_end(self, trainer, **kwargs):
            before = trainer.batch_indices
            trainer.predict(float64_data(3))
            seen.append(trainer.batch_indices == before)

    trainer = adamw_trainer(model, callbacks=[Predicts])
    trainer.train(Rows(float64_data(8)), 1, Rows(float64_data(7)), 4)
    assert seen == [True, True]


def test_predict_iter_leaves_the_trainer_unchanged():
    trainer = adamw_trainer(dropout_model())
    first, second = (trainer.predict_iter(float64_data(size), 4) for size in (9, 6))
    shapes = [len(next(first)), len(next(second)), len(next(first)), len(next(second)), len(next(first))]
    assert shapes == [4, 4, 4, 2, 1]
    assert trainer.is_running
    assert [next(parts, None) for parts in (first, second)] == [None, None]
    assert not trainer.is_running
    trainer.train(float64_data(8), 1)


class Shows(TrainerCallback):
    """Shows a part of one prediction after each evaluation."""

    saves_attributes = False

    def __init__(self) -> None:
        self.parts: Any = None

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.parts is None:
            self.parts = trainer.predict_iter(float64_data(40), 2)
        next(self.parts)


def test_a_prediction_may_outlive_the_evaluation_that_began_it(tmp_path):
    def run(folder: str, *callbacks: Any, **kwargs: Any) -> Any:
        log = listener(on_train_step_end=lambda trainer, **_: trainer.log("first", trainer.batch_indices[0]))
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = adamw_trainer(dropout_model(), callbacks=[log, *callbacks, saving], seed=1)
        data = {"eval_dataset": float64_data(6), "evaluate_every": "3 updates"}
        trainer.train(float64_data(20), 2, per_device_batch_size=4, **data, **kwargs)
        return weights(trainer.model), trainer.run_history.to_dict()

    whole = run("whole")
    assert same_bits(run("shown", Shows()), whole)
    for update in (4, 7):
        state = tmp_path / "shown" / f"update-{update:09d}"
        assert same_bits(run(f"after-{update}", Shows(), resume_from=state), whole)


@pytest.mark.parametrize(
    ("name", "value"),
    [("eval_every_n_epochs", 3), pytest.param("auto_microbatch", True, marks=pytest.mark.extension("failed_batches"))],
)
def test_the_run_config_has_all_requested_values(name, value):
    trainer = adamw_trainer(dropout_model())
    trainer.train(float64_data(8), 1, **{name: value})
    assert getattr(trainer.run_config, name) == value
    assert trainer.run_config.to_dict()[name] == value


def by_accelerate_is_used_again(folder: Path) -> Any:
    accelerator = sharding_accelerator()

    def large_trainer(callbacks: list[Any]) -> Trainer:
        model = large_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)

    return _used_again(large_trainer)


def by_the_user_is_used_again(folder: Path) -> Any:
    def large_trainer(callbacks: list[Any]) -> Trainer:
        model = large_model()
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh_of(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=Accelerator(cpu=True), seed=3)

    return _used_again(large_trainer)


@pytest.mark.thorough
@CAN_SHARD
@pytest.mark.processes
@pytest.mark.parametrize("case", [by_accelerate_is_used_again, by_the_user_is_used_again])
def test_a_sharded_model_is_used_within_its_run_and_after_it(tmp_path, job, case):
    expected = job(2).run(case, tmp_path)
    assert equal_weights(expected[0], expected[1])


@pytest.mark.extension("progress_bar")
@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_step_end"])
def test_a_nested_error_that_is_caught_does_not_end_the_run(event, capfd):
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    told: list[str] = []

    def fails(trainer: Any) -> None:
        for method in (trainer.evaluate, trainer.predict):
            with pytest.raises(OSError, match="unreadable"):
                method(Broken(), 4, HERE)

    nested = Nested(event, fails)
    look = listener(on_exception=lambda trainer, **_: told.append("exception"))
    bar = ProgressBarCallback(show_always=True, refresh_seconds=0)
    trainer = make_trainer([bar, nested, look])
    trainer.train(make_data(), 2, make_data(), 2)
    assert trainer.progress.epochs_completed == 2
    assert nested.runs == 6
    assert told == []


def test_an_evaluation_stopped_after_a_run_is_not_its_end(tmp_path):
    def stop(trainer: Any, **kwargs: Any) -> None:
        if trainer.train_dataloader is None:
            raise StopTrainingError("seen enough")

    def run(epochs: int) -> Any:
        callbacks = [SaveTrainingStateCallback(tmp_path), listener(on_eval_step_end=stop)]
        trainer = make_trainer(callbacks, seed=1)
        trainer.train(make_data(), epochs, per_device_batch_size=2, resume_from="latest")
        return trainer

    first = run(2)
    first.evaluate(make_data())
    assert first.stop_reason == "seen enough"
    assert run(4).progress.epochs_completed == 4


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluating_or_predicting_leaves_the_generators_alone(method):
    trainer = adamw_trainer(dropout_model(), seed=0)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    drawn = []
    for _ in range(3):
        getattr(trainer, method)(Rows(float64_data(5)), 4, HERE)
        drawn.append((random.random(), np.random.rand()))
    random.seed(0), np.random.seed(0)
    assert drawn == [(random.random(), np.random.rand()) for _ in range(3)]


def test_an_abandoned_prediction_ends_with_its_run():
    errors: list[BaseException] = []

    def leave(trainer: Any, **kwargs: Any) -> None:
        for _ in trainer.predict_iter(float64_data(9), 4):
            raise errors[-1]

    for error in (StopTrainingError("enough"), ValueError("enough of this")):
        errors.append(error)  # which keeps the iterator, with its traceback
        trainer = make_trainer([listener(on_train_step_end=leave)], model=dropout_model(), loss_func=nn.MSELoss())
        with pytest.raises(ValueError, match=r"^enough of this") if isinstance(error, ValueError) else nullcontext():
            trainer.train(float64_data(8), 1)
        assert trainer.stop_reason == ("enough" if isinstance(error, StopTrainingError) else None)
        assert not trainer.is_running
        assert trainer.progress.update == 1
        trainer.callback_handler.clear_callbacks()
        trainer.train(float64_data(8), 1)
        assert trainer.progress.epochs_completed == 1


def test_interleaved_predictions_read_their_own_batches():
    seen = []

    class Looks(TrainerCallback):
        def on_predict_step_end(self, trainer, **kwargs):
            seen.append((trainer.batch_indices, trainer.model.training))

    trainer = adamw_trainer(dropout_model(), callbacks=[Looks])
    first, second = (trainer.predict_iter(Rows(float64_data(size)), 2, HERE) for size in (5, 3))
    for parts in (first, second, first, second, first):
        next(parts)
        assert trainer.batch_indices is None
    assert seen == [([0, 1], False), ([0, 1], False), ([2, 3], False), ([2], False), ([4], False)]


def test_a_prediction_read_step_by_step_does_not_hide_the_run():
    parts: list[Any] = []

    class Reads(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            parts.append(trainer.predict_iter(float64_data(40), 2))

        def on_optimizer_step_start(self, trainer, **kwargs):
            next(parts[0])
            trainer.skip_update()

    model = dropout_model()
    before = weights(model)
    trainer = adamw_trainer(model, callbacks=[Reads])
    trainer.train(float64_data(8), 1, per_device_batch_size=2)
    named = dict(model.named_parameters())
    assert all(torch.equal(before[name], named[name]) for name in named)
    assert trainer.progress.update == 4


def test_the_data_of_a_run_are_forgotten_when_the_next_begins():
    alive: list[bool] = []
    data = Rows(float64_data(8))
    held = weakref.ref(data)
    watch = listener(on_train_epoch_start=lambda trainer, **_: alive.append(held() is not None))
    trainer = adamw_trainer(dropout_model(), callbacks=[watch])
    trainer.train(data, 1)
    del data
    trainer.train(Rows(float64_data(8)), 1)
    assert alive == [True, False]


def test_a_closed_trainer_still_has_the_results_of_its_run():
    with adamw_trainer(dropout_model()) as trainer:
        trainer.train(float64_data(8), 1, per_device_batch_size=4)
        left = trainer.predict_iter(float64_data(9), 4)
        next(left)
    left.close()
    assert trainer.progress.update == 2
    assert trainer.run_config.num_epochs == 1


def test_a_callback_added_after_others_were_removed_is_called():
    handler = CallbackHandler()
    for _ in range(50):
        callback = listener(on_update_end=lambda trainer, **_: None)
        handler.add_callback(callback)
        handler.set_listening(callback, False, "on_update_end")
        assert not handler.listeners["on_update_end"]
        handler.clear_callbacks()
        del callback
        handler.add_callback(listener(on_update_end=lambda trainer, **_: None))
        assert len(handler.listeners["on_update_end"]) == 1
        handler.clear_callbacks()


def predict_one_sample_within_a_run() -> Any:
    """Some processes have no share of it; the model has buffers."""
    shapes: list[Any] = []

    class Predicts(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            shapes.append(list(trainer.predict(float64_data(1)).shape))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    trainer = adamw_trainer(model, callbacks=[Predicts])
    trainer.train(float64_data(12), 2, per_device_batch_size=2)
    return shapes


@pytest.mark.processes
def test_predicting_in_a_run_with_unequal_shares_does_not_hang(ranks):
    for shapes in ranks(predict_one_sample_within_a_run):
        assert shapes == [[1, 1], [1, 1]]


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_eval_epoch_end", "on_training_run_epoch_end"])
def test_the_history_keeps_only_a_runs_own_values_of_a_metric(event):
    from pytorch_accel_lite.callbacks import MetricsCallback

    def metrics_of(*extra):
        trainer = make_trainer([MetricsCallback({"mae": MeanAbsoluteError()}), *extra], seed=0)
        trainer.train(make_data(), 2, make_data())
        return trainer.run_history.to_dict()

    found = []
    nested = Nested(event, lambda trainer: found.append(trainer.evaluate(make_data(12))))
    history, expected = metrics_of(nested), metrics_of()
    assert history.pop("evaluation_loss") == [values["evaluation_loss"] for values in found]
    assert history == expected
    assert all(values["mae"] not in expected["mae"] for values in found)


def test_a_closed_trainer_leaves_the_passed_accelerator_alone():
    accelerator = Accelerator(cpu=True)
    own = accelerator.prepare(nn.Linear(2, 2))
    with make_trainer(accelerator=accelerator) as trainer:
        train(trainer)
    assert accelerator._models == [own]


def test_evaluating_in_mid_epoch_leaves_model_and_run_unchanged():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    start = weights(model)
    modes: list[bool] = []
    evaluating = listener(
        on_train_step_end=lambda trainer, **_: trainer.evaluate(make_data(4)),
        on_backward_start=lambda trainer, **_: modes.append(trainer.model.training),
    )
    interrupted = train(make_trainer([evaluating], model=model), size=8)
    assert modes == [True] * 4

    plain_model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    plain_model.load_state_dict(start)
    plain = train(make_trainer(model=plain_model), size=8)
    assert equal_weights(weights(interrupted.model), weights(plain.model))
    history = interrupted.run_history
    assert history.get_metric_values("train_loss_epoch") == plain.run_history.get_metric_values("train_loss_epoch")
    assert len(history.get_metric_values("evaluation_loss")) == 4


def test_predicting_within_an_epoch_leaves_the_run_unchanged():
    predicting = listener(on_train_step_end=lambda trainer, **_: trainer.predict(make_data(3)))
    interrupted = train(make_trainer([predicting]), size=8, eval_dataset=True)
    plain = train(make_trainer(), size=8, eval_dataset=True)
    assert equal_weights(weights(interrupted.model), weights(plain.model))
    assert interrupted.run_history.to_dict() == plain.run_history.to_dict()


def test_evaluate_without_arguments_uses_the_last_runs_eval_data():
    trainer = train(make_trainer(), eval_dataset=make_data(6))
    expected = trainer.evaluate()["evaluation_loss"]
    trainer.evaluate(make_data(3))
    trainer.predict(make_data(2))
    assert trainer.evaluate()["evaluation_loss"] == expected


def test_a_seeded_trainer_within_a_run_leaves_its_random_numbers():
    """A run of another trainer, such as a linear probe, seeds the generators for itself."""

    def probe(trainer: Trainer) -> None:
        adamw_trainer(torch.nn.Linear(5, 1).double(), seed=0).train(float64_data(8), 1)

    def drawn(*callbacks: TrainerCallback) -> list[float]:
        numbers: list[float] = []
        draw = listener(on_train_step_start=lambda trainer: numbers.append(torch.rand(()).item() + random.random()))
        trainer = adamw_trainer(torch.nn.Linear(5, 1).double(), callbacks=[draw, *callbacks], seed=1)
        trainer.train(float64_data(8), 3, per_device_batch_size=4)
        return numbers

    with_probe = drawn(listener(on_train_epoch_end=probe))
    assert len(set(with_probe)) == 6
    assert with_probe == drawn(listener(on_train_epoch_end=lambda trainer: torch.nn.Linear(5, 1)))
