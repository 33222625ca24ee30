"""Loops and evaluations that code written for pytorch-accelerated overrides."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests import ancestor
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights


class OwnLoop(Trainer):
    """Replaces the loop of the run, as a tutorial of pytorch-accelerated does."""

    def _run_training(self):
        self.training_run_start()
        self.callback_handler.call_event("on_training_run_start", self)
        for _ in range(self.run_config.num_epochs):
            try:
                is_over = self._run_train_epoch(self._train_dataloader)
                if self.eval_dataset is not None:
                    self._run_eval_epoch(self._eval_dataloader)
                self.training_run_epoch_end()
                self.callback_handler.call_event("on_training_run_epoch_end", self)
                self.run_history._increment_epoch()
            except StopTrainingError as stop:
                self.print(stop)
                self.callback_handler.call_event("on_stop_training_error", self)
                break
            if is_over:
                break
        self.training_run_end()
        self.callback_handler.call_event("on_training_run_end", self)


def fired(trainer_class: type[Trainer], callbacks: list[Any], **arguments: Any) -> tuple[Trainer, list[Any]]:
    """Train, and return the events of epochs and of the run, with the epoch of the history."""
    heard: list[Any] = []

    def note(event: str) -> Any:
        return lambda trainer, **kwargs: heard.append((event, trainer.progress.update))

    names = ["on_training_run_start", "on_train_epoch_start", "on_eval_epoch_end", "on_training_run_epoch_end"]
    names += ["on_epoch_checkpoint", "on_stop_training_error", "on_training_run_end"]
    noting = listener(**{name: note(name) for name in names})
    trainer = make_trainer([noting, *callbacks], trainer_class=trainer_class)
    return train(trainer, eval_dataset=True, **({"epochs": 3} | arguments)), heard


def test_values_recorded_after_an_epoch_of_an_own_loop_are_its():
    record = listener(on_epoch_checkpoint=lambda t: t.run_history.update_metric("mine", t.progress.epoch))
    trainer, _ = fired(OwnLoop, [record])
    assert [row["mine"] for row in trainer.run_history.rows()] == [1, 2, 3]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"max_num_train_steps": 5}, {"gradient_accumulation_steps": 2}, {"scheduler_interval": "epoch"}],
    ids=lambda arguments: "-".join(arguments) or "epochs",
)
def test_an_overridden_loop_trains_like_the_default(arguments, here):
    if "scheduler_interval" in arguments:
        arguments = arguments | {"create_scheduler_fn": partial(StepLR, step_size=1)}
    (ours, expected), (own, heard) = (
        fired(kind, [SaveBestModelCallback(f"{kind.__name__}.pt")], **arguments) for kind in (Trainer, OwnLoop)
    )
    assert equal_weights(weights(own.model), weights(ours.model))
    assert own.run_history.to_dict() == ours.run_history.to_dict()
    assert own.progress == ours.progress
    assert heard == expected


def test_an_overridden_loop_can_be_stopped():
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2:
            raise StopTrainingError("Enough.")

    (ours, expected), (own, heard) = (fired(kind, [listener(on_train_epoch_end=stop)]) for kind in (Trainer, OwnLoop))
    assert (own.stop_reason, heard) == (ours.stop_reason, expected)
    assert own.stop_reason == "Enough."
    assert equal_weights(weights(own.model), weights(ours.model))


def loops_on_ranks() -> list[bool]:
    (ours, expected), (own, heard) = (fired(kind, [], size=7) for kind in (Trainer, OwnLoop))
    return [equal_weights(weights(own.model), weights(ours.model)), own.progress == ours.progress, heard == expected]


def test_an_overridden_loop_trains_alike_on_two_processes(two_ranks):
    assert [*two_ranks(loops_on_ranks)] == [[True] * 3] * 2


def test_an_error_in_a_loop_of_a_subclass_reaches_the_callbacks():
    seen: list[BaseException] = []
    note = listener(on_exception=lambda trainer, exception, **kwargs: seen.append(exception))
    with pytest.raises(ZeroDivisionError):
        fired(OwnLoop, [note, listener(on_train_step_end=lambda trainer, **kwargs: 1 / 0)])
    assert [type(error) for error in seen] == [ZeroDivisionError]


def test_resuming_an_overridden_loop_is_refused(tmp_path):
    saving = SaveTrainingStateCallback(tmp_path)
    with pytest.warns(UserWarning, match=r"OwnLoop\._run_training has a loop of its own, so the run cannot be resumed"):
        train(make_trainer([saving], trainer_class=OwnLoop, seed=1), epochs=1)
    again = make_trainer([SaveTrainingStateCallback(tmp_path)], trainer_class=OwnLoop, seed=1)
    with pytest.raises(RuntimeError, match=r"OwnLoop\._run_training has a loop of its own.*super\(\)\._run_training"):
        train(again, epochs=2, resume_from="latest")
    train(make_trainer([SaveTrainingStateCallback(tmp_path)], seed=1), epochs=2, resume_from="latest")


def test_resuming_a_loop_with_its_own_steps_is_refused(tmp_path):
    class OwnSteps(Trainer):
        steps = 0

        def _run_training(self):
            self.callback_handler.call_event("on_training_run_start", self)
            for batch in self._train_dataloader:
                self.backward_step(self.calculate_train_batch_loss(batch)["loss"])
                self.optimizer_step()
                self.optimizer_zero_grad()
                self.steps += 1

    train(make_trainer([SaveTrainingStateCallback(tmp_path)], seed=1), epochs=1)
    own = make_trainer([], trainer_class=OwnSteps, seed=1)
    with pytest.raises(RuntimeError, match=r"OwnSteps\._run_training has a loop of its own.*super\(\)\._run_training"):
        train(own, epochs=2, resume_from=next(path for path in tmp_path.iterdir() if path.is_dir()))
    assert not own.steps
    train(own, epochs=2)
    assert own.steps == 3


def test_an_epoch_trains_on_the_loader_that_it_is_passed():
    other = DataLoader(make_data(2), batch_size=2)
    lengths: list[int] = []

    class Other(Trainer):
        def _run_train_epoch(self, dl):
            lengths.append(len(dl))
            return super()._run_train_epoch(other)

    found = train(make_trainer(trainer_class=Other), epochs=2)
    assert equal_weights(weights(found.model), weights(train(make_trainer(), epochs=2, size=2).model))
    assert found.progress.update == 2
    assert lengths == [3, 3]  # those of the run, in each epoch


def test_an_epoch_of_a_subclass_may_be_its_own_loop():
    class Whole(Trainer):
        updates = 0

        def _run_train_epoch(self, train_dl):
            self.train_epoch_start()
            self.callback_handler.call_event("on_train_epoch_start", self)
            for batch in train_dl:
                self.backward_step(self.calculate_train_batch_loss(batch)["loss"])
                self.optimizer_step()
                self.optimizer_zero_grad()
                self.updates += 1
            self.train_epoch_end()
            self.callback_handler.call_event("on_train_epoch_end", self)
            return self.updates >= self.run_config.max_num_train_steps

    for arguments in ({"epochs": 2}, {"epochs": 9, "max_num_train_steps": 6}):
        found = train(make_trainer(trainer_class=Whole), eval_dataset=True, **arguments)
        assert equal_weights(weights(found.model), weights(train(make_trainer(), epochs=2).model))
        assert len(found.run_history["eval_loss_epoch"]) == 2


def test_an_evaluation_of_a_subclass_needs_no_newer_arguments():
    heard: list[bool] = []

    class Older(Trainer):
        def _run_eval_epoch(self, valid_dl, is_training=True):
            heard.append(is_training)
            super()._run_eval_epoch(valid_dl, is_training)

    trainer = train(make_trainer(trainer_class=Older), epochs=2, eval_dataset=True)
    trainer.evaluate(make_data())
    assert heard == [True, True, False]


def test_an_evaluation_of_another_loader_is_that_of_the_run():
    class Other(Trainer):
        def _run_eval_epoch(self, valid_dl, **kwargs):
            super()._run_eval_epoch(DataLoader(make_data(2), batch_size=2), **kwargs)

    trainer = train(make_trainer(trainer_class=Other), epochs=2, eval_dataset=True, evaluate_every="2 updates")
    assert len(trainer.run_history["eval_loss_epoch"]) == 3


def test_an_evaluation_in_a_callback_does_not_replace_the_runs():
    evaluate = listener(on_train_epoch_end=lambda trainer: trainer._run_eval_epoch(trainer._eval_dataloader))
    trainer = train(make_trainer([evaluate]), epochs=2, eval_dataset=True)
    assert len(trainer.run_history["eval_loss_epoch"]) == 4


def trained_with(hook: str, base: Any) -> tuple[dict[str, torch.Tensor], list[list[float]], int]:
    """Weights, losses and the next epoch after a run with a loop of its own, or whose hook takes another loader."""
    other = DataLoader(make_data(3), batch_size=2)

    class Own(base):  # type: ignore[misc, valid-type]
        def _run_train_epoch(self, dl):
            return super()._run_train_epoch(other if hook == "_run_train_epoch" else dl)

        def _run_eval_epoch(self, dl, is_training=True):
            return super()._run_eval_epoch(other if hook == "_run_eval_epoch" else dl, is_training)

    if hook == "_run_training":
        Own._run_training = OwnLoop._run_training
    model = make_model()
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    loaders = {"shuffle": False, "num_workers": 0}
    how = {"train_dataloader_kwargs": loaders, "eval_dataloader_kwargs": loaders}
    trainer.train(make_data(7), 3, make_data(4), per_device_batch_size=2, **how)
    history = trainer.run_history
    losses = [history.get_metric_values(name) for name in ("train_loss_epoch", "eval_loss_epoch")]
    return weights(model), losses, history.current_epoch


@pytest.mark.parametrize("hook", ["_run_training", "_run_train_epoch", "_run_eval_epoch"])
def test_overridden_private_hooks_work_as_in_the_ancestor(hook):
    ancestor.skip_without_it()
    from pytorch_accelerated.trainer import Trainer as TheirTrainer

    our_weights, our_losses, our_epoch = trained_with(hook, Trainer)
    their_weights, their_losses, their_epoch = trained_with(hook, TheirTrainer)
    assert equal_weights(our_weights, their_weights)
    assert our_epoch == their_epoch
    for ours, theirs in zip(our_losses, their_losses, strict=True):
        assert ours == pytest.approx(theirs)


def test_a_custom_loop_ends_though_a_callback_leaves_its_run():
    leaving = listener(on_train_epoch_start=lambda trainer, **_: remove(trainer))

    def remove(trainer: Trainer) -> None:
        if leaving in trainer.callback_handler.callbacks:
            trainer.callback_handler.remove_callback(leaving)

    checkpoints: list[int] = []
    noting = listener(on_epoch_checkpoint=lambda trainer, **_: checkpoints.append(trainer.progress.epoch))
    trainer = train(make_trainer([leaving, noting], trainer_class=OwnLoop), epochs=2, eval_dataset=True)
    assert checkpoints == [1, 2]
    assert trainer.progress.epochs_completed == 2
