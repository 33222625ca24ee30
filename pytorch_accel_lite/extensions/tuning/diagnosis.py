"""``trainer.diagnose()``: measures the parts of a training step, and says what limits the speed and what to change."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from pytorch_accel_lite.callbacks import TrainerCallback
from pytorch_accel_lite.data import Batch, CollateFunction, LoaderKwargs, NamedData
from pytorch_accel_lite.extending import RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import DEFAULT_BATCH_SIZE, faster_data, infer_batch_size
from pytorch_accel_lite.extension_tools.texts_and_pages import Report
from pytorch_accel_lite.extensions.trials import Trial, UserCallbacks
from pytorch_accel_lite.extensions.tuning.batch_size_finder import update_from
from pytorch_accel_lite.extensions.tuning.fused_optimizers import unfused_class


@dataclass(repr=False)
class Diagnosis(Report):
    """The result of ``Trainer.diagnose()``; its repr is a report with advice.

    All times are averages in seconds per step.

    Args:
        steps: number of steps measured for each part
        samples: average number of samples per step on one process
        data: time to read the data, without training
        forward: time of the forward pass and the loss, on batches that are already in memory
        backward: time that the backward pass adds
        update: time that the optimizer's step and clearing the gradients add
        step: time of a complete step, including data and callbacks; less than the sum of the others if workers read
            ahead
        advice: what to change, most important first; empty if nothing stands out
        callbacks: time of your own callbacks, by class name
    """

    steps: int
    samples: float
    data: float
    forward: float
    backward: float
    update: float
    step: float
    advice: list[str] = field(default_factory=list)
    callbacks: dict[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        """The fraction of a step, from 0 to 1, during which the model waits for data."""
        return max(0.0, min(self._other_seconds, self.data) / self.step)

    @property
    def unexplained(self) -> float:
        """The fraction of a step, from 0 to 1, that the sum of its parts, each measured alone, does not explain."""
        return max(0.0, (self._other_seconds - self.data) / self.step)

    @property
    def _other_seconds(self) -> float:
        """The seconds of a complete step minus those of its forward pass, backward pass and update alone."""
        return self.step - (self.forward + self.backward + self.update + sum(self.callbacks.values()))

    def summary(self) -> str:
        """Return the time of a step and the throughput in a sentence."""
        return (
            f"A step takes {self.step * 1e3:.3g} ms for {self.samples:.3g} samples: {self.samples / self.step:,.0f} "
            f"samples/s per process, measured over {self.steps} steps."
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the name and the time, as text, of each part of a step."""
        times = {f"{part} alone": getattr(self, part) for part in ("data", "forward", "backward", "update")}
        times["own callbacks"] = sum(self.callbacks.values())
        fractions = {"waiting for data": self.waiting, "unexplained": self.unexplained}
        rows = [(name, f"{seconds * 1e3:.3g} ms") for name, seconds in times.items()]
        return rows + [(name, f"{100 * fraction:.0f} %") for name, fraction in fractions.items()]

    def notes(self) -> list[str]:
        """Return the advice, or that nothing stands out."""
        return self.advice or ["Nothing stands out."]


def diagnose(
    self: TrainerLike,
    train_dataset: NamedData,
    per_device_batch_size: int = DEFAULT_BATCH_SIZE,
    num_steps: int = 200,
    train_dataloader_kwargs: LoaderKwargs | None = None,
    collate_fn: CollateFunction | None = None,
) -> Diagnosis:
    """Find out what limits the speed of training, and advise what to change.

    Data loading, the forward pass, the backward pass and complete steps are timed for ``num_steps`` steps each; with a
    single process, so are your own callbacks at the events of a step. The model, the optimizer, the generators and the
    attributes of these callbacks are restored afterwards. Other effects of the callbacks, such as files, remain. For
    built-in callbacks, see ``TimingCallback``. Must be called on every process.

    Args:
        num_steps: number of steps to measure for each part

    Returns:
        the measurements and the advice, to be printed in a script; consoles and notebooks show them
    """
    check_positive_int("num_steps", num_steps)
    size = per_device_batch_size
    request = RunRequest(num_epochs=1)
    callbacks = list(self.callback_handler)
    trial = Trial(self, "diagnose", train_dataset, size, request, train_dataloader_kwargs, collate_fn)
    with trial.running():
        return _measure(trial, num_steps, callbacks)


def _measure(trial: Trial, num_steps: int, callbacks: Sequence[TrainerCallback]) -> Diagnosis:
    """Measure the trainer's steps, and the given callbacks."""
    trial.trainer.train_epoch_start()
    batches = list(itertools.islice(trial.batches(), 8))
    in_memory = list(itertools.islice(itertools.cycle(batches), num_steps))

    def time_with_data(step: Callable[[Trial, Batch], None]) -> float:
        return _time(trial, itertools.islice(trial.batches(), num_steps), step)

    for step in (_forward, _backward, update_from):
        _time(trial, in_memory[:10], step)
    data = time_with_data(lambda *_: None)
    forward, backward, update = (_time(trial, in_memory, step) for step in (_forward, _backward, update_from))
    complete = time_with_data(update_from)
    in_callbacks, failures = _time_callbacks(trial, in_memory, callbacks)
    result = Diagnosis(
        steps=num_steps,
        samples=sum(infer_batch_size(batch.data, batch.num_samples) for batch in batches) / len(batches),
        data=data,
        forward=forward,
        backward=max(backward - forward, 0),
        update=max(update - backward, 0),
        step=complete + sum(in_callbacks.values()),
        callbacks=in_callbacks,
    )
    result.advice = list(_advise(trial.trainer, result))
    if failures:
        names = ", ".join(f"{name} ({reason})" for name, reason in failures.items())
        result.advice.append(f"Callbacks that could not be measured: {names}. A run with TimingCallback measures them.")
    return result


def _time(trial: Trial, batches: Iterable[Batch], step: Callable[[Trial, Batch], None]) -> float:
    """Return the seconds per step. Waits for the device once, not in every step."""
    start = _now(trial.trainer)
    for count, batch in enumerate(batches, 1):  # noqa: B007
        step(trial, batch)
    return (_now(trial.trainer) - start) / count


def _now(trainer: TrainerLike) -> float:
    if trainer.device.type != "cpu":
        torch.get_device_module(trainer.device).synchronize()
    return time.perf_counter()


def _forward(trial: Trial, batch: Batch) -> None:
    trainer = trial.trainer
    is_alone = trainer.ranks.world_size == 1
    with nullcontext() if is_alone else trainer.accelerator.no_sync(trainer.model):
        trial.loss_of(batch)


def _backward(trial: Trial, batch: Batch) -> None:
    trial.trainer.backward_step(trial.loss_of(batch))
    trial.trainer.optimizer_zero_grad()


def _advise(trainer: TrainerLike, result: Diagnosis) -> Iterator[str]:
    on_gpu = trainer.device.type == "cuda"
    compute = result.forward + result.backward + result.update
    if result.waiting > 0.1:
        advice = faster_data(trainer.train_dataloader, trainer.accelerator.num_processes)
        yield f"The model waits for data during {100 * result.waiting:.0f} % of a step. {advice}"
    in_callbacks = sum(result.callbacks.values())
    if in_callbacks > 0.1 * result.step:
        slowest, seconds = max(result.callbacks.items(), key=lambda item: item[1])
        yield (
            f"Callbacks take {100 * in_callbacks / result.step:.0f} % of a step, most of all {slowest}: "
            f"{seconds * 1e3:.3g} ms. Let it work, and read from the device, in every hundredth step, for example."
        )
    if result.unexplained > 0.2:
        yield (
            f"{100 * result.unexplained:.0f} % of a step are explained by none of its parts when measured alone: they "
            "may compete for cores or memory. torch.profiler shows what a run does meanwhile."
        )
    if result.update > 0.1 * compute and (name := unfused_class(trainer.optimizer)):
        share = 100 * result.update / compute
        yield f"The update takes {share:.0f} % of the computation. A fused one is faster: {name}(..., fused=True)."
    if on_gpu and trainer.accelerator.mixed_precision == "no":
        yield "Train in bf16, mixed_precision='bf16', or in TF32, torch.set_float32_matmul_precision('high')."
    if on_gpu and compute < 0.005 and trainer.compiled_forward is None:
        graphs = "CUDA graphs: Trainer(..., compile_step={'mode': 'reduce-overhead'})"
        yield f"Much of the {compute * 1e3:.2g} ms of a step goes to launching kernels. Use larger batches or {graphs}."
    if trainer.device.type == "cpu" and torch.get_num_threads() == 1 and compute > 0.005:
        yield "Torch uses a single thread: torch.set_num_threads(n), or OMP_NUM_THREADS=n, makes it use more cores."


def _time_callbacks(
    trial: Trial, batches: Sequence[Batch], callbacks: Iterable[TrainerCallback]
) -> tuple[dict[str, float], dict[str, str]]:
    """Train on batches; return the seconds per step by callback class, and why some callbacks could not be measured.

    The attributes of the callbacks, the trainer and its history are restored.
    """
    trainer = trial.trainer
    handler = UserCallbacks(callbacks, lambda: _now(trainer))
    if trainer.ranks.world_size > 1:  # a process whose callback fails would leave the others waiting
        return {}, dict.fromkeys(handler.callback_list, "several processes")
    with trial.keeping_attributes(*handler.callbacks), trial.epoch(handler):
        for batch in batches if handler.callbacks else ():
            trial.run_step(batch)
    seconds = {name: total / len(batches) for name, total in handler.seconds.items() if name not in handler.failures}
    return seconds, handler.failures
