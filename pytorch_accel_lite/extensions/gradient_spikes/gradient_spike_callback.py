"""Comparing the gradient norm of each update with the usual norm, and skipping spikes."""

from __future__ import annotations

import math

from pytorch_accel_lite.extending import StopTrainingError, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_int, check_positive_int, check_range
from pytorch_accel_lite.extension_tools.modules_and_devices import to_float
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import total_norm
from pytorch_accel_lite.extension_tools.plain_types import StateDict


class GradientSpikeCallback(TrainerCallback):
    """Skip updates whose gradients are unusually large, infinite or NaN.

    The weights, the optimizer and the scheduler stay unchanged. The usual norm is an exponential moving average of the
    total gradient norm (before any clipping) over the updates that were not skipped. In an overridden
    ``train_step``, each optimizer has its own, and its own row of spikes. Reads one number from the device per update.

    With a gradient scaler (fp16), infinite gradients are how it finds its scale: it skips these updates anyway, and
    they do not count as spikes. A loss that is itself infinite or NaN ends a run even so, unless you leave out the
    default ``TerminateOnNaNCallback``.

    Args:
        factor: a norm larger than ``factor`` times the usual norm is a spike
        warm_up_updates: number of updates at the start of a run during which only non-finite ones are skipped
        decay: decay of the average per update, between 0 and 1
        max_skips_in_a_row: number of consecutive spikes after which training counts as diverged and is stopped

    Attributes:
        skipped: numbers of the skipped updates, counted from 1
    """

    def __init__(
        self, factor: float = 10.0, *, warm_up_updates: int = 50, decay: float = 0.98, max_skips_in_a_row: int = 10
    ) -> None:
        check_range("factor", factor, above=1)
        if not 0 < check_range("decay", decay) < 1:
            raise ValueError(f"decay={decay!r} must be greater than 0 and less than 1.")
        self.factor = factor
        self.warm_up_updates = check_int("warm_up_updates", warm_up_updates, least=0)
        self.decay = decay
        self.max_skips_in_a_row = check_positive_int("max_skips_in_a_row", max_skips_in_a_row)
        self._clear()

    def _clear(self) -> None:
        self.skipped: list[int] = []
        self._counts: dict[str, int] = {}  # by optimizer name, which is "" for the only one
        self._in_a_row: dict[str, int] = {}
        self._averages: dict[str, float] = {}
        self._stop_reason = ""  # of a stop that waits for the end of the step, after which a state can be saved

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._clear()

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        name = trainer.run.training_step.updating
        norm = to_float(total_norm(trainer).detach())
        count, average = self._counts.get(name, 0), self._averages.get(name, 0.0)
        usual = average / (1 - self.decay**count) if count else 0.0  # bias-corrected as in Adam
        # An optimizer may make its first update after the warm-up.
        is_warm = trainer.progress.update >= self.warm_up_updates and usual > 0
        if math.isfinite(norm) and not (is_warm and norm > self.factor * usual):
            self._in_a_row[name] = 0
            self._counts[name] = count + 1
            self._averages[name] = average + (norm - average) * (1 - self.decay)
            return
        trainer.skip_update()
        if trainer.accelerator.scaler is not None and not math.isfinite(norm):
            return
        in_a_row = self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        self.skipped.append(trainer.progress.update + 1)
        optimizer = f" of {name!r}" if name else ""
        usually = f", usually {usual:.3g}" if count else ""
        trainer.print(f"Update {self.skipped[-1]}{optimizer} skipped: the gradient norm is {norm:.3g}{usually}.")
        if in_a_row >= self.max_skips_in_a_row:
            self._stop_reason = (
                f"The gradients of {in_a_row} updates{optimizer} in a row were more than {self.factor:g} times as "
                "large as usual, or not finite. Lower the learning rate, or raise factor."
            )

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        reason, self._stop_reason = self._stop_reason, ""
        if reason:
            raise StopTrainingError(reason)

    def state_dict(self) -> StateDict:
        """Return the average and the skipped updates."""
        return {
            "count": dict(self._counts),
            "average": dict(self._averages),
            "in_a_row": dict(self._in_a_row),
            "skipped": list(self.skipped),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self._counts = dict(state["count"])
        self._averages = dict(state["average"])
        in_a_row = state["in_a_row"]  # of all optimizers together in states of earlier versions
        self._in_a_row = dict.fromkeys(("", *self._counts), in_a_row) if isinstance(in_a_row, int) else dict(in_a_row)
        self.skipped = list(state["skipped"])
