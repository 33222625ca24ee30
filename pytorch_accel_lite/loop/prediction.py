"""Prediction: the model's outputs for a dataset, in the order of the dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.machine import is_asynchronous, record_event
from pytorch_accel_lite.base.modules import evaluation_mode
from pytorch_accel_lite.base.nested_values import parts_in, tensors_in
from pytorch_accel_lite.base.random_generators import capture_generators, restore_generators
from pytorch_accel_lite.base.types import StateDict, Tree
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch, infer_batch_size
from pytorch_accel_lite.data.collected_outputs import Concatenation, ListOfSamples, concatenate, to_cpu
from pytorch_accel_lite.data.loader_creation import LoaderKwargs
from pytorch_accel_lite.data.sources import SamplerLike, Source, is_named
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.gradient_sync import sync_ddp_buffers
from pytorch_accel_lite.loop.guards.arguments_and_datasets import check_dataset
from pytorch_accel_lite.loop.inference import compute_batches, inference, inference_run, preserving_randomness
from pytorch_accel_lite.loop.lifecycle import end_failed_run
from pytorch_accel_lite.run.notes_and_checks_seam import adding_error_notes
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.run_data import SKIPPED, DataArguments

#: Names of random samplers of torch, and of torchdata, which has classes of its own.
_RANDOM = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def _check_order(dataset: Source, loader_kwargs: LoaderKwargs) -> None:
    """Check that a dataset is predicted in order, or with a sampler that is passed beside it, and a loader likewise.

    Raises:
        ValueError: if samples would be shuffled or left out
    """
    is_loader = isinstance(dataset, DataLoader)
    options = loader_kwargs
    if is_loader:
        samplers = [part for part in (dataset.batch_sampler, dataset.sampler) if part is not None]
        samplers += [part.sampler for part in samplers if hasattr(part, "sampler")]
        drops_last = any(getattr(part, "drop_last", False) is True for part in (dataset, *samplers))
        options = {"shuffle": any(map(_shuffles, samplers)), "drop_last": drops_last}
    for key in ("shuffle", "drop_last"):
        if options.get(key):
            raise ValueError(
                f"{'dataset' if is_loader else 'dataloader_kwargs'} has {key}={options[key]!r}, but predict returns "
                f"the outputs for every sample, in the order of the dataset. Omit {key}."
            )


def _shuffles(sampler: SamplerLike) -> bool:
    """Whether a sampler gives a random order, as far as that is known."""
    is_random = type(sampler).__name__ in _RANDOM and type(sampler).__module__.startswith("torch")
    return is_random or getattr(sampler, "shuffle", False) is True


def _warn_of_rows(batch: Batch, output: Tree) -> bool:
    """Warn if no output has a row for each sample; return whether the batch was sufficient to know."""
    if batch.num_samples is None or batch.num_samples < 2:
        return False
    sizes = {batch.num_samples, infer_batch_size(batch.data, batch.num_samples)}
    if isinstance(output, ListOfSamples):
        return True  # a detector's list with an element for each sample
    rows = [len(part) for part in parts_in([output]) if isinstance(part, torch.Tensor) and part.ndim]
    if rows and sizes.isdisjoint(rows):
        warn_outside(
            f"The model returned {rows[0]} rows for a batch of {batch.num_samples} samples. Predictions are "
            "concatenated as they are, so they will not have a row for each sample, and how many there are depends on "
            "the batch size and the number of processes. Return outputs with the samples in the first dimension."
        )
    return True


def _warn_of_lost_lists(batch: Batch, output: Tree) -> None:
    """Warn of texts and numbers of each sample that are left out of a dict of outputs, as they are not tensors."""
    size = batch.num_samples
    if not isinstance(output, Mapping) or size is None or size < 2:  # of one sample, each list may be a setting
        return
    lost = [repr(name) for name, value in output.items() if _has_values_of_samples(value, size)]
    if lost:
        warn_outside(
            f"predict leaves out {listed(lost)}: in a dict of outputs, only tensors are kept. Return tensors, such as "
            "the indices of samples, or a list with a dict for each sample."
        )


def _has_values_of_samples(value: object, size: int) -> bool:
    """Whether an array, or a list of texts or numbers, has an element for each sample."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == size
    return type(value) is list and len(value) == size and all(isinstance(item, (str, int, float)) for item in value)


#: Makes a block in which the model predicts without effect on an outer run.
_Isolate: TypeAlias = Callable[[], AbstractContextManager[None]]
# Several processes gather the outputs of several steps at once: as many as take about this time and memory on each.
_SECONDS_AT_ONCE = 0.2
_BYTES_AT_ONCE = 2**22
_STEPS_AT_ONCE = 60


def predict(trainer: TrainerLike, arguments: DataArguments, only_first: bool) -> Tree:
    """Carry out ``Trainer.predict()``."""

    def collect() -> Concatenation | None:
        predicted = _predict_by_step(trainer, arguments, only_first, is_collected=True)
        outputs, is_empty = Concatenation(), True
        with closing(predicted):  # leaves inference mode even if outputs cannot be concatenated
            for step in predicted:
                outputs.add(step)
                is_empty = False
        return None if is_empty else outputs

    outputs = trainer.ranks.repeat_if_process_lost(collect)
    if outputs is None:
        raise ValueError(
            f"dataset gave no batch: {type(arguments.dataset).__name__} is empty or exhausted, or a "
            "PredictionWriterCallback has already written all predictions: read them with read_predictions()."
        )
    return outputs.result() if _wants_outputs(trainer, only_first) else None


def predict_iter(trainer: TrainerLike, arguments: DataArguments, only_first: bool) -> Iterator[Tree]:
    """Carry out ``Trainer.predict_iter()``."""
    for parts in _predict_by_step(trainer, arguments, only_first, is_collected=False):
        yield concatenate(parts) if parts else None


def _wants_outputs(trainer: TrainerLike, only_first: bool) -> bool:
    return not only_first or trainer.ranks.rank == 0


def _predict_by_step(
    trainer: TrainerLike, arguments: DataArguments, only_first: bool, is_collected: bool
) -> Generator[list[Tree], None, None]:
    """Yield the outputs of all processes for each step, or an empty list on processes that do not want them.

    Args:
        only_first: whether only the first process wants them
        is_collected: whether the caller only collects them
    """
    check_dataset(trainer, "dataset", arguments)
    dataset = arguments.dataset
    if is_named(dataset):
        raise TypeError(f"dataset: predict takes one dataset, not a dict of {sorted(dataset)}. Call it for each.")
    _check_order(dataset, arguments.loader_kwargs or {})
    request = RunRequest("prediction", num_epochs=1)
    with inference_run(trainer, request, arguments) as run:
        try:
            trainer.call_event("on_predict_run_start")
            sync_ddp_buffers(trainer.model, trainer.ranks)
            mode = evaluation_mode(trainer.model) if run.outer is None else nullcontext()
            with adding_error_notes(trainer, run, "prediction"), mode:
                steps = _outputs_of_all_processes(trainer, run, only_first, is_collected)
                steps = steps if _wants_outputs(trainer, only_first) else ([] for _ in steps)
                yield from steps if is_collected else _outer_run_between_parts(trainer, run, steps)
                if run.inference_step is not None:
                    run.inference_step.report(trainer, run)
            trainer.call_event("on_predict_run_end")
        except GeneratorExit:  # the caller stopped iterating
            trainer.call_event("on_predict_run_end")
            raise
        except BaseException as error:
            end_failed_run(trainer, run, error, ended=True)
            raise


class _StepsReport(NamedTuple):
    """What a process tells the others about its steps since the last gathering of outputs.

    Args:
        has_outputs: for each of these steps, whether it has outputs
        seconds: how long these steps took
        size: the bytes of all outputs of these steps
    """

    has_outputs: list[bool]
    seconds: float
    size: int


def _outputs_of_all_processes(
    trainer: TrainerLike, run: Run, only_first: bool, is_collected: bool
) -> Iterator[list[Tree]]:
    """Yield the outputs of all processes for each step."""
    is_late = is_collected and is_asynchronous(run.device)
    outputs = _own_outputs_copied_late(trainer, run) if is_late else _own_outputs(trainer, run)
    isolate = partial(_in_isolation, trainer, run, {})
    if trainer.data_ranks.world_size > 1:
        yield from _gathered(trainer.data_ranks, outputs, isolate, only_first)
    elif is_collected:
        with isolate():
            yield from filter(None, outputs)
    else:
        while mine := _next_steps(outputs, 1, isolate):
            yield from filter(None, mine)


def _next_steps(outputs: Iterator[list[Tree]], steps: int, isolate: _Isolate) -> list[list[Tree]]:
    """Compute the outputs of the next steps, without effect on an outer run."""
    with isolate():
        return list(islice(outputs, steps))


def _gathered(ranks: Ranks, outputs: Iterator[list[Tree]], isolate: _Isolate, only_first: bool) -> Iterator[list[Tree]]:
    """Gather the outputs of all processes, once for several steps, and yield those of each step."""
    processes, steps, is_over = ranks.world_size, 1, False
    while not is_over:
        begin = time.perf_counter()
        mine = _next_steps(outputs, steps, isolate)
        seconds = time.perf_counter() - begin
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(mine))
        reports = ranks.all_gather_object(_StepsReport([*map(bool, mine)], seconds, size))
        gathered = ranks.all_gather_object(mine, only_first)
        if ranks.world_size < processes:
            raise RuntimeError(
                "A process was lost while predict_iter() waited for its outputs, and what has been yielded cannot be "
                "taken back. Call predict(), which begins again."
            )
        most_steps = max(len(report.has_outputs) for report in reports)
        for step in range(most_steps):
            if any(any(report.has_outputs[step : step + 1]) for report in reports):
                yield [part for outputs_of_rank in gathered for part in chain(*outputs_of_rank[step : step + 1])]
        is_over = most_steps < steps
        steps = _steps_at_once(steps, reports)


def _steps_at_once(steps: int, reports: Sequence[_StepsReport]) -> int:
    """Return for how many steps to gather the outputs the next time, within limits of memory and time."""
    largest, slowest = max(report.size for report in reports), max(report.seconds for report in reports)
    fraction = min(_BYTES_AT_ONCE / max(largest, 1), _SECONDS_AT_ONCE / max(slowest, 1e-6))
    return int(min(max(steps * fraction, 1), _STEPS_AT_ONCE))


@contextmanager
def _in_isolation(trainer: TrainerLike, run: Run, generators: StateDict) -> Iterator[None]:
    """Within a block, let the model predict without effect on an outer run.

    Args:
        generators: the generator states of a prediction within a run, kept from one block to the next
    """
    with preserving_randomness(trainer, run), evaluation_mode(trainer.model), inference(trainer):
        if generators:
            restore_generators(generators)
        yield
        if run.outer is not None:
            generators.update(capture_generators())


def _own_outputs_copied_late(trainer: TrainerLike, run: Run) -> Iterator[list[Tree]]:
    """Yield this process's outputs. Outputs are copied while the device computes the next step, so no step waits.

    A copy is in pinned memory for one step only, because there may be many copies.
    """
    device = run.device
    before: tuple[list[Tree], torch.Event] | None = None
    for copies in _own_outputs(trainer, run, partial(torch.Tensor.to, device="cpu", non_blocking=True)):
        if before is not None:
            yield _await_copies(*before)
        before = copies, record_event(device)
    if before is not None:
        yield _await_copies(*before)


def _await_copies(copies: list[Tree], arrival: torch.Event) -> list[Tree]:
    """Wait until copies in pinned memory are complete, and return them in ordinary memory."""
    arrival.synchronize()
    return [to_cpu(each, copy=torch.Tensor.clone) for each in copies]


def _own_outputs(
    trainer: TrainerLike, run: Run, copy: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
) -> Iterator[list[Tree]]:
    """Yield this process's outputs step by step, on the CPU.

    Args:
        copy: copies a tensor to the CPU
    """
    listeners = trainer.callback_handler.listeners
    shares: list[Tree] = []
    is_checked = run.ranks.rank > 0
    batches = run.data.required_eval_loader.steps(run.progress.epoch, run.request.first_sample)
    for batch, output in compute_batches(trainer, run, batches, trainer.calculate_predict_batch_output, False):
        if listeners["on_predict_step_end"] and output is not SKIPPED:
            trainer.call_event("on_predict_step_end", batch=batch.data, batch_output=output)
        if not batch.is_filler and output is not SKIPPED:
            has_lists = any(type(part) is list for part in (output, *parts_in(output)))  # perhaps of samples
            size = infer_batch_size(batch.data, batch.num_samples) if has_lists else None
            shares.append(to_cpu(output, size, copy))
            if not is_checked:
                is_checked = _warn_of_rows(batch, shares[-1])
                _warn_of_lost_lists(batch, output)
        del output  # before the next takes memory
        if batch.share is None or batch.share.ends_step:
            yield shares
            shares = []


def _outer_run_between_parts(trainer: TrainerLike, run: Run, steps: Iterator[list[Tree]]) -> Iterator[list[Tree]]:
    """Make the outer run of a prediction the current run while the caller uses a part of the prediction.

    The caller may go on with it in another run, such as when the evaluation that began it has ended.
    """
    for parts in steps:
        if run.previous is not None:
            trainer.current_run = run.previous
        try:
            yield parts
        finally:
            run.previous = trainer.current_run
            trainer.current_run = run
