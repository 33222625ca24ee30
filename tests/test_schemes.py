"""Schemes of training that the documentation describes: as by hand, and resumed to the same bits.

GANs are in test_own_steps.py, LBFGS and SAM in test_closures.py, truncated backpropagation in test_carried_state.py,
streams in test_stateful_sources.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests import cases
from tests.cases.preferences import PAIRS, by_hand, make, train
from tests.tasks import equal, largest_difference, listener, regression_data, small_model, weights


def test_preferences_are_learned_with_the_bits_of_the_loop_by_hand():
    trainer = train(seed=None)
    assert equal(weights(trainer.model), by_hand())
    accuracies = trainer.run_history.get_metric_values("eval_accuracy_epoch")
    assert min(accuracies) > 0.7


def test_the_reference_stays_as_it_was_and_gets_no_gradients():
    trainer = train()
    assert equal(weights(trainer.reference), weights(make(0)[0]))
    assert all(parameter.grad is None for parameter in trainer.reference.parameters())
    with torch.no_grad():
        assert trainer.evaluate(PAIRS)["evaluation_accuracy"] > 0.5


def test_preferences_are_learned_on_processes_as_on_one_and_resumed_to_the_same_bits(two_ranks):
    alone = cases.preferences.trained_and_resumed()
    for found in (alone, *two_ranks(cases.preferences.trained_and_resumed)):
        assert largest_difference(found["plain"], alone["plain"]) < 1e-12
        assert found["accuracies"] == alone["accuracies"]
        assert len(found["resumed"]) == 3
        for state, history in found["resumed"]:
            assert equal(state, found["whole"])
            assert history == found["history"]


DATA = regression_data(20)
FOLDS = [[*range(7)], [*range(7, 14)], [*range(14, 20)]]


def train_fold(folder: Path, fold: int, fails_at: int | None = None) -> tuple[dict[str, torch.Tensor], float]:
    """Train on the other folds; return the weights and the loss on this one."""

    def fail(trainer: Trainer) -> None:
        if trainer.progress.update == fails_at:
            raise OSError("the disk is gone")

    model = small_model()
    saving = SaveTrainingStateCallback(folder / str(fold), save_every_n_steps=2)
    callbacks = [saving, listener(on_train_step_start=fail)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=0)
    rest = [row for other in FOLDS if other is not FOLDS[fold] for row in other]
    trainer.train(Subset(DATA, rest), 2, per_device_batch_size=4, resume_from="latest")
    return weights(model), trainer.evaluate(Subset(DATA, FOLDS[fold]))["evaluation_loss"]


def test_an_interrupted_cross_validation_ends_in_the_same_bits_and_folds_are_independent(tmp_path):
    whole = [train_fold(tmp_path / "whole", fold) for fold in range(3)]
    train_fold(tmp_path / "again", 0)
    with pytest.raises(OSError, match="the disk is gone"):
        train_fold(tmp_path / "again", 1, fails_at=5)
    again = [train_fold(tmp_path / "again", fold) for fold in range(3)]
    alone = train_fold(tmp_path / "alone", 2)
    for found, expected in zip([*again, alone], [*whole, whole[2]], strict=True):
        assert equal(found[0], expected[0])
        assert found[1] == expected[1]
