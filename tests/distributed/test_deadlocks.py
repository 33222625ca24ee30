"""Processes in mismatched calls report their positions and end; different calls are never paired."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.extending import OBSERVERS
from tests.deadlocks import DATA, HOW, on_rank_1, train
from tests.launching import in_forks
from tests.ranks import rank, shared_folder
from tests.small_models import adamw_trainer, equal_weights, float64_model, listener, weights

# ------------------------------------------------------------------------------------- different calls that meet

CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "evaluate": lambda trainer, folder: trainer.evaluate(DATA),
    "run_evaluation": lambda trainer, folder: trainer.run_evaluation(),
    "predict": lambda trainer, folder: trainer.predict(DATA),
    "save_checkpoint": lambda trainer, folder: trainer.save_checkpoint(folder / "model.pt"),
    "save_training_state": lambda trainer, folder: trainer.save_training_state(folder / "state"),
    "gather": lambda trainer, folder: trainer.gather(torch.ones(2)),
    "tensor_to_numeric": lambda trainer, folder: trainer.tensor_to_numeric(torch.ones(1), "mean"),
    "broadcast_object": lambda trainer, folder: trainer.broadcast_object(1),
    "all_gather_object": lambda trainer, folder: trainer.all_gather_object(1),
    "barrier": lambda trainer, folder: trainer.barrier(),
    "compare_replicas": lambda trainer, folder: trainer.compare_replicas(),
}


def said_if_only_one_calls() -> dict[tuple[str, str], str]:
    """The errors when only rank 1 makes a call, at the end of an epoch or in an evaluation."""
    said = {}
    with shared_folder() as folder:
        for name, call in CALLS.items():
            for event in ("on_train_epoch_end", "on_eval_step_end"):
                callback = on_rank_1(event, lambda trainer, call=call: call(trainer, folder))
                trainer = adamw_trainer(float64_model(), callbacks=[callback], seed=0)
                try:
                    trainer.train(DATA, eval_dataset=DATA, **HOW)
                except Exception as error:
                    said[name, event] = str(error)
    return said


@pytest.mark.processes
def test_a_call_that_one_rank_makes_is_never_paired_with_another(two_ranks):
    first, second = two_ranks(said_if_only_one_calls)
    assert first == second
    assert first.keys() == {(name, event) for name in CALLS for event in ("on_train_epoch_end", "on_eval_step_end")}
    for (name, event), said in first.items():
        assert said.startswith("The processes are in different calls"), (name, event)
        assert re.search(
            r"\n  rank 0: in train\(\), called by said_if_only_one_calls of test_deadlocks.py:\d+ \(", said
        )
        assert re.search(rf"\n  rank 1: in {name}\(\), called by <lambda> of test_deadlocks.py:\d+", said), said


def saved_by_one_then_trained() -> list[str]:
    """The errors when only rank 0 saves a checkpoint before training, and when one rank trains and one evaluates."""
    said = []
    trainer = adamw_trainer(float64_model(), callbacks=[])
    with shared_folder() as folder:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: (rank() or trainer.save_checkpoint(folder / "model.pt"), trainer.train(DATA, **HOW)),
            lambda: trainer.evaluate(DATA) if rank() else trainer.train(DATA, **HOW),
        )
        for call in calls:
            try:
                call()
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
        trainer.train(DATA, **HOW)  # the exchanges are in step again
    return said


def test_different_calls_outside_of_runs_are_not_paired(two_ranks):
    for saved, evaluated in two_ranks(saved_by_one_then_trained):
        assert "rank 0: in save_checkpoint(), called by <lambda>" in saved
        assert "rank 1: in train(), called by <lambda>" in saved
        assert "call='evaluate()' on rank 1, but call='train()' on rank 0" in evaluated


# -------------------------------------------------------------------------------------------- a process that is lost


@pytest.mark.processes
def test_the_others_report_that_a_process_has_left(tmp_path):
    """Without observers of the job, nobody knows who has left, and why."""

    def unobserved(rank: int) -> None:
        OBSERVERS.clear()
        train(callbacks=[on_rank_1("on_train_epoch_end", lambda trainer: os._exit(0))])

    output = tmp_path / "output"
    codes = in_forks(unobserved, output, 2)
    said = output.read_text()
    assert codes[0] == 1, said
    assert "ProcessLostError: Rank 0 cannot go on, because another process has left the job.\n" in said


# ------------------------------------------------------------------------------- numbers that differ by rank


def with_numbers_of_their_own() -> Any:
    """The results when each rank records its own metric for the best model, early stopping and a schedule."""
    numbers = {0: [3.0, 2.0, 1.0, 2.0, 3.0, 4.0], 1: [1.0, 2.0, 3.0, 2.0, 1.0, 0.0]}[rank()]

    def record(trainer: Any, **kwargs: Any) -> None:
        trainer.run_history.update_metric("own_loss", numbers[trainer.progress.epoch - 1])

    with shared_folder() as folder:
        best = SaveBestModelCallback(folder / "best.pt", "own_loss", load_saved_checkpoint=False)
        callbacks = [listener(on_train_epoch_end=record), best, EarlyStoppingCallback(2, 0, "own_loss")]
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=0)
        schedule: Any = lambda optimizer: ReduceLROnPlateau(optimizer, patience=0)  # noqa: E731
        trainer.train(
            DATA, 6, create_scheduler_fn=schedule, scheduler_interval="epoch", scheduler_metric="own_loss",
            per_device_batch_size=2,
        )  # fmt: skip
        rate = optimizer.param_groups[0]["lr"]
        return best.best_metric, best.best_metric_epoch, trainer.progress.epoch, rate, weights(model)


@pytest.mark.filterwarnings("default:.*differ between the processes")
def test_all_processes_decide_by_the_number_of_rank_0(two_ranks):
    results = two_ranks(with_numbers_of_their_own)
    for best, epoch, last, rate, _ in results:
        assert (best, epoch, last) == (1.0, 3, 5)
        assert rate < 0.1
    assert equal_weights(results[0][-1], results[1][-1])
    assert "its values differ between the processes (3 on rank 0, 1 on rank 1)" in results.output
    assert results.output.count("its values differ between") == 1


# ------------------------------------------------------------------------------- arguments that differ by rank


def arguments_of_their_own() -> list[str]:
    """The errors when ranks pass different arguments to a callback or the optimizer."""
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    said = []
    with shared_folder() as folder:
        for callback, rate in (
            (SaveTrainingStateCallback(folder / "states", save_every_n_steps=2 + rank()), 0.1),
            (EarlyStoppingCallback(1 + rank()), 0.1),
            (EarlyStoppingCallback(), 0.1 + rank()),
            (SaveBestModelCallback(folder / f"best{rank()}.pt"), 0.1),  # of which only one is written
            (ProgressBarCallback(refresh_seconds=1 + rank()), 0.1),
        ):
            model = float64_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[callback], seed=0)
            try:
                trainer.train(DATA, eval_dataset=DATA, **HOW)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def scheduled_on_one_rank() -> list[str]:
    """The errors when only one rank has a scheduler, the last or the first."""
    said = []
    for scheduled in (1, 0):
        trainer = adamw_trainer(float64_model(), callbacks=[], seed=0)
        schedule = partial(StepLR, step_size=1) if rank() == scheduled else None
        with pytest.raises(ValueError, match="scheduler=") as error:
            trainer.train(DATA, create_scheduler_fn=schedule, **HOW)
        said.append(str(error.value))
    return said


def test_a_scheduler_of_a_single_rank_is_an_error(two_ranks):
    for last, first in two_ranks(scheduled_on_one_rank):
        assert last.startswith("scheduler='StepLR' on rank 1, but scheduler=nothing on rank 0.")
        assert first.startswith("scheduler=nothing on rank 1, but scheduler='StepLR' on rank 0.")


@pytest.mark.extension("progress_bar")
def test_arguments_of_callbacks_and_optimizers_are_compared(two_ranks):
    for saving, stopping, rate, *may_differ in two_ranks(arguments_of_their_own):
        assert "callbacks[0].save_every_n_steps=3 on rank 1, but callbacks[0].save_every_n_steps=2 on rank 0" in saving
        assert "callbacks[0].early_stopping_patience=2 on rank 1" in stopping
        assert "optimizer.param_groups[0]['lr']=1.1 on rank 1, but optimizer.param_groups[0]['lr']=0.1 on" in rate
        assert may_differ == ["", ""]
