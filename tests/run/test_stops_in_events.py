"""Stops in events and methods end a run cleanly."""

from __future__ import annotations

import pytest

from pytorch_accel_lite import StopTrainingError, Trainer
from tests.recorded_events import DURING_TRAINING, after, fired, raising, recording_callback
from tests.small_models import listener, make_data, make_trainer, train


@pytest.mark.parametrize("event", DURING_TRAINING)
def test_a_stop_in_any_event_ends_the_run_cleanly(event):
    recorder = recording_callback()
    trainer = make_trainer([recorder, raising(event, StopTrainingError("enough"))])
    train(trainer, epochs=2, eval_dataset=True)
    of_update = ["on_update_end"] if event == "on_train_step_end" else []  # the update has been made
    assert after(recorder, event) == [*of_update, "on_stop_training_error", "on_training_run_end"]
    assert trainer.stop_reason == "enough"
    assert "on_exception" not in fired(recorder)


def test_a_stop_before_the_run_starts_ends_it_without_a_step():
    recorder = recording_callback()
    trainer = make_trainer([recorder, raising("on_dataloaders_created", StopTrainingError("no data today"))])
    train(trainer)
    ended = ["on_training_run_start", "on_stop_training_error", "on_training_run_end"]
    assert after(recorder, "on_dataloaders_created") == ended
    assert trainer.stop_reason == "no data today"
    assert train(trainer).progress.update == 3
    assert trainer.stop_reason is None


@pytest.mark.parametrize("event", ["on_stop_training_error", "on_training_run_end"])
def test_a_stop_while_the_run_is_ending_ends_it_cleanly(event):
    recorder = recording_callback()
    stop_first = [raising("on_train_step_end", StopTrainingError("first"))] if "stop" in event else []
    trainer = make_trainer([recorder, *stop_first, raising(event, StopTrainingError("while ending"))])
    train(trainer, epochs=2)
    names = [name for name, _ in recorder.calls]
    assert names.count("on_training_run_end") == 1
    assert names[-1] == "on_training_run_end"
    assert trainer.stop_reason is not None


def test_the_reason_of_a_stop_is_known_to_its_event_and_printed(capsys):
    seen = []
    stop = raising("on_train_step_end", StopTrainingError("accuracy is good enough"))
    trainer = make_trainer([stop, listener(on_stop_training_error=lambda t: seen.append(t.stop_reason))])
    train(trainer)
    assert seen == ["accuracy is good enough"]
    assert "accuracy is good enough" in capsys.readouterr().out


def test_a_stop_without_a_reason_gets_a_default_reason():
    trainer = train(make_trainer([raising("on_train_step_end", StopTrainingError())]))
    assert trainer.stop_reason


def test_the_stop_reason_belongs_to_the_last_run():
    trainer = make_trainer([raising("on_train_step_end", StopTrainingError("enough"))])
    assert trainer.stop_reason is None
    train(trainer)
    assert trainer.stop_reason == "enough"
    train(trainer)
    assert trainer.stop_reason is None


def test_a_stop_in_an_overridden_method_ends_the_run_cleanly():
    class Stopping(Trainer):
        def train_epoch_end(self):
            raise StopTrainingError("one epoch will do")

    recorder = recording_callback()
    trainer = train(make_trainer([recorder], trainer_class=Stopping), epochs=3)
    assert [name for name, _ in recorder.calls][-2:] == ["on_stop_training_error", "on_training_run_end"]
    assert trainer.stop_reason == "one epoch will do"


def test_a_subclass_of_the_stop_error_stops_too():
    class Enough(StopTrainingError):
        pass

    trainer = train(make_trainer([raising("on_train_step_end", Enough())]))
    assert trainer.stop_reason == "Enough"


@pytest.mark.parametrize(
    "event", ["on_evaluation_run_start", "on_eval_epoch_start", "on_eval_step_end", "on_eval_epoch_end"]
)
def test_a_stop_during_evaluate_ends_it_cleanly(event):
    recorder = recording_callback()
    trainer = make_trainer([recorder, raising(event, StopTrainingError("enough"))])
    trainer.evaluate(make_data())
    assert after(recorder, event) == ["on_stop_training_error", "on_evaluation_run_end"]
    assert trainer.stop_reason == "enough"
