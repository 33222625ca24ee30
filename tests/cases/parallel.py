"""Models that come sharded, by ``fully_shard``, in two dimensions (HSDP) or by tensor parallelism."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import (
    MetricsCallback,
    ModelEmaCallback,
    PredictionWriterCallback,
    SaveTrainingStateCallback,
    WorstSamplesCallback,
    read_predictions,
)
from pytorch_accel_lite.checkpoint import read_checkpoint
from pytorch_accel_lite.checkpoint.weights import full_state_dict
from tests.cases.common import rank, world_size
from tests.cases.sharded import sharding_accelerator, whole
from tests.tasks import Rows, Stream, listener, regression_data

DATA = regression_data(26)


class Noisy(Rows):
    """Samples with random noise from torch's generator."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = self.data[index]
        return x + torch.randn_like(x), y


def create_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 1)]
    return nn.Sequential(*layers).double()


def shard(model: nn.Module, how: str) -> nn.Module:
    """Shard a model in one of the ways that people use."""
    if how in ("tp", "tp_ddp", "tp_fsdp"):
        ways = 1 if how == "tp" else world_size() // 2
        mesh = init_device_mesh("cpu", (ways, world_size() // ways), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
        if how == "tp_fsdp":
            fully_shard(model, mesh=mesh["dp"])
    elif how == "layers":  # the rest is not sharded
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size(),)))
    elif how in ("fsdp", "hsdp"):
        shape = (world_size(),) if how == "fsdp" else (2, world_size() // 2)
        names = ("dp",) if how == "fsdp" else ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    return model


def num_readers(how: str) -> int:
    """The number of processes that read different data."""
    return {"tp": 1, "tp_ddp": world_size() // 2, "tp_fsdp": world_size() // 2}.get(how, world_size())


def make_trainer(
    how: str, callbacks: Any = (), dropout: float = 0.0, trainer_class: type[Trainer] = Trainer, **kwargs: Any
) -> Trainer:
    model = shard(create_model(dropout), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    kwargs = {"seed": 3, "accelerator": Accelerator(cpu=True)} | kwargs
    return trainer_class(model, nn.MSELoss(), optimizer, callbacks, **kwargs)


def fit(trainer: Trainer, how: str, data: Any = DATA, epochs: int = 2, update: int = 8, **kwargs: Any) -> Trainer:
    """Train with updates of as many samples on any number of processes; the last one of an epoch has 2."""
    readers = num_readers(how)
    steps = 2 if update % (2 * readers) == 0 else 1
    kwargs = {"gradient_accumulation_steps": steps, "gradient_clip_norm": 0.3} | kwargs
    dtype = next(trainer.model.parameters()).dtype
    trainer.train(data, epochs, regression_data(9, dtype=dtype), update // steps // readers, **kwargs)
    return trainer


def result_of(trainer: Trainer) -> dict[str, Any]:
    return {"weights": whole(trainer.get_model().state_dict()), "history": trainer.run_history.to_dict()}


def trained(how: str, folder: Path | None = None) -> dict[str, Any]:
    """Everything that a run counts, sums and gathers."""
    seen: list[list[int]] = []
    norms: list[float] = []
    worst = WorstSamplesCallback(3)
    counting = listener(
        on_train_step_end=lambda trainer, **_: seen.append(trainer.batch_indices),
        on_optimizer_step_start=lambda trainer, **_: norms.append(float(trainer.gradient_norm)),
    )
    callbacks: list[Any] = [counting, worst, MetricsCallback(MeanSquaredError())]
    trainer = fit(make_trainer(how, callbacks), how)
    found = result_of(trainer) | {"seen": seen, "norms": norms, "worst": [(s.index, s.loss) for s in worst.samples]}
    found["config"] = trainer.run_config.train_total_batch_size, trainer.run_config.num_update_steps_per_epoch
    found["predictions"] = trainer.predict(regression_data(7), 2)
    found["gathered"] = trainer.gather(torch.tensor([trainer.data_ranks.rank]))
    found["stays"] = trainer.tensor_to_numeric(torch.tensor(1.0), "sum")
    if folder is not None:
        writer = PredictionWriterCallback(folder / how)
        trainer.callback_handler.add_callback(writer)
        trainer.predict(regression_data(7), 2)
        found["written"] = read_predictions(writer.directory), len(list(writer.directory.glob("shard-*")))
    return found


class Divided(Trainer):
    """Each process reads a list of its own."""

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return [(x + rank(), y) for x, y in zip(*(t.split(3) for t in DATA.tensors), strict=True)]


def random_data_alike(how: str) -> list[tuple[Any, Any]]:
    """The inputs of each step and what dropout leaves, with data that are random, without a seed."""
    found = []
    for trainer_class, data in ((Trainer, Noisy(DATA)), (Trainer, Stream(11)), (Divided, DATA)):
        if isinstance(data, Stream):
            data.data = DATA
        batches: list[torch.Tensor] = []
        dropped: list[torch.Tensor] = []
        torch.manual_seed(100 + rank())
        trainer = make_trainer(how, [], 0.5, trainer_class, seed=None)

        def keep(trainer: Trainer, batch: Any, batches: Any = batches, **_: Any) -> None:
            batches.append(batch[0])

        def look(module: Any, args: Any, output: torch.Tensor, dropped: Any = dropped) -> None:
            dropped.append(output.ne(0))

        trainer.callback_handler.add_callback(listener(on_train_step_end=keep))
        trainer.model[2].register_forward_hook(look)
        fit(trainer, how, data, 1)
        found.append((batches, dropped[: len(batches)]))
    return found


class Breaking(Trainer):
    """Reads a list of its own, which breaks off on one process."""

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return self.read()

    def read(self) -> Iterator[Any]:
        for number, batch in enumerate(zip(*(t.split(2) for t in DATA.tensors), strict=True)):
            if number == 5 and rank() == 1:
                raise OSError("the disk is gone")
            yield batch


def source_that_fails(how: str) -> tuple[str, int]:
    """What ends a run in which one process cannot read its data, and after how many updates."""
    trainer = make_trainer(how, [], 0.0, Breaking)
    try:
        trainer.train(DATA, 1, per_device_batch_size=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}", trainer.progress.update
    return "no error", trainer.progress.update


def resumed(how: str, folder: Path, **options: Any) -> list[Any]:
    """The result of a run, and of runs that resume each of its states, with dropout."""
    saving = SaveTrainingStateCallback(folder / how, 1, 2, **options)
    average = ModelEmaCallback(0.8, save_path=None) if options else None
    found = [result_of(fit(make_trainer(how, [saving, *filter(None, [average])], 0.3), how))]
    dist.barrier()
    for state in sorted((folder / how).glob("update-*"))[:2]:  # in the middle of an epoch, and at its end
        found.append(resume(how, state, 0.3, bool(options), update=8))
    return found


def resume(how: str, state: Path, dropout: float = 0.0, averages: bool = True, update: int = 12) -> dict[str, Any]:
    """The result of a run that is resumed, and the states of its optimizer and its average as they were restored."""
    restored: list[Any] = []
    average = ModelEmaCallback(0.8, save_path=None)

    def look(trainer: Trainer, **_: Any) -> None:
        optimizer = full_state_dict(trainer.optimizer.state_dict(), keep=True)
        of_average = full_state_dict(average.state_dict(), keep=True) if averages else None
        restored.append(copy.deepcopy((whole(trainer.get_model().state_dict()), optimizer["state"], of_average)))

    saving = SaveTrainingStateCallback(state.parent / f"unused-{how}", save_at_end=False)
    looking = listener(on_train_step_start=lambda trainer, **_: None if restored else look(trainer))
    callbacks = [saving, *([average] if averages else []), looking]
    trainer = fit(make_trainer(how, callbacks, dropout), how, update=update, resume_from=state)
    return result_of(trainer) | {"restored": restored}


def clipped_by_value(how: str) -> dict[str, Any]:
    """Return the weights after gradients were clipped by value alone, and the norms of the gradients."""
    norms: list[float] = []
    noting = listener(on_optimizer_step_start=lambda trainer, **_: norms.append(float(trainer.gradient_norm)))
    trainer = fit(make_trainer(how, [noting]), how, gradient_clip_norm=None, gradient_clip_value=0.05)
    return {"weights": whole(trainer.get_model().state_dict()), "norms": norms}


def saved(how: str, folder: Path, **options: Any) -> dict[str, Any]:
    """The result of a run that saves its states."""
    callbacks = [SaveTrainingStateCallback(folder / how, 1, 2, **options), ModelEmaCallback(0.8, save_path=None)]
    return result_of(fit(make_trainer(how, callbacks), how, update=12))


def exported(how: str, folder: Path) -> dict[str, Any]:
    """The weights that are saved in a directory, and those of another sharded model that loads them."""
    trainer = make_trainer(how)
    trainer.save_model(folder / how)
    model = create_model()
    nn.init.zeros_(model[0].weight)
    model = shard(model, how)
    other = Trainer(model, nn.MSELoss(), None, [], accelerator=Accelerator(cpu=True))
    other.load_checkpoint(folder / how)
    return {"saved": whole(trainer.model.state_dict()), "loaded": whole(other.model.state_dict())}


def exported_of_transformers(folder: Path) -> dict[str, Any]:
    import transformers

    config = transformers.DistributedConfig(fsdp_size=world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    trainer = Trainer(model, None, None, [], accelerator=Accelerator(cpu=True))
    trainer.save_model(folder / "again")
    trainer.load_checkpoint(folder / "again")
    return whole(trainer.model.state_dict())


def error_of(how: str) -> str:
    """What is said of a model that is sharded in a way that does not work."""
    model = create_model()
    accelerator = None
    if how == "part":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        fully_shard(model, mesh=mesh)
    elif how == "meta":
        model = model.to("meta")
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    elif how == "accelerate_meta":
        model = model.to("meta")
        accelerator = sharding_accelerator()
    elif how == "tp_config":
        from accelerate.parallelism_config import ParallelismConfig  # not in all versions

        accelerator = Accelerator(cpu=True)
        accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    accelerator = accelerator or Accelerator(cpu=True)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), [], accelerator=accelerator)
    try:
        trainer.train(DATA, 1)
    except ValueError as error:
        return str(error)
    return ""


def averaged(how: str, folder: Path) -> dict[str, Any]:
    """The average of weights, and what is recorded of it; of a run that is resumed, too."""
    found = []
    for resume_from in (None, folder / how / "update-000000004"):
        saving = SaveTrainingStateCallback(folder / (how if resume_from is None else "again"), save_every_n_steps=4)
        average = ModelEmaCallback(0.8, save_path=folder / f"{how}.pt")
        trainer = make_trainer(how, [average, saving])
        fit(trainer, how, resume_from=resume_from)
        found.append(result_of(trainer) | {"average": read_checkpoint(folder / f"{how}.pt")["model_state_dict"]})
        trainer.barrier()
    return found


def averaged_statistics() -> dict[str, Any]:
    """The average of a sharded model with batch norm, the states that it is made of, and its evaluations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    fresh = copy.deepcopy(model)
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world_size(),)))
    states: list[dict[str, torch.Tensor]] = []

    def keep(trainer: Trainer, **_: Any) -> None:
        states.append({name: value.clone() for name, value in whole(trainer.get_model().state_dict()).items()})

    average = ModelEmaCallback(0.5, save_path=None)
    keeping = listener(on_training_run_start=keep, on_optimizer_step_end=keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [keeping, average], accelerator=Accelerator(cpu=True), seed=3)
    held_out = regression_data(9)
    trainer.train(DATA, 2, held_out, 8 // world_size(), gradient_clip_norm=0.3)
    assert average.ema is not None
    mean = whole(average.ema.module.state_dict())
    fresh.load_state_dict(mean)
    loss = nn.functional.mse_loss(fresh.eval()(held_out.tensors[0]), held_out.tensors[1]).item()
    return result_of(trainer) | {"average": mean, "states": states, "loss_of_average": loss}


def reductions(how: str) -> dict[str, int]:
    """How often gradients are reduced in an update of 4 batches."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # seen only by the mode that counts
    trainer = make_trainer(how)
    with CommDebugMode() as counting:
        trainer.train(regression_data(4 * world_size()), 1, per_device_batch_size=1, gradient_accumulation_steps=4)
    counts = {str(name): count for name, count in counting.get_comm_counts().items()}
    return {kind: sum(n for name, n in counts.items() if kind in name) for kind in ("reduce_scatter", "allreduce")}


class Parallel(Trainer):
    """Shards its model itself, and takes the weights from ``source``."""

    source: Path | None = None

    def parallelize_model(self, mesh: Any) -> Path | None:
        for layer in (self.model[0], self.model[3], self.model):
            fully_shard(layer, mesh=mesh)
        return self.source


def placed(source: Path | None, training: bool = True) -> dict[str, Any]:
    """The weights of a model from the meta device, before and after training."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    trainer = Parallel(model, nn.MSELoss(), partial(torch.optim.AdamW, lr=0.02), [], seed=3)
    trainer.source = source
    trainer.evaluate(DATA, 4)
    before = {name: value.clone() for name, value in whole(trainer.get_model().state_dict()).items()}
    if training:
        trainer.train(DATA, 1, per_device_batch_size=8 // world_size())
    return {"before": before, "after": whole(trainer.get_model().state_dict())}


def placed_wrongly(how: str) -> str:
    """What is said when a model cannot be sharded by its trainer, or gets no values."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 1)).double()
        if how == "values":
            model[1].scale = nn.Parameter(torch.ones(1))
    optimizer: Any = partial(torch.optim.SGD, lr=0.1)
    if how == "optimizer":
        optimizer = torch.optim.SGD(model.parameters())
    trainer = Parallel(model, nn.MSELoss(), optimizer, [], seed=3)
    if how == "source":
        trainer.source = Path("nowhere")
    try:
        trainer.train(DATA, 1)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def of_transformers(folder: Path) -> dict[str, Any]:
    """A language model that comes sharded: its losses and weights, and those of the same model on one process."""
    import transformers

    sharded = {}
    if world_size() > 1:
        sharded["distributed_config"] = transformers.DistributedConfig(fsdp_size=world_size())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, None, optimizer, [], accelerator=Accelerator(cpu=True), seed=1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (24, 6), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer.train(data, 2, data[:6], 4 // world_size(), gradient_accumulation_steps=2, gradient_clip_norm=1.0)
    return {"sharded": trainer.is_sharded} | result_of(trainer)


def resume_latest(folder: Path) -> None:
    saving = SaveTrainingStateCallback(folder, sharded=True)
    callbacks = [saving, ModelEmaCallback(0.8, save_path=None)]
    fit(make_trainer("fsdp", callbacks), "fsdp", update=12, resume_from="latest")


def resumed_by_itself(folder: Path | str, epochs: int = 2) -> dict[str, Any]:
    """The result of a run on one process that saves states in shards, and resumes the last if there is one."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
    saving = SaveTrainingStateCallback(folder, 1, 3, max_checkpoints=1, sharded=True, asynchronous=True)
    trainer = Parallel(model, nn.MSELoss(), partial(torch.optim.AdamW, lr=0.02), [saving], seed=3)
    trainer.train(DATA, epochs, per_device_batch_size=7, resume_from="latest")
    return result_of(trainer)


def in_single_precision(how: str) -> dict[str, list[float]]:
    """The recorded losses; of replicas, where nothing is sharded."""
    model = shard(create_model().float(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [], seed=3, accelerator=Accelerator(cpu=True))
    fit(trainer, how, regression_data(26, dtype=torch.float32))
    return trainer.run_history.to_dict()


def by_accelerate(folder: Path) -> list[dict[str, Any]]:
    """The result of a run with a model that Accelerate shards over a mesh, and of one that is resumed."""
    from accelerate.parallelism_config import ParallelismConfig  # not in all versions

    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")  # as Accelerate does
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = sharding_accelerator(of_accelerator={"parallelism_config": sizes})
    found = []
    for resume_from in (None, folder / "states" / "update-000000002"):
        model = create_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        saving = SaveTrainingStateCallback(folder / ("unused" if found else "states"), 1, 2, sharded=True)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], seed=3, accelerator=accelerator)
        fit(trainer, "accelerate", resume_from=resume_from)
        mesh = next(trainer.get_model().parameters()).device_mesh
        found.append(result_of(trainer) | {"dimensions": mesh.ndim})
    return found
