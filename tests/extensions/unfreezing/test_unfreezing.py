"""Gradual unfreezing: the layers trained in each epoch, optimizers, and several processes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import GradualUnfreezingCallback, SaveBestModelCallback, SaveTrainingStateCallback
from tests.adapters import bert, rows, with_lora
from tests.extensions.finetuning.groups_of_layers import model_to_unfreeze, trained
from tests.launching import CAN_SHARD, some_of, two_are_enough
from tests.ranks import IN_ORDER, global_batch
from tests.sharded import large_model, sharding_accelerator
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
    weights,
)


def three_groups() -> nn.Module:
    model = make_model()
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), model[0], model[1], model[2])


def log_of(model: nn.Module) -> tuple[list[Any], TrainerCallback]:
    """The layer groups trained in each epoch, and those that changed."""
    log: list[Any] = []
    before: dict[str, torch.Tensor] = {}

    def start(trainer):
        before.update(weights(model))

    def end(trainer):
        changed = {name[0] for name, value in weights(model).items() if not torch.equal(before[name], value)}
        log.append("".join(sorted(changed)))

    return log, listener(on_train_epoch_start=start, on_train_epoch_end=end)


@pytest.mark.parametrize(("every", "expected"), [(1, ["3", "13", "013", "013"]), (2, ["3", "3", "13", "13", "013"])])
@pytest.mark.parametrize("over", ["head", "all"])
def test_one_more_group_is_trained_every_n_epochs(every, expected, over):
    model = three_groups()
    log, logging = log_of(model)
    optimizer = torch.optim.AdamW((model[-1] if over == "head" else model).parameters(), lr=0.1, weight_decay=0.1)
    trainer = make_trainer([GradualUnfreezingCallback(every, lr_decay=0.5), logging], model, optimizer=optimizer)
    train(trainer, len(expected), eval_dataset=True)
    assert log == expected
    groups = trainer.optimizer.param_groups
    assert [group["lr"] for group in groups] == ([0.1, 0.05, 0.025] if over == "head" else [0.1])
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    train(trainer, 2)  # a second run starts with the head again, and adds nothing
    assert log == [*expected, *expected[:2]]
    assert len(groups) == (3 if over == "head" else 1)


def test_evaluating_does_not_freeze_layers():
    model = three_groups()
    log, logging = log_of(model)
    evaluating = listener(on_train_epoch_end=lambda trainer: trainer.evaluate(make_data()))
    trainer = make_trainer([GradualUnfreezingCallback(), evaluating, logging], model)
    evaluated = listener(on_train_step_end=lambda trainer, step, **kw: step or trainer.evaluate(make_data()))
    trainer.callback_handler.add_callback(evaluated)
    train(trainer, 3)
    assert log == ["3", "13", "013"]
    trainer.evaluate(make_data())
    assert len(trained(model)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (partial(LambdaLR, lr_lambda=lambda update: 1 / (1 + update)), [0.1 / 10, 0.05 / 10, 0.025 / 10]),
        (partial(CosineAnnealingLR, T_max=9), [0, 0, 0]),
        (partial(OneCycleLR, max_lr=[0.4, 0.2, 0.1], total_steps=10, final_div_factor=1), [0.016, 0.008, 0.004]),
    ],
)
def test_schedulers_know_all_groups(scheduler, expected):
    model = three_groups()
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    trainer = make_trainer([GradualUnfreezingCallback(lr_decay=0.5)], model, optimizer=optimizer)
    train(trainer, 3, create_scheduler_fn=scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, abs=1e-12)
    assert len(trainer.scheduler.get_last_lr()) == 3


def test_an_optimizer_without_the_head_is_an_error():
    model = three_groups()
    trainer = make_trainer([GradualUnfreezingCallback], model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the optimizer has none of its parameters"):
        train(trainer)


def unfreezing_run(folder, resume_from=None, extra=()) -> Trainer:
    model = model_to_unfreeze()
    optimizer = torch.optim.AdamW(model[-1].parameters(), lr=0.01)
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[GradualUnfreezingCallback(), saving, *extra], seed=3)
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    scheduler = partial(LambdaLR, lr_lambda=lambda update: 1 / (1 + update))
    trainer.train(data, 4, per_device_batch_size=4, create_scheduler_fn=scheduler, resume_from=resume_from)
    return trainer


@pytest.mark.soak
@pytest.mark.slow
def test_from_every_state_a_run_resumes_to_the_same_bits(tmp_path):
    whole = unfreezing_run(tmp_path / "whole")
    states = sorted((tmp_path / "whole").glob("update-*"))
    assert len(states) == 12
    for state in some_of(states):
        resumed = unfreezing_run(tmp_path / "again", resume_from=state)
        assert equal_weights(weights(resumed.model), weights(whole.model)), state.name
        first, second = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
        assert first["param_groups"] == second["param_groups"]
        assert first["state"].keys() == second["state"].keys()
        shutil.rmtree(tmp_path / "again")


def test_gradual_unfreezing_has_all_groups():
    def train_with(make):
        model = float64_model()
        seen = []
        note = listener(on_train_epoch_end=lambda t: seen.append([p.requires_grad for p in t.get_model().parameters()]))
        trainer = adamw_trainer(model, optimizer=make(model), callbacks=[GradualUnfreezingCallback(), note])
        trainer.train(float64_data(26), 2, per_device_batch_size=4, train_dataloader_kwargs=IN_ORDER)
        return weights(model), seen

    found, seen = train_with(lambda model: partial(torch.optim.AdamW, lr=0.02))
    expected, _ = train_with(lambda model: torch.optim.AdamW(model.parameters(), lr=0.02))
    assert equal_weights(found, expected)
    assert seen == [[False, False, True, True], [True] * 4]


def gradual_unfreezing() -> Any:
    """Weights after each number of epochs, for an optimizer over the head."""
    results = {}
    for accumulation in (1, 2):
        for epochs in (1, 2, 4):
            model = model_to_unfreeze()
            optimizer = torch.optim.AdamW(model[-1].parameters(), lr=0.01)
            trainer = adamw_trainer(model, None, optimizer, callbacks=[GradualUnfreezingCallback()])
            trainer.train(
                float64_data(37),
                epochs,
                float64_data(11),
                per_device_batch_size=global_batch(6),
                gradient_accumulation_steps=accumulation,
                train_dataloader_kwargs=IN_ORDER,
                gradient_clip_norm=1.0,
            )
            results[accumulation, epochs] = weights(model)
    return results


@pytest.mark.thorough
@two_are_enough
def test_several_processes_unfreeze_as_one(ranks):
    alone = gradual_unfreezing()
    for result in ranks(gradual_unfreezing):
        assert result.keys() == alone.keys()
        for key, expected in alone.items():
            assert equal_weights(result[key], ranks(gradual_unfreezing)[0][key]), key
            assert largest_difference(result[key], expected) < 1e-10, key


def resumed_at_epochs(folder: Path) -> list[bool]:
    """Whether a run ends with the same weights if it is resumed where an epoch unfreezes layers."""
    whole = unfreezing_run(folder / "whole")
    states = [folder / "whole" / f"update-{update:09}" for update in (1, 2)]
    again = [unfreezing_run(folder / f"from {state.name}", state) for state in states]
    return [equal_weights(weights(whole.get_model()), weights(resumed.get_model())) for resumed in again]


@pytest.mark.processes
def test_three_processes_resume_where_an_epoch_unfreezes(job, tmp_path):
    assert job(3).run(resumed_at_epochs, tmp_path) == [[True, True]] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: ["head"], r"groups\[0\] has 'head', which is not a module of the model"),
        (lambda model: [[]], r"groups=\[\[\]\] has no modules. Pass modules of the model"),
    ],
)
def test_groups_that_are_wrong_are_errors_before_training(given, message):
    model = three_groups()
    trainer = make_trainer([GradualUnfreezingCallback(groups=given(model))], model)
    with pytest.raises(ValueError, match=message):
        train(trainer)


def test_base_weights_of_adapters_are_not_unfrozen():
    pytest.importorskip("peft")
    trainer = adamw_trainer(with_lora(bert()), callbacks=[GradualUnfreezingCallback])
    with pytest.raises(ValueError, match=r"would unfreeze the base weights of PeftModelFor.*layers_to_transform"):
        trainer.train(rows(), 1)


def test_a_best_model_keeps_weights_that_are_unfrozen_later(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", trainable_only=True)
    with pytest.raises(ValueError, match=r"the run trains them later \(GradualUnfreezingCallback\)"):
        train(make_trainer([GradualUnfreezingCallback, best], three_groups()))
    assert not list(tmp_path.iterdir())


def unfreeze_in_shards() -> str:
    model = large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accelerator = sharding_accelerator()
    trainer = Trainer(model, nn.MSELoss(), optimizer, [GradualUnfreezingCallback()], accelerator=accelerator, seed=3)
    with pytest.raises(RuntimeError) as error:
        trainer.train(float64_data(12), 1, per_device_batch_size=3)
    return str(error.value)


@CAN_SHARD
@pytest.mark.processes
def test_sharded_weights_are_not_unfrozen(two_ranks):
    for said in two_ranks(unfreeze_in_shards):
        assert "cannot change which parameters are trained: the model is sharded (FSDP)" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_epochs": 0}, "every_n_epochs=0 must be at least 1"),
        ({"lr_decay": -1}, "lr_decay=-1 must be greater than 0"),
        ({"lr_decay": float("inf")}, "lr_decay=inf must be greater than 0"),
    ],
)
def test_gradual_unfreezing_refuses_bad_intervals_and_decays(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradualUnfreezingCallback(**arguments)
