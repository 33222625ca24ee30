"""When an update counts as skipped: by ``skip_update()``, or by the gradient scaler because gradients were infinite.

``progress.update`` counts it all the same, and ``skipped_updates`` of the run's step, too (``Step.count_if_skipped``).
A scheduler that is stepped after updates is not stepped.
"""

from __future__ import annotations

from pytorch_accel_lite.optimizers.optimizer_parts import optimized_parameters
from pytorch_accel_lite.optimizers.optimizer_steps import states_of_scaler
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.steps.clipping import unscale


def skip(trainer: TrainerLike) -> None:
    """Skip the coming update.

    Raises:
        RuntimeError: if no update is about to be made
    """
    step = trainer.current_run.training_step
    if not step.can_skip_update:
        raise RuntimeError(
            "skip_update() skips an update that is about to be made, and there is none here. Call it in a "
            "callback's on_optimizer_step_start, or in an overridden clip_gradients or optimizer_step."
        )
    step.skips_update = True


def was_skipped(trainer: TrainerLike) -> bool:
    """Whether the last update was skipped. A model that no wrapper has prepared has no gradient scaler."""
    prepared = trainer.prepared_model
    is_plain = prepared is None or prepared.is_plain
    return trainer.current_run.training_step.skips_update or (
        not is_plain and trainer.accelerator.optimizer_step_was_skipped
    )


def step_or_tell_scaler(trainer: TrainerLike) -> None:
    """Step the optimizer with a gradient scaler, or let the scaler see the gradients of an update that is skipped.

    It finds its scale by overflows, and refuses gradients that it has unscaled for an update that was not made.
    """
    step, scaler = trainer.current_run.training_step, trainer.accelerator.scaler
    before = states_of_scaler(scaler)  # which it replaces once an update has been made
    if not step.skips_update:
        trainer.optimizer_step()  # if it is overridden, it may skip the update
    was_told = states_of_scaler(scaler) is not before
    if step.skips_update and not was_told and any(p.grad is not None for p in optimized_parameters(trainer.optimizer)):
        unscale(trainer)
        scaler.update()
