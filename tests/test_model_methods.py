"""Methods of the model that compute losses and predictions, matched to the batch by the names of their parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import MetricsCallback, ModelEmaCallback, SaveTrainingStateCallback
from tests.launching import CAN_SHARD
from tests.ranks import IN_ORDER, shared_folder, world_size
from tests.tasks import equal, largest_difference, listener

METHODS = {"train": "train_step", "eval": "evaluate_step", "predict": "sample"}


class Net(nn.Module):
    """Calls parts of itself in training, and its forward pass in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 6).double()
        self.head = nn.Linear(6, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = self.head(self.body(x).tanh())
        return {"loss": nn.functional.mse_loss(outputs, y), "model_outputs": outputs, "size": outputs.square().mean()}

    def evaluate_step(self, y: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        outputs = self(x)
        return {"loss": scale * nn.functional.l1_loss(outputs, y), "logits": outputs}

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)

    def whole(self, batch: Any) -> dict[str, Any]:
        x, y = batch if isinstance(batch, list) else (batch["x"], batch["y"])
        return self.train_step(x, y)

    def few(self, x: torch.Tensor, **others: Any) -> dict[str, Any]:
        return self.train_step(x, others["y"])

    def bare(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(x).mean()


class Named(Dataset[Any]):
    """Samples with names."""

    def __init__(self, size: int = 26) -> None:
        self.x = torch.randn(size, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"y": self.y[index], "x": self.x[index]}


def trainer_of_methods(model: nn.Module | None = None, methods: Any = METHODS, **kwargs: Any) -> Trainer:
    model = Net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return Trainer(model, None, optimizer, model_methods=methods, **{"callbacks": [], "seed": 0} | kwargs)


def train(trainer: Trainer, **kwargs: Any) -> Trainer:
    data = Named()
    arguments = {"eval_dataset": data, "per_device_batch_size": 6 // world_size(), "train_dataloader_kwargs": IN_ORDER}
    trainer.train(data, 2, **arguments | kwargs)
    return trainer


def pairs() -> TensorDataset:
    return TensorDataset(Named().x, Named().y)


def by_loss_function(**kwargs: Any) -> Trainer:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[], seed=0)
    trainer.train(pairs(), 2, per_device_batch_size=6, train_dataloader_kwargs={"shuffle": False}, **kwargs)
    return trainer


@pytest.mark.slow
def test_the_names_of_the_batch_are_those_of_the_parameters():
    trainer = train(trainer_of_methods())
    expected = by_loss_function()
    assert equal(trainer.model.state_dict(), expected.model.state_dict())
    assert trainer.run_history["train_loss_epoch"] == expected.run_history["train_loss_epoch"]
    error = (trainer.model(Named().x) - Named().y).abs().mean().item()
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") == pytest.approx(error)
    assert trainer.evaluate(Named(), per_device_batch_size=5) == {"evaluation_loss": pytest.approx(error)}
    assert torch.equal(trainer.predict(Named()), 2 * trainer.model(Named().x).detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "data"), [("train_step", pairs), ("whole", pairs), ("whole", Named), ("few", Named)]
)
def test_what_a_method_may_take(method, data):
    trainer = trainer_of_methods(methods={"train": method})
    trainer.train(data(), 2, data(), per_device_batch_size=6, train_dataloader_kwargs={"shuffle": False})
    assert equal(trainer.model.state_dict(), by_loss_function().model.state_dict())
    assert trainer.run_history["eval_loss_epoch"]
    assert trainer.predict(pairs()).shape == (26, 1)  # of the forward pass


def test_samples_are_counted_as_they_were_collated():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def loss_of(self, tokens, label):
            return {"loss": self.weight * label.mean()}

    def pack(samples):
        tokens, labels = zip(*samples, strict=True)
        return {"tokens": torch.cat(tokens), "label": torch.stack(labels)}

    labels = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0])
    data = [(torch.ones(index + 1), label) for index, label in enumerate(labels)]
    trainer = Trainer(Packed(), None, None, callbacks=[], model_methods={"eval": "loss_of"})
    found = trainer.evaluate(data, per_device_batch_size=4, dataloader_kwargs={"collate_fn": pack})
    assert found == {"evaluation_loss": 3.0}


def trained_and_resumed() -> dict[str, Any]:
    """The weights after a run of windows of two uneven batches, and after one resumed in its middle; its numbers."""

    def run(folder: Any, **kwargs: Any) -> Trainer:
        states = SaveTrainingStateCallback(folder, save_every_n_steps=2, max_checkpoints=None)
        return train(trainer_of_methods(callbacks=[states]), gradient_accumulation_steps=2, **kwargs)

    with shared_folder() as folder:
        trainer = run(folder / "whole")
        state = sorted(path for path in (folder / "whole").iterdir() if path.is_dir())[0]
        resumed = run(folder / "resumed", resume_from=state)
    return {
        "weights": copy.deepcopy(trainer.get_model().state_dict()),
        "resumed": resumed.get_model().state_dict(),
        "history": trainer.run_history.to_dict(),
        "predicted": trainer.predict(Named()),
    }


def test_processes_train_as_one_and_resume_to_the_same_bits(two_ranks):
    alone = trained_and_resumed()
    for found in (alone, *two_ranks(trained_and_resumed)):
        assert found["weights"].keys() == Net().state_dict().keys()
        assert largest_difference(found["weights"], alone["weights"]) < 1e-12
        assert equal(found["resumed"], found["weights"])
        assert (found["predicted"] - alone["predicted"]).abs().max() < 1e-12
        for name, values in alone["history"].items():
            assert found["history"][name] == pytest.approx(values), name


def sharded() -> list[float]:
    """The losses of a model whose weights are spread over the processes, and whose methods call parts of it."""
    PartialState(cpu=True)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    trainer = train(trainer_of_methods(model))
    trainer.predict(Named())
    return trainer.run_history.get_metric_values("train_loss_epoch")


@CAN_SHARD
def test_sharded_weights_are_gathered_for_them(two_ranks):
    expected = train(trainer_of_methods()).run_history["train_loss_epoch"]
    for found in two_ranks(sharded):
        assert found == pytest.approx(expected)


@pytest.mark.slow
def test_metrics_and_averages_use_them():
    metrics = MetricsCallback({"mse": MeanSquaredError()}, lambda batch, out: (out.get("logits"), batch["y"]))
    found = MetricsCallback({"found": MeanSquaredError()}, train=True)
    data = [{"x": x, "labels": y} for x, y in pairs()]

    class Labelled(Net):
        def train_step(self, x, labels):
            return super().train_step(x, labels)

        def evaluate_step(self, x, labels):
            return super().evaluate_step(labels, x)

    trainer = trainer_of_methods(callbacks=[metrics, ModelEmaCallback(decay=0.5, save_path=None)])
    history = train(trainer).run_history
    mse = (trainer.model(Named().x) - Named().y).square().mean().item()
    assert history.get_latest_metric("mse") == pytest.approx(mse)
    assert history.get_latest_metric("ema_model_eval_loss_epoch") != history.get_latest_metric("eval_loss_epoch")
    other = trainer_of_methods(Labelled(), callbacks=[found])
    other.train(data, 1, data)
    assert {"found", "train_found"} <= set(other.run_history)


@pytest.mark.slow
def test_they_go_with_splitting_compiling_and_mixed_precision():
    compiled = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module

    train(trainer_of_methods(compile_model={"backend": backend}), auto_microbatch=True)
    assert compiled
    torch.compiler.reset()
    types = set()
    note = listener(on_eval_step_end=lambda t, batch_output, **_: types.add(batch_output["logits"].dtype))
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trainer = trainer_of_methods(
            Net().float(), callbacks=[note], accelerator=Accelerator(cpu=True, mixed_precision="bf16")
        )
        inner = trainer.model.body.register_forward_hook(lambda module, inputs, output: types.add(output.dtype))
        data = [{"x": torch.randn(3), "y": torch.randn(1)}] * 4
        trainer.train(data, 1, data)
        inner.remove()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert types == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ("train_step", TypeError, "model_methods='train_step' must be a dict with names of methods, such as"),
        ({"train": Net.train_step}, TypeError, "must be a dict with names of methods"),
        ({"fit": "train_step"}, ValueError, "must have keys out of 'train', 'eval', 'predict'"),
        ({}, ValueError, r"model_methods=\{\} must have keys"),
        ({"train": "trainstep"}, ValueError, r"model_methods\['train'\]='trainstep': Net has no.*mean 'train_step'"),
        ({"eval": "body"}, ValueError, "Net has no such method"),
    ],
)
def test_wrong_names_are_refused_at_once(methods, error, message):
    with pytest.raises(error, match=message):
        trainer_of_methods(methods=methods)


def test_a_loss_function_that_would_not_be_called_is_refused():
    with pytest.raises(ValueError, match="train_step returns the loss, so loss_func would never be called"):
        Trainer(Net(), nn.MSELoss(), None, model_methods=METHODS)


@pytest.mark.slow
def test_a_wrapper_that_would_be_left_out_is_refused():
    with pytest.raises(TypeError, match="train_step would be called without the wrapper of the model, OptimizedModule"):
        Trainer(torch.compile(Net()), None, None, model_methods=METHODS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "method", "message"),
    [
        (
            {"inputs": torch.ones(3).double(), "y": torch.ones(1).double()},
            "train_step",
            r"train_step\(\) got an unexpected keyword argument 'inputs'",
        ),
        ({"x": torch.ones(3).double()}, "evaluate_step", "missing 1 required .*argument: 'y'"),
        ((torch.ones(3).double(),), "train_step", "missing 1 required positional argument: 'y'"),
        ((torch.ones(3).double(), torch.ones(1)), "bare", "must return a dict with 'loss', not Tensor"),
    ],
)
def test_a_batch_that_does_not_fit_is_told_before_the_first_update(batch, method, message):
    trainer = trainer_of_methods(methods={"train": method})
    with pytest.raises((ValueError, TypeError), match=message):
        trainer.train([batch] * 4, 1)
    assert trainer.progress.update == 0
