"""Events: their order, their arguments, and what has happened before each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.run.events import EVENTS
from tests.recorded_events import fired, recording_callback
from tests.small_models import equal_weights, listener, make_data, make_trainer, train, weights

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
