"""A training batch out of memory is split, and has the gradient of the whole batch."""

from __future__ import annotations

from collections import UserList, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, SkipFailedBatchesCallback, TerminateOnNaNCallback
from tests.extensions.failed_batches.fussy import (
    ALL_BUT_THE_THIRD,
    WITHOUT_WORKERS,
    Critical,
    Fussy,
    fit,
    histories_agree,
    without_dropout,
)
from tests.small_models import (
    Rows,
    equal_weights,
    float64_data,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    train,
    weights,
)


def test_a_batch_out_of_memory_leaves_no_trace():
    found, expected = Critical(limit=4, callbacks=[]), Critical(callbacks=[])
    found.train(
        float64_data(8), 1, per_device_batch_size=8, train_dataloader_kwargs=WITHOUT_WORKERS, auto_microbatch=True
    )
    expected.train(
        float64_data(8),
        1,
        per_device_batch_size=4,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs=WITHOUT_WORKERS,
    )
    assert found.num_microbatches == 2
    assert largest_difference(found.everything(), expected.everything()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_split_batch_has_the_same_gradient(error, capsys):
    model = without_dropout(limit=3, error=error)
    found = fit(model, per_device_batch_size=10, auto_microbatch=True)
    expected = fit(without_dropout(), per_device_batch_size=10)
    assert largest_difference(weights(found.model), weights(expected.model)) < 1e-12
    assert histories_agree(found, expected)
    assert found.progress == expected.progress
    assert found.num_microbatches == 4
    assert model.sizes == [10, 5, 2, 3, 2, 3, *[2, 3, 2, 3] * 3]
    assert capsys.readouterr().out.splitlines() == [
        f"Out of memory with {samples} samples: from now on each batch is split into {parts} micro-batches. "
        "The gradients are still those of the whole batch."
        for samples, parts in ((10, 2), (5, 4))
    ]


def test_auto_microbatch_changes_nothing_if_batches_fit():
    assert equal_weights(weights(fit(Fussy(), auto_microbatch=True).model), weights(fit(Fussy()).model))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_split_batches_accumulate(accumulation):
    arguments = {"per_device_batch_size": 4, "gradient_accumulation_steps": accumulation, "gradient_clip_norm": 0.5}
    data = float64_data(18)  # the last batch is smaller, and so is the last window
    found = fit(without_dropout(limit=3), data=data, auto_microbatch=True, **arguments)
    expected = fit(without_dropout(), data=data, **arguments)
    assert largest_difference(weights(found.model), weights(expected.model)) < 1e-12


class Tokens(Trainer):
    """A loss over items of which samples have different numbers."""

    def calculate_train_batch_loss(self, batch):
        x, y = batch
        outputs = self.model(x)
        mask = x[:, 1:2] > -1
        count = mask.sum()
        return {
            "loss": {
                "error": ((outputs - y) ** 2 * mask).sum() / count,
                "size": (outputs.abs() * mask).sum() / count.clamp(min=1),
            },
            "model_outputs": outputs,
            "num_items_in_batch": count,
            "names": ["a"] * len(x),
        }


def test_parts_of_a_batch_are_weighed_by_their_items():
    def run(model: nn.Module, **kwargs: Any) -> tuple[Trainer, list[Any]]:
        seen = []

        class Watch(TrainerCallback):
            def on_train_step_end(self, trainer, batch_output, **kwargs):
                output = dict(batch_output)
                seen.append(
                    (
                        output["model_outputs"].detach(),
                        float(output["loss"].detach()),
                        int(output["num_items_in_batch"]),
                    )
                )

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Tokens(model, None, optimizer, callbacks=[Watch])
        trainer.train(float64_data(20), 1, per_device_batch_size=10, train_dataloader_kwargs=WITHOUT_WORKERS, **kwargs)
        return trainer, seen

    found, outputs = run(without_dropout(limit=3), auto_microbatch=True)
    expected, expected_outputs = run(without_dropout())
    assert largest_difference(weights(found.model), weights(expected.model)) < 1e-12
    assert histories_agree(found, expected)
    for (whole, loss, items), (of_parts, loss_of_parts, items_of_parts) in zip(expected_outputs, outputs, strict=True):
        assert torch.allclose(whole, of_parts)
        assert (loss_of_parts, items_of_parts) == (pytest.approx(loss), items)


class FewTokens(Trainer):
    """A loss over items, of which batches may have none."""

    as_number = False

    def calculate_train_batch_loss(self, batch):
        x, y = batch
        mask = x[:, 1:2] > 0
        loss = ((self.model(x) - y) ** 2 * mask).sum() / mask.sum().clamp(min=1)
        return {"loss": loss, "num_items_in_batch": int(mask.sum()) if self.as_number else mask.sum()}


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize(
    "divided",
    [{"auto_microbatch": True}, pytest.param({"logical_processes": 2}, marks=pytest.mark.extension("logical"))],
)
def test_a_divided_batch_without_items_has_a_loss_of_zero(divided, as_number):
    data = float64_data(12)
    data.tensors[0][:, 1] = torch.arange(-4, 8)  # none in the first of three batches, and in one sample of the second
    losses = []
    note = listener(on_train_step_end=lambda t, batch_output, **_: losses.append(float(batch_output["loss"].detach())))

    def run(model: nn.Module, logical_processes: int | None = None, **kwargs: Any) -> Trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        callbacks = [note, TerminateOnNaNCallback]
        trainer = FewTokens(model, None, optimizer, callbacks, seed=0, logical_processes=logical_processes)
        trainer.as_number = as_number
        batch_size = 4 // (logical_processes or 1)
        trainer.train(data, 1, per_device_batch_size=batch_size, train_dataloader_kwargs=WITHOUT_WORKERS, **kwargs)
        return trainer

    found = run(without_dropout(limit=3 if "auto_microbatch" in divided else None), **divided)
    expected = run(without_dropout())
    assert histories_agree(found, expected)
    assert largest_difference(weights(found.model), weights(expected.model)) < 1e-12
    assert losses[0] == losses[3] == 0
    assert losses[:3] == pytest.approx(losses[3:])


@pytest.mark.thorough
def test_a_resumed_run_still_splits_and_ends_in_the_same_bits(tmp_path, capsys):
    def run(**kwargs: Any) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        return fit(Fussy(limit=3), [saving], per_device_batch_size=10, auto_microbatch=True, **kwargs)

    whole = run()
    capsys.readouterr()
    resumed = run(resume_from=tmp_path / "update-000000001")
    assert "Out of memory" not in capsys.readouterr().out
    assert equal_weights(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize(("limit", "auto_microbatch"), [(0, True), (3, False)])  # not one sample; not split
def test_an_unsplittable_batch_out_of_memory_is_an_error(limit, auto_microbatch):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fit(Fussy(limit=limit), auto_microbatch=auto_microbatch)


def test_a_sample_too_large_for_memory_skips_its_batch():
    poison = float64_data(20)[9][0][0].item()
    skip = SkipFailedBatchesCallback()
    found = fit(without_dropout(poison=poison, error=MemoryError), [skip], auto_microbatch=True)
    expected = fit(without_dropout(), loader=ALL_BUT_THE_THIRD)
    assert [(failure["step"], failure["indices"]) for failure in skip.failures] == [(2, [8, 9, 10, 11])] * 2
    assert found.num_microbatches == 4
    assert largest_difference(weights(found.model), weights(expected.model)) < 1e-12


def test_batches_of_dicts_and_lists_are_split():
    sizes = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1).double()

        def forward(self, x, names, scale):
            sizes.append((len(x), names, scale.item()))
            if len(x) > 2:
                raise MemoryError
            return self.layer(x) * scale

    x, y = float64_data(4).tensors

    def collate(rows: Any) -> dict[str, Any]:
        batch = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        return {"x": batch[0], "y": batch[1], "names": [f"{i}" for i in range(len(rows))], "scale": torch.tensor(2.0)}

    data = Rows(TensorDataset(x, y))
    fit(Model(), data=data, collate_fn=collate, num_epochs=1, auto_microbatch=True)
    assert sizes == [(4, ["0", "1", "2", "3"], 2.0), (2, ["0", "1"], 2.0), (2, ["2", "3"], 2.0)]


@dataclass(frozen=True)
class Pair:
    """A batch that counts its samples itself."""

    x: torch.Tensor
    y: torch.Tensor
    numbers: np.ndarray
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.x))


class Holder:
    """A batch, or a part of one, of a class that cannot be split."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OfParts(Trainer):
    """Steps on batches that have a length, until they have two samples or one."""

    def calculate_train_batch_loss(self, batch):
        self.seen = [*getattr(self, "seen", []), (batch.size, len(batch.y), batch.numbers.tolist())]
        if len(batch.x) > 2:
            raise MemoryError
        return {"loss": self.loss_func(self.model(batch.x), batch.y)}


def test_dataclasses_and_arrays_are_split():
    def collate(rows: Any) -> Pair:
        return Pair(*map(torch.stack, zip(*rows, strict=True)), np.arange(len(rows)))

    arguments = {"per_device_batch_size": 4, "collate_fn": collate, "train_dataloader_kwargs": WITHOUT_WORKERS}
    trainer = make_trainer(trainer_class=OfParts)
    trainer.train(make_data(4), 1, auto_microbatch=True, **arguments)
    assert trainer.seen == [(4, 4, [0, 1, 2, 3]), (2, 2, [0, 1]), (2, 2, [2, 3])]
    whole = train(make_trainer(), size=4, batch_size=4)
    assert largest_difference(weights(trainer.model), weights(whole.model)) < 1e-6


@pytest.mark.parametrize("kind", [Holder, deque, UserList])
def test_an_unsplittable_container_of_samples_is_named(kind):
    class Unpacks(Trainer):
        def calculate_train_batch_loss(self, batch):
            raise MemoryError

    def collate(rows: Any) -> Any:
        x, y = map(torch.stack, zip(*rows, strict=True))
        return {"x": kind(x), "y": y, "name": "four"}

    trainer = make_trainer(trainer_class=Unpacks)
    with pytest.raises(ValueError, match=r"A (Holder|deque|UserList) in a batch of 4 samples .*dataclasses of tensors"):
        trainer.train(make_data(4), 1, per_device_batch_size=4, collate_fn=collate, auto_microbatch=True)
