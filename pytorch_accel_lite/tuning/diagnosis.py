"""Finding what limits the speed of training, by measuring the parts of a step, and what to change."""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytorch_accel_lite.base.batches import find_batch_size
from pytorch_accel_lite.base.devices import module_of
from pytorch_accel_lite.base.events import EVENTS, CallbackHandler, StopTrainingError, TrainerCallback
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.reprs import table
from pytorch_accel_lite.base.run_settings import RunRequest
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.callbacks.advice import faster_data, not_fused
from pytorch_accel_lite.engine.history import InMemoryRunHistory
from pytorch_accel_lite.engine.losses import create_trackers
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.snapshot import preserving_attributes, replaced
from pytorch_accel_lite.engine.step import loss_of
from pytorch_accel_lite.engine.training import train_step
from pytorch_accel_lite.engine.trial import report, trial

if TYPE_CHECKING:
    from pytorch_accel_lite.data import Batch
    from pytorch_accel_lite.engine.run import Run


# Compiled steps pay on a CPU if they are not short, and spend this share of their time on what is fused: the
# convolutional network of the benchmarks gains with 0.6, the transformer does not with 0.2.
_LONG_STEP = 0.001  # seconds
_FUSIBLE_SHARE = 0.4


@dataclass(repr=False)
class Diagnosis:
    """The result of :meth:`Trainer.diagnose <pytorch_accel_lite.Trainer.diagnose>`; its repr is a report with advice.

    All times are averages in seconds per step.

    :param steps: number of steps measured for each part
    :param samples: average number of samples per step on one process
    :param data: time to read the data, without training
    :param forward: time of the forward pass and the loss, on batches that are already in memory
    :param backward: time that the backward pass adds
    :param update: time that the optimizer's step and clearing the gradients add
    :param step: time of a complete step, including data and callbacks; less than the sum of the others if workers read
        ahead
    :param advice: what to change, most important first; empty if nothing stands out
    :param callbacks: time of your own callbacks, by class name
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
        return max(0.0, min(self._besides, self.data) / self.step)

    @property
    def unexplained(self) -> float:
        """The fraction of a step, from 0 to 1, that none of its parts takes when measured alone."""
        return max(0.0, (self._besides - self.data) / self.step)

    @property
    def _besides(self) -> float:
        """The seconds of a complete step besides those that its parts in memory take alone."""
        return self.step - (self.forward + self.backward + self.update + sum(self.callbacks.values()))

    def summary(self) -> str:
        """Return the time of a step and the throughput in a sentence."""
        return (
            f"A step takes {self.step * 1e3:.3g} ms for {self.samples:.3g} samples: {self.samples / self.step:,.0f} "
            f"samples/s per process, measured over {self.steps} steps."
        )

    def parts(self) -> list[tuple[str, str]]:
        """Return the name and the time, as text, of each part of a step."""
        times = [(f"{name} alone", f"{getattr(self, name) * 1e3:.3g} ms") for name in ("data", "forward", "backward")]
        times += [
            (name, f"{seconds * 1e3:.3g} ms")
            for name, seconds in (("update alone", self.update), ("own callbacks", sum(self.callbacks.values())))
        ]
        fractions = [("waiting for data", self.waiting), ("unexplained", self.unexplained)]
        return [*times, *((name, f"{100 * fraction:.0f} %") for name, fraction in fractions)]

    def __repr__(self) -> str:
        lines = [f"  {name:<16} {amount:>10}" for name, amount in self.parts()]
        advice = [f"- {text}" for text in self.advice or ["Nothing stands out."]]
        return "\n".join([self.summary(), *lines, *advice])

    def _repr_html_(self) -> str:
        return table(self.summary(), self.parts(), notes=self.advice or ["Nothing stands out."])


def diagnose(
    self: TrainerLike,
    train_dataset: Any,
    per_device_batch_size: int = 8,
    num_steps: int = 200,
    train_dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> Diagnosis:
    """Find out what limits the speed of training, and advise what to change.

    Data loading, the forward pass, the backward pass and complete steps are timed for ``num_steps`` steps each; with a
    single process, so is what your own callbacks do at the events of a step. The model, the optimizer, the generators
    and the attributes of these callbacks are restored afterwards; what they write elsewhere is not undone. For
    built-in callbacks, see :class:`~pytorch_accel_lite.callbacks.TimingCallback`. Must be called on every process.

    :param num_steps: number of steps to measure for each part
    :return: the measurements and the advice; also printed, unless a console or a notebook shows the return value
    """
    check_positive_int("num_steps", num_steps)
    batch_size = per_device_batch_size
    loader_kwargs = train_dataloader_kwargs
    request = RunRequest(num_epochs=1)
    callbacks = CallbackTimes(self.callback_handler, lambda: _now(self))
    with trial(self, "diagnose", train_dataset, batch_size, request, loader_kwargs, collate_fn) as run:
        result = _measure(self, run, num_steps, callbacks)
    report(self, result)
    return result


def _measure(trainer: TrainerLike, run: Run, num_steps: int, callbacks: CallbackTimes) -> Diagnosis:
    """Measure the trainer's steps."""
    loader = run.data.train_loader
    held = list(itertools.islice(loader.steps(1), 8))
    if not held:
        raise ValueError("train_dataset gave no batch: it is empty, or exhausted.")
    in_memory = list(itertools.islice(itertools.cycle(held), num_steps))
    warm_up = in_memory[: min(10, num_steps)]
    trainer.train_epoch_start()
    for step in (_forward, _backward, _update):
        _time(trainer, warm_up, step)
    data, count = _time(trainer, _read(loader, num_steps), lambda *_: None)
    forward, _ = _time(trainer, in_memory, _forward)
    backward, _ = _time(trainer, in_memory, _backward)
    update, _ = _time(trainer, in_memory, _update)
    whole, _ = _time(trainer, _read(loader, num_steps), _update)
    samples = sum(find_batch_size(batch.data) for batch in held) / len(held)
    if trainer.ranks.world_size == 1:  # of several, one whose callback fails would leave the others waiting
        callbacks.measure(trainer, run, in_memory)
    own = callbacks.seconds
    whole += sum(own.values())
    parts = data, forward, max(backward - forward, 0), max(update - backward, 0), whole
    result = Diagnosis(count, samples, *parts, callbacks=own)
    result.advice = [*_advise(trainer, result), *callbacks.describe_unmeasured()]
    # Several processes would have to agree on it, as the backward pass communicates.
    is_alone_on_cpu = trainer.device.type == "cpu" and trainer.ranks.world_size == 1
    if is_alone_on_cpu and not _is_compiled(trainer) and forward + result.backward > _LONG_STEP:
        share = fusible_share(lambda: _time(trainer, held, _backward))
        if share > _FUSIBLE_SHARE:
            result.advice.append(
                f"{100 * share:.0f} % of the computation are operations that a compiler can fuse, such as activations, "
                "norms and pooling: try Trainer(..., compile_step=True)."
            )
    return result


def _advise_on_the_rest(found: Diagnosis) -> Iterator[str]:
    total = sum(found.callbacks.values())
    if total > 0.1 * found.step:
        slowest = max(found.callbacks, key=found.callbacks.__getitem__)
        yield (
            f"Callbacks take {100 * total / found.step:.0f} % of a step, most of all {slowest}: "
            f"{found.callbacks[slowest] * 1e3:.3g} ms. Let it work less often, such as every hundredth step, and read "
            "numbers from the device only then."
        )
    if found.unexplained > 0.2:
        yield (
            f"{100 * found.unexplained:.0f} % of a step are explained by none of its parts, which are faster when "
            "measured alone: they may compete for cores or memory. ProfilerCallback shows what a run does meanwhile."
        )


def _read(loader: Any, num_steps: int) -> Iterable[Batch]:
    """Read a number of batches, from several epochs if necessary."""
    return itertools.islice(_read_on(loader), num_steps)


def _read_on(loader: Any) -> Iterator[Batch]:
    """Read epoch after epoch.

    :raises ValueError: if one is empty, as the next would be, without end
    """
    for epoch in itertools.count(1):
        empty = True
        for batch in loader.steps(epoch):
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "train_dataset is exhausted: it gave no batch when it was read again, as diagnose() does several "
                "times. Let its __iter__ start again each time, or pass a smaller num_steps."
            )


def _time(
    trainer: TrainerLike, batches: Iterable[Batch], step: Callable[[TrainerLike, Batch], None]
) -> tuple[float, int]:
    """Return the seconds per step and the number of steps. Waits for the device once, not in every step."""
    count = 0
    start = _now(trainer)
    for batch in batches:
        step(trainer, batch)
        count += 1
    return (_now(trainer) - start) / max(count, 1), count


def _now(trainer: TrainerLike) -> float:
    if trainer.device.type != "cpu":
        module_of(trainer.device).synchronize()
    return time.perf_counter()


def _forward(trainer: TrainerLike, batch: Batch) -> None:
    ranks_alone = trainer.ranks.world_size > 1
    with trainer.accelerator.no_sync(trainer.model) if ranks_alone else nullcontext():
        loss_of(trainer, batch)


def _backward(trainer: TrainerLike, batch: Batch) -> None:
    trainer.backward_step(loss_of(trainer, batch))
    trainer.optimizer_zero_grad()


def _update(trainer: TrainerLike, batch: Batch) -> None:
    trainer.backward_step(loss_of(trainer, batch))
    trainer.optimizer_step()
    trainer.optimizer_zero_grad()


def _is_compiled(trainer: TrainerLike) -> bool:
    model = trainer.get_model()
    is_whole = hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules())
    return is_whole or trainer.compiled_forward is not None


def _advise(trainer: TrainerLike, found: Diagnosis) -> Iterable[str]:
    on_gpu = trainer.device.type == "cuda"
    compute = found.forward + found.backward + found.update
    if found.waiting > 0.1:
        advice = faster_data(trainer)
        yield f"The model waits for data during {100 * found.waiting:.0f} % of a step. {advice}"
    yield from _advise_on_the_rest(found)
    if found.update > 0.1 * compute and (name := not_fused(trainer.optimizer)):
        yield (
            f"The update takes {100 * found.update / compute:.0f} % of the computation. Fused optimizers are faster: "
            f"{name}(..., fused=True)."
        )
    if on_gpu and trainer.accelerator.mixed_precision == "no":
        yield "Train in bf16: accelerator=Accelerator(mixed_precision='bf16')."
        if torch.get_float32_matmul_precision() == "highest":
            yield "Or multiply matrices in TF32: torch.set_float32_matmul_precision('high')."
    if on_gpu and compute < 0.005 and not _is_compiled(trainer):
        yield (
            f"A step computes for only {compute * 1e3:.2g} ms, much of which is spent launching kernels. Use larger "
            "batches, or CUDA graphs: TrainerLike(..., compile_step={'mode': 'reduce-overhead'})."
        )
    if not on_gpu and trainer.device.type == "cpu" and torch.get_num_threads() == 1 and compute > 0.005:
        yield "Torch uses a single thread: torch.set_num_threads(n), or OMP_NUM_THREADS=n, makes it use more cores."


_OF_A_STEP = (
    "on_train_step_start",
    "on_backward_start",
    "on_backward_end",
    "on_optimizer_step_start",
    "on_optimizer_step_end",
    "on_train_step_end",
    "on_update_end",
)


class CallbackTimes:
    """Measures callbacks in steps outside a run: only the methods that the user wrote, for the events of a step.

    A callback that fails, because it needs an event before, is not called again.

    :param now: returns the time, once the device is idle
    :ivar seconds: seconds per step, by class name
    """

    def __init__(self, callbacks: Iterable[TrainerCallback], now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._now = now
        self._totals: dict[str, float] = defaultdict(float)
        self._handler = CallbackHandler()
        self._handler.timer = self._time
        for callback in callbacks:
            own = [event for event in _OF_A_STEP if is_overridden(callback, event)]
            if own:
                self._handler.callbacks.append(callback)
                self._handler.set_listening(callback, False, *(event for event in EVENTS if event not in own))

    def measure(self, trainer: TrainerLike, run: Run, batches: Sequence[Batch]) -> None:
        """Train on batches. What the callbacks change of themselves, the trainer and its history is restored."""
        if not self._handler.callbacks:
            return
        with (
            preserving_attributes(trainer, *self._handler.callbacks),
            replaced(trainer, callback_handler=self._handler, run_history=InMemoryRunHistory()),
        ):
            run.loss_trackers = create_trackers(trainer)
            run.progress.start_epoch()
            for batch in batches:
                train_step(trainer, run, batch)
        self.seconds = {name: total / len(batches) for name, total in self._totals.items() if name not in self._failed}

    def describe_unmeasured(self) -> Iterator[str]:
        """Yield a sentence if some callbacks could not be measured."""
        reasons = {name: self._failed.get(name, "several processes") for name in self._handler.callback_list}
        unmeasured = [f"{name} ({reason})" for name, reason in reasons.items() if name not in self.seconds]
        if unmeasured:
            listed = ", ".join(unmeasured)
            yield f"Callbacks that could not be measured: {listed}. A run with TimingCallback measures them."

    @contextmanager
    def _time(self, callback: object) -> Iterator[None]:
        if isinstance(callback, str):  # a phase within a callback, such as saving
            yield
            return
        name = type(callback).__name__
        begin = self._now()
        try:
            yield
        except StopTrainingError:
            pass
        except Exception as error:
            self._failed[name] = f"{type(error).__name__}: {error}"
            self._handler.set_listening(callback, False, *_OF_A_STEP)  # type: ignore[arg-type]
        self._totals[name] += self._now() - begin


# Operations that read and write each element once or a few times: torch's own code for them makes one pass over memory
# each, while inductor's makes one for several.
_FUSIBLE = re.compile(
    r"norm|pool|elu|silu|sigmoid|tanh|threshold|clamp|softmax|dropout|where"
    r"|^aten::(add|sub|mul|div|pow|exp|log|sqrt|rsqrt|abs|neg|copy|fill|erf|sin|cos|lerp|addcmul|addcdiv)_?(\.|$)"
)


def fusible_share(compute: Callable[[], Any]) -> float:
    """Return the part of the time of a computation on the CPU, from 0 to 1, that goes into operations to be fused."""
    with _Timed() as timed:
        compute()
    return timed.fusible / timed.total if timed.total else 0.0


class _Timed(TorchDispatchMode):
    """Measures operations, those of backward passes included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.fusible = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - begin
        self.total += seconds
        if _FUSIBLE.search(func.name()):
            self.fusible += seconds
        return result
