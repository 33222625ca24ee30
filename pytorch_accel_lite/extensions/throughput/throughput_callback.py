"""Throughput of a run: samples, tokens and FLOPs per second, the share of the device's peak, the slowest process."""

from __future__ import annotations

import time
from collections import deque
from functools import partial

import torch

from pytorch_accel_lite.extending import BatchOutput, RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    check_positive_int,
    check_range,
    is_overridden,
    optional,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.data_and_batches import BatchData
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import Count
from pytorch_accel_lite.extensions.profiling import DeviceTimer, Moment
from pytorch_accel_lite.extensions.throughput.device_peaks import find_peak, precision_of
from pytorch_accel_lite.extensions.throughput.flops import try_counting_flops


class ThroughputCallback(TrainerCallback):
    """Record the training throughput, in samples per second and, if available, tokens and FLOPs per second.

    Recorded per epoch, excluding evaluation: ``samples_per_second_epoch``, and ``items_per_second_epoch`` if steps
    return ``num_items_in_batch``, such as tokens. With ``count_flops`` or ``flops_per_sample`` also
    ``flops_per_second_epoch``, and ``mfu_epoch``: the model FLOPs utilisation, which is ``flops_per_second_epoch``
    divided by the peak of all devices. All these rates divide the samples of all processes by the time of the slowest
    process. ``trainer.step_metrics`` has ``samples_per_second``, ``items_per_second``, ``flops_per_second`` and ``mfu``
    over the latest updates.

    On several processes, ``slowest_rank_epoch`` is the rank with the slowest forward passes, and
    ``slowest_rank_factor_epoch`` how long they take compared with the mean of the other ranks: 1.0 if no rank is
    slower. Backward passes cannot show which rank is slow, because all processes wait for the slowest in them; with
    sharded models, also in forward passes.

    FLOPs are floating point operations, two for a multiplication with an addition, of the forward and the backward pass
    but not of the update. With ``count_flops``, torch's ``FlopCounterMode`` counts them for the first batch of a run in
    a trial of both passes, after which gradients, buffers, generators and attributes of the trainer are restored. The
    count includes the operations that activation checkpointing repeats. Compiled code is run uncompiled. All samples
    are assumed to take as many FLOPs as in this batch: if lengths differ a lot, pass a mean as ``flops_per_sample``.

    Args:
        window: number of updates over which the latest rates are measured
        count_flops: count the FLOPs of a sample. A warning says if that is not possible: with sharded weights,
            ``logical_processes`` or an overridden ``train_step``, or if the counter fails.
        flops_per_sample: the FLOPs of a sample, forward and backward, in place of a count. For a transformer, about 6
            times its number of parameters times the number of tokens.
        peak_flops: the peak of one device in FLOPs per second, such as ``989e12``. By default from a table of common
            GPUs, in the precision of the run; if it is unknown, a warning before training says so, and no ``mfu`` is
            recorded.

    Attributes:
        per_process: the numbers of the latest epoch by rank: a dict with ``"samples_per_second"`` and, if known,
            ``"items_per_second"``, ``"flops_per_second"``, ``"mfu"`` and, on several processes, ``"forward_seconds"``

    Raises:
        ValueError: if an argument is not positive, or cannot be combined with the others
    """

    affects_training = False

    def __init__(
        self,
        window: int = 20,
        count_flops: bool = False,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.window = check_positive_int("window", window)
        self.count_flops = count_flops
        positive = partial(check_range, above=0)
        self.flops_per_sample = optional(positive, "flops_per_sample", flops_per_sample)
        self.peak_flops = optional(positive, "peak_flops", peak_flops)
        if count_flops and flops_per_sample is not None:
            raise ValueError("count_flops=True and flops_per_sample exclude each other: pass one of them.")
        if peak_flops is not None and not count_flops and flops_per_sample is None:
            raise ValueError("peak_flops is compared with FLOPs: pass count_flops=True or flops_per_sample, too.")
        self.per_process: list[dict[str, float]] = []
        self._flops: float | None = None  # FLOPs per sample
        self._peak: float | None = None
        self._must_count = False
        self._failed_parts = 0  # number of batch parts with which counting ran out of memory
        self._seconds_of_counting = 0.0
        self._clear()

    def _clear(self) -> None:
        self._recent: deque[tuple[float, int, Count]] = deque(maxlen=self.window)
        self._items: Count | None = None
        self._samples: Count = 0  # the samples of this process
        self._first = 0
        self._start = 0.0
        self._forward_start: Moment | None = None

    def _now(self, trainer: TrainerLike) -> float:
        """Return the time by a clock that stands still during evaluations and while FLOPs are counted."""
        return time.perf_counter() - trainer.run.goodput.seconds["evaluation"] - self._seconds_of_counting

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        names = ["samples_per_second_epoch", "items_per_second_epoch"]
        with_flops = self.count_flops or self.flops_per_sample is not None
        if with_flops:
            names += ["flops_per_second_epoch", "mfu_epoch"]
        request.metrics.record(self, dict.fromkeys(names, True))
        if trainer.ranks.world_size > 1:
            request.metrics.record(self, {"slowest_rank_epoch": None, "slowest_rank_factor_epoch": False})
        if request.kind != "training":
            return
        self._flops = self.flops_per_sample
        self._must_count = self.count_flops
        self._failed_parts = 0
        self._peak = find_peak(trainer) if self.peak_flops is None and with_flops else self.peak_flops
        if with_flops and self._peak is None:
            _warn(
                trainer,
                f"ThroughputCallback records no mfu: it does not know the peak of {_describe(trainer)}. Pass "
                "peak_flops=..., the FLOPs per second of one device, such as 989e12 for an H100 in bfloat16.",
            )
        if self.count_flops and (reason := _reason_not_to_count(trainer)) is not None:
            self._stop_counting(trainer, reason)

    def _stop_counting(self, trainer: TrainerLike, reason: str) -> None:
        self._must_count = False
        _warn(trainer, f"ThroughputCallback counts no FLOPs: {reason}. Pass flops_per_sample=... instead.")

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._clear()
        self._first = trainer.progress.samples_in_epoch  # what was trained before resuming takes no time now
        self._start = self._now(trainer)
        self._timer = DeviceTimer(trainer.device)

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._must_count and trainer.run.training_step.num_microbatches != self._failed_parts:
            start = time.perf_counter()
            self._count(trainer)
            self._seconds_of_counting += time.perf_counter() - start
        if trainer.ranks.world_size > 1:
            self._forward_start = self._timer.now()

    def _count(self, trainer: TrainerLike) -> None:
        """Count the FLOPs of a forward and a backward pass on the current batch, and agree with the other processes."""
        run = trainer.run
        counts = trainer.all_gather_object(try_counting_flops(trainer))
        if run.request.auto_microbatch and any(count.is_out_of_memory for count in counts):
            self._failed_parts = run.training_step.num_microbatches  # count again once batches are split further
        elif samples := sum(count.samples for count in counts):
            self._must_count = False
            self._flops = sum(count.flops for count in counts) / samples
        elif failures := [count.failure for count in counts if count.failure]:
            self._stop_counting(trainer, f"torch's counter has failed with {failures[0].rstrip('.')}")

    def on_backward_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._forward_start is not None:
            self._timer.add("forward", self._forward_start, self._timer.now())
            self._forward_start = None  # a step may have further backward passes

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        self._samples = self._samples + batch_output["batch_size"]
        items = batch_output.get("num_items_in_batch")
        if items is not None:
            items = items.detach() if isinstance(items, torch.Tensor) else items
            self._items = items if self._items is None else self._items + items

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        now = self._now(trainer)
        samples = trainer.progress.samples_in_epoch
        start, first, first_items = self._recent[0] if self._recent else (self._start, self._first, 0)
        self._recent.append((now, samples, 0 if self._items is None else self._items))
        rates: dict[str, Count] = {**self._rates(samples - first, None, now - start, trainer.ranks.world_size)}
        if self._items is not None:  # on a GPU, an unread tensor; the items of this step are counted at its end
            rates["items_per_second"] = (self._items - first_items) / (now - start)
        trainer.step_metrics.update(rates)

    def _rates(self, samples: float, items: float | None, seconds: float, devices: float) -> dict[str, float]:
        """Return the rates per second that are known, by name."""
        rates = {"samples_per_second": samples / seconds}
        if items is not None:
            rates["items_per_second"] = items / seconds
        if self._flops is not None:
            rates["flops_per_second"] = self._flops * samples / seconds
            if self._peak is not None:
                rates["mfu"] = rates["flops_per_second"] / (devices * self._peak)
        return rates

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        seconds = self._now(trainer) - self._start
        items = None if self._items is None else float(self._items)
        world_size = trainer.ranks.world_size
        sharing = world_size / trainer.run.data.ranks.world_size  # number of processes that share each batch
        local = self._rates(float(self._samples), items, seconds, sharing)
        forward_seconds = self._timer.take().get("forward", 0.0)  # without waiting: the losses have already been read
        per_rank = trainer.all_gather_object((local, seconds, items, forward_seconds))
        self.per_process, all_seconds, all_items, forwards = map(list, zip(*per_rank, strict=True))
        counts = [count for count in all_items if count is not None]
        samples = trainer.progress.samples_in_epoch - self._first
        rates = self._rates(samples, sum(counts) if counts else None, max(all_seconds), world_size)
        for name, rate in rates.items():
            trainer.run_history.update_metric(f"{name}_epoch", rate)
        if world_size > 1:
            for numbers, forward in zip(self.per_process, forwards, strict=True):
                numbers["forward_seconds"] = forward
            longest = max(forwards)
            others = (sum(forwards) - longest) / (world_size - 1)
            trainer.run_history.update_metric("slowest_rank_epoch", forwards.index(longest))
            trainer.run_history.update_metric("slowest_rank_factor_epoch", longest / others if others else 1.0)


def _reason_not_to_count(trainer: TrainerLike) -> str | None:
    """Return why a forward and a backward pass cannot be tried; ``None`` if they can."""
    if trainer.is_sharded:
        return "the model's weights are sharded"
    if trainer.division.shares is not None:
        return f"a step has several {trainer.division.shares.owner}es"
    if is_overridden(trainer, "train_step"):
        return f"{type(trainer).__name__} overrides train_step, which may have several passes"
    return None


def _describe(trainer: TrainerLike) -> str:
    get_name = getattr(getattr(torch, trainer.device.type, None), "get_device_name", None)
    name = f"{trainer.device.type!r}" if get_name is None else f"{get_name(trainer.device)!r}"
    return f"the device {name} with {precision_of(trainer)}"


def _warn(trainer: TrainerLike, message: str) -> None:
    if trainer.ranks.rank == 0:
        warn_outside(message)
