"""Batches: finding their size, feeding them to a model, and completing the output of a step."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.data.loss_errors import LossFunction, check_loss, is_of_torch, shapes_are_known
from pytorch_accel_lite.data.sources import BatchData, Index

#: A loss, or several by name.
Losses: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]
#: What a step returns: its loss, the outputs of the model and other values, by name.
BatchOutput: TypeAlias = dict[str, Any]
IGNORED_LABEL = -100  # the default ignore_index of torch's cross entropy
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def infer_batch_size(batch: BatchData, expected: int | None = None) -> int:
    """Return the number of samples in a batch.

    Args:
        expected: number of samples that were collated, or ``None`` if unknown. It is returned if anything in the batch
            has this length, or if the batch is a row of packed sequences. Otherwise, the collate function has dropped
            some, and the length of the first tensor with dimensions is returned.

    Raises:
        ValueError: if the size cannot be determined
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else None
    if isinstance(first, torch.Tensor) and first.ndim:
        length = first.shape[0]
        if expected is None or expected == length:
            return length  # the usual case, without slow checks of abstract types
    if expected is not None and (is_packed(batch) or any(is_as_long(part, expected) for part in parts_in(batch))):
        return expected
    result = next((len(tensor) for tensor in tensors_in(batch)), None)
    result = _reported_size(batch, expected) if result is None else result
    if result is None:
        raise ValueError(
            f"The batch size cannot be determined from a batch of type {type(batch).__name__} without tensors. Return "
            "'batch_size' from calculate_train_batch_loss / calculate_eval_batch_loss. Several processes must know it "
            "before the step: give the batch a tensor with a row for each sample, or an attribute batch_size."
        )
    return result


def _reported_size(batch: BatchData, expected: int | None) -> int | None:
    """Return the size of a batch without tensors of its own, as reported by an object in it, or the expected size.

    A batch of graphs has ``num_graphs`` (torch_geometric). Batches of other libraries have a ``batch_size``. In other
    objects, all attributes that are tensors may have the same number of rows.
    """
    for part in [batch, *parts_in(batch)]:
        for name in ("num_graphs", "batch_size"):
            size = getattr(part, name, None)
            if isinstance(size, int) and size > 0:
                return size
    if expected is not None:
        return expected
    attributes = [value for part in [batch, *parts_in(batch)] for value in getattr(part, "__dict__", {}).values()]
    lengths = {len(tensor) for tensor in tensors_in(attributes)}
    return lengths.pop() if len(lengths) == 1 else None


def size_of_filler(batch: BatchData) -> int:
    """Return a size for a filler batch. A filler batch has no weight, so its true size need not be known."""
    try:
        return infer_batch_size(batch)
    except ValueError:
        return 1


def is_single_sample(item: BatchData) -> bool:
    """Whether an item is a pair of inputs and a target with different numbers of rows, like a single sample."""
    if type(item) not in (tuple, list) or len(item) != 2 or not isinstance(item[0], torch.Tensor) or not item[0].ndim:
        return False
    target = item[1]
    if isinstance(target, torch.Tensor):
        return not target.ndim or len(target) != len(item[0])
    return isinstance(target, numbers.Number)


def is_packed(batch: BatchData) -> bool:
    """Whether a batch is a single row of several sequences, each with positions from 0."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    return isinstance(positions, torch.Tensor) and positions.ndim == 2 and len(positions) == 1


def tensors_in(data: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors with dimensions in nested data."""
    return (part for part in parts_in([data]) if isinstance(part, torch.Tensor) and part.ndim)


def parts_in(data: Tree) -> Iterator[Tree]:
    """Yield all parts of nested data, at every level."""
    values: Iterable[Tree] = ()
    if isinstance(data, Mapping):
        values = data.values()
    elif isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        values = data
    elif is_dataclass(data):
        values = [getattr(data, field.name) for field in dataclasses.fields(data)]
    for value in values:
        yield value
        yield from parts_in(value)


def is_dataclass(data: object) -> bool:
    """Whether data are an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_as_long(data: Tree, size: int) -> bool:
    """Whether data have an element for each of ``size`` samples."""
    if isinstance(data, torch.Tensor):
        return data.ndim > 0 and len(data) == size
    if isinstance(data, Mapping):
        return bool(data) and all(is_as_long(value, size) for value in data.values())
    return isinstance(data, (list, tuple)) and len(data) == size


def _signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of a model's ``forward``, or that of its class if a bare wrapper has replaced it."""
    try:
        signature = inspect.signature(model.forward)
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
            return inspect.signature(partial(type(model).forward, model))
        return signature
    except (TypeError, ValueError):  # a scripted module, for example, has no signature
        return inspect.signature(lambda *args, **kwargs: None)


class BatchAdapter:
    """Feeds batches to a model in the ways that ``Trainer.calculate_train_batch_loss()`` documents.

    ``model`` is passed to each call, because the model is wrapped during training. The keys that ``forward`` takes are
    looked up once.

    Args:
        model: the model, whose ``forward`` is examined; it may be compiled

    Attributes:
        is_new: whether the shapes of outputs and targets are still to be checked
    """

    def __init__(self, model: nn.Module) -> None:
        while isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile hides the signature
            model = model._orig_mod  # type: ignore[assignment]
        parameters = _signature(model).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._keys = [p.name for p in parameters if p.kind in named]
        self._optional = {p.name for p in parameters if p.default is not p.empty}
        self._name = type(model).__name__
        self._warned = False
        self.is_new = True
        self._first_label = first_label(model)

    def outputs_and_loss(
        self, model: nn.Module, loss_func: LossFunction | None, batch: BatchData, read: Batch | None
    ) -> BatchOutput:
        """Return the model's outputs for a batch, their loss, and the number of items averaged in the loss.

        Args:
            read: the batch as it was read, because a step may have passed other data
        """
        if type(batch) in (tuple, list) and len(batch) == 2 and loss_func is not None and batch[1] is not None:
            outputs = model(batch[0])  # the usual case
            if self.is_new:
                self.is_new = not shapes_are_known(loss_func, outputs, batch[1])
            output = {"loss": loss_func(outputs, batch[1]), "model_outputs": outputs}
        else:
            output = self._other_outputs_and_loss(model, loss_func, batch)
        num_samples = read.num_samples if read is not None and batch is read.data else None
        output["batch_size"] = size_of_filler(batch) if num_samples == 0 else infer_batch_size(batch, num_samples)
        return output

    def _other_outputs_and_loss(
        self, model: nn.Module, loss_func: LossFunction | None, batch: BatchData
    ) -> BatchOutput:
        outputs, targets = self._call(model, batch)
        if loss_func is None:
            loss = self._loss_of_outputs(outputs, targets, batch)
            items = _count_labels(batch, self._first_label)
            if items is None:
                return {"loss": loss, "model_outputs": outputs}
            # Without labels, the mean is NaN and must not count.
            loss = torch.where(items.to(loss.device) > 0, loss, 0.0)
            return {"loss": loss, "model_outputs": outputs, "num_items_in_batch": items}
        if isinstance(batch, Mapping):
            targets = self._targets_of(targets, batch, loss_func)
        if targets is None:
            raise ValueError(
                f"The batch ({type(batch).__name__}) holds no targets for loss_func. Let the dataset return "
                "(inputs, targets), or override calculate_train_batch_loss."
            )
        if self.is_new:
            self.is_new = not shapes_are_known(loss_func, outputs, targets)
        return {"loss": loss_func(outputs, targets), "model_outputs": outputs}

    def predict(self, model: nn.Module, batch: BatchData) -> Tree:
        """Return the model's outputs for a batch, ignoring its targets, if any."""
        if type(batch) in (list, tuple):  # the usual case
            return model(batch[0])
        if isinstance(batch, Mapping):
            batch = {k: v for k, v in batch.items() if k not in TARGET_KEYS}
        elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
            batch = batch[:1]
        return self._call(model, batch)[0]

    def _call(self, model: nn.Module, batch: BatchData) -> tuple[Tree, Tree]:
        """Return the model's outputs and the targets, which are all of the batch except the inputs, or ``None``."""
        if isinstance(batch, Mapping):
            inputs = {k: v for k, v in batch.items() if self._takes_all or k in self._keys}
            if not inputs:
                raise ValueError(
                    f"None of the batch's keys {sorted(map(str, batch))} is an argument of {self._name}.forward, "
                    f"which takes {self._keys}. Rename the keys, or override calculate_train_batch_loss."
                )
            return model(**inputs), {k: v for k, v in batch.items() if k not in inputs}
        if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
            return model(batch[0]), batch[1] if len(batch) > 1 else None
        return model(batch), None

    def _targets_of(self, rest: Mapping[str, Tree], batch: Mapping[str, Tree], loss_func: LossFunction) -> Tree:
        """Return the targets: the value of the one key that forward does not take, several in a dict, or a usual key.

        A usual target key that forward takes but does not need (``labels=None``) comes before other keys. If the loss
        is torch's, which takes no dict, a usual target key that forward does not take comes first, too.
        """
        usual = [key for key in rest if key in TARGET_KEYS]
        if len(rest) > 1 and len(usual) == 1 and is_of_torch(loss_func):
            self._warn_of_ignored([key for key in rest if key not in usual])
            return rest[usual[0]]
        target_key = next((key for key in TARGET_KEYS if key in batch and (not rest or key in self._optional)), None)
        if rest and (target_key is None or any(key in TARGET_KEYS for key in rest)):
            return next(iter(rest.values())) if len(rest) == 1 else rest
        self._warn_of_ignored(rest)
        return None if target_key is None else batch[target_key]

    def _warn_of_ignored(self, keys: Iterable[str]) -> None:
        if keys and not self._warned:
            self._warned = True
            warn_outside(
                f"{self._name}.forward takes no argument named {', '.join(map(repr, keys))}: ignored. Drop such "
                "keys from the dataset, or override calculate_train_batch_loss to use them."
            )

    def _loss_of_outputs(self, outputs: Tree, ignored: Tree, batch: BatchData) -> torch.Tensor:
        """Return the loss that the model itself has computed."""
        if isinstance(batch, Mapping):
            self._warn_of_ignored(ignored)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            problem = "a tensor, not a loss" if torch.is_tensor(outputs) else f"no loss in its {type(outputs).__name__}"
            raise ValueError(
                f"loss_func is None and {self._name} returned {problem}. Pass a loss_func, such as "
                "torch.nn.CrossEntropyLoss(), feed the model labels if it returns a loss then, or override "
                "calculate_train_batch_loss and calculate_eval_batch_loss: each is only for its own phase."
            )
        scalar: torch.Tensor = loss
        return scalar


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside adapters (PEFT); a model without adapters is returned as it is."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def first_label(model: nn.Module) -> int | None:
    """Return the position, in each row, of the first label that counts in the loss of a Hugging Face model.

    ``None`` for models whose loss is not a mean over the labels, and for other models.
    """
    model = without_adapters(model)
    if not hasattr(model, "loss_type") or "_loss_function" in vars(model):
        return None
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    calls_it = "loss_function" in getattr(forward, "co_names", ())
    if calls_it and model.loss_type in (None, "ForCausalLM", "ForConditionalGeneration"):
        return 1  # each label is predicted from the tokens before it
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    is_seq2seq = is_encoder_decoder and "ForConditionalGeneration" in type(model).__name__  # old ones lack loss_type
    return 0 if is_seq2seq or model.loss_type in ("ForMaskedLM", "ForTokenClassification") else None


def _count_labels(batch: BatchData, first: int | None) -> torch.Tensor | None:
    """Return the number of labels that are not ignored, starting from a position in each row; ``None`` if unknown."""
    if first is None or not isinstance(batch, Mapping):
        return None
    name, first = ("shift_labels", 0) if batch.get("shift_labels") is not None else ("labels", first)
    labels = batch.get(name)
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2:
        return None
    return labels[..., first:].ne(IGNORED_LABEL).sum()


def complete_output(output: BatchOutput, data: BatchData, num_samples: int | None, method: str, training: bool) -> None:
    """Check the output of a step and add missing entries.

    Args:
        data: the batch
        num_samples: number of samples collated into the batch, or ``None`` if unknown
        method: name of the method that returned the output, for errors
    """
    losses = output.get("loss") if type(output) is dict else None
    if not (isinstance(losses, torch.Tensor) and losses.ndim == 0 and (losses.requires_grad or not training)):
        check_loss(output, method, training)  # the usual case needs no slow checks of abstract types
        losses = output["loss"] = as_scalars(output["loss"]) if training else output["loss"]
    if "batch_size" not in output:
        output["batch_size"] = size_of_filler(data) if num_samples == 0 else infer_batch_size(data, num_samples)
    size = output["batch_size"]
    if type(size) is not int and not isinstance(size, (numbers.Real, torch.Tensor)):
        raise TypeError(f"{method} returned batch_size={size!r}; it must be a number of samples.")
    if isinstance(size, int) and size < 1:
        raise ValueError(f"{method} returned batch_size={size!r}; it must be at least 1.")
    if "num_items_in_batch" in output:
        check_items(output["num_items_in_batch"], f"{method} returned num_items_in_batch")
    if num_samples == 0:  # a filler batch
        output["batch_size"] = 0
    if not isinstance(losses, torch.Tensor) and losses is not None:
        output["loss"] = total_loss(losses)
        if losses.keys() != {"loss"}:
            output["losses"] = losses


def check_items(items: object, name: str) -> None:
    """Check a number of items, which may be a fraction, and without reading it from a device.

    Args:
        name: what has the number, for errors
    """
    if isinstance(items, torch.Tensor):
        if items.numel() != 1:
            raise ValueError(f"{name} as a tensor of shape {tuple(items.shape)}; it must be one number.")
    elif not isinstance(items, numbers.Real):
        raise TypeError(f"{name}={items!r}; it must be a number of items.")
    elif not float(items) >= 0:
        raise ValueError(f"{name}={items!r}; it must be at least 0.")


def as_scalars(losses: Losses) -> Losses:
    """Return losses in which tensors of one element, such as tensors of shape (1,), are scalars."""
    if isinstance(losses, Mapping):
        return {name: _as_scalar(loss) for name, loss in losses.items()}
    return _as_scalar(losses)


def _as_scalar(loss: torch.Tensor) -> torch.Tensor:
    return loss.reshape(()) if loss.numel() == 1 else loss


def is_number(value: object) -> bool:
    """Whether a value is a number, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def total_loss(losses: Losses) -> torch.Tensor:
    """Return the loss to minimise: the sum, if there are several losses by name."""
    total: torch.Tensor = reduce(operator.add, losses.values()) if isinstance(losses, Mapping) else losses
    return total


class Share(NamedTuple):
    """One of a fixed number of shares in a step.

    Args:
        number: the number of the share
        seed: the seed of the step, a mixture of the run's seed, the epoch and the position
        ends_step: whether this is the last share of the step on this process
    """

    number: int
    seed: int
    ends_step: bool


class Batch(NamedTuple):
    """A batch of this process, with the number of samples of all processes in the same step.

    Args:
        data: the batch, on the device
        num_samples: number of samples of this process. 0 for a filler batch, see ``is_filler``. ``None`` if only the
            step knows it.
        total_samples: number of samples of all processes in this step; ``None`` if unknown, like ``num_samples``
        is_last: whether this is the last step of the epoch
        indices: indices of the samples in the dataset, as a list or a tensor; ``None`` if unknown
        share: the share with this batch, if the number of shares is fixed; ``None`` for the batch of a process. In a
            training step, it is the last share of the step, and ``data`` has the batches of all its shares.
    """

    data: BatchData
    num_samples: int | None
    total_samples: int | None
    is_last: bool
    indices: Sequence[Index] | torch.Tensor | None = None
    share: Share | None = None

    def samples(self, output: BatchOutput) -> tuple[int, int]:
        """Return the number of samples of this process and of all processes, taken from ``output`` if unknown."""
        local = int(output["batch_size"]) if self.num_samples is None else self.num_samples
        return local, local if self.total_samples is None else self.total_samples

    @property
    def is_filler(self) -> bool:
        """Whether the batch only keeps this process in step with the others, and must get no weight."""
        return self.num_samples == 0
