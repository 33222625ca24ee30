"""Evaluations and predictions in which batches may fail: skipping them, and splitting those that do not fit."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from accelerate.utils.memory import clear_device_cache

from pytorch_accel_lite.data import FailedRead
from pytorch_accel_lite.extending import (
    SKIPPED,
    Batch,
    BatchOutput,
    InferenceStep,
    Run,
    SkippedBatches,
    SkippedStep,
    Snapshot,
    TrainerLike,
)
from pytorch_accel_lite.extension_tools.data_and_batches import infer_batch_size, list_samples
from pytorch_accel_lite.extension_tools.modules_and_devices import is_out_of_memory
from pytorch_accel_lite.extension_tools.plain_types import Tree
from pytorch_accel_lite.extension_tools.runs_and_steps import add_error_notes, replaced
from pytorch_accel_lite.extensions.batch_parts import merge_outputs, split_into_parts
from pytorch_accel_lite.extensions.failed_batches.failures import NEVER_SKIPPED, describe_failure

#: Returns the output of a batch, or of a part of it.
ComputeBatch: TypeAlias = Callable[[Batch], Tree]

_MOST_BATCHES = 8  # number of batches that the report lists


@dataclass(eq=False, repr=False)
class EvalParts:
    """Into how many parts a process splits its evaluation batches.

    Attributes:
        number: as many as were needed for a batch so far
    """

    number: int = 1


class GuardedInference(InferenceStep):
    """Skips batches that fail, on each process separately, and computes those that do not fit into memory in parts.

    Attributes:
        parts: the number of parts of each evaluation batch of this process; that of the outer run, if it has one

    Raises:
        ValueError: if batches are to be skipped that several processes compute together
    """

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        what = "sharded weights" if trainer.is_sharded else trainer.division.argument
        if run.skipped is not None and what:
            raise ValueError(
                f"SkipFailedBatchesCallback(phases=...) with {run.skipped.phase!r} does not work with {what}: no "
                "process can skip a batch that others compute with it."
            )
        outer = None if run.outer is None else run.outer.inference_step
        self.parts: EvalParts = outer.parts if isinstance(outer, GuardedInference) else EvalParts()

    def compute(self, trainer: TrainerLike, run: Run, batch: Batch, compute: ComputeBatch) -> Tree:
        """Return the output of a batch, or ``SKIPPED`` if it has failed and is skipped."""
        skipped = run.skipped
        if skipped is None:
            return self._compute_in_parts(trainer, run, batch, compute)
        before = _before_step(run)
        try:
            if isinstance(batch.data, FailedRead):
                raise batch.data.error
            if run.request.auto_microbatch and skipped.phase == "evaluation":
                output = self._compute_in_parts(trainer, run, batch, compute)
            else:
                output = compute(batch)
        except Exception as error:
            _skip(trainer, run, batch, error, before)
            return SKIPPED
        skipped.last_computed = batch
        return output

    def report(self, trainer: TrainerLike, run: Run) -> None:
        """Gather the batches that all processes have skipped, and report them in a line.

        Raises:
            RuntimeError: on all processes, if every batch has failed
        """
        skipped = run.skipped
        if skipped is None:
            return
        gathered = run.ranks.all_gather_object((skipped.batches, skipped.last_computed is not None))
        skipped.last_computed = None  # frees the batch
        skipped.batches = list(chain.from_iterable(batches for batches, _ in gathered))
        skipped.is_gathered = True
        if not skipped.batches:
            return
        name = run.data.eval_dataset_name
        where = skipped.phase + (f" on {name!r}" if name else "")
        error = f"First error: {_first_line(skipped.batches[0].failure['error'])}"
        if not any(has_computed for _, has_computed in gathered):
            raise RuntimeError(f"All batches of the {where} failed: {_describe(trainer, skipped)}. {error}") from (
                skipped.first_error
            )
        trainer.print(f"Skipped in the {where}: {_describe(trainer, skipped)}. {error}")

    def _compute_in_parts(self, trainer: TrainerLike, run: Run, batch: Batch, compute: ComputeBatch) -> BatchOutput:
        """Return the output of an evaluation batch, computed in parts that fit into memory.

        Processes do not wait for one another in evaluation, so each splits its own batches. A part that does not fit is
        split further, and so are later parts. Earlier parts are not computed again.
        """
        outputs: list[BatchOutput] = []
        whole = batch._replace(num_samples=None) if batch.is_filler else batch
        left = split_into_parts(whole, self.parts.number)
        while left:
            part = left.pop(0)
            # The parts of a filler batch are fillers, too.
            with replaced(run, batch=part._replace(num_samples=0) if batch.is_filler else part):
                output = _compute_if_it_fits(trainer, run, compute)
            if output is not None:
                outputs.append(output)
                continue
            clear_device_cache(garbage_collection=True)
            left = [half for larger in (part, *left) for half in split_into_parts(larger, 2)]
            samples, size = (infer_batch_size(each.data, each.num_samples) for each in (part, whole))
            self.parts.number = max(self.parts.number, -(-size // -(-samples // 2)))
            trainer.print(
                f"Out of memory with {samples} samples in evaluation: from now on each evaluation batch is split into "
                f"{self.parts.number} parts. Losses and metrics are still those of the whole batch."
            )
        return merge_outputs(outputs)


def _before_step(run: Run) -> Snapshot:
    """Save the state that a failing step may change: logged values and random generators."""
    before = Snapshot()
    before.keep_states([run.loss_trackers])
    before.keep_generators()
    return before


def _skip(trainer: TrainerLike, run: Run, batch: Batch, error: Exception, before: Snapshot) -> None:
    """Skip a batch whose step has failed, or raise the error if the batch is not the cause."""
    if batch.is_filler or isinstance(error, NEVER_SKIPPED):
        raise error
    before.close()
    skipped, step = run.skipped, run.batch_number or 0
    assert skipped is not None
    add_error_notes(error, trainer, run, skipped.phase)
    failure = describe_failure(run, error)
    skipped.batches.append(SkippedStep(failure, step, _count_samples(batch)))
    skipped.first_error = skipped.first_error or error
    event = "on_eval_batch_skipped" if skipped.phase == "evaluation" else "on_predict_batch_skipped"
    trainer.call_event(event, failures=[failure], error=error, step=step)
    if not isinstance(batch.data, FailedRead):  # the frames of a failed read are still in use
        traceback.clear_frames(error.__traceback__)  # its frames hold the tensors of the step


def _compute_if_it_fits(trainer: TrainerLike, run: Run, compute: ComputeBatch) -> BatchOutput | None:
    """Return the output of the current evaluation batch; ``None``, with the state restored, if it must be split."""
    batch = run.batch
    assert batch is not None
    before = _before_step(run)
    try:
        output: BatchOutput = compute(batch)
    except Exception as error:
        if infer_batch_size(batch.data, batch.num_samples or None) < 2 or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # its frames hold the tensors of the attempt
        before.close()
        return None
    run.loss_trackers.note_batch_size(batch, output["batch_size"])
    return output


def _describe(trainer: TrainerLike, skipped: SkippedBatches) -> str:
    """Return the number of samples skipped, and their indices, if these are known."""
    batches = skipped.batches
    numbers = [batch.samples for batch in batches if batch.samples is not None]
    samples = sum(numbers)
    count = f"{samples} sample{'s' * (samples != 1)}, " if len(numbers) == len(batches) else ""
    shown = []
    for batch in batches[:_MOST_BATCHES]:
        rank, indices = batch.failure["rank"], batch.failure["indices"]
        process = f" of process {rank}" if trainer.ranks.world_size > 1 else ""
        shown.append(f"step {batch.step}{process}" + (f" ({list_samples(indices)})" if indices else ""))
    return f"{count}{', '.join(shown)}" + (f" and {len(batches) - len(shown)} more" * (len(batches) > len(shown)))


def _first_line(error: str) -> str:
    """Return the type and the first line of an error; for an error in a worker process, without the traceback."""
    name, lines = error.partition(":")[0], error.splitlines()
    return next(line for line in reversed(lines) if line.startswith(name))


def _count_samples(batch: Batch) -> int | None:
    if batch.num_samples is not None:
        return batch.num_samples
    with suppress(Exception):  # the step may have failed for the same reason
        return infer_batch_size(batch.data)
    return None
