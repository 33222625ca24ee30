"""compile_model and channels_last: the model is prepared in place and trains to the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.small_models import (
    Blocks,
    Rows,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    image_data,
    image_model,
    largest_difference,
    listener,
    weights,
)


def train(model: nn.Module, callbacks: Any = (), channels_last: bool = False, resume_from: Any = None) -> Trainer:
    # Not Adam: it makes large numbers of the rounding errors that are the gradient of a bias before batch norm.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = adamw_trainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=1, channels_last=channels_last
    )
    trainer.train(image_data(), 2, image_data(7), per_device_batch_size=6, resume_from=resume_from)
    return trainer


@pytest.fixture(autouse=True)
def forget_other_models():
    """Reset torch's compiler, which compiles only a few models per process."""
    torch.compiler.reset()


class OwnModel(nn.Module):
    """Not a bare ``nn.Sequential``, which torch 2.6 leaves uncompiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = float64_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.slow
def test_a_model_compiled_in_place_trains_like_the_plain_one():
    plain = OwnModel()
    model, compiled, data = copy.deepcopy(plain), [], float64_data(16)

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for each, options in ((plain, False), (model, {"backend": backend})):
        trainer = adamw_trainer(each, compile_model=options)
        for _ in range(2):
            trainer.train(data, 1, data, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
        assert trainer.model is each
    assert len(compiled) == 2  # with gradients and without: the second run compiles nothing again
    assert equal_weights(weights(model), weights(plain))
    assert torch.equal(trainer.predict(data), plain(data.tensors[0]).detach())


def test_channels_last_lays_out_images_and_learns_the_same():
    plain, model = image_model(), image_model()
    train(plain)
    seen = []

    def look(trainer, batch, **kwargs):
        seen.append((batch[0].is_contiguous(memory_format=torch.channels_last), batch[1].ndim))

    trainer = train(model, callbacks=[listener(on_train_step_end=look, on_eval_step_end=look)], channels_last=True)
    assert set(seen) == {(True, 1)}
    assert trainer.model is model
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not plain[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert largest_difference(weights(model), weights(plain)) < 1e-10
    assert torch.allclose(trainer.predict(image_data()), plain(image_data().tensors[0]), atol=1e-10)


@pytest.mark.parametrize("batch", [dict, list])
def test_images_are_found_wherever_they_are_in_a_batch(batch):
    def collate(samples):
        images, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        return {"input": images, "labels": labels} if batch is dict else [images, labels]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = image_model()

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            layouts.add(input.is_contiguous(memory_format=torch.channels_last))
            return self.inner(input)

    layouts: set[bool] = set()
    trainer = adamw_trainer(Model(), nn.CrossEntropyLoss(), channels_last=True)
    trainer.train(Rows(image_data()), 1, collate_fn=collate, train_dataloader_kwargs={"num_workers": 0})
    assert layouts == {True}


def test_a_run_with_channels_last_resumes_to_the_same_bits(tmp_path):
    def saving():
        return SaveTrainingStateCallback(tmp_path, save_every_n_steps=3, save_at_end=False)

    whole, again = image_model(), image_model()
    train(whole, callbacks=[saving()], channels_last=True)
    trainer = train(again, callbacks=[saving()], channels_last=True, resume_from=tmp_path / "update-000000003")
    assert trainer.progress.update == 10
    assert equal_weights(weights(again), weights(whole))


def test_a_model_compiled_by_accelerate_is_returned(no_accelerator):
    kinds: set[str] = set()
    noting = listener(on_train_step_end=lambda trainer, **kwargs: kinds.add(type(trainer.model).__name__))
    model = float64_model()
    trainer = adamw_trainer(model, accelerator=Accelerator(dynamo_backend="eager"), callbacks=[noting])
    trainer.train(float64_data(8), 1)
    assert kinds == {"OptimizedModule"}
    assert trainer.model is model


# torch looks at the gradients of what a graph is given; it ignores the warning itself unless warnings are errors.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_accelerate_compiled_keep_names_in_states(tmp_path, no_accelerator):
    kinds: set[str] = set()

    def look(trainer: Trainer, **kwargs: Any) -> None:
        kinds.add(f"{type(trainer.model).__name__} of {type(trainer.model.blocks[0]).__name__}")

    def run(regional: bool, **kwargs: Any) -> Blocks:
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True) if regional else None
        callbacks = [listener(on_train_step_end=look), SaveTrainingStateCallback(tmp_path / str(regional), 1)]
        model = Blocks()
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
        trainer = adamw_trainer(model, accelerator=accelerator, callbacks=callbacks, seed=1)
        data = float64_data(8, dtype=torch.float32)
        trainer.train(data, 2, per_device_batch_size=4, **kwargs)
        assert trainer.model is model
        return model

    whole = weights(run(regional=True))
    assert kinds == {"Blocks of OptimizedModule"}
    assert equal_weights(weights(run(regional=False)), whole)
    state = tmp_path / "True" / "update-000000002"
    assert equal_weights(weights(run(regional=False, resume_from=state)), whole)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Linear(4, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    with pytest.raises(ValueError, match="Linear has parameters on the meta device, which have no values"):
        trainer.train(float64_data(8), 1)


def test_a_model_whose_weights_accelerate_offloads_is_evaluated(tmp_path):
    """They are on the meta device between two forward passes."""
    model, data = float64_model(), float64_data(8)
    plain = Trainer(copy.deepcopy(model), nn.MSELoss(), None, callbacks=[]).evaluate(data)
    devices = {name: "disk" if name == "0" else "cpu" for name, _ in model.named_children()}
    offloaded = dispatch_model(model, devices, offload_dir=tmp_path)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    assert Trainer(offloaded, nn.MSELoss(), None, callbacks=[]).evaluate(data) == plain
