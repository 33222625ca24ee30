"""Calls that differ between processes, or that one process alone makes, are errors that name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests.launching import SOAK, TORCHRUN, launch_together
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder, world_size
from tests.small_models import adamw_trainer, float64_data, float64_model

pytestmark = pytest.mark.processes


class AddedOnOne(TrainerCallback):
    """A callback added on one rank only, whose barrier would hang."""

    def on_training_run_start(self, trainer, **kwargs):
        trainer.barrier()


def unlike_calls() -> dict[str, str]:
    """The errors if the last rank has other datasets or callbacks, or makes another call."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    data = float64_data(12)
    is_last = own_rank() == world_size() - 1

    def error_of(call: Callable[[Trainer], Any], callbacks: Sequence[Any] = (), seed: int | None = None) -> str:
        try:
            call(adamw_trainer(float64_model(), callbacks=callbacks, seed=seed))
        except ValueError as error:
            return str(error)
        return "no error"

    with shared_folder() as folder:
        average, best = ModelEmaCallback(save_path=None), SaveBestModelCallback(folder / "best.pt")
        states = SaveTrainingStateCallback(folder / "states")
        return {
            "eval_dataset": error_of(lambda t: t.train(data, 1, data if is_last else None)),
            "names": error_of(lambda t: t.evaluate({"a": data, "b": data} if is_last else {"a": data})),
            "states": error_of(lambda t: t.train(data, 1), [states] if is_last else []),
            "best": error_of(lambda t: t.train(data, 1, data), [] if is_last else [best]),
            "average": error_of(lambda t: t.train(data, 1, data), [] if is_last else [average]),
            "own": error_of(lambda t: t.train(data, 1), [AddedOnOne] if is_last else []),
            "order": error_of(lambda t: t.train(data, 1, data), [best, average] if is_last else [average, best]),
            "seed": error_of(lambda t: t.train(data, 1), [states], None if is_last else 0),
            "resumes": error_of(lambda t: t.train(data, 1, resume_from="latest" if is_last else None), [states]),
            "call": error_of(lambda t: t.predict(data) if is_last else t.evaluate(data)),
            "same": error_of(lambda t: t.train(data, 1, data), [average, best, AddedOnOne]),
        }


@pytest.mark.extension("model_ema")
def test_calls_that_differ_between_ranks_are_refused_on_all(ranks):
    last = ranks.world_size - 1
    differences = {
        "eval_dataset": f"eval_dataset='a dataset' on rank {last}, but eval_dataset=None on rank 0.",
        "names": f"eval_dataset=['a', 'b'] on rank {last}, but eval_dataset=['a'] on rank 0.",
        "states": f"callbacks=['SaveTrainingStateCallback'] on rank {last}, but callbacks=[] on rank 0.",
        "best": f"callbacks=[] on rank {last}, but callbacks=['SaveBestModelCallback'] on rank 0.",
        "average": f"callbacks=[] on rank {last}, but callbacks=['ModelEmaCallback'] on rank 0.",
        "own": f"callbacks=['AddedOnOne'] on rank {last}, but callbacks=[] on rank 0.",
        "order": f"callbacks=['SaveBestModelCallback', 'ModelEmaCallback'] on rank {last}, but callbacks=['Model",
        "seed": f"seed=None on rank {last}, but seed=0 on rank 0.",
        "resumes": f"call='train(resume_from=...)' on rank {last}, but call='train()' on rank 0.",
        "call": f"call='predict()' on rank {last}, but call='evaluate()' on rank 0.",
    }
    for result in ranks(unlike_calls):
        assert result.pop("same") == "no error"
        assert result.keys() == differences.keys()
        for name, said in result.items():
            assert said.startswith(differences[name]), said
            assert "Make the same calls on every process, with the same arguments and callbacks" in said


ALONE = {
    "evaluates": "rank 0: in evaluate(), called by",
    "predicts": "rank 1: in predict(), called by",
    "saves": "rank 0: in save_checkpoint(), called by",
    "gathers rows": "rank 1: in gather(), called by",
    "evaluates in a callback": "rank 0: in evaluate(), called by on_train_epoch_end of unlike_ranks.py",
    "gathers": "gather_for_metrics() waits for all processes in each step of an evaluation, but some have no",
    "updates, not in step 2": "Where a process has nothing to learn from, pass a loss of zero",
    "updates, not in step 3": "different calls|another process did not take part until the time limit",
}


# Those of a group wait for the limit together; every fourth case without SOAK.
@pytest.mark.soak
@pytest.mark.parametrize("cases", [[*ALONE][:4], [*ALONE][4:]] if SOAK else [[*ALONE][::4]])
def test_a_call_on_only_one_rank_is_named(cases):
    commands = [[*TORCHRUN, "2", "tests/scripts/unlike_ranks.py", case] for case in cases]
    for case, done in zip(cases, launch_together(commands, warm=True), strict=True):
        assert done.returncode != 0, case
        text = re.sub(r"\[rank\d\]:", " ", done.stderr)  # what notes wrap
        assert any(said in " ".join(text.split()) for said in ALONE[case].split("|")), done.stderr
