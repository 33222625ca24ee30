"""A run equals a hand-written loop bit for bit."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.base.random_generators import derive_seed
from tests.ranks import Recorder
from tests.shared_trainings import schedule, tokens, uneven_batches
from tests.small_models import (
    Overflows,
    Rows,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    hand_written_loop,
    largest_difference,
    listener,
    on_one_process,
    weights,
)
from tests.streams import LengthBuckets


@pytest.mark.parametrize("dataset", [float64_data(37), Rows(float64_data(37))], ids=["memory", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_equals_a_hand_written_loop_bit_for_bit(dataset, dtype):
    tensors = [t.to(dtype) for t in (dataset if isinstance(dataset, TensorDataset) else dataset.data).tensors]
    data = TensorDataset(*tensors) if isinstance(dataset, TensorDataset) else Rows(TensorDataset(*tensors))
    ours, theirs = float64_model(dtype=dtype), float64_model(dtype=dtype)
    losses = hand_written_loop(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), DataLoader(data, 8), epochs=3)

    trainer = adamw_trainer(ours)
    trainer.train(data, 3, per_device_batch_size=8, train_dataloader_kwargs={"shuffle": False})

    assert equal_weights(ours.state_dict(), theirs.state_dict())
    assert trainer.run_history.get_metric_values("train_loss_epoch") == losses


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_manual_seed_gives_the_bits_of_a_hand_written_loop(workers):
    def model() -> nn.Module:
        return nn.Sequential(float64_model(1), nn.Dropout(0.5), nn.Linear(1, 1).double())

    data = Rows(float64_data(21))
    torch.manual_seed(5)
    theirs = model()
    ours = copy.deepcopy(theirs)
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers)
    torch.manual_seed(11)
    hand_written_loop(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), loader, epochs=3)
    torch.manual_seed(11)
    kwargs = {"num_workers": workers, "persistent_workers": False}
    adamw_trainer(ours).train(data, 3, per_device_batch_size=4, train_dataloader_kwargs=kwargs)
    assert equal_weights(ours.state_dict(), theirs.state_dict())


def test_data_in_memory_are_shuffled_like_by_a_dataloader():
    data = float64_data(21)
    ours, theirs = float64_model(), float64_model()
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    hand_written_loop(theirs, optimizer, DataLoader(data, 4, shuffle=True), epochs=3)
    torch.manual_seed(11)
    adamw_trainer(ours).train(data, 3, per_device_batch_size=4)
    assert equal_weights(ours.state_dict(), theirs.state_dict())


def window_gradients(accumulation: int, size: int, batch: int = 6) -> list[dict[str, torch.Tensor]]:
    """The gradients of the mean loss of each window, along the weights that a plain loop takes."""
    x, y = float64_data(size).tensors
    model = float64_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    gradients = []
    for _ in range(3):
        for start in range(0, size, batch * accumulation):
            window = slice(start, start + batch * accumulation)
            nn.functional.mse_loss(model(x[window]), y[window]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("size", [37, 30, 4])
def test_accumulated_gradients_are_those_of_the_whole_window(accumulation, size):
    ours = on_one_process(uneven_batches)[accumulation, size]["gradients"]
    expected = window_gradients(accumulation, size)
    assert len(ours) == len(expected)
    assert max(largest_difference(a, b) for a, b in zip(ours, expected, strict=True)) < 1e-10


def test_micro_batches_of_unequal_size_weigh_by_their_samples():
    x, y = float64_data(11).tensors
    recorder, model = Recorder(), float64_model()
    trainer = adamw_trainer(model, callbacks=[recorder])
    kwargs = {"batch_sampler": LengthBuckets()}
    trainer.train(
        float64_data(11), 1, per_device_batch_size=2, gradient_accumulation_steps=5, train_dataloader_kwargs=kwargs
    )
    whole = float64_model()
    nn.functional.mse_loss(whole(x), y).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    assert len(recorder.gradients) == 1
    assert largest_difference(recorder.gradients[0], expected) < 1e-10


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_over_items_weigh_by_their_items(accumulation):
    recorded = tokens()[accumulation]
    x, y = float64_data(40).tensors
    mask = torch.rand(40, 1, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[::2] = True
    model = float64_model()
    window = slice(0, 6 * accumulation)
    ((model(x[window]) - y[window]) ** 2)[mask[window]].mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert largest_difference(recorded["gradients"][0], expected) < 1e-10


def test_a_batch_whose_samples_are_all_dropped_has_no_weight():
    class OfTheRest(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.model(batch[0])
            loss = (outputs - batch[1]).square().sum() / max(len(outputs), 1)
            return {"loss": loss, "model_outputs": outputs, "num_items_in_batch": len(outputs)}

        calculate_eval_batch_loss = calculate_train_batch_loss

    def positive(samples):
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return x[x[:, 0] > 0], y[x[:, 0] > 0]

    x, y = float64_data(8).tensors
    x[:4, 0], x[4:, 0] = -1, 1
    data, model, kept = Rows(TensorDataset(x, y)), float64_model(), float64_model()
    trainer = OfTheRest(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    in_order = {"shuffle": False, "num_workers": 0}
    trainer.train(
        data,
        1,
        per_device_batch_size=2,
        collate_fn=positive,
        gradient_accumulation_steps=4,
        train_dataloader_kwargs=in_order,
    )
    half = TensorDataset(x[4:], y[4:])
    hand_written_loop(kept, torch.optim.SGD(kept.parameters(), lr=0.1), DataLoader(half, 4), 1)
    assert largest_difference(weights(model), weights(kept)) < 1e-12
    found = trainer.evaluate(data, 2, {"num_workers": 0}, positive)
    assert found == pytest.approx(adamw_trainer(model).evaluate(half))


def test_the_reported_loss_does_not_depend_on_accumulation():
    losses = []
    for accumulation in (1, 2, 5):
        model = float64_model()
        frozen = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = adamw_trainer(model, optimizer=frozen)
        trainer.train(float64_data(37), 1, per_device_batch_size=4, gradient_accumulation_steps=accumulation)
        losses.append(trainer.run_history.get_latest_metric("train_loss_epoch"))
    x, y = float64_data(37).tensors
    expected = nn.functional.mse_loss(float64_model()(x), y).item()
    assert losses == pytest.approx([expected] * 3, abs=1e-12)


def test_updates_and_schedule_have_the_requested_length():
    for (accumulation, limit), run in schedule().items():
        steps_per_epoch = -(-37 // 6)
        expected = limit or 2 * -(-steps_per_epoch // accumulation)
        assert run["updates"] == run["scheduler_steps"] == len(run["rates"]) == expected
        assert run["rates"][-1] == pytest.approx(run["lowest"], rel=1e-9)


def test_a_limit_of_updates_ends_the_first_epoch_with_evaluation():
    trainer = adamw_trainer(float64_model())
    trainer.train(float64_data(80), 5, float64_data(8), per_device_batch_size=4, max_num_train_steps=7)
    assert trainer.progress.update == 7
    assert trainer.run_history.to_dict().keys() == {"train_loss_epoch", "eval_loss_epoch"}


class SeesGradients(TrainerCallback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.largest: list[float] = []

    def on_optimizer_step_start(self, trainer, **kwargs):
        gradients = [p.grad.flatten() for p in trainer.model.parameters()]
        self.norms.append(torch.cat(gradients).norm().item())
        self.largest.append(torch.cat(gradients).abs().max().item())


class CountsClips(Trainer):
    clips = 0

    def clip_gradients(self):
        self.clips += 1
        super().clip_gradients()


def test_clipping_happens_once_an_update():
    model, seen = float64_model(), SeesGradients()
    trainer = CountsClips(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[seen])
    trainer.train(float64_data(24), 1, per_device_batch_size=2, gradient_accumulation_steps=3, gradient_clip_norm=0.1)
    assert trainer.clips == trainer.progress.update == 4
    assert max(seen.norms) <= 0.1 + 1e-6
    trainer.train(float64_data(24), 1, per_device_batch_size=2, gradient_clip_value=0.01)
    assert max(seen.largest[4:]) <= 0.01


def test_a_skipped_update_does_not_step_the_scheduler(scaled_accelerator):
    model = float64_model(dtype=torch.float32)
    before_second: list[dict[str, torch.Tensor]] = []

    class Weights(TrainerCallback):
        def on_optimizer_step_end(self, trainer, **kwargs):
            before_second.append(copy.deepcopy(model.state_dict()))

    trainer = Overflows(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Weights],
        accelerator=scaled_accelerator,
    )
    trainer.train(
        float64_data(16, dtype=torch.float32),
        1,
        per_device_batch_size=4,
        create_scheduler_fn=partial(StepLR, step_size=1, gamma=0.5),
    )
    assert equal_weights(before_second[0], before_second[1])  # the update was skipped
    assert not equal_weights(before_second[1], before_second[2])
    assert trainer.scheduler.last_epoch == 3  # of four updates


def test_clipping_sees_unscaled_gradients(scaled_accelerator):
    norms = []
    for scaled in (False, True):
        accelerator = scaled_accelerator
        if not scaled:
            accelerator = Accelerator(cpu=True)
            accelerator.native_amp = False
        model, seen = float64_model(dtype=torch.float32), SeesGradients()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[seen], accelerator=accelerator)
        kwargs = {"train_dataloader_kwargs": {"shuffle": False}, "gradient_clip_norm": 100.0}
        trainer.train(float64_data(16, dtype=torch.float32), 1, per_device_batch_size=4, **kwargs)
        norms.append(seen.norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)  # the second computes in reduced precision


class ClipsWithTorch(Trainer):
    def clip_gradients(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class ClipsWithAccelerate(Trainer):
    def clip_gradients(self):
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)


@pytest.mark.parametrize("limit", [None, 100.0])
@pytest.mark.parametrize("trainer_class", [ClipsWithTorch, ClipsWithAccelerate])
def test_overridden_clipping_sees_unscaled_gradients(trainer_class, limit, scaled_accelerator):
    model, seen = float64_model(dtype=torch.float32), SeesGradients()
    norms = listener(on_optimizer_step_start=lambda t, **_: t.log("norm", t.gradient_norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=[seen, norms], accelerator=scaled_accelerator)
    before = weights(model)
    trainer.train(float64_data(16, dtype=torch.float32), 1, per_device_batch_size=4, gradient_clip_value=limit)
    assert seen.norms == pytest.approx([0.1] * 4, rel=1e-3)
    assert trainer.run_history.get_latest_metric("train_norm_epoch") > 0.2  # before it was clipped
    assert largest_difference(weights(model), before) > 0.02  # in four updates of length 0.1
    assert "unscale_gradients" not in vars(scaled_accelerator)


def test_named_losses_are_summed_and_recorded_by_name():
    class TwoLosses(Trainer):
        def calculate_train_batch_loss(self, batch):
            outputs = self.model(batch[0])
            named = {"fit": nn.functional.mse_loss(outputs, batch[1]), "size": outputs.abs().mean()}
            return {"loss": named, "model_outputs": outputs}

        calculate_eval_batch_loss = calculate_train_batch_loss

    model, summed = float64_model(), float64_model()
    trainer = TwoLosses(model, None, torch.optim.AdamW(model.parameters(), lr=0.01), callbacks=[])
    data = float64_data(12)
    trainer.train(data, 1, data, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
    loader = DataLoader(data, 4)
    hand_written_loop(
        summed,
        torch.optim.AdamW(summed.parameters(), lr=0.01),
        loader,
        1,
        lambda out, y: nn.functional.mse_loss(out, y) + out.abs().mean(),
    )
    assert equal_weights(model.state_dict(), summed.state_dict())
    history = trainer.run_history.to_dict()
    assert {"train_loss_epoch", "train_fit_epoch", "train_size_epoch", "eval_fit_epoch"} <= history.keys()
    total = history["train_fit_epoch"][0] + history["train_size_epoch"][0]
    assert history["train_loss_epoch"][0] == pytest.approx(total, abs=1e-12)


def test_two_trainers_in_one_process_do_not_disturb_each_other():
    data = float64_data(20)
    kwargs = {"per_device_batch_size": 4, "train_dataloader_kwargs": {"shuffle": False}}
    expected = float64_model()
    loader = DataLoader(data, 4)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    hand_written_loop(expected, optimizer, loader, 2)
    first, second = (adamw_trainer(float64_model()) for _ in range(2))
    for trainer in (first, second, first, second):
        trainer.train(data, 1, **kwargs)
    assert equal_weights(first.model.state_dict(), expected.state_dict())
    assert equal_weights(second.model.state_dict(), expected.state_dict())
    assert first.progress.update == 5  # counts are those of the last run
    assert len(first.run_history.get_metric_values("train_loss_epoch")) == 1
    first.train(data, 1, reset_run_history=False, **kwargs)
    assert len(first.run_history.get_metric_values("train_loss_epoch")) == 2


def test_a_seed_makes_a_run_repeatable():
    def run(seed: int | None) -> dict[str, torch.Tensor]:
        model = nn.Sequential(float64_model(), nn.Dropout(0.3))
        adamw_trainer(model, seed=seed).train(float64_data(20), 2, per_device_batch_size=4)
        return model.state_dict()

    torch.manual_seed(0)
    first = run(seed=1)
    torch.manual_seed(99)
    assert equal_weights(first, run(seed=1))
    assert not equal_weights(first, run(seed=2))
    assert not equal_weights(run(seed=None), run(seed=None))


def test_seed_mixing_has_no_collisions_among_neighbours():
    seeds = {derive_seed(seed, epoch, position) for seed in range(4) for epoch in range(10) for position in range(500)}
    assert len(seeds) == 4 * 10 * 500


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_users_model_is_returned_unwrapped(precision, no_accelerator):
    model = float64_model(dtype=torch.float32)
    attributes = set(vars(model))
    seen = []

    class Watch(nn.MSELoss):
        def forward(self, outputs, targets):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(outputs, targets)

    class Linear(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model.append(Linear(1, 1))
    trainer = adamw_trainer(model, Watch(), accelerator=Accelerator(cpu=True, mixed_precision=precision))
    data = float64_data(16, dtype=torch.float32)
    for _ in range(2):
        trainer.train(data, 1, data, per_device_batch_size=4)
    trainer.evaluate(data)
    assert trainer.predict(data).dtype == torch.float32
    assert trainer.model is model
    assert set(vars(model)) == attributes
    assert (torch.bfloat16 in seen) == (precision == "bf16")
    assert trainer.run_config.mixed_precision == precision


def test_a_compiled_model_trains_like_the_plain_one():
    plain = float64_model(dtype=torch.float32)
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    data = float64_data(16, dtype=torch.float32)
    for model in (plain, compiled):
        trainer = adamw_trainer(model)
        trainer.train(data, 2, data, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
        assert trainer.model is model
    assert equal_weights(plain.state_dict(), trainer.get_model(keep_torch_compile=False).state_dict())


def test_onecycle_needs_no_spare_steps():
    model = float64_model()
    trainer = adamw_trainer(model)
    trainer.train(
        float64_data(20),
        2,
        per_device_batch_size=4,
        create_scheduler_fn=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10),
    )
    assert trainer.scheduler.last_epoch == 10


@pytest.mark.parametrize("limit", [None, 0.1])
def test_gradient_norms_are_those_of_unscaled_gradients(limit, scaled_accelerator):
    def run(**kwargs: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        def look(trainer: Trainer) -> None:
            norms.append(float(trainer.gradient_norm))
            if trainer.progress.update == 1:
                trainer.skip_update()

        norms: list[float] = []
        model = float64_model(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = adamw_trainer(model, None, optimizer, callbacks=[listener(on_optimizer_step_start=look)], **kwargs)
        data = float64_data(16, dtype=torch.float32)
        trainer.train(
            data, 1, per_device_batch_size=4, gradient_clip_value=limit, train_dataloader_kwargs={"shuffle": False}
        )
        return norms, weights(model)

    norms, scaled = run(accelerator=scaled_accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    expected, plain = run()
    assert norms == pytest.approx(expected, rel=1e-2)  # in half precision
    assert len(norms) == 4
    assert largest_difference(scaled, plain) < 1e-2
