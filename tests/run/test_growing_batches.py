"""Accumulation steps that change during a run: gradients, counts and resuming."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.placeholders import PlaceholderError
from tests.launching import SOAK, some_of
from tests.ranks import shared_folder, world_size
from tests.small_models import equal_weights, float64_data, float64_model, largest_difference, listener, weights

GROWTH = {0: 1, 3: 2, 5: 4}
BATCH, SIZE = 4, 37  # ten batches in an epoch, of which the last has one sample


class Own(Trainer):
    """A step of the user's own."""

    def train_step(self, batch: Any) -> Any:
        loss = self.loss_func(self.model(batch[0]), batch[1])
        self.update(loss)
        return {"loss": loss}


def run(growth: Any = GROWTH, epochs: Any = 3, kind: Any = Trainer, folder: Any = None, **kwargs: Any) -> Any:
    """Return the weights, the gradients of every update, and the samples of each."""
    model = float64_model()
    gradients: list[dict[str, torch.Tensor]] = []
    samples: list[list[int]] = [[]]

    def see(trainer: Any, **kwargs: Any) -> None:
        samples[-1] += sorted(chain.from_iterable(trainer.all_gather_object(trainer.batch_indices)))

    def keep(trainer: Any, **kwargs: Any) -> None:
        gradients.append({name: p.grad.clone() for name, p in trainer.get_model().named_parameters()})

    def end(trainer: Any, **kwargs: Any) -> None:
        samples.append([])

    callbacks = [listener(on_train_step_end=see, on_optimizer_step_start=keep, on_update_end=end)]
    if folder is not None:
        callbacks.append(SaveTrainingStateCallback(folder, save_every_n_steps=1))
    logical = kwargs.pop("logical", None)
    trainer = kind(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callbacks,
        seed=2,
        logical_processes=logical,
    )
    size = BATCH // logical if logical else max(BATCH // world_size(), 2)
    options = {"per_device_batch_size": size, "gradient_accumulation_steps": growth} | kwargs
    trainer.train(float64_data(SIZE), epochs, **options)
    return {"weights": weights(model), "gradients": gradients, "samples": samples[:-1], "trainer": trainer}


def batches_in_updates(epochs: int) -> list[int]:
    """How many batches each update of ten batches in an epoch has, counted one by one."""
    counts: list[int] = []
    for _ in range(epochs):
        left = 10
        while left:
            wanted = GROWTH[max(first for first in GROWTH if first <= len(counts))]
            counts.append(min(wanted, left))
            left -= counts[-1]
    return counts


@pytest.mark.parametrize("kind", [Trainer, pytest.param(Own, marks=pytest.mark.extension("manual_optimization"))])
def test_gradients_are_those_of_a_window_of_any_size(kind):
    result = run(kind=kind)
    data, model = float64_data(SIZE), float64_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = [len(samples) for samples in result["samples"]]
    assert sizes[:5] == [4, 4, 4, 8, 8]
    assert sizes[5:7] == [9, 16], "the rest of the epoch, then four batches"
    for samples, gradients in zip(result["samples"], result["gradients"], strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.tensors[0][samples]), data.tensors[1][samples]).backward()
        assert largest_difference(gradients, {name: p.grad for name, p in model.named_parameters()}) < 1e-14
        optimizer.step()
    assert largest_difference(weights(model), result["weights"]) < 1e-12


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_the_number_of_updates_is_known_before(epochs):
    expected = len(batches_in_updates(epochs))
    trainer = run(epochs=epochs)["trainer"]
    assert trainer.progress.update == trainer.run_config.max_num_train_steps == expected
    assert run(epochs=None, max_num_train_steps=expected)["trainer"].run_config.num_epochs == epochs


def test_a_schedule_is_as_long_as_the_run():
    lr_at = partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=1e-9)
    create = partial(lr_at, total_iters=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)
    assert run(create_scheduler_fn=create)["trainer"].optimizer.param_groups[0]["lr"] == pytest.approx(1e-10)


def resumed(of: Callable[[list[Path]], list[Path]] = list, **kwargs: Any) -> Any:
    """Whether the runs that resume from each state, or from some of them, end in the bits of the whole one."""
    with shared_folder() as folder:
        whole = run(folder=folder / "whole", **kwargs)
        same = []
        for state in of(sorted((folder / "whole").glob("update-*"))[:-1]):
            again = run(folder=folder / f"after-{state.name}", resume_from=state, **kwargs)
            samples = whole["samples"][-len(again["samples"]) :]
            same.append(equal_weights(again["weights"], whole["weights"]) and again["samples"] == samples)
    return world_size(), same


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, id="plain"),
        pytest.param({"kind": Own}, id="own step", marks=pytest.mark.extension("manual_optimization")),
        pytest.param({"logical": 2}, id="logical", marks=[pytest.mark.extension("logical"), pytest.mark.thorough]),
    ],
)
def test_a_run_resumes_to_the_same_bits(kwargs):
    _, same = resumed(**kwargs)
    assert len(same) == len(batches_in_updates(3)) - 1
    assert all(same)


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("count", [2, 3] if SOAK else [2])
def test_several_processes_resume_to_the_same_bits(job, count):
    for processes, same in job(count).run(resumed, some_of):
        assert processes == count
        assert len(same) >= 3
        assert all(same)


def of_logical_processes() -> Any:
    return run(logical=2)["weights"]


@pytest.mark.processes
@pytest.mark.extension("logical")
def test_logical_processes_give_the_same_bits_on_two(two_ranks):
    for found in two_ranks(of_logical_processes):
        assert equal_weights(found, of_logical_processes())


def test_a_run_continues_with_other_window_sizes(tmp_path):
    """A run of constant windows resumes with growing ones, in the middle of an epoch."""
    run(growth=3, epochs=1, folder=tmp_path / "states")
    state = tmp_path / "states" / "update-000000002"
    shutil.copytree(state, tmp_path / "apart" / state.name)
    result = run(folder=tmp_path / "apart", resume_from="latest", epochs=1)
    assert [len(samples) for samples in result["samples"]] == [4, 8, 1]


@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps")
def test_a_schedule_that_would_have_to_be_recreated_is_refused(tmp_path):
    create = partial(torch.optim.lr_scheduler.StepLR, step_size=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)
    run(epochs=1, folder=tmp_path, create_scheduler_fn=create, per_device_batch_size=4)
    for path in sorted(Path(tmp_path).glob("update-*"))[1:]:
        shutil.rmtree(path)
    with pytest.raises(ValueError, match=r"changes during the run, .* Resume it with the number of processes and the"):
        run(epochs=1, folder=tmp_path, create_scheduler_fn=create, per_device_batch_size=8, resume_from="latest")


@pytest.mark.parametrize("name", ["NUM_UPDATE_STEPS_PER_EPOCH", "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH"])
def test_growing_batches_refuse_updates_per_epoch_in_schedules(name):
    create = partial(torch.optim.lr_scheduler.StepLR, step_size=getattr(TrainerPlaceholderValues, name))
    with pytest.raises(
        PlaceholderError, match=rf"{name} cannot be resolved: .* Use MAX_NUM_TRAIN_STEPS, or a schedule"
    ):
        run({0: 1, 5: 2}, create_scheduler_fn=create)
    run({0: 2, 5: 2}, create_scheduler_fn=create)


@pytest.mark.parametrize(
    ("growth", "error", "words"),
    [
        ({}, ValueError, "gradient_accumulation_steps={} must begin with 0, such as {0: 1, 1000: 2}"),
        ({5: 2}, ValueError, "gradient_accumulation_steps={5: 2} must begin with 0"),
        ({0: 0}, ValueError, "gradient_accumulation_steps[0]=0 must be at least 1"),
        ({0: 1, "5": 2}, TypeError, "a key of gradient_accumulation_steps='5' must be a number of updates"),
        ({0: 1, 5: 1.5}, TypeError, "gradient_accumulation_steps[5]=1.5 must be an integer"),
    ],
)
def test_growing_accumulation_refuses_bad_updates_and_counts(growth, error, words):
    with pytest.raises(error, match=re.escape(words)):
        run(growth)


def test_a_change_that_is_never_reached_is_named():
    with pytest.warns(UserWarning, match=r"\{0: 1, 10: 2\} has a change that is never reached: the run has 10 updates"):
        run({0: 1, 10: 2}, epochs=1)
