"""What subclasses of the trainer are told: of overrides that nothing calls, and of names with another meaning."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from pytorch_accel_lite.utils import is_ours

C = TypeVar("C", bound=type)

#: Methods of pytorch-accelerated that are not called here: the methods that do it now, and what to do.
REPLACED: dict[str, tuple[tuple[str, ...], str]] = {
    "_clip_gradients": (("clip_gradients",), "Override clip_gradients(), which is called once an update."),
    "_prepare_model_optimizer_and_dataloaders": (
        (),
        "Configure Accelerate with Trainer(accelerator=Accelerator(...)), build loaders in create_train_dataloader() "
        "and create_eval_dataloader(), and prepare what else there is in training_run_start().",
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
        "What calculate_train_batch_loss() and calculate_eval_batch_loss() return as 'loss' and 'batch_size' is "
        "tracked: override these.",
    ),
    "_add_epoch_loss_to_run_history": (
        ("train_epoch_end", "eval_epoch_end"),
        "Record metrics of your own with run_history.update_metric() in train_epoch_end() and eval_epoch_end().",
    ),
    "_check_eval_batch_size": ((), "Remove it: every sample is evaluated once, whatever the size of the batches."),
}
#: Methods that the trainer calls on itself, and no subclass is meant to have.
_INTERNAL = ("_check_data", "_check_scheduler")


class _Refusal:
    """The setter of a property that cannot be set: says what the name stands for, and what to do."""

    def __init__(self, name: str, doc: str) -> None:
        meaning = " ".join(doc.split(".")[0].split())
        self._text = f"{name} cannot be used for something else: it is the trainer's own"
        self._text += f" ({meaning}). " if meaning else ". "
        self._text += f"Choose another name, my_{name.strip('_')} for example."

    def message(self, cls: type) -> str:
        return f"{cls.__name__}.{self._text}"

    def __call__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(self.message(type(trainer)))


def explain_names(cls: C) -> C:
    """Let every read-only property of a class say, when it is assigned to, what it is and what to do."""
    for name, held in list(vars(cls).items()):
        if isinstance(held, property) and held.fset is None:
            setattr(cls, name, held.setter(_Refusal(name, held.__doc__ or "")))
    return cls


def check_subclass(cls: type, trainer_class: type) -> None:
    """Warn of overrides that nothing calls, when a subclass of the trainer is made.

    :raises TypeError: when it has another meaning for a name on which the trainer relies
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
            refusal = _Refusal(name, "")
        if isinstance(refusal, _Refusal) and not isinstance(held, property):
            raise TypeError(refusal.message(cls))
