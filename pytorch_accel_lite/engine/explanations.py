"""Notes on the errors of a step: where it failed, on what data, and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.reprs import short

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run

# What to do about errors whose text does not say it, by a pattern of their text.
_ADVICE = {
    "^OutOfMemoryError": (
        "lower per_device_batch_size, and raise gradient_accumulation_steps to keep the same updates; or pass "
        "auto_microbatch=True to train(), which splits batches that do not fit."
    ),
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
    r"Target -?\d+ is out of bounds": (
        "the labels must range from 0 to the number of the model's outputs - 1. Give the model an output for each "
        "class, or number the labels from 0; pass ignore_index to the loss function to ignore a label."
    ),
    "can't be cast to the desired output type": "this loss needs floating point targets: use targets.float().",
    "all elements of input should be between 0 and 1": (
        "BCELoss takes probabilities. Use BCEWithLogitsLoss, which takes the raw outputs of a layer."
    ),
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
        "the graph of a loss is freed by its backward pass: detach() what you keep from one step to the next. In an "
        "overridden train_step, pass retain_graph=True to update() if a later loss uses the same outputs."
    ),
    r"Timed out waiting \d+ms for (recv|send) operation": (
        "another process did not take part until the time limit of the process group. All must make the same calls in "
        "the same order: of update() in an overridden train_step, of evaluate(), gather() and the like in callbacks. "
        "HangWatchCallback shows where each process is."
    ),
}


def explain(error: Exception, trainer: TrainerLike, run: Run, phase: str) -> None:
    """Add a note to the error of a step, with the place, the batch, the model and, if possible, advice.

    Before Python 3.11, tracebacks do not show notes, but ``__notes__`` holds them all the same.

    :param phase: ``"training"``, ``"evaluation"`` or ``"prediction"``
    """
    notes: list[str] = list(getattr(error, "__notes__", []))
    if any(re.match(r"In (training|evaluation|prediction)\b.*:(\n  |$)", note) for note in notes):
        return
    lines = list[str]()
    with suppress(Exception):  # a failing explanation must not hide the error
        for line in _lines(error, trainer, run, phase):
            lines.append(line)  # one by one, to keep those before a failure
    vars(error)["__notes__"] = [*notes, "\n".join(lines)]  # equivalent to add_note, which needs Python 3.11


def _lines(error: Exception, trainer: TrainerLike, run: Run, phase: str) -> Iterator[str]:
    step = f", epoch {run.progress.epoch}, step {run.progress.step}" if phase == "training" else ""
    ranks = trainer.ranks
    yield f"In {phase}{step}{f', on process {ranks.rank} of {ranks.world_size}' if ranks.world_size > 1 else ''}:"
    if run.batch is not None:
        samples = f"; samples {short(list(run.batch_indices))} of the dataset" if run.batch_indices else ""
        yield f"  batch: {short(run.batch.data)}{samples}"
    model = trainer.get_model()
    kinds = dict.fromkeys(f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in model.parameters())
    precision = trainer.accelerator.mixed_precision
    mixed = "" if precision == "no" else f", mixed precision {precision}"
    yield f"  model: {type(model).__name__}, weights {' and '.join(kinds) or 'none'}{mixed}"
    for where, arguments in _innermost_calls(error, model, trainer.loss_func).items():
        yield f"  in {where}, with {' and '.join(map(short, arguments))}"
    text = f"{type(error).__name__}: {error}"
    advice = next((answer for pattern, answer in _ADVICE.items() if re.search(pattern, text)), None)
    if advice is not None:
        yield f"  What to do: {advice}"


def _innermost_calls(error: Exception, model: nn.Module, loss_func: Any) -> dict[str, list[Any]]:
    """Return the first arguments of the innermost module whose forward pass failed, and of the loss function."""
    calls: dict[str, list[Any]] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        arguments = _arguments(frame)
        module = arguments[0] if arguments and frame.f_code.co_name == "forward" else None
        if _is_of_loss(frame, module, loss_func):
            calls["the loss"] = arguments[1:3] if module is loss_func else arguments[:2]
        elif isinstance(module, nn.Module):
            calls = {_describe_module(module, model): arguments[1:2]}
    return calls


def _arguments(frame: FrameType) -> list[Any]:
    """Return the arguments that a function takes by position, ``self`` included."""
    return [frame.f_locals.get(name) for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]


def _is_of_loss(frame: FrameType, module: Any, loss_func: Any) -> bool:
    """Whether a frame is of the trainer's loss function, or of one in ``torch.nn.functional``."""
    if loss_func is not None and (module is loss_func or getattr(loss_func, "__code__", None) is frame.f_code):
        return True
    in_functional = frame.f_globals.get("__name__") == "torch.nn.functional"
    return in_functional and frame.f_code.co_varnames[:2] == ("input", "target")


def _describe_module(module: nn.Module, model: nn.Module) -> str:
    name = next((name for name, part in model.named_modules() if part is module), "")
    text = type(module).__name__ if list(module.children()) else repr(module)
    return f"{text}, the model's {name!r}" if name else text
