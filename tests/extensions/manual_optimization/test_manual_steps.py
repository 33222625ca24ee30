"""An overridden ``train_step`` that updates its optimizers itself."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.ranks import check_processes, every_state, shared_folder, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    train,
)

REAL = TensorDataset(torch.randn(26, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


NOISE = torch.randn(26, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


FULL = TensorDataset(REAL.tensors[0], NOISE)


def make_networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a critic."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return generator, critic


def make_optimizers(generator: nn.Module, critic: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(generator.parameters(), lr=0.02),
        "critic": torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9),
    }


class GAN(Trainer):
    """The critic is updated first, then the generator, which uses the new critic."""

    def __init__(self, normalises: bool = False, **kwargs: Any) -> None:
        generator, self.critic = make_networks()
        if normalises:
            for network in (generator, self.critic):
                network.insert(1, nn.BatchNorm1d(6).double())
        optimizers = make_optimizers(generator, self.critic)
        super().__init__(generator, None, optimizers, **{"callbacks": []} | kwargs)

    def train_step(self, batch: Any) -> None:
        real, noise = batch
        fake = self.model(noise)
        scores = self.critic(torch.cat([real, fake.detach()]))
        self.update(scores[len(real) :].mean() - scores[: len(real)].mean(), "critic")
        self.update(-self.critic(fake).mean(), "generator")

    def networks(self) -> dict[str, torch.Tensor]:
        """All weights."""
        named = {"generator": self.get_model(), "critic": self.critic}
        return {f"{of}.{name}": value.clone() for of, m in named.items() for name, value in m.state_dict().items()}


def train_gan(folder: Path | None = None, **kwargs: Any) -> GAN:
    """Train for two epochs."""
    trainer = GAN(callbacks=every_state(folder), seed=0)
    arguments = {"per_device_batch_size": 4 // world_size(), "train_dataloader_kwargs": {"shuffle": False}} | kwargs
    trainer.train(FULL, 2, **arguments)
    return trainer


COUNTS = [1.0, 4.0, 2.0, 2.0, 7.0, 1.0, 3.0, 5.0, 1.0, 1.0, 2.0]


class OverItems(Trainer):
    """A loss averaged over items; a sample with n items has a loss of n."""

    returns = False

    def train_step(self, batch: Any) -> Any:
        items = batch.sum()
        loss = batch.square().sum() / items + 0 * self.model(batch).sum()
        self.update(loss, num_items=items)
        return {"loss": loss} if self.returns else None


# -------------------------------------------------------------------------------------------- exact


def by_hand(accumulation: int = 1, clip: float | None = None) -> dict[str, torch.Tensor]:
    """The hand-written loop."""
    generator, critic = make_networks()
    optimizers = make_optimizers(generator, critic)
    models = {"generator": generator, "critic": critic}
    batches = [tuple(tensor[i : i + 4] for tensor in FULL.tensors) for i in range(0, 26, 4)]
    windows = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]

    def step(name: str) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(models[name].parameters(), clip)
        optimizers[name].step()
        optimizers[name].zero_grad()

    for window in windows * 2:
        size = sum(len(real) for real, _ in window)
        for number, (real, noise) in enumerate(window, start=1):
            share = 1 if accumulation == 1 else len(real) / size
            fake = generator(noise)
            scores = critic(torch.cat([real, fake.detach()]))
            ((scores[len(real) :].mean() - scores[: len(real)].mean()) * share).backward()
            if number == len(window):
                step("critic")
            (-critic(fake).mean() * share).backward(inputs=list(generator.parameters()))
            if number == len(window):
                step("generator")
    return copy.deepcopy({f"{n}.{name}": v for n, m in models.items() for name, v in m.state_dict().items()})


def test_a_gan_equals_the_hand_written_loop_bit_for_bit():
    trainer = train_gan()
    assert equal_weights(trainer.networks(), by_hand())
    assert trainer.progress.update == 14


@pytest.mark.parametrize(("accumulation", "clip"), [(3, None), (2, 0.1)])
def test_windows_are_weighed_and_clipped_for_each_optimizer(accumulation, clip):
    trainer = train_gan(gradient_accumulation_steps=accumulation, gradient_clip_norm=clip)
    assert largest_difference(trainer.networks(), by_hand(accumulation, clip)) < 1e-12


def networks_and_losses(trainer: GAN) -> dict[str, torch.Tensor]:
    history = trainer.run_history.to_dict().items()
    return trainer.networks() | {name: torch.tensor([*values], dtype=torch.float64) for name, values in history}


@pytest.mark.thorough
@pytest.mark.soak
def test_processes_train_as_one_and_resume_to_the_same_bits(two_ranks):
    (whole, *_), _ = check_processes(two_ranks, train_gan, networks_and_losses, resumed=5)
    losses = {"train_loss_epoch", "train_generator_epoch", "train_critic_epoch"}
    assert {name for name in whole if "." not in name} == losses


class Weighed(Trainer):
    """Losses averaged over some elements of a batch."""

    def train_step(self, batch):
        x, y = batch
        mask = (x[:, :1] > 0).float()
        loss = ((self.model(x) - y).square() * mask).sum() / mask.sum().clamp(min=1)
        self.update(loss, num_items=mask.sum())
        return {"loss": loss}


def test_windows_weighed_by_items_resume_to_the_same_bits(tmp_path):
    def training(folder, **kwargs):
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1, save_at_end=False)
        trainer = make_trainer([saving], float64_model(dtype=torch.float32), Weighed, seed=3)
        data = float64_data(64, dtype=torch.float32)
        trainer.train(data, 2, per_device_batch_size=5, gradient_accumulation_steps=3, **kwargs)
        return trainer.model.state_dict()

    whole = training("whole")
    states = sorted((tmp_path / "whole").glob("update-*"))
    assert len(states) == 10
    assert all(equal_weights(training(state.name, resume_from=state), whole) for state in states)


def mean_over_items(batch_size: int = 4, returns: bool = False) -> float:
    """The loss that is recorded for an epoch."""
    trainer = make_trainer(model=nn.Linear(1, 1), trainer_class=OverItems, loss_func=None)
    trainer.returns = returns
    trainer.train([torch.tensor([count]) for count in COUNTS], 1, per_device_batch_size=batch_size)
    return float(trainer.run_history.get_latest_metric("train_loss_epoch"))


def test_the_recorded_loss_is_a_mean_over_items(two_ranks):
    mean = sum(n * n for n in COUNTS) / sum(COUNTS)  # the loss of a sample with n items is n
    for size in (1, 4, 13):
        assert mean_over_items(size) == pytest.approx(mean)
        assert mean_over_items(size, returns=True) == pytest.approx(mean)
    for found in two_ranks(mean_over_items):
        assert found == pytest.approx(mean)


def test_losses_of_optimizers_are_means_over_their_own_items():
    class Counted(GAN):
        def update(self, loss, optimizer):
            count = len(self.current_run.batch.data[0])
            super().update(loss * 0 + count, optimizer, num_items=2 * count if optimizer == "critic" else 1)

    trainer = Counted()
    trainer.train(FULL, 1, per_device_batch_size=20)  # then a batch of 6
    history = trainer.run_history
    assert history.get_latest_metric("train_critic_epoch") == pytest.approx((20 * 20 + 6 * 6) / 26)
    assert history.get_latest_metric("train_generator_epoch") == 13.0
    assert history.get_latest_metric("train_loss_epoch") == pytest.approx(2 * (20 * 20 + 6 * 6) / 26)  # over samples


def normalised() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return the networks after each update of a run with batch norm, and of one resumed from its middle."""
    found: list[list[dict[str, torch.Tensor]]] = []
    with shared_folder() as folder:
        for resume_from in (None, folder / "whole" / "update-000000003"):
            seen: list[dict[str, torch.Tensor]] = []
            looking = listener(on_update_end=lambda trainer, seen=seen, **_: seen.append(trainer.networks()))
            saving = SaveTrainingStateCallback(folder / ("again" if resume_from else "whole"), save_every_n_steps=3)
            trainer = GAN(normalises=True, callbacks=[saving, looking], seed=0)
            trainer.train(FULL, 2, per_device_batch_size=2, resume_from=resume_from)
            found.append(seen)
    return found[0], found[1]


@pytest.mark.thorough
def test_ranks_have_the_same_statistics_after_each_update(two_ranks):
    """Each rank normalises its own batches; the running statistics of rank 0 count, also beside the model."""
    first, second = two_ranks(normalised)
    for networks, others in zip(first[0], second[0], strict=True):
        assert equal_weights(networks, others)
    before, after = first[0][0], first[0][-1]
    for name in ("generator.1.running_mean", "critic.1.running_mean"):
        assert not torch.equal(before[name], after[name])
    assert after["critic.1.num_batches_tracked"] == 2 * len(first[0])
    for whole, resumed in (first, second):
        assert all(map(equal_weights, resumed, whole[3:]))
        assert len(resumed) == len(whole) - 3 == 11


def accumulated() -> dict[str, torch.Tensor]:
    """The weights after a run with windows of three batches."""
    return train_gan(gradient_accumulation_steps=3).networks()


def with_an_idle_rank(**kwargs: Any) -> dict[str, torch.Tensor]:
    """The weights after epochs whose last step has a single sample, and windows that end with it."""
    trainer = GAN(seed=0)
    data = TensorDataset(REAL.tensors[0][:13], NOISE[:13])
    size = {"per_device_batch_size": 4 // world_size(), "train_dataloader_kwargs": {"shuffle": False}}
    trainer.train(data, 2, gradient_accumulation_steps=2, gradient_clip_norm=0.5, **size)
    return trainer.networks()


def test_ranks_accumulate_as_one(two_ranks):
    alone = train_gan(gradient_accumulation_steps=3)
    for found in two_ranks(accumulated):
        assert largest_difference(found, alone.networks()) < 1e-12
    for found in two_ranks(with_an_idle_rank):
        assert largest_difference(found, with_an_idle_rank()) < 1e-12


def test_the_default_step_can_be_extended():
    class Extended(Trainer):
        def train_step(self, batch):
            return super().train_step(batch)

    expected = train(make_trainer(), epochs=2)
    trainer = train(make_trainer(trainer_class=Extended), epochs=2)
    assert equal_weights(trainer.model.state_dict(), expected.model.state_dict())
    assert trainer.run_history.to_dict() == expected.run_history.to_dict()


# -------------------------------------------------------------------------------------------- what goes with it


def test_each_optimizer_has_its_schedule_in_one_update_a_step():
    events: list[str] = []
    names = ["on_train_step_end", "on_update_end", "on_optimizer_step_start", "on_optimizer_step_end"]
    note = listener(**{name: lambda trainer, name=name, **_: events.append(name) for name in names})
    trainer = GAN(callbacks=[note])
    schedules = {"critic": partial(ExponentialLR, gamma=0.5)}
    trainer.train(FULL, 1, per_device_batch_size=13, create_scheduler_fn=schedules)
    assert trainer.progress.update == 2
    assert trainer.optimizer["critic"].param_groups[0]["lr"] == 0.05 / 4
    assert trainer.optimizer["generator"].param_groups[0]["lr"] == 0.02
    one = ["on_optimizer_step_start"] * 2 + ["on_optimizer_step_end", "on_train_step_end", "on_update_end"]
    assert events == one * 2


def test_schedules_of_several_optimizers_refuse_a_method_for_all():
    class StepsThem(GAN):
        def scheduler_step(self):
            raise AssertionError("it is refused before")

    schedules = {name: partial(ExponentialLR, gamma=0.5) for name in ("critic", "generator")}
    trainer = StepsThem()
    with pytest.raises(
        ValueError, match=r"StepsThem\.scheduler_step is overridden, but update\(\) steps the scheduler"
    ):
        trainer.train(FULL, 1, per_device_batch_size=13, create_scheduler_fn=schedules)
    assert trainer.progress.step == 0


def test_a_shared_schedule_is_stepped_once_per_step():
    trainer = GAN()
    trainer.train(FULL, 1, per_device_batch_size=13, create_scheduler_fn=partial(ExponentialLR, gamma=0.5))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.02 / 4, 0.05 / 4]


@pytest.mark.parametrize("name", ["critic", None])
def test_schedules_may_be_stepped_once_an_epoch(name):
    halves = partial(ExponentialLR, gamma=0.5)
    trainer = GAN()
    schedules = halves if name is None else {name: halves}
    trainer.train(FULL, 2, per_device_batch_size=13, create_scheduler_fn=schedules, scheduler_interval="epoch")
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == [0.02 / 4 if name is None else 0.02, 0.05 / 4]


def test_an_optimizer_passed_in_place_of_its_name_is_an_error():
    class PassesIt(GAN):
        def train_step(self, batch):
            self.update(self.model(batch[1]).sum(), optimizer=self.optimizer["critic"])

    names = "'generator', 'critic'"
    with pytest.raises(ValueError, match=rf"optimizer=\w+\(\.\.\.\)\): there is no such optimizer, only {names}"):
        PassesIt().train(FULL, 1)


def test_an_optimizer_may_be_updated_several_times_in_a_step():
    class Twice(GAN):
        def train_step(self, batch):
            for _ in range(2):
                super().train_step(batch)

    trainer = Twice()
    trainer.train(FULL, 1, per_device_batch_size=13)
    assert trainer.optimizer["generator"].state_dict()["state"][0]["step"] == 4
    assert trainer.progress.update == 2
    with pytest.raises(RuntimeError, match=r"update\(optimizer='critic'\) was called twice in a step"):
        trainer.train(FULL, 1, gradient_accumulation_steps=2)


def test_gradients_that_no_step_of_a_window_uses_are_an_error():
    class Rarely(Trainer):
        def train_step(self, batch):
            if self.progress.step % 2 == 0:
                self.update(self.model(batch[0]).mean())
            return {"loss": torch.tensor(0.0)}

    train(make_trainer(trainer_class=Rarely))
    with pytest.raises(RuntimeError, match=r"update\(optimizer='loss'\) was called in an accumulation window, but not"):
        train(make_trainer(trainer_class=Rarely), gradient_accumulation_steps=2)


def test_the_output_of_a_manual_step_is_recorded():
    seen: list[Any] = []

    class Returns(GAN):
        def train_step(self, batch):
            super().train_step(batch)
            return {"loss": torch.tensor(3.0), "images": "some"}

    see = listener(on_train_step_end=lambda t, batch_output, **_: seen.append(batch_output["images"]))
    trainer = Returns(callbacks=[see])
    trainer.train(FULL, 1, per_device_batch_size=13)
    assert seen == ["some", "some"]
    assert trainer.run_history.get_metric_values("train_loss_epoch") == [3.0]


@pytest.mark.extension("model_ema")
def test_an_average_follows_the_model_once_a_step():
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    trainer = GAN(callbacks=[average := ModelEmaCallback(decay=0.5, evaluate_during_training=False, save_path=None)])
    trainer.train(FULL, 1, per_device_batch_size=13)
    assert average.ema.num_updates == 2


def test_manual_steps_train_in_bfloat16(no_accelerator):
    types = set()

    class Half(Trainer):
        def train_step(self, batch):
            outputs = self.model[0](batch[0])
            types.add(outputs.dtype)
            self.update(self.model[2](outputs).mean())

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    train(make_trainer(trainer_class=Half, accelerator=accelerator))
    assert types == {torch.bfloat16}


@pytest.mark.extension("gradient_spikes")
def test_spikes_are_those_of_each_optimizer(capsys):
    class Spikes(GAN):
        """The generator's gradients are always larger than the critic's, one of which spikes."""

        def update(self, loss, optimizer):
            factor = 100.0 if optimizer == "generator" else 50.0 if self.progress.step == 4 else 1.0
            super().update(loss * factor, optimizer)

    trainer = Spikes(callbacks=[callbacks.GradientSpikeCallback(factor=5.0, warm_up_updates=2)])
    trainer.train(FULL, 1, per_device_batch_size=4)
    assert re.findall("Update .* skipped", capsys.readouterr().out) == ["Update 5 of 'critic' skipped"]


@pytest.mark.extension("gradient_spikes")
def test_gradients_of_an_optimizer_that_begins_late_are_used():
    class Late(GAN):
        def update(self, loss, optimizer):
            if optimizer == "critic" or self.progress.step >= 3:
                super().update(loss, optimizer)

    trainer = Late(callbacks=[callbacks.GradientSpikeCallback(warm_up_updates=2)])
    before = trainer.networks()
    trainer.train(FULL, 1, max_num_train_steps=4, per_device_batch_size=6)  # the generator is updated once
    now = trainer.networks()
    assert trainer.progress.update == 4
    assert not all(torch.equal(now[name], before[name]) for name in now if name.startswith("generator."))


@pytest.mark.extension("monitoring")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_each_optimizer_has_its_gradient_norms(clip):
    norms: dict[str, list[float]] = {"generator": [], "critic": []}

    class Norms(GAN):
        def clip_gradients(self):
            gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
            norms[self.current_run.training_step.updating].append(float(nn.utils.get_total_norm(gradients)))
            super().clip_gradients()

    trainer = Norms(callbacks=[callbacks.GradientNormCallback])
    trainer.train(FULL, 1, per_device_batch_size=9, gradient_clip_norm=clip)
    expected = {}
    for name, values in norms.items():
        expected[f"gradient_norm_{name}_mean"] = [pytest.approx(sum(values) / 3)]
        expected[f"gradient_norm_{name}_max"] = [max(values)]
        if clip is not None:
            expected[f"clipped_updates_{name}"] = [sum(value > clip for value in values) / 3]
    found = trainer.run_history.to_dict()
    assert {name: values for name, values in found.items() if "loss" not in name} == expected | {
        f"train_{name}_epoch": found[f"train_{name}_epoch"] for name in norms
    }


@pytest.mark.extension("advice")
def test_an_optimizer_that_is_never_updated_is_named_in_advice(capsys):
    class Forgets(GAN):
        def update(self, loss, optimizer):
            if optimizer == "critic":
                super().update(loss, optimizer)

    Forgets(callbacks=[callbacks.AdviceCallback]).train(FULL, 2)
    assert capsys.readouterr().out.count("train_step has not called update(loss, optimizer='generator')") == 1


def test_networks_may_be_frozen_within_a_step():
    class Freezes(GAN):
        def update(self, loss, optimizer):
            super().update(loss, optimizer)
            self.critic.requires_grad_(optimizer == "generator")

    trainer = Freezes(seed=0)
    trainer.train(FULL, 2, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
    assert equal_weights(trainer.networks(), by_hand())


class Reuses(GAN):
    """Computes both losses from the same outputs."""

    retain_graph = False

    def train_step(self, batch):
        loss = self.critic(self.model(batch[1])).mean()
        self.update(loss, "critic", retain_graph=self.retain_graph)
        self.update(-loss, "generator")


@pytest.mark.extension("error_notes")
def test_losses_over_the_same_outputs_are_explained():
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as freed:
        Reuses().train(FULL, 1)
    assert "do not call it in calculate_train_batch_loss" in " ".join(freed.value.__notes__[0].split())
    assert "pass retain_graph=True to update()" in " ".join(freed.value.__notes__[0].split())
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as changed:
        type("Retains", (Reuses,), {"retain_graph": True})().train(FULL, 1)
    assert "change the order of the updates" in changed.value.__notes__[0]


def test_calling_backward_directly_is_refused():
    class Goes(GAN):
        def train_step(self, batch):
            super().train_step(batch)
            self.critic(batch[0]).mean().backward()

    with pytest.raises(RuntimeError, match=r"update\(optimizer='critic'\): its parameters already have gradients"):
        Goes().train(FULL, 1)


# -------------------------------------------------------------------------------------------- gradient scalers


@pytest.mark.extension("monitoring")
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, 0.1)])
def test_scaled_gradients_are_those_of_the_loop_by_hand(scaled_accelerator, accumulation, clip):
    scaled_accelerator.scaler.set_growth_interval(1)  # the scale is another one in each step
    norms = callbacks.GradientNormCallback()
    trainer = GAN(callbacks=[norms], accelerator=scaled_accelerator, seed=0)
    arguments = {"gradient_accumulation_steps": accumulation, "gradient_clip_norm": clip}
    trainer.train(FULL, 2, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False}, **arguments)
    expected = by_hand(accumulation, clip)
    difference = largest_difference(trainer.networks(), expected)
    assert difference < 1e-12 if accumulation > 1 else equal_weights(trainer.networks(), expected)
    assert scaled_accelerator.scaler.get_scale() > 2.0**13
    assert trainer.run_history.get_latest_metric("gradient_norm_critic_max") < 10


def test_an_update_that_overflows_is_skipped_alone(scaled_accelerator):
    class Overflowing(GAN):
        def update(self, loss, optimizer):
            if optimizer == "critic" and self.progress.step == 1:
                loss = loss * 1e200 * 1e200
            return super().update(loss, optimizer)

    skipped: list[bool] = []
    see = listener(on_optimizer_step_end=lambda t: skipped.append(t.update_was_skipped))
    trainer = Overflowing(callbacks=[see], accelerator=scaled_accelerator)
    schedules = {name: partial(ExponentialLR, gamma=0.5) for name in ("generator", "critic")}
    trainer.train(FULL, 1, per_device_batch_size=9, create_scheduler_fn=schedules)
    assert skipped == [False, True, False]
    assert trainer.run.training_step.skipped_updates == 1
    assert trainer.optimizer["critic"].param_groups[0]["lr"] == 0.05 / 4
    assert trainer.optimizer["generator"].param_groups[0]["lr"] == 0.02 / 8
    assert scaled_accelerator.scaler.get_scale() == 2.0**9
    assert all(value.isfinite().all() for value in trainer.networks().values())


def test_callbacks_skip_updates_of_scaled_gradients(scaled_accelerator):
    def skip(trainer: Trainer) -> None:
        if trainer.current_run.training_step.updating == "critic":
            trainer.skip_update()

    trainer = GAN(callbacks=[listener(on_optimizer_step_start=skip)], accelerator=scaled_accelerator)
    before = trainer.networks()
    trainer.train(FULL, 1, per_device_batch_size=4, gradient_accumulation_steps=2)
    changed = {
        name.partition(".")[0] for name, value in trainer.networks().items() if not torch.equal(value, before[name])
    }
    assert changed == {"generator"}


def test_an_overflow_lowers_the_scale_beside_a_skipped_update(scaled_accelerator):
    class Overflowing(GAN):
        def update(self, loss, optimizer):
            super().update(loss * 1e200 * 1e200 if optimizer == "critic" else loss, optimizer)

    def skip(trainer: Trainer) -> None:
        if trainer.current_run.training_step.updating == "generator":  # which comes after the critic
            trainer.skip_update()

    trainer = Overflowing(callbacks=[listener(on_optimizer_step_start=skip)], accelerator=scaled_accelerator)
    trainer.train(FULL, 1, per_device_batch_size=13, gradient_accumulation_steps=2)
    assert trainer.progress.update == 1
    assert scaled_accelerator.scaler.get_scale() == 2.0**9


# -------------------------------------------------------------------------------------------- bad input


def step_of(step: Any, optimizer: Any = None, **kwargs: Any) -> None:
    model = float64_model(features=4, dtype=torch.float32)
    trainer_class = type("OneStep", (Trainer,), {"train_step": step})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    trainer_class(model, nn.MSELoss(), optimizer, callbacks=kwargs.pop("callbacks", [])).train(make_data(), 1, **kwargs)


def both(model: nn.Module) -> dict[str, Any]:
    return {"a": torch.optim.SGD(model[0].parameters()), "b": torch.optim.SGD(model[2].parameters())}


@pytest.mark.parametrize(
    ("step", "optimizer", "error", "message"),
    [
        (lambda t, b: t.update(t.model(b[0]).mean()), both, ValueError, r"update\(\) needs optimizer=, one of 'a'"),
        (lambda t, b: t.update(t.model(b[0]).mean(), "c"), both, ValueError, "no such optimizer, only 'a', 'b'"),
        (lambda t, b: t.update(t.model(b[0]).mean(), "c"), None, ValueError, "no such optimizer, only one without"),
        (lambda t, b: t.update(t.model[0](b[0]).mean(), "b"), both, ValueError, "does not depend on any parameter of"),
        (lambda t, b: t.update(t.model(b[0])), None, ValueError, r"must be a scalar tensor that req.* not \(6, 1\)"),
        (lambda t, b: t.update(t.model(b[0]).mean().detach()), None, ValueError, "the loss does not require gradients"),
        (lambda t, b: t.update(3.0), None, ValueError, "must be a scalar tensor that requires gradients, not float"),
        (
            lambda t, b: (t.model[0].requires_grad_(False), t.update(t.model(b[0]).mean(), "a")),
            both,
            ValueError,
            "all parameters of that optimizer are frozen",
        ),
        (lambda t, b: None, None, ValueError, "train_step made no update: call self.update"),
        (lambda t, b: 1, None, TypeError, "train_step must return a dict or None, not int"),
    ],
)
def test_a_wrong_step_is_reported(step, optimizer, error, message):
    with pytest.raises(error, match=message):
        step_of(step, optimizer)


def test_a_manual_step_without_an_update_is_warned_of():
    def forgets(trainer, batch):
        return {"loss": trainer.loss_func(trainer.model(batch[0]), batch[1])}

    with pytest.warns(UserWarning, match=r"returned a loss that requires gradients, but called no update\(\)"):
        step_of(forgets, None)
    step_of(lambda trainer, batch: {"loss": forgets(trainer, batch)["loss"].detach()}, None)  # only watches

    def updates_by_itself(trainer, batch):
        trainer.optimizer.zero_grad()
        output = forgets(trainer, batch)
        output["loss"].backward()
        trainer.optimizer.step()
        return output

    step_of(updates_by_itself, None)


def test_update_is_refused_in_the_trainers_own_step():
    model = float64_model()
    trainer = adamw_trainer(model)
    with pytest.raises(RuntimeError, match=r"update\(\) is only for an overridden train_step"):
        trainer.update(torch.ones(1, requires_grad=True))


@pytest.mark.extension("tuning")
def test_tools_that_make_steps_of_their_own_refuse():
    for method in ("find_batch_size", "diagnose"):
        with pytest.raises(TypeError, match=f"{method}.. makes steps with one loss .* GAN.train_step"):
            getattr(GAN(), method)(FULL)


@pytest.mark.extension("tuning")
def test_the_rate_of_one_optimizer_is_found_by_its_own_loss():
    class Averaging(GAN):
        """Keeps an average of the generator, and notes the rates of the updates."""

        def __init__(self) -> None:
            super().__init__(seed=0)
            self.average = copy.deepcopy(self.model)
            self.rates: dict[str, list[float]] = {"generator": [], "critic": []}

        def train_step(self, batch):
            super().train_step(batch)
            for name, rates in self.rates.items():
                rates.append(self.optimizer[name].param_groups[0]["lr"])
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 0.5)

    trainer = Averaging()
    before = trainer.networks(), copy.deepcopy(trainer.average.state_dict())
    found = trainer.find_lr(FULL, per_device_batch_size=13, min_lr=1e-3, max_lr=1.0, num_steps=12, optimizer="critic")
    assert trainer.rates["critic"][: len(found.lrs)] == found.lrs
    assert set(trainer.rates["generator"]) == {0.02}
    assert min(found.losses) < 0  # those of the critic, not of both
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.02, 0.05]
    assert equal_weights(trainer.networks(), before[0])
    assert equal_weights(trainer.average.state_dict(), before[1])
    with pytest.raises(
        ValueError, match=r"find_lr\(\) needs optimizer=, one of 'generator', 'critic': Averaging updates"
    ):
        trainer.find_lr(FULL)
    with pytest.raises(
        ValueError, match=r"optimizer='critics': there is no such optimizer, only 'generator', 'critic'"
    ):
        trainer.find_lr(FULL, optimizer="critics")
    with pytest.raises(ValueError, match=r"optimizer='sgd': there is no such optimizer, only one without a name"):
        make_trainer().find_lr(make_data(), optimizer="sgd")
