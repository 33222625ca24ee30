"""Skipping failed batches in an evaluation or a prediction, on each process separately."""

from __future__ import annotations

import traceback
from contextlib import suppress
from itertools import chain

from pytorch_accel_lite.data import FailedRead
from pytorch_accel_lite.data.batches import Batch, infer_batch_size
from pytorch_accel_lite.distributed.exchange import OtherCallError
from pytorch_accel_lite.distributed.lost_processes import ProcessLostError
from pytorch_accel_lite.loop.guards.explanations import explain, list_samples
from pytorch_accel_lite.loop.snapshot import Snapshot
from pytorch_accel_lite.run.events import Failure, NonFiniteLossError, StopTrainingError
from pytorch_accel_lite.run.parts import SkippedBatches, SkippedStep
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import Run, TrainerLike

#: Errors that end a run whatever it skips: a batch is not their cause.
NEVER_SKIPPED = (StopTrainingError, NonFiniteLossError, OtherCallError, ProcessLostError)
SKIPPED = object()  # stands for the output of a batch that was skipped
_MOST_BATCHES = 8  # number of batches that the report lists


def prepare_skipping(trainer: TrainerLike, run: Run, request: RunRequest) -> None:
    """Prepare a run to skip batches that fail in its evaluations or its prediction, if that is requested.

    Raises:
        ValueError: if the processes compute each batch together
    """
    is_prediction = request.kind == "prediction"
    run.skipped = None
    if not (request.skips_in_prediction if is_prediction else request.skips_in_evaluation):
        return
    run.skipped = SkippedBatches("prediction" if is_prediction else "evaluation")
    what = "sharded weights" if trainer.is_sharded else trainer.division.argument
    if what:
        raise ValueError(
            f"SkipFailedBatchesCallback(phases=...) with {run.skipped.phase!r} does not work with {what}: no process "
            "can skip a batch that others compute with it."
        )


def before_step(run: Run) -> Snapshot:
    """Keep the state that a step may change before it fails: logged values and random generators."""
    before = Snapshot()
    before.keep_states([run.loss_trackers])
    before.keep_generators()
    return before


def describe_failure(run: Run, error: Exception) -> Failure:
    """Return what callbacks are told of a batch that has failed on this process."""
    return {"rank": run.ranks.rank, "indices": run.batch_indices, "error": f"{type(error).__name__}: {error}"}


def skip_failed_batch(trainer: TrainerLike, run: Run, batch: Batch, error: Exception, before: Snapshot) -> None:
    """Skip a batch whose step has failed, or raise the error if the batch is not the cause."""
    if batch.is_filler or isinstance(error, NEVER_SKIPPED):
        raise error
    before.close()
    skipped, step = run.skipped, run.batch_number or 0
    assert skipped is not None
    explain(error, trainer, run, skipped.phase)
    failure = describe_failure(run, error)
    skipped.batches.append(SkippedStep(failure, step, _count_samples(batch)))
    skipped.first_error = skipped.first_error or error
    event = "on_eval_batch_skipped" if skipped.phase == "evaluation" else "on_predict_batch_skipped"
    trainer.call_event(event, failures=[failure], error=error, step=step)
    if not isinstance(batch.data, FailedRead):  # the frames of a failed read are still in use
        traceback.clear_frames(error.__traceback__)  # its frames hold the tensors of the step


def report_skipped(trainer: TrainerLike, run: Run) -> None:
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
    error = f"First error: {_in_a_line(skipped.batches[0].failure['error'])}"
    if not any(has_computed for _, has_computed in gathered):
        raise RuntimeError(f"All batches of the {where} failed: {_describe(trainer, skipped)}. {error}") from (
            skipped.first_error
        )
    trainer.print(f"Skipped in the {where}: {_describe(trainer, skipped)}. {error}")


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


def _in_a_line(error: str) -> str:
    """Return the type and the first line of an error; for an error in a worker process, without the traceback."""
    name, lines = error.partition(":")[0], error.splitlines()
    return next(line for line in reversed(lines) if line.startswith(name))


def _count_samples(batch: Batch) -> int | None:
    if batch.num_samples is not None:
        return batch.num_samples
    with suppress(Exception):  # the step may have failed for the same reason
        return infer_batch_size(batch.data)
    return None
