"""A note on the error of a run: where it failed, on which batch, and what to do."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

from torch import nn
from torch.utils.data import default_collate

from pytorch_accel_lite.data import FailedRead, Source
from pytorch_accel_lite.extending import (
    LossFunction,
    NonFiniteLossError,
    Run,
    StopTrainingError,
    TrainerCallback,
    TrainerLike,
)
from pytorch_accel_lite.extension_tools.arguments_and_errors import add_note, checked_by, notes_of
from pytorch_accel_lite.extension_tools.data_and_batches import list_samples, names_sample
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Phase, default_transform
from pytorch_accel_lite.extension_tools.modules_and_devices import is_out_of_memory
from pytorch_accel_lite.extension_tools.plain_types import Tree
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr
from pytorch_accel_lite.extensions.error_notes.advice import advise
from pytorch_accel_lite.extensions.error_notes.out_of_memory import advise_on_memory, describe_memory


def add_notes(error: Exception, trainer: TrainerLike, run: Run, phase: Phase) -> None:
    """Add a note to the error of a run, with the place, the batch, the model and, if possible, advice."""
    if isinstance(error, (StopTrainingError, NonFiniteLossError)):
        return
    if _is_of_callbacks(checked_by(error)):  # the checks of callbacks say all that is to be said
        return
    if any(re.match(r"In (training|evaluation|prediction)\b", note) for note in notes_of(error)):
        return
    lines = list[str]()
    try:
        for line in _lines(error, trainer, run, phase):
            lines.append(line)  # one by one, so that an error in a later line loses no earlier line
    finally:
        if lines:
            add_note(error, *lines)


def _is_of_callbacks(module: str) -> bool:
    """Whether a module, given by its name, defines a callback, or finds what callbacks compare."""
    if module == default_transform.__module__:
        return True
    things = getattr(sys.modules.get(module), "__dict__", {}).values()
    classes = [thing for thing in things if isinstance(thing, type) and thing.__module__ == module]
    return any(issubclass(kind, TrainerCallback) for kind in classes)


def _lines(error: Exception, trainer: TrainerLike, run: Run, phase: Phase) -> Iterator[str]:
    data, number = run.data, run.batch_number
    where = f"In {phase}" + (f" on {data.eval_dataset_name!r}" if data.eval_dataset_name else "")
    if run.request.kind == "training" and run.progress.epoch:
        where += f", epoch {run.progress.epoch}"
    elif number is None:
        return
    ranks = run.ranks
    process = f", on process {ranks.rank} of {ranks.world_size}" if ranks.world_size > 1 else ""
    if number is None:
        if any(note.startswith("In ") for note in notes_of(error)):  # only errors of callbacks need the place
            yield f"{where}{process}."
        return
    if run.batch is None or isinstance(run.batch.data, FailedRead):
        yield f"{where}, step {number}, reading a batch{process}:"
        yield from _describe_reading(error, run, data.train_loader if phase == "training" else data.eval_loader)
    else:
        yield f"{where}, step {number}{process}:"
        samples = f"; {list_samples(run.batch_indices)} of the dataset" if run.batch_indices else ""
        yield f"  batch: {short_repr(run.batch.data)}{samples}"
        yield from _describe_model(error, trainer)
    if is_out_of_memory(error):
        with suppress(Exception):  # an error in describing must not hide the advice
            yield from describe_memory(trainer)
        yield f"  What to do: {advise_on_memory(trainer, run, phase)}"
        return
    advice = _advise_on_targets(error, trainer) or _advise_on_groups(error, trainer) or advise(error)
    if advice:
        yield f"  What to do: {advice}"


def _advise_on_targets(error: Exception, trainer: TrainerLike) -> str:
    """Return advice if a loss function has failed because it was passed a dict of several targets."""
    arguments = _innermost_calls(error, trainer.get_model(), trainer.loss_func).get("the loss", [])
    if len(arguments) < 2 or not isinstance(arguments[1], dict) or not re.search(r"\bdict\b", str(error)):
        return ""
    keys = [*map(repr, arguments[1])]
    return (
        f"the loss gets a dict of the keys of the batch that the model's forward does not take: {', '.join(keys)}. If "
        "one is the target, call it 'target', drop the others from the dataset, or take it out in a function of your "
        "own: "
        f"loss_func=lambda outputs, targets: functional.cross_entropy(outputs, targets[{keys[0]}])."
    )


def _advise_on_groups(error: Exception, trainer: TrainerLike) -> str:
    """Return advice if a scheduler has failed because parameter groups were added after it was created."""
    scheduler = trainer.scheduler
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if scheduler is None or not any(frame.f_locals.get("self") is scheduler for frame in frames):
        return ""
    rates = getattr(scheduler, "base_lrs", None) or getattr(scheduler, "base_lr_values", None)
    groups = trainer.optimizer.param_groups
    if not isinstance(rates, list) or len(rates) >= len(groups):
        return ""
    return (
        f"the optimizer has {len(groups)} parameter groups, but had {len(rates)} when {type(scheduler).__name__} was "
        "created. Pass all groups to the optimizer before the run: parameters with requires_grad=False are not trained "
        "until you unfreeze them, as GradualUnfreezingCallback does. Or train in two calls of train()."
    )


def _describe_reading(error: Exception, run: Run, loader: Source) -> Iterator[str]:
    """Describe what was being read: the samples, their dataset, and the ``collate_fn``."""
    dataset = getattr(loader, "dataset", loader)
    indices = loader.next_indices() if run.batch is None else run.batch_indices
    samples = f"; {list_samples(indices)}" if indices is not None else ""
    if indices is None and run.progress.samples_in_epoch and loader is run.data.train_loader:
        samples = f"; after {run.progress.samples_in_epoch} samples of this epoch"
    yield f"  dataset: {type(dataset).__name__}{samples}"
    collate = getattr(loader, "collate_fn", None)
    if collate not in (None, default_collate) and not names_sample(error):
        yield f"  collate_fn: {short_repr(collate)}"


def _describe_model(error: Exception, trainer: TrainerLike) -> Iterator[str]:
    model = trainer.get_model()
    kinds = dict.fromkeys(f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in model.parameters())
    precision = trainer.accelerator.mixed_precision
    mixed = "" if precision == "no" else f", mixed precision {precision}"
    yield f"  model: {type(model).__name__}, weights {' and '.join(kinds) or 'none'}{mixed}"
    for where, arguments in _innermost_calls(error, model, trainer.loss_func).items():
        yield f"  in {where}, with {' and '.join(map(short_repr, arguments))}"


def _innermost_calls(error: Exception, model: nn.Module, loss_func: LossFunction | None) -> dict[str, list[Tree]]:
    """Return the first arguments of the innermost module whose forward pass failed, and of the loss function."""
    calls: dict[str, list[Tree]] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        arguments = _arguments(frame)
        module = arguments[0] if arguments and frame.f_code.co_name == "forward" else None
        if _is_of_loss(frame, module, loss_func):
            calls["the loss"] = arguments[1:3] if module is loss_func else arguments[:2]
        elif isinstance(module, nn.Module):
            calls = {_describe_module(module, model): arguments[1:2]}
    return calls


def _arguments(frame: FrameType) -> list[Tree]:
    """Return the arguments that a function takes by position, ``self`` included."""
    return [frame.f_locals.get(name) for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]


def _is_of_loss(frame: FrameType, module: object, loss_func: LossFunction | None) -> bool:
    """Whether a frame belongs to the trainer's loss function, or to one in ``torch.nn.functional``."""
    if loss_func is not None and (module is loss_func or getattr(loss_func, "__code__", None) is frame.f_code):
        return True
    in_functional = frame.f_globals.get("__name__") == "torch.nn.functional"
    return in_functional and frame.f_code.co_varnames[:2] == ("input", "target")


def _describe_module(module: nn.Module, model: nn.Module) -> str:
    name = next((name for name, part in model.named_modules() if part is module), "")
    text = type(module).__name__ if list(module.children()) else repr(module)
    return f"{text}, the model's {name!r}" if name else text
