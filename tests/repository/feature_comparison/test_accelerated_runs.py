"""What pytorch-accelerated has: loaders, runs and their settings, loops, schedules and files."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from tests.repository.feature_comparison.rows import row
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights

P = TrainerPlaceholderValues


# ------------------------------------------------------------------------------- pytorch-accelerated: loaders


@row(
    "a loader of training batches of your own",
    "a loader of evaluation batches of your own",
    "your arguments win over the defaults",
    "the arguments of the last loaders",
    "the device of the loader in the first event",
)
def test_overridden_methods_create_the_loaders():
    asked: list[tuple[int, Any]] = []
    devices: list[Any] = []

    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            asked.append((batch_size, train_dl_kwargs))
            return DataLoader(self.train_dataset, batch_size=3)

        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            asked.append((batch_size, eval_dl_kwargs))
            return DataLoader(self.eval_dataset, batch_size=1)

    note = listener(on_training_run_start=lambda trainer: devices.append(trainer._eval_dataloader.device))
    trainer = train(make_trainer([note], trainer_class=Own), eval_dataset=True)
    assert (trainer.progress.update, len(trainer.eval_dataloader)) == (2, 6)
    assert asked == [(2, {"shuffle": False}), (2, None)]
    assert devices == [torch.device("cpu")]
    trainer = train(make_trainer(), train_dataloader_kwargs={"batch_size": 3})
    assert trainer.progress.update == 2
    assert trainer._train_dl_kwargs["batch_size"] == 3


@row("the default arguments of loaders", "one worker per core")
def test_loaders_have_default_arguments():
    trainer: Any = make_trainer()
    trainer.train_dataset = trainer.eval_dataset = make_data()
    found = trainer.get_default_train_dl_kwargs(2), trainer.get_default_eval_dl_kwargs(2)
    assert [kwargs["shuffle"] for kwargs in found] == [True, False]
    assert found[0] | {"shuffle": False} == found[1]
    assert found[1].items() >= {"batch_size": 2, "shuffle": False, "pin_memory": False, "num_workers": 0}.items()


# ---------------------------------------------------------- pytorch-accelerated: train, evaluate and settings


@row("the twelve arguments of `train`, in order", "batches of 8 by default", "accumulation of gradients")
def test_train_accepts_positional_arguments():
    def create(optimizer: Any) -> Any:
        return StepLR(optimizer, 1)

    arguments = (make_data(), 2, make_data(), 2, None, 3, 1.0, create, {"shuffle": False}, {"batch_size": 3}, True)
    trainer = make_trainer()
    trainer.train(*arguments, torch.utils.data.default_collate)
    config = trainer.run_config
    assert (config.num_epochs, config.gradient_accumulation_steps, config.gradient_clip_value) == (2, 3, 1.0)
    assert (config.eval_per_device_batch_size, trainer.progress.update) == (3, 2)
    assert trainer.collate_fn is torch.utils.data.default_collate
    trainer.train(make_data(), 1)
    assert trainer.run_config.train_per_device_batch_size == 8


@row(
    "a limit of updates decides the number of epochs",
    "a limit of steps ends within an epoch",
    "clipping by value",
    "clipping by norm",
)
def test_a_limit_of_updates_ends_a_run_and_gradients_are_clipped():
    trainer = train(make_trainer(), 1, max_num_train_steps=4)
    assert (trainer.progress.update, trainer.run_config.num_epochs, trainer.progress.step) == (4, 2, 1)
    largest: list[float] = []

    def note(trainer: Trainer) -> None:
        gradients = [p.grad for p in trainer.model.parameters()]
        largest.append(max(g.abs().max().item() for g in gradients))
        largest.append(torch.cat([g.flatten() for g in gradients]).norm().item())

    for option in ({"gradient_clip_value": 1e-3}, {"gradient_clip_norm": 1e-3}):
        train(make_trainer([listener(on_optimizer_step_start=note)]), size=2, **option)
    assert largest[0] == pytest.approx(1e-3)
    assert largest[3] == pytest.approx(1e-3, rel=1e-3)


@row(
    "a collate function",
    "several runs of one trainer, with one history",
    "the four arguments of `evaluate`",
    "`evaluate` clears the history",
)
def test_runs_of_one_trainer_collate_and_share_a_history():
    sizes: list[int] = []

    def collate(samples: Any) -> Any:
        sizes.append(len(samples))
        return torch.utils.data.default_collate(samples)

    data = [make_data()[i] for i in range(6)]
    here = {"num_workers": 0}
    trainer = train(make_trainer(), train_dataset=data, train_dataloader_kwargs=here, collate_fn=collate)
    assert sizes == [2, 2, 2]
    trainer.evaluate(data, 3, here, collate)
    assert sizes[3:] == [3, 3]
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1
    train(trainer, reset_run_history=False)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2
    train(trainer)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 1


@row("`evaluate` keeps the settings of the training", "settings of an evaluation alone")
def test_an_evaluation_keeps_the_settings_of_the_training(evaluated_run):
    assert evaluated_run.trainer.run_config is evaluated_run.config
    assert evaluated_run.config.num_update_steps_per_epoch == 2
    trainer = make_trainer()
    trainer.evaluate(make_data(), 3)
    assert trainer.run_config.num_update_steps_per_epoch == 0
    assert trainer.run_config.eval_per_device_batch_size == 3


FIELDS = [
    "num_epochs",
    "train_per_device_batch_size",
    "train_dl_kwargs",
    "eval_per_device_batch_size",
    "eval_dl_kwargs",
    "gradient_accumulation_steps",
    "gradient_clip_value",
    "train_total_batch_size",
    "eval_total_batch_size",
    "num_update_steps_per_epoch",
    "max_num_train_steps",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_distributed",
    "mixed_precision",
]


@row("the fifteen fields and their values", "batch size of evaluations")
def test_the_settings_of_a_run_have_its_values(trainer):
    config = trainer.run_config
    values = {name: getattr(config, name) for name in FIELDS if not name.endswith("kwargs")}
    assert list(values.values()) == [2, 2, 2, 2, None, 4, 2, 2, 4, True, True, False, "no"]
    assert config.train_dl_kwargs["batch_size"] == 2


@row("settings by a method")
def test_an_overridden_method_creates_the_settings():
    asked: list[Any] = []

    class Own(Trainer):
        def _create_run_config(self, per_device_batch_size, **asked_for):
            asked.append((per_device_batch_size, set(asked_for)))
            return super()._create_run_config(per_device_batch_size, **asked_for)

    train(make_trainer(trainer_class=Own))
    names = "num_epochs gradient_accumulation_steps max_num_train_steps gradient_clip_value"
    assert asked[0][0] == 2
    assert {*names.split()} <= asked[0][1]


@row("the metrics of a run", "losses are weighed by the size of batches")
def test_metrics_of_a_run_weigh_batches_by_their_size(trainer):
    assert trainer.run_history.to_dict().keys() == {"train_loss_epoch", "eval_loss_epoch"}
    losses: list[float] = []
    note = listener(on_eval_step_end=lambda trainer, batch_output, **kwargs: losses.append(batch_output["loss"].item()))
    found = make_trainer([note]).evaluate(make_data(3), 2)["evaluation_loss"]
    assert found == pytest.approx((2 * losses[0] + losses[1]) / 3)


# ----------------------------------------------------------------- pytorch-accelerated: loops and placeholders


class OwnLoop(Trainer):
    """Runs as a subclass written for pytorch-accelerated does."""

    def _run_training(self):
        for _ in range(self.run_config.num_epochs):
            self._run_train_epoch(self._train_dataloader)
            if self._eval_dataloader is not None:
                self._run_eval_epoch(self._eval_dataloader)
            self.training_run_epoch_end()
            self.callback_handler.call_event("on_training_run_epoch_end", self)
            self.run_history._increment_epoch()


class OwnEpoch(Trainer):
    """A trainer that replaces the loop over the batches of an epoch."""

    def _run_train_epoch(self, train_dl):
        self.model.train()
        for batch in train_dl:
            self.calculate_train_batch_loss(batch)["loss"].backward()
            self.optimizer_step()
            self.optimizer_zero_grad()


class OwnEvaluation(Trainer):
    """Takes no newer arguments."""

    def _run_eval_epoch(self, valid_dl, is_training=True):
        super()._run_eval_epoch(valid_dl, is_training)


@row(
    "a `_run_training` with the body from there",
    "a `_run_train_epoch` with a loop of its own",
    "a `_run_eval_epoch(valid_dl, is_training=True)`",
)
def test_overridden_loops_train_to_the_same_bits():
    plain = train(make_trainer(), 2, eval_dataset=True)
    for kind in (OwnLoop, OwnEpoch, OwnEvaluation):
        own = train(make_trainer(trainer_class=kind), 2, eval_dataset=True)
        assert equal_weights(weights(own.model), weights(plain.model))
        assert own.run_history.get_metric_values("eval_loss_epoch") == plain.run_history.get_metric_values(
            "eval_loss_epoch"
        )


@row(
    "a factory of the schedule gets the optimizer",
    "a method makes the schedule",
    "schedules are stepped per update",
    "a one-cycle schedule with placeholders",
    "a factor for fine-tuning rates",
    "schedule, metrics, saving and evaluation as parts",
)
def test_schedules_are_created_by_factories_and_methods():
    rates: list[float] = []
    note = listener(on_train_epoch_end=lambda trainer: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    create = partial(StepLR, step_size=P.NUM_UPDATE_STEPS_PER_EPOCH * 2)
    train(make_trainer([note]), 4, create_scheduler_fn=create)
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001])
    own = {"create_scheduler": lambda self: StepLR(self.optimizer, step_size=3)}
    trainer = train(make_trainer(trainer_class=type("Own", (Trainer,), own)))
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    cycle = partial(OneCycleLR, max_lr=0.1, epochs=P.NUM_EPOCHS, steps_per_epoch=P.NUM_UPDATE_STEPS_PER_EPOCH)
    assert train(make_trainer(), 2, create_scheduler_fn=cycle).scheduler.total_steps == 6
    train(make_trainer([note]), create_scheduler_fn=partial(LambdaLR, lr_lambda=lambda update: 0.1))
    assert rates[4:] == pytest.approx([0.01])


# ------------------------------------------------------------------------------- pytorch-accelerated: saving


@row(
    "a checkpoint holds weights, optimizer and what you add",
    "a checkpoint without the optimizer",
    "weights and optimizer are loaded",
    "only weights are loaded",
    "loading an optimizer that is not there is an error",
)
def test_a_checkpoint_holds_weights_optimizer_and_additions(tmp_path):
    model = make_model()
    trainer = train(make_trainer(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1)))
    trainer.save_checkpoint(tmp_path / "all.pt", {"mine": 1})
    assert {"model_state_dict", "optimizer_state_dict", "mine"} <= torch.load(tmp_path / "all.pt").keys()
    trainer.save_checkpoint(tmp_path / "weights.pt", save_optimizer=False)
    assert "optimizer_state_dict" not in torch.load(tmp_path / "weights.pt")
    other = make_model(seed=1)
    second = make_trainer(model=other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.5))
    second.load_checkpoint(tmp_path / "all.pt", load_optimizer=False)
    assert equal_weights(weights(other), weights(model))
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    second.load_checkpoint(tmp_path / "all.pt")
    assert second.optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match=r"the trainer has no optimizer. Pass load_optimizer=False"):
        make_trainer(optimizer=None).load_checkpoint(tmp_path / "all.pt")


@row("tensors of all processes, nested", "printing once per machine")
def test_nested_tensors_are_gathered_and_text_is_printed_once(trainer, capsys):
    nested = trainer.gather({"a": (torch.ones(2), torch.zeros(1))})
    assert torch.equal(nested["a"][0], torch.ones(2))
    trainer.print("once")
    assert capsys.readouterr().out == "once\n"
