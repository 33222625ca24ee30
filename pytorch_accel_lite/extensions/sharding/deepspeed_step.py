"""Training with DeepSpeed: its settings, and checks for what it cannot do, as the backward pass makes its updates."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate import Accelerator
from accelerate.utils import DistributedType

from pytorch_accel_lite.extending import PlainStep, Run, TrainerLike
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import parts_of_optimizer

_INSTEAD = "Use fully_shard instead, with which this works"


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Whether Accelerate trains with DeepSpeed."""
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def configure_deepspeed(trainer: TrainerLike, run: Run) -> None:
    """Make DeepSpeed clip gradients as ``train()`` requests, and weight them as the trainer does.

    By default, Accelerate limits the gradient norm to 1, and divides each loss by the number of accumulated batches,
    although the trainer has done that already.

    Raises:
        ValueError: if the run needs something that cannot be done within the backward pass
    """
    limit = run.request.gradient_clip_norm or 0.0
    if problem := _unsupported(trainer, run):
        raise ValueError(f"{problem}: DeepSpeed updates the weights within the backward pass. {_INSTEAD}.")
    prepared = trainer.prepared_model
    if prepared is not None and prepared.outlives_runs:
        before = float(trainer.model.gradient_clipping())  # type: ignore[operator]
        if before != limit:
            raise ValueError(
                f"gradient_clip_norm={run.request.gradient_clip_norm}, but DeepSpeed has prepared the model with "
                f"{before:g}, which stays. Train with one limit, and before you evaluate; or create a new trainer."
            )
        return
    plugin = trainer.accelerator.state.deepspeed_plugin
    assert plugin is not None
    config = plugin.deepspeed_config
    config["gradient_clipping"] = float(limit)
    config["gradient_accumulation_steps"] = 1
    if config.get("train_micro_batch_size_per_gpu", "auto") == "auto":
        config["train_micro_batch_size_per_gpu"] = run.data.train_arguments.size


def _unsupported(trainer: TrainerLike, run: Run) -> str:
    """Return what the run cannot do with DeepSpeed; an empty text if there is nothing."""
    request, loader = run.request, run.data.required_train_loader
    steps = request.gradient_accumulation_steps
    if request.gradient_clip_value is not None:
        return f"gradient_clip_value={request.gradient_clip_value} cannot be applied"
    if trainer.accelerator.mixed_precision == "fp16":
        return "mixed_precision='fp16' has not been tried"
    if parts_of_optimizer(trainer.optimizer):
        return "Several optimizers cannot be used"
    if isinstance(steps, Mapping):
        return f"gradient_accumulation_steps={steps} cannot change"
    size, samples = loader.total_batch_size, loader.num_samples_read
    if steps == 1 or (size and samples and samples % (size * steps) == 0):
        return ""
    epoch = "one of unknown length" if samples is None else f"one of {samples} samples"
    return (
        f"gradient_accumulation_steps={steps} needs epochs of whole windows (a multiple of {steps} times {size} "
        f"samples), not {epoch}, as the gradients of a smaller last window cannot be corrected"
    )


class DeepSpeedStep(PlainStep):
    """Counts the updates that DeepSpeed makes in the backward pass."""

    def apply_update(self, trainer: TrainerLike, run: Run) -> None:
        """Count an update.

        Raises:
            RuntimeError: if its gradients had wrong weights
        """
        _check_whole_window(run)
        super().apply_update(trainer, run)


def _check_whole_window(run: Run) -> None:
    """Check that the gradients of an update had the right weights, because DeepSpeed cannot correct them afterwards.

    Raises:
        RuntimeError: if the window was not as large as its nominal size
    """
    window = run.window
    if window.items_per_batch is not None or float(window.true_size) not in (0, window.nominal_size):
        raise RuntimeError(
            "This update was made with wrong weights of its batches: they are of other sizes, or the step returns "
            "num_items_in_batch. The trainer corrects this before an update, but DeepSpeed makes it within the "
            f"backward pass. {_INSTEAD}, or train on whole batches without num_items_in_batch."
        )
