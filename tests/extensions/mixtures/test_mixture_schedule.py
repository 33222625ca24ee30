"""Weights of a mixture that change by epochs or updates: the order, resuming, several processes, what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import MixtureScheduleCallback
from pytorch_accel_lite.data import Mixture, MixtureStream
from tests.launching import SOAK, only_with_soak
from tests.ranks import every_state, run_and_resume, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    largest_difference,
    listener,
    make_data,
    make_model,
    weights,
)
from tests.streams import Cut, Forgetful, ForgetfulCut, Keeps, Shelf, Sums

STAGES = {0: {"easy": 3, "hard": 1}, 2: {"easy": 1, "hard": 3}}


def mixture() -> Mixture:
    data = make_data(16)
    easy, hard = (TensorDataset(*(tensor[part] for tensor in data.tensors)) for part in (slice(6), slice(6, 16)))
    return Mixture({"easy": easy, "hard": hard}, num_samples=8)


def of_metrics(epoch: int, metrics: dict[str, float]) -> dict[str, float]:
    """A larger share of hard samples for a smaller last loss."""
    loss = metrics.get("eval_loss_epoch", 1.0)
    return {"easy": 1.0, "hard": 1.0 if epoch == 1 else min(2.0 + epoch / (1 + loss), 5.0)}


def trained(folder: Path | None = None, schedule: Any = STAGES, linear: bool = False, **kwargs: Any) -> Trainer:
    seen: list[int] = []
    keeping = listener(on_train_step_end=lambda trainer, **_: seen.extend(trainer.batch_indices))
    callbacks = [*every_state(folder), MixtureScheduleCallback(schedule, linear=linear), keeping]
    trainer = adamw_trainer(make_model(), seed=3, callbacks=callbacks)
    trainer.train(mixture(), 4, make_data(6), per_device_batch_size=2, **kwargs)
    vars(trainer)["seen"] = seen
    return trainer


def shares(trainer: Trainer) -> list[float]:
    return [float(value) for value in trainer.run_history.get_metric_values("share_hard")]


@pytest.mark.parametrize(
    ("schedule", "linear", "hard"),
    [
        (STAGES, False, [0.25, 0.25, 0.75, 0.75]),
        ({0: {"easy": 3, "hard": 1}, 3: {"easy": 1, "hard": 15}}, True, [0.25, 0.5, 0.75, 0.875]),
        (lambda epoch, metrics: {"easy": 1, "hard": epoch}, False, [0.5, 0.625, 0.75, 0.75]),
        (None, False, [0.625] * 4),
    ],
)
def test_the_shares_change_and_are_recorded(schedule, linear, hard):
    trainer = trained(schedule=schedule, linear=linear)
    assert shares(trainer) == hard
    by_epoch = [trainer.seen[first : first + 8] for first in range(0, 32, 8)]
    assert [sum(index >= 6 for index in epoch) / 8 for epoch in by_epoch] == hard


def test_recorded_shares_are_those_of_each_epoch():
    data = mixture()
    data.change_weights({"easy": 1, "hard": 3}, 2, begin=2)
    data.change_weights({"easy": 1, "hard": 7}, 4)
    order = [data.create_training_sampler().order_of_epoch(3, epoch) for epoch in range(1, 5)]
    trainer = adamw_trainer(make_model(), seed=3, callbacks=[MixtureScheduleCallback()])
    for _ in range(2):
        trainer.train(data, 4)
        assert shares(trainer) == [int((epoch >= 6).sum()) / 8 for epoch in order] == [0.625, 0.75, 0.75, 0.875]


def test_each_dataset_of_a_mixture_resumes_at_its_position():
    hard = [index for index in trained().seen if index >= 6]  # 2 + 2 + 6 + 6 of 10
    assert set(hard[:10]) == set(range(6, 16))
    assert len(set(hard[10:])) == 6


def test_a_second_run_begins_with_the_first_stage():
    callbacks = [MixtureScheduleCallback(STAGES)]
    data, results = mixture(), []
    for _ in range(2):
        trainer = adamw_trainer(make_model(), seed=3, callbacks=callbacks)
        trainer.train(data, 3)
        results.append(weights(trainer.model))
    assert equal_weights(*results)


def run_of_metrics(folder: Path | None = None, **kwargs: Any) -> Trainer:
    return trained(folder, of_metrics, **kwargs)


def result(trainer: Trainer) -> dict[str, torch.Tensor]:
    return weights(trainer.get_model()) | {"shares": torch.tensor(shares(trainer))}


@pytest.mark.thorough
@pytest.mark.processes
def test_any_number_of_processes_resumes_to_the_same_bits(two_ranks):
    whole, *resumed = run_and_resume(run_of_metrics, result)
    assert len(resumed) >= 3
    assert all(equal_weights(other, whole) for other in resumed)
    assert len(whole["shares"].unique()) > 1
    for first, *others in two_ranks.run(run_and_resume, run_of_metrics, result):
        assert torch.equal(first["shares"], whole["shares"])
        assert all(equal_weights(other, first) for other in others)


# ------------------------------------------------------------------- by updates

BY_UPDATES = {0: {"easy": 1, "hard": 0}, 3: {"easy": 1, "hard": 1}, 7: {"easy": 1, "hard": 3}}
LINEAR = {0: {"easy": 9, "hard": 1}, 8: {"easy": 1, "hard": 9}}


def by_updates(
    folder: Path | None = None,
    schedule: Any = BY_UPDATES,
    batch: int = 6,
    data: Any = None,
    loader_kwargs: Any = None,
    resume_from: Path | None = None,
    **kwargs: Any,
) -> Trainer:
    """A run of two epochs of six updates, of 36 samples each if the data are a ``Mixture``."""
    seen: list[int] = []
    keeping = listener(on_train_step_end=lambda trainer, **_: seen.extend(trainer.batch_indices or ()))
    changing = MixtureScheduleCallback(schedule, unit="updates", **kwargs)
    trainer = adamw_trainer(make_model(), seed=3, callbacks=[*every_state(folder), changing, keeping])
    if data is None:
        both = make_data(40)
        easy, hard = (TensorDataset(*(tensor[part] for tensor in both.tensors)) for part in (slice(15), slice(15, 40)))
        data = Mixture({"easy": easy, "hard": hard}, num_samples=36)
    length = {"num_epochs": 2} if isinstance(data, Mixture) else {"max_num_train_steps": 12}
    trainer.train(
        data,
        eval_dataset=make_data(6),
        evaluate_every="2 updates",
        per_device_batch_size=batch // world_size(),
        train_dataloader_kwargs=loader_kwargs,
        resume_from=resume_from,
        **length,
    )
    vars(trainer)["seen"] = seen
    return trainer


def of_the_loss(update: int, metrics: dict[str, float]) -> dict[str, float]:
    """A larger share of hard samples after each update, and for a smaller last loss."""
    return {"easy": 1.0, "hard": update + 1 / (1 + metrics.get("eval_loss_epoch", 0.0))}


def hard_by_update(seen: list[int]) -> list[int]:
    return [sum(index >= 15 for index in seen[first : first + 6]) for first in range(0, 72, 6)]


def in_complete_passes(seen: list[int]) -> bool:
    """Whether no sample of ``by_updates()`` comes again before all of its dataset have been read."""
    easy, hard = ([index for index in seen if (index >= 15) is is_hard] for is_hard in (False, True))
    passes = [order[first : first + size] for order, size in ((easy, 15), (hard, 25)) for first in range(0, 72, size)]
    return all(len(set(each)) == len(each) for each in passes)


def test_stages_of_a_mixture_start_after_their_update():
    trainer = by_updates()
    assert hard_by_update(trainer.seen) == [0, 0, 0, 3, 3, 3, 3, 4, 5, 4, 5, 4]  # 7 is the first of the second epoch
    assert in_complete_passes(trainer.seen)
    assert shares(trainer)[:3] == [0, 0.25, 0.5]  # of two updates each


def test_changed_epochs_are_read_alike_in_a_second_run(tmp_path):
    first = by_updates()
    second = by_updates(tmp_path, schedule=None, data=first.train_dataset)
    assert in_complete_passes(second.seen)
    assert second.seen == first.seen
    for update in (4, 10):
        resumed = by_updates(schedule=None, resume_from=next(tmp_path.glob(f"update-*{update}")))
        assert resumed.seen == second.seen[6 * update :]
        assert equal_weights(weights(resumed.model), weights(second.model))


def test_counting_the_samples_of_an_epoch_changes_no_order():
    orders = []
    for counts in (False, True):
        data = mixture()
        for begin, hard in ((2, 3), (6, 1)):
            data.change_weights({"easy": 1, "hard": hard}, 1, begin)
            if counts:
                data.samples_before(2)
        orders.append(data.create_training_sampler().order_of_epoch(1, 1).tolist())
    assert orders[0] == orders[1]


def test_linear_weights_change_gradually_with_exact_shares():
    hard = hard_by_update(by_updates(schedule=LINEAR, linear=True, every_n_updates=2).seen)
    due = [6 * (0.1 + 0.1 * min(update - update % 2, 8)) for update in range(12)]
    for count in range(1, 6):
        assert abs(sum(hard[:count]) - sum(due[:count])) <= 1


def test_a_small_share_survives_changes_of_the_weights():
    seen = by_updates(schedule=lambda update, _: {"easy": 20 + update % 2, "hard": 1}, batch=2, every_n_updates=1).seen
    assert sum(index >= 15 for index in seen[:36]) == 2  # about one in 21


def update_run(folder: Path | None = None, **kwargs: Any) -> Trainer:
    return by_updates(folder, of_the_loss, every_n_updates=3, **kwargs)


@only_with_soak
@pytest.mark.processes
def test_schedules_by_updates_resume_on_any_process_count(two_ranks):
    alone = run_and_resume(update_run, result)
    assert len(alone[0]["shares"].unique()) > 3
    for runs in (alone, *two_ranks.run(run_and_resume, update_run, result)):
        assert len(runs) >= 4
        assert all(equal_weights(resumed, runs[0]) for resumed in runs)
        assert largest_difference(runs[0], alone[0]) < 1e-6


def resumed_run(state: Path) -> dict[str, torch.Tensor]:
    return result(update_run(resume_from=state))


@pytest.mark.processes
def test_a_changed_epoch_continues_on_other_processes(two_ranks, tmp_path):
    whole = update_run(tmp_path)
    for resumed in two_ranks.run(resumed_run, next(tmp_path.glob("update-*4"))):
        assert largest_difference(resumed, result(whole)) < 1e-6


def test_workers_read_the_rest_of_an_epoch_again():
    alone = by_updates()
    data = alone.train_dataset
    assert isinstance(data, Mixture)
    with_workers = by_updates(data=data, loader_kwargs={"num_workers": 1})
    assert with_workers.seen == alone.seen
    assert equal_weights(weights(with_workers.model), weights(alone.model))


def streams(**kinds: Any) -> MixtureStream:
    made = {name: kind(range(100 * place, 100 * place + 40)) for place, (name, kind) in enumerate(kinds.items())}
    return MixtureStream(made)


class EvaluatedSums(Sums):
    def calculate_eval_batch_loss(self, batch):
        return self.calculate_train_batch_loss(batch)


def train_on_streams(
    folder: Path | None = None, kinds: Any = None, schedule: Any = of_the_loss, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """Train on numbers of two streams; returns those that this process has read, the weights and the shares."""
    kept = Keeps()
    changing = MixtureScheduleCallback(schedule, unit="updates", every_n_updates=3)
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    trainer = EvaluatedSums(model, None, optimizer, callbacks=[*every_state(folder), changing, kept], seed=5)
    data = streams(**(kinds or {"easy": Shelf, "hard": Forgetful}))
    rows = torch.arange(8.0).reshape(4, 2)
    trainer.train(
        data, eval_dataset=rows, evaluate_every="2 updates", max_num_train_steps=12, per_device_batch_size=3, **kwargs
    )
    seen = torch.cat([batch[:, 0] for batch in kept.seen])
    return weights(trainer.get_model()) | {"shares": torch.tensor(shares(trainer)), "seen": seen}


def test_streams_give_the_shares_of_their_updates():
    seen = train_on_streams(schedule=BY_UPDATES)["seen"]
    hard = [int((seen[first : first + 3] >= 100).sum()) for first in range(0, 36, 3)]
    assert hard == [0, 0, 0, 1, 2, 1, 2, 2, 2, 3, 2, 2]
    easy = seen[seen < 100]
    assert torch.equal(easy, torch.arange(float(len(easy))))  # in order, none twice


def read_and_resumed(**kinds: Any) -> list[dict[str, torch.Tensor]]:
    """The samples that a process has read; for resumed runs, those of the complete run."""

    def train(folder: Path, resume_from: Path | None = None) -> dict[str, torch.Tensor]:
        return train_on_streams(folder, kinds, resume_from=resume_from)

    return run_and_resume(train, dict)


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize("kinds", [*[{"easy": Shelf, "hard": Forgetful}] * SOAK, {"easy": Cut, "hard": ForgetfulCut}])
@pytest.mark.processes
def test_changed_streams_resume_to_the_same_bits(two_ranks, kinds):
    for whole, *others in (read_and_resumed(**kinds), *two_ranks.run(read_and_resumed, **kinds)):
        assert len(whole["shares"].unique()) > 3
        assert len(others) >= 3
        for resumed in others:
            rest = resumed.pop("seen")
            assert torch.equal(rest, whole["seen"][-len(rest) :])
            assert equal_weights(resumed, {name: value for name, value in whole.items() if name != "seen"})


@pytest.mark.parametrize(
    ("seed", "workers", "message"), [(None, 0, r"no seed\. Pass"), (1, 1, "states of its workers")]
)
def test_streams_that_cannot_be_read_again_are_refused(seed, workers, message):
    changing = MixtureScheduleCallback(BY_UPDATES, unit="updates")
    trainer = adamw_trainer(make_model(), seed=seed, callbacks=[changing])
    with pytest.raises(ValueError, match=message):
        trainer.train(
            streams(easy=Shelf, hard=Shelf), max_num_train_steps=3, train_dataloader_kwargs={"num_workers": workers}
        )
    assert trainer.progress.step == 0


def test_weights_of_streams_change_by_epoch():
    seen: list[Any] = []
    keeping = listener(on_train_step_end=lambda trainer, batch, **_: seen.append(batch[:, 0] >= 100))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    stages = {0: {"easy": 1, "hard": 0}, 1: {"easy": 0, "hard": 1}}
    trainer = Sums(model, None, optimizer, callbacks=[MixtureScheduleCallback(stages), keeping], seed=5)
    data = MixtureStream({"easy": Shelf(range(6)), "hard": Shelf(range(100, 109))}, repeat=False)
    trainer.train(data, 2, per_device_batch_size=3)
    assert torch.cat(seen).tolist() == [False] * 6 + [True] * 9
    assert shares(trainer) == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ({1: {"easy": 1, "hard": 1}}, {}, "must be stages that begin with 0"),
        ({0: 3}, {}, r"weights\[0\]=3 must be weights of the datasets"),
        (of_metrics, {"linear": True}, "linear=True needs stages"),
        (STAGES, {"unit": "steps"}, "unit='steps' must be 'epochs' or 'updates'"),
        (STAGES, {"every_n_updates": 5}, "every_n_updates=5 needs unit='updates'"),
    ],
)
def test_an_invalid_mixture_schedule_is_refused(schedule, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MixtureScheduleCallback(schedule, **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_data(), r"needs a Mixture or a MixtureStream to train on, not a TensorDataset"),
        (mixture(), "weights has 'hart'.*'hard'"),
        (DataLoader(mixture(), 4, shuffle=True), "has no effect, because the loader .* has a sampler of torch"),
    ],
)
def test_unusable_data_of_a_mixture_schedule_are_refused(data, message):
    stages = {0: {"easy": 1, "hard": 1}, 5: {"easy": 1, "hart": 1}}
    trainer = adamw_trainer(make_model(), callbacks=[MixtureScheduleCallback(stages)])
    with pytest.raises(ValueError, match=message):
        trainer.train(data, 1)
    assert trainer.progress.step == 0
