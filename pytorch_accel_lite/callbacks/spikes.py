"""Protecting the weights from single updates with unusually large gradients."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from pytorch_accel_lite.base.devices import accumulation_dtype, to_float
from pytorch_accel_lite.base.events import StopTrainingError, TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.validation import check_choice, check_positive_int, check_range
from pytorch_accel_lite.optimizers.gradients import total_norm
from pytorch_accel_lite.optimizers.operations import optimized_parameters


class GradientSpikeCallback(TrainerCallback):
    """Skip updates whose gradients are unusually large, or scale their gradients down.

    The usual norm is an exponential moving average of the total gradient norm (before any clipping by norm) over the
    updates that were not spikes. In an overridden ``train_step``, each optimizer has its own.

    :param factor: a norm larger than ``factor`` times the usual norm is a spike
    :param action: ``"skip"`` leaves the weights, the optimizer and the scheduler unchanged, and also skips infinite and
        NaN gradients; it reads one number from the device per update. ``"clip"`` scales the gradients to ``factor``
        times the usual norm, and reads nothing.
    :param warm_up_updates: number of updates at the start of a run during which nothing counts as a spike
    :param decay: decay of the average per update, between 0 and 1
    :param max_skips_in_a_row: number of consecutive spikes after which training counts as diverged and is stopped
    :ivar skipped: numbers of the skipped updates, counted from 1
    """

    def __init__(
        self,
        factor: float = 10.0,
        action: Literal["skip", "clip"] = "skip",
        warm_up_updates: int = 50,
        decay: float = 0.98,
        max_skips_in_a_row: int = 10,
    ) -> None:
        check_range("factor", factor, above=1)
        if not 0 < check_range("decay", decay) < 1:
            raise ValueError(f"decay={decay!r} must be greater than 0 and less than 1.")
        self.factor = factor
        self.action = check_choice("action", action, ("skip", "clip"))
        self.warm_up_updates = check_positive_int("warm_up_updates", warm_up_updates)
        self.decay = decay
        self.max_skips_in_a_row = check_positive_int("max_skips_in_a_row", max_skips_in_a_row)
        self._clear()

    def _clear(self) -> None:
        self.skipped: list[int] = []
        self._in_a_row = 0
        self._counts: dict[str, int] = {}  # by optimizer name, which is "" for the only one
        self._averages: dict[str, Any] = {}  # tensors on the device when action="clip"
        self._name = ""

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._clear()

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        step = trainer.current_run.step
        self._name = step.updating
        updated = step.optimizers.get(step.updating, trainer.optimizer)
        gradients = [p.grad for p in optimized_parameters(updated) if p.grad is not None]
        norm = total_norm(trainer).detach()
        if self.action == "clip":
            self._clip(trainer, gradients, norm)
        else:
            self._skip(trainer, to_float(norm))

    def _skip(self, trainer: TrainerLike, norm: float) -> None:
        usual = self._usual()
        if math.isfinite(norm) and not (self._is_known(trainer) and norm > self.factor * usual):
            self._in_a_row = 0
            self._add(norm)
            return
        trainer.skip_update()
        self._in_a_row += 1
        self.skipped.append(trainer.progress.update + 1)
        of = f" of {self._name!r}" if self._name else ""
        trainer.print(f"Update {self.skipped[-1]}{of} skipped: the gradient norm is {norm:.3g}, usually {usual:.3g}.")
        if self._in_a_row >= self.max_skips_in_a_row:
            raise StopTrainingError(
                f"The gradients of {self._in_a_row} updates in a row were more than {self.factor:g} times as large "
                "as usual, or not finite. Lower the learning rate, or raise factor."
            )

    def _clip(self, trainer: TrainerLike, gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Clip and average without reading any number from the device."""
        largest: Any = math.inf
        average = self._averages.get(self._name)
        if isinstance(average, float):  # of a resumed run: dividing a number by a norm is less precise
            self._averages[self._name] = torch.full_like(norm, average, dtype=accumulation_dtype(norm.device))
        if self._is_known(trainer):
            largest = self.factor * self._usual()
            now = torch.nn.utils.get_total_norm(gradients)  # they may have been clipped
            torch._foreach_mul_(gradients, (largest / now).clamp(max=1.0).to(gradients[0].dtype))
        norm = norm.to(accumulation_dtype(norm.device))
        self._add(torch.where(torch.isfinite(norm) & (norm <= largest), norm, self._usual()))

    def _is_known(self, trainer: TrainerLike) -> bool:
        """Whether there is a usual norm; an optimizer may make its first update after the warm-up."""
        return trainer.progress.update >= self.warm_up_updates and self._name in self._counts

    def _usual(self) -> Any:
        """Return the average, bias-corrected as in Adam."""
        count = self._counts.get(self._name, 0)
        return self._averages[self._name] / (1 - self.decay**count) if count else 0.0

    def _add(self, norm: Any) -> None:
        average = self._averages.get(self._name, 0.0)
        self._counts[self._name] = self._counts.get(self._name, 0) + 1
        self._averages[self._name] = average + (norm - average) * (1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the skipped updates."""
        return {
            "count": dict(self._counts),
            "average": {name: float(average) for name, average in self._averages.items()},
            "in_a_row": self._in_a_row,
            "skipped": list(self.skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`."""
        self._counts = dict(state["count"])
        self._averages = dict(state["average"])
        self._in_a_row = state["in_a_row"]
        self.skipped = list(state["skipped"])
