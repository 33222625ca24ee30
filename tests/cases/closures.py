"""Updates that compute their gradients again: LBFGS, which does so by default, and SAM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import shared_folder, world_size
from tests.cases.sharded import sharding_accelerator
from tests.cases.training import Contrastive, both_ways
from tests.launching import some_of
from tests.tasks import regression_data, small_model, weights

DATA = regression_data(26)


class SAM(Trainer):
    """Updates by the gradients at the worst point nearby (Foret et al., arXiv:2010.01412)."""

    def optimizer_step(self) -> None:
        ascend(list(self.model.parameters()), self.recompute_gradients)
        super().optimizer_step()


class ContrastiveSAM(Contrastive, SAM):
    """With a loss over the samples of all processes."""


def ascend(parameters: list[nn.Parameter], recompute: Callable[[], Any]) -> None:
    """Recompute the gradients where the loss is greater."""
    gradients = [p.grad for p in parameters]
    step = torch._foreach_mul(gradients, 0.05 / torch.nn.utils.get_total_norm(gradients))
    with torch.no_grad():
        torch._foreach_add_(parameters, step)
    recompute()
    with torch.no_grad():
        torch._foreach_sub_(parameters, step)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


SCHEMES: dict[str, tuple[type[Trainer], Any, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "lbfgs": (Trainer, nn.MSELoss(), lbfgs),
    "sam": (SAM, nn.MSELoss(), sgd),
    "contrastive": (ContrastiveSAM, both_ways, sgd),
}


def train_by(scheme: str, folder: Path | None = None, **kwargs: Any) -> Trainer:
    """Train with windows of two batches, the last of which are smaller."""
    model = small_model()
    states = SaveTrainingStateCallback(folder or "unused", save_every_n_steps=1, max_checkpoints=None)
    trainer_class, loss_func, make = SCHEMES[scheme]
    callbacks = [] if folder is None else [states]
    trainer = trainer_class(model, loss_func, make(model), callbacks=callbacks, seed=0)
    trainer.train(DATA, 2, per_device_batch_size=4 // world_size(), gradient_accumulation_steps=2, **kwargs)
    return trainer


def trained_and_resumed() -> dict[str, Any]:
    """Return, for each scheme, weights after a run and after those that resumed some of its states; losses, too."""
    found = {}
    for scheme in SCHEMES:
        with shared_folder() as folder:
            trainer = train_by(scheme, folder / "whole")
            states = some_of(state for state in sorted((folder / "whole").iterdir()) if state.is_dir())
            again = [train_by(scheme, folder / "again", resume_from=state) for state in states]
            found[scheme] = {
                "whole": weights(trainer.get_model()),
                "losses": trainer.run_history.get_metric_values("train_loss_epoch"),
                "resumed": [weights(other.get_model()) for other in again],
            }
    return found


def sharded() -> str:
    """Return what is said of LBFGS with a model that Accelerate shards."""
    trainer = Trainer(model := small_model(), nn.MSELoss(), lbfgs(model), (), accelerator=sharding_accelerator())
    with pytest.raises(ValueError, match="LBFGS") as caught:
        trainer.train(DATA, 1)
    return str(caught.value)
