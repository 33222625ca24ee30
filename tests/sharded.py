"""Models sharded by their users: ``fully_shard``, HSDP and tensor parallelism."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint.models.weights import full_state_dict
from tests.ranks import world_size
from tests.small_models import float64_data, listener


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def sharding_accelerator(version: int = 2, of_accelerator: Any = None, **kwargs: Any) -> Accelerator:
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **kwargs)
    return Accelerator(fsdp_plugin=plugin, **(of_accelerator or {}))


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


DATA = float64_data(26)


def create_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 1)]
    return nn.Sequential(*layers).double()


@cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh that all tests of a job share, as the threads of each group wake a hundred times a second.

    Its groups cannot be destroyed after a test, as torch caches values by mesh.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Module, how: str) -> nn.Module:
    """Shard a model in one of several common ways."""
    if how in ("tp", "tp_ddp", "tp_fsdp"):
        ways = 1 if how == "tp" else world_size() // 2
        mesh = mesh_of(ways, world_size() // ways, names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
        if how == "tp_fsdp":
            fully_shard(model, mesh=mesh["dp"])
    elif how == "layers":  # the rest is not sharded
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh_of(world_size()))
    elif how in ("fsdp", "hsdp"):
        shape = (world_size(),) if how == "fsdp" else (2, world_size() // 2)
        names = ("dp",) if how == "fsdp" else ("dp_replicate", "dp_shard")
        mesh = mesh_of(*shape, names=names)
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    return model


def num_readers(how: str) -> int:
    """The number of processes that read different data."""
    return {"tp": 1, "tp_ddp": world_size() // 2, "tp_fsdp": world_size() // 2}.get(how, world_size())


def sharded_trainer(
    how: str, callbacks: Any = (), dropout: float = 0.0, trainer_class: type[Trainer] = Trainer, **kwargs: Any
) -> Trainer:
    model = shard(create_model(dropout), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    kwargs = {"seed": 3, "accelerator": Accelerator(cpu=True)} | kwargs
    return trainer_class(model, nn.MSELoss(), optimizer, callbacks, **kwargs)


def fit(trainer: Trainer, how: str, data: Any = DATA, epochs: int = 2, update: int = 8, **kwargs: Any) -> Trainer:
    """Train with the same samples per update on any number of processes; the last update of an epoch has 2."""
    readers = num_readers(how)
    steps = 2 if update % (2 * readers) == 0 else 1
    kwargs = {"gradient_accumulation_steps": steps, "gradient_clip_norm": 0.3} | kwargs
    dtype = next(trainer.model.parameters()).dtype
    trainer.train(data, epochs, float64_data(9, dtype=dtype), update // steps // readers, **kwargs)
    return trainer


def result_of(trainer: Trainer) -> dict[str, Any]:
    return {"weights": gathered(trainer.get_model().state_dict()), "history": trainer.run_history.to_dict()}


def train_and_resume(how: str, folder: Path, **options: Any) -> list[Any]:
    """The result of a run, and of runs that resume each of its states, with dropout."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    saving = SaveTrainingStateCallback(folder / how, 1, 2, **options)
    average = ModelEmaCallback(0.8, save_path=None) if options else None
    found = [result_of(fit(sharded_trainer(how, [saving, *filter(None, [average])], 0.3), how))]
    dist.barrier()
    for state in sorted((folder / how).glob("update-*"))[:2]:  # in the middle of an epoch, and at its end
        found.append(resume(how, state, 0.3, bool(options), update=8))
    return found


def resume(how: str, state: Path, dropout: float = 0.0, averages: bool = True, update: int = 12) -> dict[str, Any]:
    """The result of a run that is resumed, and the states of its optimizer and its average as they were restored."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    restored: list[Any] = []
    average = ModelEmaCallback(0.8, save_path=None)

    def look(trainer: Trainer, **_: Any) -> None:
        optimizer = full_state_dict(trainer.optimizer.state_dict(), keep=True)
        of_average = full_state_dict(average.state_dict(), keep=True) if averages else None
        restored.append(copy.deepcopy((gathered(trainer.get_model().state_dict()), optimizer["state"], of_average)))

    saving = SaveTrainingStateCallback(state.parent / f"unused-{how}", save_at_end=False)
    looking = listener(on_train_step_start=lambda trainer, **_: None if restored else look(trainer))
    callbacks = [saving, *([average] if averages else []), looking]
    trainer = fit(sharded_trainer(how, callbacks, dropout), how, update=update, resume_from=state)
    return result_of(trainer) | {"restored": restored}


class Parallel(Trainer):
    """Shards its model itself, and takes the weights from ``source``."""

    source: Path | None = None

    def parallelize_model(self, mesh: Any) -> Path | None:
        for layer in (self.model[0], self.model[3], self.model):
            fully_shard(layer, mesh=mesh)
        return self.source
