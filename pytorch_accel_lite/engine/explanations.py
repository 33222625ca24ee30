"""Notes on the errors of a step: where it failed, on what data, and what to do. Imported only after an error."""

from __future__ import annotations

import dataclasses
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accel_lite.base.batches import TARGET_KEYS
from pytorch_accel_lite.base.inspection import accepts
from pytorch_accel_lite.base.protocols import TrainerLike

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run

_SHOWN = 6  # elements of a collection
# The functions in batches.py that make up the default step.
_DEFAULT_STEP = ("outputs_and_loss", "_other_outputs_and_loss", "call", "loss")

# Advice for errors that are recognised by their text.
_BY_TEXT = {
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
    if any(map(_is_ours, notes)):
        return
    lines = list[str]()
    with suppress(Exception):  # a failing explanation must not hide the error
        for line in _lines(error, trainer, run, phase):
            lines.append(line)  # one by one, to keep those found before a failure
    vars(error)["__notes__"] = [*notes, "\n".join(lines)]  # equivalent to add_note, which needs Python 3.11


def _is_ours(note: str) -> bool:
    return re.match(r"In (training|evaluation|prediction)\b.*:(\n  |$)", note) is not None


def _lines(error: Exception, trainer: TrainerLike, run: Run, phase: str) -> Iterator[str]:
    yield f"In {_place(trainer, run, phase)}:"
    if run.batch is not None:
        indices = run.batch_indices
        samples = "" if not indices else f"; samples {_listed(map(repr, indices))} of the dataset"
        yield f"  batch: {described(run.batch.data)}{samples}"
    case = Case.of(error, trainer, run)
    yield f"  model: {_described_model(case.model, trainer.accelerator.mixed_precision)}"
    if case.module is not None:
        yield f"  in {_named(case.module, case.model)}, with input {described(case.given)}"
    if case.outputs is not None:
        yield f"  in the loss, with {described(case.outputs)} and {described(case.targets)}"
    text = f"{type(error).__name__}: {error}"
    known = (answer for pattern, answer in _BY_TEXT.items() if re.search(pattern, text))
    advice = next(known, None) or next((answer for find in _FINDERS if (answer := find(case))), None)
    if advice is not None:
        yield f"  What to do: {advice}"


def _place(trainer: TrainerLike, run: Run, phase: str) -> str:
    ranks = trainer.ranks
    place = phase
    if phase == "training":
        place += f", epoch {run.progress.epoch}, step {run.progress.step}"
    return place + (f", on process {ranks.rank} of {ranks.world_size}" if ranks.world_size > 1 else "")


def described(value: Any, levels: int = 3) -> str:
    """Describe the structure of nested data, with the type, shape and device of each tensor."""
    if isinstance(value, torch.Tensor):
        return f"{_dtype(value)} {tuple(value.shape)} on {value.device}"
    name = type(value).__name__
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        name, value = f"{name} ", {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        name = "" if type(value) is dict else f"{name} "
    if isinstance(value, (Mapping, list, tuple)) and not levels:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"{name}{{{_listed(f'{key!r}: {described(part, levels - 1)}' for key, part in value.items())}}}"
    if isinstance(value, (list, tuple)):
        begin, end = "[]" if isinstance(value, list) else "()"
        return f"{begin}{_listed(described(part, levels - 1) for part in value)}{end}"
    return name


def _listed(parts: Iterable[str]) -> str:
    every = list(parts)
    more = [f"and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return ", ".join([*every[:_SHOWN], *more])


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described_model(model: nn.Module, mixed_precision: str) -> str:
    kinds = dict.fromkeys(f"{_dtype(parameter)} on {parameter.device}" for parameter in model.parameters())
    precision = "" if mixed_precision == "no" else f", mixed precision {mixed_precision}"
    return f"{type(model).__name__}, weights {' and '.join(kinds) or 'none'}{precision}"


def _named(module: nn.Module, model: nn.Module) -> str:
    name = next((name for name, part in model.named_modules() if part is module), "")
    text = repr(module) if not list(module.children()) else type(module).__name__
    return f"{text}, the model's {name!r}" if name else text


@dataclasses.dataclass
class Case:
    """The circumstances of an error.

    :ivar module: the innermost module whose forward pass failed
    :ivar given: the first argument of that forward pass
    :ivar outputs: the first argument of the loss function, if it was reached
    :ivar targets: the second argument of the loss function
    :ivar function: the function in ``torch.nn.functional`` that computed the loss
    :ivar is_default_step: whether it happened in the trainer's default step
    """

    error: Exception
    text: str
    model: nn.Module
    loss_func: Any
    batch: Any
    module: nn.Module | None = None
    given: Any = None
    outputs: Any = None
    targets: Any = None
    function: str = ""
    is_default_step: bool = False

    @classmethod
    def of(cls, error: Exception, trainer: TrainerLike, run: Run) -> Case:
        """Collect the circumstances of an error from its traceback."""
        batch = None if run.batch is None else run.batch.data
        case = cls(error, str(error), trainer.get_model(), trainer.loss_func, batch)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            case._look_at(frame)
        return case

    def _look_at(self, frame: FrameType) -> None:
        values = dict(frame.f_locals)  # a proxy since Python 3.13, whose keys are a list
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        if file.endswith("pytorch_accel_lite/base/batches.py") and code.co_name in _DEFAULT_STEP:
            self.is_default_step = True
            if "outputs" in values:
                self.outputs = values["outputs"]
                self.targets = values["targets"] if "targets" in values else values["batch"][1]
        elif file.endswith("torch/nn/functional.py") and {"input", "target"} <= values.keys():
            self.function = code.co_name
            self.outputs, self.targets = values["input"], values["target"]
        elif code.co_name == "forward" and isinstance(values.get("self"), nn.Module):
            if values["self"] is self.loss_func:
                return
            self.module = values["self"]
            names = code.co_varnames[1 : code.co_argcount]
            self.given = values.get(names[0]) if names else None

    @property
    def is_in_loss(self) -> bool:
        """Whether it happened in the loss function."""
        return self.outputs is not None


def _of_arguments(case: Case) -> str | None:
    if not isinstance(case.error, TypeError) or not case.is_default_step:
        return None
    if case.is_in_loss:
        called = case.loss_func.forward if isinstance(case.loss_func, nn.Module) else case.loss_func
        name = getattr(case.loss_func, "__name__", type(case.loss_func).__name__)
        if not accepts(called, None, None):
            return (
                f"loss_func is called as loss_func(model_outputs, targets), which {name}{inspect.signature(called)} "
                "does not accept. Pass a function of these two arguments, or override calculate_train_batch_loss and "
                "calculate_eval_batch_loss."
            )
    elif not isinstance(case.batch, Mapping) and not accepts(case.model.forward, None):
        return (
            f"the model is called with the first element of a batch, which {type(case.model).__name__}.forward"
            f"{inspect.signature(case.model.forward)} does not accept. Let the dataset return a dict with these names "
            "as keys, besides the targets, or override calculate_train_batch_loss and calculate_eval_batch_loss."
        )
    return None


def _of_what_the_loss_takes(case: Case) -> str | None:
    if not case.is_in_loss:
        return None
    if not isinstance(case.outputs, torch.Tensor):
        part = "outputs[0]"
        if isinstance(case.outputs, Mapping):
            part = f"outputs[{next((key for key, value in case.outputs.items() if torch.is_tensor(value)), '...')!r}]"
        return (
            f"the model returned a {type(case.outputs).__name__}, but the loss function takes a tensor. Select one: "
            f"loss_func=lambda outputs, targets: loss({part}, targets), or override calculate_train_batch_loss and "
            "calculate_eval_batch_loss."
        )
    if isinstance(case.targets, Mapping):
        others = [key for key in case.targets if key not in TARGET_KEYS] or list(case.targets)
        return (
            f"the targets are a dict of all keys that {type(case.model).__name__}.forward does not take, but the loss "
            f"function takes a tensor. Drop {', '.join(map(repr, others))} from the dataset, or "
            "override calculate_train_batch_loss and calculate_eval_batch_loss."
        )
    if case.targets is not None and not isinstance(case.targets, torch.Tensor):  # None: the error itself says so
        return (
            f"the targets are a {type(case.targets).__name__}, but the loss function takes a tensor. Let the dataset "
            "return numbers or tensors as targets, or pass a collate_fn that turns them into a tensor."
        )
    return None


def _of_classes(case: Case) -> str | None:
    if case.function not in ("cross_entropy", "nll_loss"):
        return None
    outputs, targets = case.outputs, case.targets
    if targets.shape == outputs.shape:
        return "targets that are class probabilities must be floating point: use targets.float(), or targets.argmax(1)."
    if targets.ndim == outputs.ndim and targets.shape[1:2] == (1,):
        change = "squeeze(1)" if targets.dtype == torch.int64 else "squeeze(1).long()"
    elif targets.dtype != torch.int64:
        change = "long()"
    else:
        return _of_labels(outputs, targets) if isinstance(case.error, IndexError) else None
    return (
        "cross entropy takes the index of a class for each sample, int64 of shape "
        f"{tuple(outputs.shape[:1] + outputs.shape[2:])}, but was given {_dtype(targets)} of shape "
        f"{tuple(targets.shape)}: use targets.{change}. For binary classification with one output, use "
        "BCEWithLogitsLoss."
    )


def _of_labels(outputs: torch.Tensor, targets: torch.Tensor) -> str:
    classes = outputs.shape[1] if outputs.ndim > 1 else len(outputs)
    return (
        f"the labels range from {targets.min()} to {targets.max()}, but the outputs have {classes} classes, numbered "
        f"0 to {classes - 1}. Give the model an output for each class, or number the labels from 0; pass ignore_index "
        "to the loss function to ignore a label."
    )


def _of_two_shapes(case: Case) -> str | None:
    names = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
    if not case.function.startswith(names):
        return None
    outputs, targets = case.outputs, case.targets
    if outputs.shape != targets.shape:
        change = "make the shapes equal"
        if outputs.numel() == targets.numel():
            change += ", for example with targets.unsqueeze(1) in the dataset or outputs.squeeze(1) in the model"
        return f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}: {change}."
    if not targets.is_floating_point():
        return f"the targets are {_dtype(targets)}, but this loss needs floating point: use targets.float()."
    if "between 0 and 1" in case.text:
        return "BCELoss takes probabilities. Use BCEWithLogitsLoss, which takes the raw outputs of a layer."
    return None


def _of_an_embedding(case: Case) -> str | None:
    module, given = case.module, case.given
    if not isinstance(module, nn.Embedding) or not isinstance(given, torch.Tensor):
        return None
    if given.is_floating_point():
        return f"an embedding takes indices, but was given {_dtype(given)}: let the dataset return integers."
    if isinstance(case.error, IndexError):
        return (
            f"the indices range from {given.min()} to {given.max()}, but the embedding has rows 0 to "
            f"{module.num_embeddings - 1}. Raise num_embeddings, or check how the indices are created."
        )
    return None


def _of_types(case: Case) -> str | None:
    if not re.search(r"d?type|scalar|datatype", case.text, re.IGNORECASE) or isinstance(case.error, TypeError):
        return None
    weights = next((p for p in case.model.parameters() if p.is_floating_point()), None)
    given = case.given if isinstance(case.given, torch.Tensor) else None
    if given is None and weights is not None:
        numbers = (tensor for tensor in _tensors_in(case.batch) if tensor.is_floating_point())
        given = next((tensor for tensor in numbers if tensor.dtype != weights.dtype), None)
    if weights is None or given is None or given.dtype == weights.dtype:
        return None
    if given.is_floating_point():
        return (
            f"the data are {_dtype(given)}, but the model's weights are {_dtype(weights)}. Let the dataset return "
            f"tensor.{_conversion(weights)} for inputs and targets (NumPy arrays are float64 by default), or convert "
            f"the model before creating the optimizer: model.{_conversion(given)}."
        )
    return (
        f"the data are {_dtype(given)}, but the model's weights are {_dtype(weights)}. Let the dataset return "
        f"tensor.{_conversion(weights)}; images stored as bytes are usually divided by 255, too."
    )


def _conversion(like: torch.Tensor) -> str:
    known = {torch.float32: "float()", torch.float64: "double()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}
    return known.get(like.dtype, f"to({like.dtype})")


def _tensors_in(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    for part in data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ():
        yield from _tensors_in(part)


def _of_features(case: Case) -> str | None:
    module, given = case.module, case.given
    if module is None or not isinstance(given, torch.Tensor) or not given.ndim:
        return None
    shape = tuple(given.shape)
    if isinstance(module, nn.Linear) and shape[-1] != module.in_features:
        change = f"use in_features={shape[-1]}, or change its input"
        if given.ndim > 2 and given[0].numel() == module.in_features:
            change = "insert nn.Flatten() before it"
        features = module.in_features
        return f"the layer takes {features} features, but its input of shape {shape} has {shape[-1]}: {change}."
    channels = getattr(module, "in_channels", None) or getattr(module, "num_features", None)
    if channels is not None and given.ndim > 1 and shape[1] != channels:
        change = "change its number of channels, or its input"
        if given.ndim > 2 and shape[-1] == channels:
            change = "the channels seem to come last, permute them to the second dimension"
        elif given.ndim == 3 and channels == 1 and isinstance(module, nn.Conv2d):
            change = "it lacks the channel dimension, use .unsqueeze(1)"
        return f"the layer takes {channels} channels in the second dimension of its input of shape {shape}: {change}."
    size = getattr(module, "input_size", None)
    if isinstance(module, nn.RNNBase) and shape[-1] != size:
        return f"the layer takes {size} features, but its input of shape {shape} has {shape[-1]}: change one of them."
    return None


_FINDERS: tuple[Callable[[Case], str | None], ...] = (
    _of_arguments,
    _of_what_the_loss_takes,
    _of_classes,
    _of_two_shapes,
    _of_an_embedding,
    _of_features,
    _of_types,
)
