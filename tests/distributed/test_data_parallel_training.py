"""Data-parallel training gives the results of one process with the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import NamedDatasets
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, Recorder, global_batch, rank
from tests.shared_trainings import Contrastive, both_ways, schedule, to_own_target, tokens, uneven_batches
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    image_data,
    image_model,
    largest_difference,
    on_one_process,
    weights,
)


class TwoTasks(Trainer):
    def calculate_train_batch_loss(self, batch):
        losses = {name: self.loss_func(self.model(x), y) for name, (x, y) in batch.items()}
        return {"loss": losses, "batch_size": len(batch["a"][0])}


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.0 + rank(), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean() * torch.exp(-self.scale) + self.scale


class OfFirstRank(nn.Module):
    """A loss with a gradient for the third centre that only the first rank has; the others may have one for all.

    Args:
        sparse: whether the embedding gives sparse gradients
        others: whether the other ranks have a dense gradient for all centres

    Attributes:
        centres: the centres, four rows of one number
    """

    def __init__(self, sparse: bool, others: bool) -> None:
        super().__init__()
        self.centres = nn.Embedding(4, 1, sparse=sparse).double()
        self.others = others
        nn.init.ones_(self.centres.weight)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = (outputs - targets).square().mean()
        if rank() == 0:
            return loss + self.centres(torch.tensor([2])).sum()
        return loss + self.centres.weight.sum() if self.others else loss


class OwnRows(Trainer):
    """The same loss, computed by each process for its own samples."""

    def calculate_train_batch_loss(self, batch):
        x, y = batch
        z = self.model(x)
        all_z, all_y = self.gather((z, y), with_gradients=True)
        own = (all_y == y.T).double().argmax(0)
        return {"loss": (to_own_target(all_z, all_y, own) + to_own_target(all_y, all_z, own)) / 2, "batch_size": len(x)}


def distances(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is NaN if a sample occurs twice."""
    pairs = torch.triu_indices(len(z), len(z), 1)
    apart = (z[pairs[0]] - z[pairs[1]]).square().sum(1).sqrt()
    return (apart - (y[pairs[0]] - y[pairs[1]]).abs().sum(1)).square().mean()


class GathersConstants(Contrastive):
    def calculate_train_batch_loss(self, batch):
        z, y = self.gather((self.model(batch[0]), batch[1]))
        return {"loss": self.loss_func(z, y), "batch_size": len(batch[0])}


class GathersOutputs(TrainerCallback):
    """Gathers outputs that still have a graph, as for metrics."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_train_step_end(self, trainer, batch_output, **kwargs):
        self.lengths.append(len(trainer.gather(batch_output["model_outputs"])))


def test_training_equals_one_process_with_the_whole_batch(ranks):
    for result in ranks(uneven_batches):
        for key, run in result.items():
            one = on_one_process(uneven_batches)[key]
            assert run["updates"] == one["updates"]
            assert run["samples"] == one["samples"]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10
            for metric, values in one["history"].items():
                assert run["history"][metric] == pytest.approx(values, abs=1e-10)
            for ours, theirs in zip(run["gradients"], one["gradients"], strict=True):
                assert largest_difference(ours, theirs) < 1e-10


def test_losses_over_items_equal_one_process(ranks):
    for result in ranks(tokens):
        for accumulation, run in result.items():
            one = on_one_process(tokens)[accumulation]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10
            assert largest_difference(run["gradients"][0], one["gradients"][0]) < 1e-10
            assert run["history"]["train_loss_epoch"] == pytest.approx(one["history"]["train_loss_epoch"], abs=1e-10)


@pytest.mark.thorough
def test_the_number_of_processes_changes_no_update_or_rate(ranks):
    for result in ranks(schedule):
        assert result == on_one_process(schedule)


def losses_over_all_samples() -> Any:
    """Gradients, weights and losses; the global batch is 6 samples, and the last may have fewer than processes."""
    results = {}
    for name, trainer_class, loss_func in (
        ("all rows", Contrastive, both_ways),
        ("own rows", OwnRows, both_ways),
        ("distances", Contrastive, distances),
    ):
        for accumulation in (1, 2):
            for size in (13, 14, 16) if loss_func is both_ways else (14, 16):
                model, recorder = float64_model(), Recorder()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                trainer = trainer_class(model, loss_func, optimizer, callbacks=[recorder])
                trainer.train(
                    float64_data(size),
                    2,
                    per_device_batch_size=global_batch(6),
                    gradient_accumulation_steps=accumulation,
                    train_dataloader_kwargs=IN_ORDER,
                )
                results[name, accumulation, size] = {
                    "weights": weights(model),
                    "gradients": recorder.gradients,
                    "loss": trainer.run_history.to_dict()["train_loss_epoch"],
                }
    return results


@pytest.mark.thorough
@two_are_enough
def test_losses_over_all_samples_equal_those_of_one_process(ranks):
    for result in ranks(losses_over_all_samples):
        for key, run in result.items():
            one = on_one_process(losses_over_all_samples)[key]
            assert largest_difference(run["weights"], one["weights"]) < 1e-10, key
            assert run["loss"] == pytest.approx(one["loss"], abs=1e-10), key
            for ours, theirs in zip(run["gradients"], one["gradients"], strict=True):
                assert largest_difference(ours, theirs) < 1e-10, key


def losses_of_what_has_no_gradients() -> Any:
    """The errors for a loss of gathered constants, and for gathering in a guarded step; metrics are allowed."""
    said = []
    for trainer_class, auto_microbatch in ((GathersConstants, False), (Contrastive, True)):
        model = float64_model()
        trainer = trainer_class(model, both_ways, torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[])
        try:
            trainer.train(float64_data(12), 1, per_device_batch_size=2, auto_microbatch=auto_microbatch)
        except RuntimeError as error:
            said.append(str(error))
    gathers = GathersOutputs()
    adamw_trainer(float64_model(), callbacks=[gathers]).train(float64_data(12), 1, per_device_batch_size=2)
    return {"said": said, "lengths": gathers.lengths}


@pytest.mark.extension("failed_batches")
def test_a_loss_of_gathered_values_without_gradients_is_an_error(ranks):
    for result in ranks(losses_of_what_has_no_gradients):
        constant, guarded = result["said"]
        assert "the result of trainer.gather(), which has no gradients. Pass with_gradients=True" in constant
        assert "with_gradients=True) does not work on several processes with auto_microbatch=True" in guarded
        assert result["lengths"] == [2 * ranks.world_size] * (6 // ranks.world_size)  # as it is for metrics


def named() -> Any:
    """A dict of training datasets, one of which is shorter, and a dict of evaluation datasets."""
    model = float64_model()
    trainer = TwoTasks(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[], seed=1)
    trainer.train(
        NamedDatasets({"a": float64_data(13), "b": float64_data(22)}, length="max"),
        2,
        {"few": float64_data(2), "many": float64_data(25)},
        per_device_batch_size=global_batch(6),
        eval_dataloader_kwargs={"batch_size": 4},
    )
    parts = list(trainer.predict_iter(float64_data(25), per_device_batch_size=global_batch(6)))
    return {"weights": weights(model), "history": trainer.run_history.to_dict(), "parts": parts}


def test_datasets_by_name_equal_one_process(ranks):
    one = on_one_process(named)
    assert {"train_a_epoch", "few_eval_loss_epoch", "many_eval_loss_epoch"} <= one["history"].keys()
    for result in ranks(named):
        assert largest_difference(result["weights"], one["weights"]) < 1e-10
        for metric, values in one["history"].items():
            assert result["history"][metric] == pytest.approx(values, abs=1e-10)
        assert sum(len(part) for part in result["parts"]) == 25
        assert torch.allclose(torch.cat(result["parts"]), torch.cat(one["parts"]), atol=1e-10, rtol=0)


def channels_last() -> Any:
    found = {}
    for channels_last in (False, True):
        model = image_model().eval()  # batch norm without the statistics of each process's own batch
        trainer = type("Frozen", (Trainer,), {"train_epoch_start": lambda self: None})(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[],
            channels_last=channels_last,
        )
        trainer.train(image_data(), 2, per_device_batch_size=global_batch(6), train_dataloader_kwargs=IN_ORDER)
        found[channels_last] = weights(model)
    return found


@two_are_enough
def test_the_layout_in_memory_does_not_change_the_result(ranks):
    for result in ranks(channels_last):
        assert largest_difference(result[True], result[False]) < 1e-12
        assert largest_difference(result[True], on_one_process(channels_last)[True]) < 1e-12


def limits() -> Any:
    from pytorch_accel_lite.callbacks import LimitBatchesCallback

    model = float64_model()
    trainer = adamw_trainer(model, callbacks=[LimitBatchesCallback(2)])
    data = float64_data(30)
    trainer.train(data, 2, data, per_device_batch_size=global_batch(6), train_dataloader_kwargs=IN_ORDER)
    return {"weights": weights(model), "samples": trainer.progress.samples, "updates": trainer.progress.update}


@pytest.mark.extension("pytorch_accelerated")
def test_limits_count_steps_of_the_whole_job(ranks):
    for result in ranks(limits):
        assert result["samples"] == on_one_process(limits)["samples"] == 24
        assert result["updates"] == on_one_process(limits)["updates"] == 4
        assert largest_difference(result["weights"], on_one_process(limits)["weights"]) < 1e-10


def learned_loss() -> Any:
    model, loss_func = float64_model(), LearnedScale()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.05)
    trainer = adamw_trainer(model, loss_func, optimizer)
    trainer.train(
        float64_data(25),
        2,
        per_device_batch_size=global_batch(6),
        gradient_accumulation_steps=2,
        train_dataloader_kwargs=IN_ORDER,
    )
    return {"weights": weights(model), "scale": loss_func.scale.detach()}


@two_are_enough
def test_ranks_have_the_same_parameters_of_the_loss_function(ranks):
    for result in ranks(learned_loss):
        assert torch.equal(result["scale"], ranks(learned_loss)[0]["scale"])
        assert abs(result["scale"] - on_one_process(learned_loss)["scale"]) < 1e-10
        assert largest_difference(result["weights"], on_one_process(learned_loss)["weights"]) < 1e-10


def sparse_gradients() -> Any:
    """The results with a guarded step, which averages gradients itself, and without."""
    results = {}
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1)).double()
        data = TensorDataset(torch.arange(24).reshape(12, 2), torch.randn(12, 1, dtype=torch.float64))
        trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.train(data, 2, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER, auto_microbatch=guarded)
        results[guarded] = weights(model)
    return results


@pytest.mark.extension("failed_batches")
@two_are_enough
def test_sparse_gradients_are_averaged_with_and_without_a_guard(ranks):
    for result in ranks(sparse_gradients):
        assert largest_difference(result[True], result[False]) < 1e-12
        assert equal_weights(result[True], ranks(sparse_gradients)[0][True])


def gradients_of_one_rank() -> Any:
    results = {}
    for sparse, others in ((True, False), (False, False), (True, True)):
        model, loss_func = float64_model(), OfFirstRank(sparse, others)
        optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.1)
        adamw_trainer(model, loss_func, optimizer).train(float64_data(12), 1, per_device_batch_size=12)
        results[sparse, others] = loss_func.centres.weight.detach().flatten()
    return results


def test_a_gradient_that_only_one_rank_has_is_averaged(ranks):
    n = ranks.world_size
    for result in ranks(gradients_of_one_rank):
        for (_, others), centres in result.items():
            expected = torch.full((4,), 1 - 0.1 * (n - 1) / n if others else 1.0, dtype=torch.float64)
            expected[2] -= 0.1 / n
            assert torch.allclose(centres, expected)
        assert len(result) == 3


@pytest.mark.parametrize("kind", [kind for kind in DistributedType if kind.name.startswith("MULTI_")])
def test_replicas_on_any_kind_of_device_are_not_sharded(kind, no_accelerator):
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = kind
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not Trainer(model, nn.MSELoss(), optimizer, accelerator=accelerator).is_sharded
