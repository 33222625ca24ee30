"""What stands out in the first epoch of a run, and what to do about it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from statistics import fmean, median, stdev

import torch
from torch import nn
from torch.nn import functional

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range, is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import BatchData, BatchOutput, faster_data
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import default_transform, set_own_listening
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import total_norm
from pytorch_accel_lite.extension_tools.texts_and_pages import is_terminal, wrapped
from pytorch_accel_lite.extensions.monitoring import GradientNorms

_FIRST_STEPS = 16  # the mean loss of these steps is compared with the epoch's
_LEAST_UPDATES = 48
_STEP_EVENTS = ("on_train_step_end", "on_optimizer_step_start")


class AdviceCallback(TrainerCallback):
    """Print advice after the first epoch if something stands out; otherwise print nothing.

    It reports that

    - the model waited for data for at least a fifth of the epoch, without evaluations, and at least ``min_seconds``;
    - one of several processes keeps the others waiting, because it reads more slowly;
    - at least half of the updates were clipped by norm;
    - more than one update in twenty was skipped, by the gradient scaler (fp16) or by other callbacks;
    - the training loss has not fallen in an epoch of at least 48 updates: the advice points to ``Trainer.check()``,
      which looks for mistakes in the program. The loss of an already trained network need not fall when it is tuned
      further;
    - an overridden ``train_step`` has never updated one of the optimizers;
    - the learning rate was 0 throughout the epoch, so no weight has changed;
    - the schedule has already lowered the learning rate to less than a hundredth of its peak with more epochs to come,
      or has not yet raised it to a hundredth of the optimizer's own rate.

    Only the first epoch of a run is measured. For a closer look at speed before a run, see
    ``Trainer.diagnose()``.

    Args:
        min_seconds: shortest waiting time in seconds to report
    """

    affects_training = False

    def __init__(self, min_seconds: float = 1.0) -> None:
        self.min_seconds = check_range("min_seconds", min_seconds)
        self._watches = False
        self._trained = True
        self._has_trained_before = False
        self._advice: list[str] = []

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._watches = self._trained = True
        self._advice = []

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self._watches:
            return
        self._start = _training_time(trainer)
        self._updates_before = trainer.progress.update
        self._skipped_before = trainer.run.training_step.skipped_updates
        self._norms = GradientNorms()
        self._rate = self._highest = _learning_rate(trainer)
        self._limit = None if trainer.run_config is None else trainer.run_config.gradient_clip_norm
        measures_updates = self._limit is not None or trainer.scheduler is not None
        set_own_listening(trainer, self, measures_updates, "on_optimizer_step_start")
        self._first_losses: list[torch.Tensor] = []
        self._by_chance: list[float | torch.Tensor] = []  # the losses that a model without knowledge would have
        begins = not self._has_trained_before and not trainer.progress.update
        self._compares_losses = begins and _is_supervised(trainer)
        set_own_listening(trainer, self, self._compares_losses, "on_train_step_end")

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        if self._compares_losses and len(self._first_losses) < _FIRST_STEPS:
            self._first_losses.append(batch_output["loss"].detach().clone())
            self._by_chance.extend(_loss_by_chance(trainer.loss_func, batch, batch_output))
        else:
            set_own_listening(trainer, self, False, "on_train_step_end")

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._limit is not None:
            self._norms.add(total_norm(trainer), self._limit, only_finite=trainer.accelerator.scaler is not None)
        if trainer.scheduler is not None:
            self._rate = _learning_rate(trainer)
            self._highest = max(self._highest, self._rate)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._updates = trainer.progress.update - self._updates_before if self._watches else 0
        if self._updates:
            self._watches = False
            self._has_trained_before = True
            set_own_listening(trainer, self, False, *_STEP_EVENTS)
            self._advice = [
                *self._on_data(trainer),
                *self._on_clipping(),
                *self._on_skipped_updates(trainer),
                *self._on_training(trainer),
            ]

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self._trained:  # only now has a per-epoch scheduler been stepped
            self._trained = True
            self._advice.append(_why_nothing_was_trained(trainer))
        if self._advice:  # after the metrics of the epoch
            lines = [
                f"Advice after epoch {trainer.progress.epoch}:",
                *(wrapped(f"- {it}", "  ") for it in self._advice),
            ]
            margin = [""] if is_terminal(sys.stdout) else []  # separates it from the rows of a table
            trainer.print("\n".join([*margin, *lines, *margin]))
            self._advice = []

    def _on_data(self, trainer: TrainerLike) -> Iterator[str]:
        """Advise if training has waited for data, on all processes or on one."""
        waited = trainer.run.data.required_train_loader.seconds_waited
        duration = _training_time(trainer) - self._start
        if waited >= max(0.2 * duration, self.min_seconds):
            yield (
                f"The model waited for data for {waited:.1f} of {duration:.1f} seconds ({waited / duration:.0%}). "
                f"{faster_data(trainer.train_dataloader, trainer.accelerator.num_processes)}"
            )
        waits = trainer.all_gather_object(waited)
        longest = max(waits)
        others = median(sorted(waits)[:-1] or [longest])
        if longest - others >= max(0.1 * duration, self.min_seconds):
            yield (
                f"Rank {waits.index(longest)} waited for data for {longest:.1f} seconds, the other processes for "
                f"{others:.1f}, and every step waits for all of them. Look at the disk, the network and the cores of "
                "its machine."
            )

    def _on_clipping(self) -> Iterator[str]:
        """Advise if most updates were clipped."""
        count = max(int(self._norms.count), 1)  # one for each optimizer that train_step updates
        clipped = float(self._norms.clipped or 0.0) / count
        if clipped >= 0.5:
            yield (
                f"{clipped:.0%} of the updates were clipped: gradient_clip_norm={self._limit} is below the average "
                f"gradient norm of {float(self._norms.sum) / count:.3g}. Raise it, or lower the learning rate, "
                "unless you intend to clip nearly every update."
            )

    def _on_skipped_updates(self, trainer: TrainerLike) -> Iterator[str]:
        """Advise if many updates were skipped, or an optimizer made none."""
        skipped = trainer.run.training_step.skipped_updates - self._skipped_before
        if skipped > 0.05 * self._updates:
            reason = " by callbacks."
            if trainer.accelerator.scaler is not None:
                reason = (
                    ": their gradients overflowed in fp16. If the device supports bf16, use "
                    "Accelerator(mixed_precision='bf16'); otherwise lower the learning rate."
                )
            yield f"{skipped} of {self._updates} updates were skipped{reason}"
        for name in trainer.run.training_step.optimizers_never_updated:
            yield f"train_step has not called update(loss, optimizer={name!r}), so its parameters are not trained."

    def _on_training(self, trainer: TrainerLike) -> Iterator[str]:
        """Advise on the loss and the schedule of an epoch in which weights have changed."""
        self._trained = bool(self._highest or (trainer.scheduler is None and _learning_rate(trainer)))
        first = torch.stack(self._first_losses).tolist() if self._first_losses else []
        by_chance = torch.stack([*map(torch.as_tensor, self._by_chance)]).tolist() if self._by_chance else [0.0]
        is_new = not first or fmean(first) > 0.5 * fmean(by_chance)
        if self._trained and is_new and len(first) == _FIRST_STEPS and self._updates >= _LEAST_UPDATES:
            yield from _check_loss(first, trainer.run.recorded_losses["train_loss_epoch"])
        if self._trained and trainer.scheduler is not None and self._updates > 1:
            yield from self._check_schedule(trainer)

    def _check_schedule(self, trainer: TrainerLike) -> Iterator[str]:
        config = trainer.run_config
        is_last = config is not None and config.num_epochs is not None and trainer.progress.epoch >= config.num_epochs
        if is_last or trainer.run.is_finished or math.isnan(self._rate):
            return
        initial = max((float(group.get("initial_lr", 0.0)) for group in trainer.optimizer.param_groups), default=0.0)
        name = type(trainer.scheduler).__name__
        next_rate = _learning_rate(trainer)  # a cyclic schedule may restart here
        if self._rate < 0.01 * self._highest and next_rate < 0.01 * self._highest:
            yield (
                f"{name} has already lowered the learning rate from {self._highest:.3g} to {self._rate:.3g} in this "
                "epoch. Schedulers are stepped after every update: give their lengths in updates "
                "(TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH * epochs), or pass scheduler_interval='epoch'."
            )
        elif self._highest < 0.01 * initial:
            yield (
                f"{name} has raised the learning rate to only {self._highest:.3g} in this epoch; the optimizer's own "
                f"is {initial:.3g}. If that is too slow, shorten the warm-up."
            )


def _training_time(trainer: TrainerLike) -> float:
    """Return the time by a clock that stands still during evaluations."""
    return time.perf_counter() - trainer.run.goodput.seconds["evaluation"]


def _is_supervised(trainer: TrainerLike) -> bool:
    """Whether the loss should fall, unlike in a GAN or in reinforcement learning."""
    methods = ("calculate_train_batch_loss", "train_step")
    return trainer.loss_func is not None and not any(is_overridden(trainer, method) for method in methods)


def _loss_by_chance(loss_func: object, batch: BatchData, batch_output: BatchOutput) -> list[float | torch.Tensor]:
    """Return, in a list, the loss that a batch would have if the model knew nothing; an empty list if it is unknown."""
    try:
        outputs, targets = default_transform(batch, batch_output)
    except ValueError:
        return []
    if isinstance(loss_func, nn.CrossEntropyLoss) or loss_func is functional.cross_entropy:
        return [math.log(outputs.shape[1])] if outputs.ndim > 1 and outputs.shape[1] > 1 else []
    if isinstance(loss_func, nn.BCEWithLogitsLoss) or loss_func is functional.binary_cross_entropy_with_logits:
        return [math.log(2)]
    if isinstance(loss_func, nn.MSELoss) or loss_func is functional.mse_loss:
        return [targets.detach().float().var(0, correction=0).mean()]
    return []


def _check_loss(first: list[float], mean: float) -> Iterator[str]:
    initial = fmean(first)
    if all(map(math.isfinite, first)) and mean > initial - 0.5 * stdev(first) / _FIRST_STEPS**0.5:
        yield (
            f"The training loss has not fallen: it was {initial:.4g} in the first {_FIRST_STEPS} steps, and {mean:.4g} "
            "on average in the epoch. trainer.check(train_dataset) looks for mistakes in the program; find_lr() "
            "suggests a learning rate."
        )


def _learning_rate(trainer: TrainerLike) -> float:
    """Return the largest rate of all groups; NaN, which leads to no advice, if there is none or it is on a device."""
    rates = [group.get("lr") for group in trainer.optimizer.param_groups]
    if not rates or any(rate is None or (isinstance(rate, torch.Tensor) and not rate.is_cpu) for rate in rates):
        return math.nan
    return float(max(rates))


def _why_nothing_was_trained(trainer: TrainerLike) -> str:
    advice = "The learning rate was 0 throughout this epoch, so no weight has changed."
    next_rate = _learning_rate(trainer)
    if trainer.scheduler is None:
        return f"{advice} Set 'lr' in trainer.optimizer.param_groups before the run."
    name = type(trainer.scheduler).__name__
    if next_rate:
        return f"{advice} The next rate of {name} is {next_rate:.3g}: start its warm-up above 0."
    return f"{advice} {name} keeps it there: check its rates and lengths with plot_schedule."
