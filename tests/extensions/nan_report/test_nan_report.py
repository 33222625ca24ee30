"""A loss or gradient that is not finite is reported with its origin, and its step repeated."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import NonFiniteLossError, Trainer
from pytorch_accel_lite import callbacks as shipped
from pytorch_accel_lite.callbacks import NaNReportCallback, SaveTrainingStateCallback, TerminateOnNaNCallback
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER, global_batch, shared_folder
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, listener, weights

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
    data = float64_data(size)
    data.tensors[0][index, 2] = value
    return data


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_nan_report_names_the_layer_and_the_samples(tmp_path, accumulation):
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
        "layer": "0", "kind": "Linear", "inputs_are_finite": False, "weights_are_finite": True, "operations": [],
    }  # fmt: skip
    assert equal_weights({"0.weight": weights(trainer.model)["0.weight"]}, {"0.weight": before[2]["0.weight"]})
    assert not trainer.model[0]._forward_hooks


def test_training_with_reports_has_the_same_bits():
    results = []
    for callbacks in ([], [NaNReportCallback]):
        torch.manual_seed(3)
        results.append(weights(fit(reporting_trainer(callbacks), float64_data(30)).model))
    assert equal_weights(*results)


class Gated(nn.Module):
    """At 0, its output is 0, and its gradient 0 times infinity."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(5, 1, bias=False).double()
        self.root = Root()

    def forward(self, x):
        return self.root(self.scale(x) ** 2)


def test_a_non_finite_gradient_is_reported_before_the_update(tmp_path):
    data = float64_data(30)
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


def test_non_finite_weights_are_named(tmp_path):
    model = make_model()
    with torch.no_grad():
        model[5].bias.fill_(math.inf)
    report = NaNReportCallback(tmp_path)
    with pytest.raises(NonFiniteLossError, match=r"is 5 \(Linear\); its weights are not finite either"):
        fit(reporting_trainer([report], model), float64_data(30))


@pytest.mark.slow
def test_nan_reports_look_inside_a_compiled_model(tmp_path):
    report = NaNReportCallback(tmp_path)
    trainer = reporting_trainer([report], compile_model={"backend": "eager"})
    with pytest.raises(NonFiniteLossError, match=r"is 0 \(Linear\)"):
        fit(trainer, spoilt())


def test_a_finite_run_writes_no_report(tmp_path):
    report = NaNReportCallback(tmp_path / "reports")
    fit(reporting_trainer([report]), float64_data(30))
    assert report.report is None
    assert not (tmp_path / "reports").exists()


@pytest.mark.extension("failed_batches")
def test_a_batch_that_was_skipped_is_not_in_the_report(tmp_path):
    def fail(trainer: Trainer) -> None:
        if trainer.progress.step == 0:
            raise ValueError("no")

    class Fails(Trainer):
        def calculate_train_batch_loss(self, batch):
            fail(self)
            return super().calculate_train_batch_loss(batch)

    report, model = NaNReportCallback(tmp_path), make_model()
    callbacks = [report, shipped.SkipFailedBatchesCallback()]
    trainer = Fails(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=callbacks)
    with pytest.raises(NonFiniteLossError, match="epoch 1, step 2"):
        fit(trainer, spoilt(), gradient_accumulation_steps=3)
    summary = json.loads(report.report.read_text())
    assert summary["indices"] == [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


# ---------------------------------------------------------------------------------------------- repeated steps


class Halved(nn.Module):
    """Its inputs, halved, and NaN where their root is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x / 2
        return half.sqrt()


def failing_run(folder: Any, seen: list[Any], model: Any = None, saves: int | None = 1, **kwargs: Any) -> Trainer:
    """A trainer whose third step of the second epoch fails because of its data."""
    saving = [SaveTrainingStateCallback(folder / "states", save_every_n_steps=saves)] if saves else []

    def note(trainer: Trainer, output: dict[str, Any]) -> None:
        seen.append([trainer.progress.epoch, trainer.progress.step, output["loss"].detach(), weights(trainer.model)])

    remember = listener(on_backward_start=lambda t, batch, batch_output, **_: note(t, batch_output))
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(5, 6), nn.Identity(), Halved(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    with torch.no_grad():
        layers[0].bias.fill_(6.0)
    return reporting_trainer([remember, NaNReportCallback(folder / "reports"), *saving], model or layers, **kwargs)


def late(epoch: int = 2, index: int = 12) -> Any:
    """Data of which one sample is spoilt from an epoch on."""
    data = float64_data(30)

    def spoil(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == epoch:
            data.tensors[0][index] = -100.0 * torch.sign(trainer.model[0].weight[0].detach())

    return data, listener(on_train_epoch_start=spoil)


def bits(seen: list[Any]) -> list[Any]:
    return [[epoch, step, int(loss.view(torch.int64))] for epoch, step, loss, _ in seen]


@pytest.mark.parametrize(("saves", "accumulation"), [(2, 1), (1, 2), (None, 1)])
def test_a_repeated_step_has_its_bits_and_names_the_operation(tmp_path, capsys, saves, accumulation):
    def make(seen: list[Any]) -> tuple[Trainer, Any]:
        data, spoil = late()
        trainer = failing_run(tmp_path, seen, saves=saves, seed=3)
        trainer.callback_handler.add_callback(spoil)
        return trainer, data

    first: list[Any] = []
    trainer, data = make(first)
    with pytest.raises(NonFiniteLossError, match=r"NaNReportCallback.repeat\(trainer, .* with the arguments of train"):
        fit(trainer, data, gradient_accumulation_steps=accumulation)
    [report] = (tmp_path / "reports").iterdir()
    before = json.loads(report.read_text())
    assert (before["state"] is None) == (saves is None)
    assert before["epoch"] == 2

    again: list[Any] = []
    trainer, data = make(again)
    arguments = {"per_device_batch_size": 5, "train_dataloader_kwargs": WITHOUT_WORKERS}
    arguments |= {"gradient_accumulation_steps": accumulation, "resume_from": "latest"}
    capsys.readouterr()
    found = NaNReportCallback.repeat(trainer, report, data, 2, **arguments)
    assert len(again) == len(first) if saves is None else len(again) <= saves * accumulation + 1
    assert bits(again) == bits(first[-len(again) :])
    assert math.isnan(again[-1][2])
    assert equal_weights(again[-1][3], first[-1][3])
    assert (found.layer, found.kind) == ("2", "Halved")
    [operation] = found.operations
    assert operation.startswith("The first NaN comes from torch.Tensor.sqrt in 2 (Halved), line ")
    assert operation.endswith("of test_nan_report.py: return half.sqrt().")
    assert operation in capsys.readouterr().out
    after = json.loads(report.read_text())
    assert after["origin"]["operations"] == [operation]
    assert (after["indices"], after["epoch"], after["step"]) == (before["indices"], before["epoch"], before["step"])
    assert not trainer.model[2]._forward_hooks
    assert not trainer.model[2]._forward_pre_hooks


def test_a_repeated_step_names_the_non_finite_gradients_origin(tmp_path):
    data = float64_data(30)
    data.tensors[0][12] = 0.0
    torch.manual_seed(0)
    models = Gated(), Gated()
    models[1].load_state_dict(models[0].state_dict())
    with pytest.raises(NonFiniteLossError, match="gradient is not finite"):
        fit(failing_run(tmp_path, [], models[0]), data)
    [report] = (tmp_path / "reports").iterdir()
    trainer = failing_run(tmp_path, [], models[1])
    arguments = {"per_device_batch_size": 5, "train_dataloader_kwargs": WITHOUT_WORKERS}
    found = NaNReportCallback.repeat(trainer, report, data, 2, **arguments)
    assert found.layer is None
    [operation] = found.operations
    assert operation.startswith(
        "The first infinite value comes from the gradient of SqrtBackward0 in root (Root), line "
    )
    assert operation.endswith("of test_nan_report.py: return x.sqrt().")


def test_a_finite_repetition_of_a_step_ends_the_run(tmp_path, capsys):
    arguments = {"per_device_batch_size": 5, "train_dataloader_kwargs": WITHOUT_WORKERS}
    with pytest.raises(NonFiniteLossError):
        fit(failing_run(tmp_path, []), spoilt())
    [report] = (tmp_path / "reports").iterdir()
    seen: list[Any] = []
    found = NaNReportCallback.repeat(failing_run(tmp_path, seen), report, float64_data(30), 2, **arguments)
    assert found.layer is None
    assert not found.operations
    assert [step for _, step, *_ in seen] == [2]
    assert "Step 2 of epoch 1 was repeated. The outputs of all layers are finite." in capsys.readouterr().out


def test_an_unrepeatable_step_says_what_is_needed(tmp_path):
    trainer = failing_run(tmp_path, [], saves=None)
    with pytest.raises(NonFiniteLossError, match=r"cannot be repeated, .* no training states and has no seed. Give it"):
        fit(trainer, spoilt())
    [report] = (tmp_path / "reports").iterdir()
    with pytest.raises(ValueError, match=r"had no seed. To repeat a step, give the run a SaveTrainingStateCallback"):
        NaNReportCallback.repeat(trainer, report, spoilt(), 2)
    with pytest.raises(ValueError, match=r"trainer has no NaNReportCallback. Create it as for the run"):
        NaNReportCallback.repeat(reporting_trainer([]), report, spoilt(), 2)
    trainer = failing_run(tmp_path, [], saves=None, seed=0)
    with pytest.raises(NonFiniteLossError, match=r"It begins at the start of the run"):
        fit(trainer, spoilt(), epochs=1)
    with pytest.raises(ValueError, match=r"the trainer has trained since. Create another"):
        NaNReportCallback.repeat(trainer, report, spoilt(), 1)


# ---------------------------------------------------------------------------------------------- spikes


@pytest.mark.extension("failed_batches")
def test_parts_of_undone_attempts_are_not_in_the_report(tmp_path):
    tried: list[list[int]] = []

    class Uneven(Trainer):
        def calculate_train_batch_loss(self, batch):
            tried.append(self.batch_indices)
            if len(batch[0]) > 2 and self.batch_indices[-1] == 7:
                raise MemoryError
            return super().calculate_train_batch_loss(batch)

    report, model = NaNReportCallback(tmp_path), make_model()
    trainer = Uneven(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[report])
    data = float64_data(8)
    data.tensors[0][7] = math.nan
    with pytest.raises(NonFiniteLossError):
        trainer.train(data, 1, None, 8, train_dataloader_kwargs={"shuffle": False}, auto_microbatch=True)
    assert tried[1:3] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    summary = json.loads(report.report.read_text())
    assert summary["indices"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def nan_report() -> Any:
    """One rank has a non-finite batch: only it writes a report, and all repeat the step and end together."""
    with shared_folder() as folder:
        data = float64_data(60)
        data.tensors[0][17, 0] = float("nan")
        arguments = {"per_device_batch_size": global_batch(6), "train_dataloader_kwargs": IN_ORDER}

        def make() -> tuple[Trainer, NaNReportCallback]:
            report = NaNReportCallback(folder / "nan reports")
            saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=2)
            return adamw_trainer(float64_model(), callbacks=[report, saving]), report

        trainer, report = make()
        try:
            trainer.train(data, 1, **arguments)
        except NonFiniteLossError as error:
            result = {"error": str(error), "report": None if report.report is None else report.report.name}
        path = next(path for path in trainer.all_gather_object(report.report) if path is not None)
        again, _ = make()
        found = NaNReportCallback.repeat(again, path, data, 1, **arguments)
        return {**result, "found": found.operations, "steps": again.progress.step, "layer": found.layer}


@two_are_enough
def test_the_rank_with_a_nan_writes_the_report(ranks):
    *others, last = ranks(nan_report)
    rank = ranks.world_size - 1
    assert last["report"] == f"epoch-1-step-2-rank-{rank}.json"
    assert all(last["report"] in result["error"] for result in [*others, last])
    for result in [*others, last]:
        assert result["layer"] == "0"
        assert result["found"][0].startswith("The first NaN comes from torch.nn.functional.linear in 0 (Linear)")
        assert result["found"][0].endswith(", of inputs that are not finite either.")
