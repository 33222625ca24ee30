"""DeepSpeed and FSDP1 through Accelerate: like DistributedDataParallel, or refused with an explanation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.extending import SHARDING
from tests.sharded import sharding_accelerator
from tests.small_models import float64_data, largest_difference, make_trainer
from tests.small_models import train as train_small

NEEDS_DEEPSPEED = pytest.mark.usefixtures("deepspeed")


@pytest.fixture
def deepspeed() -> None:
    """Skip the test where DeepSpeed is not installed."""
    pytest.importorskip("deepspeed")


@contextmanager
def on_cpus() -> Iterator[None]:
    """Let DeepSpeed run on a CPU, without the operation that it would compile for minutes."""
    environment = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    with patch.dict(os.environ, environment):
        from deepspeed import ops

        with patch.dict(ops.__compatible_ops__, {name: False for name in ops.__compatible_ops__ if "shm" in name}):
            yield


def accelerator_of(engine: str) -> Accelerator:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which a plugin sets
    if engine == "ddp":
        return Accelerator(cpu=True)
    if engine == "fsdp1":
        PartialState(cpu=True)._shared_state["device"] = torch.device("cpu")  # rather than "cpu:0"
        return sharding_accelerator(version=1)
    plugin = DeepSpeedPlugin(zero_stage=int(engine[-1]), zero3_init_flag=False)
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


def train(
    engine: str, callbacks: Any = (), size: int = 37, trainer_class: type[Trainer] = Trainer, **kwargs: Any
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    options = {"accelerator": accelerator_of(engine), "callbacks": list(callbacks), "seed": 1}
    trainer = trainer_class(model, nn.MSELoss(), lambda parameters: torch.optim.AdamW(parameters, lr=0.01), **options)
    data = float64_data(size, dtype=torch.float32)
    trainer.train(data, 2, data, per_device_batch_size=4, **kwargs)
    return trainer


def results(engine: str, folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The losses, the predictions, and the weights that are saved."""
    trainer = train(engine, **kwargs)
    losses = [value for values in trainer.run_history.to_dict().values() for value in values]
    predicted = trainer.predict(TensorDataset(torch.ones(3, 5)))
    if folder.name == "unsaved":
        return {"losses": torch.tensor(losses), "predicted": predicted}
    trainer.save_model(folder / f"{engine}.safetensors")
    saved = safetensors.torch.load_file(folder / f"{engine}.safetensors")
    return saved | {"losses": torch.tensor(losses), "predicted": predicted}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_norm": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2, "size": 48, "create_scheduler_fn": "cosine"},
}


def compared(engine: str, folder: Path) -> dict[str, float]:
    """The largest difference of an engine from ``DistributedDataParallel``, for each way of training."""
    return {
        name: largest_difference(results("ddp", folder, **way), results(engine, folder, **way))
        for name, way in WAYS.items()
    }


def compared_on_cpus(engine: str, folder: Path) -> dict[str, float]:
    with on_cpus():
        return compared(engine, folder)


@pytest.mark.extension("named_schedules")
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.processes
def test_deepspeed_trains_like_ddp(tmp_path, two_ranks, stage):
    for differences in two_ranks.run(compared_on_cpus, f"zero{stage}", tmp_path):
        assert max(differences.values()) < 1e-5, differences


def refusals(folder: Path) -> dict[str, str]:
    cases: dict[str, dict[str, Any]] = {
        "value": {"gradient_clip_value": 0.1},
        "windows": {"gradient_accumulation_steps": 2},
        "growing": {"gradient_accumulation_steps": {0: 1, 1: 2}},
        "states": {"callbacks": [SaveTrainingStateCallback(folder / "states")]},
        "best": {"callbacks": [SaveBestModelCallback(folder / "best.pt")]},
    }
    said: dict[str, str] = {}
    with on_cpus():
        for name, case in cases.items():
            with pytest.raises(ValueError) as raised:  # noqa: PT011
                train("zero1", **case)
            said[name] = str(raised.value)
        trainer = train("zero1")
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            trainer.load_checkpoint("any.pt")
        said["load"] = str(raised.value)
    return said


@NEEDS_DEEPSPEED
@pytest.mark.processes
def test_features_unsupported_by_deepspeed_are_refused(two_ranks, tmp_path):
    for said in two_ranks.run(refusals, tmp_path):
        assert said["value"].startswith("gradient_clip_value=0.1 cannot be applied: DeepSpeed updates the weights with")
        assert (
            "needs epochs of whole windows (a multiple of 2 times 8 samples), not one of 37 samples" in said["windows"]
        )
        assert "cannot change" in said["growing"]
        assert said["states"].startswith("Training states are not supported with DEEPSPEED")
        assert "Pass save_optimizer=False and load_saved_checkpoint=False." in said["best"]
        assert said["load"].startswith("load_checkpoint() does not work with DeepSpeed")


class CountsItems(Trainer):
    """Weights batches by other numbers than those of their samples, which DeepSpeed cannot correct."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return super().calculate_train_batch_loss(batch) | {"num_items_in_batch": 3}


def error_of_items() -> str:
    """The error of a run whose batches have other weights."""
    with on_cpus(), pytest.raises(RuntimeError) as raised:
        train("zero1", trainer_class=CountsItems)
    return str(raised.value)


@NEEDS_DEEPSPEED
@pytest.mark.processes
def test_deepspeed_updates_with_wrong_weights_are_refused(two_ranks):
    for said in two_ranks(error_of_items):
        assert said.startswith("This update was made with wrong weights of its batches")


def test_deepspeed_has_a_step_that_checks_the_weights(no_accelerator):
    accelerator = Accelerator(cpu=True)
    trainer = make_trainer(accelerator=accelerator, trainer_class=CountsItems)
    run = train_small(trainer).current_run
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    sharding = SHARDING.content
    assert sharding is not None
    step: Any = sharding.choose_step(trainer, run)(trainer, run)
    run.window.items_per_batch = 3.0
    with pytest.raises(RuntimeError, match="This update was made with wrong weights of its batches"):
        step.apply_update(trainer, run)


@pytest.mark.thorough
@pytest.mark.extension("named_schedules")
@pytest.mark.processes
def test_fsdp1_trains_like_ddp(tmp_path, two_ranks):
    for differences in two_ranks.run(compared, "fsdp1", tmp_path / "unsaved"):
        assert max(differences.values()) < 1e-5, differences


def refusals_of_fsdp1(folder: Path) -> list[str]:
    said = []
    trainer = train("fsdp1", sanity_check=False)
    best = SaveBestModelCallback(folder / "best.pt")
    for act in (
        lambda: trainer.save_model(folder / "model"),
        lambda: train("fsdp1", [best]),
        lambda: trainer.load_checkpoint("a"),
    ):
        with pytest.raises(ValueError, match=r"does not work with FSDP1, .* Use fsdp_version=2\.") as raised:
            act()
        said.append(str(raised.value).partition(" ")[0])
    return said


@pytest.mark.processes
def test_features_unsupported_by_fsdp1_are_refused(two_ranks, tmp_path):
    for said in two_ranks.run(refusals_of_fsdp1, tmp_path):
        assert said == ["save_model()", "SaveBestModelCallback", "load_checkpoint()"]
