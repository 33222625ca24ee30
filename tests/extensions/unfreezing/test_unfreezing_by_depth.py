"""Transformers are unfrozen block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import GradualUnfreezingCallback, SaveTrainingStateCallback
from tests.adapters import bert, rows
from tests.extensions.finetuning.groups_of_layers import in_groups
from tests.launching import only_with_soak
from tests.small_models import adamw_trainer, equal_weights, largest_difference, listener, weights

pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_transformer_is_unfrozen_block_by_block(capsys):
    model = bert()
    log: list[set[str]] = []
    note = listener(
        on_train_epoch_start=lambda t: log.append({n for n, p in model.named_parameters() if p.requires_grad})
    )
    trainer = adamw_trainer(model, callbacks=[GradualUnfreezingCallback, note])
    trainer.loss_func = None
    trainer.train(rows(), 5)
    groups = in_groups(model)
    expected = [set().union(*groups[first:]) for first in (3, 2, 1, 0, 0)]
    assert log == expected
    assert "GradualUnfreezingCallback" not in capsys.readouterr().out
    trainer.train(rows(), 2)
    assert "unfreezes 2 of 4 layer groups in 2 epochs, and the others stay frozen" in capsys.readouterr().out


def unfreezing(folder: Path | None = None, resume_from: Path | None = None) -> Any:
    """Weights and their average after unfreezing all groups, one more in each epoch, and the learning rates."""
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    model = bert(dropout=0)
    ema = ModelEmaCallback(decay=0.5, evaluate_during_training=False, save_path=None)
    saving = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_epochs=1)]
    optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=0.01)
    trainer = Trainer(model, None, optimizer, [GradualUnfreezingCallback(lr_decay=0.5), ema, *saving], seed=3)
    trainer.train(
        rows(),
        4,
        per_device_batch_size=4 // trainer.ranks.world_size,
        train_dataloader_kwargs={"shuffle": False},
        resume_from=resume_from,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    return weights(trainer.get_model()), weights(ema.ema.module), rates


@pytest.mark.thorough
@pytest.mark.extension("model_ema")
@pytest.mark.slow
def test_unfreezing_by_depth_resumes_to_the_same_bits(tmp_path):
    whole = unfreezing(tmp_path / "whole")
    assert whole[2] == pytest.approx([0.01, 0.005, 0.0025, 0.00125])
    state = sorted((tmp_path / "whole").glob("update-*"))[1]
    resumed = unfreezing(tmp_path / "again", state)
    assert all(equal_weights(found, expected) for found, expected in zip(resumed[:2], whole[:2], strict=True))


@only_with_soak
@pytest.mark.extension("model_ema")
def test_several_processes_unfreeze_by_depth_as_one(two_ranks):
    alone = unfreezing()
    results = two_ranks(unfreezing)
    for result in results:
        for found, first, expected in zip(result[:2], results[0][:2], alone[:2], strict=False):
            assert equal_weights(found, first)
            assert largest_difference(found, expected) < 1e-5
