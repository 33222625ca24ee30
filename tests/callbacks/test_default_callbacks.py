"""The default callbacks and their output."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    AdviceCallback,
    EarlyStoppingCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    ProgressTableCallback,
    SaveBestModelCallback,
    TerminateOnNaNCallback,
)
from tests.launching import two_are_enough
from tests.ranks import shared_folder
from tests.small_models import (
    Stream,
    equal_weights,
    float64_data,
    float64_model,
    make_model,
    make_trainer,
    train,
    weights,
)


def test_the_default_callbacks_show_a_table_not_printed_lines():
    assert get_default_callbacks() == DEFAULT_CALLBACKS
    assert (
        MoveModulesToDeviceCallback,
        TerminateOnNaNCallback,
        ProgressTableCallback,
        ProgressBarCallback,
        AdviceCallback,
    ) == DEFAULT_CALLBACKS
    without = get_default_callbacks(progress_bar=False)
    assert list(without) == [c for c in DEFAULT_CALLBACKS if c is not ProgressBarCallback]


def test_two_trainers_share_none_of_their_default_callbacks():
    model = make_model()
    first, second = (Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    assert [type(c) for c in first.callback_handler] == list(DEFAULT_CALLBACKS)
    assert not set(first.callback_handler) & set(second.callback_handler)


def test_the_default_output_of_a_run_names_epochs_and_metrics(capsys):
    train(make_trainer(DEFAULT_CALLBACKS), epochs=2, eval_dataset=True)
    lines = capsys.readouterr().out.splitlines()
    shape = [re.sub(r"[-\d.e][-\d.,e]*(?=s?,|$)", "#", line.strip()) for line in lines]
    epoch = ["train_loss_epoch: #", "eval_loss_epoch: #", "time: #s, samples/s: #, lr: #"]
    assert lines[0] == "Starting training run"
    assert lines[1] == "Starting epoch 1/2"
    assert shape[2:5] == epoch
    assert lines[5] == "Starting epoch 2/2"
    assert shape[6:9] == epoch
    assert [line.split()[0] for line in lines[9:]] == ["Trained", "Best:"]


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


def default_callbacks() -> Any:
    """Train with the default callbacks; the test checks the output of the launch."""
    with shared_folder() as folder:
        model = float64_model()
        best = SaveBestModelCallback(folder / "best.pt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        others = [ProgressTableCallback(show_always=True), best, EarlyStoppingCallback(2, 0.0)]
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[*get_default_callbacks(), *others])
        trainer.train(float64_data(20), 3, float64_data(9), per_device_batch_size=2)
        return {"weights": weights(model), "best": best.best_metric, "history": trainer.run_history.to_dict()}


@two_are_enough
def test_only_the_first_process_prints(ranks):
    results = ranks(default_callbacks)
    assert len(results) == ranks.world_size
    assert results.output.count("Starting training run") == 1
    assert results.output.count("Loading the best model") == 1
    assert len(re.findall(r"^1/3 .*s$", results.output, re.MULTILINE)) == 1
    assert results.output.count("Best: epoch") == 2  # in lines, and of a table
    assert len({result["best"] for result in results}) == 1
    assert all(equal_weights(result["weights"], results[0]["weights"]) for result in results)
