"""Metrics of torchmetrics: each sample once, one record per evaluation, on any number of processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanAbsoluteError,
    MeanSquaredError,
    MetricCollection,
    MinMaxMetric,
    MultioutputWrapper,
    SumMetric,
)
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAUROC,
)
from torchmetrics.functional.classification import auroc, calibration_error

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    EarlyStoppingCallback,
    MetricsCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
)
from tests.launching import TORCHRUN, launch, two_are_enough
from tests.ranks import world_size
from tests.scripts.resumable import CopyStates, run
from tests.small_models import adamw_trainer, float64_data, float64_model, listener, make_data, make_trainer, train


def classification(size: int = 25) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def class_trainer(*callbacks, model=None, **kwargs) -> Trainer:
    model = model or classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, **kwargs)


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


def test_metrics_of_an_evaluation_cover_the_complete_dataset():
    data, model = classification(), classifier()
    metrics = {"accuracy": MulticlassAccuracy(3), "auroc": MulticlassAUROC(3)}
    trainer = class_trainer(MetricsCallback(metrics), model=model)
    trainer.train(data, 3, data, 4)
    with torch.no_grad():
        outputs = model(data.tensors[0])
    for name, metric in metrics.items():
        values = trainer.run_history.get_metric_values(name)
        assert len(values) == 3
        assert values[-1] == pytest.approx(metric(outputs, data.tensors[1]).item(), abs=1e-6)
    assert trainer.evaluate(data, 7)["accuracy"] == trainer.run_history.get_metric_values("accuracy")[2]
    assert len(trainer.run_history.get_metric_values("accuracy")) == 4


@pytest.mark.programs
def test_metrics_of_processes_with_own_devices_are_merged():
    done = launch([*TORCHRUN, "2", "-m", "tests.scripts.metrics_on_devices"], warm=True)
    assert done.returncode == 0, done.stderr
    expected = {"total": pytest.approx(float(make_data(5).tensors[1].sum())), "samples": 5}
    assert json.loads(done.stdout) == expected


def test_an_evaluation_within_an_evaluation_has_its_own_metrics():
    """A callback evaluates on other data in each step; also of metrics that wait for their first outputs."""
    data, other = classification(), classification(7)
    for metrics in ({"accuracy": MulticlassAccuracy(3)}, ["accuracy"]):
        inner: list[Any] = []

        def evaluate(trainer, inner=inner, **kwargs):
            if trainer.run.outer is None:
                inner.append(trainer.evaluate(other, 4))

        for first in (True, False):
            callbacks = [MetricsCallback(metrics), listener(on_eval_step_end=evaluate)]
            trainer = class_trainer(*(callbacks[::-1] if first else callbacks))
            assert trainer.evaluate(data, 10)["accuracy"] == class_trainer(callbacks[0]).evaluate(data, 10)["accuracy"]
            assert inner[-1]["accuracy"] == class_trainer(callbacks[0]).evaluate(other, 4)["accuracy"]


def test_training_metrics_have_a_prefix_and_restart_each_epoch():
    seen = []

    class Counts(MeanSquaredError):
        def update(self, preds, target):
            seen.append(len(target))
            super().update(preds, target)

        def reset(self):
            seen.append("reset")
            super().reset()

    trainer = adamw_trainer(float64_model(), callbacks=[MetricsCallback({"mse": Counts()}, train=True)])
    trainer.train(float64_data(20), 2, float64_data(9), sanity_check=False)
    history = trainer.run_history.to_dict()
    assert len(history["train_mse"]) == len(history["mse"]) == 2
    assert sum(size for size in seen if size != "reset") == 2 * (20 + 9)
    assert history["mse"] == pytest.approx(history["eval_loss_epoch"])


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (MeanAbsoluteError(), {"MeanAbsoluteError"}),
        (MetricCollection([MeanAbsoluteError(), MeanSquaredError()]), {"MeanAbsoluteError", "MeanSquaredError"}),
        ({"mae": MeanAbsoluteError()}, {"mae"}),
    ],
)
def test_metrics_are_recorded_under_their_names(metrics, names):
    trainer = adamw_trainer(float64_model(), callbacks=[MetricsCallback(metrics)])
    trainer.train(float64_data(20), 1, float64_data(9))
    assert set(trainer.run_history.get_metric_names()) == names | {"train_loss_epoch", "eval_loss_epoch"}


@pytest.mark.extension("model_ema")
def test_metrics_of_special_evaluations_have_prefixes():
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    ema = ModelEmaCallback(0.5, save_path=None, callbacks=[MetricsCallback({"mae": MeanAbsoluteError()})],
                           watch_metric="ema_model_a_eval_loss_epoch")  # fmt: skip
    callbacks = [StepBasedEvaluationCallback(2), MetricsCallback({"mae": MeanAbsoluteError()}), ema]
    trainer = adamw_trainer(float64_model(), callbacks=callbacks)
    trainer.train(float64_data(32), 1, {"a": float64_data(9), "b": float64_data(4)})
    counts = {name: len(values) for name, values in trainer.run_history.to_dict().items() if "mae" in name}
    assert counts == {
        "a_intermediate_mae": 2,
        "b_intermediate_mae": 2,
        "a_mae": 1,
        "b_mae": 1,
        "ema_model_a_mae": 1,
        "ema_model_b_mae": 1,
    }


class Quantiles(MeanAbsoluteError):
    """A metric of several values, the greater the better."""

    higher_is_better = True

    def compute(self):
        error = super().compute()
        return {"low": error / 2, "middle": error, "high": 2 * error}


def test_only_the_requested_values_of_a_metric_are_recorded():
    stop = EarlyStoppingCallback(watch_metric="middle", early_stopping_patience=50)
    metrics = MetricsCallback({"quantiles": Quantiles()}, only=["low", "middle"])
    trainer = adamw_trainer(float64_model(), callbacks=[metrics, stop])
    trainer.train(float64_data(20), 2, float64_data(9))
    history = trainer.run_history.to_dict()
    assert set(history) == {"train_loss_epoch", "eval_loss_epoch", "low", "middle"}
    assert stop.best_metric == max(history["middle"])
    with pytest.raises(ValueError, match=r"no value named 'median', only low, middle, high"):
        adamw_trainer(float64_model(), callbacks=[MetricsCallback(Quantiles(), only=["median"])]).evaluate(
            float64_data(9)
        )


def test_a_metric_with_many_values_is_kept_as_lists():
    data = classification()
    trainer = class_trainer(MetricsCallback({"confusion": MulticlassConfusionMatrix(3)}))
    trainer.train(data, 1, data, 4)
    matrix = trainer.run_history.get_latest_metric("confusion")
    assert sum(map(sum, matrix)) == 25


def test_metrics_may_come_after_a_callback_that_watches_them():
    stop = EarlyStoppingCallback(watch_metric="mae", early_stopping_patience=50)
    trainer = adamw_trainer(float64_model(), callbacks=[stop, MetricsCallback({"mae": MeanAbsoluteError()})])
    trainer.train(float64_data(20), 2, float64_data(9))
    assert stop.best_metric == min(trainer.run_history.get_metric_values("mae"))


def test_metrics_work_with_dict_batches_and_transformers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier()

        def forward(self, x, labels):
            logits = self.inner(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": y} for x, y in classification()]
    model = Model()
    callbacks = [MetricsCallback({"accuracy": MulticlassAccuracy(3)})]
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks)
    trainer.train(data, 1, data)
    assert 0 <= trainer.run_history.get_latest_metric("accuracy") <= 1


def test_metrics_of_unusual_outputs_require_a_transform():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = float64_model()

        def forward(self, x):
            return self.inner(x), x

    class PairTrainer(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.model(batch[0])
            return {"loss": nn.functional.mse_loss(outputs[0], batch[1]), "model_outputs": outputs}

        calculate_eval_batch_loss = calculate_train_batch_loss

    def train(**kwargs):
        model = Pair()
        callbacks = [MetricsCallback({"mae": MeanAbsoluteError()}, **kwargs)]
        trainer = PairTrainer(model, None, torch.optim.SGD(model.parameters(), lr=0.01), callbacks=callbacks)
        trainer.train(float64_data(8), 1, float64_data(4))
        return trainer

    with pytest.raises(ValueError, match=r"in a model output of type tuple .* Pass transform=lambda"):
        train()
    trainer = train(transform=lambda batch, output: (output["model_outputs"][0], batch[1]))
    assert trainer.run_history.get_latest_metric("mae") > 0


def test_metrics_that_belong_to_a_trainer_work():
    class WithMetric(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.accuracy = MulticlassAccuracy(3)

        def calculate_eval_batch_loss(self, batch):
            output = super().calculate_eval_batch_loss(batch)
            self.accuracy.update(output["model_outputs"], batch[1])
            return output

        def eval_epoch_end(self):
            self.run_history.update_metric("accuracy", self.accuracy.compute().cpu())
            self.accuracy.reset()

    data, model = classification(), classifier()
    trainer = WithMetric(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), DEFAULT_CALLBACKS)
    trainer.train(data, 2, data, 4)
    assert len(trainer.run_history.get_metric_values("accuracy")) == 2


@pytest.mark.slow
def test_training_metrics_resume_exactly(tmp_path):
    def metrics():
        return (MetricsCallback({"mae": MeanAbsoluteError()}, lambda b, o: (o["model_outputs"], b[1]), train=True),)

    whole = run(tmp_path, resume_from=None, extra=(*metrics(), CopyStates(tmp_path)), save_every_n_epochs=1)
    assert len(whole["history"]["train_mae"]) == 3
    for copy in sorted((tmp_path / "copies").glob("*/update-*"))[::2]:
        again = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, extra=metrics())
        assert again["history"] == whole["history"]


def test_training_metrics_with_the_same_name_continue(tmp_path):
    def run(names: list[str], **kwargs: Any) -> Any:
        metrics = MetricsCallback({name: MeanSquaredError() for name in names}, train=True)
        saver = SaveTrainingStateCallback(tmp_path / "-".join(names), save_every_n_steps=1)
        return train(make_trainer([metrics, saver], seed=0), **kwargs)

    whole = run(["same", "old"])
    with pytest.warns(UserWarning, match=r"have been added .* or have been removed: new, old\."):
        resumed = run(["same", "new"], resume_from=tmp_path / "same-old" / "update-000000002")
    history = resumed.run_history.to_dict()
    assert history["train_same"] == whole.run_history.to_dict()["train_same"] != history["train_new"]


def test_metrics_that_keep_all_predictions_resume_exactly_too(tmp_path):
    def run(**kwargs: Any) -> list[float]:
        metrics = MetricsCallback({"auroc": MulticlassAUROC(3)}, train=True)
        saver = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = class_trainer(metrics, saver, seed=0)
        trainer.train(classification(), 1, per_device_batch_size=10, **kwargs)
        return trainer.run_history.get_metric_values("train_auroc")

    assert run(resume_from=None) == run(resume_from=tmp_path / "update-000000002")


@pytest.mark.parametrize(
    "create", [lambda: MinMaxMetric(MeanSquaredError()), lambda: MultioutputWrapper(MeanSquaredError(), 1)]
)
def test_metrics_that_wrap_others_resume_exactly_too(tmp_path, create):
    def run(**kwargs: Any) -> dict[str, Any]:
        callbacks = [
            MetricsCallback({"m": create()}, train=True),
            SaveTrainingStateCallback(tmp_path, save_every_n_steps=1),
        ]
        trainer = train(make_trainer(callbacks, seed=0), epochs=1, **kwargs)
        return trainer.run_history.to_dict()

    assert run() == run(resume_from=tmp_path / "update-000000002")


def test_extremes_of_earlier_epochs_are_resumed(tmp_path):
    def run(**kwargs: Any) -> dict[str, Any]:
        metrics = MetricsCallback({"m": MinMaxMetric(MeanSquaredError())}, train=True)
        saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)
        trainer = train(make_trainer([metrics, saver], seed=0), epochs=3, eval_dataset=make_data(), **kwargs)
        return trainer.run_history.to_dict()

    whole = run()
    assert whole["max"][-1] > whole["raw"][-1]
    assert run(resume_from=sorted(tmp_path.glob("update-*"))[1]) == whole


def test_a_metric_may_give_a_plain_number():
    class Rounded(MeanSquaredError):
        def compute(self):
            return round(float(super().compute()), 2)

    trainer = adamw_trainer(float64_model(), callbacks=[MetricsCallback({"mse": Rounded()})])
    found = trainer.evaluate(float64_data(9))
    assert found["mse"] == round(found["evaluation_loss"], 2)
    assert type(found["mse"]) is float


def ones(batch: Any, batch_output: Any) -> Any:
    return (torch.ones(len(batch[0])),)


def training_metrics(folder: Path, resume_from: Path | None = None) -> Any:
    """The samples of an epoch, whose last step has a sample for one process only, and the order of its targets."""
    counts = MetricsCallback({"count": SumMetric()}, ones, train=True)
    targets = MetricsCallback({"all": CatMetric()}, lambda batch, _: (batch[1].flatten(),), train=True)
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, max_checkpoints=None)
    trainer = adamw_trainer(float64_model(), callbacks=[counts, targets, saver], seed=0)
    trainer.train(float64_data(19), 1, per_device_batch_size=6 // world_size(), resume_from=resume_from)
    return trainer.run_history.get_metric_values("train_count"), trainer.run_history.get_metric_values("train_all")


def on_one(*arguments: Any) -> list[Any]:
    return [training_metrics(*arguments)]


@pytest.mark.processes
def test_other_numbers_of_processes_take_over_training_metrics(tmp_path, job):
    """Also after the last step of an epoch; and a run resumed once more continues to the same values."""
    training_metrics(tmp_path / "1")
    job(3).run(training_metrics, tmp_path / "3")
    expected = sorted(float64_data(19).tensors[1].flatten().tolist())
    for saved, resumed, update in ((3, 1, 1), (3, 1, 4), (3, 2, 1), (3, 2, 4), (1, 2, 2)):
        folder = tmp_path / f"{saved} to {resumed} at {update}"
        resume = on_one if resumed == 1 else partial(job(resumed).run, training_metrics)
        found = resume(folder, tmp_path / f"{saved}/update-{update:09}")
        for counts, targets in found:
            assert counts == [19.0]
            assert sorted(targets[0]) == pytest.approx(expected)
        for state in sorted(folder.glob("update-*"))[:1]:
            assert resume(folder / "again", state) == found


@pytest.mark.processes
def test_metrics_of_several_processes_cover_the_complete_dataset(ranks):
    for found in ranks(metrics):
        assert found["few"] == pytest.approx(found["expected_few"], abs=1e-6)
        assert found["many"] == pytest.approx(found["expected_many"], abs=1e-6)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (3, TypeError, "metrics=3 must be a torchmetrics Metric"),
        (
            {"share": lambda outputs, targets: outputs.mean()},
            TypeError,
            r"metrics=\{'share'.*Log the mean of a function of your own by trainer\.log",
        ),
        ({"a": 3}, TypeError, "must be a torchmetrics Metric, a MetricCollection, a dict of metrics, or the name of"),
        ({}, ValueError, "contains no metric"),
        ({"train": "accuracy"}, ValueError, "metrics has the name 'train'. It must be text without dots, and not"),
        ({"top.1": "accuracy"}, ValueError, "metrics has the name 'top.1'"),
        ({1: "accuracy"}, ValueError, "metrics has the name 1"),
        ({"a": "acurracy"}, ValueError, "metrics='acurracy': .* Did you mean 'Accuracy'?"),
        (
            "zzz",
            ValueError,
            "has no metric of this name. For classifiers, there are .*Accuracy,.* for regression, .*R2Score",
        ),
    ],
)
def test_metrics_refuse_invalid_metrics(metrics, error, message):
    with pytest.raises(error, match=message):
        MetricsCallback(metrics)


def test_a_metric_that_two_callbacks_record_is_refused():
    data = classification()
    first, second = (MetricsCallback({"accuracy": MulticlassAccuracy(3, top_k=k)}) for k in (1, 2))
    trainer = class_trainer(first, second)
    with pytest.raises(ValueError, match="Both MetricsCallback and MetricsCallback record the metric 'accuracy'"):
        trainer.train(data, 1, data)
    assert trainer.progress.step == 0


def test_a_metric_object_that_two_callbacks_have_is_refused():
    data, metric = classification(), MulticlassAccuracy(3)
    trainer = class_trainer(MetricsCallback({"fine": metric}), MetricsCallback({"coarse": metric}))
    with pytest.raises(ValueError, match=r"same MulticlassAccuracy object.*Pass metric\.clone\(\)"):
        trainer.train(data, 1, data)


def test_a_metric_may_be_recorded_in_each_step():
    logs = listener(on_train_step_end=lambda trainer, step, **_: trainer.run_history.update_metric("step_loss", step))
    trainer = train(make_trainer([logs]))
    assert trainer.run_history["step_loss"] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ short forms


def test_metrics_may_be_an_argument_of_the_trainer():
    data = classification()
    whole = class_trainer(MetricsCallback({"accuracy": MulticlassAccuracy(3)}), seed=3)
    whole.train(data, 2, data)
    seen = []
    look = listener(on_eval_epoch_end=lambda t, **_: seen.append(t.run_history.get_latest_metric("accuracy")))
    short = class_trainer(look, metrics={"accuracy": MulticlassAccuracy(3)}, seed=3)
    short.train(data, 2, data)
    assert short.run_history["accuracy"] == whole.run_history["accuracy"] == seen


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ("accuracy", {"num_classes": 3}, {"accuracy": MulticlassAccuracy(3, average="micro")}),
        ("Accuracy", {"num_classes": 3, "average": "macro"}, {"Accuracy": MulticlassAccuracy(3)}),
        ({"a": "MULTICLASS-accuracy"}, {"num_classes": 3}, {"a": MulticlassAccuracy(3)}),
        (
            ["accuracy", "f1_score"],
            {"num_classes": 3},
            {"accuracy": MulticlassAccuracy(3, average="micro"), "f1_score": MulticlassF1Score(3, average="micro")},
        ),
    ],
)
def test_metrics_by_name_are_those_of_torchmetrics(given, arguments, expected):
    data = classification()
    found = class_trainer(MetricsCallback(given, **arguments)).evaluate(data)
    assert found == class_trainer(metrics=expected).evaluate(data)
    assert expected.keys() <= found.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("auroc", {"num_labels": 4}, MultilabelAUROC),
        ("auroc", {"task": "binary"}, BinaryAUROC),
        ("mean squared error", {}, MeanSquaredError),
    ],
)
def test_a_metrics_task_follows_from_its_arguments(name, arguments, kind):
    assert type(MetricsCallback(name, **arguments).metrics[name]) is kind


def test_arguments_that_no_metric_takes_are_refused():
    with pytest.raises(ValueError, match=r"Unexpected keyword arguments: `topk`"):
        MetricsCallback("accuracy", num_classes=3, topk=2)
    with pytest.raises(ValueError, match="task='regression' must be 'binary' or 'multiclass' or 'multilabel'"):
        MetricsCallback("accuracy", task="regression")
    with pytest.raises(TypeError, match="transform='logits' must be a function, not str"):
        MetricsCallback(MulticlassAccuracy(3), transform="logits")
    with pytest.raises(TypeError, match=r"only='map_50' must be a list of names. Write: only=\['map_50'\]"):
        MetricsCallback(MulticlassAccuracy(3), only="map_50")
    with pytest.raises(TypeError, match="no argument 'num_classes': pass it where you create the metric, or pass the"):
        MetricsCallback(MulticlassAccuracy(3), num_classes=3)


def test_metrics_of_the_trainer_and_of_a_callback_combine():
    data = classification()
    second = MetricsCallback({"auroc": MulticlassAUROC(3)})
    trainer = class_trainer(second, metrics={"accuracy": MulticlassAccuracy(3)})
    trainer.train(data, 1, data)
    assert {"accuracy", "auroc"} <= set(trainer.run_history)
    with pytest.raises(ValueError, match="Both MetricsCallback and MetricsCallback record the metric 'auroc'"):
        class_trainer(second, metrics={"auroc": MulticlassAUROC(3)}).train(data, 1, data)


# ------------------------------------------------------------------------------------- one name, one owner


def error_of() -> MeanSquaredError:
    return MeanSquaredError()


@pytest.mark.parametrize("name", ["eval_loss_epoch", "train_loss_epoch", "intermediate_eval_loss", "evaluation_loss"])
@pytest.mark.parametrize("way", ["metrics", "declared"])
def test_a_metric_named_like_a_loss_is_refused_at_the_start(name, way):
    class Declares(TrainerCallback):
        def configure_run(self, trainer, request, **kwargs):
            request.metrics.record(self, [name], in_evaluation=True)

    callback = MetricsCallback({name: error_of()}) if way == "metrics" else Declares()
    trainer = make_trainer([callback])
    with pytest.raises(ValueError, match=f"Both the run itself, as a loss, and {type(callback).__name__}.*'{name}'"):
        train(trainer, eval_dataset=True)
    assert trainer.progress.step == 0


@pytest.mark.parametrize(
    ("name", "arguments", "datasets"),
    [
        ("loss_epoch", {"train": True}, None),  # of the training part: train_loss_epoch
        ("loss_epoch", {}, ["train"]),  # the name of a dataset is a prefix
        ("eval_loss_epoch", {}, ["a", "b"]),
    ],
)
def test_prefixes_do_not_make_a_metric_the_name_of_a_loss(name, arguments, datasets):
    trainer = make_trainer([MetricsCallback({name: error_of()}, **arguments)])
    data = make_data() if datasets is None else {each: make_data() for each in datasets}
    with pytest.raises(ValueError, match="two values of it"):
        train(trainer, eval_dataset=data)
    assert trainer.progress.step == 0


def test_metrics_of_two_datasets_have_different_names():
    trainer = make_trainer([MetricsCallback({"x": error_of(), "b_x": error_of()})])
    with pytest.raises(ValueError, match=r"Both MetricsCallback \(of eval_dataset\['a'\]\) and .*'a_b_x'"):
        train(trainer, eval_dataset={"a": make_data(), "a_b": make_data()})
    assert trainer.progress.step == 0


def update(name: str) -> Any:
    return lambda trainer, **kwargs: trainer.run_history.update_metric(name, 1.0)


class Parts(Trainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.log("seen", 1.0)
        return output | {"loss": {"fit": output["loss"], "rest": 0 * output["loss"]}}


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("on_train_epoch_start", "train_loss_epoch"),
        ("on_train_epoch_end", "train_loss_epoch"),
        ("on_train_epoch_end", "train_rest_epoch"),
        ("on_train_epoch_end", "train_seen_epoch"),
        ("on_eval_step_end", "a_eval_loss_epoch"),
        ("on_training_run_epoch_end", "b_eval_loss_epoch"),
    ],
)
def test_a_value_recorded_as_a_loss_is_an_error_in_that_epoch(event, name):
    trainer = make_trainer([listener(**{event: update(name.removeprefix("a_"))})], trainer_class=Parts)
    with pytest.raises(ValueError, match=f"record the metric '{name}', so epoch 1 would have two values"):
        train(trainer, epochs=2, eval_dataset={"a": make_data(), "b": make_data()})


def test_a_history_accepts_loss_names_that_the_run_lacks():
    trainer = make_trainer([listener(on_train_epoch_end=update("eval_loss_epoch"))])
    train(trainer, epochs=2)
    trainer.run_history.update_metric("train_loss_epoch", 0.5)
    trainer.run_history.delete_metric("train_loss_epoch")
    trainer.run_history.update_metric("train_loss_epoch", 0.5)
    assert trainer.run_history.to_dict() == {"eval_loss_epoch": [1.0, 1.0], "train_loss_epoch": [0.5]}


# ---------------------------------------------------------------------------------- what the first outputs show

TASKS = {
    "multiclass": (nn.CrossEntropyLoss(), 3, lambda n: torch.arange(n) % 3, {"num_classes": 3}),
    "multilabel": (
        nn.BCEWithLogitsLoss(),
        3,
        lambda n: (torch.arange(3 * n).view(n, 3) % 2).float(),
        {"num_labels": 3},
    ),
    "binary": (nn.BCEWithLogitsLoss(), 1, lambda n: (torch.arange(n).view(n, 1) % 2).float(), {"task": "binary"}),
}
SPELLINGS = {"accuracy": "accuracy", "F1": "f1", "hamming": "Hamming Distance"}


def trainer_of(task: str, metrics: Any, *callbacks: Any, **kwargs: Any) -> tuple[Trainer, TensorDataset]:
    loss, outputs, targets, _ = TASKS[task]
    torch.manual_seed(0)
    model = nn.Linear(4, outputs)
    data = TensorDataset(torch.randn(13, 4), targets(13))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model, loss, optimizer, callbacks, metrics=metrics, **kwargs), data


def of_task(task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What evaluations record with metrics whose task is found, and is given."""
    given = MetricsCallback(SPELLINGS, train=True, **TASKS[task][3])
    found = []
    for metrics, callbacks in ((SPELLINGS, ()), (None, (given,))):
        trainer, data = trainer_of(task, metrics, *callbacks, seed=0)
        trainer.train(data, 2, data, per_device_batch_size=3)
        found.append({name: trainer.run_history.get_metric_values(name) for name in SPELLINGS})
    return found[0], found[1]


@pytest.mark.parametrize("task", TASKS)
def test_the_first_outputs_show_the_kind_of_classifier(task):
    found, given = of_task(task)
    assert found == given
    assert all(len(values) == 2 for values in found.values())


@pytest.mark.sampled
@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize(("shape", "whole"), [((8, 1), True), ((8, 1), False), ((8, 1, 2, 2), True)])
def test_one_column_of_outputs_is_binary_without_one_of_targets(shape, whole, is_checked):
    torch.manual_seed(0)
    size = torch.Size(shape[1:]).numel()
    targets = (torch.rand(shape).squeeze(1) > 0.5).long() if whole else (torch.rand(shape).squeeze(1) > 0.5).float()
    data = TensorDataset(torch.randn(8, size), targets)

    class FlatLoss(nn.BCEWithLogitsLoss):
        def forward(self, outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return super().forward(outputs.squeeze(1), wanted.float())

    model = nn.Sequential(nn.Linear(size, size), nn.Unflatten(1, shape[1:]))
    trainer = make_trainer(metrics=["accuracy", "mse"], model=model, loss_func=FlatLoss())
    if is_checked:
        trainer.check(data, data)
    found = trainer.evaluate(data, 3)
    outputs = model(data.tensors[0]).squeeze(1)
    assert found["accuracy"] == pytest.approx(((outputs > 0) == targets).float().mean().item())
    assert found["mse"] == pytest.approx(((outputs - targets) ** 2).mean().item())


@pytest.mark.parametrize("shape", [(8,), (8, 2, 2)])
def test_one_column_of_targets_is_binary_without_one_of_outputs(shape):
    torch.manual_seed(0)
    targets = (torch.rand(shape) > 0.5).float()
    data = TensorDataset(torch.randn(shape), targets.unsqueeze(1))

    class Column(nn.BCEWithLogitsLoss):
        def forward(self, outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return super().forward(outputs.unsqueeze(1), wanted)

    trainer = Trainer(nn.Identity(), Column(), None, callbacks=[], metrics=["accuracy", "mse"])
    found = trainer.evaluate(data, 3)
    assert found["accuracy"] == pytest.approx(((data.tensors[0] > 0) == targets).float().mean().item())
    assert found["mse"] == pytest.approx(((data.tensors[0] - targets) ** 2).mean().item())


@pytest.mark.parametrize("loss_func", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
@pytest.mark.parametrize("arguments", [{}, {"num_classes": 3}])
@pytest.mark.parametrize("pixels", [(), (2, 2)])
def test_one_hot_targets_count_as_classes(loss_func, arguments, pixels):
    torch.manual_seed(0)
    outputs, classes = torch.randn(8, 3, *pixels), torch.randint(3, (8, *pixels))
    one_hot = nn.functional.one_hot(classes, 3).movedim(-1, 1).float()
    found = []
    for targets in (classes, one_hot):
        metrics = MetricsCallback(["accuracy", "auroc"], **arguments)
        trainer = Trainer(nn.Identity(), loss_func, None, callbacks=[metrics])
        found.append(trainer.evaluate(TensorDataset(outputs, targets), 3))
    assert found[0]["accuracy"] == pytest.approx((outputs.argmax(1) == classes).float().mean().item())
    assert [found[1][name] for name in ("accuracy", "auroc")] == [found[0][name] for name in ("accuracy", "auroc")]


@pytest.mark.parametrize("loss_func", [nn.BCEWithLogitsLoss(), nn.functional.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("labels", [1, 2])
def test_small_logits_of_a_batch_are_not_probabilities(labels, loss_func):
    data = TensorDataset(
        torch.tensor([[0.1], [0.3], [0.7], [-2.0]]), torch.tensor([[1.0] * labels] * 3 + [[0.0] * labels])
    )
    model = nn.Linear(1, labels, bias=False)
    nn.init.ones_(model.weight)
    trainer = make_trainer(metrics=["accuracy", "auroc"], model=model, loss_func=loss_func)
    assert [trainer.evaluate(data, 1)[name] for name in ("accuracy", "auroc")] == [1, 1]
    soft = TensorDataset(data.tensors[0], data.tensors[1] * 0.9)
    with pytest.raises(RuntimeError, match="values in `target`"):
        trainer.evaluate(soft, 1)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_small_logits_of_classes_are_not_probabilities(size):
    """With this loss, outputs are logits, also in a batch in which all lie between 0 and 1."""
    logits = torch.tensor(
        [[0.1, 0.9], [0.5, 0.6], [0.4, 0.2], [3.0, -2.0], [0.0, 1.0], [0.9, 0.8], [0.2, 0.3], [2.0, 2.5]]
    )
    classes = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0])
    metrics = MetricsCallback(["auroc", "accuracy", "calibration_error"], num_classes=2)
    trainer = Trainer(nn.Identity(), nn.CrossEntropyLoss(), None, callbacks=[metrics])
    found = trainer.evaluate(TensorDataset(logits, classes), size)
    expected = auroc(logits.softmax(1), classes, task="multiclass", num_classes=2)
    assert found["auroc"] == pytest.approx(expected.item())
    assert found["accuracy"] == (logits.argmax(1) == classes).float().mean().item()
    error = calibration_error(logits.softmax(1), classes, task="multiclass", num_classes=2)
    assert found["calibration_error"] == pytest.approx(error.item())


def all_tasks() -> list[Any]:
    return [of_task(task) for task in TASKS]


@two_are_enough
@pytest.mark.processes
def test_processes_agree_on_the_kind_of_classifier(ranks):
    for by_task in ranks(all_tasks):
        assert all(found == given for found, given in by_task)


def of_few_samples() -> list[float]:
    """The accuracy of 2 samples, of which some processes have none."""
    trainer, data = trainer_of("multiclass", "accuracy")
    few = torch.utils.data.Subset(data, range(2))
    return [trainer.evaluate(few, 1)["accuracy"], trainer.evaluate(data, 1)["accuracy"]]


@pytest.mark.processes
def test_processes_without_samples_compute_the_same_accuracy(ranks):
    assert ranks(of_few_samples) == [of_few_samples()] * 3


def test_several_metrics_by_name_and_top_k_accuracy():
    trainer, data = trainer_of("multiclass", ["accuracy", "top2", "top-3 accuracy", "mcc"])
    found = trainer.evaluate(data, 5)
    assert found["accuracy"] < found["top2"] < found["top-3 accuracy"] == 1
    assert "mcc" in found


def test_a_metric_by_name_is_watched_in_its_direction(tmp_path):
    stopping = EarlyStoppingCallback(1, 0, "f1")
    trainer, data = trainer_of("multiclass", "f1", stopping)
    trainer.train(data, 3, data, per_device_batch_size=4)
    assert stopping.best_metric == max(trainer.run_history.get_metric_values("f1"))


@pytest.mark.parametrize("given", [{}, {"num_classes": 3}], ids=["by shape", "given"])
def test_a_metric_that_is_the_accuracy_by_default_is_said_to_be(given, capsys):
    data = classification()
    trainer = class_trainer(MetricsCallback(["accuracy", "f1", "recall"], **given))
    trainer.train(data, 2, data)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "averages over samples" in line]
    assert line.startswith(
        "'f1' and 'recall': torchmetrics averages over samples by default, which gives the accuracy."
    )
    assert line.endswith("pass MetricsCallback(['f1', 'recall'], average='macro').")
    assert trainer.run_history["f1"] == trainer.run_history["recall"] == trainer.run_history["accuracy"]
    class_trainer(MetricsCallback(["f1", "recall"], average="micro", **given)).train(data, 1, data)
    class_trainer(MetricsCallback("auroc", **given)).train(data, 1, data)
    assert "averages over samples" not in capsys.readouterr().out


@pytest.mark.thorough
def test_training_metrics_whose_task_was_found_are_resumed(tmp_path):
    def run(folder: str, **kwargs: Any) -> dict[str, Any]:
        saver = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer, data = trainer_of("multiclass", None, MetricsCallback("accuracy", train=True), saver, seed=1)
        trainer.train(data, 2, data, per_device_batch_size=3, **kwargs)
        return trainer.run_history.to_dict()

    whole = run("whole")
    states = sorted((tmp_path / "whole").glob("update-*"))
    assert len(states) > 5
    for state in states:
        resumed = run(f"resumed-{state.name}", resume_from=state)
        assert {name: resumed[name] for name in ("accuracy", "train_accuracy")} == {
            name: whole[name] for name in ("accuracy", "train_accuracy")
        }


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 5, 3, 4)])
def test_pixel_targets_are_not_used_as_labels(shape):
    size = torch.Size(shape).numel() // 2
    data = TensorDataset(torch.randn(2, size), torch.zeros(shape))
    model = nn.Sequential(nn.Linear(size, size), nn.Unflatten(1, shape[1:]))
    trainer = make_trainer(metrics="accuracy", model=model, loss_func=nn.MSELoss())
    with pytest.raises(ValueError, match="cannot be told from outputs"):
        trainer.evaluate(data)


def test_classes_in_the_last_dimension_have_advice_that_works():
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForTokenClassification

    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForTokenClassification(BertConfig(**sizes, intermediate_size=8, num_labels=3))
    data = [{"input_ids": torch.arange(4), "labels": torch.tensor([-100, 0, 1, 2])}] * 5

    def evaluated(metrics: MetricsCallback) -> dict[str, float]:
        return Trainer(model, None, None, callbacks=[metrics]).evaluate(data)

    with pytest.raises(ValueError, match="Classes are expected in dimension 1, not in the last"):
        evaluated(MetricsCallback("accuracy"))

    def by_token(batch: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return output["model_outputs"].logits.flatten(0, 1), batch["labels"].flatten()

    found = evaluated(MetricsCallback("accuracy", by_token, ignore_index=-100))
    with torch.no_grad():
        classes = model.eval()(data[0]["input_ids"][None]).logits.argmax(-1)[0, 1:]
    assert found["accuracy"] == pytest.approx((classes == torch.arange(3)).double().mean().item())


def test_outputs_not_of_a_classifier_are_an_error_with_advice():
    trainer = make_trainer(
        metrics="accuracy", model=nn.Sequential(nn.Linear(4, 2)), loss_func=lambda *args: args[0].sum()
    )
    with pytest.raises(ValueError, match=r"cannot be told from outputs .* and targets .*task='binary'"):
        trainer.evaluate(make_data())


def test_an_error_in_a_metric_names_it_and_its_inputs():
    metrics = MetricsCallback({"accuracy": MulticlassAccuracy(3), "error": MeanSquaredError()})
    with pytest.raises(RuntimeError) as caught:
        make_trainer([metrics]).evaluate(make_data(), per_device_batch_size=2)
    assert caught.value.__notes__[0] == (
        "In the metric 'accuracy', a MulticlassAccuracy(num_classes=3), updated with\n"
        "Tensor(shape=(2, 1), float32 on cpu) and Tensor(shape=(2, 1), float32 on cpu)."
    )
    assert caught.value.__notes__[1] == "In MetricsCallback.on_eval_step_end."


def test_checks_of_shipped_callbacks_have_complete_messages():
    class WithoutOutputs(Trainer):
        def calculate_eval_batch_loss(self, batch):
            output = super().calculate_eval_batch_loss(batch)
            return {"loss": output["loss"], "batch_size": output["batch_size"]}

    trainer = make_trainer([MetricsCallback(MeanSquaredError())], trainer_class=WithoutOutputs)
    with pytest.raises(ValueError, match="Cannot find predictions and targets") as caught:
        trainer.evaluate(make_data())
    assert not hasattr(caught.value, "__notes__")


def test_metrics_of_labels_say_that_targets_are_none():
    data = TensorDataset(inputs := torch.randn(4, 3), inputs.sum(1, keepdim=True))
    model = nn.Linear(3, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), (), metrics="accuracy")
    with pytest.raises(RuntimeError) as caught:
        trainer.evaluate(data)
    assert "The targets are not labels. For regression, name metrics such as 'mae' and 'r2'." in caught.value.__notes__
