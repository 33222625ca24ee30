"""A second run with the same trainer: its learning rates, its epochs, its gradient scaler."""

from __future__ import annotations

import pickle
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, ExponentialLR, LambdaLR, LinearLR, OneCycleLR
from torch.utils.data import DataLoader

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback, TrainerPlaceholderValues, schedulers
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, RunPausedError, SaveTrainingStateCallback
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_model,
    make_trainer,
    train,
    weights,
)

P = TrainerPlaceholderValues
TOTAL = P.MAX_NUM_TRAIN_STEPS
COSINE = partial(CosineAnnealingLR, T_max=TOTAL)


class Rates(TrainerCallback):
    """Records the learning rate and momentum of each update."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.momenta: list[float] = []

    def on_training_run_start(self, trainer, **kwargs):
        self.__init__()

    def on_optimizer_step_start(self, trainer, **kwargs):
        group = trainer.optimizer.param_groups[0]
        self.rates.append(float(group["lr"]))
        self.momenta.append(group.get("momentum", 0.0))


def noting(**kwargs: Any) -> tuple[Trainer, Rates]:
    model, rates = make_model(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.5, **kwargs})
    return make_trainer([rates], model, optimizer=optimizer), rates


SCHEDULES = [
    COSINE,
    partial(OneCycleLR, max_lr=0.7, total_steps=TOTAL),
    partial(CyclicLR, base_lr=0.01, max_lr=0.3, step_size_up=2),
    partial(LinearLR, start_factor=0.1, total_iters=TOTAL),
    partial(ExponentialLR, gamma=0.1),
    partial(LambdaLR, lr_lambda=lambda update: 0.5**update),
]
if "WSDLrScheduler" in schedulers.__all__:  # otherwise its extension has been deleted
    SCHEDULES.append(schedulers.CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=0.5))
    SCHEDULES.append(schedulers.WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0.5, decay_phase_ratio=0.5))


@pytest.mark.sampled
@pytest.mark.parametrize("second", SCHEDULES, ids=lambda factory: factory.func.__name__)
@pytest.mark.parametrize("first", SCHEDULES, ids=lambda factory: factory.func.__name__)
def test_a_second_schedule_begins_as_with_a_new_optimizer(first, second):
    trainer, seen = noting()
    train(trainer, epochs=2, create_scheduler_fn=first)
    train(trainer, epochs=2, create_scheduler_fn=second)
    alone, expected = noting()
    train(alone, epochs=2, create_scheduler_fn=second)
    assert (seen.rates, seen.momenta) == (expected.rates, expected.momenta)
    assert max(expected.rates) > 0.05


def test_a_pickled_trainer_trains_like_the_trainer():
    being_read = iter(Accelerator().prepare(DataLoader(float64_data(), 4)))
    next(being_read)
    trainer = adamw_trainer(float64_model(), seed=0, callbacks=DEFAULT_CALLBACKS)
    for first in (False, True):
        if first:
            train(trainer, train_dataset=float64_data(), create_scheduler_fn=COSINE, eval_dataset=float64_data())
        copied = pickle.loads(pickle.dumps(trainer))
        found = [train(each, train_dataset=float64_data(), create_scheduler_fn=COSINE) for each in (copied, trainer)]
        assert equal_weights(*(weights(each.model) for each in found))


def test_a_tensor_learning_rate_returns_to_its_first_value():
    trainer, seen = noting(lr=torch.tensor(0.1, dtype=torch.float64))
    for _ in range(2):
        train(trainer, epochs=2, create_scheduler_fn=COSINE)
    assert isinstance(trainer.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert seen.rates[0] == 0.1


def test_another_trainer_with_the_optimizer_begins_at_its_rates():
    trainer, _ = noting()
    train(trainer, epochs=2, create_scheduler_fn=SCHEDULES[1])
    seen = Rates()
    train(make_trainer([seen], trainer.model, optimizer=trainer.optimizer), epochs=2, create_scheduler_fn=COSINE)
    assert (seen.rates[0], seen.momenta[0]) == (0.1, 0.5)


def test_the_next_schedule_starts_at_a_rate_set_by_hand():
    trainer, seen = noting()
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.03
    for _ in range(2):
        train(trainer, epochs=2, create_scheduler_fn=COSINE)
        assert seen.rates[0] == 0.03


def test_later_schedules_keep_a_momentum_set_by_hand():
    one_cycle = partial(OneCycleLR, max_lr=0.7, total_steps=TOTAL)
    trainer, seen = noting()
    train(trainer, epochs=2, create_scheduler_fn=one_cycle)
    trainer.optimizer.param_groups[0]["momentum"] = 0.3
    for schedule in (COSINE, COSINE, one_cycle, COSINE):
        train(trainer, epochs=2, create_scheduler_fn=schedule)
        if schedule is COSINE:
            assert {*seen.momenta} == {0.3}


class HalvesDecay(schedulers.StatefulSchedulerBase):
    """Halves the weight decay with each update."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, "weight_decay")

    def get_updated_values(self, num_updates: int) -> list[float]:
        return [value * 0.5**num_updates for value in self.base_lr_values]


def test_a_schedule_of_another_option_begins_again_too():
    decays: list[float] = []
    trainer, _ = noting(weight_decay=0.8)
    note = listener(on_optimizer_step_start=lambda t, **_: decays.append(t.optimizer.param_groups[0]["weight_decay"]))
    trainer.callback_handler.add_callbacks([note])
    for by_hand, first in ((None, 0.8), (None, 0.8), (0.4, 0.4), (None, 0.4)):
        if by_hand is not None:
            trainer.optimizer.param_groups[0]["weight_decay"] = by_hand
        decays.clear()
        train(trainer, create_scheduler_fn=HalvesDecay)
        assert decays == [first, first / 2, first / 4]


def test_options_that_only_sound_like_initial_values_stay():
    model = make_model()
    trainer = make_trainer(
        model=model, optimizer=torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.2)
    )
    for _ in range(2):
        train(trainer, create_scheduler_fn=COSINE)
        assert trainer.optimizer.param_groups[0]["initial_accumulator_value"] == 0.2


def test_a_rate_set_by_hand_is_one_for_another_trainer_too():
    trainer, _ = noting()
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    trainer.optimizer.param_groups[0]["lr"] = 0.03
    seen = Rates()
    train(make_trainer([seen], trainer.model, optimizer=trainer.optimizer), epochs=2, create_scheduler_fn=COSINE)
    assert seen.rates[0] == 0.03


def test_an_optimizer_without_a_hash_has_schedules_too():
    class Comparable(torch.optim.SGD):
        def __eq__(self, other):
            return self is other

    model, seen = make_model(), Rates()
    trainer = make_trainer([seen], model, optimizer=Comparable(model.parameters(), lr=0.1))
    for _ in range(2):
        train(trainer, epochs=2, create_scheduler_fn=COSINE)
        assert seen.rates[0] == 0.1


@pytest.mark.parametrize("load", ["load_checkpoint", "load_training_state"])
def test_a_rate_set_by_hand_after_loading_is_used(tmp_path, load):
    trainer, _ = noting()
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    place = tmp_path / "saved"
    trainer.save_checkpoint(place) if load == "load_checkpoint" else trainer.save_training_state(place)
    for rate in (0.03, None):
        again, seen = noting(lr=0.2)
        getattr(again, load)(place)
        if rate is not None:
            again.optimizer.param_groups[0]["lr"] = rate
        train(again, epochs=1, create_scheduler_fn=COSINE)
        assert seen.rates[0] == (rate or 0.1)


@pytest.mark.extension("recorded_settings")
@pytest.mark.parametrize("load", ["load_checkpoint", "load_training_state"])
def test_loading_other_rates_says_to_set_them_again(tmp_path, load, capsys):
    trainer, _ = noting()
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    place = tmp_path / "saved"
    trainer.save_checkpoint(place) if load == "load_checkpoint" else trainer.save_training_state(place)
    getattr(noting(lr=0.2)[0], load)(place)
    assert "set them again" in capsys.readouterr().out


def test_a_finished_runs_checkpoint_restarts_at_the_first_rate(tmp_path):
    trainer, _ = noting()
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    trainer.save_checkpoint(tmp_path / "model.pt")
    for again in (trainer, noting()[0]):
        again.load_checkpoint(tmp_path / "model.pt")
        assert again.optimizer.param_groups[0]["lr"] < 1e-9
        seen = Rates()
        again.callback_handler.add_callbacks([seen])
        train(again, epochs=1, create_scheduler_fn=COSINE)
        assert seen.rates[0] == 0.1


def test_a_schedule_that_is_continued_by_hand_is_left_unchanged():
    trainer, seen = noting()
    train(trainer, epochs=1, create_scheduler_fn=partial(CosineAnnealingLR, T_max=6))
    train(trainer, epochs=1, create_scheduler_fn=partial(CosineAnnealingLR, T_max=6, last_epoch=2))
    whole, expected = noting()
    train(whole, epochs=2, create_scheduler_fn=partial(CosineAnnealingLR, T_max=6))
    assert seen.rates[1:] == pytest.approx(expected.rates[4:])


@pytest.mark.extension("common_mistakes")
def test_a_run_without_a_scheduler_says_at_which_rate_it_trains(capsys):
    trainer, seen = noting()
    train(trainer, epochs=2, create_scheduler_fn=partial(ExponentialLR, gamma=0.5))
    assert capsys.readouterr().out == ""
    train(trainer)
    assert trainer.scheduler is None
    assert seen.rates == [0.1 / 2**6] * 3
    said = capsys.readouterr().out
    assert "no scheduler and trains at the learning rate 0.00156" in said
    assert "the optimizer started at 0.1" in said
    exec(said[said.index("for group") :], {"trainer": trainer})
    train(trainer)
    assert seen.rates == [0.1] * 3
    assert capsys.readouterr().out == ""


def test_a_second_run_trains():
    trainer, _ = noting()
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    before = weights(trainer.model)
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    assert not equal_weights(before, weights(trainer.model))


# ------------------------------------------------------------------------------- create_scheduler, overridden


class UsesFunction(Trainer):
    def create_scheduler(self) -> Any:
        return self.create_scheduler_fn(self.optimizer)


class MakesItsOwn(Trainer):
    def create_scheduler(self) -> Any:
        return ExponentialLR(self.optimizer, 0.5)


class MakesNone(Trainer):
    def create_scheduler(self) -> Any:
        return None


def test_other_errors_of_create_scheduler_are_kept():
    class Broken(Trainer):
        def create_scheduler(self) -> Any:
            return ExponentialLR(self.optimizer)

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'gamma'"):
        train(make_trainer(trainer_class=Broken))


def test_an_overridden_create_scheduler_may_use_the_function():
    trainer = train(make_trainer(trainer_class=UsesFunction), create_scheduler_fn=partial(ExponentialLR, gamma=0.1))
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("function", [None, partial(ExponentialLR, gamma=0.1)])
def test_create_scheduler_may_return_its_own_scheduler_or_none(function):
    assert type(train(make_trainer(trainer_class=MakesItsOwn), create_scheduler_fn=function).scheduler) is ExponentialLR
    trainer = train(make_trainer(trainer_class=MakesNone), create_scheduler_fn=function)
    assert trainer.scheduler is None
    assert trainer.optimizer.param_groups[0] == make_trainer(model=trainer.model).optimizer.param_groups[0]


def test_an_invalid_scheduler_is_refused():
    class Wrong(Trainer):
        def create_scheduler(self) -> Any:
            return "cosine"

    with pytest.raises(TypeError, match=r"create_scheduler returned 'cosine', which is not a scheduler"):
        train(make_trainer(trainer_class=Wrong))
    with pytest.raises(TypeError, match="returned None, which is not a scheduler"):
        train(make_trainer(), create_scheduler_fn=lambda optimizer: None)


@pytest.mark.parametrize(
    ("interval", "length"), [("update", TOTAL - 1), ("epoch", P.NUM_EPOCHS - 1)], ids=["updates", "epochs"]
)
def test_a_one_cycle_schedule_that_is_too_short_is_an_error(interval, length):
    trainer, _ = noting()
    before = weights(trainer.model)
    create = partial(OneCycleLR, max_lr=0.1, total_steps=length)
    with pytest.raises(ValueError, match=r"total_steps=\d, but the run steps it \d times.*MAX_NUM_TRAIN_STEPS"):
        train(trainer, epochs=2, create_scheduler_fn=create, scheduler_interval=interval)
    assert equal_weights(before, weights(trainer.model))


# -------------------------------------------------------------------------------------- after an interrupt


def interrupts(error: BaseException, at_update: int = 7) -> TrainerCallback:
    def check(trainer: Any, **_: Any) -> None:
        if trainer.progress.update == at_update and not trainer.run_history.get_metric_values("again"):
            raise error

    return listener(on_train_step_start=check)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StopTrainingError("enough"), RuntimeError("lost")])
def test_after_an_interrupt_a_second_run_continues_the_epochs(error):
    losses: list[float] = []
    note = listener(on_train_step_end=lambda t, batch_output, **_: losses.append(batch_output["loss"].item()))
    shown: list[dict[str, Any]] = []
    at_end = listener(on_training_run_end=lambda t: shown.append(t.run_history.rows()[-1]))
    trainer = make_trainer([note, interrupts(error), at_end])
    with suppress(KeyboardInterrupt, RuntimeError):
        train(trainer, epochs=5, size=8, eval_dataset=True)
    assert [row["epoch"] for row in trainer.run_history.rows()] == [1, 2]
    trained = trainer.run_history.get_metric_values("train_loss_epoch")
    assert trained[1] == pytest.approx(sum(losses[4:]) / 3)
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 1
    assert shown[-1]["train_loss_epoch"] == trained[1]  # known to what looks at the end of a run
    trainer.run_history.update_metric("again", 1)
    train(trainer, epochs=2, size=8, eval_dataset=True, reset_run_history=False)
    rows = trainer.run_history.rows()
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert all("train_loss_epoch" in row for row in rows)
    assert [("eval_loss_epoch" in row) for row in rows] == [True, False, True, True]


@pytest.mark.parametrize("at_update", [3, 0])
def test_an_epoch_interrupted_before_its_first_step_is_trained(at_update):
    trainer = make_trainer([interrupts(KeyboardInterrupt(), at_update)])
    with suppress(KeyboardInterrupt):
        train(trainer, epochs=5)
    trainer.run_history.update_metric("again", 1)
    train(trainer, epochs=1, reset_run_history=False)
    values = trainer.run_history.get_metric_values("train_loss_epoch")
    assert len(values) == len(trainer.run_history.rows()) == at_update // 3 + 1


def test_an_epoch_interrupted_in_evaluation_has_its_losses_once():
    def stop(trainer: Any, **_: Any) -> None:
        if trainer.progress.epoch == 2 and len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2:
            raise KeyboardInterrupt

    trainer = make_trainer([listener(on_eval_step_start=stop)])
    with suppress(KeyboardInterrupt):
        train(trainer, epochs=5, eval_dataset=True)
    train(trainer, epochs=1, reset_run_history=False)
    assert [row["epoch"] for row in trainer.run_history.rows()] == [1, 2, 3]
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 3


def test_a_state_saved_at_an_interrupt_has_complete_steps(tmp_path):
    def run(folder: str, *callbacks: Any, **kwargs: Any) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path / folder)
        return train(make_trainer([saving, *callbacks], seed=1), epochs=3, size=8, **kwargs)

    whole = run("whole")

    made: list[Any] = []

    def pause(trainer: Any, **_: Any) -> None:
        if trainer.progress.update == 6 and not made:
            made.append(trainer.progress.update)
            raise RunPausedError("pause")

    pauses = listener(on_train_step_checkpoint=pause)
    paused = run("states", pauses)
    assert len(paused.run_history.get_metric_values("train_loss_epoch")) == 2
    resumed = run("states", pauses, resume_from="latest")
    assert resumed.run_history.to_dict() == whole.run_history.to_dict()
    assert equal_weights(weights(resumed.model), weights(whole.model))


def stopped_in_mid_epoch() -> Any:
    """The rows of two runs that stop in their second epoch, and the mean losses of those epochs."""
    means = []

    class Stops(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            self.sums = [0.0, 0]

        def on_train_step_end(self, trainer, batch_output, **kwargs):
            self.sums[0] += batch_output["loss"].item() * batch_output["batch_size"]
            self.sums[1] += batch_output["batch_size"]
            if trainer.progress.update == 7:
                raise StopTrainingError("enough")

        def on_training_run_end(self, trainer, **kwargs):
            totals, counts = zip(*trainer.all_gather_object(self.sums), strict=True)
            means.append(sum(totals) / sum(counts))

    model = float64_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = adamw_trainer(model, optimizer=optimizer, callbacks=[Stops])
    for _ in range(2):
        data = float64_data(10 * world_size())
        trainer.train(data, 3, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER, reset_run_history=False)
    return [(row["epoch"], row["train_loss_epoch"]) for row in trainer.run_history.rows()], means


@two_are_enough
def test_all_ranks_record_the_epoch_in_which_they_stopped(ranks):
    for rows, means in ranks(stopped_in_mid_epoch):
        assert [epoch for epoch, _ in rows] == [1, 2, 3, 4]
        assert [rows[1][1], rows[3][1]] == pytest.approx(means)


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("error", [RuntimeError("once"), KeyboardInterrupt()])
def test_the_scaler_forgets_gradients_of_a_run_that_failed(error, limit, scaled_accelerator):
    """It has unscaled them, for the callback that failed, and would leave those of the next run scaled."""
    errors = [error]

    def fail_once(trainer: Trainer) -> None:
        if errors:
            raise errors.pop()

    def trained(trainer: Trainer) -> dict[str, Any]:
        trainer.model.load_state_dict(make_model().state_dict())
        return weights(train(trainer, gradient_clip_norm=limit).model)

    trainer = make_trainer([listener(on_optimizer_step_start=fail_once)], accelerator=scaled_accelerator)
    with pytest.raises(type(error)):
        train(trainer, gradient_clip_norm=limit)
    fresh = make_trainer([listener(on_optimizer_step_start=fail_once)], accelerator=scaled_accelerator)
    assert equal_weights(trained(trainer), trained(fresh))
