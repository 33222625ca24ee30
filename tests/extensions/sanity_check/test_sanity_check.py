"""The sanity check, an evaluation before training: what it finds, and that it has no side effects."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite import callbacks as shipped
from pytorch_accel_lite.base.warnings_and_errors import notes_of
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, listener, weights


class Restless(nn.Linear):
    """Changes a buffer, an attribute, a list and an embedding in every pass, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(5, 1, dtype=torch.float64)
        self.register_buffer("passes", torch.zeros(()))
        self.signs = nn.Embedding(4, 1, max_norm=0.1, dtype=torch.float64)
        self.count = 0
        self.sizes: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.count += 1
        self.sizes.append(len(inputs))
        inputs = inputs + self.signs((inputs[:, 0] > 0).long() + 2 * (not self.training))
        return super().forward(inputs) + 0.01 * torch.rand(()) + 0.01 * random.random() + 0.01 * np.random.rand()


class Rows(Dataset[Any]):
    """Draws from a generator of its own, and counts what is read."""

    def __init__(self, size: int) -> None:
        self.data = float64_data(size)
        self.generator = np.random.default_rng(0)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        inputs, target = self.data[index]
        return inputs + self.generator.normal(), target


def trained(sanity_check: bool, **kwargs: Any) -> tuple[Trainer, Rows]:
    from pytorch_accel_lite.callbacks import MetricsCallback

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, rows, events = Restless(), Rows(9), []
    names = ("on_eval_epoch_end", "on_eval_step_end", "on_train_step_end")
    noting = listener(**{name: lambda t, name=name, **_: events.append(name) for name in names})
    trainer = adamw_trainer(model, callbacks=[MetricsCallback("mse"), noting], **kwargs)
    trainer.train(float64_data(20), 2, rows, sanity_check=sanity_check)
    trainer.events = events
    return trainer, rows


@pytest.mark.extension("metrics")
@pytest.mark.parametrize("kwargs", [{}, {"seed": 3}], ids=["", "seed"])
def test_the_sanity_check_leaves_no_trace(kwargs):
    (tried, read), (plain, read_plain) = trained(True, **kwargs), trained(False, **kwargs)
    assert equal_weights(weights(tried.model), weights(plain.model))
    assert tried.run_history.to_dict() == plain.run_history.to_dict()
    assert tried.events == plain.events
    assert read.read == read_plain.read
    model, other = tried.model, plain.model
    assert (model.count, model.sizes, float(model.passes)) == (other.count, other.sizes, float(other.passes))
    assert tried.progress == plain.progress


def test_the_sanity_check_reads_one_batch_of_each_dataset():
    seen = []

    class Noting(Rows):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    stop = listener(on_train_epoch_start=lambda t, **_: (_ for _ in ()).throw(KeyError("here")))
    for data, kwargs, expected in (
        ({"a": Noting(9), "b": Noting(3)}, {}, [0, 1, 2, 3, 0, 1, 2]),
        (DataLoader(Noting(9), 2, num_workers=2), {}, [0, 1]),
        (Noting(9), {"sanity_check": False}, []),
        (DataLoader(Noting(9), batch_sampler=[[1, 2], [3, 4]]), {}, []),
    ):
        seen.clear()
        with pytest.raises(KeyError, match=r"^'here'"):
            adamw_trainer(float64_model(), callbacks=[stop]).train(
                float64_data(8), 1, data, per_device_batch_size=4, **kwargs
            )
        assert seen == expected


def refused(error: type[Exception], data: Any, *callbacks: Any, model: Any = None, **kwargs: Any) -> list[str]:
    trainer = adamw_trainer(model or float64_model(), callbacks=[*callbacks], **kwargs)
    with pytest.raises(error) as caught:
        trainer.train(float64_data(20), 1, data)
    assert trainer.progress.update == 0
    notes = notes_of(caught.value)
    assert notes[-1].startswith("The evaluation was tried on one batch before the first update")
    return notes


@pytest.mark.extension("error_notes", "metrics")
def test_mistakes_are_found_before_training():
    from pytorch_accel_lite.callbacks import MetricsCallback

    inputs, targets = float64_data(9).tensors
    (note, _) = refused(RuntimeError, {"valid": TensorDataset(inputs[:, :4], targets)})
    assert note.startswith("In evaluation on 'valid', step 0:\n  batch: ")

    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise OSError("unreadable")

    (sample, note, _) = refused(OSError, Broken(9))
    assert sample == "In reading Broken[0]."
    assert re.match(r"In evaluation, step 0, reading a batch:\n  dataset: Broken; samples \[0, 1, ", note)
    metric = MetricsCallback({"accuracy": MulticlassAccuracy(3)})
    notes = refused(RuntimeError, TensorDataset(inputs, targets), metric)
    assert notes[0].startswith("In the metric 'accuracy', a MulticlassAccuracy(num_classes=3), updated")
    assert notes[1].startswith("In evaluation, step 0:")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from float64_data(4)


class OwnStep(Trainer):
    def calculate_eval_batch_loss(self, batch: Any) -> Any:
        return super().calculate_eval_batch_loss(batch)


class Listens(TrainerCallback):
    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("stream", marks=pytest.mark.extension("streams")),
        "own step",
        "own event",
        "hook",
        "compiled",
        pytest.param("split", marks=pytest.mark.extension("failed_batches")),
        pytest.param("skipped", marks=pytest.mark.extension("failed_batches")),
    ],
)
def test_the_sanity_check_skips_steps_with_side_effects(case):
    passes = []
    model = float64_model()
    kind = OwnStep if case == "own step" else Trainer
    if case == "hook":
        model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    elif case == "compiled":
        model.compile(backend="eager")
    loss = nn.MSELoss()
    callbacks = [Listens] if case == "own event" else []
    if case == "skipped":
        callbacks = [shipped.SkipFailedBatchesCallback(phases=["evaluation"])]
    trainer = kind(
        model,
        lambda outputs, targets: passes.append(torch.is_grad_enabled()) or loss(outputs, targets),
        torch.optim.SGD(model.parameters(), 0.01),
        callbacks=callbacks,
    )
    trainer.train(
        float64_data(8), 1, Stream() if case == "stream" else float64_data(4), auto_microbatch=case == "split"
    )
    assert passes[0] is True


def test_a_resumed_run_skips_the_sanity_check(tmp_path):
    evaluations: list[bool] = []

    class Loss(nn.MSELoss):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            evaluations.append(not torch.is_grad_enabled())
            return super().forward(outputs, targets)

    for epochs, tried in ((1, True), (2, False)):
        evaluations.clear()
        trainer = adamw_trainer(float64_model(), Loss(), callbacks=[SaveTrainingStateCallback(tmp_path)])
        trainer.train(float64_data(8), epochs, float64_data(4), resume_from="latest")
        assert evaluations[0] is tried


def failures_of_ranks() -> list[Any]:
    inputs, targets = float64_data(9).tensors
    trainer = adamw_trainer(float64_model())
    try:
        trainer.train(float64_data(20), 1, TensorDataset(inputs[:, :4], targets))
    except RuntimeError as error:
        return [trainer.progress.update, notes_of(error)[-1][:30]]
    return []


def test_all_processes_run_the_sanity_check(two_ranks):
    assert two_ranks(failures_of_ranks) == [[0, "The evaluation was tried on on"]] * 2
