"""Methods that trainers of other libraries call, and this one does not."""

from __future__ import annotations

from collections.abc import Collection

from pytorch_accel_lite.extending import OTHER_LIBRARIES
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import EVENTS

#: Methods of other libraries' trainers that are never called here, with those to override instead.
_REPLACED = {
    # of pytorch-accelerated
    "_clip_gradients": ("clip_gradients",),
    "_prepare_model_optimizer_and_dataloaders": ("_create_accelerator", "training_run_start"),
    "_perform_forward_and_backward_passes": ("calculate_train_batch_loss", "backward_step"),
    "_run_evaluation": ("evaluation_run_start", "evaluation_run_end", "evaluate"),
    "_update_loss_tracker": ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
    "_add_epoch_loss_to_run_history": ("train_epoch_end", "eval_epoch_end"),
    # of others
    "training_step": ("calculate_train_batch_loss", "train_step"),
    "run_step": ("calculate_train_batch_loss", "train_step"),
    "train_step_single": ("calculate_train_batch_loss", "train_step"),
    "one_batch": ("calculate_train_batch_loss", "train_step"),
    "get_loss": ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
    "eval_forward": ("calculate_eval_batch_loss",),
    "compute_loss": ("calculate_train_batch_loss", "train_step"),
    "validation_step": ("calculate_eval_batch_loss",),
    "test_step": ("calculate_eval_batch_loss",),
    "prediction_step": ("calculate_eval_batch_loss", "calculate_predict_batch_output"),
    "predict_step": ("calculate_predict_batch_output",),
    "get_train_dataloader": ("create_train_dataloader",),
    "get_eval_dataloader": ("create_eval_dataloader",),
    "build_train_loader": ("create_train_dataloader",),
    "build_test_loader": ("create_eval_dataloader",),
    "build_lr_scheduler": ("create_scheduler",),
    "val_dataloader": ("create_eval_dataloader",),
}
_OF_OPTIMIZERS = (
    "Pass the optimizer, or a function that creates it from the parameters, to the trainer, and create_scheduler_fn to "
    "train()."
)
#: Further ones, which have no counterpart to override, with what to do instead.
_GONE = {
    "_check_eval_batch_size": "Remove it: nothing needs it.",
    "configure_optimizers": _OF_OPTIMIZERS,
    "build_optimizer": _OF_OPTIMIZERS,
    "create_optimizer": _OF_OPTIMIZERS,
    "create_optimizer_and_scheduler": _OF_OPTIMIZERS,
    "build_hooks": "Pass callbacks to the trainer.",
}


def warn_of_methods(cls: type, defined: Collection[str]) -> None:
    """Warn of methods that a subclass of the trainer defines, and that are never called."""
    never_called = {name: advice for name, advice in _GONE.items() if name in defined}
    for name, instead in _REPLACED.items():
        if name in defined and not any(method in defined for method in instead):
            never_called[name] = f"Override {' or '.join(instead)} instead."
    if not hasattr(cls, "configure_run"):  # the class is not also a callback
        _warn_of_hooks(cls, defined)
    for name, advice in never_called.items():
        warn_outside(f"{cls.__name__}.{name} is never called: pytorch_accel_lite has no such method. {advice}")


def _warn_of_hooks(cls: type, defined: Collection[str]) -> None:
    """Warn of a trainer's methods that are named like events, or like hooks of other libraries, and never called."""
    for name in defined:
        of_others = [event for event, hooks in OTHER_LIBRARIES.hooks.items() if name in hooks]
        meant = [name] if name in EVENTS else [event for event in of_others if event in EVENTS]
        methods = [event.removeprefix("on_") for event in meant if hasattr(cls, event.removeprefix("on_"))]
        if not meant or any(method in defined for method in methods):
            continue
        override = f"Override {' or '.join(methods)}, or define" if methods else "Define"
        warn_outside(
            f"{cls.__name__}.{name} is never called by the trainer: only callbacks have events. {override} "
            f"{' or '.join(meant)} in a TrainerCallback."
        )
