"""Custom callbacks: allowed signatures, and subclasses that do not call the base class."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import CallbackHandler, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import LogMetricsCallback
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import set_own_listening
from pytorch_accel_lite.run.events import EVENTS, keywords_of
from tests import typed_callbacks
from tests.shipped_callbacks import RUN, SHIPPED, build
from tests.small_models import Broken, listener, make_data, make_trainer, train

# ----------------------------------------------------------------------------------- how methods may look


def callback_class(**methods: Any) -> type[TrainerCallback]:
    return type("Watch", (TrainerCallback,), methods)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no trainer": (
        "on_train_step_end",
        lambda self, batch, batch_output, step: None,
        r"Watch\.on_train_step_end\(batch, batch_output, step\) does not accept .*"
        r"Write: def on_train_step_end\(self, trainer, batch, batch_output, step, \*\*kwargs\)$",
    ),
    "no trainer, and no other": (
        "on_train_epoch_end",
        lambda self: None,
        r"Watch\.on_train_epoch_end\(\).*too many positional.*: def on_train_epoch_end\(self, trainer, \*\*kwargs\)$",
    ),
    "keywords alone": ("on_eval_epoch_end", lambda self, **kwargs: None, r"self, trainer, is_intermediate, \*\*kwargs"),
    "no keywords": ("on_train_step_end", lambda self, trainer: None, r"Watch\.on_train_step_end\(trainer\).*'batch'"),
    "a keyword too few": (
        "on_train_step_end",
        lambda self, trainer, batch, batch_output: None,
        r"Watch\.on_train_step_end\(trainer, batch, batch_output\).*'step'",
    ),
    "an argument that the event does not have": (
        "on_eval_step_end",
        lambda self, trainer, batch, batch_output, step, **kwargs: None,
        r"Watch\.on_eval_step_end.*'step'.*self, trainer, batch, batch_output, \*\*kwargs",
    ),
    "an error without its keyword": ("on_exception", lambda self, trainer: None, "self, trainer, exception"),
    "configure_run without the request": (
        "configure_run",
        lambda self, trainer: None,
        r"Write: def configure_run\(self, trainer, request, \*\*kwargs\)$",
    ),
}


@pytest.mark.parametrize(("event", "method", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_a_method_that_its_event_cannot_call_is_refused_early(event, method, match):
    own = callback_class(**{event: method})
    with pytest.raises(TypeError, match=match):
        make_trainer([own])
    with pytest.raises(TypeError, match=match):
        CallbackHandler().add_callback(own())
    assigned = TrainerCallback()
    setattr(assigned, event, partial(method, None))
    if event != "configure_run":  # that is a method of the class
        with pytest.raises(TypeError, match=rf"\.{event}\(.* does not accept the event's arguments"):
            CallbackHandler([assigned])


def generating(self, trainer, **kwargs):
    yield trainer


async def waiting(self, trainer, **kwargs):
    return trainer


UNCALLABLE = {
    "yields": (generating, r"C.on_train_epoch_end contains 'yield', so calling it would run none of its lines"),
    "awaits": (waiting, r"C.on_train_epoch_end contains 'async', so calling it would run none of its lines"),
    "a number": (3, "C.on_train_epoch_end is called at that event, so it must be a method, not 3"),
}


@pytest.mark.parametrize(("method", "match"), UNCALLABLE.values(), ids=UNCALLABLE.keys())
def test_a_method_whose_lines_would_never_run_is_refused(method, match):
    with pytest.raises(TypeError, match=match):
        make_trainer([type("C", (TrainerCallback,), {"on_train_epoch_end": method})])


def run_everything(trainer: Trainer) -> None:
    data = make_data()
    train(trainer, 2, eval_dataset=data)
    trainer.evaluate(data)
    trainer.predict(data)


@pytest.mark.extension("failed_batches")
def test_event_methods_with_all_arguments_need_no_kwargs(recwarn):
    """Methods without ``**kwargs`` are called with the arguments that they declare."""
    called: list[str] = []

    def naming(event: str, *names: str) -> Any:
        scope: dict[str, Any] = {"called": called}
        exec(f"def {event}(self, trainer{''.join(f', {name}' for name in names)}): called.append({event!r})", scope)
        return scope[event]

    own = callback_class(**{event: naming(event, *keywords_of(event)) for event in EVENTS})
    trainer = make_trainer([own, shipped.SkipFailedBatchesCallback(phases=["training", "evaluation", "prediction"])])
    run_everything(trainer)
    train(trainer, train_dataset=Broken(), train_dataloader_kwargs={"num_workers": 0})
    for infer in (trainer.evaluate, trainer.predict):
        infer(Broken(), 2, {"num_workers": 0})
        with pytest.raises(RuntimeError, match=r"All batches of the .* failed"):
            infer(Broken(), dataloader_kwargs={"num_workers": 0})
    assert set(called) == set(EVENTS) - {"on_stop_training_error", "on_processes_changed"}


def test_event_methods_of_any_typed_style_are_called():
    """``make check`` runs the type checker over them."""
    callbacks = [style() for style in typed_callbacks.STYLES]
    train(make_trainer(callbacks), eval_dataset=True)
    assert [callback.steps for callback in callbacks] == [3] * len(callbacks)


def test_events_of_the_base_class_declare_what_they_pass():
    """The handler passes what they declare, and no more: the event of each run is called with these names."""
    keywords = "batch: 'BatchData', batch_output: 'BatchOutput', step: 'int', **kwargs: 'object'"
    declared = inspect.signature(TrainerCallback.on_train_step_end)
    assert str(declared) == f"(self, trainer: 'Trainer', *, {keywords}) -> 'None'"
    passed: dict[str, set[str]] = {}

    def recording(event: str) -> Any:
        return lambda self, trainer, **kwargs: passed.setdefault(event, set()).update(kwargs)

    trainer = make_trainer([callback_class(**{event: recording(event) for event in EVENTS})])
    run_everything(trainer)
    for event, names in passed.items():
        parameters = inspect.signature(getattr(TrainerCallback, event)).parameters.values()
        assert names == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}, event
    assert len(passed) > 20


def test_a_first_argument_of_another_name_is_fine():
    called = []
    own = callback_class(
        on_training_run_start=lambda self, args, **kwargs: called.append(args),
        on_train_epoch_end=lambda self, *everything: called.append(everything[0]),
        on_train_step_end=lambda self, t, batch_output, **rest: called.append(t),
        on_eval_epoch_end=staticmethod(lambda trainer, **kwargs: called.append(trainer)),
    )
    trainer = make_trainer([own])
    train(trainer, size=2, eval_dataset=True)
    assert called == [trainer] * 4


def test_a_custom_event_with_wrong_arguments_is_explained():
    own = callback_class(on_sample_drawn=lambda self, trainer, index: None)
    for others in ([], [callback_class(on_sample_drawn=lambda self, trainer, **kwargs: None)]):
        trainer = make_trainer([*others, own])
        trainer.call_event("on_sample_drawn", index=3)
        with pytest.raises(TypeError, match=r"\.on_sample_drawn\(trainer, index\).*self, trainer, index, colour, "):
            trainer.call_event("on_sample_drawn", index=3, colour="red")


def test_a_type_error_within_a_callback_stays_as_it_is():
    def fails(self, trainer, **kwargs):
        raise TypeError("of my own")

    for others in ([], [TrainerCallback(), callback_class(on_train_epoch_end=lambda self, trainer: None)]):
        with pytest.raises(TypeError) as caught:
            train(make_trainer([callback_class(on_train_epoch_end=fails), *others]))
        assert str(caught.value) == "of my own"


@pytest.mark.parametrize("event", ["on_training_run_start", "on_update_end", "on_eval_step_end"])
def test_an_error_in_a_callback_names_it_and_the_event(event):
    def fails(self, trainer, **kwargs):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train(make_trainer([type("Mine", (TrainerCallback,), {event: fails})]), eval_dataset=True)
    assert caught.value.__notes__[0] == f"In Mine.{event}."


@pytest.mark.sampled
@pytest.mark.parametrize("base", [TrainerCallback, *SHIPPED], ids=lambda base: base.__name__)
def test_a_subclass_may_pass_batch_and_output_on_by_position(base, tmp_path, monkeypatch):
    """As code for pytorch-accelerated does."""
    monkeypatch.chdir(tmp_path)
    reached: list[str] = []
    before = build(base) if base is not TrainerCallback else TrainerCallback()

    class Own(base):  # type: ignore[misc]
        def __init__(self):
            vars(self).update(vars(before))

        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            super().on_train_step_end(trainer, batch, batch_output, **kwargs)
            reached.append("train")

        def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
            super().on_eval_step_end(trainer, batch, batch_output, **kwargs)
            reached.append("eval")

    train(make_trainer([Own]), 2, eval_dataset=True, **RUN.get(base.__name__, {}))
    assert reached.count("train") >= 2
    assert base.__name__ == "LimitEvalStepsCallback" or reached.count("eval") >= 2


# ------------------------------------------------------------- subclasses that do not call the constructor


def test_a_logger_that_overrides_a_runs_start_loses_no_epoch():
    logged: list[list[str]] = []

    class Logger(LogMetricsCallback):
        def __init__(self):
            self.runs = 0

        def on_training_run_start(self, trainer, **kwargs):
            self.runs += 1

        def log_metrics(self, trainer, metrics):
            logged.append([self.runs, *metrics])

    trainer = make_trainer([Logger])
    train(trainer, 1, eval_dataset=True)
    train(trainer, 1, eval_dataset=True)
    train(trainer, 1, eval_dataset=True, reset_run_history=False)
    assert logged == [[run, name] for run in (1, 2, 3) for name in ("train_loss_epoch", "eval_loss_epoch")]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        pytest.param("AdviceCallback", "on_train_step_end", marks=pytest.mark.extension("advice")),
        pytest.param("HangWatchCallback", "on_update_end", marks=pytest.mark.extension("hang_watch")),
        ("LogMetricsCallback", "on_train_step_checkpoint"),
        pytest.param("PlotMetricsCallback", "on_train_step_checkpoint", marks=pytest.mark.extension("reports")),
        pytest.param("ProgressTableCallback", "on_update_end", marks=pytest.mark.extension("progress_table")),
        ("SaveTrainingStateCallback", "on_train_step_checkpoint"),
    ],
)
def test_an_event_a_subclass_overrides_is_called_for_each_update(name, event, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = getattr(shipped, name)
    updates: list[int] = []

    def count(self: Any, trainer: Trainer, **kwargs: Any) -> None:
        getattr(kind, event)(self, trainer, **kwargs)
        updates.append(trainer.progress.update)

    train(make_trainer([type("Counting", (kind,), {event: count})]), epochs=8)
    assert updates == [*range(1, 25)]


def test_none_in_a_list_of_callbacks_is_left_out():
    seen: list[str] = []
    kept = listener(on_train_epoch_start=lambda t: seen.append("kept"))
    trainer = make_trainer([None, kept, None])
    train(trainer)
    assert list(trainer.callback_handler) == [kept]
    assert seen == ["kept"]


def test_a_custom_callback_may_stop_listening():
    class First(TrainerCallback):
        losses = 0

        def on_train_step_end(self, trainer, **kwargs):
            self.losses += 1
            set_own_listening(trainer, self, False, "on_train_step_end")

    first = First()
    train(make_trainer([first]), size=6)
    assert first.losses == 1
