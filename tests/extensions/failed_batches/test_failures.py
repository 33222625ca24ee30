"""Failing batches are skipped, and batches out of memory are split; nothing else changes."""

from __future__ import annotations

import json
from collections import OrderedDict, UserList, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import (
    MetricsCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    StepBasedEvaluationCallback,
    TerminateOnNaNCallback,
)
from pytorch_accel_lite.tracking import Progress
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, OrderedStream, global_batch, rank, world_size
from tests.shared_trainings import TokenTrainer
from tests.small_models import (
    Broken,
    Expanded,
    Rows,
    Stream,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    train,
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


WITHOUT_WORKERS = {"shuffle": False, "num_workers": 0}


class Fussy(nn.Module):
    """Refuses batches with certain samples, or with too many."""

    def __init__(
        self, poison: float | None = None, limit: int | None = None, error: type[Exception] = ValueError
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
        self.layers = nn.Sequential(*layers).double()
        self.poison, self.limit, self.error = poison, limit, error
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        y = self.layers(x)
        if self.poison is not None and (x[:, 0] == self.poison).any():
            raise self.error("cannot digest this")
        if self.limit is not None and len(x) > self.limit and self.training:
            if self.error is MemoryError:
                raise MemoryError
            y = y + torch.empty(2**46, dtype=torch.float64).sum()  # 512 TiB: the allocator refuses
        return y


def without_dropout(**kwargs: Any) -> Fussy:
    model = Fussy(**kwargs)
    model.layers[1] = nn.Identity()
    return model


class Batches:
    """A batch sampler of given batches."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def fit(model: nn.Module, callbacks: Any = (), data: Any = None, loader: Any = None, **kwargs: Any) -> Trainer:
    trainer = adamw_trainer(model, callbacks=list(callbacks))
    kwargs = {"per_device_batch_size": 4, "num_epochs": 2} | kwargs
    torch.manual_seed(4)
    trainer.train(data or float64_data(20), train_dataloader_kwargs=WITHOUT_WORKERS | (loader or {}), **kwargs)
    return trainer


def histories_agree(first: Trainer, second: Trainer) -> bool:
    one, other = first.run_history.to_dict(), second.run_history.to_dict()
    return one.keys() == other.keys() and all(one[name] == pytest.approx(other[name]) for name in one)


ALL_BUT_THE_THIRD = {"batch_sampler": Batches([[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]])}


def test_a_failed_batch_is_skipped_as_if_it_did_not_exist(capsys):
    poison = float64_data(20)[9][0][0].item()
    skip = SkipFailedBatchesCallback()
    found = fit(Fussy(poison), [skip])
    expected = fit(Fussy(), loader=ALL_BUT_THE_THIRD)
    assert equal_weights(weights(found.model), weights(expected.model))
    assert found.run_history.to_dict() == expected.run_history.to_dict()
    assert found.progress.update == 8
    assert found.progress.samples == 40  # what was read, not what was trained on
    error = "ValueError: cannot digest this"
    failure = {"step": 2, "rank": 0, "indices": [8, 9, 10, 11], "error": error}
    assert skip.failures == [{"phase": "training", "epoch": epoch} | failure for epoch in (1, 2)]
    assert f"Batch skipped: epoch 1, step 2, process 0, samples [8, 9, 10, 11]: {error}" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 3])
def test_an_unreadable_sample_skips_only_its_batch(workers, seed):
    skip = SkipFailedBatchesCallback()
    trainer = make_trainer([skip], seed=seed)
    train(trainer, train_dataset=Broken(8, 4), train_dataloader_kwargs={"shuffle": False, "num_workers": workers})
    assert [(f["step"], f["indices"]) for f in skip.failures] == [(2, [4, 5])]
    assert "scan 4 is unreadable" in skip.failures[0]["error"]
    assert trainer.progress.update == 3


class Watched(nn.MSELoss):
    """A loss whose mean is assigned again by each batch, and which refuses certain targets afterwards."""

    def __init__(self, poison: float | None, limit: int | None) -> None:
        super().__init__()
        self.poison, self.limit = poison, limit
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + outputs.detach().mean()
        loss = super().forward(outputs * self.scale, targets)
        if self.limit is not None and len(outputs) > self.limit:
            raise MemoryError
        if self.poison is not None and (targets == self.poison).any():
            loss.backward(retain_graph=True)
            raise ValueError("cannot digest this")
        return loss


class Critical(Trainer):
    """Trains a critic in each step, keeps gradients of another for the next one, and counts in a registered object."""

    def __init__(self, poison: float | None = None, limit: int | None = None, **kwargs: Any) -> None:
        torch.manual_seed(0)
        model, loss = nn.Linear(5, 1).double(), Watched(poison, limit)
        self.critic, self.slow = (nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).double() for _ in range(2))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.1)
        parameters = [*model.parameters(), *loss.parameters()]
        super().__init__(model, loss, torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **kwargs)
        self.progress_of_steps = Progress()
        self.register_for_checkpointing("steps", self.progress_of_steps)

    def calculate_train_batch_loss(self, batch):
        outputs = self.model(batch[0])
        self.critic(outputs.detach()).square().mean().backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()
        self.slow(outputs.detach()).square().mean().backward()
        self.progress_of_steps.step += 1
        return {"loss": self.loss_func(outputs, batch[1]) + self.critic(outputs).mean()}

    def everything(self) -> dict[str, Any]:
        modules = nn.ModuleList([self.model, self.loss_func, self.critic, self.slow])
        gradients = {f"gradient {name}": p.grad for name, p in self.slow.named_parameters()}
        steps = {"steps": torch.tensor(self.progress_of_steps.step)}
        moments = {str(key): state["exp_avg"] for key, state in self.critic_optimizer.state_dict()["state"].items()}
        return weights(modules) | gradients | moments | steps


def test_a_batch_that_fails_leaves_no_trace_beside_the_model():
    poison = float64_data(20)[9][1].item()
    skip = SkipFailedBatchesCallback()
    arguments = {"per_device_batch_size": 4, "gradient_accumulation_steps": 1}
    found = Critical(poison, callbacks=[skip])
    found.train(float64_data(20), 2, train_dataloader_kwargs=WITHOUT_WORKERS, **arguments)
    expected = Critical(callbacks=[])
    expected.train(float64_data(20), 2, train_dataloader_kwargs=ALL_BUT_THE_THIRD | {"num_workers": 0}, **arguments)
    assert len(skip.failures) == 2
    assert equal_weights(found.everything(), expected.everything())


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


def test_a_failed_batch_leaves_no_trace_in_an_expanded_buffer():
    poison = float64_data(20)[9][0][0].item()
    skip = SkipFailedBatchesCallback()
    found, expected = (nn.Sequential(Fussy(value), Expanded(1)) for value in (poison, None))
    fit(found, [skip])
    fit(expected, loader=ALL_BUT_THE_THIRD)
    assert len(skip.failures) == 2
    assert equal_weights(weights(found), weights(expected))


def test_without_the_callback_the_error_ends_the_run():
    with pytest.raises(OSError, match="scan 4 is unreadable"):
        train(make_trainer(), train_dataset=Broken(8, 4), train_dataloader_kwargs={"num_workers": 0})


@pytest.mark.parametrize(("fails", "accumulation", "left"), [
    (slice(9, 10), 3, [[*range(8)], [*range(12, 20)]]),  # in the third of five batches
    (slice(8, 16), 2, [[*range(8)], [*range(16, 20)]]),  # all of a window, which makes no update
])  # fmt: skip
def test_an_update_uses_the_rest_of_its_window(fails, accumulation, left):
    data = float64_data(20)
    data.tensors[0][fails, 0] = 7.0
    skip = SkipFailedBatchesCallback()
    found = fit(without_dropout(poison=7.0), [skip], data, gradient_accumulation_steps=accumulation)
    expected = fit(without_dropout(), loader={"batch_sampler": Batches(left)}, data=data)
    assert found.progress.update == expected.progress.update == 4
    assert largest_difference(weights(found.model), weights(expected.model)) < 1e-12


def test_an_epoch_whose_batches_are_all_skipped_is_an_error():
    data = float64_data(20)
    data.tensors[0][:, 0] = 7.0
    with pytest.raises(ValueError, match="Every batch of the epoch was skipped"):
        fit(Fussy(7.0), [SkipFailedBatchesCallback()], data)


def test_exceeding_max_failures_ends_the_run_with_the_error():
    data = float64_data(20)
    data.tensors[0][8:, 0] = 7.0
    skip = SkipFailedBatchesCallback(max_failures=2)
    with pytest.raises(KeyError, match="cannot digest this"):
        fit(Fussy(7.0, error=KeyError), [skip], data)
    assert [failure["step"] for failure in skip.failures] == [2, 3, 4]


def test_a_resumed_run_knows_earlier_failures(tmp_path):
    poison = float64_data(20)[9][0][0].item()

    def run(epochs: int, **kwargs: Any) -> tuple[Trainer, SkipFailedBatchesCallback]:
        skip = SkipFailedBatchesCallback()
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        return fit(Fussy(poison), [skip, saving], num_epochs=epochs, **kwargs), skip

    whole, skipped = run(2)
    resumed, again = run(2, resume_from=tmp_path / "update-000000003")
    assert again.failures == skipped.failures
    assert equal_weights(weights(resumed.model), weights(whole.model))


def test_a_skipped_batch_fires_its_event_in_place_of_its_end():
    seen = []

    class Watch(TrainerCallback):
        def on_train_step_end(self, trainer, step, **kwargs):
            seen.append(step)

        def on_train_batch_skipped(self, trainer, step, failures, error, **kwargs):
            seen.append((step, failures[0]["rank"], type(error)))

    poison = float64_data(20)[9][0][0].item()
    fit(Fussy(poison), [SkipFailedBatchesCallback(), Watch()], num_epochs=1)
    assert seen == [0, 1, (2, 0, ValueError), 3, 4]


@pytest.mark.extension("metrics_file")
def test_an_update_whose_last_batch_was_skipped_is_logged(tmp_path):
    listed = [
        SkipFailedBatchesCallback(),
        callbacks.MetricsFileCallback(tmp_path / "m.jsonl", every_n_updates=1),
        StepBasedEvaluationCallback(1),
    ]
    trainer = make_trainer(listed)
    arguments = {"train_dataloader_kwargs": {"num_workers": 0, "shuffle": False}, "gradient_accumulation_steps": 2}
    train(trainer, train_dataset=Broken(16, broken=3), eval_dataset=make_data(), **arguments)
    rows = [json.loads(line) for line in (tmp_path / "m_updates.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
    assert len(trainer.run_history.get_metric_values("intermediate_eval_loss")) == 4


@pytest.mark.extension("streams")
def test_a_stream_continues_when_the_model_refuses_a_batch():
    class Refuses(nn.Linear):
        def forward(self, x):
            if (x == Stream().data[2][0]).all(1).any():
                raise ValueError("no")
            return super().forward(x)

    skip = SkipFailedBatchesCallback()
    trainer = make_trainer([skip], model=Refuses(4, 1))
    train(trainer, train_dataset=Stream(), train_dataloader_kwargs={})
    assert [failure["indices"] for failure in skip.failures] == [None]
    assert (trainer.progress.update, trainer.progress.samples) == (2, 6)


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


@pytest.mark.parametrize("arguments", [{"callbacks": [SkipFailedBatchesCallback]}, {"auto_microbatch": True}])
def test_a_step_that_stops_the_run_has_not_failed(arguments):
    class Stops(Trainer):
        def calculate_train_batch_loss(self, batch):
            if self.progress.step == 1:
                raise StopTrainingError("enough")
            return super().calculate_train_batch_loss(batch)

    skipped: list[Any] = []
    watch = listener(on_train_batch_skipped=lambda t, **kwargs: skipped.append(kwargs))
    trainer = make_trainer([*arguments.get("callbacks", []), watch], trainer_class=Stops)
    train(trainer, auto_microbatch=arguments.get("auto_microbatch", False))
    assert (trainer.stop_reason, trainer.progress.update, skipped) == ("enough", 1, [])


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


# ------------------------------------------------------------------------------------------------- in evaluation


class FullInEvaluation(nn.Module):
    """Has memory for three samples in evaluation, and keeps the sizes of the batches that fit."""

    def __init__(self, limit: int | None = 3) -> None:
        super().__init__()
        self.inner, self.limit = float64_model(), limit
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(x), 1, dtype=x.dtype)
        if not self.training and self.limit is not None and len(x) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        self.sizes.append(len(x))
        return self.inner(x) + 0 * noise


class EvaluatesTokens(Trainer):
    """Losses over items, nested outputs with a loss of their own, lists of samples, and values that are logged."""

    def calculate_eval_batch_loss(self, batch):
        x, y = batch
        self.log("before", x[:, 0].mean())
        self.log("weighted", x[:, 0].mean(), weight=len(x))
        outputs = self.model(x)
        mask = x[:, 1:2] > 0
        count = mask.sum()
        loss = ((outputs - y) ** 2 * mask).sum() / count.clamp(min=1)
        self.log("after", outputs.mean())
        return {
            "loss": {"error": loss, "size": (outputs.abs() * mask).sum() / count.clamp(min=1)},
            "model_outputs": OrderedDict(loss=outputs.mean(), logits=(outputs, outputs.abs()), cache=None),
            "num_items_in_batch": count,
            "found": [{"box": row} for row in outputs],
        }


def evaluated(limit: int | None, method: str = "evaluate", data: Any = None) -> Any:
    """Return the metrics of an evaluation, the outputs of its batches, the model and the generators' state."""
    seen: list[Any] = []

    def keep(trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        trainer.log("from_callback", batch[0].mean())
        trainer.accelerator.gather_for_metrics(batch[0])  # with it, processes have filler batches
        seen.append((len(batch[0]), batch_output))

    def logits(batch: Any, batch_output: Any) -> Any:
        return batch_output["model_outputs"]["logits"][0].flatten(), batch[1].flatten()

    mean = MetricsCallback(MeanSquaredError(), logits)
    model = FullInEvaluation(limit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = EvaluatesTokens(model, nn.MSELoss(), optimizer, callbacks=[listener(on_eval_step_end=keep), mean])
    data = data or float64_data(27)
    arguments = {"per_device_batch_size": global_batch(12), "auto_microbatch": True}
    torch.manual_seed(5)
    if method == "evaluate":
        trainer.evaluate(data, **arguments)
    else:
        trainer.train(data, 2, data, train_dataloader_kwargs=IN_ORDER, **arguments)
    return trainer.run_history.to_dict(), seen, model, torch.get_rng_state()


@pytest.mark.parametrize("method", ["evaluate", "train"])
def test_a_split_evaluation_batch_has_the_same_metrics(method, capsys):
    history, seen, model, generators = evaluated(3, method)
    expected, whole, _, expected_generators = evaluated(None, method)
    assert history.keys() == expected.keys()
    assert len(history) > 6
    for name, values in expected.items():
        assert history[name] == pytest.approx(values)
    for (size, output), (full_size, full) in zip(seen, whole, strict=True):
        assert size == full_size == output["batch_size"]
        assert type(output["model_outputs"]) is OrderedDict
        assert len(output["found"]) == size
        close(output, full)
    if method == "evaluate":
        assert model.sizes == [3] * 8 + [1, 1, 1]
        assert torch.equal(generators, expected_generators)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Out of memory" in line]
    assert lines == [
        f"Out of memory with {samples} samples in evaluation: from now on each evaluation batch is split into {parts} "
        "parts. Losses and metrics are still those of the whole batch."
        for samples, parts in ((12, 2), (6, 4))
    ]


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    else:
        assert found == expected


def test_a_micro_batch_without_items_has_no_weight():
    class MeanOfItems(Trainer):
        def calculate_eval_batch_loss(self, batch):
            outputs = self.model(batch[0])
            items = batch[1] > 0
            return {"loss": outputs[items].mean(), "num_items_in_batch": items.sum()}

    x, _ = float64_data(6).tensors
    data = TensorDataset(x, torch.tensor([1.0, 0, 1, 0, 0, 0])[:, None])
    losses = [
        MeanOfItems(FullInEvaluation(limit), None, None).evaluate(data, auto_microbatch=True)["evaluation_loss"]
        for limit in (3, None)
    ]
    assert losses[0] == pytest.approx(losses[1])


def test_an_evaluation_without_a_loss_is_split(capsys):
    class OnlyOutputs(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": None, "model_outputs": self.model(batch[0])}

    mean = MetricsCallback(MeanSquaredError())
    trainer = adamw_trainer(FullInEvaluation(), callbacks=[mean])
    trainer.__class__ = OnlyOutputs
    trainer.evaluate(float64_data(), per_device_batch_size=8, auto_microbatch=True)
    found = trainer.run_history.to_dict()
    trainer.evaluate(float64_data(), per_device_batch_size=3)
    assert trainer.run_history.to_dict() == {name: pytest.approx(values * 2) for name, values in found.items()}
    assert "split into 4 parts" in capsys.readouterr().out


def test_an_evaluation_batch_is_split_only_on_request():
    trainer = adamw_trainer(FullInEvaluation())
    with pytest.raises(torch.OutOfMemoryError):
        trainer.evaluate(float64_data(), per_device_batch_size=4)
    trainer.evaluate(float64_data(), per_device_batch_size=3)
    with pytest.raises(torch.OutOfMemoryError):
        adamw_trainer(FullInEvaluation(0)).evaluate(float64_data(), auto_microbatch=True)


@pytest.mark.extension("logical")
def test_an_evaluation_of_logical_processes_is_not_split():
    with pytest.raises(ValueError, match="does not work with logical_processes"):
        make_trainer(logical_processes=2, seed=0).evaluate(make_data(), auto_microbatch=True)


def test_an_evaluation_in_a_run_is_split_too():
    model = FullInEvaluation()
    ask = listener(on_train_epoch_end=lambda t: t.evaluate(float64_data(), per_device_batch_size=8))
    trainer = adamw_trainer(model, callbacks=[ask, StepBasedEvaluationCallback(1)])
    trainer.train(float64_data(), 1, float64_data(), auto_microbatch=True)
    assert trainer.num_microbatches == 1
    assert len(trainer.run_history.get_metric_values("evaluation_loss")) == 1


def evaluated_on_processes() -> Any:
    history, seen, *_ = evaluated(3 if rank() else None, data=OrderedStream(float64_data(13)))
    expected, whole, *_ = evaluated(None, data=OrderedStream(float64_data(13)))
    assert [output["batch_size"] for _, output in seen] == [6, 1 - rank()]
    assert [size for size, _ in seen] == [size for size, _ in whole]
    return history, expected


@pytest.mark.extension("streams")
def test_one_process_splits_its_evaluation_batches_by_itself(two_ranks):
    for history, expected in two_ranks(evaluated_on_processes):
        for name, values in expected.items():
            assert history[name] == pytest.approx(values)


def test_max_failures_must_be_positive():
    with pytest.raises(ValueError, match="max_failures=0 must be at least 1"):
        SkipFailedBatchesCallback(0)


# ------------------------------------------------------------------- left out of evaluations and predictions

ALL_PHASES: Any = ("training", "evaluation", "prediction")
IN_HERE = {"num_workers": 0}


class Logs(Trainer):
    """Logs before the model may fail, and draws random numbers."""

    def calculate_eval_batch_loss(self, batch):
        self.log("before", batch[0].mean())
        torch.rand(3)
        return super().calculate_eval_batch_loss(batch)


def inferring(poison: float | None, *callbacks: Any, trainer_class: type[Trainer] = Logs, **kwargs: Any) -> Trainer:
    trainer = adamw_trainer(Fussy(poison, **kwargs), callbacks=[MetricsCallback(MeanSquaredError()), *callbacks])
    trainer.__class__ = trainer_class
    return trainer


def test_an_evaluation_leaves_out_the_failed_batch_alone(capsys):
    data = float64_data(20)
    poison = data[9][0][0].item()
    seen: list[Any] = []
    watch = listener(on_eval_batch_skipped=lambda t, **kwargs: seen.append(kwargs))
    skip = SkipFailedBatchesCallback(phases=["evaluation"])
    torch.manual_seed(1)
    found = inferring(poison, skip, watch).evaluate(data, 4)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    others = Subset(data, [*range(8), *range(12, 20)])
    assert found == inferring(None).evaluate(others, 4)
    assert len(found) == 3
    assert torch.equal(state, torch.get_rng_state())
    failure = {"rank": 0, "indices": [8, 9, 10, 11], "error": "ValueError: cannot digest this"}
    assert skip.failures == [{"phase": "evaluation", "epoch": 0, "step": 2} | failure]
    (event,) = seen
    assert (event["failures"], event["step"], str(event["error"])) == ([failure], 2, "cannot digest this")
    expected = "Skipped in the evaluation: 4 samples, step 2 (samples [8, 9, 10, 11]). First error: ValueError: cannot"
    assert expected in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot digest this"):
        inferring(poison, SkipFailedBatchesCallback()).evaluate(data, 4)
    with pytest.raises(ValueError, match="cannot digest this"):
        inferring(poison, SkipFailedBatchesCallback(phases=["prediction"])).evaluate(data, 4)


@pytest.mark.extension("error_notes")
def test_the_error_of_a_batch_left_out_says_where_it_was():
    data, errors = float64_data(20), []
    watch = listener(on_eval_batch_skipped=lambda t, error, **kwargs: errors.append(error))
    skip = SkipFailedBatchesCallback(phases=["evaluation"])
    inferring(data[9][0][0].item(), skip, watch).evaluate(data, 4)
    assert "In evaluation, step 2:" in errors[0].__notes__[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_omit_and_name_failed_samples(workers, capsys):
    skip = SkipFailedBatchesCallback(phases=ALL_PHASES)
    seen: list[Any] = []
    watch = listener(on_predict_batch_skipped=lambda t, step, **kwargs: seen.append(step))
    trainer = make_trainer([skip, watch])
    outputs = trainer.predict(Broken(8, 4), 2, {"num_workers": workers})
    whole = trainer.predict(make_data(8), 2)
    assert skip.failures == []  # of the latest
    assert torch.equal(outputs, whole[[0, 1, 2, 3, 6, 7]])
    said = capsys.readouterr().out
    assert "Skipped in the prediction: 2 samples, step 2 (samples [4, 5]). First error: OSError: scan 4" in said
    assert seen == [2]
    parts = [len(part) for part in trainer.predict_iter(Broken(8, 4), 2, {"num_workers": workers})]
    assert parts == [2, 2, 2]
    assert [failure["indices"] for failure in skip.failures] == [[4, 5]]
    assert skip.failures[0]["phase"] == "prediction"


def test_an_evaluation_without_a_good_batch_is_an_error():
    data = float64_data(8)
    skip = SkipFailedBatchesCallback(phases=ALL_PHASES)
    for name in ("evaluate", "predict"):
        trainer = inferring(None, skip, trainer_class=Trainer)
        trainer.model.register_forward_pre_hook(lambda module, args: torch.zeros(1)[len(args[0])])
        with pytest.raises(RuntimeError, match=r"All batches of the .* failed: 8 samples, step 0 \(samples") as caught:
            getattr(trainer, name)(data, 4)
        assert isinstance(caught.value.__cause__, IndexError)


def test_evaluations_within_a_run_skip_until_too_many_fail():
    data = float64_data(20)
    poison = data[9][0][0].item()
    part = Subset(data, range(8))

    def run(most: int) -> tuple[Trainer, SkipFailedBatchesCallback]:
        skip = SkipFailedBatchesCallback(most, phases=["evaluation"])
        trainer = inferring(poison, skip)
        trainer.train(part, 2, {"clean": part, "all": data}, per_device_batch_size=4)
        return trainer, skip

    trainer, skip = run(2)
    assert [(f["phase"], f["epoch"], f["dataset"], f["step"]) for f in skip.failures] == [
        ("evaluation", epoch, "all", 2) for epoch in (1, 2)
    ]
    assert len(trainer.run_history.get_metric_values("all_eval_loss_epoch")) == 2
    again = SkipFailedBatchesCallback()
    again.load_state_dict(skip.state_dict())
    assert again.failures == skip.failures
    with pytest.raises(ValueError, match="cannot digest this"):
        run(1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopTrainingError])
def test_errors_that_end_an_evaluation_are_not_skipped(error):
    seen: list[Any] = []
    watch = listener(on_eval_batch_skipped=lambda t, **kwargs: seen.append(kwargs))
    data = float64_data(8)
    poison = data[5][0][0].item()
    trainer = inferring(poison, SkipFailedBatchesCallback(phases=ALL_PHASES), watch, error=error)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            trainer.evaluate(data, 4)
    else:
        trainer.evaluate(data, 4)
        assert trainer.stop_reason == "cannot digest this"
    assert not seen


def test_a_batch_out_of_memory_is_split_and_not_skipped(capsys):
    skip = SkipFailedBatchesCallback(phases=ALL_PHASES)
    trainer = adamw_trainer(FullInEvaluation(), callbacks=[skip])
    whole = adamw_trainer(FullInEvaluation(None))
    found, expected = (each.evaluate(float64_data(12), 12, auto_microbatch=True) for each in (trainer, whole))
    assert found == pytest.approx(expected)
    assert not skip.failures
    trainer.get_model().limit = 0
    with pytest.raises(RuntimeError, match="All batches of the evaluation failed"):
        trainer.evaluate(float64_data(4), 2, auto_microbatch=True)


@pytest.mark.extension("logical")
def test_batches_of_logical_processes_cannot_be_skipped():
    trainer = make_trainer([SkipFailedBatchesCallback(phases=["evaluation"])], logical_processes=2, seed=0)
    for call in (trainer.evaluate, lambda data: trainer.train(data, 1)):
        with pytest.raises(ValueError, match="'evaluation' does not work with logical_processes"):
            call(make_data())
    assert len(trainer.predict(make_data(4))) == 4


@pytest.mark.parametrize("phases", [(), "evaluation", ["test"]])
def test_skipping_refuses_unknown_phases(phases):
    with pytest.raises(ValueError, match=r"phases=.* must be a tuple of one or more of 'training'"):
        SkipFailedBatchesCallback(phases=phases)


def left_out_on_the_last_process() -> Any:
    """The last process leaves out its first batch; callbacks gather in each step, or only at the end."""
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
