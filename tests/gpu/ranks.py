"""What the ranks of a job do: torchrun -m tests.gpu.ranks FILE CASE...

Each case is a function below. What it returns on this rank, or its traceback, is written to FILE.RANK. One rank talks
NCCL; two on one GPU talk gloo, as NCCL refuses to share a GPU. In rehearsal all is on the CPU, by gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint.models.weights import full_state_dict
from tests.gpu.parts import IN_ORDER, ON_GPU, LanguageModel, Task, forget_accelerators, sgd, sized

BATCHES = sized(8, 3)
#: Samples that are evaluated, which are not even for two processes.
EVALUATED = sized(37, 7)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def accelerator() -> Accelerator:
    """An accelerator of all processes of this job."""
    forget_accelerators()
    if not ON_GPU:
        return Accelerator(cpu=True)
    if world_size() == 1:
        return Accelerator()
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


def on_host(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in state.items()}


def result_of(trainer: Trainer) -> dict[str, Any]:
    whole = full_state_dict(trainer.get_model().state_dict(), keep=True)
    backend = dist.get_backend() if dist.is_initialized() else "none"
    return {"weights": on_host(whole), "history": trainer.run_history.to_dict(), "backend": str(backend)}


def trained(kind: type[Trainer] = Trainer, task: Task | None = None, **kwargs: Any) -> dict[str, Any]:
    """The result of training, on any number of processes, with the same batches of all of them."""
    task = Task("transformer") if task is None else task
    by_us = kind is not Trainer
    model = task.model()
    optimizer: Any = sgd if by_us else sgd(model)
    if by_us:  # what it optimizes is replaced

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    trainer = kind(model, task.loss, optimizer, kwargs.pop("callbacks", []), accelerator=accelerator(), **kwargs)
    trainer.train(
        task.data(BATCHES),
        1,
        per_device_batch_size=task.batch_size // trainer.data_ranks.world_size,
        train_dataloader_kwargs=IN_ORDER,
        resume_from=getattr(kind, "resume_from", None),
    )
    return result_of(trainer)


class Sharded(Trainer):
    """Shards its model by FSDP2."""

    resume_from: Path | None = None

    def parallelize_model(self, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        model: Any = self.model
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


class TensorParallel(Trainer):
    """Divides the matrices of its model over the processes."""

    def parallelize_model(self, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model: Any = self.model
        assert isinstance(model, LanguageModel)
        for block in model.blocks:
            parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


# --------------------------------------------------------------------------------------------- one process


def case_plain() -> Any:
    return trained()


def case_fsdp2() -> Any:
    return trained(Sharded)


def case_tensor_parallel() -> Any:
    return trained(TensorParallel)


def case_evaluation_of_a_sharded_model() -> Any:
    task = Task("transformer")
    trainer = Sharded(task.model(), task.loss, None, [], accelerator=accelerator())
    trainer.evaluate(task.data(2), task.batch_size)
    return trainer.run_history.get_latest_metric("evaluation_loss")


# -------------------------------------------------------------------------------------------- two processes


def case_ddp() -> Any:
    return trained()


def case_uneven_evaluation() -> Any:
    task = Task("transformer")
    data = task.data(10)
    some = TensorDataset(*(tensor[:EVALUATED] for tensor in data.tensors))
    trainer = Trainer(task.model(), task.loss, None, [], accelerator=accelerator())
    trainer.evaluate(some, 4)
    predicted = trainer.predict(some, 4)
    return trainer.run_history.get_latest_metric("evaluation_loss"), predicted.float()


def case_exchanged_objects() -> Any:
    """The devices of tensors that processes exchange, and whether their values have arrived."""
    trainer = Trainer(torch.nn.Linear(2, 2), None, None, accelerator=accelerator())
    rows = torch.arange(6.0, device=trainer.device).reshape(3, 2)
    sent = {
        "view": rows[:, 1],
        "trained": rows.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(rows),
        "sparse": rows.to_sparse(),
    }
    everyone = torch.distributed.new_group()
    received = [*trainer.all_gather_object(sent), *trainer.all_gather_object(sent, everyone)]
    received += [trainer.broadcast_object(sent), trainer.broadcast_object(sent, 1)]
    received.append(trainer.broadcast_object(sent, 1, everyone))
    tensors = [(tensor, sent[name]) for values in received for name, tensor in values.items()]
    return {
        "devices": [tensor.device.type for tensor, _ in tensors],
        "equal": all(torch.equal(tensor.to_dense(), own.to_dense().cpu()) for tensor, own in tensors),
        "trained": all(values["trained"].requires_grad for values in received),
    }


def case_logical_processes() -> Any:
    """Images, whose batch norm shows that logical processes have batches of their own."""
    task = Task("resnet")
    model = nn.Sequential(task.model(), nn.Dropout(0.1))
    trainer = Trainer(
        model, task.loss, sgd(model), [], accelerator=accelerator(), logical_processes=2, seed=3, deterministic=True
    )
    trainer.train(task.data(BATCHES), 1, per_device_batch_size=task.batch_size // 2)
    return result_of(trainer)


def case_sharded_states() -> Any:
    """The result of a run, and of one that was resumed in its middle from a state in shards."""
    made = [tempfile.mkdtemp() if int(os.environ["RANK"]) == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(str(made[0]))
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=2, sharded=True, max_checkpoints=None)
    whole = trained(Sharded, callbacks=[saving], seed=1)
    dist.barrier()
    state = min((folder / "states").glob("update-*"))
    again = SaveTrainingStateCallback(folder / "again", save_at_end=False)
    resumed = trained(type("Resumed", (Sharded,), {"resume_from": state}), callbacks=[again], seed=1)
    return whole, resumed


def main(file: str, names: list[str]) -> None:
    if not ON_GPU:
        torch.set_num_threads(1)
    accelerator()  # begins the process group
    found: dict[str, tuple[Any, str | None]] = {}
    for name in names:
        try:
            found[name] = globals()[f"case_{name}"](), None
        except Exception:
            found[name] = None, traceback.format_exc()
        torch.save(found, f"{file}.{os.environ.get('RANK', '0')}")  # after each, in case that the next one hangs
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
