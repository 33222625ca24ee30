"""Counting the floating point operations of a step."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import NamedTuple

import torch

from pytorch_accel_lite.data import FailedRead
from pytorch_accel_lite.extending import Batch, TrainerLike
from pytorch_accel_lite.extension_tools.data_and_batches import infer_batch_size
from pytorch_accel_lite.extension_tools.modules_and_devices import is_out_of_memory
from pytorch_accel_lite.extension_tools.runs_and_steps import leaving_no_trace, loss_of, replaced, unwrapped_model
from pytorch_accel_lite.extensions.batch_parts import split_into_parts


class CountedFlops(NamedTuple):
    """The FLOPs that a process has counted, or the reason why it could not.

    Args:
        flops: the FLOPs of a forward and a backward pass
        samples: the number of samples in these passes
        failure: type and text of an error
        is_out_of_memory: whether memory ran out
    """

    flops: int = 0
    samples: int = 0
    failure: str = ""
    is_out_of_memory: bool = False


def try_counting_flops(trainer: TrainerLike) -> CountedFlops:
    """Count the FLOPs of both passes on the current batch, or its first part, in a trial that leaves no trace."""
    run = trainer.current_run
    if run.batch is None or run.batch.is_filler or isinstance(run.batch.data, FailedRead):
        return CountedFlops()
    flops = 0
    try:
        part = split_into_parts(run.batch, run.training_step.num_microbatches)[0]
        with replaced(run, batch=part), leaving_no_trace(trainer):
            flops = _count(trainer, part)
        return CountedFlops(flops, infer_batch_size(part.data, part.num_samples))
    except Exception as error:  # unless the counter caused it, the step itself will fail as well
        return CountedFlops(flops, 0, f"{type(error).__name__}: {error}", is_out_of_memory(error))


def _count(trainer: TrainerLike, batch: Batch) -> int:
    """Return the FLOPs of a forward and a backward pass on a batch, without compiled code."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, so not at the top

    has_compiled = "torch._dynamo" in sys.modules  # importing it takes a second
    eager = torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()
    counter = FlopCounterMode(display=False)
    with eager, replaced(trainer, compiled_forward=None), unwrapped_model(trainer), counter:
        trainer.backward_step(loss_of(trainer, batch))
    return int(counter.get_total_flops())
