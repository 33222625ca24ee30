"""The total norm of the gradients, and how often they are clipped."""

from __future__ import annotations

import math

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_overridden
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import is_created, parts_of_optimizer, total_norm
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extensions.monitoring.gradient_norms import GradientNorms


class GradientNormCallback(TrainerCallback):
    """Record the total norm of the gradients, before they are clipped.

    Recorded per epoch: the mean over all updates as ``gradient_norm_mean``, the maximum as ``gradient_norm_max`` and,
    if the run clips by norm, the fraction of clipped updates as ``clipped_updates``. An overridden ``train_step``
    updates several optimizers one by one: each has its own ``gradient_norm_<name>_mean``, ``gradient_norm_<name>_max``
    and ``clipped_updates_<name>``. Optimizers that step together are clipped together, so they have one norm. Left out
    are updates whose gradients overflow under a gradient scaler (fp16), which skips them.
    """

    affects_training = False

    def __init__(self) -> None:
        #: The norms by name of the optimizer; "" for a single optimizer, or for several that step together.
        self._norms: dict[str, GradientNorms] = {}

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if request.kind != "training":
            return
        is_known = is_created(trainer.optimizer) or not is_overridden(trainer, "train_step")
        names = (list(parts_of_optimizer(trainer.optimizer)) if is_overridden(trainer, "train_step") else []) or [""]
        recorded = [f"{_join('gradient_norm', name)}_{kind}" for name in names for kind in ("mean", "max")]
        if request.gradient_clip_norm is not None:
            recorded += [_join("clipped_updates", name) for name in names]
        request.metrics.record(self, recorded if is_known else (), and_others=not is_known)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._norms = {}

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        limit = trainer.run_config.gradient_clip_norm if trainer.run_config is not None else None
        name = trainer.run.training_step.updating if parts_of_optimizer(trainer.optimizer) else ""
        norms = self._norms.setdefault(name, GradientNorms())
        norm = norms.add(total_norm(trainer), limit, only_finite=trainer.accelerator.scaler is not None)
        trainer.step_metrics[_join("gradient_norm", name)] = norm

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        for name, norms in self._norms.items():
            metric, count = _join("gradient_norm", name), int(norms.count)
            trainer.run_history.update_metric(f"{metric}_mean", float(norms.sum) / count if count else math.nan)
            trainer.run_history.update_metric(f"{metric}_max", float(norms.max) if count else math.nan)
            if norms.clipped is not None:
                clipped = float(norms.clipped) / count if count else math.nan
                trainer.run_history.update_metric(_join("clipped_updates", name), clipped)

    def state_dict(self) -> StateDict:
        """Return the sums of the epoch so far, by optimizer."""
        return {name: vars(norms).copy() for name, norms in self._norms.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        by_name = state if all(isinstance(sums, dict) for sums in state.values()) else {"": state}  # of version 0.1
        self._norms = {name: GradientNorms(**sums) for name, sums in by_name.items()}


def _join(metric: str, part: str) -> str:
    """Return the name of a metric for an optimizer, whose own name may be empty."""
    return f"{metric}_{part}" if part else metric
