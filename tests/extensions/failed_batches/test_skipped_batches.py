"""A training batch that fails is skipped as if it did not exist."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import (
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    StepBasedEvaluationCallback,
)
from tests.extensions.failed_batches.fussy import (
    ALL_BUT_THE_THIRD,
    WITHOUT_WORKERS,
    Batches,
    Critical,
    Fussy,
    fit,
    without_dropout,
)
from tests.small_models import (
    Broken,
    Expanded,
    Stream,
    equal_weights,
    float64_data,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    train,
    weights,
)


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


def test_max_failures_must_be_positive():
    with pytest.raises(ValueError, match="max_failures=0 must be at least 1"):
        SkipFailedBatchesCallback(0)


@pytest.mark.parametrize("phases", [(), "evaluation", ["test"], 1])
def test_skipping_refuses_unknown_phases(phases):
    with pytest.raises(ValueError, match=r"phases=.* must be a tuple of one or more of 'training'"):
        SkipFailedBatchesCallback(phases=phases)
