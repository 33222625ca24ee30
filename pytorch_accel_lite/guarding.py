"""Steps that may fail: batches that are skipped, and batches that are split until they fit into memory."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from pytorch_accel_lite.batches import batch_size_of, concatenate_if_possible, find_batch_size, split_batch
from pytorch_accel_lite.data import FailedRead, LoadedBatch
from pytorch_accel_lite.events import NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.gradients import average_gradients, optimized_parameters
from pytorch_accel_lite.resuming import generator_states, set_generator_states

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

BatchOutput = dict[str, Any]

_DONE, _OUT_OF_MEMORY, _FAILED = range(3)


class BatchFailure(NamedTuple):
    """What a process says of a batch that failed.

    :param rank: the process
    :param indices: of the samples in the dataset, ``None`` when they are not known
    :param error: its type and text
    """

    rank: int
    indices: list[Any] | None
    error: str


class StepGuard:
    """Goes forward and backward with a batch so that a failure leaves no trace and all processes learn of it.

    On several processes a guarded step does not communicate before each has said how it went: the module inside
    ``DistributedDataParallel`` is used, and the gradients are averaged here, at the end of the window.

    :param splits: split batches that do not fit into memory
    :param skips: leave out batches that fail otherwise
    """

    def __init__(self, trainer: Trainer, splits: bool, skips: bool) -> None:
        if trainer.is_sharded:
            raise ValueError(
                "auto_microbatch=True and SkipFailedBatchesCallback do not work with weights that are sharded by "
                f"{trainer.accelerator.distributed_type.value}: a step that fails on one process cannot be taken back."
            )
        self._trainer = trainer
        self._splits = splits
        self._skips = skips

    def run(self, loaded: LoadedBatch) -> BatchOutput | None:
        """Add the gradients of a batch, and return the outputs of the step; ``None`` when the batch is skipped."""
        trainer, outputs = self._trainer, list[BatchOutput]()
        while True:
            before, error = _Moment(trainer), None
            try:
                with trainer._unwrapped_model() if trainer.ranks.world_size > 1 else nullcontext():
                    outputs = self._attempt(loaded)
            except (StopTrainingError, NonFiniteLossError):
                raise
            except Exception as failure:
                error = failure
            outcome, largest = self._agree(error, loaded)
            if outcome == _DONE:
                before.add_gradients()
                output = _merge(outputs)
                trainer._track_step(output, loaded)
                return output
            before.restore()
            if outcome == _OUT_OF_MEMORY:
                if error is not None:
                    traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
                self._split_further(largest)
            else:
                self._skip(loaded, error)
                return None

    def _attempt(self, loaded: LoadedBatch) -> list[BatchOutput]:
        """Go forward and backward with each part of a batch. What a part needs is freed before the next."""
        trainer, window = self._trainer, self._trainer.gradient_window
        assert window is not None
        if isinstance(loaded.batch, FailedRead):
            raise loaded.batch.error
        parts: Sequence[tuple[Any, int | None]] = [(loaded.batch, loaded.num_samples)]
        if trainer.num_microbatches > 1 and loaded.num_samples != 0:
            whole = batch_size_of(loaded.batch, loaded.num_samples)
            parts = split_batch(loaded.batch, trainer.num_microbatches, whole)
        window.is_split = trainer.num_microbatches > 1
        outputs, step = list[BatchOutput](), trainer.progress.step
        for part, size in parts:
            trainer._loaded = loaded._replace(batch=part, num_samples=size)
            output = trainer.calculate_train_batch_loss(part)
            trainer._complete_output(output, part, "calculate_train_batch_loss", training=True)
            own = loaded.num_samples if loaded.num_samples is not None and len(parts) == 1 else output["batch_size"]
            total = own if loaded.total_samples is None else 0 if outputs else loaded.total_samples
            loss = window.scale(output["loss"], own, total, output.get("num_items_in_batch"))
            trainer._call_event("on_backward_start", batch=part, batch_output=output, step=step)
            trainer.backward_step(loss)
            trainer._call_event("on_backward_end", batch=part, batch_output=output, step=step)
            outputs.append(output if len(parts) == 1 else _detached(output))
        trainer._loaded = loaded
        return outputs

    def _agree(self, error: Exception | None, loaded: LoadedBatch) -> tuple[int, int]:
        """Return how the step went, the same on every process, and the samples of the largest batch."""
        trainer, outcome, size = self._trainer, _DONE, 0
        if self._splits and not isinstance(loaded.batch, FailedRead):
            size = batch_size_of(loaded.batch, loaded.num_samples or None)
        if error is not None:
            if self._splits and is_out_of_memory(error):
                outcome = _OUT_OF_MEMORY
            elif self._skips:
                outcome = _FAILED
            else:
                raise error
        worst, largest = map(int, trainer.ranks.max([outcome, size]))
        if worst == _OUT_OF_MEMORY and trainer.num_microbatches >= largest:
            if not self._skips:
                raise error or RuntimeError("Another process ran out of memory with a single sample.")
            worst = _FAILED
        return worst, largest

    def _split_further(self, largest: int) -> None:
        trainer = self._trainer
        clear_device_cache(garbage_collection=True)
        samples = -(-largest // trainer.num_microbatches)
        trainer.num_microbatches = min(2 * trainer.num_microbatches, largest)
        trainer.print(
            f"Out of memory with {samples} samples: from now on each batch is split into {trainer.num_microbatches} "
            "micro-batches. The gradients are still those of the whole batch."
        )

    def _skip(self, loaded: LoadedBatch, error: Exception | None) -> None:
        trainer, mine = self._trainer, None
        if error is not None:
            mine = BatchFailure(trainer.ranks.rank, trainer.batch_indices, f"{type(error).__name__}: {error}")
        failures = [failure for failure in trainer.ranks.all_gather_object(mine) if failure is not None]
        total = loaded.total_samples
        trainer.progress.add_samples(find_batch_size(loaded.batch) if total is None else total)
        trainer._call_event("on_train_batch_skipped", failures=failures, error=error, step=trainer.progress.step)

    def finish_window(self) -> None:
        """Average the gradients of the window over the processes."""
        if self._trainer.ranks.world_size > 1:
            average_gradients(_parameters(self._trainer), self._trainer.ranks)


class _Moment:
    """What a step changes besides what it returns: gradients, buffers, generators, the counts of the window."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.gradient_window is not None
        self._window = trainer.gradient_window
        self._counts = self._window.counts
        self._generators = generator_states()
        self._buffers = [(buffer, buffer.clone()) for buffer in trainer.get_model().buffers()]
        self._held = [(parameter, parameter.grad) for parameter in _parameters(trainer)]
        for parameter, _ in self._held:
            parameter.grad = None

    def add_gradients(self) -> None:
        """Add the gradients of the step to those that the window had before."""
        for parameter, gradient in self._held:
            if gradient is not None:
                if parameter.grad is not None:
                    gradient.add_(parameter.grad)
                parameter.grad = gradient

    def restore(self) -> None:
        """Undo the step."""
        self._window.counts = self._counts
        set_generator_states(self._generators)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for parameter, gradient in self._held:
            parameter.grad = gradient


def _parameters(trainer: Trainer) -> list[nn.Parameter]:
    """Return what gets gradients: the parameters of the model, and those of the optimizer that are not its own."""
    return list(dict.fromkeys([*trainer.get_model().parameters(), *optimized_parameters(trainer.optimizer)]))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there was not enough memory, on the device or the host."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or should_reduce_batch_size(error)


def _detached(value: Any) -> Any:
    return recursively_apply(torch.Tensor.detach, value)


def _merge(outputs: list[BatchOutput]) -> BatchOutput:
    """Return what a step with the whole batch would have returned."""
    if len(outputs) == 1:
        return outputs[0]
    counted = "num_items_in_batch" if "num_items_in_batch" in outputs[0] else "batch_size"
    total = sum(output[counted] for output in outputs)
    merged: BatchOutput = {}
    for key in outputs[0]:
        values = [output[key] for output in outputs]
        if key in ("batch_size", "num_items_in_batch"):
            merged[key] = sum(values)
        elif key == "loss":
            merged[key] = sum(output["loss"] * (output[counted] / total) for output in outputs)
        elif key == "losses":
            merged[key] = {
                name: sum(o["losses"][name] * (o[counted] / total) for o in outputs if name in o.get("losses", ()))
                for name in {name: None for losses in values for name in losses or ()}
            }
        else:
            merged[key] = concatenate_if_possible(values)
    return merged
