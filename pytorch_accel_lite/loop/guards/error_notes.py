"""Notes on the errors of a run: what to do, where it failed, and on which batch."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from torch import nn
from torch.utils.data import default_collate

from pytorch_accel_lite.base.devices import is_out_of_memory
from pytorch_accel_lite.base.reprs import short_repr
from pytorch_accel_lite.base.text import add_note, notes_of
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.user_code import checked_by
from pytorch_accel_lite.data import FailedRead
from pytorch_accel_lite.data.loss_errors import LossFunction
from pytorch_accel_lite.data.reading import names_sample
from pytorch_accel_lite.data.sources import Index, Source
from pytorch_accel_lite.loop.guards.out_of_memory import advise_on_memory, describe_memory
from pytorch_accel_lite.run.events import Phase, TrainerCallback
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.stops import NonFiniteLossError, StopTrainingError

# Advice for errors of torch, by a pattern of their text.
_ADVICE = {
    "device-side assert": (
        "an index is out of range on the device, usually a label without a corresponding output, or an index into an "
        "embedding. The traceback may point to a later line: run on the CPU, with accelerator=Accelerator(cpu=True), "
        "where the error names the index."
    ),
    r"same device|the expected device|Input type \(torch\.(cuda\.)?\w+\) and weight type \(torch\.(cuda\.)?\w+\)": (
        "the trainer moves the tensors of a batch, also in nested tuples, lists and dicts, and modules that are its "
        "attributes. Create other tensors on device=trainer.device, register constants of a model with "
        "register_buffer(), and give your own objects a method to(device)."
    ),
    "have the same dtype|type .* should be the same": (
        "the data have another dtype than the model's weights. Let the dataset return tensor.float() (NumPy arrays are "
        "float64 by default, and images of bytes are usually divided by 255, too), or convert the model before "
        "creating the optimizer."
    ),
    "multi-target not supported|expected target dtype|expected scalar type Long|with class probabilities": (
        "cross entropy takes the index of a class for each sample, as targets.long() without a dimension of size 1 "
        "(targets.squeeze(1)), or class probabilities as targets.float(). For binary classification with one output, "
        "use BCEWithLogitsLoss."
    ),
    "Expected target size": (
        "cross entropy takes the classes in dimension 1 of the outputs: for outputs of (batch, length, classes), use "
        "outputs.transpose(1, 2), or outputs.flatten(0, 1) with targets.flatten(). If the dataset is a list of ready "
        "batches, pass OwnShard(batches)."
    ),
    r"Target -?\d+ is out of bounds": (
        "the labels must range from 0 to the number of the model's outputs - 1. Give the model an output for each "
        "class, or number the labels from 0; pass ignore_index to the loss function to ignore a label."
    ),
    r"Target size \(.* must be the same as input size|target size \(.* that is different to the input size": (
        "this loss compares each output with a target of its own: give the targets the shape of the outputs, for "
        "example with targets.float().unsqueeze(1) in the dataset, or outputs.squeeze(1) in the model. For the index "
        "of a class, use CrossEntropyLoss."
    ),
    "be equal to (the )?number of (classes|labels)|more unique values in `(target|preds)`": (
        "the metric was made for another number of classes. Metrics that are given by name, as in metrics='accuracy', "
        "take it from the outputs of the model."
    ),
    "following values in `target`": (
        "this metric takes classes as targets, numbered from 0. For other numbers, use a metric for regression, such "
        "as 'r2score' or 'mean_absolute_error'."
    ),
    "can't be cast to the desired output type": "this loss needs floating point targets: use targets.float().",
    "index out of range in self": "raise num_embeddings of the embedding, or check how the indices are created.",
    "more than 1 value per channel": (
        "batch norm cannot be trained on a single sample. Pass train_dataloader_kwargs={'drop_last': True}, which "
        "drops a smaller last batch, or choose another per_device_batch_size."
    ),
    "needed for gradient computation has been modified by an inplace operation": (
        "replace operations such as x += y. In an overridden train_step, an update() changes weights that the graphs "
        "of earlier outputs need: call the networks again after it, or change the order of the updates."
    ),
    "backward through the graph a second time": (
        "the graph of a loss is freed by its backward pass, which the trainer calls: do not call it in "
        "calculate_train_batch_loss. detach() what you keep from one step to the next. In an overridden train_step, "
        "pass retain_graph=True to update() if a later loss uses the same outputs."
    ),
    "stack expects each tensor to be equal size|resize storage that is not resizable": (
        "the samples of a batch differ in shape. Let the dataset crop or resize them to one shape, or pass a "
        "collate_fn that pads them."
    ),
    r"forward\(\) missing \d+ required positional argument": (
        "to a model with several inputs, they are passed by name: let the dataset return a dict with the names of "
        "forward's arguments, and the target as its other key; or override calculate_train_batch_loss."
    ),
    r"must be Tensor, not (tuple|dict|\w+Output)\b|'(tuple|dict|\w+Output)' object has no attribute 'size'": (
        "if this is what the model returns, let a function of your own take out what the loss needs, such as "
        "loss_func=lambda outputs, targets: functional.cross_entropy(outputs['logits'], targets); if the model returns "
        "its loss itself, as those of Hugging Face do when they get labels, pass loss_func=None."
    ),
    "must be Tensor, not list": (
        "lists of numbers in a sample become a list of tensors in a batch, one for each place. Let the dataset return "
        "torch.tensor(numbers), or call with_format('torch') on a Hugging Face dataset."
    ),
    "default_collate: batch must contain": (
        "let the dataset return tensors, NumPy arrays or numbers, or tuples, lists and dicts of them, or pass a "
        "collate_fn that makes a batch of what it returns."
    ),
    r"DataLoader worker \(pid.* (is killed|exited unexpectedly)": (
        "a worker process was ended from outside, usually because memory ran out. Lower num_workers, prefetch_factor "
        "or per_device_batch_size; or pass num_workers=0, which reads in this process, to see an error of the dataset."
    ),
    r"Timed out waiting \d+ms for (recv|send) operation": (
        "another process did not take part until the time limit of the process group. All must make the same calls in "
        "the same order: of update() in an overridden train_step, of evaluate(), gather() and the like in callbacks. "
        "HangWatchCallback shows where each process is."
    ),
}


_MOST_OF_RANGE = 8  # consecutive samples that are listed one by one
_MOST_SAMPLES = 64  # samples whose indices are shown


@contextmanager
def explaining(trainer: TrainerLike, run: Run, phase: Phase) -> Iterator[None]:
    """Add a note to an error that is raised within a block."""
    try:
        yield
    except Exception as error:
        explain(error, trainer, run, phase)
        raise


def explain(error: BaseException, trainer: TrainerLike, run: Run, phase: Phase) -> None:
    """Add a note to the error of a run, with the place, the batch, the model and, if possible, advice."""
    if isinstance(error, (StopTrainingError, NonFiniteLossError)) or not isinstance(error, Exception):
        return
    if _defines_callback(checked_by(error)):  # the checks of callbacks say all that is to be said
        return
    if any(re.match(r"In (training|evaluation|prediction)\b", note) for note in notes_of(error)):
        return
    lines = list[str]()
    with suppress(Exception):  # a failing explanation must not hide the error
        for line in _lines(error, trainer, run, phase):
            lines.append(line)  # one by one, so that an error in a later line loses no earlier line
    if lines:
        add_note(error, *lines)


def _defines_callback(module: str) -> bool:
    """Whether a module, given by its name, defines a callback."""
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
    advice = _advise_on_targets(error, trainer) or _advise(error)
    if advice:
        yield f"  What to do: {advice}"


def _advise(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return next((answer for pattern, answer in _ADVICE.items() if re.search(pattern, text)), "")


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


def list_samples(indices: list[Index]) -> str:
    """Return the indices of samples as text: of many consecutive indices the ends, of many others the first ones."""
    if len(indices) > _MOST_OF_RANGE and isinstance(first := indices[0], int):
        last = first + len(indices) - 1
        if indices == [*range(first, last + 1)]:
            return f"samples [{first} to {last}]"
    most = [short_repr(index) for index in indices[:_MOST_SAMPLES]]
    return f"samples [{', '.join(most)}{', ...' if len(indices) > len(most) else ''}]"


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
