"""The computed random order of very large datasets: no memory, and as exact as a stored order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from benchmarks.order import by_trainer, measured
from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.data import sample_order
from pytorch_accel_lite.data.sample_order import ComputedOrder
from pytorch_accel_lite.data.steps_and_shares import indices_at
from tests.ranks import world_size
from tests.small_models import Rows, adamw_trainer, float64_data, float64_model, listener

SIZE = 37


class Remembers(TrainerCallback):
    """Keeps the indices of the samples of each epoch, on all processes."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self.epochs.append([])

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        for indices in trainer.all_gather_object(trainer.batch_indices):
            self.epochs[-1] += indices


def orders_of_epochs(wrap: Callable[[Any], Any], seed: int | None) -> list[list[int]]:
    """The samples of two epochs, in batches of 6 on all processes together."""
    remembers = Remembers()
    trainer = adamw_trainer(float64_model(), callbacks=[remembers], seed=seed)
    kwargs = {"num_workers": 0}
    data = wrap(float64_data(SIZE))
    trainer.train(data, 2, per_device_batch_size=6 // world_size(), train_dataloader_kwargs=kwargs)
    return remembers.epochs


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 4097])
def test_every_index_occurs_once(size):
    for key in range(3):
        computed = ComputedOrder(size, key).at(0, size)
        assert computed.dtype == torch.int64
        assert sorted(computed.tolist()) == list(range(size))


@pytest.mark.parametrize(
    "whole", [ComputedOrder(50_000, key=5), torch.randperm(50_000, dtype=torch.int32), range(50_000)], ids=type
)
def test_indices_of_steps_are_the_same_from_any_starting_point(whole):
    expected = whole.at(0, 50_000) if isinstance(whole, ComputedOrder) else torch.as_tensor(whole).long()
    for step, start in ((7, 0), (1000, 333), (20_000, 1), (50_000, 0)):
        bounds = [(begin, min(begin + step, 50_000)) for begin in range(start, 50_000, step)]
        parts = list(indices_at(whole, bounds))
        assert [len(part) for part in parts] == [end - begin for begin, end in bounds]
        assert torch.equal(torch.cat(parts), expected[start:])


def test_the_computed_order_is_random():
    """Places and indices are independent, neighbours too, and keys give different orders."""
    drawn = torch.stack([ComputedOrder(1000, key).at(0, 1000) for key in range(200)]).double()
    places = torch.arange(1000.0, dtype=torch.float64)
    for first, second in ((drawn.flatten(), places.repeat(200)), (drawn[:, 1:].flatten(), drawn[:, :-1].flatten())):
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.01
    fixed_points = (drawn == places).sum(1).double()
    assert abs(fixed_points.mean() - 1) < 0.3
    counts = torch.histc(drawn[:, 0], 10, 0, 1000)
    assert ((counts - 20) ** 2 / 20).sum() < 30  # chi squared with 9 degrees of freedom


@pytest.fixture
def orders_are_computed(monkeypatch):
    """Orders of more than ten samples are computed rather than stored."""
    monkeypatch.setattr(sample_order, "LARGEST_STORED", 10)


@pytest.mark.parametrize("wrap", [Rows, lambda data: data], ids=["one by one", "in memory"])
@pytest.mark.parametrize("seed", [3, None])
def test_each_epoch_has_every_sample_once_in_another_order(orders_are_computed, wrap, seed):
    first, second = orders_of_epochs(wrap, seed)
    assert sorted(first) == sorted(second) == list(range(SIZE))
    assert first != second
    if seed is not None:
        assert orders_of_epochs(wrap, seed) == [first, second]


def on_ranks() -> tuple[list[list[int]], list[list[int]]]:
    """With a seed, and without one."""
    largest = sample_order.LARGEST_STORED
    sample_order.LARGEST_STORED = 10
    try:
        return orders_of_epochs(Rows, 3), orders_of_epochs(Rows, None)
    finally:
        sample_order.LARGEST_STORED = largest


def test_the_order_does_not_depend_on_the_number_of_processes(orders_are_computed, ranks):
    alone = orders_of_epochs(Rows, 3)
    for together, unseeded in ranks(on_ranks):
        assert together == alone
        assert all(sorted(epoch) == list(range(SIZE)) for epoch in unseeded)


def test_a_run_resumes_in_the_middle_of_a_computed_order(orders_are_computed, tmp_path):
    seen: list[int] = []

    def look(trainer: Any, **kwargs: Any) -> None:
        seen.extend(trainer.batch_indices)
        if trainer.progress.update == 13:
            trainer.save_training_state(tmp_path / "state")

    def train(**kwargs: Any) -> None:
        trainer = adamw_trainer(float64_model(), callbacks=[listener(on_train_step_end=look)], seed=3)
        trainer.train(Rows(float64_data(SIZE)), 2, per_device_batch_size=4, **kwargs)

    train()
    whole = [*seen]
    seen.clear()
    train(resume_from=tmp_path / "state")
    assert seen == whole[SIZE + 3 * 4 :]


def test_smaller_data_keep_the_order_of_torch():
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does for its workers
    expected = list(RandomSampler(range(SIZE)))
    torch.manual_seed(1)
    assert orders_of_epochs(Rows, None)[0] == expected


@pytest.mark.parametrize("seed", [0, None])
def test_the_order_of_very_many_samples_takes_little_memory(seed):
    seconds, megabytes = measured(lambda: by_trainer(10**8, seed))
    assert seconds > 0
    assert megabytes < 100
