"""Modes that code of users leaves changed: of the model, and of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pytorch_accel_lite.base.modules import unwrap
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.run.events import STEP_EVENTS, Phase
from pytorch_accel_lite.run.progress import GlobalModes
from pytorch_accel_lite.run.run import Run, TrainerLike

#: For each phase, the methods of a trainer that compute a batch.
_STEP_METHODS: dict[Phase, tuple[str, ...]] = {
    "training": (
        "train_step", "calculate_train_batch_loss", "backward_step", "clip_gradients", "optimizer_step",
        "scheduler_step", "optimizer_zero_grad",
    ),
    "evaluation": ("calculate_eval_batch_loss",),
    "prediction": ("calculate_predict_batch_output",),
}  # fmt: skip


def restoring_mode_between_batches(
    trainer: TrainerLike, run: Run, batches: Iterable[Batch], phase: Phase
) -> Iterable[Batch]:
    """Yield batches; if user code runs between two batches, restore the model's mode afterwards.

    Only the mode of the whole model is compared, because the mode of a part may be meant to stay changed. Without user
    code, the batches are returned unchanged, at no cost.
    """
    owners = _owners_of_user_code(trainer, phase)
    return _restoring(trainer, run, batches, " or ".join(owners), phase) if owners else batches


def _restoring(trainer: TrainerLike, run: Run, batches: Iterable[Batch], who: str, phase: Phase) -> Iterator[Batch]:
    model = unwrap(trainer.model, keep_torch_compile=False)
    modes = {module: module.training for module in model.modules()}
    is_training = model.training
    has_warned = False
    for batch in batches:
        yield batch
        if model.training != is_training:
            for module, mode in modes.items():
                module.training = mode
            if not has_warned:
                _warn_of_mode(who, phase, is_training)
            has_warned = True
        if phase == "training":
            check_global_modes(trainer, run, who)


def _warn_of_mode(who: str, phase: Phase, is_training: bool) -> None:
    left, restored = ("evaluation", "training") if is_training else ("training", "evaluation")
    start = "train_epoch_start" if phase == "training" else "eval_epoch_start"
    instead = "" if phase == "prediction" else f" To choose the mode of a whole {phase}, override {start}."
    warn_outside(
        f"{who} left the model in {left} mode during {phase}; it is in {restored} mode again for the next batch. "
        f"Restore the mode yourself after model.{'eval' if is_training else 'train'}().{instead}"
    )


def call_start_event(trainer: TrainerLike, event: str, phase: Phase, **kwargs: object) -> None:
    """Call the event before the steps of a phase; warn if a callback changes the mode of the model in it.

    The change is kept, as it may be intended.
    """
    was_training = is_in_training_mode(trainer)
    trainer.call_event(event, **kwargs)
    if is_in_training_mode(trainer) == was_training:
        return
    mode, effect = "evaluation", "without dropout, and with fixed statistics of batch norm"
    if not was_training:
        mode, effect = "training", "with dropout, and changes the statistics of batch norm"
    who = " or ".join(_owners_of_user_code(trainer, phase, event)) or "A callback"
    warn_outside(
        f"{who}.{event} left the model in {mode} mode, so this {phase} is {effect}. Restore the mode there; if you "
        f"mean it, override {event.removeprefix('on_')} of the trainer instead."
    )


def is_in_training_mode(trainer: TrainerLike) -> bool:
    """Whether the model that is trained or evaluated is in training mode."""
    return unwrap(trainer.model, keep_torch_compile=False).training


def check_global_modes(trainer: TrainerLike, run: Run, who: str = "A callback or an overridden method") -> None:
    """Warn of settings of torch that differ from those at the start of a run; enable gradients again."""
    before, now = run.loop.global_modes, GlobalModes.now(run.device)
    if before is None or now == before:
        return
    if before.gradients and not now.gradients:
        torch.set_grad_enabled(True)
        warn_outside(
            f"{who} left gradients disabled, without which nothing can be trained; they are enabled again. Use 'with "
            "torch.no_grad():' in place of torch.set_grad_enabled(False)."
        )
    if now.autocast and not before.autocast:
        warn_outside(
            f"{who} left autocast on, so all that follows is computed in lower precision. Enter it by 'with "
            "torch.autocast(...):', which ends it, or pass mixed_precision to Trainer() if you mean it."
        )
    if now.dtype != before.dtype:
        warn_outside(
            f"{who} left {now.dtype} as the default dtype in place of {before.dtype}, so new tensors have it from now "
            "on. Restore it by torch.set_default_dtype, or set it before training if you mean it."
        )
    run.loop.global_modes = GlobalModes.now(run.device)  # so that the warning comes once


def has_starting_code(trainer: TrainerLike, run: Run) -> bool:
    """Whether code of users runs in the starting events of a training run or of its epochs."""
    events = ("on_training_run_start", "on_train_epoch_start")
    is_overridden = not run.overridden.isdisjoint(("training_run_start", "train_epoch_start", "_run_training"))
    return is_overridden or bool(_owners_of_user_code(trainer, "training", *events))


def _owners_of_user_code(trainer: TrainerLike, phase: Phase, *events: str) -> list[str]:
    """Return the user's classes with code that runs at some events, or within the steps of a phase."""
    owners = [
        type(getattr(listener, "__self__", listener)).__name__
        for event in events or STEP_EVENTS[phase]
        for listener in trainer.callback_handler.listeners[event]
        if not is_from_this_package(listener)
    ]
    if not events and not trainer.current_run.overridden.isdisjoint(_STEP_METHODS[phase]):
        owners.append(type(trainer).__name__)
    return list(dict.fromkeys(owners))
