"""Losses and gradients that are not finite: guarded against, and reported."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import NonFiniteLossError, Trainer
from pytorch_accel_lite.callbacks import (
    GradientSpikeCallback,
    NaNReportCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    TerminateOnNaNCallback,
)
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, global_batch, shared_folder
from tests.tasks import equal, listener, quiet_trainer, regression_data, small_model, weights

WITHOUT_WORKERS = {"shuffle": False, "num_workers": 0}


class Root(nn.Module):
    """The square root: NaN below 0, and an infinite gradient at 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def make_model(bad: bool = True) -> nn.Module:
    torch.manual_seed(0)
    square = Root() if bad else nn.Identity()
    first = nn.Linear(5, 6)
    with torch.no_grad():
        first.bias.fill_(4.0)
    layers = [first, nn.BatchNorm1d(6, affine=False), nn.Softplus(), nn.Dropout(0.2), nn.Linear(6, 1)]
    return nn.Sequential(*layers[:3], square, *layers[3:]).double()


def reporting_trainer(callbacks: Any, model: nn.Module | None = None, lr: float = 0.01, **kwargs: Any) -> Trainer:
    model = make_model() if model is None else model
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=lr), callbacks=callbacks, **kwargs)


def fit(trainer: Trainer, data: Any, epochs: int = 2, **kwargs: Any) -> Trainer:
    trainer.train(data, epochs, per_device_batch_size=5, train_dataloader_kwargs=WITHOUT_WORKERS, **kwargs)
    return trainer


def spoilt(index: int = 12, value: float = math.nan, size: int = 30) -> Any:
    data = regression_data(size)
    data.tensors[0][index, 2] = value
    return data


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_report_names_the_layer_and_the_samples_before_the_weights_change(tmp_path, accumulation):
    before: list[Any] = []
    remember = listener(on_train_step_start=lambda t: before.append(weights(t.model)))
    report = NaNReportCallback(tmp_path)
    trainer = reporting_trainer([remember, report, TerminateOnNaNCallback])
    with pytest.raises(NonFiniteLossError, match=r"loss is not finite in epoch 1, step 2.*layer .*is 0 \(Linear\)"):
        fit(trainer, spoilt(), gradient_accumulation_steps=accumulation)
    assert report.report == tmp_path / "epoch-1-step-2-rank-0.json"
    summary = json.loads(report.report.read_text())
    assert summary["indices"] == [[10, 11, 12, 13, 14]]
    assert summary["origin"] == {
        "layer": "0", "kind": "Linear", "inputs_are_finite": False, "weights_are_finite": True
    }  # fmt: skip
    assert equal({"0.weight": weights(trainer.model)["0.weight"]}, {"0.weight": before[2]["0.weight"]})
    assert not trainer.model[0]._forward_hooks


def test_training_with_reports_has_the_same_bits():
    results = []
    for callbacks in ([], [NaNReportCallback]):
        torch.manual_seed(3)
        results.append(weights(fit(reporting_trainer(callbacks), regression_data(30)).model))
    assert equal(*results)


def test_a_gradient_that_is_not_finite_is_reported_before_it_spoils_the_weights(tmp_path):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(5, 1, bias=False).double()
            self.root = Root()

        def forward(self, x):
            return self.root(self.scale(x) ** 2)  # at 0: the value is 0, the gradient 0 times infinity

    data = regression_data(30)
    data.tensors[0][12] = 0.0
    report = NaNReportCallback(tmp_path)
    trainer = reporting_trainer([report], Gated())
    with pytest.raises(NonFiniteLossError, match=r"gradient is not finite in epoch 1, step 2.*all layers are finite"):
        fit(trainer, data)
    assert torch.isfinite(trainer.model.scale.weight).all()
    summary = json.loads(report.report.read_text())
    assert summary["parameters_with_such_gradients"] == ["scale.weight"]
    quiet = NaNReportCallback(tmp_path / "quiet", check_gradients=False)
    with pytest.warns(UserWarning, match="with weights that are infinite or NaN"):
        fit(reporting_trainer([quiet], Gated()), data, epochs=1, max_num_train_steps=3)
    assert quiet.report is None


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = make_model()
    with torch.no_grad():
        model[5].bias.fill_(math.inf)
    report = NaNReportCallback(tmp_path)
    with pytest.raises(NonFiniteLossError, match=r"is 5 \(Linear\); its weights are not finite either"):
        fit(reporting_trainer([report], model), regression_data(30))


@pytest.mark.slow
def test_a_compiled_model_is_looked_into(tmp_path):
    report = NaNReportCallback(tmp_path)
    trainer = reporting_trainer([report], compile_model={"backend": "eager"})
    with pytest.raises(NonFiniteLossError, match=r"is 0 \(Linear\)"):
        fit(trainer, spoilt())


def test_a_run_in_which_all_is_finite_leaves_no_report(tmp_path):
    report = NaNReportCallback(tmp_path / "reports")
    fit(reporting_trainer([report]), regression_data(30))
    assert report.report is None
    assert not (tmp_path / "reports").exists()


def test_a_batch_that_was_skipped_is_not_in_the_report(tmp_path):
    def fail(trainer: Trainer) -> None:
        if trainer.progress.step == 0:
            raise ValueError("no")

    class Fails(Trainer):
        def calculate_train_batch_loss(self, batch):
            fail(self)
            return super().calculate_train_batch_loss(batch)

    report, model = NaNReportCallback(tmp_path), make_model()
    callbacks = [report, SkipFailedBatchesCallback()]
    trainer = Fails(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=callbacks)
    with pytest.raises(NonFiniteLossError, match="epoch 1, step 2"):
        fit(trainer, spoilt(), gradient_accumulation_steps=3)
    summary = json.loads(report.report.read_text())
    assert summary["indices"] == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


# ---------------------------------------------------------------------------------------------- spikes


def spiky(at: int = 20, size: int = 50, value: float = 1e3) -> Any:
    """Data of which the fifth batch has enormous targets."""
    data = regression_data(size)
    data.tensors[1][at : at + 5] = value
    return data


@pytest.mark.parametrize("value", [1e3, math.nan])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_an_update_with_a_spike_is_skipped(value, clip, capsys):
    kept: list[Any] = []
    keep = listener(on_train_step_end=lambda t, **_: kept.append(weights(t.model)))
    guard = GradientSpikeCallback(warm_up_updates=3)
    trainer = reporting_trainer([guard, keep], nn.Linear(5, 1).double())
    fit(trainer, spiky(value=value), epochs=1, gradient_clip_norm=clip)
    assert guard.skipped == [5]
    assert equal(kept[4], kept[3])
    assert not equal(kept[5], kept[4])
    assert trainer.progress.update == 10
    assert "Update 5 skipped: the gradient norm is" in capsys.readouterr().out


def test_the_schedule_waits_for_an_update_that_is_skipped():
    guard = GradientSpikeCallback(warm_up_updates=3)
    trainer = reporting_trainer([guard], nn.Linear(5, 1).double())
    create = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    fit(trainer, spiky(), epochs=1, create_scheduler_fn=create)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**9


def test_spike_after_spike_is_no_spike_but_ends_the_run():
    data = regression_data(50)
    data.tensors[1][15:] = 1e3
    guard = GradientSpikeCallback(warm_up_updates=3, max_skips_in_a_row=4)
    trainer = fit(reporting_trainer([guard], nn.Linear(5, 1).double()), data)
    assert "gradients of 4 updates in a row" in trainer.stop_reason
    assert guard.skipped == [4, 5, 6, 7]


def test_the_guard_continues_in_a_resumed_run(tmp_path):
    def run(**kwargs: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        guard = GradientSpikeCallback(3, warm_up_updates=3)
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = fit(reporting_trainer([guard, saving], nn.Linear(5, 1).double(), seed=2), spiky(), epochs=1, **kwargs)
        return weights(trainer.model), guard.state_dict()

    whole, state = run()
    resumed, again = run(resume_from=tmp_path / "update-000000003")
    assert equal(resumed, whole)
    assert again == state


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factor": 1}, ValueError, "factor=1 must be greater than 1"),
        ({"decay": 1.0}, ValueError, "decay=1.0"),
        ({"decay": "0.9"}, TypeError, "decay='0.9'"),
        ({"warm_up_updates": 0}, ValueError, "warm_up_updates=0"),
        ({"max_skips_in_a_row": 0}, ValueError, "max_skips_in_a_row=0"),
    ],
)
def test_senseless_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        GradientSpikeCallback(**arguments)


def test_parts_that_were_taken_back_are_not_in_the_report(tmp_path):
    tried: list[list[int]] = []

    class Uneven(Trainer):
        def calculate_train_batch_loss(self, batch):
            tried.append(self.batch_indices)
            if len(batch[0]) > 2 and self.batch_indices[-1] == 7:
                raise MemoryError
            return super().calculate_train_batch_loss(batch)

    report, model = NaNReportCallback(tmp_path), make_model()
    trainer = Uneven(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[report])
    data = regression_data(8)
    data.tensors[0][7] = math.nan
    with pytest.raises(NonFiniteLossError):
        trainer.train(data, 1, None, 8, train_dataloader_kwargs={"shuffle": False}, auto_microbatch=True)
    assert tried[1:3] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    summary = json.loads(report.report.read_text())
    assert summary["indices"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def nan_report() -> Any:
    """One rank meets a batch that is not finite: it alone writes a report, and all end together."""
    with shared_folder() as folder:
        report = NaNReportCallback(folder / "nan reports")
        data = regression_data(60)
        data.tensors[0][11, 0] = float("nan")
        trainer = quiet_trainer(small_model(), callbacks=[report])
        try:
            trainer.train(data, 1, per_device_batch_size=global_batch(6), train_dataloader_kwargs=IN_ORDER)
        except NonFiniteLossError as error:
            return {"error": str(error), "report": None if report.report is None else report.report.name}


@two_are_enough
def test_the_rank_that_meets_what_is_not_finite_writes_the_report_and_all_end(ranks):
    *others, last = ranks(nan_report)
    rank = ranks.world_size - 1
    assert last["report"] == f"epoch-1-step-1-rank-{rank}.json"
    assert all(last["report"] in result["error"] for result in [*others, last])
