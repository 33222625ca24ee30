"""find_lr() and find_batch_size(): their results, and that they restore everything."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.launching import some_of, two_are_enough
from tests.ranks import IN_ORDER, global_batch, rank, world_size
from tests.small_models import (
    Expanded,
    Stream,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    same_bits,
    train,
    weights,
)


class NotOnTheLast(nn.Module):
    """Has room for three samples on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = float64_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank() == world_size() - 1 and len(x) > 3:
            raise MemoryError
        return self.inner(x)


def everything(trainer: Trainer) -> dict[str, Any]:
    """Everything that a trial must not change."""
    return copy.deepcopy(
        {
            "weights": weights(trainer.model),
            "gradients": [p.grad for p in trainer.model.parameters()],
            "modes": [module.training for module in trainer.model.modules()],
            "optimizer": trainer.optimizer.state_dict(),
            "generators": torch.get_rng_state(),
            "history": trainer.run_history.to_dict(),
            "progress": trainer.progress,
            "config": trainer.run_config,
            "metrics": trainer.step_metrics,
        }
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
    return nn.Sequential(*layers).double()


def trained() -> Trainer:
    """A trainer after a run, with state that a trial could change."""
    trainer = adamw_trainer(make_model())
    trainer.train(float64_data(24), 1, per_device_batch_size=6)
    trainer.model[0].weight.grad = torch.ones_like(trainer.model[0].weight)
    trainer.model[1].eval()
    return trainer


ACTIONS = {
    "find_lr": lambda trainer, data: trainer.find_lr(data, 6, num_steps=20, gradient_accumulation_steps=2),
    "find_batch_size": lambda trainer, data: trainer.find_batch_size(data),
    "diagnose": lambda trainer, data: trainer.diagnose(data, 6, num_steps=4),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("fails", [None, RuntimeError, KeyboardInterrupt])
def test_finders_leave_everything_unchanged_even_on_errors(action, fails):
    trainer = trained()
    before = everything(trainer)
    if fails is None:
        ACTIONS[action](trainer, float64_data(24))
    else:
        calls = []

        def fail(module: Any, inputs: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise fails("in the middle")

        hook = trainer.model.register_forward_pre_hook(fail)
        with pytest.raises(fails):
            ACTIONS[action](trainer, float64_data(24))
        hook.remove()
    assert same_bits(everything(trainer), before)


@pytest.mark.parametrize("action", ACTIONS)
def test_expanded_buffers_are_left_unchanged(action):
    trainer = adamw_trainer(nn.Sequential(Expanded(), float64_model()))
    before = everything(trainer)
    ACTIONS[action](trainer, float64_data(24))
    assert same_bits(everything(trainer), before)


def test_a_failed_restore_does_not_prevent_the_others():
    class Stubborn:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise OSError("not this time")

    trainer = trained()
    trainer.register_for_checkpointing("stubborn", Stubborn())
    before = everything(trainer)
    with pytest.raises(OSError, match="not this time"):
        ACTIONS["find_lr"](trainer, float64_data(24))
    assert same_bits(everything(trainer), before)


def test_a_trial_uses_deterministic_kernels_and_restores_them():
    seen = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(x)

    adamw_trainer(Looking(5, 1, dtype=torch.float64), deterministic=True).find_lr(float64_data(20), num_steps=10)
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_after_a_trial_is_the_run_without_it():
    results = []
    for tries in (False, True):
        torch.manual_seed(0)
        trainer = adamw_trainer(make_model(), seed=4)
        if tries:
            trainer.find_lr(float64_data(24), 6, num_steps=15)
            trainer.find_batch_size(float64_data(24))
        trainer.train(float64_data(24), 2, per_device_batch_size=6)
        results.append(weights(trainer.model))
    assert equal_weights(*results)


@pytest.mark.parametrize("seed", range(4))
def test_losses_may_be_negative_in_a_range_test(seed):
    """The gradients are the same, and so is what is found, wherever the first losses are above or below each other."""

    def found(offset: float) -> Any:
        torch.manual_seed(seed)
        model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(512, 4)
        targets = inputs.sum(1, keepdim=True) + torch.randn(512, 1)
        loss_func = lambda outputs, targets: nn.functional.mse_loss(outputs, targets) - offset  # noqa: E731
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, loss_func, optimizer, callbacks=[])
        return trainer.find_lr(torch.utils.data.TensorDataset(inputs, targets), 8)

    positive, negative, crossing = found(0), found(40), found(2)
    assert len(positive.lrs) > 60
    assert len(negative.lrs) == len(crossing.lrs) >= len(positive.lrs)
    assert negative.suggestion == crossing.suggestion == pytest.approx(positive.suggestion, rel=0.5)


@pytest.mark.extension("plots")
def test_the_suggested_rate_is_where_the_loss_falls(tmp_path):
    """A quadratic bowl of curvature 2: gradient descent falls fastest near 1/2, and explodes above 1."""

    class Bowl(nn.Module):
        def __init__(self):
            super().__init__()
            self.at = nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))

        def forward(self, x):
            return self.at.expand(len(x), 1)

    model = Bowl()
    data = torch.utils.data.TensorDataset(torch.zeros(50, 1), torch.zeros(50, 1, dtype=torch.float64))
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = trainer.find_lr(data, 10, min_lr=1e-4, max_lr=100)
    assert 0.01 < found.suggestion < 1
    assert len(found.lrs) == len(found.losses) == len(found.smoothed) < 100  # stopped when it exploded
    assert found.lrs[0] == 1e-4
    assert found.lrs == sorted(found.lrs)
    assert found.losses[0] == 9
    assert f"falls fastest at {found.suggestion:.3g}" in repr(found)
    figure = found.plot(tmp_path / "plots" / "lr.png")
    assert (tmp_path / "plots" / "lr.png").stat().st_size > 5000
    assert figure.axes[0].get_xscale() == "log"


def test_the_losses_are_those_of_training_with_these_rates():
    """By hand: the same batches, the same rates, accumulation of ragged micro-batches and clipping."""
    data = float64_data(10)
    model, by_hand = float64_model(), float64_model()
    order = {"shuffle": False}
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = trainer.find_lr(
        data, 4, 1e-3, 1e-1, 10, gradient_accumulation_steps=3, gradient_clip_norm=0.5, train_dataloader_kwargs=order
    )
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1)
    for lr, loss in zip(found.lrs, found.losses, strict=True):  # a window is an epoch: 4, 4 and 2 samples
        optimizer.param_groups[0]["lr"] = lr
        expected = nn.functional.mse_loss(by_hand(data.tensors[0]), data.tensors[1])
        expected.backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("sample", [27, 0])
def test_a_non_finite_loss_ends_the_trial(sample):
    data = float64_data(60)
    data.tensors[1][sample] = math.nan
    trainer = adamw_trainer(float64_model())
    arguments = {"num_steps": 20, "train_dataloader_kwargs": {"shuffle": False}}
    if sample:
        found = trainer.find_lr(data, 3, **arguments)
        assert len(found.lrs) == len(found.losses) == 9
        assert all(map(math.isfinite, found.losses))
    else:
        with pytest.raises(ValueError, match="not finite with learning rates as small as min_lr=1e-06"):
            trainer.find_lr(data, 3, **arguments)


def test_a_gradient_scaler_is_left_unchanged(scaled_accelerator):
    trainer = make_trainer(accelerator=scaled_accelerator)
    scaler = scaled_accelerator.scaler
    scaler.set_growth_interval(2)
    before = scaler.state_dict()
    trainer.find_lr(make_data(40), 4, num_steps=20)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("action", ACTIONS)
def test_finders_are_refused_within_a_run(action):
    look = listener(on_train_step_end=lambda t, **_: ACTIONS[action](t, make_data()))
    with pytest.raises(RuntimeError, match=rf"{action}\(\) cannot be called within a run. Call it before train\(\)"):
        train(make_trainer([look]))


def test_groups_keep_their_proportions():
    model = float64_model()
    groups = [{"params": model[0].parameters(), "lr": 0.001}, {"params": model[2].parameters(), "lr": 0.01}]
    seen = []

    class Watch(Trainer):
        def optimizer_step(self):
            seen.append([group["lr"] for group in self.optimizer.param_groups])
            super().optimizer_step()

    trainer = Watch(model, nn.MSELoss(), torch.optim.SGD(groups), callbacks=[])
    found = trainer.find_lr(float64_data(12), 6, num_steps=10, max_lr=0.1)
    assert [high for _, high in seen] == found.lrs
    assert all(low == pytest.approx(high / 10) for low, high in seen)


class Hungry(nn.Module):
    """Takes more memory than there is for batches above a size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.inner = float64_model()
        self.limit = limit
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.limit:
            torch.empty(2**46, dtype=torch.float64)
        return self.inner(x)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("limit", "start"), some_of([(1, 2), (5, 2), (8, 8), (9, 64), (21, 4)]))
def test_the_largest_batch_that_fits_is_found(limit, start, capsys):
    model = Hungry(limit)
    assert adamw_trainer(model).find_batch_size(float64_data(100), start, num_steps=1) == limit
    assert f"largest batch size that fits is {limit}." in capsys.readouterr().out
    assert len(model.sizes) <= 12


@pytest.mark.parametrize(("largest", "found"), [(None, 37), (16, 16)])
def test_no_batch_is_larger_than_requested_or_than_the_data(largest, found, capsys):
    trainer = adamw_trainer(float64_model())
    assert trainer.find_batch_size(float64_data(37), max_batch_size=largest) == found
    assert "(the maximum)" in capsys.readouterr().out


def test_the_shortest_of_several_datasets_limits_the_batch(capsys):
    class OfTwo(Trainer):
        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch["a"])

    trainer = make_trainer(model=float64_model(), trainer_class=OfTwo)
    assert trainer.find_batch_size({"a": float64_data(20), "b": float64_data(12)}) == 12
    assert "12 (the maximum)" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_model_that_is_too_large_for_one_sample_is_an_error():
    with pytest.raises(RuntimeError, match="Not even a batch of one sample fits"):
        adamw_trainer(Hungry(0)).find_batch_size(float64_data(10))


def test_other_errors_than_out_of_memory_are_raised():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        adamw_trainer(Broken()).find_batch_size(float64_data(10))


@pytest.mark.parametrize(
    ("provoke", "error", "message"),
    [
        (lambda t, d: t.find_lr(d, min_lr=1, max_lr=0.1), ValueError, "min_lr=1 must be less than max_lr=0.1"),
        (lambda t, d: t.find_lr(d, min_lr=0), ValueError, "min_lr=0 must be greater than 0"),
        (lambda t, d: t.find_lr(d, num_steps=5), ValueError, "num_steps=5 must be at least 10"),
        (lambda t, d: t.find_lr(d, diverged=1), ValueError, "diverged=1 must be greater than 1"),
        (lambda t, d: t.find_lr([]), ValueError, "train_dataset is empty"),
        pytest.param(
            lambda t, d: t.find_lr(Stream(0)),
            ValueError,
            "train_dataset gave no batch",
            marks=pytest.mark.extension("streams"),
        ),
        (lambda t, d: t.find_batch_size([]), ValueError, "0 samples, too few for a batch on every process"),
        (lambda t, d: t.find_batch_size(d, start=0), ValueError, "start=0 must be at least 1"),
        (lambda t, d: t.find_batch_size(d, max_batch_size=0), ValueError, "max_batch_size=0 must be at least 1"),
        (
            lambda t, d: t.find_batch_size(d, train_dataloader_kwargs={"batch_size": 4}),
            ValueError,
            r"has \['batch_size'\], but find_",
        ),
        (lambda t, d: t.find_batch_size(iter(d)), TypeError, "has no length"),
        (lambda t, d: t.find_batch_size({}), ValueError, "A dict of datasets must have at least one"),
        (lambda t, d: t.find_batch_size({"a": float64_data(0)}), ValueError, "The dataset 'a' is empty"),
        (lambda t, d: adamw_trainer(nn.LazyLinear(1)).find_lr(d), ValueError, "lazy layers"),
        (
            lambda t, d: Trainer(float64_model(), nn.MSELoss(), None, callbacks=[]).find_lr(d),
            ValueError,
            "needs an optimizer",
        ),
    ],
)
def test_finders_refuse_bad_ranges_and_data(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke(adamw_trainer(float64_model()), float64_data(20))


def finding() -> Any:
    data = float64_data(24)
    model, alone = NotOnTheLast(), float64_model()
    before = weights(model)
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = trainer.find_batch_size(data)
    found = trainer.find_lr(data, global_batch(6), 1e-3, 0.1, 12, train_dataloader_kwargs=IN_ORDER)
    optimizer, losses = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for step, lr in enumerate(found.lrs):  # the same by hand, with the batches of all ranks together
        x, y = (tensor[6 * (step % 4) : 6 * (step % 4) + 6] for tensor in data.tensors)
        optimizer.param_groups[0]["lr"] = lr
        loss = nn.functional.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "batch": batch,
        "lr": found.suggestion,
        "losses": found.losses,
        "alone": losses,
        "unchanged": equal_weights(weights(model), before),
    }


@pytest.mark.processes
@two_are_enough
def test_on_several_processes_all_find_the_same(ranks):
    results = ranks(finding)
    assert len(results) == ranks.world_size
    for result in results:
        assert result["lr"] == results[0]["lr"]
        assert result["losses"] == pytest.approx(result["alone"], rel=1e-9)
        assert result["batch"] == 3
        assert result["unchanged"]
