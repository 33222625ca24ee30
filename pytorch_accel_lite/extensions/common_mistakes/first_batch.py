"""Warnings about the loss of the first batch: sums, unused targets, and evaluations without a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extending import BatchOutput, LossFunction, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_from_this_package, warn_outside
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import events_between, keywords_of
from pytorch_accel_lite.extension_tools.plain_types import Tree

_NONE, _SUM = 0, 2  # torch's numbers of reductions
# Operations of autograd that act on the loss of each sample separately.
_OF_EACH = {"PowBackward0", "AbsBackward0", "LogBackward0", "ExpBackward0", "SumBackward1"}


def warn_of_loss(trainer: TrainerLike, batch: Batch, output: BatchOutput) -> None:
    """Warn if the loss of the first batch is a sum, or seems to be computed with something other than the target.

    Also warn if evaluations, which come only after an epoch, seem to have no loss.
    """
    loss, size = output["loss"], output["batch_size"]
    _warn_of_missing_evaluation_loss(trainer, output)
    if "num_items" in output and "num_items_in_batch" not in output:  # that is the argument of update()
        warn_outside(
            "calculate_train_batch_loss returned num_items, which weighs nothing. Return it as num_items_in_batch, "
            "unless only your callbacks read it."
        )
    uses_loss_func = trainer.current_run.overridden.isdisjoint({"calculate_train_batch_loss", "train_step"})
    if uses_loss_func and _has_sum(trainer.loss_func):
        _warn_of_sum("loss_func has reduction='sum'")
    elif isinstance(size, int) and _adds_up_samples(loss, size):
        _warn_of_sum("The loss adds up the samples of a batch")
    if uses_loss_func and type(batch.data) in (tuple, list) and len(batch.data) == 3 and trainer.loss_func is not None:
        has_listeners = any(
            not is_from_this_package(type(getattr(listener, "__self__", None)))
            for event in events_between("on_train_epoch_start", "on_eval_epoch_end")
            if "batch" in keywords_of(event)
            for listener in trainer.callback_handler.listeners[event]
        )
        if not has_listeners and _third_is_target(batch.data[1], batch.data[2], output.get("model_outputs")):
            warn_outside(
                "loss_func is called with the second of the three elements of a batch, but the third looks like the "
                "target; it is not used. Let the dataset return (inputs, targets), or a dict if the model takes "
                "several inputs, or override calculate_train_batch_loss and calculate_eval_batch_loss."
            )


def _warn_of_missing_evaluation_loss(trainer: TrainerLike, output: BatchOutput) -> None:
    overridden = trainer.current_run.overridden
    has_training_loss_only = (
        trainer.loss_func is None
        and "calculate_train_batch_loss" in overridden
        and "calculate_eval_batch_loss" not in overridden
        and isinstance(output.get("model_outputs"), torch.Tensor)  # the model itself seems to return no loss
    )
    if has_training_loss_only and trainer.current_run.data.all_eval_loaders:
        warn_outside(
            "The evaluation has no loss: calculate_train_batch_loss is overridden, calculate_eval_batch_loss is not, "
            "and loss_func is None. Override it, too, or pass a loss_func, unless the model itself returns its loss."
        )


def _adds_up_samples(loss: torch.Tensor, size: int) -> bool:
    """Whether a loss certainly is a sum over the samples of a batch, judging by its last operations.

    A sum with a multiplication or division before or after it may be a mean, and does not count.
    """
    last: Any = loss.grad_fn
    if getattr(last, "_saved_reduction", None) == _SUM:  # the last operation is one of torch's losses
        return True
    sizes = tuple(getattr(last, "_saved_self_sym_sizes", ()))
    if size < 2 or sizes[:1] != (size,) or last.name() not in ("SumBackward0", "SumBackward1"):
        return False
    sources = [source for source, _ in last.next_functions]
    return all(s.name() in _OF_EACH or getattr(s, "_saved_reduction", None) == _NONE for s in sources)


def _third_is_target(second: Tree, third: Tree, outputs: Tree) -> bool:
    """Whether the third element of a batch is certainly a target, rather than an index, a group or a weight.

    It must have the shape of the outputs. In addition, either the second element has another shape, or the third has
    negative values, unlike weights and masks.
    """
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (second, third, outputs)):
        return False
    if third.shape != outputs.shape:
        return False
    return second.shape != outputs.shape or bool((third < 0).any())


def _has_sum(loss_func: LossFunction | None) -> bool:
    reduction = loss_func.keywords.get("reduction") if isinstance(loss_func, partial) else None
    return bool((reduction or getattr(loss_func, "reduction", None)) == "sum")


def _warn_of_sum(reason: str) -> None:
    warn_outside(
        f"{reason}, but the trainer takes a loss for a mean: recorded losses depend on the batch size, and with "
        "gradient accumulation or several processes the gradients are not those of the sum. Divide it by the number "
        "of samples, and multiply the learning rate by the batch size; see 'Your loss is a sum' in the "
        "documentation, under 'Coming from your own loop'."
    )
