"""Checks of subclasses of the trainer: overrides that are never called, and names that are already taken."""

from __future__ import annotations

import warnings

from pytorch_accel_lite.base.inspection import is_ours
from pytorch_accel_lite.base.unknown_arguments import Refusal

#: Methods of pytorch-accelerated that are not called here, with the methods that replace them and advice.
REPLACED: dict[str, tuple[tuple[str, ...], str]] = {
    "_clip_gradients": (("clip_gradients",), "Override clip_gradients(), which is called once per update."),
    "_prepare_model_optimizer_and_dataloaders": (
        (),
        "Configure Accelerate with Trainer(accelerator=Accelerator(...)), build loaders in create_train_dataloader() "
        "and create_eval_dataloader(), and prepare anything else in training_run_start().",
    ),
    "_perform_forward_and_backward_passes": (
        ("calculate_train_batch_loss", "backward_step"),
        "Override calculate_train_batch_loss(batch) or backward_step(loss).",
    ),
    "_run_evaluation": (
        ("evaluation_run_start", "evaluation_run_end", "evaluate"),
        "Override evaluation_run_start() and evaluation_run_end(), or evaluate().",
    ),
    "_update_loss_tracker": (
        ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
        "Override calculate_train_batch_loss() and calculate_eval_batch_loss(), whose 'loss' and 'batch_size' are "
        "tracked.",
    ),
    "_add_epoch_loss_to_run_history": (
        ("train_epoch_end", "eval_epoch_end"),
        "Record your own metrics with run_history.update_metric() in train_epoch_end() and eval_epoch_end().",
    ),
    "_check_eval_batch_size": ((), "Remove it: every sample is evaluated exactly once, whatever the batch size."),
}
#: Internal methods that no subclass should override.
_INTERNAL = ("_check_data", "_check_scheduler")


def check_subclass(cls: type, trainer_class: type) -> None:
    """Warn of overrides that are never called when a subclass of the trainer is defined.

    :raises TypeError: if it redefines a name on which the trainer relies
    """
    own = [c for c in cls.__mro__ if c is not object and (c is cls or not issubclass(c, trainer_class))]
    defined = {name: held for c in reversed(own) for name, held in vars(c).items()}
    for name in defined.keys() & REPLACED.keys():
        methods, advice = REPLACED[name]
        if not defined.keys() & set(methods):
            text = f"{cls.__name__}.{name} is never called: pytorch_accel_lite has no such method. {advice}"
            warnings.warn(text, stacklevel=3)
    if is_ours(cls):
        return
    for name, held in defined.items():
        refusal = getattr(vars(trainer_class).get(name), "fset", None)
        if name in _INTERNAL:
            refusal = Refusal(name, "")
        if isinstance(refusal, Refusal) and not isinstance(held, property):
            raise TypeError(refusal.message(cls))
