"""Steps that may fail: batches that are skipped, and batches that are split until they fit into memory."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from pytorch_accel_lite.batches import BatchOutput, concatenate_if_possible, find_batch_size, split_batch
from pytorch_accel_lite.data import Batch, FailedRead
from pytorch_accel_lite.distributed.prepared import sync_ddp_buffers
from pytorch_accel_lite.events import NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.gradients import average_gradients, optimized_parameters
from pytorch_accel_lite.loops.evaluation import unwrapped_model
from pytorch_accel_lite.loops.training import backward, forward
from pytorch_accel_lite.randomness import capture_generators, restore_generators
from pytorch_accel_lite.run import Run

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

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


class GuardedStep:
    """Goes forward and backward with a batch so that a failure leaves no trace and all processes learn of it.

    On several processes a guarded step does not communicate before each has said how it went: the module inside
    ``DistributedDataParallel`` is used, and the gradients are averaged here, at the end of the window.

    :param splits: split batches that do not fit into memory
    :param skips: leave out batches that fail otherwise
    """

    def __init__(self, splits: bool, skips: bool) -> None:
        self._splits = splits
        self._skips = skips

    def run(self, trainer: Trainer, run: Run, batch: Batch) -> BatchOutput | None:
        """Add the gradients of a batch, and return the outputs of the step; ``None`` when the batch is skipped."""
        outputs: list[BatchOutput] = []
        while True:
            before = StepSnapshot(trainer, run)
            error = None
            try:
                sync_ddp_buffers(trainer.model, trainer.ranks)
                with unwrapped_model(trainer) if trainer.ranks.world_size > 1 else nullcontext():
                    outputs = self._attempt(trainer, run, batch)
            except (StopTrainingError, NonFiniteLossError):
                raise
            except Exception as failure:
                error = failure
            outcome, largest = self._agree(trainer, run, batch, error)
            if outcome == _DONE:
                before.add_gradients()
                output = _merge(outputs)
                run.track_step(output, batch)
                return output
            before.restore()
            if outcome == _OUT_OF_MEMORY:
                if error is not None:
                    traceback.clear_frames(error.__traceback__)  # they hold the tensors of the attempt
                self._split_further(trainer, run, largest)
            else:
                self._skip(trainer, run, batch, error)
                return None

    def _attempt(self, trainer: Trainer, run: Run, batch: Batch) -> list[BatchOutput]:
        """Go forward and backward with each part of a batch. What a part needs is freed before the next."""
        if isinstance(batch.data, FailedRead):
            raise batch.data.error
        outputs: list[BatchOutput] = []
        run.window.is_split = run.num_microbatches > 1
        parts = _split(batch, run.num_microbatches)
        try:
            for part in parts:
                run.batch = part
                output = forward(trainer, part)
                backward(trainer, run, part, output, *part.samples(output))
                outputs.append(output if len(parts) == 1 else _detached(output))
        finally:
            run.batch = batch
        return outputs

    def _agree(self, trainer: Trainer, run: Run, batch: Batch, error: Exception | None) -> tuple[int, int]:
        """Return how the step went, the same on every process, and the samples of the largest batch."""
        outcome = _DONE
        size = 0
        if self._splits and not isinstance(batch.data, FailedRead):
            size = find_batch_size(batch.data, batch.num_samples or None)
        if error is not None:
            if self._splits and is_out_of_memory(error):
                outcome = _OUT_OF_MEMORY
            elif self._skips:
                outcome = _FAILED
            else:
                raise error
        worst, largest = map(int, trainer.ranks.max([outcome, size]))
        if worst == _OUT_OF_MEMORY and run.num_microbatches >= largest:
            if not self._skips:
                raise error or RuntimeError("Another process ran out of memory with a single sample.")
            worst = _FAILED
        return worst, largest

    @staticmethod
    def _split_further(trainer: Trainer, run: Run, largest: int) -> None:
        clear_device_cache(garbage_collection=True)
        samples = -(-largest // run.num_microbatches)
        run.num_microbatches = min(2 * run.num_microbatches, largest)
        trainer.print(
            f"Out of memory with {samples} samples: from now on each batch is split into {run.num_microbatches} "
            "micro-batches. The gradients are still those of the whole batch."
        )

    @staticmethod
    def _skip(trainer: Trainer, run: Run, batch: Batch, error: Exception | None) -> None:
        mine = None
        if error is not None:
            mine = BatchFailure(trainer.ranks.rank, run.batch_indices, f"{type(error).__name__}: {error}")
        failures = [failure for failure in trainer.ranks.all_gather_object(mine) if failure is not None]
        total = batch.total_samples
        run.progress.add_samples(find_batch_size(batch.data) if total is None else total)
        trainer.call_event("on_train_batch_skipped", failures=failures, error=error, step=run.progress.step)

    @staticmethod
    def finish_window(trainer: Trainer) -> None:
        """Average the gradients of the window over the processes."""
        if trainer.ranks.world_size > 1:
            average_gradients(_parameters(trainer), trainer.ranks)


def check_guard(accelerator: Accelerator, is_sharded: bool) -> None:
    """Raise an error where a step that has failed cannot be taken back."""
    if is_sharded:
        raise ValueError(
            "auto_microbatch=True and SkipFailedBatchesCallback do not work with weights that are sharded by "
            f"{accelerator.distributed_type.value}: a step that fails on one process cannot be taken back."
        )


def _split(batch: Batch, parts: int) -> list[Batch]:
    """Return the parts of a batch, which are counted in the window like the whole."""
    if parts <= 1 or batch.num_samples == 0:
        return [batch]
    whole = find_batch_size(batch.data, batch.num_samples)
    total = batch.total_samples
    indices = batch.indices
    begin = 0
    pieces = list[Batch]()
    for data, size in split_batch(batch.data, parts, whole):
        part = batch._replace(
            data=data,
            num_samples=None if batch.num_samples is None else size,
            total_samples=0 if total is not None and pieces else total,
            indices=None if indices is None else indices[begin : begin + size],
        )
        pieces.append(part)
        begin += size
    return pieces


class StepSnapshot:
    """What a step changes besides what it returns: gradients, buffers, generators, the sizes of the window."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._window = run.window
        self._counted = self._window.sizes, self._window.items_per_batch
        self._generators = capture_generators()
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
        self._window.sizes, self._window.items_per_batch = self._counted
        restore_generators(self._generators)
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
