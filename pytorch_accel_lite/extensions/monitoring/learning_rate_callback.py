"""Learning rates, by parameter group."""

from __future__ import annotations

import torch

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import group_names, is_created
from pytorch_accel_lite.extension_tools.plain_types import StateDict


class LearningRateMonitorCallback(TrainerCallback):
    """Record the learning rate of each parameter group at the last update of an epoch.

    The metric is named ``lr``; ``lr_0``, ``lr_1`` ... if there are several groups; ``lr_<name>`` if there are several
    optimizers. Groups of optimizers that choose their rate themselves, such as Adafactor, have no such metric.
    """

    affects_training = False

    def __init__(self) -> None:
        self._latest: dict[str, float | torch.Tensor] = {}

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if request.kind == "training":
            is_known = is_created(trainer.optimizer)  # otherwise, the number of groups is not known yet
            request.metrics.record(self, _rate_names(trainer) if is_known else (), and_others=not is_known)

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        groups = zip(_rate_names(trainer), trainer.optimizer.param_groups, strict=True)
        rates = {name: group["lr"] for name, group in groups if group.get("lr") is not None}
        # A schedule sets the next rate in the same tensor.
        self._latest = {name: rate.clone() if isinstance(rate, torch.Tensor) else rate for name, rate in rates.items()}
        trainer.step_metrics.update(self._latest)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        for name, value in self._latest.items():
            trainer.run_history.update_metric(name, float(value))

    def state_dict(self) -> StateDict:
        """Return the learning rates of the latest update."""
        return {"latest": {name: float(value) for name, value in self._latest.items()}}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self._latest = dict(state["latest"])


def _rate_names(trainer: TrainerLike) -> list[str]:
    return [f"lr_{name}" if name else "lr" for name in group_names(trainer.optimizer)]
