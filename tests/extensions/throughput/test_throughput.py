"""Samples, items and FLOPs per second: counted, compared with a peak, by process."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, ThroughputCallback
from tests.ranks import rank
from tests.shared_trainings import SPLITTING
from tests.small_models import equal_weights, fake_clock, listener, make_data, make_model, make_trainer, train, weights

# Of make_model, with layers of 4 * 8 and 8 * 1 weights: outputs, gradients of weights, gradients of hidden values.
FLOPS = 2 * (40 + 40 + 8)


class Counted(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch) | {"num_items_in_batch": torch.tensor(7)}


def test_throughput_counts_samples_and_items():
    rates: list[float] = []
    look = listener(on_optimizer_step_end=lambda t: rates.append(t.step_metrics["samples_per_second"]))
    trainer = make_trainer([ThroughputCallback, look], trainer_class=Counted)
    train(trainer, epochs=2)
    samples, items = (
        trainer.run_history.get_metric_values(f"{name}_per_second_epoch") for name in ("samples", "items")
    )
    assert [i / s for i, s in zip(items, samples, strict=True)] == [pytest.approx(3 * 7 / 6)] * 2
    assert len(rates) == 6
    assert min(rates) > 0
    plain = train(make_trainer([ThroughputCallback]))
    assert "items_per_second_epoch" not in plain.run_history.get_metric_names()


def test_rates_leave_out_all_evaluations_within_epochs():
    rates: list[float] = []
    with fake_clock() as pass_time, patch.object(time, "monotonic", time.perf_counter):

        class Slow(Counted):
            def calculate_train_batch_loss(self, batch):
                pass_time(1)
                return super().calculate_train_batch_loss(batch)

            def calculate_eval_batch_loss(self, batch):
                pass_time(100)
                return super().calculate_eval_batch_loss(batch)

        look = listener(
            on_optimizer_step_end=lambda t: rates.append(t.step_metrics["samples_per_second"]),
            on_update_end=lambda t, **_: [t.evaluate(make_data()), t.run_evaluation()],
        )
        throughput = ThroughputCallback(flops_per_sample=50, peak_flops=100)
        trainer = make_trainer([throughput, look], trainer_class=Slow)
        train(trainer, epochs=2, eval_dataset=True, evaluate_every="1 updates")
    assert rates == [2.0] * 6
    assert trainer.run_history.get_metric_values("samples_per_second_epoch") == [2.0, 2.0]
    assert trainer.run_history.get_metric_values("items_per_second_epoch") == [7.0, 7.0]
    assert latest(trainer, "mfu") == 1.0
    assert throughput.per_process[0]["samples_per_second"] == 2.0


def test_a_window_without_updates_is_refused():
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        ThroughputCallback(0)


def latest(trainer: Trainer, name: str) -> float:
    return trainer.run_history.get_latest_metric(f"{name}_epoch")


def test_flops_are_counted_and_compared_with_a_peak():
    throughput, seen = ThroughputCallback(count_flops=True, peak_flops=1e9), []
    look = listener(on_optimizer_step_end=lambda t: seen.append(t.step_metrics.copy()))
    trainer = train(make_trainer([throughput, look]), size=7, epochs=2)
    assert latest(trainer, "flops_per_second") == pytest.approx(FLOPS * latest(trainer, "samples_per_second"))
    assert latest(trainer, "mfu") == pytest.approx(latest(trainer, "flops_per_second") / 1e9)
    assert len(trainer.run_history.get_metric_values("mfu_epoch")) == 2
    for numbers in [*seen, *throughput.per_process]:
        assert numbers["flops_per_second"] == pytest.approx(FLOPS * numbers["samples_per_second"])
        assert numbers["mfu"] == pytest.approx(numbers["flops_per_second"] / 1e9)
    assert "slowest_rank_epoch" not in trainer.run_history.get_metric_names()


def test_given_flops_are_used():
    trainer = train(make_trainer([ThroughputCallback(flops_per_sample=50, peak_flops=100)]))
    assert latest(trainer, "mfu") == pytest.approx(latest(trainer, "samples_per_second") / 2)


class Remembers(Trainer):
    """Has a step that draws random numbers, logs, and keeps what it has seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sizes: list[int] = []

    def calculate_train_batch_loss(self, batch):
        self.sizes.append(len(batch[0]))
        output = super().calculate_train_batch_loss(batch)
        self.log("noise", torch.rand(()))
        return output


class CountsCalls(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.sampled
@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}, SPLITTING])
def test_counting_flops_changes_nothing(arguments, tmp_path):
    def run(*callbacks: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(CountsCalls(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = make_trainer([*callbacks, saving], model, Remembers, seed=1)
        train(trainer, epochs=2, size=8, train_dataloader_kwargs={}, **arguments, **kwargs)
        losses = [trainer.run_history.get_metric_values(f"train_{n}_epoch") for n in ("loss", "noise")]
        return weights(model), (losses, model[0].calls)

    def counted(**kwargs: Any) -> Any:
        seen: list[Any] = []
        look = listener(on_training_run_end=lambda t: seen.append((t.sizes, latest(t, "flops_per_second"))))
        found = run(ThroughputCallback(count_flops=True, peak_flops=1), look, **kwargs)
        return (*found, seen[0][0])

    plain, measured = run()
    for found, its_measured, sizes in (counted(), counted(resume_from=tmp_path / "update-000000001")):
        assert equal_weights(found, plain)
        assert its_measured == measured
        assert len(sizes) <= 8


@pytest.mark.extension("compiled_step")
def test_flops_of_compiled_code_are_those_of_the_code():
    for compiled in ({"compile_model": {"backend": "eager"}}, {"compile_step": {"backend": "eager"}}):
        trainer = train(make_trainer([ThroughputCallback(count_flops=True, peak_flops=1)], **compiled))
        assert latest(trainer, "mfu") == pytest.approx(FLOPS * latest(trainer, "samples_per_second"))


@pytest.mark.extension("failed_batches")
def test_flops_of_a_split_batch_are_those_of_its_parts():
    class Full(Trainer):
        def calculate_train_batch_loss(self, batch):
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError
            return super().calculate_train_batch_loss(batch)

    trainer = make_trainer([ThroughputCallback(count_flops=True, peak_flops=1)], trainer_class=Full)
    train(trainer, size=24, batch_size=8, auto_microbatch=True)
    assert trainer.num_microbatches == 4
    assert latest(trainer, "mfu") == pytest.approx(FLOPS * latest(trainer, "samples_per_second"))


class CannotBeCounted(nn.Module):
    """Has an operation whose formula is missing something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        if torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("no formula.")
        return self.inner(x)


class OwnStep(Trainer):
    def train_step(self, batch):
        self.update(self.calculate_train_batch_loss(batch)["loss"])


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        (
            {"model": CannotBeCounted()},
            "torch's counter has failed with NotImplementedError: no formula. Pass flops_per",
        ),
        pytest.param(
            {"trainer_class": OwnStep},
            "OwnStep overrides train_step",
            marks=pytest.mark.extension("manual_optimization"),
        ),
        pytest.param(
            {"logical_processes": 2, "seed": 0},
            "a step has several logical processes",
            marks=pytest.mark.extension("logical"),
        ),
    ],
)
def test_training_continues_where_flops_cannot_be_counted(kwargs, reason):
    trainer = make_trainer([ThroughputCallback(count_flops=True, peak_flops=1)], **kwargs)
    with pytest.warns(UserWarning, match=f"counts no FLOPs: {reason}"):
        train(trainer)
    assert trainer.progress.samples == 6
    assert latest(trainer, "samples_per_second") > 0
    assert "mfu_epoch" not in trainer.run_history.get_metric_names()


def test_an_unknown_peak_is_reported_before_training():
    seen: list[int] = []
    look = listener(on_train_step_start=lambda t: seen.append(1))
    trainer = make_trainer([ThroughputCallback(count_flops=True), look])
    with pytest.warns(UserWarning, match=r"the peak of the device 'cpu' with float32. Pass peak_flops=") as warned:
        train(trainer)
    assert len(warned) == 1
    assert warned[0].filename == __file__ or "small_models" in warned[0].filename
    assert latest(trainer, "flops_per_second") > 0
    assert "mfu" not in trainer.step_metrics


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flops_per_sample": 0}, "flops_per_sample=0 must be greater than 0"),
        ({"peak_flops": -1.0, "count_flops": True}, "peak_flops=-1.0 must be greater than 0"),
        ({"flops_per_sample": 1, "count_flops": True}, "exclude each other"),
        ({"peak_flops": 1e12}, "pass count_flops=True or flops_per_sample, too"),
    ],
)
def test_senseless_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ThroughputCallback(**arguments)


def test_items_have_a_rate_over_the_latest_updates():
    rates: list[Any] = []
    look = listener(on_optimizer_step_end=lambda t: rates.append(dict(t.step_metrics)))
    train(make_trainer([ThroughputCallback(), look], trainer_class=Counted), size=8)
    assert "items_per_second" not in rates[0]
    assert all(rate["items_per_second"] > 0 for rate in rates[1:])


def throughput_of_processes() -> Any:
    """On rank 0 a forward pass takes a second, on rank 1 three, and so does each step."""
    with fake_clock() as pass_time:

        class Slow(Counted):
            def calculate_train_batch_loss(self, batch):
                pass_time(1 + 2 * rank())
                return super().calculate_train_batch_loss(batch)

            def optimizer_step(self):
                super().optimizer_step()
                pass_time(2 - 2 * rank())  # waits for the other

        throughput = ThroughputCallback(count_flops=True, peak_flops=100)
        trainer = train(make_trainer([throughput], trainer_class=Slow), size=15)
    plain = train(make_trainer(trainer_class=Counted), size=15)
    return (
        trainer.run_history.to_dict(),
        throughput.per_process,
        equal_weights(weights(trainer.model), weights(plain.model)),
    )


def test_each_process_has_its_numbers_and_the_slowest_is_named(two_ranks):
    for history, per_process, is_same in two_ranks(throughput_of_processes):
        value = {name: values[-1] for name, values in history.items()}
        assert is_same
        assert value["samples_per_second_epoch"] == pytest.approx(15 / 12)  # in four steps
        assert value["items_per_second_epoch"] == pytest.approx(4 * 14 / 12)
        assert value["flops_per_second_epoch"] == pytest.approx(FLOPS * 15 / 12)
        assert value["mfu_epoch"] == pytest.approx(FLOPS * 15 / 12 / 200)
        assert (value["slowest_rank_epoch"], value["slowest_rank_factor_epoch"]) == (1, 3)
        for numbers, samples, forward in zip(per_process, (8, 7), (4, 12), strict=True):
            rate = samples / 12
            assert numbers == {
                "samples_per_second": pytest.approx(rate),
                "items_per_second": pytest.approx(28 / 12),
                "flops_per_second": pytest.approx(FLOPS * rate),
                "mfu": pytest.approx(FLOPS * rate / 100),
                "forward_seconds": forward,
            }
