"""Batch norm: small last batches, and statistics on several processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.extension_tools.modules_and_devices import keep_in_eval
from tests.launching import two_are_enough
from tests.ranks import global_batch, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    make_data,
    make_trainer,
    train,
    weights,
)


class NormalisedRows(nn.Sequential):
    """Batch norm over rows, which torch refuses to train on a single one."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__(nn.Linear(5, 4), norm(4), nn.Tanh(), nn.Linear(4, 1))
        self.double()


class CountsRows(TrainerCallback):
    """Keeps the samples of each step, and how many rows the model saw."""

    def __init__(self):
        self.indices = []
        self.rows = []

    def on_train_step_end(self, trainer, batch, **kwargs):
        self.indices.append(trainer.batch_indices)
        self.rows.append(len(batch[0]))


def normalised(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))


def warned_before_the_first_batch(trainer: Trainer, **kwargs: object) -> bool:
    """Whether a run warns of a last batch with a single sample."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The last batch of an epoch has a single sample")
        try:
            train(trainer, **kwargs)
        except (UserWarning, ValueError) as end:  # the warning; or torch's error, at the end of the epoch
            return trainer.progress.samples == 0 and "train_dataloader_kwargs={'drop_last': True}" in str(end)
    return False


class Sized(IterableDataset):
    """A stream that knows its length."""

    def __len__(self):
        return 7

    def __iter__(self):
        return iter([(x, y) for x, y in make_data(7)])


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, track_running_stats=False).eval()]
)
def test_a_last_batch_of_one_sample_is_warned_of_early(norm):
    assert warned_before_the_first_batch(make_trainer(model=normalised(norm)), size=7, batch_size=2)
    assert not warned_before_the_first_batch(make_trainer(model=normalised(norm)), size=8, batch_size=2)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.Identity()])
def test_other_models_are_left_unchanged(norm):
    assert not warned_before_the_first_batch(make_trainer(model=normalised(norm)), size=7, batch_size=2)


@pytest.mark.extension("pytorch_accelerated")
def test_a_last_batch_that_is_not_trained_on_is_not_warned_of():
    from pytorch_accel_lite.callbacks import LimitBatchesCallback

    def is_warned(callbacks=(), **kwargs):
        trainer = make_trainer(callbacks, normalised(nn.BatchNorm1d(4)))
        return warned_before_the_first_batch(trainer, size=7, batch_size=2, **kwargs)

    assert is_warned(max_num_train_steps=4)
    assert not is_warned(max_num_train_steps=3)
    assert is_warned(max_num_train_steps=2, gradient_accumulation_steps=2)
    assert not is_warned([LimitBatchesCallback(3)])
    assert not is_warned(train_dataloader_kwargs={"drop_last": True})


def test_a_batch_norm_kept_in_evaluation_mode_is_not_warned_of():
    model = normalised(nn.BatchNorm1d(4))
    keep_in_eval(model[1])
    assert not warned_before_the_first_batch(make_trainer(model=model), size=7, batch_size=2)


def tails_with_batch_norm() -> Any:
    """For each size, the samples of every step of this process, the rows that it computed, and the warnings."""
    results = {}
    for size in (38, 40, 43, 47, 4 * world_size() * 3 + 1):
        for name, model in (("norm", NormalisedRows()), ("none", float64_model())):
            counts = CountsRows()
            trainer = adamw_trainer(model, callbacks=[counts], seed=1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    trainer.train(float64_data(size), 1, per_device_batch_size=4)
                    error = ""
                except ValueError as failure:
                    error = str(failure)
            said = [str(w.message) for w in caught if "batch norm" in str(w.message)]
            results[size, name] = {"indices": counts.indices, "rows": counts.rows, "said": said, "error": error}
    return results


def test_no_process_gets_a_single_sample_with_batch_norm(ranks):
    results = ranks(tails_with_batch_norm)
    for size in (38, 40, 43, 47):
        with_norm, without = ([result[size, which] for result in results] for which in ("norm", "none"))
        for step, (normed, plain) in enumerate(zip(in_steps(with_norm), in_steps(without), strict=True)):
            assert list(chain(*normed)) == list(chain(*plain)), step  # the same samples in the same order
            assert min(len(own) for own in normed if own) >= 2
            assert max(map(len, plain)) - min(map(len, plain)) <= 1  # as even as possible
        assert min(rows for result in with_norm for rows in result["rows"]) >= 2
        assert not any(result["error"] or result["said"] for result in with_norm)


@pytest.mark.thorough
@two_are_enough
def test_a_last_batch_of_one_sample_warns_with_batch_norm(ranks):
    for rank, result in enumerate(ranks(tails_with_batch_norm)):
        single = result[12 * ranks.world_size + 1, "norm"]
        assert ["drop_last" in text for text in single["said"]] == [True] * (rank == 0)
        assert "Expected more than 1 value per channel" in single["error"]
        assert result[12 * ranks.world_size + 1, "none"]["said"] == []


def batches_of_a_sampler_with_batch_norm() -> Any:
    """A batch with a single sample beside larger ones."""
    counts = CountsRows()
    trainer = adamw_trainer(NormalisedRows(), callbacks=[counts])
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]]
    trainer.train(float64_data(12), 1, train_dataloader_kwargs={"batch_sampler": batches})
    return counts.indices, counts.rows


def test_a_samplers_batches_are_redivided_for_batch_norm(ranks):
    results = ranks(batches_of_a_sampler_with_batch_norm)
    assert sorted(i for indices, _ in results for own in indices for i in own) == list(range(12))
    assert min(rows for _, all_rows in results for rows in all_rows) >= 2


def batch_norm() -> Any:
    """Running statistics are the same on all ranks in evaluations and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    trainer = adamw_trainer(model)
    trainer.train(float64_data(24), 2, float64_data(9), per_device_batch_size=global_batch(6))
    return {"weights": weights(model), "history": trainer.run_history.to_dict()}


def test_all_ranks_evaluate_with_the_statistics_of_rank_0(ranks):
    first, *others = ranks(batch_norm)
    assert all(equal_weights(result["weights"], first["weights"]) for result in others)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    model.load_state_dict(first["weights"])
    x, y = float64_data(9).tensors
    with torch.no_grad():
        expected = nn.functional.mse_loss(model.eval()(x), y).item()
    assert first["history"]["eval_loss_epoch"][-1] == pytest.approx(expected, abs=1e-10)


def in_steps(results):
    return zip(*(result["indices"] for result in results), strict=True)
