"""``SaveBestModelCallback``: what is best, and what is saved, kept and loaded."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, SaveTrainingStateCallback
from tests.shared_trainings import Scripted, scripted
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_model,
    make_trainer,
    train,
    weights,
)

# The scores of these scripts are as good as one says.
pytestmark = pytest.mark.filterwarnings("ignore:.*whether greater values are better is unknown")


@pytest.mark.parametrize(
    ("script", "greater", "best"),
    [([3, 1, 2], False, 2), ([1, 3, 2], True, 2), ([2, 2, 2], False, 1), ([5, 4, 3], False, 3), ([5, 4, 3], True, 1)],
)
def test_the_best_model_is_saved_and_loaded_at_the_end(script, greater, best, tmp_path):
    callback = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="score", greater_is_better=greater)
    trainer = scripted(script, callback)
    assert callback.best_metric == script[best - 1]
    assert callback.best_metric_epoch == best
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[best - 1])
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert equal_weights(saved["model_state_dict"], trainer.weights_after_epoch[best - 1])
    assert saved["score"] == script[best - 1]
    assert saved["epoch"] == best


def test_the_last_model_stays_if_the_best_is_not_to_be_loaded(tmp_path):
    callback = SaveBestModelCallback(tmp_path / "best.pt", "score", load_saved_checkpoint=False)
    trainer = scripted([1, 2, 3], callback)
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[2])
    assert equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], trainer.weights_after_epoch[0])


def test_the_optimizers_state_is_that_of_the_best_epoch_too(tmp_path):
    model = make_model()
    trainer = make_trainer(
        [SaveBestModelCallback(tmp_path / "best.pt", "score")],
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        trainer_class=type("Scripted", (Scripted,), {"script": [1, 2, 3]}),
    )
    train(trainer, epochs=3, size=6, eval_dataset=True)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {3}


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("scheduler", [True, False])
@pytest.mark.parametrize("script", [[1.0], [3.0, 2.0, 1.0]])
def test_a_best_model_may_omit_optimizer_and_scheduler(script, optimizer, scheduler, tmp_path):
    callback = SaveBestModelCallback(
        tmp_path / "best.pt", "score", save_optimizer=optimizer, save_scheduler=scheduler, load_saved_checkpoint=False
    )
    scripted(script, callback, create_scheduler_fn=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1))
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert ("optimizer_state_dict" in saved) == optimizer
    assert ("scheduler_state_dict" in saved) == scheduler


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize(("script", "best"), [([math.nan, 2.0, math.nan], 2), ([2.0, math.nan, math.nan], 1)])
def test_nan_is_never_the_best(script, best, greater, tmp_path):
    trainer = scripted(script, SaveBestModelCallback(tmp_path / "best.pt", "score", greater_is_better=greater))
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[best - 1])


def test_nothing_is_saved_when_all_scores_are_nan(tmp_path, capsys):
    trainer = scripted([math.nan, math.nan], SaveBestModelCallback(tmp_path / "best.pt", "score"))
    assert "No best model was saved: score never had a numeric value." in capsys.readouterr().out
    assert not (tmp_path / "best.pt").exists()
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[1])


@pytest.mark.parametrize(("error", "is_loaded"), [(ValueError, False), (KeyboardInterrupt, True)])
def test_the_best_model_is_loaded_unless_an_error_ends_the_run(error, is_loaded, tmp_path, capsys):
    class Ends(Scripted):
        script = (1.0, 2.0, 3.0)

        def train_epoch_start(self):
            super().train_epoch_start()
            if self.run_history.current_epoch == 3:
                raise error("no more")

    ends = []
    keep = listener(on_training_run_epoch_end=lambda t: ends.append(weights(t.model)))
    trainer = make_trainer([keep, SaveBestModelCallback(tmp_path / "best.pt", "score")], trainer_class=Ends)
    with pytest.raises(error):
        train(trainer, epochs=3, eval_dataset=True)
    said = capsys.readouterr().out
    assert ("Loading the best model: epoch 1" in said) == is_loaded
    assert ("The run failed, so the best model is not loaded. It is in" in said) != is_loaded
    assert equal_weights(weights(trainer.model), ends[0 if is_loaded else 1])
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert equal_weights(weights(trainer.model), ends[0])


def test_an_infinite_loss_is_worse_than_a_finite_one_after_it(tmp_path):
    trainer = scripted([math.inf, 5.0], SaveBestModelCallback(tmp_path / "best.pt", "score"))
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[1])


@pytest.mark.parametrize(
    ("make", "other", "argument"),
    [
        (SaveBestModelCallback, SaveBestModelCallback, "save_path"),
        pytest.param(
            lambda path: callbacks.ModelEmaCallback(save_path=path),
            SaveBestModelCallback,
            "save_path",
            marks=pytest.mark.extension("model_ema"),
            id="average and best",
        ),
        pytest.param(
            lambda path: callbacks.ModelEmaCallback(save_path=path),
            lambda path: callbacks.ModelEmaCallback(save_path=path),
            "save_path",
            marks=pytest.mark.extension("model_ema"),
            id="averages",
        ),
        (SaveTrainingStateCallback, SaveTrainingStateCallback, "save_dir"),
        pytest.param(
            lambda path: callbacks.MetricsFileCallback(path),
            lambda path: callbacks.MetricsFileCallback(path),
            "path",
            marks=pytest.mark.extension("metrics_file"),
            id="files of metrics",
        ),
    ],
)
def test_two_callbacks_that_would_write_to_one_path_are_refused(make, other, argument, here):
    steps: list[int] = []
    callbacks = [
        make("same.jsonl"),
        other(here / "same.jsonl"),
        listener(on_train_step_start=lambda t: steps.append(1)),
    ]
    with pytest.raises(ValueError, match=rf"{argument}=.*same.jsonl' is used by two callbacks, \w+ and \w+, which"):
        train(make_trainer(callbacks), eval_dataset=True)
    assert not steps


def test_two_best_models_by_different_metrics_are_kept(tmp_path):
    low = SaveBestModelCallback(tmp_path / "low.pt", "score", load_saved_checkpoint=False)
    high = SaveBestModelCallback(tmp_path / "high.pt", "score", greater_is_better=True)
    trainer = scripted([3, 1, 2], low, high)
    after = trainer.weights_after_epoch
    assert equal_weights(torch.load(tmp_path / "low.pt")["model_state_dict"], after[1])
    assert equal_weights(torch.load(tmp_path / "high.pt")["model_state_dict"], after[0])
    assert equal_weights(weights(trainer.model), after[0])


def test_a_metric_that_an_earlier_callback_records_is_watched(tmp_path):
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("mine", -t.progress.epoch))
    best = SaveBestModelCallback(tmp_path / "best.pt", "mine")
    train(make_trainer([record, best]), epochs=3, eval_dataset=True)
    assert best.best_metric_epoch == 3


@pytest.mark.parametrize(("last", "is_saved"), [(5.0, False), (1.0, True)])
def test_a_missing_best_model_of_a_resumed_run_is_warned_of(last, is_saved, tmp_path, capsys):
    def run(epochs: int, **kwargs: Any) -> Any:
        callbacks = SaveTrainingStateCallback(tmp_path / "states"), SaveBestModelCallback(tmp_path / "best.pt", "score")
        return scripted([2.0, 3.0, last], *callbacks, epochs=epochs, **kwargs)

    run(2)
    (tmp_path / "best.pt").unlink()
    with pytest.warns(UserWarning, match=r"save_path='.*best.pt' does not exist.*epoch 1, score: 2 .*Copy it there"):
        trainer = run(3, resume_from="latest")
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[-1])
    assert ("The best model is not in" in capsys.readouterr().out) is not is_saved
    assert (tmp_path / "best.pt").exists() is is_saved


@pytest.mark.parametrize(("last", "best"), [(3.0, None), (0.5, 4)])
def test_the_best_model_of_an_abandoned_attempt_is_not_loaded(last, best, tmp_path, capsys):
    def run(script: list[float], **kwargs: Any) -> Any:
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=2, save_at_end=False)
        callbacks = states, SaveBestModelCallback(tmp_path / "best.pt", "score")
        return scripted(script, *callbacks, epochs=len(script), **kwargs)

    run([3.0, 2.0, 1.0])  # its third epoch is as good as in no other attempt, and is not in its state
    trainer = run([3.0, 2.0, 4.0, last], resume_from="latest")
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[-1])
    says = r"The best model is not in .*best.pt', which is missing or holds another attempt's. So the model stays"
    assert bool(re.search(says, capsys.readouterr().out)) is (best is None)
    assert torch.load(tmp_path / "best.pt")["epoch"] == (best or 3)


@pytest.mark.parametrize("reset", [True, False])
def test_the_best_of_an_earlier_run_counts_only_without_a_reset(reset, tmp_path):
    callback = SaveBestModelCallback(tmp_path / "best.pt", "score", reset_on_train=reset)
    trainer = scripted([1, 2], callback)
    type(trainer).script = [4, 3]
    train(trainer, epochs=2, eval_dataset=True)
    assert callback.best_metric == (3 if reset else 1)
    assert torch.load(tmp_path / "best.pt")["score"] == callback.best_metric


def kept_scores(folder: Path) -> dict[str, float]:
    """The scores of the models that are kept, by the names of their files."""
    return {path.stem: torch.load(path)["score"] for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("second", "kept"),
    [
        ([9.0, 0.5, 9.0], {"best": 0.5, "best-epoch0002": 0.5, "best-epoch0003": 1.0}),
        ([9.0, 9.0, 1.5], {"best": 1.0, "best-epoch0002": 2.0, "best-epoch0003": 1.0}),
        ([0.5, 0.6, 0.7], {"best": 0.5, "best-epoch0001": 0.5, "best-epoch0002": 0.6}),
    ],
)
def test_models_that_are_kept_over_two_runs_are_never_removed(second, kept, tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "score", reset_on_train=False, keep=2)
    trainer = scripted([3.0, 2.0, 1.0], best)
    type(trainer).script = second
    train(trainer, epochs=3, eval_dataset=True)
    assert kept_scores(tmp_path) == kept


def found(best: SaveBestModelCallback) -> list[str]:
    return [path.stem for path in best.find_saved()]


def test_a_second_run_that_keeps_more_models_finds_them_all(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "score", reset_on_train=False)
    trainer = scripted([1.0], best)
    best.keep = 3
    type(trainer).script = [2.0, 1.0]
    train(trainer, epochs=2, eval_dataset=True)
    assert found(best) == ["best", "best-epoch0002", "best-epoch0001"]  # the best itself has no other file
    type(trainer).script = [0.5]
    train(trainer, epochs=1, eval_dataset=True)
    assert kept_scores(tmp_path) == {"best": 0.5, "best-epoch0001": 0.5, "best-epoch0002": 1.0}
    assert found(best) == ["best", "best-epoch0002"]


def test_a_resumed_run_that_keeps_more_models_finds_them_all(here):
    def run(epochs: int, keep: int) -> SaveBestModelCallback:
        best = SaveBestModelCallback(here / "kept" / "best.pt", "score", keep=keep)
        scripted([1.0, 2.0, 3.0], best, SaveTrainingStateCallback("states"), epochs=epochs, resume_from="latest")
        return best

    assert found(run(epochs=1, keep=1)) == ["best"]
    assert found(run(epochs=3, keep=3)) == ["best", "best-epoch0002", "best-epoch0003"]


def test_kept_models_are_removed_when_the_next_run_starts_over(tmp_path):
    trainer = scripted([3.0, 2.0, 1.0], SaveBestModelCallback(tmp_path / "best.pt", "score", keep=2))
    assert kept_scores(tmp_path) == {"best": 1.0, "best-epoch0002": 2.0, "best-epoch0003": 1.0}
    type(trainer).script = [8.0, 9.0]
    train(trainer, epochs=2, eval_dataset=True)
    assert kept_scores(tmp_path) == {"best": 8.0, "best-epoch0001": 8.0, "best-epoch0002": 9.0}


def test_kept_models_stay_when_a_run_continues(here):
    best = SaveBestModelCallback(here / "kept" / "best.pt", "score", keep=2)
    saver = SaveTrainingStateCallback("states", save_every_n_epochs=1)
    trainer = scripted([1.0, 2.0, 9.0], best, saver, epochs=2)
    train(trainer, epochs=3, eval_dataset=True, resume_from="latest")
    assert kept_scores(here / "kept") == {"best": 1.0, "best-epoch0001": 1.0, "best-epoch0002": 2.0}


def test_folders_of_the_best_model_are_made(tmp_path):
    scripted([1], SaveBestModelCallback(tmp_path / "some" / "where" / "best.pt", "score"))
    assert (tmp_path / "some" / "where" / "best.pt").is_file()


def test_the_best_model_is_saved_in_the_current_folder(here):
    scripted([1], SaveBestModelCallback(watch_metric="score"))
    assert Path("best_model.pt").is_file()


def test_a_metric_with_the_name_of_another_entry_is_refused():
    with pytest.raises(ValueError, match="watch_metric='epoch': files of models have an entry of this name"):
        SaveBestModelCallback(watch_metric="epoch")


@pytest.mark.parametrize("callback_class", [SaveBestModelCallback, EarlyStoppingCallback])
def test_a_watched_metric_that_was_never_recorded_is_an_error(callback_class, here):
    trainer = make_trainer([callback_class(watch_metric="eval_los_epoch")])
    with pytest.raises(ValueError, match=r"'eval_los_epoch'.: the run will not record it") as caught:
        train(trainer, eval_dataset=True)
    message = str(caught.value)
    assert "Did you mean 'eval_loss_epoch'?" in message
    assert "train_loss_epoch, eval_loss_epoch" in message


@pytest.mark.parametrize("callback_class", [SaveBestModelCallback, EarlyStoppingCallback])
def test_watching_the_evaluation_loss_without_one_is_an_error(callback_class, here):
    expected = rf"{callback_class.__name__}\(watch_metric='eval_loss_epoch'\).*train\(\) was given no eval_dataset"
    trainer = make_trainer([callback_class])
    with pytest.raises(ValueError, match=expected):
        train(trainer)
    assert trainer.progress.step == 0


def resumed(folder: Path, *stages: TrainerCallback) -> None:
    """Train an epoch with the first callback, and resume from its state for three with the second."""
    accuracies = [0.5, 0.6, 0.7, 0.8]
    for epochs, callback in zip((1, 4), stages, strict=True):
        record = listener(
            on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("accuracy", accuracies[t.progress.epoch - 1])
        )
        saver = SaveTrainingStateCallback(folder / "states", save_every_n_epochs=1)
        trainer = make_trainer([record, callback, saver], seed=0)
        train(trainer, epochs=epochs, eval_dataset=True, resume_from="latest")


WATCHING: dict[str, Any] = {
    "SaveBestModelCallback": lambda **kwargs: SaveBestModelCallback("best.pt", **kwargs),
    "EarlyStoppingCallback": lambda **kwargs: EarlyStoppingCallback(9, **kwargs),
    "ModelEmaCallback": lambda **kwargs: callbacks.ModelEmaCallback(save_path="ema.pt", **kwargs),
}
BY_NAME = [
    pytest.param(name, marks=pytest.mark.extension("model_ema")) if name == "ModelEmaCallback" else name
    for name in WATCHING
]


@pytest.mark.parametrize("name", BY_NAME)
def test_another_metrics_best_value_does_not_count_on_resuming(name, here):
    first, again = WATCHING[name](), WATCHING[name](watch_metric="accuracy", greater_is_better=True)
    before = r"starts over: it watches 'accuracy' \(greater is better\), but its training state is for '\w*eval_loss"
    with pytest.warns(UserWarning, match=f"{name} {before}"):
        resumed(here, first, again)
    assert first.best_metric > 0.8  # a loss, which as an accuracy would be the best for ever
    assert again.best_metric == 0.8


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_best_value_of_an_older_version_counts_on_resuming(name, here):
    first, again = (WATCHING[name](watch_metric="accuracy", greater_is_better=False) for _ in range(2))
    resumed(here, first, again)
    assert again.best_metric == 0.5
    old = {key: value for key, value in again.state_dict().items() if key not in ("watch_metric", "greater_is_better")}
    first.load_state_dict(old)
    assert first.best_metric == 0.5


@pytest.mark.parametrize("greater", [False, True])
def test_a_resumed_run_keeps_the_best_k_models_of_both_parts(tmp_path, greater):
    class Scores(TrainerCallback):
        values = (3.0, 1.0, 5.0, float("nan"), 2.0, 4.0)

        def on_eval_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("score", self.values[trainer.progress.epoch - 1])

    for epochs in (3, 6):
        model = float64_model()
        best = SaveBestModelCallback(tmp_path / "best.pt", "score", greater, keep=2, load_saved_checkpoint=False)
        saving = SaveTrainingStateCallback(tmp_path / "states")
        trainer = adamw_trainer(model, callbacks=[Scores(), best, saving], seed=0)
        trainer.train(float64_data(8), epochs, float64_data(4), resume_from="latest")
    expected = {"best-epoch0003.pt", "best-epoch0006.pt"} if greater else {"best-epoch0002.pt", "best-epoch0005.pt"}
    assert {path.name for path in tmp_path.glob("best*")} == expected | {"best.pt"}
    scores = {name: torch.load(tmp_path / name)["score"] for name in expected | {"best.pt"}}
    assert scores["best.pt"] == (5.0 if greater else 1.0)


def test_at_least_one_best_model_is_kept():
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        SaveBestModelCallback(keep=0)


def test_the_best_model_is_loaded_if_groups_were_added_since(tmp_path, capsys):
    class Unfreezes(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            if trainer.progress.epoch == 2:
                layer = trainer.get_model()[0].requires_grad_(True)
                trainer.optimizer.add_param_group({"params": [*layer.parameters()]})

        def on_training_run_epoch_end(self, trainer, **kwargs):
            trainer.run_history.update_metric("error", trainer.progress.epoch)

    model = make_model()
    model[0].requires_grad_(False)
    head = [parameter for parameter in model.parameters() if parameter.requires_grad]
    best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="error", greater_is_better=False)
    trainer = make_trainer([Unfreezes, best], model, optimizer=torch.optim.SGD(head, lr=0.01))
    train(trainer, 2)
    assert best.best_metric_epoch == 1
    saved = torch.load(tmp_path / "best.pt", weights_only=True)["model_state_dict"]
    assert equal_weights(trainer.get_model().state_dict(), saved)
    assert "The optimizer stays as it is" in capsys.readouterr().out
