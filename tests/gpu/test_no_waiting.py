"""No step waits for the device: torch's debug mode raises an error at the first operation that does.

That mode does not see events, nor copies from pageable memory. On a CPU there is nothing to wait for: a rehearsal shows
that the steps are there.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks, get_default_callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.gpu.parts import ON_GPU, Task, fit, on_device, plain_loop, sgd, sized, trainer_of

FIRST = sized(10, 2)  # step that is watched, after those in which memory is allocated and kernels are chosen
STEPS = sized(50, 6)
ALL = FIRST + STEPS + 3


def refuse_waiting(refuses: bool) -> None:
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error" if refuses else "default")


class Watch(TrainerCallback):
    """Refuses what waits for the device in a number of steps; the first of all callbacks.

    Attributes:
        seen: number of steps so far
        watched: number of watched steps so far
        is_watching: whether the step under way is watched
    """

    def __init__(self) -> None:
        self.seen = self.watched = 0
        self.is_watching = False

    def _begin(self) -> None:
        self.is_watching = FIRST <= self.seen < FIRST + STEPS
        self.seen += 1
        self.watched += self.is_watching
        refuse_waiting(self.is_watching)

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        self._begin()

    def on_eval_step_start(self, trainer: Any, **kwargs: Any) -> None:
        self._begin()

    def on_predict_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self._begin()

    def on_train_step_checkpoint(self, trainer: Any, **kwargs: Any) -> None:
        refuse_waiting(False)  # a state waits for the copy in host memory, as documented


class WatchAgain(TrainerCallback):
    """Refuses waiting again after a state; the last of all callbacks."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_step_checkpoint(self, trainer: Any, **kwargs: Any) -> None:
        refuse_waiting(self.watch.is_watching)


def default_callbacks(folder: Path) -> list[Any]:
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    return [*get_default_callbacks(progress_bar=False), ProgressBarCallback(show_always=True, refresh_seconds=0.0)]


def all_callbacks(folder: Path) -> list[Any]:
    from pytorch_accel_lite.callbacks import MetricsCallback

    accuracy = MulticlassAccuracy(10, average="micro", validate_args=False)  # by class, it waits: torch.bincount does
    return [
        *default_callbacks(folder),
        callbacks.ModelEmaCallback(0.99, evaluate_during_training=False, save_path=None),
        MetricsCallback(accuracy, train=True),
        callbacks.MetricsFileCallback(folder / "rows.jsonl", every_n_updates=5),
        callbacks.LearningRateMonitorCallback(),
        callbacks.GradientNormCallback(),
        callbacks.ThroughputCallback(),
    ]


def states(folder: Path) -> list[Any]:
    return [SaveTrainingStateCallback(folder / "states", save_every_n_steps=5, asynchronous=True, max_checkpoints=2)]


CALLBACKS = {"bare": lambda folder: [], "default": default_callbacks, "all": all_callbacks, "states": states}
ARGUMENTS = {"all": {"gradient_clip_norm": 1.0, "create_scheduler_fn": "cosine", "warmup_steps": 5}}
QUIET = contextlib.redirect_stderr


def watched_trainer(task: Task, callbacks: list[Any] = (), **kwargs: Any) -> tuple[Trainer, Watch]:  # type: ignore
    watch = Watch()
    return trainer_of(task, [watch, *callbacks, WatchAgain(watch)], **kwargs), watch


def test_a_plain_loop_does_not_wait():
    """The control: a model that itself waits would make the other tests meaningless."""
    for kind in ("resnet", "transformer"):
        task = Task(kind)
        model = task.model().to(on_device([torch.zeros(1)])[0].device)
        optimizer = sgd(model)
        batches = task.batches(2)
        plain_loop(model, optimizer, task.loss, batches * 3)
        refuse_waiting(True)
        plain_loop(model, optimizer, task.loss, batches * 3)
        refuse_waiting(False)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", ["resnet", "transformer"])
@pytest.mark.parametrize("how", ["bare", "default"])
def test_no_step_waits(how, kind, precision, tmp_path):
    trainer, watch = watched_trainer(task := Task(kind), CALLBACKS[how](tmp_path), mixed_precision=precision)
    with QUIET(io.StringIO()):
        fit(trainer, task, ALL)
    assert watch.watched == STEPS


@pytest.mark.parametrize("how", ["all", "states"])
def test_no_step_waits_while_states_are_saved(how, tmp_path):
    trainer, watch = watched_trainer(task := Task("resnet"), CALLBACKS[how](tmp_path), seed=0, mixed_precision="bf16")
    with QUIET(io.StringIO()):
        fit(trainer, task, ALL, **ARGUMENTS.get(how, {}))
    assert watch.watched == STEPS
    assert how != "states" or len(list((tmp_path / "states").glob("update-*"))) == 2


def test_no_step_of_an_accumulation_waits():
    trainer, watch = watched_trainer(task := Task("transformer"), mixed_precision="bf16")
    fit(trainer, task, ALL, gradient_accumulation_steps=3, gradient_clip_norm=0.5)
    assert watch.watched == STEPS


@pytest.mark.parametrize("how", ["bare", "all"])
def test_no_evaluation_step_waits(how, tmp_path):
    trainer, watch = watched_trainer(task := Task("resnet"), CALLBACKS[how](tmp_path))
    with QUIET(io.StringIO()):
        trainer.evaluate(task.data(ALL), task.batch_size)
    assert watch.watched == STEPS


def test_no_prediction_step_waits():
    trainer, watch = watched_trainer(task := Task("resnet"))
    predictions = trainer.predict(task.data(ALL), task.batch_size)
    assert watch.watched == STEPS
    assert len(predictions) == ALL * task.batch_size
    assert predictions.isfinite().all()
