"""Evaluation and prediction: every sample once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import CatMetric, MaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import MetricsCallback, PredictionWriterCallback, read_predictions
from tests.cases.common import IN_ORDER, global_batch, shared_folder
from tests.tasks import quiet_trainer, regression_data, small_model, weights


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
