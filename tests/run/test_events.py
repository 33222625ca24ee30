"""Events: their order, their listeners, and how a run ends."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pytorch_accel_lite import (
    CallbackHandler,
    NonFiniteLossError,
    StopTrainingError,
    Trainer,
    TrainerCallback,
    callbacks,
)
from pytorch_accel_lite.base.unknown_names import OTHER_LIBRARIES
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, SaveBestModelCallback
from pytorch_accel_lite.run.events import EVENTS, STEP_EVENTS, keywords_of
from pytorch_accel_lite.run.run import Step
from pytorch_accel_lite.steps.plain_step import PlainStep
from tests.documented_events import Line, documented_blocks, pattern, with_step
from tests.launching import CAN_SHARD, two_are_enough
from tests.sharded import sharded_trainer
from tests.small_models import (
    Broken,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
    two_optimizers,
    weights,
)

BEFORE_RUNS = ("on_init", "on_dataloaders", "on_evaluation", "on_predict")
NOT_IN_EVERY_RUN = ("on_train_batch_skipped", "on_eval_batch_skipped", "on_processes_changed")  # tested elsewhere
RUN_EVENTS = [name for name in EVENTS if not name.startswith(BEFORE_RUNS) and name not in NOT_IN_EVERY_RUN]
ENDINGS = ("on_stop_training_error", "on_exception", "on_training_run_end")
DURING_TRAINING = [name for name in RUN_EVENTS if name not in ENDINGS]


def recording_callback() -> TrainerCallback:
    """A callback that defines every event, and keeps the event's name with its keyword arguments in ``calls``."""

    def make(event: str) -> Any:
        def method(self: Any, trainer: Trainer, **kwargs: Any) -> None:
            self.calls.append((event, kwargs))

        return method

    callback = type("Recorder", (TrainerCallback,), {event: make(event) for event in EVENTS})()
    callback.calls = []
    return callback


def fired(callback: Any) -> list[str]:
    """The recorded events; keyword arguments that are numbers or flags are shown, those of batches only named."""
    shown = []
    for event, kwargs in callback.calls:
        values = [f"{k}={v}" if isinstance(v, (int, bool)) else k for k, v in sorted(kwargs.items())]
        shown.append(f"{event}({', '.join(values)})" if values else event)
    return shown


START = ["on_init_end", "on_dataloaders_created", "on_training_run_start"]
BATCH = "batch, batch_output"


def train_step(step: int, update: bool) -> list[str]:
    step_events = [
        "on_train_step_start",
        f"on_backward_start({BATCH}, step={step})",
        f"on_backward_end({BATCH}, step={step})",
    ]
    if update:
        step_events += ["on_optimizer_step_start", "on_optimizer_step_end"]
    step_events.append(f"on_train_step_end({BATCH}, step={step})")
    return step_events + ([f"on_update_end(step={step})", f"on_train_step_checkpoint(step={step})"] if update else [])


def evaluation(steps: int) -> list[str]:
    return [
        "on_eval_epoch_start(is_intermediate=False)",
        *["on_eval_step_start", f"on_eval_step_end({BATCH})"] * steps,
        "on_eval_epoch_end(is_intermediate=False)",
    ]


# ------------------------------------------------------------------------------------- the sequence


def test_two_epochs_with_evaluation_fire_exactly_these_events():
    recorder = recording_callback()
    trainer = make_trainer([recorder])
    train(trainer, epochs=2, size=5, batch_size=2, gradient_accumulation_steps=2, eval_dataset=make_data(3))
    epoch = [
        "on_train_epoch_start",
        *train_step(0, update=False),
        *train_step(1, update=True),
        *train_step(2, update=True),  # a window of one batch of one sample
        "on_train_epoch_end",
        *evaluation(steps=2),
        "on_training_run_epoch_end",
        "on_epoch_checkpoint",
    ]
    assert fired(recorder) == [*START, *epoch, *epoch, "on_training_run_end"]


def test_no_evaluation_events_fire_without_an_eval_dataset():
    recorder = recording_callback()
    train(make_trainer([recorder]), epochs=1, size=2)
    assert not [name for name, _ in recorder.calls if name.startswith("on_eval")]


def test_a_run_that_ends_at_its_last_update_is_still_evaluated():
    recorder = recording_callback()
    train(make_trainer([recorder]), epochs=None, max_num_train_steps=4, size=6, eval_dataset=make_data(2))
    names = [name for name, _ in recorder.calls]
    assert names.count("on_optimizer_step_end") == 4
    assert names.count("on_train_epoch_start") == names.count("on_training_run_epoch_end") == 2
    assert names.count("on_eval_epoch_end") == 2
    assert names[-2:] == ["on_epoch_checkpoint", "on_training_run_end"]


def test_evaluate_and_predict_fire_a_steps_events_per_batch():
    recorder = recording_callback()
    trainer = make_trainer([recorder])
    trainer.evaluate(make_data(5), per_device_batch_size=2)
    trainer.predict(make_data(5), per_device_batch_size=2)
    names = [name for name, _ in recorder.calls]
    for event in ("on_eval_step_start", "on_eval_step_end", "on_predict_step_end"):
        assert names.count(event) == 3


def test_step_events_carry_the_batch_and_the_output():
    recorder = recording_callback()
    data = make_data(4)
    train(make_trainer([recorder]), train_dataset=data)
    calls = [kwargs for event, kwargs in recorder.calls if event == "on_train_step_end"]
    for step, kwargs in enumerate(calls):
        rows = slice(2 * step, 2 * step + 2)
        assert torch.equal(kwargs["batch"][0], data.tensors[0][rows])
        assert torch.equal(kwargs["batch"][1], data.tensors[1][rows])
        output = kwargs["batch_output"]
        assert output["batch_size"] == 2
        assert torch.equal(output["loss"], nn.functional.mse_loss(output["model_outputs"], kwargs["batch"][1]))


def test_predict_events_carry_the_outputs_of_the_model():
    recorder = recording_callback()
    trainer = make_trainer([recorder])
    predicted = trainer.predict(make_data(5), per_device_batch_size=2)
    outputs = [kwargs["batch_output"] for event, kwargs in recorder.calls if event == "on_predict_step_end"]
    assert torch.equal(torch.cat(outputs), predicted)


def test_events_around_the_update_see_old_and_new_weights():
    seen: dict[str, Any] = {}

    def look(name: str) -> Any:
        def method(trainer: Trainer, **kwargs: Any) -> None:
            gradient = trainer.model[0].weight.grad
            seen[name] = (weights(trainer.model), None if gradient is None else gradient.clone())

        return method

    events = [e for e in EVENTS if e.startswith(("on_backward", "on_optimizer", "on_train_step_end"))]
    trainer = make_trainer([listener(**{event: look(event) for event in events})])
    start = weights(trainer.model)
    train(trainer, size=2)
    assert seen["on_backward_start"][1] is None
    assert equal_weights(seen["on_backward_end"][0], start)
    assert equal_weights(seen["on_optimizer_step_start"][0], start)
    assert torch.equal(seen["on_backward_end"][1], seen["on_optimizer_step_start"][1])
    assert seen["on_optimizer_step_end"][1] is None
    assert not equal_weights(seen["on_optimizer_step_end"][0], start)
    assert equal_weights(seen["on_train_step_end"][0], seen["on_optimizer_step_end"][0])


def test_gradients_are_clipped_before_on_optimizer_step_start():
    largest = []
    callback = listener(
        on_optimizer_step_start=lambda trainer: largest.append(trainer.model[0].weight.grad.abs().max())
    )
    train(make_trainer([callback]), size=6, gradient_clip_value=1e-3)
    assert largest
    assert all(value <= 1e-3 for value in largest)


METHOD_BEFORE_EVENT = {
    "training_run_start": "on_training_run_start",
    "train_epoch_start": "on_train_epoch_start",
    "calculate_train_batch_loss": "on_backward_start",
    "backward_step": "on_backward_end",
    "optimizer_step": "on_optimizer_step_end",
    "optimizer_zero_grad": "on_optimizer_step_end",
    "train_epoch_end": "on_train_epoch_end",
    "eval_epoch_start": "on_eval_epoch_start",
    "calculate_eval_batch_loss": "on_eval_step_end",
    "eval_epoch_end": "on_eval_epoch_end",
    "training_run_epoch_end": "on_training_run_epoch_end",
    "training_run_end": "on_training_run_end",
    "evaluation_run_start": "on_evaluation_run_start",
    "evaluation_run_end": "on_evaluation_run_end",
}


class NotingTrainer(Trainer):
    """Notes the calls of every step method in ``trace``, where a callback notes the events."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.trace: list[str] = []
        super().__init__(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in METHOD_BEFORE_EVENT:
            self.trace.append(name)
        return super().__getattribute__(name)


def test_the_trainers_method_is_called_before_the_event():
    noted = listener(**{event: lambda trainer, _event=event, **_: trainer.trace.append(_event) for event in EVENTS[1:]})
    trainer = make_trainer([noted], trainer_class=NotingTrainer)
    train(trainer, size=2, eval_dataset=make_data(2))
    trainer.evaluate(make_data(2))
    for method, event in METHOD_BEFORE_EVENT.items():
        assert trainer.trace.index(method) < trainer.trace.index(event), (method, event)
    # and directly before it, where no other event lies between
    for event in ("on_training_run_start", "on_train_epoch_start", "on_train_epoch_end", "on_training_run_end"):
        position = trainer.trace.index(event)
        assert trainer.trace[position - 1] == event.removeprefix("on_")


def test_the_history_has_an_epochs_losses_when_its_end_is_fired():
    def known(trainer: Trainer, **kwargs: Any) -> list[str]:
        return list(trainer.run_history.get_metric_names())

    at: dict[str, list[str]] = {}
    callback = listener(
        on_train_epoch_end=lambda t, **k: at.update(train=known(t)),
        on_eval_epoch_end=lambda t, **k: at.update(eval=known(t)),
    )
    train(make_trainer([callback]), eval_dataset=True)
    assert at == {"train": ["train_loss_epoch"], "eval": ["train_loss_epoch", "eval_loss_epoch"]}


# ---------------------------------------------------------------------------------------- who hears


def test_callbacks_are_called_in_the_order_of_the_list():
    heard: list[str] = []
    callbacks = [listener(on_train_epoch_start=lambda trainer, _n=name: heard.append(_n)) for name in "cab"]
    train(make_trainer(callbacks))
    assert heard == ["c", "a", "b"]


def test_callbacks_may_be_given_as_classes_and_as_instances():
    class Counting(TrainerCallback):
        def __init__(self, start: int = 0) -> None:
            self.count = start

        def on_train_step_end(self, trainer, **kwargs):
            self.count += 1

    instance = Counting(10)
    trainer = make_trainer([Counting, instance])
    train(trainer, size=6)
    assert trainer.callback_handler.callbacks[1] is instance
    assert [callback.count for callback in trainer.callback_handler] == [3, 13]
    assert trainer.callback_handler.callback_list == ["Counting", "Counting"]


def test_several_callbacks_of_one_class_all_get_events():
    heard: list[int] = []

    class Named(TrainerCallback):
        def __init__(self, number: int = 0) -> None:
            self.number = number

        def on_training_run_start(self, trainer, **kwargs):
            heard.append(self.number)

    train(make_trainer([Named(1), Named(2), Named]))
    assert heard == [1, 2, 0]


def test_a_custom_event_reaches_only_those_who_define_it():
    heard: list[Any] = []

    class Listens(TrainerCallback):
        def on_sample_drawn(self, trainer, index, **kwargs):
            heard.append((trainer, index, kwargs))

    trainer = make_trainer([recording_callback(), Listens, TrainerCallback()])
    trainer.callback_handler.call_event("on_sample_drawn", trainer, 7, colour="red")
    assert heard == [(trainer, 7, {"colour": "red"})]


def test_a_custom_event_of_an_overridden_step_is_called():
    class Firing(Trainer):
        def train_epoch_end(self):
            self.callback_handler.call_event("after_the_epoch", self)

    heard: list[int] = []
    callback = TrainerCallback()
    callback.after_the_epoch = lambda trainer: heard.append(trainer.progress.epoch)  # type: ignore[attr-defined]
    train(make_trainer([callback], trainer_class=Firing), epochs=2)
    assert heard == [1, 2]


def test_a_custom_event_without_listeners_is_no_error():
    callback: Any = recording_callback()
    trainer = make_trainer([callback])
    before = fired(callback)
    trainer.callback_handler.call_event("on_nothing_of_ours", trainer)
    assert fired(callback) == before


def test_an_event_with_a_name_of_another_library_is_an_event(monkeypatch):
    monkeypatch.setitem(OTHER_LIBRARIES.hooks, "on_train_step_end", ("on_update_end",))
    heard: list[int] = []
    train(make_trainer([listener(on_update_end=lambda trainer, step: heard.append(step))]), size=4)
    assert heard == [0, 1]


def test_a_callback_added_later_is_called_from_then_on():
    heard: list[int] = []
    trainer = make_trainer()
    train(trainer)
    trainer.callback_handler.add_callback(listener(on_train_step_end=lambda t, step, **_: heard.append(step)))
    train(trainer)
    assert heard == [0, 1, 2]
    trainer.callback_handler.clear_callbacks()
    train(trainer)
    assert heard == [0, 1, 2]
    assert len(trainer.callback_handler) == 0


def test_an_inherited_event_method_is_called():
    heard: list[str] = []

    class Base(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            heard.append(type(self).__name__)

    class Child(Base):
        pass

    train(make_trainer([Child]))
    assert heard == ["Child"]


UNKNOWN = {
    "on_train_step_ends": "on_train_step_end",  # misspelt
    "on_optimiser_step_end": "on_optimizer_step_end",
    "on_train_batch_end": "on_train_step_end",  # of Lightning and Keras
    "on_epoch_end": "on_training_run_epoch_end",
    "on_step_end": "on_update_end",  # of transformers
    "on_save_checkpoint": "state_dict",
    "after_train_iter": "on_train_step_end",  # of mmengine
    "before_run": "on_training_run_start",
    "after_batch": "on_train_step_end",  # of fastai
    "batch_checkpoint": "on_train_step_checkpoint",  # of Composer
    "iteration_completed": "on_train_step_end",  # Ignite's
    "on_grad_computed": "on_backward_end",  # of skorch
    "on_before_optimizers_step": "on_optimizer_step_start",  # of fastNLP
}


@pytest.mark.extension("other_libraries")
def test_an_unknown_event_is_warned_of_with_a_suggestion():
    methods = {name: lambda self, trainer, **kwargs: None for name in [*UNKNOWN, "on_checkpoint_uploaded"]}
    trainer = make_trainer([type("Listens", (TrainerCallback,), {"on_gpu": False, **methods})])
    with pytest.warns(UserWarning, match="is not an event") as caught:
        train(trainer)
    said = [str(warning.message) for warning in caught]
    assert len(said) == len(UNKNOWN)
    for name, meant in UNKNOWN.items():
        (line,) = [line for line in said if f"Listens.{name} is not an event of the trainer" in line]
        assert line.endswith(f"Did you mean {meant!r}?")


@pytest.mark.extension("other_libraries")
def test_a_hook_with_two_matching_events_names_both():
    methods = {"after_step": lambda self, trainer: None, "before_train": lambda self, trainer: None, "after_all": len}
    with pytest.warns(UserWarning, match="is not an event") as caught:
        train(make_trainer([type("Hook", (TrainerCallback,), methods)]))
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 2
    assert said[0].startswith("Hook.after_step is not an event")
    assert said[0].endswith("Did you mean 'on_train_step_end' or 'on_optimizer_step_end'?")  # detectron2's, fastai's
    assert said[1].endswith("Did you mean 'on_training_run_start' or 'on_train_epoch_start'?")


def warnings_of_unknown_events() -> list[str]:
    """The warnings of this rank about a misspelt event."""
    misspelt = type("Misspelt", (TrainerCallback,), {"on_train_step" + "_ends": lambda self, trainer, **kwargs: None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adamw_trainer(float64_model(), callbacks=[misspelt]).train(float64_data(8), 1)
    return [str(warning.message) for warning in caught]


@pytest.mark.processes
@two_are_enough
def test_one_process_warns_of_unknown_events_on_behalf_of_all(ranks):
    assert list(map(len, ranks(warnings_of_unknown_events))) == [1] + [0] * (ranks.world_size - 1)


def test_shipped_callbacks_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = make_trainer(DEFAULT_CALLBACKS)
    assert len(trainer.callback_handler) == len(DEFAULT_CALLBACKS)


def test_the_handler_prints_each_event_with_its_listeners():
    class First(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs): ...

        def on_training_run_start(self, trainer, **kwargs): ...

    class Second(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs): ...

    lines = str(make_trainer([Second, First, Second]).callback_handler).splitlines()
    assert lines == ["on_training_run_start: First", "on_train_step_end: Second, First, Second"]


def test_a_handler_without_listeners_prints_none():
    assert "no callback" in repr(CallbackHandler())


# --------------------------------------------------------------------------------------- early ends


def after(recorder: Any, event: str) -> list[str]:
    """The events after the first occurrence of one."""
    names = [name for name, _ in recorder.calls]
    return names[names.index(event) + 1 :]


def raising(event: str, error: BaseException) -> TrainerCallback:
    """A callback that raises once, at the first occurrence of an event."""
    pending = [error]

    def method(trainer: Trainer, **kwargs: Any) -> None:
        if pending:
            raise pending.pop()

    return listener(**{event: method})


@pytest.mark.parametrize("event", DURING_TRAINING)
def test_a_stop_in_any_event_ends_the_run_cleanly(event):
    recorder = recording_callback()
    trainer = make_trainer([recorder, raising(event, StopTrainingError("enough"))])
    train(trainer, epochs=2, eval_dataset=True)
    assert after(recorder, event) == ["on_stop_training_error", "on_training_run_end"]
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


# -------------------------------------------------------------------------------------------- errors


class CustomError(Exception):
    """An error that nothing else raises."""


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


# ------------------------------------------------------------------------- what every kind of step fires


class FitsOne(nn.Linear):
    """Has memory for a single sample in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


class UpdatesEach(Trainer):
    """Updates its optimizers one after another."""

    def train_step(self, batch):
        x, y = batch
        for name in self.optimizer:
            self.update(self.loss_func(self.model(x), y), name)


class UpdatesOne(Trainer):
    """Has a step of its own with one optimizer."""

    def train_step(self, batch):
        x, y = batch
        self.update(self.loss_func(self.model(x), y))


class Recomputes(Trainer):
    """Recomputes the gradients of each update."""

    def optimizer_step(self):
        self.recompute_gradients()
        super().optimizer_step()


class Kind(NamedTuple):
    """A kind of step: how a trainer and a run get it.

    Args:
        step: the class of the step; of an extension, its name
        documented: the block of the docstring that says what it fires, unless it fires what the plain step does
        make: returns a trainer with a callback
        how: arguments of ``train``
    """

    step: type[Step] | str
    documented: str = ""
    make: Callable[..., Trainer] = make_trainer
    how: Mapping[str, Any] = MappingProxyType({})


def with_lbfgs(callbacks: list[Any]) -> Trainer:
    model = make_model()
    return make_trainer(callbacks, model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=3))


def with_two_optimizers(callbacks: list[Any], trainer_class: type[Trainer] = Trainer) -> Trainer:
    model = make_model()
    return make_trainer(callbacks, model, trainer_class, optimizer=two_optimizers(model))


def updating_each(callbacks: list[Any]) -> Trainer:
    return with_two_optimizers(callbacks, UpdatesEach)


def fitting_one(callbacks: list[Any]) -> Trainer:
    return make_trainer(callbacks, FitsOne(4, 1))


def skipping(listed: list[Any]) -> Trainer:
    skip = callbacks.SkipFailedBatchesCallback(phases=["training", "evaluation", "prediction"])
    return make_trainer([*listed, skip])


def sharded(callbacks: list[Any]) -> Trainer:
    return sharded_trainer("fsdp", callbacks)


PARTS = "auto_microbatch, SkipFailedBatchesCallback, logical_processes"
AGAIN = "LBFGS, recompute_gradients()"
MANUAL = "train_step(...)"
TWO_STEPS = {"gradient_accumulation_steps": 2}
UNREADABLE = {"train_dataset": Broken(), "train_dataloader_kwargs": {"num_workers": 0, "shuffle": False}}
KINDS = {
    "plain": Kind(PlainStep),
    "accumulation": Kind(PlainStep, how=TWO_STEPS),
    "growing accumulation": Kind(PlainStep, how={"gradient_accumulation_steps": {0: 1, 2: 2}}),
    "evaluation within epochs": Kind(PlainStep, how={"evaluate_every": "2 updates"}),
    "two optimizers": Kind(PlainStep, make=with_two_optimizers),
    "compiled": Kind(PlainStep, make=partial(make_trainer, compile_step={"backend": "eager"})),
    "microbatches": Kind("GuardedStep", PARTS, fitting_one, {"auto_microbatch": True, **TWO_STEPS}),
    "skipped batches": Kind("GuardedStep", PARTS, skipping, UNREADABLE),
    "skipped batches in windows": Kind("GuardedStep", PARTS, skipping, UNREADABLE | TWO_STEPS),
    "LBFGS": Kind("ReplayingStep", AGAIN, with_lbfgs),
    "recomputed gradients": Kind("ReplayingStep", AGAIN, partial(make_trainer, trainer_class=Recomputes), TWO_STEPS),
    "manual": Kind("ManualStep", MANUAL, partial(make_trainer, trainer_class=UpdatesOne)),
    "manual, two optimizers": Kind("ManualStep", MANUAL, updating_each),
    "manual, accumulation": Kind("ManualStep", MANUAL, updating_each, TWO_STEPS),
    "sharded": Kind("ShardedStep", make=sharded, how={"train_dataset": float64_data(8), **TWO_STEPS}),
}
EXTENSION_OF = {
    "GuardedStep": "failed_batches",
    "ManualStep": "manual_optimization",
    "ReplayingStep": "closures",
    "ShardedStep": "sharding",
}
OWNERS = {name: [EXTENSION_OF[kind.step]] for name, kind in KINDS.items() if isinstance(kind.step, str)}
OWNERS["compiled"] = ["compiled_step"]
BLOCKS = documented_blocks()
OF_ALL_RUNS = BLOCKS["whenever processes are lost or join, see takeover"]
OF_A_RUN = {name: BLOCKS[name] for name in ("Trainer(...)", "train(...)", "evaluate(...)", "predict(...)")}


def declared(blocks: Iterable[Line]) -> list[Line]:
    """The lines of events in blocks and in the evaluations that they name."""
    lines = [line for block in blocks for line in block.lines()]
    if any(line.text == "evaluation" for line in lines):
        lines += BLOCKS["evaluation"].lines()
    return [line for line in lines if line.event]


def check_calls(recorder: Any, name: str, documented: str = "") -> set[str]:
    """Check the recorded calls against a block of the docstring, clear them, and return the names of the events."""
    calls, recorder.calls = recorder.calls, []
    block = with_step(BLOCKS[name], BLOCKS[documented]) if documented else BLOCKS[name]
    events = [event for event, _ in calls]
    assert re.fullmatch(pattern(block, BLOCKS), "".join(f"{event} " for event in events)), events
    for event, kwargs in calls:
        assert sorted(kwargs) == sorted(keywords_of(event)), event
    always = {line.event for line in declared([block]) if not line.is_of_some_runs}
    assert always <= set(events), always - set(events)
    return set(events)


def check_kind(kind: Kind) -> set[str]:
    """Train, evaluate and predict with a kind of step, check the events, and return their names."""
    recorder: Any = recording_callback()
    trainer = kind.make([recorder])
    fired = check_calls(recorder, "Trainer(...)")
    data = kind.how.get("train_dataset", make_data(8))
    train(trainer, 2, **{"train_dataset": data, "eval_dataset": data, "batch_size": 2} | kind.how)
    step = type(trainer.current_run.training_step)
    assert kind.step in (step, step.__name__)
    fired |= check_calls(recorder, "train(...)", kind.documented)
    trainer.evaluate(data, 2, {"num_workers": 0})
    fired |= check_calls(recorder, "evaluate(...)")
    trainer.predict(data, 2, {"num_workers": 0})
    return fired | check_calls(recorder, "predict(...)")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extension(*OWNERS.get(name, ()))) for name in KINDS if name != "sharded"],
)
def test_each_kind_of_step_fires_the_events_in_documented_order(name):
    check_kind(KINDS[name])


def check_kinds(*names: str) -> None:
    for name in names:
        check_kind(KINDS[name])


@pytest.mark.extension("closures", "failed_batches", "manual_optimization")
@two_are_enough
def test_kinds_of_steps_fire_every_event_on_each_process(ranks):
    ranks.run(check_kinds, "plain", "microbatches", "recomputed gradients", "manual, two optimizers")


@CAN_SHARD
@two_are_enough
def test_steps_of_sharded_models_fire_every_event(ranks):
    ranks.run(check_kinds, "sharded")


def test_no_kind_of_step_of_the_core_is_left_out():
    def kinds_of(step: type[Step]) -> set[type[Step]]:
        return {step}.union(*map(kinds_of, step.__subclasses__()))

    rooms = tuple(f"pytorch_accel_lite.{room}." for room in ("loop", "run", "steps"))
    shipped = {step for step in kinds_of(Step) if step.__module__.startswith(rooms)}
    assert shipped - {Step} == {kind.step for kind in KINDS.values() if not isinstance(kind.step, str)}


@pytest.mark.extension("failed_batches")
def test_events_of_some_runs_fire_when_they_are_documented_to():
    fired = check_kind(KINDS["skipped batches"])
    for error in (StopTrainingError("enough"), CustomError("broken")):
        recorder: Any = recording_callback()
        trainer = make_trainer([recorder, raising("on_epoch_checkpoint", error)])
        recorder.calls.clear()
        with suppress(CustomError):
            train(trainer, eval_dataset=True)
        fired |= check_calls(recorder, "train(...)")
    assert {line.event for line in declared(OF_A_RUN.values()) if line.is_of_some_runs} <= fired


def test_every_event_is_documented_in_the_loop_with_its_keywords():
    lines = declared([*OF_A_RUN.values(), OF_ALL_RUNS])
    assert sorted({line.event for line in lines}) == sorted(EVENTS)
    documented = {line.event: line.keywords for line in lines if line.keywords}
    assert documented == {event: keywords_of(event) for event in EVENTS if keywords_of(event)}


def test_events_are_declared_in_the_order_of_the_loop():
    of_batches = {
        "training": BLOCKS["train(...)"], "evaluation": BLOCKS["evaluation"], "prediction": BLOCKS["predict(...)"],
    }  # fmt: skip
    for phase, block in of_batches.items():
        (batches,) = [line for line in block.lines() if line.text == "for each batch:"]
        assert (*batches.events(),) == STEP_EVENTS[phase]


# ---------------------------------------------------------------------- evaluation and prediction in a run


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


def test_a_callback_that_is_removed_is_no_longer_called():
    calls: list[str] = []

    class Counts(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            calls.append("class")

    handler = make_trainer().callback_handler
    one, other = (listener(on_train_step_end=lambda t, name=name, **_: calls.append(name)) for name in ("one", "other"))
    for callback in (one, other, Counts, Counts):
        handler.add_callback(callback)
    with pytest.raises(ValueError, match=r"SaveBestModelCallback.* is not in this handler, which has \[.*'Counts'"):
        handler.remove_callback(SaveBestModelCallback)
    trainer = make_trainer()
    trainer.callback_handler = handler

    def heard() -> set[str]:
        calls.clear()
        train(trainer)
        return {*calls}

    assert heard() == {"one", "other", "class"}
    handler.remove_callback(one)
    handler.remove_callback(Counts)
    assert heard() == {"other"}
    handler.callbacks.remove(other)  # between runs, the list may be changed, too
    assert heard() == set()


def test_a_new_callback_is_called_where_a_removed_one_was_not():
    handler = make_trainer().callback_handler
    event = "on_train_step_end"
    for _ in range(20):  # a new object mostly gets the id of one that has just been freed
        added = listener(**{event: lambda t, **_: None})
        handler.add_callback(added)
        assert len(handler.listeners[event]) == 1
        handler.set_listening(added, False, event)
        handler.remove_callback(added)
        del added
