"""Checks around an epoch: modes that are left changed, batches too small for batch norm, its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset

from pytorch_accel_lite.base.modules import stays_in_eval, unwrap
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.sources import Source, find_length
from pytorch_accel_lite.run.events import STEP_EVENTS, Phase
from pytorch_accel_lite.run.progress import GlobalModes
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import weights_are_finite

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


def min_share_for_batch_norm(trainer: TrainerLike, run: Run) -> int:
    """Return the smallest number of samples, other than none, that a process may get in a step: two with batch norm.

    Call it on every process at the start of an epoch, with the model in training mode. Warns if the epoch ends with a
    batch of a single sample.
    """
    norms = {name: module for name, module in trainer.model.named_modules() if isinstance(module, _BatchNorm)}
    return _min_share(trainer, run, norms) if norms else 1


def _min_share(trainer: TrainerLike, run: Run, norms: dict[str, _BatchNorm]) -> int:
    ranks = run.ranks
    alone = [
        f"{type(norm).__name__} {name.removeprefix('module.')!r}"
        for name, norm in norms.items()
        if _uses_own_batch(norm, ranks.world_size)
    ]
    limit, progress = run.request.max_num_train_steps, run.progress
    steps = math.inf if limit is None else progress.step + (limit - progress.update) * run.window.steps
    if alone and ranks.rank == 0 and run.data.required_train_loader.ends_in_one_sample(steps):
        warn_outside(
            f"The last batch of an epoch has a single sample, and the model has batch norm in training mode "
            f"({alone[0]}): torch raises an error where that leaves it a single value for each channel, and elsewhere "
            "the statistics of one sample are poor. Leave that batch out with train_dataloader_kwargs="
            "{'drop_last': True}, or choose another per_device_batch_size."
        )
    return 2 if ranks.max([bool(alone)])[0] else 1


def _uses_own_batch(norm: nn.Module, world_size: int) -> bool:
    """Whether a batch norm normalises with the statistics of this process's batch."""
    if isinstance(norm, nn.SyncBatchNorm) and world_size > 1:
        return False
    return norm.running_mean is None or (norm.training and not stays_in_eval(norm))


def steps_of_stream(run: Run, loader: Source) -> int | None:
    """Return the length of a stream in steps, if it has one and the epoch begins with it."""
    # A stream that divides itself among the processes may have the length of all data.
    is_stream = run.data.ranks.world_size == 1 and isinstance(getattr(loader.source, "dataset", None), IterableDataset)
    return find_length(loader) if is_stream and not run.progress.step else None


def check_num_steps(run: Run, loader: Source, length: int | None) -> None:
    """Check that an epoch had batches. Warn if a stream ended before its length, on which schedules rely."""
    steps = run.progress.step
    if not steps:
        raise ValueError("train_dataset gave no batch in this epoch: is it empty or exhausted?")
    workers = getattr(loader.source, "num_workers", 0)  # each may drop a batch
    if length is not None and steps + workers < length:
        warn_outside(
            f"The training data ended after {steps} steps of this epoch, but their length is {length} steps, by which "
            "schedules and the remaining time are computed. Return the true length in __len__ of the dataset, or "
            "define none, and pass max_num_train_steps."
        )


def warn_of_nonfinite_weights(trainer: TrainerLike, run: Run) -> None:
    """Warn of weights that are not finite at the end of a run."""
    if run.progress.update and not weights_are_finite(trainer) and run.ranks.rank == 0:
        warn_outside(
            f"The run has ended, after update {run.progress.update}, with weights that are infinite or NaN. Lower the "
            "learning rate, clip the gradients (gradient_clip_norm=1.0), or skip such updates (GradientSpikeCallback), "
            "and train again, or resume from an earlier state."
        )
