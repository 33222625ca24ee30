"""A batch that fails is left out of an evaluation or a prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Subset
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import SkipFailedBatchesCallback
from tests.extensions.failed_batches.fussy import ALL_PHASES, FullInEvaluation, Fussy
from tests.small_models import Broken, adamw_trainer, float64_data, listener, make_data, make_trainer

IN_HERE = {"num_workers": 0}


class Logs(Trainer):
    """Logs before the model may fail, and draws random numbers."""

    def calculate_eval_batch_loss(self, batch):
        self.log("before", batch[0].mean())
        torch.rand(3)
        return super().calculate_eval_batch_loss(batch)


def inferring(poison: float | None, *callbacks: Any, trainer_class: type[Trainer] = Logs, **kwargs: Any) -> Trainer:
    from pytorch_accel_lite.callbacks import MetricsCallback

    trainer = adamw_trainer(Fussy(poison, **kwargs), callbacks=[MetricsCallback(MeanSquaredError()), *callbacks])
    trainer.__class__ = trainer_class
    return trainer


@pytest.mark.extension("metrics")
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


@pytest.mark.extension("error_notes", "metrics")
def test_the_error_of_a_batch_left_out_says_where_it_was():
    data, errors = float64_data(20), []
    watch = listener(on_eval_batch_skipped=lambda t, error, **kwargs: errors.append(error))
    skip = SkipFailedBatchesCallback(phases=["evaluation"])
    inferring(data[9][0][0].item(), skip, watch).evaluate(data, 4)
    assert "In evaluation, step 2:" in errors[0].__notes__[0]


@pytest.mark.sampled
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


@pytest.mark.extension("metrics")
def test_an_evaluation_without_a_good_batch_is_an_error():
    data = float64_data(8)
    skip = SkipFailedBatchesCallback(phases=ALL_PHASES)
    for name in ("evaluate", "predict"):
        trainer = inferring(None, skip, trainer_class=Trainer)
        trainer.model.register_forward_pre_hook(lambda module, args: torch.zeros(1)[len(args[0])])
        with pytest.raises(RuntimeError, match=r"All batches of the .* failed: 8 samples, step 0 \(samples") as caught:
            getattr(trainer, name)(data, 4)
        assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.extension("metrics")
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


@pytest.mark.extension("metrics")
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
