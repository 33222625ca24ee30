"""What pytorch-accelerated has: names, callbacks, events and step methods."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import (
    CallbackHandler,
    InMemoryRunHistory,
    LossTracker,
    RunHistory,
    StopTrainingError,
    Trainer,
    TrainerRunConfig,
    TrainerWithTimmScheduler,
)
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    SaveBestModelCallback,
    TerminateOnNaNCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.trainer import DEFAULT_CALLBACKS
from tests.repository.feature_comparison.noted_runs import METHODS
from tests.repository.feature_comparison.rows import row
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights

# -------------------------------------------------------------------------------- pytorch-accelerated: names


@pytest.mark.extension("progress_bar")
@row(
    "imports from `callbacks`",
    "import from `run_config`",
    "imports from `tracking`",
    "imports from `trainer`",
    "placeholders from the package itself",
)
def test_names_are_imported_from_the_files_that_had_them():
    from pytorch_accel_lite import TrainerPlaceholderValues as OfPackage
    from pytorch_accel_lite import run_config, tracking
    from pytorch_accel_lite import trainer as module

    named = "CallbackHandler TrainerCallback StopTrainingError TerminateOnNaNCallback LogMetricsCallback"
    named += " PrintProgressCallback ProgressBarCallback MoveModulesToDeviceCallback"
    assert all(hasattr(shipped, name) for name in named.split())
    assert run_config.TrainerRunConfig is TrainerRunConfig
    assert (tracking.RunHistory, tracking.InMemoryRunHistory) == (RunHistory, InMemoryRunHistory)
    assert tracking.LossTracker is LossTracker
    assert (module.Trainer, module.TrainerWithTimmScheduler) == (Trainer, TrainerWithTimmScheduler)
    assert module.TrainerPlaceholderValues is OfPackage


@row("five positional arguments", "the same by keyword", "callbacks as classes or instances")
def test_a_trainer_takes_its_arguments_by_position_and_keyword():
    model, loss, history = make_model(), nn.MSELoss(), InMemoryRunHistory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [TerminateOnNaNCallback, EarlyStoppingCallback(2)]
    for trainer in (
        Trainer(model, loss, optimizer, callbacks, history),
        Trainer(model, loss_func=loss, optimizer=optimizer, callbacks=callbacks, run_history=history),
    ):
        assert (trainer.model, trainer.loss_func, trainer.run_history) == (model, loss, history)
        assert [type(callback) for callback in trainer.callbacks] == [TerminateOnNaNCallback, EarlyStoppingCallback]


@row("attributes that are `None` until a run", "attributes that exist at once", "the device")
def test_a_trainer_has_its_attributes_before_a_run():
    trainer: Any = make_trainer()
    names = "run_config train_dataset eval_dataset _train_dataloader _eval_dataloader scheduler collate_fn"
    names += " _train_dl_kwargs _eval_dl_kwargs create_scheduler_fn"
    assert [getattr(trainer, name) for name in names.split()] == [None] * 10
    assert isinstance(trainer._accelerator, Accelerator)
    assert isinstance(trainer._loss_tracker, LossTracker)
    assert isinstance(trainer.callback_handler, CallbackHandler)
    assert isinstance(trainer.run_history, RunHistory)
    assert trainer.device == torch.device("cpu")


@row("an event at the end of the constructor")
def test_the_first_event_is_the_end_of_the_constructor(trainer):
    assert trainer.calls[0] == "on_init_end"


@row("an accelerator of your own, by a method", "the trainer wraps an accelerator, which prepares the rest")
def test_an_accelerator_may_be_created_by_a_method():
    own = Accelerator(cpu=True)
    trainer = make_trainer(trainer_class=type("Other", (Trainer,), {"_create_accelerator": lambda self: own}))
    assert trainer.accelerator is trainer._accelerator is own
    inside: list[Any] = []
    trainer.callback_handler.add_callback(listener(on_train_step_start=lambda trainer: inside.append(trainer)))
    assert train(trainer).accelerator.device == inside[0].device


@row(
    "a history whose values a callback adds to",
    "names, values and the latest value of a metric",
    "the number of the epoch, from 1",
)
def test_a_history_takes_values_and_counts_epochs_from_1():
    epochs: list[int] = []

    def add(trainer: Trainer) -> None:
        epochs.append(trainer.run_history.current_epoch)
        trainer.run_history.update_metric("mine", len(epochs) / 2)

    history = train(make_trainer([listener(on_train_epoch_end=add)]), 2).run_history
    assert history.get_metric_names() == {"train_loss_epoch", "mine"}
    assert list(history.get_metric_values("mine")) == [0.5, 1.0]
    assert history.get_latest_metric("mine") == 1.0
    assert epochs == [1, 2]


@row("the mean loss of the epoch in its last event")
def test_the_last_event_of_an_epoch_has_its_mean_loss(trainer):
    assert trainer.seen["mean"] == pytest.approx(trainer.run_history.get_latest_metric("train_loss_epoch"))


# ---------------------------------------------------------------------------- pytorch-accelerated: callbacks


@row("five callbacks by default")
@pytest.mark.extension("advice", "progress_table")
def test_a_trainer_has_five_callbacks_by_default():
    names = [callback.__name__.removesuffix("Callback") for callback in DEFAULT_CALLBACKS]
    assert names == ["MoveModulesToDevice", "TerminateOnNaN", "ProgressTable", "ProgressBar", "Advice"]


@row("modules of the trainer are moved to the device, but not the model", "they are moved for an evaluation, too")
def test_modules_of_a_trainer_are_moved_to_the_device():
    class Wrapped(nn.Linear):
        moved = 0

        def to(self, *args, **kwargs):
            self.moved += 1
            return super().to(*args, **kwargs)

    trainer: Any = make_trainer([MoveModulesToDeviceCallback])
    trainer.teacher = Wrapped(2, 2)
    train(trainer)
    assert trainer.teacher.moved == 1
    trainer.evaluate(make_data())
    assert trainer.teacher.moved == 2


@row(
    "lines at the start and end of runs and epochs",
    "new metrics are printed",
    "your own way to log metrics",
    "printed epochs in a second run",
)
def test_runs_and_epochs_print_their_lines(capsys):
    logged: list[set[str]] = []

    class Own(LogMetricsCallback):
        def log_metrics(self, trainer, metrics):
            logged.append(set(metrics))

    trainer = train(make_trainer([PrintProgressCallback, LogMetricsCallback, Own]), 2, eval_dataset=True)
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == ["Starting training run", "Starting epoch 1/2"]
    assert "Finishing training run" in lines
    assert any(line.strip().startswith("eval_loss_epoch: ") for line in lines)
    trainer.evaluate(make_data())
    assert "Finishing evaluation run\n  evaluation_loss: " in capsys.readouterr().out
    assert logged == [{"train_loss_epoch"}, {"eval_loss_epoch"}] * 2 + [{"evaluation_loss"}]
    train(trainer, 3, reset_run_history=False)
    assert re.findall(r"Starting epoch (\S+)", capsys.readouterr().out) == ["1/3", "2/3", "3/3"]
    assert trainer.run_history.current_epoch == 6


@pytest.mark.extension("progress_bar")
@row("a bar", "progress that can be turned off")
def test_the_progress_bar_can_be_turned_off():
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    assert ProgressBarCallback in get_default_callbacks()
    assert ProgressBarCallback not in get_default_callbacks(progress_bar=False)
    assert train(make_trainer([ProgressBarCallback])).progress.update == 3


@row(
    "early stopping by position and keyword",
    "patience of early stopping",
    "an absolute threshold",
    "a threshold as a part of the best value",
    "metrics decide when to stop",
)
def test_early_stopping_takes_a_patience_and_a_threshold():
    def epochs(values: list[float], *args: Any, **kwargs: Any) -> int:
        left = iter(values)
        record = listener(on_train_epoch_end=lambda trainer: trainer.run_history.update_metric("mine", next(left)))
        stop = EarlyStoppingCallback(*args, watch_metric="mine", greater_is_better=False, **kwargs)
        return train(make_trainer([record, stop]), len(values)).progress.epoch

    assert epochs([1.0] * 5, 2) == epochs([1.0] * 5, early_stopping_patience=2) == 3
    assert epochs([9.0, 8.8, 8.0], 1, 0.3) == 2
    assert epochs([9.0, 8.8, 8.0], 1, 0.1) == 3
    assert epochs([9.0, 8.8, 8.0], 1, 0.1, threshold_mode="relative") == 2


@row("the best model by a metric that should grow", "the best n models by several metrics")
def test_the_best_models_are_kept(tmp_path):
    values = iter([1.0, 3.0, 2.0])
    seen: list[Any] = []

    def record(trainer: Trainer) -> None:
        trainer.run_history.update_metric("accuracy", next(values))
        seen.append(weights(trainer.model))

    best = SaveBestModelCallback(tmp_path / "best.pt", "accuracy", greater_is_better=True)
    other = SaveBestModelCallback(tmp_path / "other.pt", "train_loss_epoch", keep=2, load_saved_checkpoint=False)
    trainer = train(make_trainer([listener(on_train_epoch_end=record), best, other]), 3)
    assert equal_weights(weights(trainer.model), seen[1])
    assert len(other.find_saved()) == 2


@row(
    "order of the events of `train`",
    "a method for the schedule, called only if there is one",
    "every part of a step can be overridden",
    "methods at the start and end of a run",
)
def test_methods_and_events_of_a_run_are_in_order(trainer):
    assert {*METHODS} - {"evaluation_run_start", "evaluation_run_end"} <= {*trainer.calls}
    step = ["on_train_step_start", "calculate_train_batch_loss", "on_backward_start", "backward_step"]
    calls = trainer.calls
    epoch = calls[calls.index("train_epoch_start") : calls.index("training_run_epoch_end")]
    assert epoch[:3] == ["train_epoch_start", "on_train_epoch_start", "on_train_step_start"]
    assert epoch[2:6] == step
    assert epoch.index("optimizer_step") < epoch.index("scheduler_step") < epoch.index("optimizer_zero_grad")
    assert epoch.count("scheduler_step") == epoch.count("optimizer_step") == 2
    assert trainer.calls.index("training_run_start") < trainer.calls.index("on_training_run_start")
    assert trainer.calls.index("training_run_end") < trainer.calls.index("on_training_run_end")
    without = make_trainer(trainer_class=type("Plain", (Trainer,), {"scheduler_step": lambda self: 1 / 0}))
    with pytest.raises(ZeroDivisionError):
        train(without, create_scheduler_fn=partial(StepLR, step_size=1))


@row("order of the events of `evaluate`", "methods around `evaluate`", "the metric of `evaluate`")
def test_methods_and_events_of_an_evaluation_are_in_order(evaluated_run):
    steps = ["on_eval_step_start", "calculate_eval_batch_loss", "on_eval_step_end"] * 3
    start = ["evaluation_run_start", "on_evaluation_run_start", "eval_epoch_start", "on_eval_epoch_start"]
    end = ["eval_epoch_end", "on_eval_epoch_end", "evaluation_run_end", "on_evaluation_run_end"]
    own = [name for name in evaluated_run.calls if name != "on_dataloaders_created"]
    assert own == [*start, *steps, *end]
    assert evaluated_run.metrics.keys() == {"evaluation_loss"}


@row(
    "events carry the batch and what the step returned",
    "keys that a step adds to its result reach callbacks",
    "a hook that gets outputs, labels and loss",
    "a method that computes the loss of a batch",
)
def test_events_carry_the_batch_and_the_output_of_the_step(trainer):
    carried = trainer.seen["on_train_step_end"]
    inputs, targets = carried["batch"]
    output = carried["batch_output"]
    assert (inputs.shape, targets.shape, output["model_outputs"].shape) == ((2, 4), (2, 1), (2, 1))
    assert (output["mine"], output["batch_size"]) == (7, 2)


@row("callbacks see the divided loss", "a method for the backward pass gets the divided loss")
def test_a_backward_pass_gets_the_divided_loss():
    divided: list[float] = []
    whole: list[float] = []

    class Divided(Trainer):
        def backward_step(self, loss):
            divided.append(loss.item())
            super().backward_step(loss)

    note = listener(on_train_step_end=lambda trainer, batch_output, **kwargs: whole.append(batch_output["loss"].item()))
    train(make_trainer([note], trainer_class=Divided), size=4, gradient_accumulation_steps=2)
    assert divided == pytest.approx([loss / 2 for loss in whole])


@row("a callback that changes the loss before the backward pass")
def test_a_callback_may_change_the_loss_before_the_backward_pass():
    def double(trainer: Trainer, batch_output: Any, **kwargs: Any) -> None:
        batch_output["loss"] = batch_output["loss"] * 0

    trainer = make_trainer([listener(on_backward_start=double)])
    before = weights(trainer.model)
    assert equal_weights(weights(train(trainer).model), before)
    with pytest.raises(RuntimeError, match="Change it in on_backward_start"):
        train(make_trainer([listener(on_train_step_end=double)]))


@row("an event of your own", "a handler calls callbacks, also with your own events")
def test_handlers_and_trainers_call_own_events():
    heard: list[int] = []
    trainer = make_trainer([listener(on_mine=lambda trainer, **kwargs: heard.append(kwargs["x"]))])
    trainer.callback_handler.call_event("on_mine", trainer, x=1)
    trainer.call_event("on_mine", x=2)
    assert heard == [1, 2]


@row("a callback stops the run", "a callback stops an evaluation")
def test_a_callback_stops_a_run_or_an_evaluation(capsys):
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("enough")

    heard: list[str] = []
    note = {name: partial(lambda name, trainer: heard.append(name), name) for name in ("on_stop_training_error",)}
    for event, call in (
        ("on_train_step_end", lambda trainer: train(trainer, 2)),
        ("on_eval_step_end", lambda trainer: trainer.evaluate(make_data())),
    ):
        trainer = make_trainer([listener(**{event: stop}), listener(**note)])
        call(trainer)
        assert (trainer.stop_reason, trainer.progress.update) == ("enough", int(event == "on_train_step_end"))
        assert "enough" in capsys.readouterr().out
    assert heard == ["on_stop_training_error"] * 2


@row("`on_training_run_epoch_end` sees the epoch that has ended")
def test_the_last_event_of_an_epoch_sees_the_epoch_that_ended(trainer):
    assert trainer.seen["epochs"] == [1, 2]
    assert trainer.run_history.current_epoch == 3


# ------------------------------------------------------------------------- pytorch-accelerated: step methods


@row("a method that sets the mode for training", "a method that sets the mode for evaluation")
def test_overridden_methods_set_the_mode():
    modes: list[bool] = []
    note = listener(
        on_train_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training),
        on_eval_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training),
    )
    train(make_trainer([note]), size=2, eval_dataset=True)
    assert modes == [True, False]
    own = {"train_epoch_start": lambda self: self.model.eval(), "eval_epoch_start": lambda self: self.model.train()}
    train(make_trainer([note], trainer_class=type("Own", (Trainer,), own)), size=2, eval_dataset=True)
    assert modes[2:] == [False, True]


@row("the method is replaced as a whole")
def test_an_overridden_method_computes_the_loss_of_a_batch():
    class Own(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.model(batch[0])
            return {"loss": (outputs - 1).square().mean(), "model_outputs": outputs, "batch_size": len(outputs)}

    assert train(make_trainer(trainer_class=Own, loss_func=None)).progress.update == 3


@row(
    "a method for the update",
    "a method that clears gradients",
    "a method before the losses of an epoch are recorded",
    "a method for evaluation batches, without gradients",
    "a method at the end of an evaluation",
    "a method at the end of an epoch",
)
def test_methods_of_an_epoch_are_called_in_their_places(trainer):
    counts = {name: trainer.calls.count(name) for name in METHODS}
    assert counts["optimizer_step"] == counts["optimizer_zero_grad"] == 4
    assert counts["calculate_eval_batch_loss"] == 6
    assert counts["eval_epoch_end"] == counts["training_run_epoch_end"] == counts["train_epoch_end"] == 2
    assert trainer.seen["needs gradients"] is False
    assert trainer.calls.index("train_epoch_end") < trainer.calls.index("on_train_epoch_end")
    early: list[int] = []

    class Early(Trainer):
        def train_epoch_end(self):
            early.append(len(self.run_history.get_metric_names()))

    train(make_trainer(trainer_class=Early))
    assert early == [0]


@row("it may be empty in a timm trainer", "schedules of timm", "the number of updates of a timm trainer")
def test_a_timm_trainer_steps_the_schedules_of_timm():
    scheduler = pytest.importorskip("timm.scheduler")
    create = partial(scheduler.CosineLRScheduler, t_initial=4, lr_min=0.01)
    empty = type("Empty", (TrainerWithTimmScheduler,), {"training_run_epoch_end": lambda self: None})
    for kind in (TrainerWithTimmScheduler, empty):
        trainer: Any = train(make_trainer(trainer_class=kind), 4, create_scheduler_fn=create)
        assert trainer.num_updates == 12
        assert trainer.optimizer.param_groups[0]["lr"] == 0.01
