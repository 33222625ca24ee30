"""The number of Python function calls of a step and of reading a batch stays within budgets."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset
from torchmetrics.regression import MeanSquaredError

from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import MetricsCallback, SaveTrainingStateCallback
from pytorch_accel_lite.data import OwnShard
from tests.small_models import make_trainer, train

STEPS = 40


class Calls:
    """Counts the Python functions that are called: those of the package, or with ``everywhere`` also torch's."""

    def __init__(self, everywhere: bool = False) -> None:
        self.by_name: Counter[str] = Counter()
        self._everywhere = everywhere

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and (self._everywhere or "pytorch_accel_lite" in frame.f_code.co_filename):
            self.by_name[frame.f_code.co_name] += 1

    def __enter__(self) -> Calls:
        gc.disable()  # generators that other tests have left are closed by calls, too
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


class Ready(Trainer):
    """Reads a list of batches."""

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return OwnShard(self.train_dataset)

    def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
        return OwnShard(self.eval_dataset)


class Whole(Dataset[Any]):
    """Reads many samples at once."""

    def __init__(self, size: int) -> None:
        self.x, self.y = torch.randn(size, 4), torch.randn(size, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.x[indices], self.y[indices]


def calls_per_step(
    trainer_class: type[Trainer], data: Any, callbacks: Any, everywhere: bool = False, train: Any = None, **kwargs: Any
) -> tuple[float, Counter[str]]:
    """Return the calls per step: the difference between a longer and a shorter epoch.

    Args:
        train: further arguments of ``train``
    """
    counts = []
    for steps in (STEPS, 2 * STEPS):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=callbacks, **kwargs)
        with Calls(everywhere) as calls:
            how = {"train_dataloader_kwargs": {"collate_fn": _identity}} | (train or {})
            trainer.train(data(steps), 2, per_device_batch_size=8, **how)
        counts.append(calls.by_name)
    less, more = counts
    found = Counter({name: (more[name] - less[name]) / (2 * STEPS) for name in more})
    return sum(found.values()), found


def _identity(batch: Any) -> Any:
    return batch


def batches(steps: int) -> list[Any]:
    return [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(steps)]


QUIET = get_default_callbacks(progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer_class", "data", "callbacks", "kwargs", "budget"),
    [
        pytest.param(Ready, batches, (), {}, 22, marks=pytest.mark.extension("streams")),
        pytest.param(Ready, batches, QUIET, {}, 26, marks=pytest.mark.extension("streams")),
        (Trainer, lambda steps: Whole(8 * steps), (), {}, 25),
        (Trainer, lambda steps: Whole(8 * steps), (), {"seed": 1}, 29),
    ],
    ids=["list", "list and default callbacks", "dataset", "dataset with a seed"],
)
def test_a_step_keeps_its_call_budget(trainer_class, data, callbacks, kwargs, budget):
    total, found = calls_per_step(trainer_class, data, callbacks, **kwargs)
    assert total <= budget, found.most_common()


def test_training_states_cost_a_step_no_more_than_a_seed(tmp_path):
    callbacks = [SaveTrainingStateCallback(tmp_path, save_at_end=False)]
    train(make_trainer(callbacks))  # a folder is locked in another way from then on
    total, found = calls_per_step(Trainer, lambda steps: Whole(8 * steps), callbacks)
    assert total <= 29, found.most_common()


def test_samples_without_random_draws_are_not_seeded():
    class Single(Dataset[Any]):
        def __init__(self, steps: int) -> None:
            self.inner = Whole(8 * steps)

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, index: int) -> Any:
            return self.inner[index]

    workers = {"train_dataloader_kwargs": {"num_workers": 0}}
    total, found = calls_per_step(Trainer, Single, (), train=workers, seed=1)
    assert found["seed_generators"] <= 2  # before the first sample, to notice draws, and before the step
    assert total - found["__getitem__"] - found["derive_seed"] <= 34, found.most_common()


@pytest.mark.extension("model_ema", "streams")
@pytest.mark.slow
def test_callbacks_and_clipping_keep_their_call_budget():
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    callbacks = [ModelEmaCallback(evaluate_during_training=False, save_path=None)]
    callbacks += [MetricsCallback(MeanSquaredError(), train=True)]
    schedule = partial(ExponentialLR, gamma=0.99)
    how = {"gradient_clip_norm": 1.0, "create_scheduler_fn": schedule}
    total, found = calls_per_step(Ready, batches, callbacks, train=how)
    assert total <= 56, found.most_common()
    total, found = calls_per_step(Ready, batches, callbacks, train=how, everywhere=True)
    assert not {"wrapper", "is_torch_version", "_group_tensors_by_device_and_dtype"} & set(+found)
    assert total <= 180, found.most_common()  # torch makes some more once it has compiled anything


@pytest.mark.extension("streams")
@pytest.mark.parametrize(("callbacks", "budget"), [((), 11), (QUIET, 11)], ids=["bare", "default callbacks"])
def test_an_evaluation_batch_keeps_its_call_budget(callbacks, budget):
    counts = []
    for steps in (STEPS, 2 * STEPS):
        trainer = Ready(nn.Linear(4, 1), nn.MSELoss(), None, callbacks=callbacks)
        with Calls() as calls:
            trainer.evaluate(batches(steps), 8)
        counts.append(calls.by_name)
    less, more = counts
    found = Counter({name: (more[name] - less[name]) / STEPS for name in more})
    assert found.total() <= budget, found.most_common()


def calls_by_hand(data: list[Any]) -> int:
    model = nn.Linear(4, 1)
    optimizer, loss_func = torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss()
    with Calls(everywhere=True) as calls:
        for x, y in data:
            loss_func(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return calls.by_name.total()


@pytest.mark.extension("streams")
def test_a_step_calls_fewer_functions_than_a_hand_written_one():
    less, more = map(calls_by_hand, (batches(STEPS), batches(2 * STEPS)))
    total, found = calls_per_step(Ready, batches, (), everywhere=True)
    assert total < (more - less) / STEPS, found.most_common()
