"""Callbacks in a trainer: which of them hear an event, and in which order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pytorch_accel_lite import CallbackHandler, Trainer, TrainerCallback
from pytorch_accel_lite.base.unknown_names import OTHER_LIBRARIES
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, SaveBestModelCallback
from tests.recorded_events import fired, recording_callback
from tests.small_models import listener, make_trainer, train


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
