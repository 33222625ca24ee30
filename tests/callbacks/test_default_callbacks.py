"""The default callbacks and their output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, callbacks, get_default_callbacks
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    TerminateOnNaNCallback,
)
from tests.small_models import Stream, make_model, make_trainer, train


@pytest.mark.extension("advice", "progress_table")
def test_the_default_callbacks_show_a_table_not_printed_lines():
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    assert (
        MoveModulesToDeviceCallback,
        TerminateOnNaNCallback,
        callbacks.ProgressTableCallback,
        ProgressBarCallback,
        callbacks.AdviceCallback,
    ) == DEFAULT_CALLBACKS


@pytest.mark.extension("progress_bar")
def test_the_bar_can_be_left_out_of_the_default_callbacks():
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    assert get_default_callbacks() == DEFAULT_CALLBACKS
    assert ProgressBarCallback in DEFAULT_CALLBACKS
    without = get_default_callbacks(progress_bar=False)
    assert list(without) == [c for c in DEFAULT_CALLBACKS if c is not ProgressBarCallback]


def test_two_trainers_share_none_of_their_default_callbacks():
    model = make_model()
    first, second = (Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    assert [type(c) for c in first.callback_handler] == list(DEFAULT_CALLBACKS)
    assert not set(first.callback_handler) & set(second.callback_handler)


@pytest.mark.extension("streams")
def test_epochs_are_announced_without_an_unknown_total(capsys):
    train(
        make_trainer([PrintProgressCallback]),
        epochs=None,
        max_num_train_steps=4,
        train_dataset=Stream(6),
        train_dataloader_kwargs={},
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Starting training run", "Starting epoch 1", "Starting epoch 2", "Finishing training run"]
