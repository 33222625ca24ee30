"""What fastNLP has: batches by name, several optimizers, resuming, exchanges between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.repository.feature_comparison.noted_runs import HERE, said
from tests.repository.feature_comparison.rows import row
from tests.small_models import equal_weights, listener, make_data, make_model, make_trainer, train, weights


class TakesX(nn.Module):
    """Names its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def dicts(**more: Any) -> list[dict[str, Any]]:
    return [{"x": x, "label": y, **more} for x, y in make_data()]


@row(
    "`setup` moves the model to its device",
    "the device of the model",
    "the index of a process on its machine",
    "the model without wrappers",
    "asking whether there are several processes",
    "training, with updates",
    "validation, with its loss",
)
def test_a_trainer_tells_of_its_device_and_processes(trainer):
    model = trainer.get_model()
    assert {parameter.device for parameter in model.parameters()} == {trainer.device}
    assert model is trainer.model
    assert trainer.accelerator.local_process_index == 0
    assert trainer.ranks.world_size == 1
    assert trainer.run_config.is_distributed is False
    assert trainer.progress.update == 4
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 2


@row("batches on another device than the model", "batches are moved to the device, nested in any way")
def test_nested_batches_are_moved_to_the_device():
    from accelerate.utils import send_to_device

    seen: list[Any] = []

    class Placed(Trainer):
        def calculate_train_batch_loss(self, batch):
            seen.append(batch)
            inputs, targets = send_to_device((batch["in"]["x"][0], batch["y"]), torch.device("cpu"))
            return super().calculate_train_batch_loss((inputs, targets))

    nested = [{"in": {"x": [x]}, "y": y} for x, y in make_data()]
    train(make_trainer(trainer_class=Placed), train_dataset=nested, train_dataloader_kwargs=HERE)
    assert seen[0]["in"]["x"][0].device.type == "cpu"


@row("a model that is wrapped in `DataParallel`")
def test_a_model_in_data_parallel_trains_to_the_same_bits():
    plain, wrapped = make_model(), nn.DataParallel(make_model())
    train(make_trainer(model=wrapped))
    assert equal_weights(weights(train(make_trainer(model=plain)).model), weights(wrapped.module))


@row("one mode for the whole model")
def test_an_overridden_start_of_an_epoch_sets_one_mode():
    modes: list[bool] = []
    fixed = type("Fixed", (Trainer,), {"train_epoch_start": lambda self: self.model.eval()})
    train(
        make_trainer(
            [listener(on_train_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training))],
            trainer_class=fixed,
        )
    )
    assert modes == [False] * 3


@row("arguments of `forward` by the keys of a batch", "keys that `forward` does not take", "keys for your own loss")
def test_keys_of_a_batch_are_arguments_of_forward():
    trained = [make_trainer(model=TakesX()) for _ in range(2)]
    train(trained[0], train_dataset=dicts(), train_dataloader_kwargs=HERE)
    with said("takes no argument named 'id': ignored"):
        train(trained[1], train_dataset=dicts(id=3), train_dataloader_kwargs=HERE)
    assert equal_weights(weights(trained[0].model), weights(trained[1].model))
    passed: list[set[str]] = []

    def loss(outputs: Any, targets: Any) -> Any:
        passed.append(set(targets))
        return (outputs - targets["label"]).square().mean()

    train(make_trainer(model=TakesX(), loss_func=loss), train_dataset=dicts(id=3), train_dataloader_kwargs=HERE)
    assert passed[0] == {"label", "id"}


@row("`train_step` and `evaluate_step` of the model", "a model that returns its losses as a dict")
def test_a_step_of_the_model_may_return_several_losses():
    class HasSteps(nn.Linear):
        def train_step(self, batch):
            return {"fit": (self(batch[0]) - batch[1]).square().mean(), "size": self.weight.square().sum()}

    class Uses(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model.train_step(batch)}

    history = train(make_trainer(model=HasSteps(4, 1), trainer_class=Uses, loss_func=None)).run_history
    assert history.get_metric_names() >= {"train_loss_epoch", "train_fit_epoch", "train_size_epoch"}


@row(
    "one optimizer or several",
    "what is no optimizer is refused",
    "several optimizers with parameters of their own",
    "an optimizer with a step of its own",
)
def test_a_trainer_takes_one_optimizer_or_several():
    model: Any = make_model()
    first, last = (torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 2))
    assert train(make_trainer(model=model, optimizer={"body": first, "head": last})).progress.update == 3
    assert train(make_trainer(model=model, optimizer=[first, last])).progress.update == 3
    with pytest.raises(ValueError, match="the same parameter"):
        make_trainer(model=model, optimizer=[first, torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(TypeError, match="optimizer='adam' must be an instance"):
        make_trainer(optimizer="adam")

    class Own(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    own = Own(model.parameters(), lr=0.1)
    train(make_trainer(model=model, optimizer=own))
    assert own.steps == 3


@row(
    "backward pass, update and clearing by methods",
    "gradients that are set to zero, not to `None`",
    "gradients are cleared before the forward pass",
    "a run without updates",
)
def test_overridden_methods_clear_gradients_and_skip_updates(trainer):
    assert {"backward_step", "optimizer_step", "optimizer_zero_grad"} <= {*trainer.calls}
    zero = {"optimizer_zero_grad": lambda self: self.optimizer.zero_grad(set_to_none=False)}
    zeroing = train(make_trainer(trainer_class=type("Zero", (Trainer,), zero)))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in zeroing.model.parameters())

    class ClearsFirst(Trainer):
        def optimizer_zero_grad(self):
            pass

        def calculate_train_batch_loss(self, batch):
            super().optimizer_zero_grad()
            return super().calculate_train_batch_loss(batch)

    clearing = make_trainer(trainer_class=ClearsFirst)
    assert equal_weights(weights(train(clearing).model), weights(train(make_trainer()).model))
    assert all(p.grad is not None for p in clearing.model.parameters())
    skipping = make_trainer([listener(on_optimizer_step_start=lambda trainer: trainer.skip_update())])
    before = weights(skipping.model)
    assert equal_weights(weights(train(skipping).model), before)


@pytest.mark.extension("tuning")
@row("a dry run that only reads data")
def test_diagnose_replaces_a_dry_run():
    trainer = make_trainer()
    before = weights(trainer.model)
    assert "data" in str(trainer.diagnose(make_data(), 2, num_steps=3))
    assert equal_weights(weights(trainer.model), before)


@row("a context for evaluations")
def test_evaluations_record_no_gradients(evaluated_run):
    assert evaluated_run.trainer.seen["needs gradients"] is False


class CountsSteps(TrainerCallback):
    """A callback with a state of its own."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_train_step_end(self, trainer, **kwargs):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def saving_run(folder: Any, epochs: int, *callbacks: Any, **kwargs: Any) -> Trainer:
    """A shuffled run that saves after every epoch, and keeps the last two states."""
    saver = SaveTrainingStateCallback(folder, save_every_n_epochs=1, max_checkpoints=2)
    return train(make_trainer([*callbacks, saver], seed=0), epochs, train_dataloader_kwargs={}, **kwargs)


@row(
    "the position in the data is saved",
    "a state after every epoch",
    "the last n states",
    "resuming",
    "a run is resumed",
    "resuming when there is no state",
)
def test_a_run_resumes_from_its_last_state_to_the_same_bits(tmp_path, capsys):
    whole = saving_run(tmp_path / "whole", 4)
    saving_run(tmp_path / "states", 3, resume_from="latest")
    assert "No training state" in capsys.readouterr().out
    names = [path.name for path in (tmp_path / "states").glob("update-*")]
    assert sorted(names) == ["update-000000006", "update-000000009"]
    resumed = saving_run(tmp_path / "states", 4, resume_from="latest")
    assert resumed.progress.update == 12
    assert equal_weights(weights(resumed.model), weights(whole.model))


@row(
    "states of hooks are saved and loaded",
    "several hooks of one class have a state each",
    "a state whose hook is missing is warned of",
)
def test_each_callback_resumes_its_own_state(tmp_path):
    saving_run(tmp_path, 1, CountsSteps(), CountsSteps(9))
    resumed = CountsSteps(), CountsSteps()
    saving_run(tmp_path, 2, *resumed, resume_from="latest")
    assert [each.count for each in resumed] == [6, 15]
    with said("state of callback 'CountsSteps', which"), said("state of callback 'CountsSteps#2', which"):
        saving_run(tmp_path, 3, resume_from="latest")


@row("your own states come back when loaded")
def test_own_entries_of_a_state_are_restored(tmp_path):
    train(make_trainer(seed=0)).save_training_state(tmp_path, {"mine": 7})
    assert make_trainer(seed=0).load_training_state(tmp_path)["mine"] == 7


@row("the weights alone", "the whole model as an object", "models are saved and loaded", "a first epoch of your choice")
def test_saved_weights_and_models_are_loaded(tmp_path):
    trainer = train(make_trainer())
    trainer.save_model(tmp_path / "model")
    other = make_trainer(model=make_model(seed=1))
    other.load_checkpoint(tmp_path / "model", load_optimizer=False)
    assert equal_weights(weights(other.model), weights(trainer.model))
    assert train(other, 2).progress.epochs_completed == 2
    torch.save(trainer.get_model(), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert equal_weights(weights(loaded), weights(trainer.model))


@row(
    "a tensor as a number",
    "reduced over its elements and processes",
    "the smallest, the largest, the sum",
    "waiting for each other",
    "an object of one process for all",
    "objects of all processes",
)
def test_values_are_exchanged_between_processes(trainer):
    pair = torch.tensor([1.0, 3.0])
    assert trainer.tensor_to_numeric(pair) == [1.0, 3.0]
    assert trainer.tensor_to_numeric(torch.tensor(2.0)) == 2.0
    assert trainer.tensor_to_numeric({"a": pair}, reduce="mean") == {"a": 2.0}
    assert [trainer.tensor_to_numeric(pair, reduce=kind) for kind in ("min", "max", "sum")] == [1.0, 3.0, 4.0]
    trainer.barrier()
    assert trainer.broadcast_object({"a": 1}, source=0) == {"a": 1}
    assert trainer.all_gather_object("it") == ["it"]
