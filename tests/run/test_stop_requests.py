"""Stopped, finished and failed runs: all processes end at the same update."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import NonFiniteLossError, StopTrainingError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, TerminateOnNaNCallback, TimeLimitCallback
from tests.launching import two_are_enough
from tests.ranks import shared_folder
from tests.shared_trainings import NaNOnOneRank, StopsAt, nan_on_one_rank
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    raises_at,
    train,
    warnings_of,
    weights,
)


class Fails(Trainer):
    def calculate_train_batch_loss(self, batch):
        if self.progress.step == 3:
            raise ValueError("cannot go on")
        return super().calculate_train_batch_loss(batch)


class StopsFirstEvaluation(TrainerCallback):
    stops = 1

    def on_eval_step_end(self, trainer, **kwargs):
        if self.stops and trainer.accelerator.process_index == 0:
            self.stops -= 1
            raise StopTrainingError("seen enough")


class NaNAtTheEnd(TrainerCallback):
    def on_stop_training_error(self, trainer, **kwargs):
        raise NonFiniteLossError("found while ending")


class StopsAtEpochTwo(TrainerCallback):
    def on_eval_epoch_end(self, trainer, **kwargs):
        if trainer.progress.epoch == 2:
            raise StopTrainingError("enough")


class Hears(TrainerCallback):
    def __init__(self, heard: list[int]) -> None:
        self.heard = heard

    def on_eval_epoch_end(self, trainer, **kwargs):
        self.heard.append(trainer.progress.epoch)


@two_are_enough
def test_a_non_finite_loss_ends_all_ranks_at_one_update(ranks):
    results = ranks(nan_on_one_rank)
    assert len({result["update"] for result in results}) == 1
    for result in results:
        assert "epoch 1, step 3: loss=nan" in result["message"]
        assert result["events"] == [("on_exception", "NonFiniteLossError"), ("on_training_run_end",)]


def stop_on_one_rank() -> Any:
    model = float64_model()
    trainer = adamw_trainer(model, callbacks=[StopsAt("on_train_step_end", 3)])
    trainer.train(float64_data(2000), 2, per_device_batch_size=1)
    return {"reason": trainer.stop_reason, "update": trainer.progress.update, "weights": weights(model)}


def test_a_stop_requested_by_one_rank_stops_all_at_one_update(ranks):
    results = ranks(stop_on_one_rank)
    assert {result["reason"] for result in results} == {"enough"}
    assert len({result["update"] for result in results}) == 1
    assert results[0]["update"] < 2 * 2000 // ranks.world_size
    assert all(equal_weights(result["weights"], results[0]["weights"]) for result in results)


def time_limit() -> Any:
    """The results of a run that pauses repeatedly, and of an uninterrupted one."""
    outcomes = []
    with shared_folder() as folder:
        for limit in (1e-9, 3600):
            updates, reason = [], ""
            while reason is not None:
                model = float64_model()
                saving = SaveTrainingStateCallback(folder / f"limit {limit}", save_at_end=False)
                trainer = adamw_trainer(model, callbacks=[TimeLimitCallback(limit), saving], seed=3)
                trainer.train(float64_data(24), 2, per_device_batch_size=3, resume_from="latest")
                reason = trainer.stop_reason
                updates.append(trainer.progress.update)
            outcomes.append({"updates": updates, "weights": weights(model)})
    return outcomes


@pytest.mark.thorough
@two_are_enough
def test_a_time_limit_pauses_all_ranks_at_the_same_update(ranks):
    for paused, whole in ranks(time_limit):
        assert len(paused["updates"]) > 2
        assert paused["updates"] == ranks(time_limit)[0][0]["updates"]
        assert len(whole["updates"]) == 1
        assert paused["updates"][-1] == whole["updates"][-1]
        assert equal_weights(paused["weights"], whole["weights"])


def stop_before_communicating_callbacks() -> Any:
    """After a stop on one rank, later callbacks of the event still run there, as they may communicate."""
    timing = callbacks.TimingCallback(show=False)
    trainer = adamw_trainer(
        float64_model(), callbacks=[StopsAt("on_train_epoch_end"), callbacks.ThroughputCallback(), timing]
    )
    trainer.train(float64_data(16), num_epochs=3, per_device_batch_size=4)
    return {"reason": trainer.stop_reason, "epoch": trainer.progress.epoch, "run": timing.totals["run"]}


@pytest.mark.extension("profiling", "throughput")
@two_are_enough
def test_a_stop_in_an_event_leaves_no_rank_waiting_for_another(ranks):
    results = ranks(stop_before_communicating_callbacks)
    assert {result["reason"] for result in results} == {"enough"}
    assert {result["epoch"] for result in results} == {1}
    assert len({result["run"] for result in results}) == 1


def nan_with_logger() -> Any:
    """All ranks end together, and all rows until then are written."""
    with shared_folder() as folder:
        log = callbacks.MetricsFileCallback(folder / "m.jsonl", every_n_updates=1)
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = NaNOnOneRank(model, nn.MSELoss(), optimizer, callbacks=[TerminateOnNaNCallback, log])
        with suppress(NonFiniteLossError):
            trainer.train(float64_data(64), num_epochs=1, per_device_batch_size=2)
        trainer.barrier()
        rows = (folder / "m_updates.jsonl").read_text().splitlines()
        trainer.barrier()
    return [json.loads(row)["update"] for row in rows], trainer.progress.update


@pytest.mark.extension("metrics_file")
@two_are_enough
def test_rows_are_written_until_all_ranks_end_together(ranks):
    for updates, made in ranks(nan_with_logger):
        assert updates == list(range(1, made + 1))


def error_with_logger() -> Any:
    """If all ranks fail, the rows that were already averaged are written."""
    with shared_folder() as folder:
        log, model = callbacks.MetricsFileCallback(folder / "m.jsonl", every_n_updates=1), float64_model()
        trainer = Fails(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[log])
        with suppress(ValueError):
            trainer.train(float64_data(64), num_epochs=1, per_device_batch_size=2)
        trainer.barrier()
        rows = (folder / "m_updates.jsonl").read_text().splitlines()
        trainer.barrier()
    return [json.loads(row)["update"] for row in rows]


@pytest.mark.extension("metrics_file")
@two_are_enough
def test_rows_are_written_until_an_error_that_all_ranks_have(ranks):
    assert all(updates == [1, 2, 3] for updates in ranks(error_with_logger))


def stopped_evaluation() -> Any:
    trainer = Trainer(float64_model(), nn.MSELoss(), None, callbacks=[StopsFirstEvaluation])
    reasons = []
    for _ in range(2):
        trainer.evaluate(float64_data(20), per_device_batch_size=2)
        reasons.append(trainer.stop_reason)
    return reasons


@two_are_enough
def test_an_evaluation_that_was_stopped_does_not_stop_the_next(ranks):
    assert all(reasons == ["seen enough", None] for reasons in ranks(stopped_evaluation))


def nan_while_ending() -> Any:
    trainer = adamw_trainer(float64_model(), callbacks=[StopsAt("on_train_epoch_end"), NaNAtTheEnd()])
    raised = None
    try:
        trainer.train(float64_data(12), 1)
    except NonFiniteLossError as error:
        raised = str(error)
    return raised, "evaluation_loss" in trainer.evaluate(float64_data(6))


@two_are_enough
def test_a_nan_found_while_a_run_ends_belongs_to_that_run(ranks):
    assert nan_while_ending() == ("found while ending", True)
    assert ranks(nan_while_ending) == [("found while ending", True)] * ranks.world_size


def stop_before_others() -> Any:
    """The events of a callback after the one that stops the run."""
    heard: list[int] = []
    callbacks = [StopsAtEpochTwo(), Hears(heard)]
    adamw_trainer(float64_model(), callbacks=callbacks).train(float64_data(12), 3, float64_data(6))
    return heard


@two_are_enough
def test_callbacks_after_a_stop_get_the_events_of_one_process(ranks):
    assert ranks(stop_before_others) == [stop_before_others()] * ranks.world_size


def test_a_stop_after_an_update_skips_none_of_its_events(tmp_path):
    heard: list[int] = []
    listening = listener(on_update_end=lambda trainer, **_: heard.append(trainer.progress.update))
    for stop, epochs in ((raises_at(2, StopTrainingError("enough")), 1), (listener(), 2)):
        saving = SaveTrainingStateCallback(tmp_path / "states")
        train(make_trainer([stop, listening, saving], seed=1), epochs, resume_from="latest")
    assert heard == [1, 2, 3, 4, 5, 6]


# --------------------------------------------------------------------------------------- weights at the end


class Sqrt(Trainer):
    """The loss of the last batch is finite, and its gradients are not: those of a root at 0."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.progress.step == 2:
            output["loss"] = (output["model_outputs"] * 0).abs().sqrt().mean()
        return output


@pytest.mark.parametrize("listed", [[], [TerminateOnNaNCallback]])
def test_nan_weights_of_the_last_update_are_reported(listed):
    trainer = make_trainer(listed, trainer_class=Sqrt)
    with pytest.warns(UserWarning, match="ended, after update 3, with weights that are infinite or NaN") as said:
        train(trainer)
    assert [each.filename for each in said] == [train.__code__.co_filename]
    train(make_trainer(listed), epochs=2)


def warnings_of_weights() -> list[str]:
    """The warnings about weights that are NaN at the end on the last process only."""

    def spoil(trainer: Trainer) -> None:
        if trainer.ranks.rank == trainer.ranks.world_size - 1:
            trainer.get_model()[0].weight.data.fill_(float("nan"))

    return warnings_of(make_trainer([listener(on_training_run_end=spoil)]), make_data(8))


def test_nan_weights_of_another_rank_are_reported_by_rank_0(two_ranks):
    first, second = two_ranks(warnings_of_weights)
    assert len(first) == 1
    assert "with weights that are infinite or NaN" in first[0]
    assert not second
