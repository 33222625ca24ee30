"""Evaluation: each sample counts once, at any interval, on any processes, and the training stays as it is."""

from __future__ import annotations

import shutil
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accel_lite.data import OwnShard
from tests.launching import only_with_soak, run_elastic_script, some_of
from tests.ranks import IN_ORDER, OrderedStream, world_size
from tests.scripts.all_callbacks import run_with_all
from tests.scripts.resumable import CopyStates, run
from tests.shared_trainings import evaluate_inside
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    normed_model,
    on_one_process,
    raises_at,
    weights,
)


def _classes(size: int) -> TensorDataset:
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


def _classifier() -> nn.Module:
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
    """Gathers as with Accelerate, for a ``GathersForMetrics``, which notes what it gathers."""

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


class GathersForMetrics(Trainer):
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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trained_weights_are_the_same_with_and_without_it(accumulation):
    weights, histories = [], []
    for callbacks in ([], [StepBasedEvaluationCallback(2)]):
        torch.manual_seed(0)
        model = normed_model()
        trainer = adamw_trainer(model, callbacks=callbacks)
        trainer.train(float64_data(48), 2, float64_data(9), 4, gradient_accumulation_steps=accumulation)
        weights.append(model.state_dict())
        histories.append(trainer.run_history.to_dict())
    assert equal_weights(*weights)
    plain, stepped = histories
    assert len(stepped.pop("intermediate_eval_loss")) == 24 // accumulation // 2
    assert stepped == plain


def test_a_trainer_with_its_own_loader_evaluates_without_data():
    data = float64_data(9)

    class Own(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return DataLoader(data, batch_size=batch_size)

    model = float64_model()
    within = listener(on_train_epoch_end=lambda t: losses.append(t.evaluate()))
    losses: list[dict[str, float]] = []
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[within])
    trainer.train(float64_data(8), 1)
    losses.append(trainer.evaluate())
    assert losses == 2 * [trainer.evaluate(data)]
    assert losses[0]["evaluation_loss"] > 0
    assert "eval_loss_epoch" not in trainer.run_history.get_metric_names()
    assert len(trainer.predict(None)) == 9


def summed(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y) + len(samples)


def evaluated_batches(eval_dataset: Any, evaluate: dict[str, Any], **train: Any) -> tuple[list[Any], list[Any]]:
    """The targets of the batches that a training, and ``evaluate()`` after it, evaluate on."""
    seen: list[Any] = []
    note = listener(on_eval_step_end=lambda t, batch, **_: seen.append(batch[1].flatten().tolist()))
    trainer = adamw_trainer(float64_model(), callbacks=[note], seed=1)
    trainer.train(float64_data(8), 1, eval_dataset, sanity_check=False, **train)
    in_training = seen.copy()
    seen.clear()
    trainer.evaluate(**evaluate)
    return in_training, seen


EVALUATED = float64_data(37)
PART = DataLoader(EVALUATED, 5, sampler=range(16, 32), drop_last=True)


@pytest.mark.parametrize(
    ("eval_dataset", "train"),
    [
        (PART, {}),
        (PART, {"collate_fn": summed, "per_device_batch_size": 3}),  # which are for the training data alone
        ({"part": PART, "all": EVALUATED}, {"per_device_batch_size": 6}),
        pytest.param(OwnShard([EVALUATED[:5], EVALUATED[5:7]]), {}, marks=pytest.mark.extension("streams")),
        (EVALUATED, {"collate_fn": summed, "per_device_batch_size": 6}),
        (EVALUATED, {"eval_dataloader_kwargs": {"sampler": range(7, 20), "batch_size": 5, "drop_last": True}}),
        (EVALUATED, {"eval_dataloader_kwargs": {"collate_fn": summed}, "per_device_batch_size": 6}),
    ],
)
def test_evaluate_alone_reads_what_the_training_evaluated(eval_dataset, train):
    in_training, after = evaluated_batches(eval_dataset, {}, **train)
    assert after == in_training != []


def test_arguments_of_evaluate_come_before_those_of_the_training():
    kwargs = {"batch_size": 5, "collate_fn": summed, "sampler": range(20)}
    train = {"eval_dataloader_kwargs": kwargs, "per_device_batch_size": 5}

    def read(**evaluate: Any) -> list[Any]:
        return evaluated_batches(EVALUATED, evaluate, **train)[1]

    assert [len(batch) for batch in read(per_device_batch_size=16)] == [16, 4]
    assert [len(batch) for batch in read(per_device_batch_size=8)] == [8, 8, 4]
    assert read(collate_fn=torch.utils.data.default_collate)[0] == EVALUATED.tensors[1][:5].flatten().tolist()
    assert [len(batch) for batch in read(dataloader_kwargs={})] == [5] * 7 + [2]
    assert [len(batch) for batch in read(dataset=float64_data(9))] == [8, 1]
    with pytest.raises(ValueError, match="per_device_batch_size=7 is for a dataset, but dataset is a loader"):
        evaluated_batches(PART, {"per_device_batch_size": 7})


def test_an_own_loader_gets_the_data_of_the_training_again():
    class Own(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            asked.append((self.eval_dataset, self.collate_fn, batch_size, eval_dl_kwargs))
            return super().create_eval_dataloader(batch_size, eval_dl_kwargs)

    asked: list[Any] = []
    model = float64_model()
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[])
    trainer.train(float64_data(8), 1, PART, 16, eval_dataloader_kwargs={"timeout": 0}, sanity_check=False)
    trainer.evaluate()
    assert asked == 2 * [(PART, None, 16, {"timeout": 0})]


def test_run_evaluation_restores_modes_losses_and_generators():
    class Looks(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            trainer.model[0].eval()
            before = trainer.running_loss, torch.get_rng_state(), np.random.get_state()[1].copy()
            losses = trainer.run_evaluation(prefix="mine_")
            assert losses == trainer.run_evaluation(prefix="mine_")
            assert losses.keys() == {"intermediate_eval_loss"}
            assert trainer.running_loss == before[0]
            assert torch.equal(torch.get_rng_state(), before[1])
            assert np.array_equal(np.random.get_state()[1], before[2])
            assert not trainer.model[0].training
            assert trainer.model[1].training

        def on_eval_step_end(self, trainer, **kwargs):
            assert not any(module.training for module in trainer.model.modules())

    trainer = adamw_trainer(normed_model(), callbacks=[Looks])
    trainer.train(float64_data(16), 1, float64_data(9))
    assert len(trainer.run_history.get_metric_values("mine_intermediate_eval_loss")) == 4


def test_several_datasets_are_evaluated_by_name():
    trainer = adamw_trainer(float64_model(), callbacks=[StepBasedEvaluationCallback(2)])
    trainer.train(float64_data(16), 1, {"a": float64_data(9), "b": float64_data(4)})
    names = trainer.run_history.get_metric_names()
    assert {"a_intermediate_eval_loss", "b_intermediate_eval_loss", "a_eval_loss_epoch"} <= set(names)


def test_an_evaluation_within_an_epoch_is_printed_immediately(capsys):
    trainer = adamw_trainer(float64_model(), callbacks=[LogMetricsCallback, StepBasedEvaluationCallback(2)])
    trainer.train(float64_data(32), 1, float64_data(9))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "intermediate_eval_loss",
        "intermediate_eval_loss",
        "train_loss_epoch",
        "eval_loss_epoch",
    ]


def test_a_run_evaluated_within_epochs_resumes_to_the_same_bits(tmp_path):
    extra = (StepBasedEvaluationCallback(2), CopyStates(tmp_path))
    whole = run(tmp_path, resume_from=None, extra=extra, save_every_n_epochs=1)
    for copy in sorted((tmp_path / "copies").glob("*/update-*"))[::4]:
        again = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, extra=extra[:1])
        assert again["history"] == whole["history"]
        assert equal_weights(again["weights"], whole["weights"])


def test_evaluation_after_every_nth_epoch_and_the_last(tmp_path):
    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.0)
    best = SaveBestModelCallback(tmp_path / "best.pt", load_saved_checkpoint=False)
    model = float64_model()
    trainer = adamw_trainer(model, callbacks=[best, stop], optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    trainer.train(float64_data(16), 5, float64_data(9), eval_every_n_epochs=2)
    assert trainer.progress.epochs_completed == 5
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 3
    assert trainer.run_history.to_dataframe()["eval_loss_epoch"].dropna().index.tolist() == [2, 4, 5]
    assert best.best_metric_epoch == 5
    # A metric that is never recorded is pointed out as soon as it was due.
    stop = EarlyStoppingCallback(watch_metric="accuracy", greater_is_better=True)
    trainer = adamw_trainer(float64_model(), callbacks=[stop, listener()])
    with pytest.raises(ValueError, match=r"EarlyStoppingCallback\(watch_metric='accuracy'\): the run has not"):
        trainer.train(float64_data(16), 5, float64_data(9), eval_every_n_epochs=2)
    assert trainer.progress.epoch == 2


def only_within_epochs(callbacks: list[Any], epochs: int = 3, rises: bool = False, **kwargs: Any) -> Trainer:
    """Six updates in an epoch, and an evaluation after every fourth and after the last.

    Args:
        rises: whether the loss rises, so that the first evaluation is the best
    """
    model = float64_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, maximize=rises)
    trainer = adamw_trainer(model, optimizer=optimizer, callbacks=callbacks, seed=1)
    data = {"train_dataset": float64_data(24), "eval_dataset": float64_data(9), "per_device_batch_size": 4}
    trainer.train(num_epochs=epochs, evaluate_every="4 updates", **(data | kwargs))
    return trainer


def losses_after_updates(epochs: int) -> dict[int, float]:
    """The evaluation losses of that run, by update, computed apart."""
    found = {}

    def evaluate(trainer: Any, **kwargs: Any) -> None:
        if trainer.progress.update % 4 == 0 or trainer.progress.update == 6 * epochs:
            apart = adamw_trainer(deepcopy(trainer.get_model()), callbacks=[])
            found[trainer.progress.update] = apart.evaluate(float64_data(9), 4)["evaluation_loss"]

    trainer = adamw_trainer(float64_model(), callbacks=[listener(on_update_end=evaluate)], seed=1)
    trainer.train(float64_data(24), epochs, per_device_batch_size=4)
    return found


@pytest.mark.extension("metrics")
def test_evaluations_within_epochs_are_those_of_the_run(tmp_path):
    from pytorch_accel_lite.callbacks import MetricsCallback

    best = SaveBestModelCallback(tmp_path / "best.pt")
    squares = MetricsCallback({"squares": MeanSquaredError()})
    trainer = only_within_epochs([squares, best])
    expected = losses_after_updates(3)
    assert trainer.run_history.get_metric_values("eval_loss_epoch") == list(expected.values())
    assert trainer.run_history.get_metric_values("squares") == pytest.approx(list(expected.values()))
    assert "intermediate_eval_loss" not in trainer.run_history
    assert best.best_metric == min(expected.values())
    assert trainer.evaluate(float64_data(9), 4)["evaluation_loss"] == best.best_metric, "the weights of that update"
    plain = adamw_trainer(float64_model(), seed=1)
    plain.train(float64_data(24), 3, per_device_batch_size=4)
    again = only_within_epochs([])
    assert equal_weights(weights(again.model), weights(plain.model))


@pytest.mark.parametrize(("patience_in", "update"), [("evaluations", 12), ("epochs", 18)])
def test_early_stopping_counts_evaluations_within_epochs(patience_in, update):
    stopping = EarlyStoppingCallback(2, 1e9, patience_in=patience_in)  # nothing is an improvement
    assert only_within_epochs([stopping], epochs=9).progress.update == update


@pytest.mark.sampled
@pytest.mark.parametrize("saves_first", [True, False])
def test_the_best_model_within_an_epoch_stays_after_a_resume(saves_first, tmp_path):
    def run(folder: str, **kwargs: Any) -> Any:
        best = SaveBestModelCallback(tmp_path / folder / "best.pt", load_saved_checkpoint=False)
        states = SaveTrainingStateCallback(tmp_path / folder / "states", save_every_n_steps=1)
        only_within_epochs([states, best] if saves_first else [best, states], 2, rises=True, **kwargs)
        return best.best_metric, best.best_metric_epoch, torch.load(best.save_path)["model_state_dict"]

    whole = run("whole")
    shutil.copytree(tmp_path / "whole/states", tmp_path / "states")
    for state in sorted((tmp_path / "states").glob("update-*")):
        folder = f"after-{state.name}"
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "whole/best.pt", tmp_path / folder)
        *found, saved = run(folder, resume_from=state)
        assert (found, equal_weights(saved, whole[2])) == ([*whole[:2]], True), state.name


def test_a_schedule_may_follow_evaluations_within_epochs():
    trainer = only_within_epochs(
        [],
        create_scheduler_fn=partial(ReduceLROnPlateau, patience=0, threshold=1e9),
        scheduler_interval="epoch",
        scheduler_metric="eval_loss_epoch",
    )
    assert trainer.scheduler.last_epoch == 5, "one step for each evaluation"
    assert trainer.optimizer.param_groups[0]["lr"] < 0.01


class FailsOnStep(ReduceLROnPlateau):
    """A schedule that cannot be stepped."""

    def step(self, metrics: Any, epoch: Any = None) -> None:
        raise ArithmeticError("of the schedule")


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("of the callback"), OSError), (StopTrainingError("enough"), ArithmeticError), (None, ArithmeticError)],
)
def test_a_schedule_hides_no_error_of_an_evaluation(error, raised):
    callbacks = [] if error is None else [raises_at(4, error, "on_eval_epoch_end")]
    with pytest.raises(raised, match="of the"):
        only_within_epochs(
            callbacks,
            create_scheduler_fn=FailsOnStep,
            scheduler_interval="epoch",
            scheduler_metric="eval_loss_epoch",
            sanity_check=False,
        )


@pytest.mark.extension("model_ema")
def test_an_averaged_model_is_evaluated_whenever_the_model_is(tmp_path):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    def train(resume_from: Path | None = None) -> dict[str, Any]:
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        ema = ModelEmaCallback(0.5, save_path=tmp_path / "ema.pt")
        history = only_within_epochs([states, ema], 2, resume_from=resume_from).run_history
        return {name: history[name] for name in history if "eval" in name}

    whole = train()
    assert len(whole["ema_model_eval_loss_epoch"]) == len(whole["eval_loss_epoch"]) == 3
    assert whole["ema_model_eval_loss_epoch"] != whole["eval_loss_epoch"]
    shutil.copytree(tmp_path / "states", tmp_path / "copies")
    for state in sorted((tmp_path / "copies").glob("update-*")):
        assert train(state) == whole, state.name


def test_nothing_watches_evaluations_that_are_not_made():
    with pytest.raises(
        ValueError, match=r"watch_metric='intermediate_eval_loss'.*Did you mean|It records: .*eval_loss_ep"
    ):
        only_within_epochs([SaveBestModelCallback(watch_metric="intermediate_eval_loss")])


def test_evaluations_refuse_bad_intervals_and_missing_data():
    with pytest.raises(ValueError, match="eval_every_n_steps=0 must be at least 1"):
        StepBasedEvaluationCallback(0)
    with pytest.raises(ValueError, match="eval_every_n_epochs=0 must be at least 1"):
        adamw_trainer(float64_model()).train(float64_data(8), 1, eval_every_n_epochs=0)
    with pytest.raises(ValueError, match="Pass eval_dataset to train"):
        adamw_trainer(float64_model(), callbacks=[StepBasedEvaluationCallback(1)]).train(float64_data(8), 1)
    with pytest.raises(RuntimeError, match=r"call evaluate\(dataset\)"):
        adamw_trainer(nn.Linear(5, 1).double()).run_evaluation()


@only_with_soak
@pytest.mark.processes
@pytest.mark.extension(
    "failed_batches", "gradient_spikes", "metrics", "model_ema", "nan_report", "pytorch_accelerated", "unfreezing"
)
def test_all_callbacks_resume_the_same_bits_on_two_processes(tmp_path, job):
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    killed = run_elastic_script(2, "tests/scripts/all_callbacks.py", str(tmp_path / "killed"), "5")
    assert killed.returncode != 0
    assert (tmp_path / "killed" / "killed").exists()
    whole = job(2).run(run_with_all, tmp_path / "whole")
    again = job(2).run(run_with_all, tmp_path / "killed", 5)
    results = [whole[0], again[0]]
    assert "Resuming from" in again.output
    assert results[0]["processes"] == 2
    assert results[0]["progress"]["update"] == 9
    assert len(results[0]["history"]["intermediate_mae"]) == 4
    for name in ("history", "order", "progress"):
        assert results[0][name] == results[1][name]
    for name in ("weights", "ema"):
        assert equal_weights(results[0][name], results[1][name])
    # Only the first process of a machine prints.
    assert whole.output.count("Starting epoch 1/3") == 1


def dataset_sizes() -> Any:
    """Loss, metric and predictions for dataset sizes from 1 to 20."""
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")  # by torchmetrics, on ranks without samples
    results = {}
    model = _classifier()
    trainer = AccuracyTrainer(model, nn.CrossEntropyLoss(), None, callbacks=[])
    for size in some_of(range(1, 21)):
        data = _classes(size)
        metrics = trainer.evaluate(data, per_device_batch_size=3)
        predictions = trainer.predict(data, per_device_batch_size=3)
        results[size] = metrics, predictions
    return results


def test_evaluation_counts_every_sample_once_for_any_size(ranks):
    for result in ranks(dataset_sizes):
        assert result.keys() == on_one_process(dataset_sizes).keys() == set(some_of(range(1, 21)))
        for size, (metrics, predictions) in result.items():
            expected_metrics, expected = on_one_process(dataset_sizes)[size]
            assert metrics == pytest.approx(expected_metrics, abs=1e-10)
            assert predictions.shape == expected.shape == (size, 3)
            assert torch.allclose(predictions, expected, atol=1e-12, rtol=0)
            assert torch.equal(predictions, ranks(dataset_sizes)[0][size][1])  # the same on every process


def gather_in_evaluation() -> Any:
    results = {}
    for size in some_of(range(world_size(), 25)):
        gathers = GathersEveryBatch()
        trainer = Trainer(float64_model(), nn.MSELoss(), None, callbacks=[gathers])
        trainer.evaluate(float64_data(size), per_device_batch_size=3)
        results[size] = torch.cat(gathers.seen)
    return results


def test_gathering_evaluation_batches_gives_the_data_in_order(ranks):
    for result in ranks(gather_in_evaluation):
        assert result.keys() == set(some_of(range(ranks.world_size, 25)))
        for size, inputs in result.items():
            assert torch.equal(inputs, float64_data(size).tensors[0])


def gather_for_metrics() -> Any:
    """The result of Accelerate's method for 37 samples by batch size, of map data and of a stream."""
    results = {}
    for batch_size in (1, 3, 5):
        for kind in ("map", "stream"):
            data = float64_data(37)
            trainer = GathersForMetrics()
            given = data if kind == "map" else OrderedStream(data)
            metrics = trainer.evaluate(given, batch_size, None if kind == "map" else {"num_workers": 0})
            results[kind, batch_size] = trainer.found() | metrics
    return results


@pytest.mark.thorough
@pytest.mark.extension("streams")
def test_gather_for_metrics_gives_every_evaluated_sample_once(ranks):
    x, y = float64_data(37).tensors
    loss = nn.functional.mse_loss(float64_model()(x), y).item()
    results = ranks(gather_for_metrics)
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


def gather_for_metrics_in_training() -> Any:
    """Its result in training, when the last step has fewer samples than ranks."""
    data = float64_data(4 * world_size() + 1)
    trainer = GathersForMetrics()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
    return torch.equal(torch.cat(trainer.seen["train"]), data.tensors[1])


def test_gather_for_metrics_gathers_batches_of_training(ranks):
    assert all(ranks(gather_for_metrics_in_training))


def test_evaluating_within_a_run_leaves_no_trace_in_it(ranks):
    for result in [*ranks(evaluate_inside), on_one_process(evaluate_inside)]:
        without, within = result[0], result[1]
        assert equal_weights(without[0], within[0])
        assert without[1] == within[1]
        assert result["metrics"].keys() == {"evaluation_loss"}
        assert result["training"]
