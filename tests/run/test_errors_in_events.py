"""Errors in events, methods and data are raised after the ending events."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from pytorch_accel_lite import NonFiniteLossError, StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from tests.recorded_events import RUN_EVENTS, CustomError, after, raising, recording_callback
from tests.small_models import Broken, equal_weights, listener, make_data, make_model, make_trainer, train, weights

ERRORS = [CustomError("boom"), KeyboardInterrupt(), AttributeError("no such thing"), SystemExit(3), TypeError("odd")]


@pytest.mark.parametrize("event", [e for e in RUN_EVENTS if e not in ("on_stop_training_error", "on_exception")])
def test_an_error_in_any_event_is_raised_after_the_ending_events(event):
    recorder = recording_callback()
    error = CustomError("boom")
    trainer = make_trainer([recorder, raising(event, error)])
    with pytest.raises(CustomError) as caught:
        train(trainer, epochs=2, eval_dataset=True)
    assert caught.value is error
    ending = ["on_exception"] if event == "on_training_run_end" else ["on_exception", "on_training_run_end"]
    assert after(recorder, event) == ending
    names = [name for name, _ in recorder.calls]
    assert names.count("on_exception") == names.count("on_training_run_end") == 1
    (told,) = [kwargs["exception"] for name, kwargs in recorder.calls if name == "on_exception"]
    assert told is error
    assert trainer.stop_reason is None


@pytest.mark.parametrize("run", [lambda t: train(t), lambda t: t.evaluate(make_data())], ids=["train", "evaluate"])
def test_an_error_before_a_run_starts_is_raised_and_none_starts(run):
    recorder = recording_callback()
    trainer = make_trainer([recorder, raising("on_dataloaders_created", CustomError("boom"))])
    with pytest.raises(CustomError, match=r"^boom"):
        run(trainer)
    assert set(after(recorder, "on_dataloaders_created")) <= {"on_exception"}
    run(trainer)
    assert len(trainer.run_history.get_metric_names()) == 1


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_kind_of_error_is_raised_with_its_traceback(error):
    def helper_deep_in_the_callback(trainer: Trainer, **kwargs: Any) -> None:
        raise error

    recorder = recording_callback()
    trainer = make_trainer([recorder, listener(on_train_step_end=helper_deep_in_the_callback)])
    with pytest.raises(type(error)) as caught:
        train(trainer)
    assert caught.value is error
    assert "helper_deep_in_the_callback" in "".join(traceback.format_exception(error))
    assert after(recorder, "on_train_step_end") == ["on_exception", "on_training_run_end"]


def test_an_attribute_error_inside_a_callback_propagates():
    class Faulty(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            trainer.modell.train()

    with pytest.raises(AttributeError, match="no attribute 'modell'") as caught:
        train(make_trainer([Faulty]))
    assert "trainer.modell.train()" in "".join(traceback.format_exception(caught.value))


def test_an_attribute_error_in_a_property_is_not_hidden():
    class Faulty(TrainerCallback):
        @property
        def on_train_epoch_start(self):
            return self.missing

    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        train(make_trainer([Faulty]))


@pytest.mark.parametrize("name", ["optimizer_step", "calculate_train_batch_loss", "eval_epoch_end", "training_run_end"])
def test_an_error_in_an_overridden_method_ends_the_run_cleanly(name):
    def fail(self: Trainer, *args: Any) -> None:
        raise CustomError(name)

    recorder = recording_callback()
    trainer = make_trainer([recorder], trainer_class=type("Failing", (Trainer,), {name: fail}))
    with pytest.raises(CustomError, match=name):
        train(trainer, eval_dataset=True)
    names = [name for name, _ in recorder.calls]
    assert names.count("on_exception") == 1
    assert names[-1] == "on_training_run_end"


def test_an_error_in_training_run_end_hides_nothing_either(capsys):
    class Failing(Trainer):
        def training_run_end(self):
            raise CustomError("the second one")

    recorder, failing = recording_callback(), raising("on_train_step_end", CustomError("the first one"))
    with pytest.raises(CustomError, match="the first one"):
        train(make_trainer([failing, recorder], trainer_class=Failing))
    assert [name for name, _ in recorder.calls][-2:] == ["on_exception", "on_training_run_end"]
    assert "the second one" in capsys.readouterr().out


@pytest.mark.parametrize(("first", "event"), [
    (CustomError("first"), "on_exception"),
    (CustomError("first"), "on_training_run_end"),
    (StopTrainingError("first"), "on_stop_training_error"),  # the second is the error of the run
])  # fmt: skip
def test_a_second_error_while_ending_does_not_hide_the_first(first, event, capsys):
    recorder, second = recording_callback(), CustomError("the second one")
    with pytest.raises(CustomError) as caught:
        train(make_trainer([raising("on_train_step_end", first), raising(event, second), recorder]))
    if isinstance(first, CustomError):
        assert caught.value is first
        assert "the second one" in capsys.readouterr().out
    else:
        assert caught.value is second
    assert [name for name, _ in recorder.calls][-2:] == ["on_exception", "on_training_run_end"]


def test_ctrl_c_at_a_runs_end_still_notifies_later_callbacks():
    recorder = recording_callback()
    with pytest.raises(KeyboardInterrupt):
        train(make_trainer([raising("on_training_run_end", KeyboardInterrupt()), recorder]))
    assert [name for name, _ in recorder.calls][-2:] == ["on_exception", "on_training_run_end"]


def test_an_error_at_a_runs_end_still_notifies_later_callbacks(tmp_path, capsys):
    failing = [raising("on_training_run_end", CustomError(text)) for text in ("first", "second")]
    recorder = recording_callback()
    best = SaveBestModelCallback(tmp_path / "best.pt")
    with pytest.raises(CustomError, match=r"^first"):
        train(make_trainer([recorder, *failing, best, recording_callback()]), epochs=2, eval_dataset=True)
    assert [name for name, _ in recorder.calls][-2:] == ["on_training_run_end", "on_exception"]
    said = capsys.readouterr().out
    assert "second" in said.partition("another error occurred")[2]
    assert f"so the best model is not loaded. It is in {str(best.save_path)!r}: epoch 2" in said


@pytest.mark.sampled
@pytest.mark.parametrize(
    "error", [CustomError("x"), KeyboardInterrupt(), StopTrainingError("x"), NonFiniteLossError("x")]
)
@pytest.mark.parametrize("event", ["on_training_run_start", "on_backward_end", "on_eval_step_end"])
def test_a_run_after_a_stopped_one_equals_a_fresh_run(event, error):
    trainer = make_trainer([raising(event, error)])
    try:
        train(trainer, size=8, batch_size=2, gradient_accumulation_steps=2, eval_dataset=True)
    except type(error):
        pass
    trainer.model.load_state_dict(make_model(seed=5).state_dict())
    trainer.optimizer.zero_grad()
    train(trainer, epochs=2, size=8, batch_size=2, gradient_accumulation_steps=2, eval_dataset=True)
    fresh = train(
        make_trainer(model=make_model(seed=5)),
        epochs=2,
        size=8,
        batch_size=2,
        gradient_accumulation_steps=2,
        eval_dataset=True,
    )
    assert equal_weights(weights(trainer.model), weights(fresh.model))
    assert trainer.run_history.to_dict() == fresh.run_history.to_dict()
    assert trainer.progress == fresh.progress


def test_a_run_does_not_start_with_a_failed_runs_gradients():
    trainer = make_trainer([raising("on_backward_end", CustomError("x"))])
    with pytest.raises(CustomError):
        train(trainer)
    trainer.model.load_state_dict(make_model(seed=5).state_dict())
    train(trainer)
    fresh = train(make_trainer(model=make_model(seed=5)))
    assert equal_weights(weights(trainer.model), weights(fresh.model))


@pytest.mark.parametrize("event", ["on_evaluation_run_start", "on_eval_step_end", "on_evaluation_run_end"])
def test_an_error_in_evaluate_fires_on_exception_once(event):
    recorder = recording_callback()
    error = CustomError("boom")
    trainer = make_trainer([recorder, raising(event, error)])
    with pytest.raises(CustomError) as caught:
        trainer.evaluate(make_data())
    assert caught.value is error
    assert [name for name, _ in recorder.calls].count("on_exception") == 1
    assert trainer.evaluate(make_data()).keys() == {"evaluation_loss"}


@pytest.mark.parametrize("event", ["on_predict_run_start", "on_predict_step_end", "on_predict_run_end"])
def test_an_error_in_predict_fires_on_exception_once(event):
    recorder = recording_callback()
    trainer = make_trainer([recorder, raising(event, CustomError("boom"))])
    trainer.model.train()
    with pytest.raises(CustomError):
        trainer.predict(make_data())
    assert [name for name, _ in recorder.calls].count("on_exception") == 1
    assert trainer.model.training
    assert trainer.predict(make_data()).shape == (6, 1)


def test_an_error_of_the_dataset_ends_the_run_cleanly():
    recorder = recording_callback()
    with pytest.raises(OSError, match="scan 4 is unreadable"):
        train(make_trainer([recorder]), train_dataset=Broken(), train_dataloader_kwargs={"num_workers": 0})
    assert [name for name, _ in recorder.calls][-2:] == ["on_exception", "on_training_run_end"]
