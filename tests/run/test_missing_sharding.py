"""Models with sharded weights without the extension that trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.run.run import SHARDING
from tests.small_models import make_data, make_model, make_trainer, train


class Parallel(Trainer):
    def parallelize_model(self, mesh: Any) -> None:
        raise AssertionError("it is refused before")


@pytest.fixture(autouse=True)
def _without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SHARDING, "content", None)


def check_refused(trainer: Trainer) -> None:
    said = "A run of a sharded model belongs to the extension 'sharding', which is not installed"
    with pytest.raises(ValueError, match=said):
        train(trainer)
    with pytest.raises(ValueError, match=said):
        trainer.evaluate(make_data(4))
    assert trainer.progress.step == 0
    assert not trainer.is_running


def test_sharding_in_parallelize_model_is_refused():
    check_refused(make_trainer(trainer_class=Parallel))


@pytest.mark.parametrize("engine", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_an_accelerator_that_shards_is_refused(engine, no_accelerator):
    accelerator = Accelerator(cpu=True)
    trainer = make_trainer(accelerator=accelerator)
    accelerator.state.distributed_type = engine
    check_refused(trainer)


def test_a_model_with_sharded_parameters_is_refused(no_accelerator):
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    accelerator, model = Accelerator(cpu=True), make_model()
    mesh = init_device_mesh("cpu", (1,))
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(distribute_tensor(parameter.detach(), mesh)))
    check_refused(make_trainer(model=model, accelerator=accelerator))


def test_tensor_parallelism_of_the_accelerator_is_refused(no_accelerator):
    config = pytest.importorskip("accelerate.parallelism_config", reason="ParallelismConfig needs accelerate 1.10")
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = config.ParallelismConfig(tp_size=2)
    check_refused(make_trainer(accelerator=accelerator))
