"""Training steps that may fail: skipping bad batches, and splitting batches until they fit into memory."""

from __future__ import annotations

import traceback
from contextlib import nullcontext

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
    PlainStep,
    Run,
    StepSnapshot,
    TrainerLike,
    backward,
)
from pytorch_accel_lite.extending_callbacks import StateDict, sync_ddp_buffers
from pytorch_accel_lite.extending_tools import (
    as_returned,
    infer_batch_size,
    is_out_of_memory,
    merge_outputs,
    split_into_parts,
    unwrapped_model,
)
from pytorch_accel_lite.extensions.failed_batches.failures import NEVER_SKIPPED, describe_failure

DONE, OUT_OF_MEMORY, FAILED = range(3)
_NOT_UNDONE = Conflict(SHARDED, "a step that fails on one process cannot be undone")


class GuardedStep(PlainStep):
    """A step that, if it fails on any process, is undone on all, and then skipped or repeated in smaller parts.

    With several processes, nothing is communicated until each process has reported its outcome: the step calls the
    module inside ``DistributedDataParallel``, and gradients are averaged at the end of the window.
    """

    features = (MICROBATCHES.with_conflicts(_NOT_UNDONE), SKIPPED_BATCHES.with_conflicts(_NOT_UNDONE))

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        self.num_microbatches = 1
        run.window.is_guarded = run.ranks.world_size > 1

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass on a batch, or undo it."""
        while True:
            before = StepSnapshot(trainer)
            counted = run.window.counted
            self.averaged = list(before.gradients)
            outputs: list[BatchOutput] = []
            returned: list[BatchOutput] = []
            error = None
            try:
                sync_ddp_buffers(trainer.model, run.ranks)
                with unwrapped_model(trainer) if run.ranks.world_size > 1 else nullcontext():
                    outputs = self._attempt(trainer, run, batch, returned)
            except NEVER_SKIPPED:
                raise
            except Exception as failure:
                error = failure
            outcome, largest = self._agree(trainer, run, batch, error)
            if outcome == DONE:
                before.add_gradients()
                output = merge_outputs(outputs)
                run.loss_trackers.note_batch_size(batch, output["batch_size"])
                run.count_step(output if returned[0] is outputs[0] else merge_outputs(returned), batch)
                return output
            before.close()
            run.window.counted = counted
            if outcome == FAILED:
                skip_batch(trainer, run, batch, error)
                return None
            if error is not None:
                traceback.clear_frames(error.__traceback__)  # the frames hold tensors of the attempt
            self._split_further(trainer, largest)

    def _attempt(self, trainer: TrainerLike, run: Run, batch: Batch, returned: list[BatchOutput]) -> list[BatchOutput]:
        """Run the forward and backward pass on each part of a batch, freeing each part's memory before the next.

        Args:
            returned: a list to which the recorded output of each part is added
        """
        if isinstance(batch.data, FailedRead):
            raise batch.data.error
        outputs: list[BatchOutput] = []
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
        return outputs

    def _agree(self, trainer: TrainerLike, run: Run, batch: Batch, error: Exception | None) -> tuple[int, int]:
        """Return the outcome of the step, the same on every process, and the number of samples in the largest batch."""
        splits = run.request.auto_microbatch
        skips = run.request.skips_failed_batches
        outcome = DONE
        size = 0
        if splits and not isinstance(batch.data, FailedRead):
            size = infer_batch_size(batch.data, batch.num_samples or None)
        if error is not None:
            if splits and is_out_of_memory(error):
                outcome = OUT_OF_MEMORY
            elif skips:
                outcome = FAILED
            else:
                raise error
        worst, largest = map(int, run.ranks.max([outcome, size]))
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


def skip_batch(trainer: TrainerLike, run: Run, batch: Batch, error: Exception | None) -> None:
    """Count the samples of a skipped batch, and report the failures of all processes."""
    own = None if error is None else describe_failure(run, error)
    failures = [failure for failure in run.ranks.all_gather_object(own) if failure is not None]
    total = batch.total_samples
    run.progress.add_samples(infer_batch_size(batch.data) if total is None else total)
    trainer.call_event("on_train_batch_skipped", failures=failures, error=error, step=run.progress.step)
