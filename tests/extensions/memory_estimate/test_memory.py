"""estimate_memory(): it predicts the memory of real runs and changes nothing."""

from __future__ import annotations

import copy
import html
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import ModelEmaCallback
from pytorch_accel_lite.extensions.memory_estimate.live_bytes import LiveBytes
from tests.launching import CAN_SHARD, SOAK
from tests.small_models import Stream, adamw_trainer, equal_weights, float64_data, float64_model, listener, make_trainer

BATCH = 64


WIDTH = 32


class Blocks(nn.Module):
    """Some blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sharding(Trainer):
    """Shards each block, and the model."""

    def parallelize_model(self, mesh: Any) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def rows(size: int = 4 * BATCH) -> TensorDataset:
    return TensorDataset(torch.randn(size, WIDTH), torch.randn(size, 2 * WIDTH))


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean squared error; torch's returns a number in a storage as large as the outputs."""
    return (outputs - targets).square().mean()


def trainer_of_blocks(kind: type[Trainer] = Trainer, model: nn.Module | None = None, **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    accelerator = kwargs.pop("accelerator", None) or Accelerator(cpu=True)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return kind(model or Blocks(), squared, optimizer, callbacks=[], accelerator=accelerator, **kwargs)


quick = {"device_type": "cpu"}
ORDER = 8 * 2**10  # bytes of the order of the samples, which a run draws
NUM_BYTES = 4 * sum(parameter.numel() for parameter in Blocks().parameters())


def peak_of_a_run(how: str, **kwargs: Any) -> tuple[int, dict[str, int], str]:
    """The most bytes that are alive in the second update of a real run, what they are, and when."""
    trainer = trainer_of_blocks(Sharding if how == "sharded" else Trainer)
    trained: list[Any] = []

    def owners() -> Iterator[tuple[str, Any]]:
        for parameter in trained:
            yield "parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for state in trainer.optimizer.state.values() if trained else ():
            yield from (("optimizer", value) for value in state.values())

    live = LiveBytes(trainer.device, owners)
    begin = listener(
        on_training_run_start=lambda *_, **__: trained.extend(trainer.model.parameters()),
        on_update_end=lambda *_, **__: live.forget_peak(),  # without the state of the optimizer in the first
        on_train_step_start=lambda *_, **__: setattr(live, "is_updating", False),
        on_optimizer_step_start=lambda *_, **__: setattr(live, "is_updating", True),
    )
    trainer.callback_handler.add_callback(begin)
    found: list[Any] = []
    end = listener(on_optimizer_step_end=lambda *_, **__: found.append((live.peak, dict(live.at_peak), live.stage)))
    trainer.callback_handler.add_callback(end)
    for parameter in trainer.model.parameters():
        live.note(parameter)
    data: Any = rows(8 * BATCH)
    if how == "sharded":  # several processes compare a few rows: views of whole tensors would count as new memory
        data = [tuple(part.clone() for part in row) for row in data]
    with live:
        trainer.train(data, max_num_train_steps=2, per_device_batch_size=BATCH, **kwargs)
    return found[-1]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_peak_is_that_of_a_real_run(steps):
    found = trainer_of_blocks().estimate_memory(rows(), BATCH, gradient_accumulation_steps=steps, **quick)
    peak, parts, stage = peak_of_a_run("whole", gradient_accumulation_steps=steps)
    assert found.peak == pytest.approx(peak, rel=0.02, abs=ORDER)
    assert found.stage == stage == "backward pass"
    for kind in ("parameters", "optimizer", "gradients", "activations"):
        assert found.parts[kind] == pytest.approx(parts.get(kind, 0), rel=0.01, abs=ORDER)
    assert found.parts["parameters"] == NUM_BYTES
    assert sum(found.parts.values()) == found.peak


def test_a_growing_batch_needs_the_memory_of_its_largest_window():
    one, two, growing = (
        trainer_of_blocks().estimate_memory(rows(), BATCH, gradient_accumulation_steps=steps, **quick).peak
        for steps in (1, 2, {0: 1, 5: 3})
    )
    assert growing == two != one


def test_the_estimated_peak_is_the_allocators():
    trainer, data = trainer_of_blocks(), rows()
    found = trainer.estimate_memory(data, BATCH, **quick)
    trainer.train(data, 1, per_device_batch_size=BATCH)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer.train(data, max_num_train_steps=1, per_device_batch_size=BATCH)
    highest = total = sum(found.parts[kind] for kind in ("parameters", "optimizer"))
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            highest = max(highest, total)
    assert found.peak == pytest.approx(highest, rel=0.03)


@pytest.mark.thorough
@pytest.mark.processes
@CAN_SHARD
@pytest.mark.soak
@pytest.mark.parametrize("steps", [1, 2] if SOAK else [1])
def test_the_peak_of_a_sharded_model_is_that_of_a_job(two_ranks, steps):
    options = {"gradient_accumulation_steps": steps}
    found = trainer_of_blocks(Sharding).estimate_memory(rows(), BATCH, 2, **options, **quick)
    assert found.is_sharded
    under_way = found.parts["communication"]  # how many messages are alive at once depends on when they arrive
    for peak, parts, _ in two_ranks.run(peak_of_a_run, "sharded", **options):
        assert found.peak == pytest.approx(peak, rel=0.03, abs=ORDER + under_way)
        for kind in ("parameters", "optimizer"):
            assert found.parts[kind] == pytest.approx(parts[kind], rel=0.01)


def test_replicas_have_buckets_for_their_gradients():
    window = {"gradient_accumulation_steps": 2, "gradient_clip_norm": 1.0}
    found = trainer_of_blocks().estimate_memory(rows(), BATCH, 8, sharded=False, **window, **quick)
    assert found.parts["communication"] == NUM_BYTES
    alone = trainer_of_blocks().estimate_memory(rows(), BATCH, **window, **quick)
    assert found.peak == alone.peak + NUM_BYTES


@CAN_SHARD
def test_sharded_memory_shrinks_with_more_processes():
    """The model may be larger than any memory: it has 3 * 2⁴⁰ parameters here."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.ReLU()) for _ in range(3)])
    trainer = Trainer(model, squared, partial(torch.optim.SGD, lr=1, momentum=0.9), callbacks=[])
    data = TensorDataset(*(torch.zeros(2, 1).expand(2, 2**20) for _ in range(2)))
    layer = 4 * 2**40
    found = trainer.estimate_memory(data, 1, 64, sharded=True, **quick)
    assert found.parts["parameters"] == found.parts["optimizer"] == 3 * layer // 64
    assert layer <= found.parts["communication"] <= 3 * layer  # what is whole, and what is exchanged
    assert model[0][0].weight.is_meta


def test_averages_of_weights_are_counted():
    alone, averaged = trainer_of_blocks(), trainer_of_blocks()
    averaged.callback_handler.add_callback(ModelEmaCallback(evaluate_during_training=False))
    peaks = [trainer.estimate_memory(rows(), BATCH, **quick).peak for trainer in (alone, averaged)]
    assert peaks[1] - peaks[0] == NUM_BYTES


@pytest.mark.parametrize(("memory", "fits"), [("300KiB", True), ("100KiB", False)])
def test_the_estimate_says_whether_memory_suffices(memory, fits):
    found = trainer_of_blocks().estimate_memory(rows(), BATCH, device_memory=memory, **quick)
    assert found.fits is fits
    assert f"1 process, batches of {BATCH}" in found.summary()
    assert ("- This fits in 300 KiB" in repr(found)) == fits
    assert ("Smaller batches, more processes" in repr(found)) != fits
    shown = found._repr_html_()
    for text in (found.summary(), *(name for name, _ in found.rows()), *found.notes()):
        assert html.escape(text).replace("&#x27;", "&#39;") in shown


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    numbers: np.ndarray


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OfOwnBatches(Trainer):
    """Steps on a dataclass, on an object and the targets, or on pairs."""

    def calculate_train_batch_loss(self, batch):
        x, y = (batch.x, batch.y) if isinstance(batch, Pair) else (getattr(batch[0], "x", batch[0]), batch[1])
        return {"loss": self.loss_func(self.model(x), y)}


def test_batches_may_be_dataclasses_and_other_objects():
    trainer = make_trainer(model=float64_model(), trainer_class=OfOwnBatches)

    def stacked(samples):
        return [torch.stack(column) for column in zip(*samples, strict=True)]

    def peak(collate):
        return trainer.estimate_memory(float64_data(16), collate_fn=collate, **quick).peak

    usual = peak(stacked)
    assert peak(lambda samples: Pair(*stacked(samples), np.arange(len(samples)))) == usual
    in_object = peak(lambda samples: (Holder(stacked(samples)[0]), stacked(samples)[1]))
    inputs = float64_data(8).tensors[0]
    assert in_object == usual - inputs.nbytes  # which are not seen in it


@pytest.mark.extension("compiled_step")
def test_a_compiled_step_does_not_change_the_estimate():
    peaks = []
    for compile_step in (False, {"backend": "eager"}):
        trainer = trainer_of_blocks(model=nn.Sequential(Blocks(), nn.BatchNorm1d(64)), compile_step=compile_step)
        before = copy.deepcopy(trainer.model.state_dict())
        peaks.append(trainer.estimate_memory(rows(), BATCH, **quick).peak)
        assert equal_weights(trainer.model.state_dict(), before)
    assert peaks[0] == peaks[1]


def test_memory_is_estimated_as_on_a_gpu():
    """On a GPU, attention with dropout keeps no attention weights."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.project(x).reshape(len(x), -1, 1, 48).transpose(1, 2).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).mean((1, 2))

    data = TensorDataset(torch.randn(4, 512, 16), torch.zeros(4, dtype=torch.long))
    model = Attention()
    trainer = adamw_trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()))
    peaks = [trainer.estimate_memory(data, 4, device_type=kind).peak for kind in ("cpu", "cuda")]
    assert peaks[0] > 4 * 512 * 512 * 4 > 2 * peaks[1]


def test_a_state_that_an_optimizer_has_from_the_start_is_counted():
    model = Blocks()
    for optimizer in (torch.optim.Adagrad(model.parameters()), torch.optim.Adagrad):
        trainer = Trainer(model, squared, optimizer, callbacks=[])
        found = trainer.estimate_memory(rows(), BATCH, **quick)
        assert found.parts["optimizer"] == pytest.approx(NUM_BYTES, rel=0.01)
        assert found.parts["parameters"] == NUM_BYTES


def test_estimating_memory_changes_nothing():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = adamw_trainer(model, optimizer=optimizer)
    trainer.train(float64_data(16), 1)
    model[0].weight.grad = torch.ones(4, 5).double()
    model[1].eval()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), trainer.progress, trainer.run_config))
    run, generator, hook = trainer.current_run, torch.get_rng_state(), sys.excepthook
    trainer.estimate_memory(float64_data(40), 4, **quick)
    assert equal_weights(model.state_dict(), before[0])
    for index, state in before[1]["state"].items():
        assert equal_weights(optimizer.state_dict()["state"][index], state)
    assert optimizer.state_dict()["param_groups"] == before[1]["param_groups"]
    assert (trainer.progress, trainer.run_config) == before[2:]
    assert trainer.current_run is run
    assert (model[0].weight.grad == 1).all()
    assert model[0].training
    assert not model[1].training
    assert torch.equal(torch.get_rng_state(), generator)
    assert sys.excepthook is hook
    assert not torch.distributed.is_initialized()
    trainer.train(float64_data(16), 1)


class OwnStep(Trainer):
    """Updates two optimizers, each with a loss of its own."""

    def train_step(self, batch):
        x, y = batch
        self.update((self.model(x) - y).square().mean(), optimizer="0")
        self.update(self.critic(x).mean(), optimizer="1")
        return {}


@pytest.mark.extension("manual_optimization")
def test_overridden_steps_are_estimated():
    model, critic = float64_model(), float64_model()
    optimizers = [torch.optim.AdamW(part.parameters()) for part in (model, critic)]
    trainer = OwnStep(model, None, optimizers, callbacks=[])
    trainer.critic = critic
    found = trainer.estimate_memory(float64_data(), 4, **quick)
    size = sum(8 * parameter.numel() for part in (model, critic) for parameter in part.parameters())
    assert found.parts["parameters"] == size
    assert found.parts["optimizer"] >= 2 * size


@pytest.mark.extension("manual_optimization")
def test_steps_replaced_on_an_object_are_estimated():
    def trainer_of(trainer_class: type[Trainer]) -> Trainer:
        model = float64_model()
        return trainer_class(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), callbacks=[])

    def train_step(self: Trainer, batch: Any) -> None:
        self.update(nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    trainer = trainer_of(Trainer)
    trainer.train_step = MethodType(train_step, trainer)
    overriding = trainer_of(type("Own", (Trainer,), {"train_step": train_step}))
    found, expected = (one.estimate_memory(float64_data(), 4, **quick) for one in (trainer, overriding))
    assert found.parts == expected.parts
    trainer.train(float64_data(), 1)  # the estimate leaves the trainer with its own method
    assert trainer.progress.update > 0


def test_a_step_that_reads_values_cannot_be_estimated():
    class Reads(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            self.latest = output["loss"].item()
            return output

    with pytest.raises(NotImplementedError, match=r"_local_scalar_dense\S* needs values") as raised:
        Reads(float64_model(), nn.MSELoss(), torch.optim.SGD(float64_model().parameters())).estimate_memory(
            float64_data(), **quick
        )
    lines = traceback.extract_tb(raised.value.__cause__.__traceback__)
    assert any(line.line == 'self.latest = output["loss"].item()' for line in lines)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"world_size": 0}, ValueError, "world_size=0 must be at least 1"),
        ({"sharded": True}, ValueError, "sharded=True needs several processes"),
        ({"device_memory": "80 gigs"}, ValueError, "device_memory='80 gigs' must be .*such as '80GB'"),
        ({"device_type": "gpu"}, ValueError, "device_type='gpu' must be the kind of a device, such as 'cuda' or 'cpu'"),
        ({"device_memory": 0}, ValueError, "device_memory=0 must be at least 1"),
        ({"device_memory": -8e9}, ValueError, r"device_memory=-8000000000\.0 must be greater than 0"),
        ({"device_memory": [80]}, TypeError, r"device_memory=\[80\] must be an integer"),
        ({"num_steps": 3}, TypeError, "estimate_memory\\(\\) has no argument 'num_steps'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_estimates_refuse_bad_sizes_and_unknown_arguments(arguments, error, said):
    with pytest.raises(error, match=said):
        trainer_of_blocks().estimate_memory(rows(), **arguments)


@pytest.mark.extension("logical")
def test_the_memory_of_logical_processes_is_not_estimated():
    with pytest.raises(ValueError, match=r"estimate_memory\(\) does not work with logical_processes=2"):
        trainer_of_blocks(logical_processes=2, seed=0).estimate_memory(rows())


@pytest.mark.extension("streams")
def test_the_memory_of_a_stream_without_samples_is_not_estimated():
    with pytest.raises(ValueError, match="train_dataset gave no batch"):
        trainer_of_blocks().estimate_memory(Stream(0))


def test_settings_whose_memory_cannot_be_estimated_are_refused():
    with pytest.raises(ValueError, match=r"sharded=False, but Sharding\.parallelize_model"):
        trainer_of_blocks(Sharding).estimate_memory(rows(), world_size=2, sharded=False)
    with pytest.raises(ValueError, match="fewer than 10000 samples, all of which drop_last=True leaves out"):
        trainer_of_blocks().estimate_memory(rows(), 10_000, train_dataloader_kwargs={"drop_last": True})
