"""Summaries of a model by torchinfo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import ModelSummaryCallback
from tests.small_models import adamw_trainer, equal_weights, image_data, image_model, listener, make_trainer, weights

pytest.importorskip("torchinfo")


def rows_of(table: str) -> list[list[str]]:
    return [line.replace("├─", "").replace("│", "").split() for line in table.splitlines()]


def test_a_summary_has_the_shapes_of_a_batch():
    model = image_model()
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, callbacks=[])
    before = weights(model), torch.get_rng_state()
    found = trainer.summary(image_data(), per_device_batch_size=5)
    assert str(found).count("[5, 6, 6, 6]") == 3  # convolution, batch norm, activation
    assert found.total_params == sum(parameter.numel() for parameter in model.parameters())
    assert equal_weights(before[0], weights(model))
    assert torch.equal(before[1], torch.get_rng_state())
    assert model.training
    assert not model._forward_pre_hooks


def test_a_summary_without_data_has_no_shapes():
    found = make_trainer().summary()
    assert "[" not in str(found)
    assert found.total_params == 49


class TakesTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows, scale=1.0):
        return self.layer(rows) * scale


def test_dicts_and_overridden_steps_give_the_model_its_inputs():
    rows = [{"rows": torch.ones(4), "scale": torch.ones(3)} for _ in range(6)]
    assert "[2, 3]" in str(Trainer(TakesTwo(), None, None, callbacks=[]).summary(rows, 2))

    class Squeezed(Trainer):
        def calculate_predict_batch_output(self, batch):
            return self.model(batch[0].flatten(1))

    data = TensorDataset(torch.ones(6, 2, 2))
    assert "[3, 3]" in str(Squeezed(TakesTwo(), None, None, callbacks=[]).summary(data, 3))

    class Other(Trainer):
        def calculate_predict_batch_output(self, batch):
            return batch

    with pytest.raises(RuntimeError, match="does not call the model"):
        Other(TakesTwo(), None, None, callbacks=[]).summary(data)
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        make_trainer().summary(depth=0)


@pytest.mark.parametrize("arguments", [{}, {"compile_model": {"backend": "eager"}}])
def test_a_model_summary_is_printed_once_and_changes_nothing(arguments, capsys, tmp_path):
    def run(*callbacks: Any, **kwargs: Any) -> dict[str, Any]:
        trainer = make_trainer([*callbacks, save], image_model(), seed=3, **arguments)
        trainer.loss_func = nn.CrossEntropyLoss()
        trainer.train(image_data(), 2, per_device_batch_size=4, **kwargs)
        return weights(trainer.get_model())

    save = listener(on_epoch_checkpoint=lambda t: t.save_training_state(tmp_path / f"{t.progress.epochs_completed}"))
    plain = run()
    assert capsys.readouterr().out.count("Total params") == 0
    assert equal_weights(run(ModelSummaryCallback()), plain)
    assert capsys.readouterr().out.count("Total params") == 1
    assert equal_weights(run(ModelSummaryCallback(), resume_from=tmp_path / "1"), plain)
    assert "Total params" not in capsys.readouterr().out


def test_a_subclass_that_hears_each_step_prints_one_summary(capsys):
    class Hears(ModelSummaryCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            super().on_train_step_start(trainer, **kwargs)

    trainer = make_trainer([Hears()], image_model())
    trainer.loss_func = nn.CrossEntropyLoss()
    trainer.train(image_data(), 2, per_device_batch_size=4)
    assert capsys.readouterr().out.count("Total params") == 1


def summaries_of_ranks() -> Any:
    trainer = adamw_trainer(image_model(), callbacks=[ModelSummaryCallback()])
    found = trainer.summary(image_data(), per_device_batch_size=5)
    trainer.loss_func = nn.CrossEntropyLoss()
    trainer.train(image_data(), 1, per_device_batch_size=5)
    return str(found).count("[5, 6, 6, 6]"), trainer.progress.update


def test_each_process_has_a_summary(two_ranks):
    assert two_ranks(summaries_of_ranks) == [(3, 3), (3, 3)]
