"""Sharded models: which process reads which data, gradients, and refused combinations."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import read_checkpoint
from tests.launching import CAN_SHARD, SOAK, only_with_soak
from tests.ranks import rank as own_rank
from tests.ranks import world_size
from tests.sharded import (
    DATA,
    Parallel,
    create_model,
    fit,
    gathered,
    mesh_of,
    result_of,
    shard,
    sharded_trainer,
    sharding_accelerator,
    train_and_resume,
)
from tests.small_models import Rows, Stream, equal_weights, float64_data, largest_difference, listener


class Noisy(Rows):
    """Samples with random noise from torch's generator."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = self.data[index]
        return x + torch.randn_like(x), y


class Divided(Trainer):
    """Each process reads a list of its own."""

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return [(x + own_rank(), y) for x, y in zip(*(t.split(3) for t in DATA.tensors), strict=True)]


class Breaking(Trainer):
    """Reads a list of its own, which breaks off on one process."""

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return self.read()

    def read(self) -> Iterator[Any]:
        for number, batch in enumerate(zip(*(t.split(2) for t in DATA.tensors), strict=True)):
            if number == 5 and own_rank() == 1:
                raise OSError("the disk is gone")
            yield batch


pytestmark = [pytest.mark.processes, CAN_SHARD]


def trained(how: str) -> dict[str, Any]:
    """Train, and return all counts, sums and gathered values."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    seen: list[list[int]] = []
    norms: list[float] = []
    counting = listener(
        on_train_step_end=lambda trainer, **_: seen.append(trainer.batch_indices),
        on_optimizer_step_start=lambda trainer, **_: norms.append(float(trainer.gradient_norm)),
    )
    callbacks: list[Any] = [counting, MetricsCallback(MeanSquaredError())]
    trainer = fit(sharded_trainer(how, callbacks), how)
    found = result_of(trainer) | {"seen": seen, "norms": norms}
    found["config"] = trainer.run_config.train_total_batch_size, trainer.run_config.num_update_steps_per_epoch
    found["predictions"] = trainer.predict(float64_data(7), 2)
    found["gathered"] = trainer.gather(torch.tensor([trainer.data_ranks.rank]))
    found["stays"] = trainer.tensor_to_numeric(torch.tensor(1.0), "sum")
    return found


@functools.cache
def alone():
    """The result of one process with the same updates."""
    return trained("whole")


def check_same_as_alone(found, tolerance=1e-12):
    expected = alone()
    assert largest_difference(found["weights"], expected["weights"]) < tolerance
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        # torchmetrics computes in single precision
        exact = 1e-6 if name.endswith("Error") else tolerance
        assert found["history"][name] == pytest.approx(values, abs=exact), name
    assert found["norms"] == pytest.approx(expected["norms"], abs=tolerance)
    assert found["config"] == expected["config"]
    torch.testing.assert_close(found["predictions"], expected["predictions"], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("how", "processes"), [("fsdp", 2), ("layers", 2), pytest.param("hsdp", 4, marks=pytest.mark.thorough)]
)
def test_sharded_models_train_like_one_process(job, how, processes):
    for found in job(processes).run(trained, how):
        check_same_as_alone(found)


def clipped_by_value(how: str) -> dict[str, Any]:
    """Return the weights after gradients were clipped by value alone, and the norms of the gradients."""
    norms: list[float] = []
    noting = listener(on_optimizer_step_start=lambda trainer, **_: norms.append(float(trainer.gradient_norm)))
    trainer = fit(sharded_trainer(how, [noting]), how, gradient_clip_norm=None, gradient_clip_value=0.05)
    return {"weights": gathered(trainer.get_model().state_dict()), "norms": norms}


def test_gradients_in_shards_are_clipped_by_value(two_ranks):
    expected = clipped_by_value("whole")
    for found in two_ranks.run(clipped_by_value, "fsdp"):
        assert largest_difference(found["weights"], expected["weights"]) < 1e-12
        assert found["norms"] == pytest.approx(expected["norms"], abs=1e-12)


class Scaled(nn.Module):
    """A loss with a weight of its own, whose gradients are far larger than those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.double))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).mean() + 1e4 * (self.weight**2).sum()


def clipped_with_loss(how: str, limits: dict[str, Any], logical: bool, trains_model: bool) -> dict[str, Any]:
    """Return the weights, also that of the loss, after two updates, and the norms of the gradients."""
    norms: list[float] = []
    noting = listener(on_optimizer_step_start=lambda trainer, **_: norms.append(float(trainer.gradient_norm)))
    model, loss = shard(create_model(), how).requires_grad_(trains_model), Scaled()
    optimizer = torch.optim.SGD([*loss.parameters(), *model.parameters()], lr=1.0)
    kwargs: dict[str, Any] = {"logical_processes": 2} if logical else {}
    trainer = Trainer(model, loss, optimizer, [noting], seed=3, accelerator=Accelerator(cpu=True), **kwargs)
    size = 4 if logical else 8 // world_size()
    trainer.train(DATA, per_device_batch_size=size, max_num_train_steps=2, **limits)
    weights = gathered(trainer.get_model().state_dict()) | {"loss": loss.weight.detach()}
    return {"weights": weights, "norms": norms}


@pytest.mark.sampled
@pytest.mark.parametrize("limits", [{"gradient_clip_norm": 1.0}, {"gradient_clip_value": 0.05}], ids=str)
@pytest.mark.parametrize(
    ("how", "logical", "trains_model"),
    [("fsdp", False, True), ("layers", False, True), ("fsdp", False, False), ("fsdp", True, True)],
)
def test_weights_outside_of_a_sharded_model_are_clipped(two_ranks, how, logical, trains_model, limits):
    expected = clipped_with_loss("whole", limits, logical, trains_model)
    assert expected["norms"][0] > 1e4 or "gradient_clip_value" in limits
    for found in two_ranks.run(clipped_with_loss, how, limits, logical, trains_model):
        assert largest_difference(found["weights"], expected["weights"]) < 1e-10
        assert not logical or equal_weights(found["weights"], expected["weights"])
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-12)


def source_that_fails(how: str) -> tuple[str, int]:
    """The error, and the number of updates, of a run in which one process cannot read its data."""
    trainer = sharded_trainer(how, [], 0.0, Breaking)
    try:
        trainer.train(DATA, 1, per_device_batch_size=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}", trainer.progress.update
    return "no error", trainer.progress.update


@pytest.mark.extension("streams")
def test_a_source_that_fails_on_one_process_ends_the_run_on_all(two_ranks):
    first, failed = two_ranks.run(source_that_fails, "tp")
    assert failed == ("OSError: the disk is gone", 4)
    assert first == ("OSError: Rank 1 failed: OSError: the disk is gone", 4)


def in_single_precision(how: str) -> dict[str, list[float]]:
    """The recorded losses; of replicas, where nothing is sharded."""
    model = shard(create_model().float(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [], seed=3, accelerator=Accelerator(cpu=True))
    fit(trainer, how, float64_data(26, dtype=torch.float32))
    return trainer.run_history.to_dict()


@pytest.mark.thorough
def test_single_precision_losses_equal_those_of_replicas(two_ranks):
    replicas = two_ranks.run(in_single_precision, "whole")[0]
    for found in two_ranks.run(in_single_precision, "fsdp"):
        for name, values in replicas.items():
            assert found[name] == pytest.approx(values, abs=1e-6)


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


@pytest.mark.thorough
def test_accelerate_may_shard_in_two_dimensions(tmp_path, job):
    """Its states are saved in shards and resumed, too."""
    for whole, resumed in job(4).run(by_accelerate, tmp_path):
        assert whole["dimensions"] == 2
        assert largest_difference(whole["weights"], alone()["weights"]) < 1e-12
        assert equal_weights(resumed["weights"], whole["weights"])
        assert resumed["history"] == whole["history"]


@only_with_soak
@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), ("hsdp", 4), ("tp_fsdp", 4)])
def test_runs_of_sharded_models_resume_to_the_same_bits(tmp_path, job, how, processes):
    for uninterrupted, *resumed in job(processes).run(train_and_resume, how, tmp_path):
        assert len(resumed) == 2
        for again in resumed:
            assert equal_weights(again["weights"], uninterrupted["weights"])
            assert again["history"] == uninterrupted["history"]


def reductions(how: str) -> dict[str, int]:
    """How often gradients are reduced in an update of 4 batches."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # seen only by the mode that counts
    trainer = sharded_trainer(how)
    with CommDebugMode() as counting:
        trainer.train(float64_data(4 * world_size()), 1, per_device_batch_size=1, gradient_accumulation_steps=4)
    counts = {str(name): count for name, count in counting.get_comm_counts().items()}
    return {kind: sum(n for name, n in counts.items() if kind in name) for kind in ("reduce_scatter", "allreduce")}


@pytest.mark.soak
def test_gradients_are_reduced_once_in_an_update(job):
    assert job(2).run(reductions, "fsdp")[0]["reduce_scatter"] == 3  # one for each module with parameters
    if not SOAK:
        return
    found = job(4).run(reductions, "hsdp")[0]
    assert found["reduce_scatter"] == 3 * 4  # keeps only the shards of the gradients
    assert found["allreduce"] == job(4).run(reductions, "fsdp")[0]["allreduce"] + 3


def averaged(how: str, folder: Path) -> dict[str, Any]:
    """The average of weights, and what is recorded of it; of a run that is resumed, too."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    found = []
    for resume_from in (None, folder / how / "update-000000004"):
        saving = SaveTrainingStateCallback(folder / (how if resume_from is None else "again"), save_every_n_steps=4)
        average = ModelEmaCallback(0.8, save_path=folder / f"{how}.pt")
        trainer = sharded_trainer(how, [average, saving])
        fit(trainer, how, resume_from=resume_from)
        found.append(result_of(trainer) | {"average": read_checkpoint(folder / f"{how}.pt")["model_state_dict"]})
        trainer.barrier()
    return found


@pytest.mark.thorough
@pytest.mark.extension("model_ema")
@pytest.mark.soak
@pytest.mark.parametrize(("how", "processes"), [("fsdp", 2), *[("tp_fsdp", 4)] * SOAK])
def test_weights_are_averaged_and_evaluated_in_shards(tmp_path, job, how, processes):
    expected = averaged("whole", tmp_path)[0]
    for whole, resumed in job(processes).run(averaged, how, tmp_path):
        assert largest_difference(whole["average"], expected["average"]) < 1e-12
        assert largest_difference(whole["weights"], expected["weights"]) < 1e-12
        assert whole["history"]["ema_model_eval_loss_epoch"] == pytest.approx(
            expected["history"]["ema_model_eval_loss_epoch"], abs=1e-12
        )
        assert equal_weights(resumed["average"], whole["average"])
        assert resumed["history"] == whole["history"]


def averaged_statistics() -> dict[str, Any]:
    """The average of a sharded model with batch norm, the states that it is made of, and its evaluations."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    fresh = copy.deepcopy(model)
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=mesh_of(world_size()))
    states: list[dict[str, torch.Tensor]] = []

    def keep(trainer: Trainer, **_: Any) -> None:
        states.append({name: value.clone() for name, value in gathered(trainer.get_model().state_dict()).items()})

    average = ModelEmaCallback(0.5, save_path=None)
    keeping = listener(on_training_run_start=keep, on_optimizer_step_end=keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [keeping, average], accelerator=Accelerator(cpu=True), seed=3)
    held_out = float64_data(9)
    trainer.train(DATA, 2, held_out, 8 // world_size(), gradient_clip_norm=0.3)
    assert average.ema is not None
    mean = gathered(average.ema.module.state_dict())
    fresh.load_state_dict(mean)
    loss = nn.functional.mse_loss(fresh.eval()(held_out.tensors[0]), held_out.tensors[1]).item()
    return result_of(trainer) | {"average": mean, "states": states, "loss_of_average": loss}


@pytest.mark.thorough
@pytest.mark.extension("model_ema")
def test_statistics_of_a_sharded_model_are_averaged_as_weights(two_ranks):
    first, second = two_ranks(averaged_statistics)
    assert equal_weights(first["average"], second["average"])
    start, *later = first["states"]
    assert len(later) == 8
    for name, average in first["average"].items():
        expected = start[name]
        for state in later:
            expected = 0.5 * expected + 0.5 * state[name] if average.is_floating_point() else state[name]
        torch.testing.assert_close(average, expected, atol=1e-12, rtol=0)
        assert not torch.equal(average, start[name]), name
    for found in (first, second):
        assert equal_weights(found["weights"], first["states"][-1])  # evaluating the average leaves the model as it was
        history = found["history"]["ema_model_eval_loss_epoch"]
        assert history[-1] == pytest.approx(first["loss_of_average"], abs=1e-12)


def placed(source: Path | None, training: bool = True) -> dict[str, Any]:
    """The weights of a model from the meta device, before and after training."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    trainer = Parallel(model, nn.MSELoss(), partial(torch.optim.AdamW, lr=0.02), [], seed=3)
    trainer.source = source
    trainer.evaluate(DATA, 4)
    before = {name: value.clone() for name, value in gathered(trainer.get_model().state_dict()).items()}
    if training:
        trainer.train(DATA, 1, per_device_batch_size=8 // world_size())
    return {"before": before, "after": gathered(trainer.get_model().state_dict())}


@pytest.mark.thorough
def test_a_meta_device_model_starts_like_an_unsharded_one(tmp_path, two_ranks):
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    for found in two_ranks.run(placed, None):
        assert equal_weights(found["before"], nn.Sequential(*layers).state_dict())
        assert not equal_weights(found["before"], found["after"])
    alone = placed(None)
    assert equal_weights(alone["before"], found["before"])
    save_file(alone["after"], tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        for found in two_ranks.run(placed, source):
            assert equal_weights(found["before"], alone["after"])


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


@pytest.mark.parametrize(("how", "message"), [
    ("optimizer", "replaces the parameters that the optimizer holds. Pass a function that creates"),
    ("values", "nothing gives values to 1.scale. Give the modules that hold them a reset_parameters() method"),
    ("source", "'nowhere', which parallelize_model returned, has no weights as safetensors"),
])  # fmt: skip
def test_a_model_that_cannot_be_placed_is_refused(job, how, message):
    for said in job(2).run(placed_wrongly, how):
        assert message in said


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


@pytest.mark.thorough
def test_a_sharded_transformers_model_trains(tmp_path, two_ranks):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DistributedConfig"):
        pytest.skip("this version of transformers has no DistributedConfig")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    expected = of_transformers(tmp_path)
    for found in two_ranks.run(of_transformers, tmp_path):
        assert found["sharded"]
        assert largest_difference(found["weights"], expected["weights"]) < 1e-5
        for name, values in expected["history"].items():
            assert found["history"][name] == pytest.approx(values, abs=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "processes"), [("tp", 2), pytest.param("tp_fsdp", 4, marks=pytest.mark.thorough), *[("tp_ddp", 4)] * SOAK]
)
def test_processes_of_tensor_parallelism_share_their_batches(job, how, processes):
    by_rank = job(processes).run(trained, how)
    for rank, found in enumerate(by_rank):
        check_same_as_alone(found)
        assert found["seen"] == by_rank[rank // 2 * 2]["seen"]
        assert found["gathered"].tolist() == list(range(processes // 2))
        assert found["stays"] == processes // 2
    steps = zip(*(found["seen"] for found in by_rank[::2]), strict=True)
    samples = sorted(index for step in steps for share in step for index in share)
    assert samples == sorted([*range(26)] * 2)


def random_data_alike(how: str) -> list[tuple[Any, Any]]:
    """The inputs of each step and what dropout leaves, with data that are random, without a seed."""
    found = []
    for trainer_class, data in ((Trainer, Noisy(DATA)), (Trainer, Stream(11)), (Divided, DATA)):
        if isinstance(data, Stream):
            data.data = DATA
        batches: list[torch.Tensor] = []
        dropped: list[torch.Tensor] = []
        torch.manual_seed(100 + own_rank())
        trainer = sharded_trainer(how, [], 0.5, trainer_class, seed=None)

        def keep(trainer: Trainer, batch: Any, batches: Any = batches, **_: Any) -> None:
            batches.append(batch[0])

        def look(module: Any, args: Any, output: torch.Tensor, dropped: Any = dropped) -> None:
            dropped.append(output.ne(0))

        trainer.callback_handler.add_callback(listener(on_train_step_end=keep))
        trainer.model[2].register_forward_hook(look)
        fit(trainer, how, data, 1)
        found.append((batches, dropped[: len(batches)]))
    return found


@pytest.mark.thorough
@pytest.mark.extension("streams")
@pytest.mark.soak
@pytest.mark.parametrize(("how", "processes"), [("tp", 2), *[("tp_fsdp", 4)] * SOAK])
def test_tensor_parallel_processes_share_random_numbers(job, how, processes):
    by_rank = job(processes).run(random_data_alike, how)
    for first, second in zip(by_rank[::2], by_rank[1::2], strict=True):
        for (batches, dropped), (others, dropped_there) in zip(first, second, strict=True):
            assert batches
            assert all(map(torch.equal, batches, others))
            assert not torch.equal(batches[0], batches[1])
            # Dropout acts on the outputs of a process's own columns, so the masks are as alike as the generators.
            assert all(map(torch.equal, dropped, dropped_there))
    if processes == 4:
        assert not torch.equal(by_rank[0][0][0][0], by_rank[2][0][0][0])


def error_of(how: str) -> str:
    """What is said of a model that is sharded in a way that does not work."""
    model = create_model()
    accelerator = None
    if how == "part":
        mesh = mesh_of(2, 2, names=("a", "b"))["b"]
        fully_shard(model, mesh=mesh)
    elif how == "meta":
        model = model.to("meta")
        fully_shard(model, mesh=mesh_of(world_size()))
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


@pytest.mark.parametrize(("how", "processes", "message"), [
    ("part", 4, "sharded over 2 of 4 processes, and nothing connects these to the others. Use a mesh of all"),
    ("meta", 2, "has parameters on the meta device, which have no values. Shard it in an overridden"),
    ("accelerate_meta", 2, "cannot tell the parameters of an optimizer apart (accelerate issue 3930)"),
    ("tp_config", 2, "has tp_size=2, but 1 process(es) share the weights of Sequential by tensor parallelism"),
])  # fmt: skip
def test_unsupported_sharded_trainings_are_refused(job, how, processes, message):
    for said in job(processes).run(error_of, how):
        assert message in said
