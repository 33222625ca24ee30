"""Schemes of training that the documentation describes: as by hand, and resumed to the same bits.

GANs are in test_manual_steps.py, LBFGS and SAM in test_closures.py, truncated backpropagation in test_carried_state.py,
streams in test_stateful_sources.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, Subset, TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import MoveModulesToDeviceCallback, SaveTrainingStateCallback
from tests.ranks import IN_ORDER, shared_folder, world_size
from tests.small_models import equal_weights, float64_data, float64_model, largest_difference, raises_at, weights

BETA = 0.5


def _pairs() -> TensorDataset:
    return TensorDataset(*torch.randint(6, (2, 14, 5), generator=torch.Generator().manual_seed(2)))


PAIRS = _pairs()


class LanguageModel(nn.Module):
    """Returns the log-probability of each row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        log_probs = self.head(self.dropout(self.embedding(tokens[:, :-1]))).log_softmax(2)
        return log_probs.gather(2, tokens[:, 1:, None]).sum((1, 2))


class DPO(Trainer):
    def __init__(self, model: nn.Module, optimizer: Any, **kwargs: Any) -> None:
        super().__init__(model, None, optimizer, **kwargs)
        self.reference = copy.deepcopy(model).eval().requires_grad_(False)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        chosen, rejected = batch
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            expected = self.reference(both)
        of_chosen, of_rejected = (BETA * (self.model(both) - expected)).chunk(2)
        self.log("accuracy", (of_chosen > of_rejected).double())
        return {"loss": -logsigmoid(of_chosen - of_rejected).mean()}

    calculate_eval_batch_loss = calculate_train_batch_loss


def make(dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = LanguageModel().double()
    model.dropout.p = dropout
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(folder: Path | None = None, dropout: float = 0.2, seed: int | None = 0, **kwargs: Any) -> DPO:
    """Train for two epochs."""
    callbacks: list[Any] = [MoveModulesToDeviceCallback()]
    if folder is not None:
        callbacks.append(SaveTrainingStateCallback(folder, save_every_n_steps=3, max_checkpoints=None))
    trainer = DPO(*make(dropout), callbacks=callbacks, seed=seed)
    arguments = {"per_device_batch_size": 4 // world_size(), "train_dataloader_kwargs": IN_ORDER} | kwargs
    trainer.train(PAIRS, 2, PAIRS, **arguments)
    return trainer


def by_hand() -> dict[str, torch.Tensor]:
    """The hand-written loop."""
    model, optimizer = make(0.2)
    reference = copy.deepcopy(model).eval()

    def loss_of(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            expected = reference(both)
        of_chosen, of_rejected = (BETA * (model(both) - expected)).chunk(2)
        return -logsigmoid(of_chosen - of_rejected).mean()

    for _ in range(2):
        model.train()
        for pairs in DataLoader(PAIRS, 4):
            loss_of(*pairs).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for pairs in DataLoader(PAIRS, 4):
                loss_of(*pairs)
    return weights(model)


def test_preferences_are_learned_with_the_bits_of_a_loop():
    trainer = train(seed=None)
    assert equal_weights(weights(trainer.model), by_hand())
    accuracies = trainer.run_history.get_metric_values("eval_accuracy_epoch")
    assert min(accuracies) > 0.7


def test_the_reference_model_is_unchanged_without_gradients():
    trainer = train()
    assert equal_weights(weights(trainer.reference), weights(make(0)[0]))
    assert all(parameter.grad is None for parameter in trainer.reference.parameters())
    with torch.no_grad():
        assert trainer.evaluate(PAIRS)["evaluation_accuracy"] > 0.5


def trained_and_resumed() -> dict[str, Any]:
    """Weights and metrics of a run without dropout, and of one with it; those that resumed states of the latter."""
    plain = train(dropout=0)
    with shared_folder() as folder:
        whole = train(folder / "whole")
        states = sorted(state for state in (folder / "whole").iterdir() if state.is_dir())
        resumed = [train(folder / "again", resume_from=state) for state in states]
    return {
        "plain": weights(plain.get_model()),
        "accuracies": plain.run_history.get_metric_values("eval_accuracy_epoch"),
        "whole": weights(whole.get_model()),
        "history": whole.run_history.to_dict(),
        "resumed": [(weights(other.get_model()), other.run_history.to_dict()) for other in resumed],
    }


@pytest.mark.thorough
def test_preferences_learned_on_processes_resume_the_same_bits(two_ranks):
    alone = trained_and_resumed()
    for found in (alone, *two_ranks(trained_and_resumed)):
        assert largest_difference(found["plain"], alone["plain"]) < 1e-12
        assert found["accuracies"] == alone["accuracies"]
        assert len(found["resumed"]) == 3
        for state, history in found["resumed"]:
            assert equal_weights(state, found["whole"])
            assert history == found["history"]


DATA = float64_data(20)
FOLDS = [[*range(7)], [*range(7, 14)], [*range(14, 20)]]


def train_fold(folder: Path, fold: int, fails_at: int | None = None) -> tuple[dict[str, torch.Tensor], float]:
    """Train on the other folds; return the weights and the loss on this one."""

    model = float64_model()
    saving = SaveTrainingStateCallback(folder / str(fold), save_every_n_steps=2)
    callbacks = [saving, raises_at(fails_at, OSError("the disk is gone"), "on_train_step_start")]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=0)
    rest = [row for other in FOLDS if other is not FOLDS[fold] for row in other]
    trainer.train(Subset(DATA, rest), 2, per_device_batch_size=4, resume_from="latest")
    return weights(model), trainer.evaluate(Subset(DATA, FOLDS[fold]))["evaluation_loss"]


def test_an_interrupted_cross_validation_ends_in_the_same_bits(tmp_path):
    whole = [train_fold(tmp_path / "whole", fold) for fold in range(3)]
    train_fold(tmp_path / "again", 0)
    with pytest.raises(OSError, match="the disk is gone"):
        train_fold(tmp_path / "again", 1, fails_at=5)
    again = [train_fold(tmp_path / "again", fold) for fold in range(3)]
    alone = train_fold(tmp_path / "alone", 2)
    for found, expected in zip([*again, alone], [*whole, whole[2]], strict=True):
        assert equal_weights(found[0], expected[0])
        assert found[1] == expected[1]
