"""Logical processes of sharded models: the bits of one process that has all weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchmetrics import MeanAbsoluteError, MetricCollection

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests.launching import CAN_SHARD, SOAK, run_forked
from tests.ranks import rank, world_size
from tests.sharded import gathered, mesh_of, shard, sharding_accelerator
from tests.small_models import adamw_trainer, equal_weights, float64_data

pytestmark = [CAN_SHARD, pytest.mark.processes, pytest.mark.extension("model_ema", "monitoring")]


def create_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)]
    return nn.Sequential(*layers)


DATA, OTHERS = float64_data(53, dtype=torch.float32), float64_data(19, dtype=torch.float32)


def train(how: str, folder: Path | None = None, resume_from: Path | None = None, **kwargs: Any) -> dict[str, Any]:
    """The result of a run of four logical processes with averaged weights and steps of 12 and 5 samples.

    Args:
        how: how its model is sharded, if at all
    """
    from pytorch_accel_lite.callbacks import GradientNormCallback, MetricsCallback, ModelEmaCallback

    model = shard(create_model(), how)
    average = ModelEmaCallback(0.9, save_path=None)
    callbacks: list[Any] = [average, MetricsCallback(MetricCollection({"mae": MeanAbsoluteError()}))]
    callbacks.append(GradientNormCallback())
    if folder is not None:
        callbacks += [SaveTrainingStateCallback(folder / f"{how}-states", save_every_n_steps=3)]
        callbacks += [SaveBestModelCallback(folder / f"{how}.pt")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"seed": 3, "logical_processes": 4, "accelerator": Accelerator(cpu=True)}
    trainer = adamw_trainer(model, optimizer=optimizer, callbacks=callbacks, **options)
    arguments = {"gradient_clip_norm": 0.3, "gradient_accumulation_steps": 2} | kwargs
    trainer.train(DATA, 3, OTHERS, per_device_batch_size=3, resume_from=resume_from, **arguments)
    return result_of(trainer) | {"average": gathered(average.ema_model.state_dict())}


def result_of(trainer: Trainer) -> dict[str, Any]:
    predicted = trainer.predict(OTHERS, per_device_batch_size=3)
    weights = gathered(trainer.get_model().state_dict())
    return {"weights": weights, "history": trainer.run_history.to_dict(), "predicted": predicted}


@cache
def whole() -> dict[str, Any]:
    """The result of one process with an unsharded model."""
    return train("none")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("weights", "average"):
        assert equal_weights(found[part], expected[part])
    assert torch.equal(found["predicted"], expected["predicted"])
    assert found["history"] == expected["history"]


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "processes"), [("fsdp", 3), *[("hsdp", 4), ("fsdp", 2), ("fsdp", 4), ("layers", 3)] * SOAK]
)
def test_sharded_models_have_the_bits_of_unsharded_ones(job, how, processes):
    for found in job(processes).run(train, how):
        assert_same(found, whole())


def alone() -> None:
    """Sharded over a single process, for which torch reduces no gradients."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    assert_same(train("fsdp"), whole())


def test_a_model_sharded_over_one_process_has_the_same_bits():
    done = run_forked(alone)
    assert done.returncode == 0, done.stdout


def resume(how: str, states: Path) -> list[dict[str, Any]]:
    folder = states.parent / f"resumed-{states.name}-{world_size()}"
    found = [train(how, folder, resume_from=state) for state in sorted(states.glob("update-*"))[: None if SOAK else 1]]
    assert found
    return found


@pytest.mark.thorough
@pytest.mark.soak
def test_states_resume_on_any_layout_to_the_same_bits(tmp_path, job):
    for found in job(2).run(train, "fsdp", tmp_path):
        assert_same(found, whole())
    for how, processes in (("fsdp", 3), *[("none", 2)] * SOAK):
        for found in job(processes).run(resume, how, tmp_path / "fsdp-states"):
            for resumed in found:
                assert_same(resumed, whole())
    if not SOAK:
        return
    train("none", tmp_path)
    for [resumed, *_] in job(3).run(resume, "fsdp", tmp_path / "none-states"):
        assert_same(resumed, whole())
    best = [torch.load(tmp_path / f"{how}.pt", weights_only=True)["model_state_dict"] for how in ("fsdp", "none")]
    assert equal_weights(*best)


def in_lower_precision() -> dict[str, Any]:
    model = create_model()
    model[4] = nn.LayerNorm(6)  # batch norm on a CPU takes no weights of another precision than its statistics
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh_of(world_size()), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"seed": 3, "logical_processes": 4, "accelerator": Accelerator(cpu=True)}
    trainer = adamw_trainer(model, lambda out, y: (out.float() - y).square().mean(), optimizer, **options)
    trainer.train(DATA, 2, per_device_batch_size=3, gradient_clip_norm=0.3)
    return result_of(trainer)


@pytest.mark.thorough
def test_mixed_precision_of_fsdp_has_one_result(job):
    two, three = (job(processes).run(in_lower_precision)[0] for processes in (2, 3))
    assert equal_weights(two["weights"], three["weights"])
    assert two["history"] == three["history"]


def by_accelerate() -> dict[str, Any]:
    from pytorch_accel_lite.callbacks import GradientNormCallback, MetricsCallback, ModelEmaCallback

    accelerator = sharding_accelerator(auto_wrap_policy="size_based_wrap", min_num_params=20)
    model = create_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    average = ModelEmaCallback(0.9, save_path=None)
    metrics = MetricsCallback(MetricCollection({"mae": MeanAbsoluteError()}))
    callbacks = [average, metrics, GradientNormCallback()]
    trainer = adamw_trainer(
        model, optimizer=optimizer, callbacks=callbacks, seed=3, logical_processes=4, accelerator=accelerator
    )
    options = {"gradient_clip_norm": 0.3, "gradient_accumulation_steps": 2}
    trainer.train(DATA, 3, OTHERS, per_device_batch_size=3, **options)
    return result_of(trainer) | {"average": gathered(average.ema_model.state_dict())}


@pytest.mark.thorough
def test_models_sharded_by_accelerate_have_the_same_bits(job):
    for found in job(2).run(by_accelerate):
        assert_same(found, whole())


def with_and_without() -> tuple[Any, Any]:
    """Runs without logical processes, of a model that had some before, and of one that had not."""
    found = []
    for had_some in (True, False):
        model = shard(create_model(), "fsdp")
        accelerator = Accelerator(cpu=True)
        if had_some:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            first = adamw_trainer(model, optimizer=optimizer, accelerator=accelerator, seed=3, logical_processes=4)
            first.train(DATA, max_num_train_steps=1, per_device_batch_size=3)
            model[4].reset_running_stats()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        second = adamw_trainer(model, optimizer=optimizer, accelerator=accelerator, seed=3)
        second.train(DATA, 2, per_device_batch_size=3)
        found.append(gathered(second.get_model().state_dict()))
    return found[0], found[1]


@pytest.mark.thorough
def test_after_a_run_torch_reduces_gradients_again(job):
    for after, fresh in job(2).run(with_and_without):
        assert equal_weights(after, fresh)


class Skips(nn.Module):
    """Has a layer that some batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(5, 5), nn.Linear(5, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(x if self.calls == 2 else self.first(x))


def error_of_skipping() -> str:
    model = Skips()
    for layer in (model.first, model):
        fully_shard(layer, mesh=mesh_of(world_size()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = adamw_trainer(
        model, optimizer=optimizer, accelerator=Accelerator(cpu=True), seed=3, logical_processes=2 * world_size()
    )
    with pytest.raises(RuntimeError, match="had gradients in 1 of 2") as caught:
        trainer.train(DATA, 1, per_device_batch_size=3)
    assert rank() in range(world_size())
    return str(caught.value)


def test_a_sharded_layer_skipped_in_some_passes_is_an_error(job):
    for message in job(2).run(error_of_skipping):
        assert "call it in every forward pass, or do not shard it by itself" in message


def error_of_whole_shards() -> str:
    model = shard(create_model(), "hsdp")  # two copies of one shard
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = adamw_trainer(model, optimizer=optimizer, accelerator=Accelerator(cpu=True), seed=3, logical_processes=2)
    with pytest.raises(ValueError, match="each shard is whole") as caught:
        trainer.train(DATA, 1, per_device_batch_size=3)
    return str(caught.value)


def test_a_mesh_that_shards_nothing_is_an_error(job):
    for message in job(2).run(error_of_whole_shards):
        assert "sharded over a mesh of shape (2, 1)" in message
