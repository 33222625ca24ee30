"""Training steps that may fail: skipping bad batches, and splitting batches until they fit into memory."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from accelerate.utils import recursively_apply
from accelerate.utils.memory import clear_device_cache

from pytorch_accel_lite.data import FailedRead
from pytorch_accel_lite.extending import (
    MICROBATCHES,
    SHARDED,
    SKIPPED_BATCHES,
    Batch,
    BatchOutput,
    Conflict,
    OtherCallError,
    PlainStep,
    ProcessLostError,
    Run,
    StepSnapshot,
    StopTrainingError,
    TrainerLike,
    backward,
)
from pytorch_accel_lite.extension_tools.data_and_batches import infer_batch_size
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Failure
from pytorch_accel_lite.extension_tools.modules_and_devices import is_out_of_memory
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import WindowCounts, sync_ddp_buffers
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.runs_and_steps import unwrapped_model
from pytorch_accel_lite.extensions.batch_parts import as_returned, merge_outputs, split_into_parts
from pytorch_accel_lite.extensions.failed_batches.failures import NEVER_SKIPPED, describe_failure

#: How a step ends on a process, from good to bad. The worst counts: a fatal error is raised on all processes.
DONE, OUT_OF_MEMORY, FAILED, FATAL = range(4)
#: Errors raised at once: the other processes raise them, too, or find that this one has gone on to another call.
_RAISED_AT_ONCE = (StopTrainingError, OtherCallError, ProcessLostError)
_NOT_UNDONE = Conflict(SHARDED, "a step that fails on one process cannot be undone")


@dataclass(eq=False, repr=False)
class _Attempt:
    """A forward and backward pass on a batch.

    Attributes:
        counted: what the window had counted before it
        size: the number of samples in the batch, if it may be split
        before: the state from before it, once that is known
        error: the error of this process
        output: the output, if there is no error
        recorded: the output as it was returned, for recording
    """

    counted: WindowCounts
    size: int = 0
    before: StepSnapshot | None = None
    error: Exception | None = None
    output: BatchOutput = field(init=False)
    recorded: BatchOutput = field(init=False)


class GuardedStep(PlainStep):
    """A step that, if it fails on any process, is undone on all, and then skipped or repeated in smaller parts.

    With several processes, nothing is communicated until each process has reported its outcome: the step calls the
    module inside ``DistributedDataParallel``, and gradients are averaged at the end of the window. A process reports an
    error that ends the run, too: it raises this error, and the others raise one that names the process.
    """

    features = (MICROBATCHES.with_conflicts(_NOT_UNDONE), SKIPPED_BATCHES.with_conflicts(_NOT_UNDONE))

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        self.num_microbatches = 1
        self._last_good: Batch | None = None  # whose data fillers may repeat
        run.window.is_guarded = run.ranks.world_size > 1

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass on a batch, or undo it.

        Raises:
            RuntimeError: if another process has failed, and the step is neither skipped nor repeated
        """
        repeats = batch.indices is None and run.ranks.world_size > 1 and run.request.skips_failed_batches
        if repeats and batch.is_filler and self._last_good is not None:
            run.batch = batch = batch._replace(data=self._last_good.data)  # the batch that it repeats may have failed
        while True:
            attempt = self._attempt(trainer, run, batch)
            outcome, largest = self._agree(run, attempt)
            assert attempt.before is not None
            if outcome == DONE:
                attempt.before.add_gradients()
                output = attempt.output
                run.loss_trackers.note_batch_size(batch, output["batch_size"])
                run.count_step(attempt.recorded, batch)
                self._last_good = batch if repeats else None
                return output
            error, skipped = attempt.error, batch if outcome == FAILED else None
            failures = run.ranks.run_together(partial(_undo, run, attempt, skipped))
            if skipped is not None:
                failed = [failure for failure in failures if failure is not None]
                trainer.call_event("on_train_batch_skipped", failures=failed, error=error, step=run.progress.step)
                return None
            if error is not None:
                traceback.clear_frames(error.__traceback__)  # the frames hold tensors of the attempt
            del attempt, error  # another process may have failed: frees the outputs of this one
            self._split_further(trainer, largest)

    def _attempt(self, trainer: TrainerLike, run: Run, batch: Batch) -> _Attempt:
        """Run the forward and backward pass on a batch, and note its error, if any."""
        attempt = _Attempt(run.window.counted)
        try:
            sync_ddp_buffers(trainer.model, run.ranks)  # first: no process may fail before this collective
            if run.request.auto_microbatch and not isinstance(batch.data, FailedRead):
                attempt.size = infer_batch_size(batch.data, batch.num_samples or None)
            attempt.before = StepSnapshot(trainer)
            self.averaged = list(attempt.before.gradients)
            with unwrapped_model(trainer) if run.ranks.world_size > 1 else nullcontext():
                attempt.output, attempt.recorded = self._compute(trainer, run, batch)
        except _RAISED_AT_ONCE:
            raise
        except Exception as error:
            attempt.error = error
        return attempt

    def _compute(self, trainer: TrainerLike, run: Run, batch: Batch) -> tuple[BatchOutput, BatchOutput]:
        """Run the forward and backward pass on each part of a batch, freeing each part's memory before the next.

        Returns:
            the merged output of the parts, and the same as it was returned, for recording
        """
        if isinstance(batch.data, FailedRead):
            raise batch.data.error
        outputs: list[BatchOutput] = []
        returned: list[BatchOutput] = []
        run.window.is_split = self.num_microbatches > 1
        parts = split_into_parts(batch, self.num_microbatches)
        try:
            for part in parts:
                run.batch = part
                output = self.forward(trainer, run, part)
                kept = as_returned(trainer, output)
                backward(trainer, part, output, *part.samples(output), run.window, trainer.backward_step)
                outputs.append(output if len(parts) == 1 else recursively_apply(torch.Tensor.detach, output))
                returned.append(outputs[-1] if kept is output else kept)
        finally:
            run.batch = batch
        merged = merge_outputs(outputs)
        return merged, merged if returned[0] is outputs[0] else merge_outputs(returned)

    def _agree(self, run: Run, attempt: _Attempt) -> tuple[int, int]:
        """Return the outcome of the step, the same on every process, and the number of samples in the largest batch.

        Raises:
            RuntimeError: if the error of another process is fatal; it names that process, which raises its own error
        """
        skips = run.request.skips_failed_batches
        outcome, error = DONE, attempt.error
        if error is not None:
            if attempt.before is None or isinstance(error, NEVER_SKIPPED):
                outcome = FATAL
            elif run.request.auto_microbatch and is_out_of_memory(error):
                outcome = OUT_OF_MEMORY
            else:
                outcome = FAILED if skips else FATAL
        worst, largest = map(int, run.ranks.max([outcome, attempt.size]))
        if worst == FATAL:
            run.ranks.run_together(partial(_raise, error if outcome == FATAL else None))
        if worst == OUT_OF_MEMORY and self.num_microbatches >= largest:
            if not skips:
                raise error or RuntimeError("Another process ran out of memory with a single sample.")
            worst = FAILED
        return worst, largest

    def _split_further(self, trainer: TrainerLike, largest: int) -> None:
        """Split batches into twice as many parts from now on, and free the memory of the last attempt."""
        clear_device_cache(garbage_collection=True)
        samples = -(-largest // self.num_microbatches)
        self.num_microbatches = min(2 * self.num_microbatches, largest)
        trainer.print(
            f"Out of memory with {samples} samples: from now on each batch is split into {self.num_microbatches} "
            "micro-batches. The gradients are still those of the whole batch."
        )

    def state_dict(self) -> StateDict:
        """Also return the number of parts into which batches are split."""
        return {**super().state_dict(), "microbatches": self.num_microbatches}

    def load_state_dict(self, state: StateDict) -> None:
        """Also restore the number of parts into which batches are split."""
        super().load_state_dict(state)
        self.num_microbatches = state.get("microbatches", 1)


def _undo(run: Run, attempt: _Attempt, skipped: Batch | None) -> Failure | None:
    """Restore the state from before an attempt, count the samples of a skipped batch, and return the failure, if any.

    Args:
        skipped: the batch, if it is skipped
    """
    assert attempt.before is not None
    attempt.before.close()
    run.window.counted = attempt.counted
    if skipped is not None:
        total = skipped.total_samples
        run.progress.add_samples(infer_batch_size(skipped.data) if total is None else total)
    return None if attempt.error is None else describe_failure(run, attempt.error)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
