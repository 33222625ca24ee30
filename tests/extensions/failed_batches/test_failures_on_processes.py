"""Batches that fail, or are out of memory, on one of several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SkipFailedBatchesCallback
from pytorch_accel_lite.data import OwnShard
from tests.extensions.failed_batches.fussy import ALL_PHASES
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, global_batch, rank, world_size
from tests.shared_trainings import TokenTrainer
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    weights,
)


class FussyOnLastRank(nn.Module):
    """Refuses, on the last rank, batches with certain samples or more than one sample."""

    def __init__(self, poison: float | None = None, alone: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(float64_model(), nn.BatchNorm1d(1, momentum=0.5).double())
        self.poison, self.alone, self.train_only = poison, alone, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner[0](x) if self.alone else self.inner(x)
        if rank() == world_size() - 1 and (self.training or not self.train_only):
            if self.alone and len(x) > 1:
                raise torch.OutOfMemoryError("out of memory.")
            if self.poison is not None and (x[:, 0] == self.poison).any():
                raise ValueError("cannot digest this")
        return y


def poisoned(size: int) -> TensorDataset:
    """Data in which one sample of the last rank's second batch is poison."""
    data = float64_data(size)
    data.tensors[0][11, 0] = 7.0
    return data


def left_out_on_the_last_process() -> Any:
    """The last process leaves out its first batch; callbacks gather in each step, or only at the end."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    data = poisoned(26)
    results = []
    for gathers in (False, True):
        seen: list[Any] = []

        def gather(trainer: Trainer, batch: Any, seen: list[Any] = seen, **kwargs: Any) -> None:
            seen += trainer.accelerator.gather_for_metrics(batch[0])[:, 0].tolist()

        skip = SkipFailedBatchesCallback(phases=ALL_PHASES)
        watch = [listener(on_eval_step_end=gather)] if gathers else []
        trainer = adamw_trainer(FussyOnLastRank(7.0), callbacks=[MetricsCallback(MeanSquaredError()), skip, *watch])
        trainer.model.train_only = False
        size = global_batch(6)
        values = trainer.evaluate(data, size)
        failures = skip.failures
        outputs = trainer.predict(data, size)
        left = [index for index in range(26) if index not in {i for f in skip.failures for i in f["indices"]}]
        expected = adamw_trainer(FussyOnLastRank(), callbacks=[MetricsCallback(MeanSquaredError())])
        others = Subset(data, left)
        predicted = expected.predict(others, size)
        results.append((values, expected.evaluate(others, size), failures, skip.failures, outputs, predicted, seen))
    return results


def test_each_process_skips_its_own_batches_and_all_report_it(ranks):
    last = ranks.world_size - 1
    inputs = poisoned(26).tensors[0][:, 0]
    for results in ranks(left_out_on_the_last_process):
        for values, expected, failures, predicted_failures, outputs, expected_outputs, seen in results:
            assert values == pytest.approx(expected)
            (failure,) = failures
            assert (failure["rank"], failure["error"]) == (last, "ValueError: cannot digest this")
            assert 11 in failure["indices"]
            assert failure | {"phase": "prediction"} == predicted_failures[0]
            assert largest_difference({"": outputs}, {"": expected_outputs}) < 1e-12
            if seen:
                assert sorted(seen) == sorted(
                    value.item() for index, value in enumerate(inputs) if index not in failure["indices"]
                )


def all_fails_on_processes() -> str:
    trainer = adamw_trainer(FussyOnLastRank(), callbacks=[SkipFailedBatchesCallback(phases=ALL_PHASES)])
    trainer.model.register_forward_pre_hook(lambda module, args: torch.zeros(1)[len(args[0])])
    with pytest.raises(RuntimeError, match="All batches of the evaluation failed") as caught:
        trainer.evaluate(float64_data(8), 2)
    return type(caught.value.__cause__).__name__


def test_if_all_batches_fail_each_process_has_its_cause(two_ranks):
    assert two_ranks(all_fails_on_processes) == ["IndexError"] * 2


def failed_batches() -> Any:
    """What is left trains as data without the failed batch; with accumulation the windows differ."""
    results = {}
    batches = [[*range(6 * i, 6 * i + 6)] for i in (0, 2, 3)]  # of all ranks, without the second
    for name, accumulation in (("each", 1), ("window", 2)):
        skip = SkipFailedBatchesCallback()
        model = FussyOnLastRank(poison=7.0)
        trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[skip])
        options = {"per_device_batch_size": global_batch(6), "gradient_accumulation_steps": accumulation}
        trainer.train(poisoned(24), 2, train_dataloader_kwargs=IN_ORDER, **options)
        order = [sample for batch in batches for sample in batch]
        unharmed = FussyOnLastRank()
        data = Subset(poisoned(24), order)
        expected = adamw_trainer(unharmed, optimizer=torch.optim.SGD(unharmed.parameters(), lr=0.1))
        expected.train(data, 2, train_dataloader_kwargs=IN_ORDER, **options)
        results[name] = {
            "failures": skip.failures,
            "progress": trainer.progress.state_dict(),
            "found": weights(model),
            "expected": weights(unharmed),
        }
    return results


def test_a_batch_that_fails_on_one_rank_is_skipped_by_all(ranks):
    last = ranks.world_size - 1
    for result in ranks(failed_batches):
        for way in ("each", "window"):
            seen = [(f["epoch"], f["step"], f["rank"], f["error"]) for f in result[way]["failures"]]
            assert seen == [(epoch, 1, last, "ValueError: cannot digest this") for epoch in (1, 2)]
            assert all(11 in failure["indices"] for failure in result[way]["failures"])
            assert equal_weights(result[way]["found"], ranks(failed_batches)[0][way]["found"])
        assert largest_difference(result["each"]["found"], result["each"]["expected"]) < 1e-12
        assert result["each"]["progress"]["update"] == 6
        assert result["window"]["progress"]["update"] == 4
        assert result["each"]["progress"]["samples"] == 48


def failed_first_batch_of_tokens() -> Any:
    """The last rank fails before it knows how many items it has."""

    class Fails(TokenTrainer):
        fails = True

        def calculate_train_batch_loss(self, batch):
            if self.fails and rank() == world_size() - 1:
                self.fails = False
                raise ValueError("cannot digest this")
            return super().calculate_train_batch_loss(batch)

    x, y = float64_data(24).tensors
    data = TensorDataset(x, y, x[:, :1] > -1)
    results = []
    for trainer_class, part in ((Fails, data), (TokenTrainer, Subset(data, range(6, 24)))):
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_class(model, None, optimizer, callbacks=[SkipFailedBatchesCallback] * (part is data))
        trainer.train(part, 1, per_device_batch_size=global_batch(6), train_dataloader_kwargs=IN_ORDER)
        results.append(weights(model))
    return results


def test_a_rank_failing_before_items_are_counted_blocks_no_other(ranks):
    for found, expected in ranks(failed_first_batch_of_tokens):
        assert largest_difference(found, expected) < 1e-12


def failed_last_batch() -> Any:
    """The last rank fails on its last batch, which it would then repeat while the first has another one."""
    x, y = poisoned(12).tensors
    batches = [(x[rows], y[rows]) for rows in (slice(3), slice(3, 6), slice(9, 12))]
    own = OwnShard([batches[0], batches[2]] if rank() else batches[:2] * 2)
    skip = SkipFailedBatchesCallback()
    trainer = adamw_trainer(FussyOnLastRank(poison=7.0), callbacks=[skip])
    trainer.train(own, 1)
    return [failure["step"] for failure in skip.failures], trainer.progress.update


def test_a_failed_batch_is_not_repeated_as_a_filler(two_ranks):
    assert two_ranks(failed_last_batch) == [([1], 3)] * 2


def out_of_memory() -> Any:
    """One rank alone runs out of memory: all split, and the gradients are those of the whole batch."""
    results = {}
    for alone in (True, False):
        model = FussyOnLastRank(alone=alone)
        model.inner[1] = nn.Identity()
        trainer = adamw_trainer(model)
        trainer.train(
            float64_data(27),
            2,
            per_device_batch_size=global_batch(12),
            gradient_accumulation_steps=2,
            train_dataloader_kwargs=IN_ORDER,
            auto_microbatch=True,
        )
        results["split" if alone else "whole"] = {
            "weights": weights(model),
            "history": trainer.run_history.to_dict(),
            "parts": trainer.num_microbatches,
        }
    return results


@two_are_enough
def test_all_ranks_split_their_batches_when_one_is_out_of_memory(ranks):
    for result in ranks(out_of_memory):
        split, whole = result["split"], result["whole"]
        assert (split["parts"], whole["parts"]) == (12 // ranks.world_size, 1)
        assert equal_weights(split["weights"], ranks(out_of_memory)[0]["split"]["weights"])
        assert largest_difference(split["weights"], whole["weights"]) < 1e-12
        for name, values in whole["history"].items():
            assert split["history"][name] == pytest.approx(values)


class FailsToRestore:
    """A registered object whose state cannot be read, or not be restored, on the last rank."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _fail(self, place: str) -> None:
        if place == self.place and rank() == world_size() - 1:
            raise KeyError(place)

    def state_dict(self) -> dict[str, Any]:
        self._fail("snapshot")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._fail("undo")


class UnlikeParts(Trainer):
    """Its outputs cannot be merged on the last rank: the first part of a batch has an entry that the others lack."""

    has_entry = True

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if rank() == world_size() - 1 and self.num_microbatches == 3 and not self.has_entry:
            self.has_entry = True
            output["merge"] = torch.zeros(3)
        return output


def fatal_on_the_last_process(place: str) -> list[str]:
    """The last process has an error that ends the run. Both catch it, and the program goes on."""
    model = FussyOnLastRank(7.0 if place in ("step", "undo") else None, alone=place == "merge")
    model.inner[1] = nn.Identity()
    skips = [SkipFailedBatchesCallback()] if place == "undo" else []
    trainer = UnlikeParts(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=skips)
    trainer.has_entry = place != "merge"
    trainer.accelerator.register_for_checkpointing(FailsToRestore(place))
    options = {"per_device_batch_size": 3, "train_dataloader_kwargs": IN_ORDER, "auto_microbatch": True}
    with pytest.raises((ValueError, KeyError, RuntimeError)) as caught:
        trainer.train(poisoned(24), 1, **options)
    error = caught.value
    others = adamw_trainer(float64_model())
    others.train(float64_data(12), 1, **options)
    assert others.progress.update == 2
    return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("step", "ValueError: cannot digest this"),
        ("snapshot", "KeyError: 'snapshot'"),
        ("merge", "KeyError: 'merge'"),
        ("undo", "KeyError: 'undo'"),
    ],
)
@pytest.mark.extension("error_notes")
def test_all_processes_learn_of_an_error_that_ends_the_run(two_ranks, place, message):
    (other, *_), (own, *notes) = two_ranks.run(fatal_on_the_last_process, place)
    assert own == message
    assert other == f"RuntimeError: Rank 1 failed: {message}"
    assert any(note.startswith("In training, epoch 1, step ") and "process 1 of 2" in note for note in notes)


def too_many_fail_on_the_last_process() -> str:
    """The last process skips more than it may. Both learn of it, and the program goes on."""
    model = FussyOnLastRank(7.0)
    model.train_only = False
    data = float64_data(16)
    data.tensors[0][8:, 0] = 7.0
    trainer = adamw_trainer(model, callbacks=[SkipFailedBatchesCallback(1, phases=["evaluation"])])
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer.evaluate(data, 2)
    trainer.evaluate(float64_data(8), 2)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_processes_learn_that_one_has_skipped_too_many(two_ranks):
    other, own = two_ranks(too_many_fail_on_the_last_process)
    assert own == "ValueError: cannot digest this"
    assert other.startswith("RuntimeError: More than max_failures=1 batches have failed. Last failure: ")
    assert "'rank': 1" in other
