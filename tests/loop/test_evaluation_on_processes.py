"""Evaluation on several processes: each sample counts once, and is gathered once, in order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pytorch_accel_lite import Trainer, TrainerCallback
from tests.launching import some_of
from tests.ranks import IN_ORDER, OrderedStream, world_size
from tests.shared_trainings import evaluate_inside
from tests.small_models import equal_weights, float64_data, float64_model, on_one_process


def classification_data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


class AccuracyTrainer(Trainer):
    """Metrics in the loop, as users of pytorch-accelerated write them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accuracy = MulticlassAccuracy(num_classes=3, average="macro", sync_on_compute=True)

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        self.accuracy.update(output["model_outputs"], batch[1])
        return output

    def eval_epoch_end(self):
        self.run_history.update_metric("accuracy", self.accuracy.compute().item())
        self.accuracy.reset()


def classifier_with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model(torch.randn(50, 5, dtype=torch.float64))  # running statistics that are not the initial ones
    return model


class GathersEveryBatch(TrainerCallback):
    """As users of pytorch-accelerated do: every rank has as many evaluation batches if there are enough samples."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_eval_step_end(self, trainer, batch, **kwargs):
        self.seen.append(trainer.gather(batch[0]))


class GathersInEvents(TrainerCallback):
    """Gathers as with Accelerate, for a ``TrainerThatGathers``, which notes what it gathers."""

    def on_train_step_end(self, trainer, batch, **kwargs):
        trainer.note("train", trainer.accelerator.gather_for_metrics(batch[1]))

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        trainer.counts.append(batch_output["batch_size"])
        gathered = trainer.accelerator.gather_for_metrics({"y": batch[1], "mean": batch[1].mean()})
        trainer.note("callback", gathered["y"])
        trainer.note("means", gathered["mean"])
        names = [f"{y:.3f}" for y in batch[1].flatten().tolist()]
        trainer.note("names", trainer.accelerator.gather_for_metrics(names))

    def on_eval_epoch_end(self, trainer, **kwargs):
        own = torch.cat(trainer.own)
        trainer.note("at the end", trainer.accelerator.gather_for_metrics(own).sort(dim=0).values)


class TrainerThatGathers(Trainer):
    """Gathers as with Accelerate: in the steps of the trainer and of a callback, and at the end of an evaluation."""

    def __init__(self) -> None:
        super().__init__(float64_model(), nn.MSELoss(), None, callbacks=[GathersInEvents])
        self.seen: dict[str, list[Any]] = {}
        self.counts: list[int] = []
        self.own: list[torch.Tensor] = []

    def note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, []).append(value)

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        outputs, targets = self.accelerator.gather_for_metrics((output["model_outputs"], batch[1]))
        self.note("step", targets)
        assert len(outputs) == len(targets)
        assert not outputs.requires_grad
        if self.current_run.batch.num_samples:
            self.own.append(batch[1])
        return output

    def found(self) -> dict[str, Any]:
        """Return what was gathered, and how many samples this process was told that it has."""
        names = [name for names in self.seen.pop("names", []) for name in names]
        return {name: torch.cat(parts) for name, parts in self.seen.items()} | {
            "names": names,
            "count": sum(self.counts),
        }


def results_by_size() -> Any:
    """Metrics and predictions for dataset sizes from 1 to 20."""
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")  # by torchmetrics, on ranks without samples
    results = {}
    model = classifier_with_batch_norm()
    trainer = AccuracyTrainer(model, nn.CrossEntropyLoss(), None, callbacks=[])
    for size in some_of(range(1, 21)):
        data = classification_data(size)
        metrics = trainer.evaluate(data, per_device_batch_size=3)
        predictions = trainer.predict(data, per_device_batch_size=3)
        results[size] = metrics, predictions
    return results


def test_evaluation_counts_every_sample_once_for_any_size(ranks):
    for result in ranks(results_by_size):
        assert result.keys() == on_one_process(results_by_size).keys() == set(some_of(range(1, 21)))
        for size, (metrics, predictions) in result.items():
            expected_metrics, expected = on_one_process(results_by_size)[size]
            assert metrics == pytest.approx(expected_metrics, abs=1e-10)
            assert predictions.shape == expected.shape == (size, 3)
            assert torch.allclose(predictions, expected, atol=1e-12, rtol=0)
            assert torch.equal(predictions, ranks(results_by_size)[0][size][1])  # the same on every process


def inputs_gathered_by_size() -> Any:
    results = {}
    for size in some_of(range(world_size(), 25)):
        gathers = GathersEveryBatch()
        trainer = Trainer(float64_model(), nn.MSELoss(), None, callbacks=[gathers])
        trainer.evaluate(float64_data(size), per_device_batch_size=3)
        results[size] = torch.cat(gathers.seen)
    return results


def test_gathering_evaluation_batches_gives_the_data_in_order(ranks):
    for result in ranks(inputs_gathered_by_size):
        assert result.keys() == set(some_of(range(ranks.world_size, 25)))
        for size, inputs in result.items():
            assert torch.equal(inputs, float64_data(size).tensors[0])


def gathered_for_metrics() -> Any:
    """The result of Accelerate's method for 37 samples by batch size, of map data and of a stream."""
    results = {}
    for batch_size in (1, 3, 5):
        for kind in ("map", "stream"):
            data = float64_data(37)
            trainer = TrainerThatGathers()
            given = data if kind == "map" else OrderedStream(data)
            metrics = trainer.evaluate(given, batch_size, None if kind == "map" else {"num_workers": 0})
            results[kind, batch_size] = trainer.found() | metrics
    return results


@pytest.mark.thorough
@pytest.mark.extension("streams")
def test_gather_for_metrics_gives_every_evaluated_sample_once(ranks):
    x, y = float64_data(37).tensors
    loss = nn.functional.mse_loss(float64_model()(x), y).item()
    results = ranks(gathered_for_metrics)
    for result in results:
        assert len(result) == 6
        for found in result.values():
            assert torch.equal(found["step"], y)
            assert torch.equal(found["callback"], y)
            assert torch.equal(found["at the end"], y.sort(dim=0).values)
            assert found["names"] == [f"{value:.3f}" for value in y.flatten().tolist()]
            assert found["evaluation_loss"] == pytest.approx(loss, abs=1e-10)
    for case in results[0]:
        assert sum(result[case]["count"] for result in results) == 37


def training_targets_are_gathered_in_order() -> Any:
    """Whether Accelerate's method gives the data in training, when the last step has fewer samples than ranks."""
    data = float64_data(4 * world_size() + 1)
    trainer = TrainerThatGathers()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
    return torch.equal(torch.cat(trainer.seen["train"]), data.tensors[1])


def test_gather_for_metrics_gathers_batches_of_training(ranks):
    assert all(ranks(training_targets_are_gathered_in_order))


def test_evaluating_within_a_run_leaves_no_trace_in_it(ranks):
    for result in [*ranks(evaluate_inside), on_one_process(evaluate_inside)]:
        without, within = result[0], result[1]
        assert equal_weights(without[0], within[0])
        assert without[1] == within[1]
        assert result["metrics"].keys() == {"evaluation_loss"}
        assert result["training"]
