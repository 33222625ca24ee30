"""Evaluation and prediction: every sample once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import CatMetric, MaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.base.splitting import concatenate
from pytorch_accel_lite.callbacks import MetricsCallback, ModelEmaCallback, PredictionWriterCallback, read_predictions
from tests.cases.common import IN_ORDER, OrderedStream, global_batch, shared_folder, world_size
from tests.tasks import quiet_trainer, regression_data, small_model, weights


def _classes(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


class AccuracyTrainer(Trainer):
    """Metrics in the loop, as the ancestor's users write them."""

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


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model(torch.randn(50, 5, dtype=torch.float64))  # running statistics that are not the initial ones
    return model


def dataset_sizes() -> Any:
    """Loss, metric and predictions for every dataset size from 1 to 20."""
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")  # by torchmetrics, on ranks without samples
    results = {}
    model = _classifier()
    trainer = AccuracyTrainer(model, nn.CrossEntropyLoss(), None, callbacks=[])
    for size in range(1, 21):
        data = _classes(size)
        metrics = trainer.evaluate(data, per_device_batch_size=3)
        predictions = trainer.predict(data, per_device_batch_size=3)
        results[size] = metrics, predictions
    return results


def predict_structures() -> Any:
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 2).double()

        def forward(self, x):
            return {"out": self.linear(x), "pair": (x[:, 0], [x[:, 1:]]), "mean": x.mean()}

    torch.manual_seed(0)
    trainer = Trainer(Structured(), None, None, callbacks=[])
    return trainer.predict(regression_data(7), per_device_batch_size=2)


class OfManyKinds(nn.Module):
    """Outputs of several types, without arithmetic whose last bits depend on the size of a batch."""

    def forward(self, x):
        kinds = torch.bfloat16, torch.bool, torch.int64, torch.complex64
        real = x[:, 0]
        return {
            "kinds": tuple((x * 8).to(kind) for kind in kinds),
            "strided": [x.T.contiguous().T, x[:, ::2], x[:, :0]],
            "conjugate": torch.complex(real, real * 2).conj(),
            "sparse": x.relu().to_sparse(),
        }


class OfRaggedSamples(nn.Module):
    def forward(self, x):
        sizes = (x[:, 0].abs() * 5).int().tolist()
        return [
            {"boxes": row.repeat(size, 1), "label": f"of {size}", "of": (size, [row.int()])}
            for row, size in zip(x, sizes, strict=True)
        ]


def many_kinds_of_predictions() -> Any:
    """Predictions for several sizes of data: of all processes, of the first, and in parts."""
    results = {}
    for model in (OfManyKinds(), OfRaggedSamples()):
        trainer = Trainer(model, None, None, callbacks=[])
        for size in (1, 7, 26):
            data = regression_data(size)
            parts = list(trainer.predict_iter(data, 2))
            parts_of_first = list(trainer.predict_iter(data, 2, only_first=True))
            results[type(model).__name__, size] = {
                "all": trainer.predict(data, 2),
                "first": trainer.predict(data, 2, only_first=True),
                "parts": concatenate(parts),
                "parts_of_first": [part is None for part in parts_of_first],
                "num_parts": len(parts),
            }
    return results


class Unreadable(Dataset[Any]):
    """One of its samples cannot be read."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise OSError("unreadable")
        return torch.full((3,), float(index), dtype=torch.float64)


def predictions_without_failed_batches() -> Any:
    with shared_folder() as folder:
        writer = PredictionWriterCallback(folder / "predictions", skip_failed=True)
        trainer = Trainer(nn.Identity(), None, None, callbacks=[writer])
        return trainer.predict(Unreadable(), 2, {"num_workers": 0})[:, 0].tolist()


def predictions() -> Any:
    with shared_folder() as folder:
        data, directory = regression_data(23), folder / "predictions"
        trainer = quiet_trainer(small_model(), callbacks=[PredictionWriterCallback(directory, shard_size=3)])
        for _ in trainer.predict_iter(data, per_device_batch_size=2):
            pass
        written = read_predictions(directory)
        by_hand = small_model()(data.tensors[0]).detach()
        names = [path.stem.partition("rank")[2] for path in directory.glob("shard-*")]
        return {"equal": bool(torch.allclose(written, by_hand)), "ranks": sorted(set(map(int, names)))}


class EvaluateInside(TrainerCallback):
    """Evaluates other data in the middle of an epoch."""

    def on_train_step_end(self, trainer, step, **kwargs):
        if step == 1:
            self.metrics = trainer.evaluate(regression_data(5), per_device_batch_size=2)
            self.training = trainer.model.training


def evaluate_inside() -> Any:
    results = {}
    for callbacks in ([], [EvaluateInside()]):
        model = small_model()
        trainer = quiet_trainer(model, callbacks=callbacks)
        trainer.train(
            regression_data(20),
            2,
            regression_data(6),
            per_device_batch_size=global_batch(6),
            train_dataloader_kwargs=IN_ORDER,
        )
        losses = trainer.run_history.to_dict()
        results[len(callbacks)] = weights(model), {k: v for k, v in losses.items() if k != "evaluation_loss"}
        if callbacks:
            results["metrics"], results["training"] = callbacks[0].metrics, callbacks[0].training
    return results


class GathersEveryBatch(TrainerCallback):
    """As the ancestor's users do: every rank has as many evaluation batches where there are samples for all."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_eval_step_end(self, trainer, batch, **kwargs):
        self.seen.append(trainer.gather(batch[0]))


def gather_in_evaluation() -> Any:
    results = {}
    for size in range(world_size(), 25):
        gathers = GathersEveryBatch()
        trainer = Trainer(small_model(), nn.MSELoss(), None, callbacks=[gathers])
        trainer.evaluate(regression_data(size), per_device_batch_size=3)
        results[size] = torch.cat(gathers.seen)
    return results


class GathersForMetrics(Trainer):
    """Gathers as with Accelerate: in the steps of the trainer and of a callback, and at the end of an evaluation."""

    def __init__(self) -> None:
        class InEvents(TrainerCallback):
            def on_train_step_end(_, trainer, batch, **kwargs):
                self.note("train", trainer.accelerator.gather_for_metrics(batch[1]))

            def on_eval_step_end(_, trainer, batch, batch_output, **kwargs):
                self.counts.append(batch_output["batch_size"])
                gathered = trainer.accelerator.gather_for_metrics({"y": batch[1], "mean": batch[1].mean()})
                self.note("callback", gathered["y"])
                self.note("means", gathered["mean"])
                names = [f"{y:.3f}" for y in batch[1].flatten().tolist()]
                self.note("names", trainer.accelerator.gather_for_metrics(names))

            def on_eval_epoch_end(_, trainer, **kwargs):
                own = torch.cat(self.own)
                self.note("at the end", trainer.accelerator.gather_for_metrics(own).sort(dim=0).values)

        super().__init__(small_model(), nn.MSELoss(), None, callbacks=[InEvents])
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


def gather_for_metrics() -> Any:
    """What Accelerate's method gathers from 37 samples by batch size, of map data and of a stream."""
    results = {}
    for batch_size in (1, 3, 5):
        for kind in ("map", "stream"):
            data = regression_data(37)
            trainer = GathersForMetrics()
            given = data if kind == "map" else OrderedStream(data)
            metrics = trainer.evaluate(given, batch_size, None if kind == "map" else {"num_workers": 0})
            results[kind, batch_size] = trainer.found() | metrics
    return results


def gather_for_metrics_in_training() -> Any:
    """What it gathers in training, whose last step has fewer samples than ranks."""
    data = regression_data(4 * world_size() + 1)
    trainer = GathersForMetrics()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
    return torch.equal(torch.cat(trainer.seen["train"]), data.tensors[1])


def ema() -> Any:
    """The average with its buffers, and what its evaluation gave; the expected loss is that of the whole set."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    ema = ModelEmaCallback(0.5, save_path=None)
    trainer = quiet_trainer(model, callbacks=[ema], seed=0)
    data = regression_data(10)
    trainer.train(regression_data(24), 1, data, 2)
    average = ema.ema.module
    with torch.no_grad():
        expected = nn.functional.mse_loss(average(data.tensors[0]), data.tensors[1]).item()
    return {"average": weights(average), "history": trainer.run_history.to_dict(), "expected": expected}


def metrics() -> Any:
    """Metrics over more samples than ranks and over fewer, computed by the job and from the whole set."""
    torch.manual_seed(0)
    model, results = nn.Linear(5, 3), {}
    for name, size in (("many", 23), ("few", 1)):
        x, y = torch.randn(size, 5), torch.arange(size) % 3
        classes = {"accuracy": MulticlassAccuracy(3, average="micro")}
        if size > 1:
            classes["auroc"] = MulticlassAUROC(3)  # keeps all predictions
        callbacks = [
            MetricsCallback(classes, _probabilities),
            MetricsCallback({"largest": MaxMetric()}, _largest_output),
        ]
        if size == 1:
            callbacks.append(MetricsCallback({"all": CatMetric()}, _largest_output))
        found = Trainer(model, nn.CrossEntropyLoss(), None, callbacks=callbacks).evaluate(TensorDataset(x, y), 2)
        with torch.no_grad():
            outputs = model(x)
        expected = {key: metric.clone().cpu()(outputs.softmax(1), y).item() for key, metric in classes.items()}
        expected |= {"largest": outputs.max().item()} | ({"all": outputs.max().item()} if size == 1 else {})
        results[name], results[f"expected_{name}"] = {key: found[key] for key in expected}, expected
    return results


def _probabilities(batch: Any, batch_output: Any) -> Any:
    return batch_output["model_outputs"].softmax(1), batch[1]


def _largest_output(batch: Any, batch_output: Any) -> Any:
    return (batch_output["model_outputs"].max(),)


def ones(batch: Any, batch_output: Any) -> Any:
    return (torch.ones(len(batch[0])),)
