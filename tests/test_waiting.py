"""Processes in different calls, each of which would wait for the others for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pytorch_accel_lite import TrainerCallback
from tests.ranks import rank, shared_folder
from tests.tasks import listener, quiet_trainer, regression_data, small_model

DATA = 12


class OnOneRank(TrainerCallback):
    """Calls something in an event on rank 1 alone."""

    def __init__(self, event: str, action: Callable[[Any], Any]) -> None:
        self.event, self.action = event, action
        setattr(self, event, self._act)

    def _act(self, trainer: Any, **kwargs: Any) -> None:
        if rank() == 1:
            self.action(trainer)


def said_if_only_one_calls() -> dict[str, list[str]]:
    """What is said where rank 1 makes a call at the end of an epoch, of which rank 0 knows nothing."""
    said = {}
    with shared_folder() as folder:
        calls: dict[str, Callable[[Any], Any]] = {
            "evaluate": lambda trainer: trainer.evaluate(regression_data(DATA)),
            "run_evaluation": lambda trainer: trainer.run_evaluation(),
            "save_checkpoint": lambda trainer: trainer.save_checkpoint(folder / "model.pt"),
            "save_training_state": lambda trainer: trainer.save_training_state(folder / "state"),
            "gather": lambda trainer: trainer.gather(trainer.get_model()[0].weight),
            "broadcast_object": lambda trainer: trainer.broadcast_object(1),
            "all_gather_object": lambda trainer: trainer.all_gather_object(1),
            "barrier": lambda trainer: trainer.barrier(),
        }
        for name, call in calls.items():
            for event in ("on_train_epoch_end", "on_eval_step_end"):
                callback = listener(**{event: lambda trainer, call=call, **_: call(trainer) if rank() == 1 else None})
                trainer = quiet_trainer(small_model(), callbacks=[callback])
                try:
                    trainer.train(regression_data(DATA), 1, regression_data(DATA))
                except RuntimeError as error:
                    said[name, event] = str(error)
    return said


def test_a_call_that_one_rank_makes_is_never_paired_with_another(two_ranks):
    first, second = two_ranks(said_if_only_one_calls)
    assert first == second
    for (name, event), said in first.items():
        print(name, event, said)
    assert 0
