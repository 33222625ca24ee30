"""Averaged weights: the formula, evaluation, saving, and exact resuming."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, MinMaxMetric

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ModelEmaCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.ema import ModelEma
from tests.scripts.resumable import CopyStates, run
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    image_data,
    image_model,
    largest_difference,
    normed_model,
    same_bits,
    weights,
)


class KeepWeights(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_optimizer_step_end(self, trainer, **kwargs):
        self.seen.append(copy.deepcopy(trainer.get_model().state_dict()))


@pytest.mark.parametrize("warmup", [False, True])
def test_weights_and_buffers_follow_the_formula(tmp_path, warmup):
    model, kept = normed_model(), KeepWeights()
    average = copy.deepcopy(model.state_dict())
    ema = ModelEmaCallback(decay=0.9, save_path=tmp_path / "ema.pt", warmup=warmup)
    adamw_trainer(model, callbacks=[kept, ema], seed=0).train(float64_data(22), 2, float64_data(9))
    assert len(kept.seen) == 6
    for number, seen in enumerate(kept.seen):
        decay = min(0.9, (1 + number) / (10 + number)) if warmup else 0.9
        for name, value in seen.items():
            average[name] = decay * average[name] + (1 - decay) * value if value.is_floating_point() else value
    found = ema.ema.module.state_dict()
    assert found.keys() == average.keys()
    for name, value in average.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    assert found["1.num_batches_tracked"] == 6


def test_the_averaged_model_is_evaluated_saved_and_never_trained(tmp_path):
    losses = []

    class Sees(TrainerCallback):
        def on_eval_step_end(self, trainer, **kwargs):
            losses.append(trainer.model is inner.ema.module)

    inner = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", callbacks=[Sees])
    model = normed_model()
    best = SaveBestModelCallback(tmp_path / "best.pt", "ema_model_eval_loss_epoch", load_saved_checkpoint=False)
    trainer = adamw_trainer(model, callbacks=[inner, best], seed=0)
    data, eval_data = float64_data(22), float64_data(9)
    trainer.train(data, 3, eval_data)
    history = trainer.run_history.to_dict()
    assert len(history["ema_model_eval_loss_epoch"]) == len(history["eval_loss_epoch"]) == 3
    assert history["ema_model_eval_loss_epoch"] != history["eval_loss_epoch"]
    assert losses
    assert all(losses)
    saved = torch.load(tmp_path / "ema.pt")
    assert saved["ema_model_eval_loss_epoch"] == min(history["ema_model_eval_loss_epoch"])
    again = normed_model()
    again.load_state_dict(saved["model_state_dict"])
    evaluated = adamw_trainer(again).evaluate(eval_data)["evaluation_loss"]
    assert evaluated == saved["ema_model_eval_loss_epoch"]
    # What is trained is what is trained without it, and what others save is that.
    plain = normed_model()
    adamw_trainer(plain, seed=0).train(data, 3, eval_data)
    assert equal_weights(model.state_dict(), plain.state_dict())
    assert not equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], saved["model_state_dict"])


def test_saving_while_the_average_is_evaluated_saves_the_model(tmp_path):
    class Saves(TrainerCallback):
        def on_eval_step_end(self, trainer, **kwargs):
            trainer.save_model(tmp_path / "model.safetensors")
            trainer.save_checkpoint(tmp_path / "model.pt")

    model = float64_model()
    ema = ModelEmaCallback(decay=0.5, save_path=None, callbacks=[Saves])
    adamw_trainer(model, callbacks=[ema]).train(float64_data(22), 1, float64_data(9))
    assert equal_weights(torch.load(tmp_path / "model.pt")["model_state_dict"], model.state_dict())
    assert not equal_weights(ema.ema.module.state_dict(), model.state_dict())


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("update_every", ["update", "epoch"])
def test_a_run_with_an_average_resumes_to_the_same_bits(tmp_path, update_every):
    def make(folder: Path) -> tuple[Any, ModelEmaCallback]:
        ema = ModelEmaCallback(0.9, save_path=folder / "ema.pt", update_every=update_every, warmup=True)
        return (ema,), ema

    extra, whole_ema = make(tmp_path)
    whole = run(tmp_path, resume_from=None, extra=(*extra, CopyStates(tmp_path)), save_every_n_epochs=1)
    copies = sorted((tmp_path / "copies").glob("*/update-*"))
    assert len(copies) == 15
    for source in copies[::3]:
        folder = tmp_path / f"again-{source.parent.name}"
        extra, ema = make(folder)
        again = run(folder, resume_from=source, extra=extra)
        assert equal_weights(ema.ema.module.state_dict(), whole_ema.ema.module.state_dict())
        assert again["history"] == whole["history"]
        assert equal_weights(again["weights"], whole["weights"])


class CountsEvaluations(TrainerCallback):
    """Records how often it was called."""

    def __init__(self) -> None:
        self.evaluations = 0

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.evaluations += 1
        trainer.run_history.update_metric("evaluations", self.evaluations)


class Counts(ModelEma):
    """Keeps more of the average with each update, by a number of its own."""

    def __init__(self, model: nn.Module, decay: float = 0.5) -> None:
        super().__init__(model, decay)
        self.calls = 0

    def update(self, model: nn.Module) -> None:
        self.calls += 1
        self.decay = 1 - 1 / (1 + self.calls)
        super().update(model)


class Replaces(nn.Sequential):
    """Replaces one of its buffers in each forward pass, so that their order changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passes = self.passes + 1
        del self.passes
        self.register_buffer("passes", passes)
        outputs: torch.Tensor = super().forward(x)
        return outputs


def test_buffers_are_averaged_by_name():
    model = Replaces(*float64_model())
    model.register_buffer("passes", torch.zeros(1))
    model.register_buffer("one", torch.ones(1))
    ema = ModelEmaCallback(0.5, save_path=None)
    adamw_trainer(model, callbacks=[ema]).train(float64_data(16), 1, float64_data(4), 4)
    assert ema.ema.module.one.tolist() == [1.0]
    assert ema.ema.module.passes.item() > 2


def test_callbacks_that_would_never_act_are_refused():
    with pytest.raises(ValueError, match="Pass it to the trainer, with watch_metric='ema_model_eval_loss_epoch'"):
        ModelEmaCallback(callbacks=[SaveBestModelCallback("best.pt")])


def make_cached() -> nn.Module:
    class Cached(nn.Sequential):
        def forward(self, x):
            if self.scale is None:
                self.scale = torch.full((1,), 1.5, dtype=x.dtype)
            return super().forward(x) * self.scale

    model = Cached(*float64_model())
    model.register_buffer("scale", None, persistent=False)
    return model


@pytest.mark.extension("metrics", "user_attributes")
def test_a_resumed_average_has_its_callbacks_and_rule(tmp_path):
    def trained(folder: str, **kwargs: Any) -> Any:
        from pytorch_accel_lite.callbacks import MetricsCallback

        within = [MetricsCallback({"mse": MinMaxMetric(MeanSquaredError())}), CountsEvaluations()]
        ema = ModelEmaCallback(0.5, save_path=None, callbacks=within, model_ema=Counts)
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = adamw_trainer(make_cached(), callbacks=[ema, states], seed=0)
        trainer.train(float64_data(22), 4, float64_data(9), 4, **kwargs)
        return weights(ema.ema.module), trainer.run_history.to_dict()

    whole = trained("whole")
    again = trained("again", resume_from=tmp_path / "whole" / "update-000000015")
    assert same_bits(again, whole)
    assert whole[1]["ema_model_evaluations"] == [1, 2, 3, 4]


def test_without_evaluation_the_average_is_saved_each_epoch(tmp_path):
    ema = ModelEmaCallback(evaluate_during_training=False, save_path=tmp_path / "ema.pt")
    trainer = adamw_trainer(float64_model(), callbacks=[ema])
    trainer.train(float64_data(22), 2)
    saved = torch.load(tmp_path / "ema.pt")
    assert saved["epoch"] == 2
    assert equal_weights(saved["model_state_dict"], ema.ema.module.state_dict())
    assert "ema_model_eval_loss_epoch" not in trainer.run_history.get_metric_names()


def test_tied_frozen_and_compiled_models_are_averaged():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.second(self.first(x)))

    inner = Tied().double()
    model = torch.compile(inner, backend="eager")
    ema = ModelEmaCallback(decay=0.5, save_path=None)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[ema])
    trainer.train(float64_data(22), 1, float64_data(9))
    average = ema.ema.module
    assert average.second.weight is average.first.weight
    assert torch.equal(average.frozen.weight, inner.frozen.weight)
    assert not torch.equal(average.first.weight, inner.first.weight)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("option", ["compile_model", "channels_last"])
def test_a_compiled_or_channels_last_models_average_is_the_same(option, tmp_path):
    def average(**options: Any) -> tuple[nn.Module, list[float]]:
        model = image_model()
        ema = ModelEmaCallback(0.8, save_path=tmp_path / "ema.pt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = adamw_trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[ema], seed=0, **options)
        trainer.train(image_data(), 2, image_data(7), per_device_batch_size=6)
        return ema.ema.module, trainer.run_history.get_metric_values("ema_model_eval_loss_epoch")

    plain, losses = average()
    found, own_losses = average(**{option: {"backend": "eager"} if option == "compile_model" else True})
    assert largest_difference(found.state_dict(), plain.state_dict()) < 1e-10
    assert own_losses == pytest.approx(losses)
    assert found[0].weight.is_contiguous(memory_format=torch.channels_last) == (option == "channels_last")
    assert torch.allclose(found(image_data().tensors[0]), plain(image_data().tensors[0]))


@pytest.mark.parametrize("order", ["average first", "average last"])
@pytest.mark.parametrize("change", ["compile", "channels last", "synchronised batch norm"])
def test_averages_may_be_created_before_or_after_preparation(order, change):
    model = image_model()
    prepare = {
        "compile": lambda: model.compile(backend="eager") or model,
        "channels last": lambda: model.to(memory_format=torch.channels_last),
        "synchronised batch norm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(model),
    }[change]
    if order == "average first":
        average = ModelEma(model, decay=0.75)
        prepared = prepare()
    else:
        prepared = prepare()
        average = ModelEma(prepared, decay=0.75)
    before = copy.deepcopy(prepared.state_dict())
    with torch.no_grad():
        for tensor in (*prepared.parameters(), *prepared.buffers()):
            tensor.add_(1)
    average.update(prepared)
    for name, value in average.module.state_dict().items():
        expected = before[name] + 0.25 if value.is_floating_point() else before[name] + 1
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_averages_keep_masks_of_infinities(decay):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.frozen_mask = nn.Parameter(torch.tensor([0.0, torch.inf]), requires_grad=False)
    ema = ModelEma(model, decay)
    before = model.weight.clone()
    with torch.no_grad():
        model.weight += 1
    ema.update(model)
    assert torch.equal(ema.module.mask, model.mask)
    assert torch.equal(ema.module.frozen_mask, model.frozen_mask)
    torch.testing.assert_close(ema.module.weight, decay * before + (1 - decay) * model.weight, rtol=0, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.3, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_averages_of_constant_weights_are_exact(dtype, decay, warmup):
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=dtype).requires_grad_(False)
    model.register_buffer("mean", torch.randn(100, dtype=dtype))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf], dtype=dtype))
    before = copy.deepcopy(model.state_dict())
    ema = ModelEma(model, decay, warmup)
    for _ in range(100):
        ema.update(model)
    assert equal_weights(ema.module.state_dict(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_half_precision_buffers_are_exact(dtype):
    torch.manual_seed(0)
    model = nn.Module()
    model.register_buffer("mean", torch.randn(1000, dtype=dtype))
    ema = ModelEma(model, 0.99)
    exact = 0.99 * model.mean.double()
    model.mean.normal_()
    ema.update(model)
    expected = exact + 0.01 * model.mean.double()
    assert ((ema.module.mean.double() - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-7).all()


def test_averaged_parameters_are_a_linear_interpolation():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    ema = ModelEma(model, 0.99)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.normal_()
    ema.update(model)
    assert torch.equal(ema.module.weight, before.lerp(model.weight.detach(), 1 - 0.99))


def test_an_average_in_too_low_precision_is_warned_of(recwarn):
    for dtype, decay in ((torch.bfloat16, 0.99), (torch.float16, 0.999), (torch.float32, 0.9999), (torch.bfloat16, 1)):
        ModelEma(nn.Linear(2, 2, dtype=dtype), decay)
    ModelEma(nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False), 0.9999)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"decay=0\.9999: the average is kept in bfloat16.*in float32 and train with"):
        ModelEma(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)), 0.9999)


def replace_parameter(model: nn.Module, ema: ModelEma) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def replace_layer(model: nn.Module, ema: ModelEma) -> None:
    model[0] = nn.Linear(2, 2)


def convert_both(model: nn.Module, ema: ModelEma) -> None:
    model.double()
    ema.module.double()


CHANGES = {
    "a parameter replaced": (nn.Linear(2, 2), replace_parameter),
    "a layer replaced": (nn.Sequential(nn.Linear(2, 2)), replace_layer),
    "frozen": (nn.Linear(2, 2), lambda model, ema: model.requires_grad_(False)),
    "only the model converted": (nn.Linear(2, 2), lambda model, ema: model.double()),
    "both converted": (nn.Linear(2, 2), convert_both),
    "the average copied": (nn.Linear(2, 2), lambda model, ema: vars(ema).update(vars(copy.deepcopy(ema)))),
}


@pytest.mark.parametrize(("model", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_an_average_follows_a_model_whose_tensors_change(model, change):
    model = copy.deepcopy(model)
    ema = ModelEma(model, 0.5)
    for value in (1.0, 3.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        if value == 1.0:
            ema.set(model)
            ema.update(model)
            change(model, ema)
    ema.update(model)
    for average, parameter in zip(ema.module.parameters(), model.parameters(), strict=True):
        assert torch.all(average == 2)
        assert torch.all(parameter == 3)


def test_a_copy_of_an_average_has_no_part_of_the_model():
    model = nn.Linear(2, 2)
    ema = ModelEma(model, 0.5)
    ema.update(model)
    assert len(pickle.dumps(ema)) == len(pickle.dumps(copy.deepcopy(ModelEma(model, 0.5)))) > 0


def test_a_custom_averaging_rule_replaces_the_default():
    class Largest(ModelEma):
        def update_fn(self, ema_model_weights, updated_model_weights):
            return torch.maximum(ema_model_weights, updated_model_weights)

    model = float64_model()
    start = copy.deepcopy(model.state_dict())
    ema = ModelEmaCallback(save_path=None, model_ema=Largest)
    adamw_trainer(model, callbacks=[ema]).train(float64_data(8), 1, float64_data(4))
    for name, value in model.state_dict().items():
        assert torch.equal(ema.ema.module.state_dict()[name], torch.maximum(start[name], value))


def test_a_custom_averaging_rule_may_call_the_default():
    class Noted(ModelEma):
        def update_fn(self, ema_model_weights, updated_model_weights):
            return super().update_fn(ema_model_weights, updated_model_weights)

    model = float64_model()
    averages = [average_class(model, decay=0.7) for average_class in (Noted, ModelEma)]
    with torch.no_grad():
        model[0].weight += 1
    for average in averages:
        average.update(model)
    torch.testing.assert_close(averages[0].module.state_dict(), averages[1].module.state_dict())
    with pytest.raises(ValueError, match=r"decay=1\.5 must be a number from 0 to 1"):
        Noted(model, decay=1.5)


@pytest.mark.parametrize("warmup", [False, True])
def test_a_custom_averaging_rule_counts_and_warms_up(warmup):
    class Noted(ModelEma):
        def update_fn(self, ema_model_weights, updated_model_weights):
            assert ema_model_weights.is_floating_point()
            return self.decay * ema_model_weights + (1 - self.decay) * updated_model_weights

    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)).double()
    averages = [average_class(model, decay=0.9, warmup=warmup) for average_class in (Noted, ModelEma)]
    for _ in range(5):
        with torch.no_grad():
            model(torch.randn(4, 5, dtype=torch.float64))
            model[0].weight += 1
        for average in averages:
            average.update(model)
    assert averages[0].module[1].num_batches_tracked == 5
    assert averages[0].decay == 0.9
    torch.testing.assert_close(averages[0].module.state_dict(), averages[1].module.state_dict())


def averaged() -> Any:
    """The average with its buffers and its evaluation loss, and the expected loss over the dataset."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    ema = ModelEmaCallback(0.5, save_path=None)
    trainer = adamw_trainer(model, callbacks=[ema], seed=0)
    data = float64_data(10)
    trainer.train(float64_data(24), 1, data, 2)
    average = ema.ema.module
    with torch.no_grad():
        expected = nn.functional.mse_loss(average(data.tensors[0]), data.tensors[1]).item()
    return {"average": weights(average), "history": trainer.run_history.to_dict(), "expected": expected}


@pytest.mark.processes
def test_the_average_is_the_same_on_all_processes(ranks, two_ranks):
    found = ranks(averaged)
    assert all(equal_weights(other["average"], found[0]["average"]) for other in found)
    assert all(other["history"] == found[0]["history"] for other in found)
    assert found[0]["history"]["ema_model_eval_loss_epoch"] == pytest.approx([found[0]["expected"]], rel=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"decay": 1.5}, "decay=1.5 must be at least 0 and at most 1"),
        ({"decay": -0.1}, "decay=-0.1 must be at least 0 and at most 1"),
        ({"decay": "0.9"}, "decay='0.9' must be a number"),
        ({"prefix": ""}, "prefix='' must not be empty"),
        ({"prefix": ["a_"]}, r"prefix=\['a_'\] must be text"),
        ({"model_ema": 0.99}, r"model_ema=0\.99 must be a function"),
        ({"update_every": "step"}, "update_every='step' must be 'update' or 'epoch'"),
    ],
)
def test_averages_refuse_bad_decays_and_prefixes(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ModelEmaCallback(**kwargs)


def test_two_averages_are_distinguished_by_their_prefixes(tmp_path):
    slow = ModelEmaCallback(0.99, save_path=tmp_path / "slow.pt", prefix="slow_")
    fast = ModelEmaCallback(0.5, save_path=tmp_path / "fast.pt")
    trainer = adamw_trainer(float64_model(), callbacks=[slow, fast])
    trainer.train(float64_data(22), 2, float64_data(9))
    losses = {name: trainer.run_history.get_metric_values(f"{name}_eval_loss_epoch") for name in ("slow", "ema_model")}
    assert losses["slow"] != losses["ema_model"]
    assert torch.load(tmp_path / "slow.pt")["slow_eval_loss_epoch"] == min(losses["slow"]) == slow.best_metric
    assert torch.load(tmp_path / "fast.pt")["ema_model_eval_loss_epoch"] == min(losses["ema_model"])


def test_two_averages_with_one_prefix_are_refused():
    trainer = adamw_trainer(
        float64_model(), callbacks=[ModelEmaCallback(decay, save_path=None) for decay in (0.9, 0.99)]
    )
    with pytest.raises(ValueError, match="prefix='ema_model_' is used by two ModelEmaCallbacks"):
        trainer.train(float64_data(8), 1, float64_data(4))


def test_the_best_average_is_not_saved_without_evaluation_data(tmp_path):
    trainer = adamw_trainer(float64_model(), callbacks=[ModelEmaCallback(save_path=tmp_path / "ema.pt")])
    with pytest.warns(UserWarning, match=r"no evaluation data.*evaluate_during_training=False"):
        trainer.train(float64_data(8), 1)
    assert not (tmp_path / "ema.pt").exists()
    unsaved = ModelEmaCallback(save_path=None)
    adamw_trainer(float64_model(), callbacks=[unsaved]).train(float64_data(8), 1)
    assert unsaved.ema_model is unsaved.ema is not None


def test_a_metric_that_is_not_recorded_is_named(tmp_path):
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt", watch_metric="ema_model_eval_los_epoch")
    with pytest.raises(ValueError, match="Did you mean 'ema_model_eval_loss_epoch'"):
        adamw_trainer(float64_model(), callbacks=[ema]).train(float64_data(8), 1, float64_data(4))


def test_the_average_is_part_of_a_training_state_after_the_run(tmp_path):
    ema = ModelEmaCallback(decay=0.5, save_path=None)
    saving = SaveTrainingStateCallback(tmp_path / "states")
    adamw_trainer(float64_model(), callbacks=[ema, saving]).train(float64_data(22), 1, float64_data(9))
    (state,) = (tmp_path / "states").glob("update-*")
    again = ModelEmaCallback(decay=0.5, save_path=None)
    trainer = adamw_trainer(float64_model(1), callbacks=[again, SaveTrainingStateCallback(tmp_path / "other")])
    trainer.train(float64_data(22), 1, float64_data(9), resume_from=state)
    assert equal_weights(again.ema.module.state_dict(), ema.ema.module.state_dict())


def test_an_average_added_to_a_resumed_run_starts_at_its_weights(tmp_path):
    saving = SaveTrainingStateCallback(tmp_path / "states")
    trained = adamw_trainer(float64_model(), callbacks=[saving])
    trained.train(float64_data(22), 2)
    before = weights(trained.model)
    ema = ModelEmaCallback(decay=1.0, evaluate_during_training=False, save_path=None)
    trainer = adamw_trainer(float64_model(1), callbacks=[SaveTrainingStateCallback(tmp_path / "states"), ema])
    with pytest.warns(UserWarning, match="holds nothing for the callback 'ModelEmaCallback'"):
        trainer.train(float64_data(22), 3, resume_from="latest")
    assert equal_weights(ema.ema.module.state_dict(), before)


def test_uninitialised_lazy_layers_are_an_error_with_advice(tmp_path):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 1)).double()
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    with pytest.raises(
        ValueError, match=r"ModelEmaCallback cannot average.*lazy layers. Pass the model a batch before"
    ):
        adamw_trainer(model, callbacks=[ema]).train(float64_data(8), 1, float64_data(4))
    model(float64_data(8).tensors[0])
    adamw_trainer(model, callbacks=[ema]).train(float64_data(8), 1, float64_data(4))


def test_the_best_average_of_an_earlier_run_stays_in_its_file(tmp_path):
    averaging = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt")
    data = float64_data(16)
    trainer = adamw_trainer(float64_model(), callbacks=[averaging])
    trainer.train(data, 2, data)
    best, saved = averaging.best_metric, (tmp_path / "ema.pt").read_bytes()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(100)
    trainer.train(data, 1, data)
    assert averaging.best_metric == best < trainer.run_history.get_latest_metric("ema_model_eval_loss_epoch")
    assert (tmp_path / "ema.pt").read_bytes() == saved


@pytest.mark.extension("other_libraries")
def test_a_name_of_another_library_for_the_metric_is_suggested():
    with pytest.raises(TypeError, match="it is called watch_metric"):
        ModelEmaCallback(monitor="loss")


def test_an_average_that_is_not_saved_needs_no_common_loss(tmp_path):
    model, data = float64_model(), float64_data(8)
    ema = ModelEmaCallback(save_path=None)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[ema])
    trainer.train(data, 2, {"near": data, "far": data})
    assert len(trainer.run_history.get_metric_values("ema_model_far_eval_loss_epoch")) == 2
    assert ema.best_metric is None
    trainer.callback_handler.add_callback(ModelEmaCallback(save_path=tmp_path / "ema.pt", prefix="saved_"))
    with pytest.raises(ValueError, match="the run will not record it"):
        trainer.train(data, 1, {"near": data, "far": data})
