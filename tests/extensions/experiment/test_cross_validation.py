"""Cross-validation: any splitter, predictions in the order of the dataset, resumed fold by fold."""

from __future__ import annotations

import math
import os
import re
import signal
import statistics
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import model_selection as splitters
from sklearn.model_selection import KFold
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset, TensorDataset
from torchmetrics import MeanAbsoluteError

from pytorch_accel_lite import Trainer, cross_validate
from pytorch_accel_lite.callbacks import RunPausedError, SaveTrainingStateCallback
from pytorch_accel_lite.experiment import CrossValidation, Experiment
from tests.extensions.experiment import parts
from tests.extensions.experiment.parts import Net, load_data
from tests.extensions.experiment.small_experiment import FILE
from tests.launching import run_forked, some_of
from tests.ranks import shared_folder
from tests.small_models import raises_at

SIZE = 12
LABELS = [index % 3 for index in range(SIZE)]
GROUPS = [index // 2 for index in range(SIZE)]
DATA = TensorDataset(torch.arange(4.0 * SIZE).view(SIZE, 4).sin(), torch.arange(1.0 * SIZE).view(SIZE, 1).cos())
ARGUMENTS: dict[str, Any] = {"num_epochs": 2, "per_device_batch_size": 2, "seed": 0}


def fold_trainer(folder: Path, *callbacks: Any) -> Trainer:
    from pytorch_accel_lite.callbacks import MetricsCallback

    model = parts.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    metrics = MetricsCallback({"error": MeanAbsoluteError()})
    return Trainer(model, nn.MSELoss(), optimizer, [metrics, *callbacks], seed=0)


def saving(folder: Path, *callbacks: Any) -> Trainer:
    return fold_trainer(folder, SaveTrainingStateCallback(folder / "states", save_every_n_steps=1), *callbacks)


class OneFails(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("This sample cannot be read.")
        return DATA[index]


@pytest.mark.extension("failed_batches")
def test_predictions_that_lack_samples_are_not_put_together(tmp_path):
    from pytorch_accel_lite.callbacks import SkipFailedBatchesCallback

    def skipping(folder: Path) -> Trainer:
        phases = ("training", "evaluation", "prediction")
        return fold_trainer(folder, SkipFailedBatchesCallback(phases=phases))

    result = cross_validate(skipping, OneFails(), splitters.KFold(3), save_dir=tmp_path, **ARGUMENTS)
    with (
        pytest.warns(UserWarning, match="were left out"),
        pytest.raises(ValueError, match="fold-2 has 2 predictions for 4"),
    ):
        _ = result.predictions


@pytest.fixture(scope="module")
def cross_validation(tmp_path_factory) -> CrossValidation:
    folder = tmp_path_factory.mktemp("folds")
    return cross_validate(saving, DATA, splitters.KFold(3), save_dir=folder, **ARGUMENTS)


@pytest.mark.extension("metrics")
def test_each_fold_is_trained_on_others_and_tested_on_its_own(cross_validation):
    assert [fold.test_indices for fold in cross_validation.folds] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    fold = cross_validation.folds[1]
    torch.manual_seed(0)
    trainer = fold_trainer(fold.folder)
    train, test = (TensorDataset(*DATA[indices]) for indices in (fold.train_indices, fold.test_indices))
    torch.manual_seed(0)
    trainer.model.load_state_dict(parts.Net().state_dict())  # as created after seeding
    trainer.train(train, 2, test, 2)
    assert trainer.evaluate(test, 2) == fold.metrics
    assert torch.equal(trainer.predict(test, 2), fold.predictions)


@pytest.mark.thorough
@pytest.mark.slow
def test_predictions_are_in_the_order_of_the_dataset(cross_validation, tmp_path):
    assert torch.equal(cross_validation.predictions, torch.cat([fold.predictions for fold in cross_validation.folds]))
    errors = (cross_validation.predictions - DATA.tensors[1]).abs().flatten()
    for fold in cross_validation.folds:
        assert errors[fold.test_indices].mean().item() == pytest.approx(fold.metrics["error"], rel=1e-5)
    shuffled = splitters.KFold(3, shuffle=True, random_state=1)
    other = cross_validate(fold_trainer, DATA, shuffled, save_dir=tmp_path, **ARGUMENTS)
    fold = other.folds[2]
    assert fold.test_indices != [8, 9, 10, 11]
    assert torch.equal(other.predictions[fold.test_indices], fold.predictions)


@pytest.mark.extension("metrics")
def test_metrics_have_a_mean_and_a_deviation_and_a_table(cross_validation):
    errors = [fold.metrics["error"] for fold in cross_validation.folds]
    assert cross_validation.mean["error"] == statistics.fmean(errors)
    assert cross_validation.deviation["error"] == statistics.stdev(errors)
    lines = repr(cross_validation).splitlines()
    assert lines[0] == (
        "Cross-validation: 3 folds of 12 samples by KFold(n_splits=3, random_state=None, shuffle=False)"
    )
    assert lines[1].split() == ["fold", "train", "test", "error", "evaluation_loss"]
    assert [line.split()[0] for line in lines[2:]] == ["fold-1", "fold-2", "fold-3", "mean", "deviation"]
    assert lines[2].split()[1:3] == ["8", "4"]
    assert lines[5].split()[-1] == f"{cross_validation.mean['evaluation_loss']:.4f}"
    table = cross_validation.to_dataframe()
    assert table.index.tolist() == ["fold-1", "fold-2", "fold-3"]
    assert table["error"].tolist() == errors


@pytest.mark.extension("metrics")
def test_columns_that_do_not_fit_the_terminal_follow_below(cross_validation, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = repr(cross_validation).splitlines()[1:]
    assert all(len(line) <= 40 for line in lines)
    assert [line.split()[0] for line in lines if line].count("fold-1") == 2


@pytest.mark.thorough
@pytest.mark.extension("metrics")
@pytest.mark.soak
@pytest.mark.parametrize(
    ("splitter", "further"),
    some_of(
        [
            (splitters.StratifiedKFold(2), {"y": torch.tensor(LABELS)}),
            (splitters.GroupKFold(2), {"groups": GROUPS}),
            (splitters.StratifiedGroupKFold(2), {"y": LABELS, "groups": GROUPS}),
            (splitters.PredefinedSplit([0] * 6 + [1] * 6), {}),
            ([(range(6), range(6, 12)), (range(6, 12), range(6))], {}),
        ]
    ),
    ids=lambda value: type(value).__name__,
)
def test_complete_splitters_have_all_predictions(splitter, further, tmp_path):
    arguments = ARGUMENTS | {"max_num_train_steps": 1} | further
    found = cross_validate(fold_trainer, DATA, splitter, save_dir=tmp_path, **arguments)
    assert found.predictions.shape == (SIZE, 1)
    for fold in found.folds:
        if "y" in further:
            assert Counter(LABELS[index] for index in fold.test_indices) == {0: 2, 1: 2, 2: 2}
        if "groups" in further:
            assert {GROUPS[i] for i in fold.train_indices}.isdisjoint(GROUPS[i] for i in fold.test_indices)


@pytest.mark.extension("metrics")
@pytest.mark.soak
@pytest.mark.parametrize(
    "splitter", some_of([splitters.ShuffleSplit(2, test_size=4, random_state=0), splitters.TimeSeriesSplit(2)])
)
def test_incomplete_splitters_have_predictions_by_fold(splitter, tmp_path):
    arguments = ARGUMENTS | {"max_num_train_steps": 1}
    found = cross_validate(fold_trainer, DATA, splitter, save_dir=tmp_path, **arguments)
    with pytest.raises(ValueError, match="does not test each of the 12 samples exactly once"):
        _ = found.predictions
    assert [len(fold.predictions) for fold in found.folds] == [4, 4]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_killed_cross_validation_continues_to_the_same_bits(cross_validation, tmp_path, capsys):
    # A run has 8 updates in its 2 epochs; the 3rd kill comes before any state of its fold has been saved.
    for step, fold in ((5, "fold-1"), (3, "fold-2"), (1, "fold-3")):

        def killed(step: int = step, fold: str = fold) -> None:
            def dies(folder: Path) -> Trainer:
                return saving(folder, *([parts.KillAt(step)] if folder.name == fold else []))

            cross_validate(dies, DATA, splitters.KFold(3), save_dir=tmp_path, resume=True, **ARGUMENTS)

        assert run_forked(killed).returncode == -signal.SIGKILL
    capsys.readouterr()
    found = cross_validate(saving, DATA, splitters.KFold(3), save_dir=tmp_path, resume=True, **ARGUMENTS)
    assert [fold.metrics for fold in found.folds] == [fold.metrics for fold in cross_validation.folds]
    assert torch.equal(found.predictions, cross_validation.predictions)
    assert re.findall(r"(fold-\d) is finished: skipped", capsys.readouterr().out) == ["fold-1", "fold-2"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_fold_whose_training_is_paused_is_not_tested_yet(cross_validation, tmp_path):
    def pauses(folder: Path) -> Trainer:
        return saving(folder, *([raises_at(3, RunPausedError("The time is up."))] if folder.name == "fold-2" else []))

    with pytest.raises(RunPausedError, match=r"The time is up\. .*fold-2 is not finished: .* with resume=True"):
        cross_validate(pauses, DATA, splitters.KFold(3), save_dir=tmp_path, **ARGUMENTS)
    assert sorted(path.parent.name for path in tmp_path.glob("*/fold.json")) == ["fold-1"]
    found = cross_validate(saving, DATA, splitters.KFold(3), save_dir=tmp_path, resume=True, **ARGUMENTS)
    assert [fold.metrics for fold in found.folds] == [fold.metrics for fold in cross_validation.folds]


@pytest.mark.extension("metrics")
@pytest.mark.thorough
def test_only_a_resumed_cross_validation_keeps_its_drawn_split(tmp_path, capsys):
    splitter = splitters.KFold(2, shuffle=True)
    arguments = ARGUMENTS | {"max_num_train_steps": 1, "save_dir": tmp_path, "seed": None}
    first = cross_validate(fold_trainer, DATA, splitter, **arguments)
    resumed = cross_validate(fold_trainer, DATA, splitter, resume=True, **arguments)
    assert resumed.rows() == first.rows()
    assert [fold.test_indices for fold in resumed.folds] == [fold.test_indices for fold in first.folds]
    (tmp_path / "fold-2" / "from before").touch()
    (tmp_path / "fold-scores.png").touch()
    capsys.readouterr()
    cross_validate(fold_trainer, DATA, splitters.KFold(2), **arguments)
    assert "skipped" not in capsys.readouterr().out
    assert not (tmp_path / "fold-2" / "from before").exists()
    assert (tmp_path / "fold-scores.png").exists()
    with pytest.raises(ValueError, match=r"has a cross-validation with splitter=KFold\(n_splits=2.* not KFold\(n_spl"):
        cross_validate(fold_trainer, DATA, splitters.KFold(3), resume=True, **arguments)
    with pytest.raises(ValueError, match="has a cross-validation with num_epochs=2, not 3"):
        cross_validate(fold_trainer, DATA, splitters.KFold(2), resume=True, **arguments | {"num_epochs": 3})


def once(folder: Path, made: list[Trainer] = []) -> Trainer:  # noqa: B006
    """A trainer that is made once only."""
    if not made:
        made.append(fold_trainer(folder))
    return made[0]


class Stream(IterableDataset):
    def __iter__(self):
        yield from DATA


@pytest.mark.extension("metrics")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"make_trainer": once}, ValueError, "returned the Trainer of an earlier fold"),
        ({"make_trainer": lambda: None}, TypeError, r"must take one argument, the folder .*def make_trainer\(folder\)"),
        (
            {"make_trainer": Trainer(torch.nn.Linear(1, 1), None, None)},
            TypeError,
            "make_trainer=.* must be a function that returns a new",
        ),
        ({"dataset": Stream()}, TypeError, "dataset=.* must be a dataset with a length and indices"),
        ({"splitter": splitters.KFold}, TypeError, r"splitter=.* must be a splitter .* such as KFold\(5\)"),
        ({"splitter": 5}, TypeError, "splitter=5 must be a splitter of scikit-learn"),
        ({"splitter": splitters.StratifiedKFold(2)}, TypeError, "at least 1 dimension|Singleton array"),
        ({"splitter": splitters.GroupKFold(2), "y": LABELS}, ValueError, "'groups'"),
        ({"splitter": splitters.KFold(13)}, ValueError, "n_splits=13 greater than"),
        ({"splitter": [([0, 1], [1, 2])]}, ValueError, "fold 1 has sample 1 to train on and to test"),
        ({"splitter": [([0, 1], [12])]}, ValueError, "fold 1 has sample 12 .* a dataset of 12 samples"),
        ({"splitter": [([0, 1], [-1])]}, ValueError, "fold 1 has sample -1 .* a dataset of 12 samples"),
        ({"splitter": [([0, 1], [0.5])]}, TypeError, "a split must consist of indices, not of float64"),
        ({"num_epoch": 3}, TypeError, "has no argument 'num_epoch'"),
        ({"eval_dataset": DATA}, TypeError, r"cross_validate\(\) sets eval_dataset itself"),
    ],
)
def test_invalid_cross_validations_are_refused(changes, error, message, tmp_path):
    arguments = {"make_trainer": fold_trainer, "dataset": DATA, "splitter": splitters.KFold(2), "save_dir": tmp_path}
    with pytest.raises(error, match=message):
        cross_validate(**{**arguments, **ARGUMENTS, "max_num_train_steps": 1, **changes})
    if "splitter" in changes:
        assert not [*tmp_path.glob("fold-*")]


@pytest.mark.parametrize("name", ["num_epoch", "own"])
def test_unknown_arguments_leave_earlier_results(tmp_path, name):
    class Own(Trainer):
        def train(self, train_dataset, own=0, *, eval_dataset, **arguments):
            super().train(train_dataset, eval_dataset=eval_dataset, max_num_train_steps=own, **arguments)

    def make(folder):
        model = parts.Net()
        return (Own if name == "own" else Trainer)(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), [])

    (tmp_path / "fold-1").mkdir()
    (tmp_path / "splits.json").touch()
    refused = nullcontext() if name == "own" else pytest.raises(TypeError, match=f"'{name}': Did you mean 'num_epochs'")
    with refused:
        cross_validate(make, DATA, [(range(6), range(6, 12))], save_dir=tmp_path, predictions=False, **{name: 1})
    assert [*tmp_path.glob("fold-1")]


@pytest.mark.extension("metrics")
def test_the_deviation_of_one_fold_is_unknown(tmp_path):
    arguments = ARGUMENTS | {"max_num_train_steps": 1}
    found = cross_validate(fold_trainer, DATA, [(range(6), range(6, 12))], save_dir=tmp_path, **arguments)
    assert found.mean["error"] == found.folds[0].metrics["error"]
    assert math.isnan(found.deviation["error"])
    assert os.listdir(tmp_path / "fold-1") != []


@pytest.mark.thorough
def test_an_experiment_file_describes_the_trainer_of_each_fold(tmp_path):
    pytest.importorskip("jsonargparse")
    states = "callbacks: [{class_path: SaveTrainingStateCallback, init_args: {save_every_n_epochs: 1}}]\n"
    (tmp_path / "small.yaml").write_text(FILE + states)

    def from_file(folder: Path) -> Trainer:
        overrides = {"output_dir": str(folder), "overwrite": True}
        return Experiment.from_file(tmp_path / "small.yaml", overrides).trainer

    first = cross_validate(from_file, DATA, splitters.KFold(2), save_dir=tmp_path / "folds", num_epochs=1)
    (first.folds[1].folder / "fold.json").unlink()  # as a kill before the end of the fold leaves it
    again = cross_validate(from_file, DATA, splitters.KFold(2), save_dir=tmp_path / "folds", num_epochs=1, resume=True)
    assert again.rows() == first.rows()
    assert sorted(os.listdir(tmp_path / "folds")) == ["fold-1", "fold-2", "splits.json"]
    for fold in again.folds:
        assert {"experiment.yaml", "metrics.jsonl", "training_states", "fold.json"} <= {*os.listdir(fold.folder)}


def validated() -> tuple[list[dict[str, Any]], list[list[int]], torch.Tensor, torch.Tensor]:
    """The metrics and test indices of each fold, the predictions, and the losses of each sample that follow."""
    torch.manual_seed(0)
    data = load_data(11)

    def fold_trainer(folder):
        model = Net()
        return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), (), seed=0)

    with shared_folder() as folder:
        # Without a random_state, each rank would draw another split.
        splitter = KFold(3, shuffle=True)
        result = cross_validate(fold_trainer, data, splitter, save_dir=folder / "cv", num_epochs=1)
        again = cross_validate(fold_trainer, data, splitter, save_dir=folder / "cv", num_epochs=1, resume=True)
        assert [fold.metrics for fold in again.folds] == [fold.metrics for fold in result.folds]
        predictions = result.predictions
        losses = (predictions - data.tensors[1]).square().flatten()
        return (
            [fold.metrics for fold in result.folds],
            [fold.test_indices for fold in result.folds],
            predictions,
            losses,
        )


def test_all_ranks_have_the_same_results(two_ranks):
    (metrics, indices, predictions, losses), other = two_ranks(validated)
    assert (metrics, indices) == other[:2]
    assert torch.equal(predictions, other[2])
    assert sorted(index for fold in indices for index in fold) == list(range(11))
    for found, tested in zip(metrics, indices, strict=True):
        assert losses[tested].mean().item() == pytest.approx(found["evaluation_loss"], rel=1e-5)


@pytest.mark.extension("metrics")
def test_resuming_needs_the_same_cross_validation_arguments(tmp_path):
    pairs = [([*range(4, 12)], [0, 1, 2, 3]), ([*range(8)], [8, 9, 10, 11])]
    schedule = partial(StepLR, step_size=2)
    arguments = {**ARGUMENTS, "save_dir": tmp_path, "predictions": False, "num_epochs": 1, "y": LABELS}
    arguments |= {"create_scheduler_fn": schedule, "train_dataloader_kwargs": {"drop_last": False}}
    first = cross_validate(fold_trainer, DATA, pairs, **arguments)
    alike = {"create_scheduler_fn": partial(StepLR, step_size=2), "y": torch.tensor(LABELS)}
    assert cross_validate(fold_trainer, DATA, iter(pairs), resume=True, **arguments | alike).rows() == first.rows()
    with pytest.raises(ValueError, match="has a cross-validation with splitter=other indices, not the given indices"):
        cross_validate(fold_trainer, DATA, pairs[::-1], resume=True, **arguments)
    for name, other in (
        ("create_scheduler_fn", partial(StepLR, step_size=3)),
        ("train_dataloader_kwargs", {"drop_last": True}),
        ("y", LABELS[::-1]),
        ("groups", GROUPS),
    ):
        with pytest.raises(ValueError, match=f"has a cross-validation with {name}=.*, not .* Resume it with the same"):
            cross_validate(fold_trainer, DATA, pairs, resume=True, **arguments | {name: other})


@pytest.mark.extension("metrics")
def test_wrong_arguments_remove_no_earlier_results(tmp_path):
    arguments = {"dataset": DATA, "splitter": splitters.KFold(2), "save_dir": tmp_path, **ARGUMENTS}
    cross_validate(fold_trainer, **arguments)
    kept = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(TypeError, match="must take one argument"):
        cross_validate(lambda: None, **arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == kept
