"""What a batch is: its size, how it is fed to a model, and how outputs become one again."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import numbers
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from accelerate.utils import recursively_apply
from accelerate.utils.operations import honor_type
from torch import nn

from pytorch_accel_lite.checks.losses import check_loss, shapes_are_known

BatchOutput = dict[str, Any]
_IGNORED_LABEL = -100  # of torch's cross entropy
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


def find_batch_size(batch: Any, expected: int | None = None) -> int:
    """Return how many samples a batch holds.

    :param expected: how many were collated, ``None`` when that is not known. It is the answer where anything in the
        batch is as long; else (the collate function has left some out) the length of the first tensor with dimensions.
    :raises ValueError: when nothing tells it
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else None
    if isinstance(first, torch.Tensor) and first.ndim and expected in (None, first.shape[0]):
        return first.shape[0]  # the usual case, without a look at abstract types
    if expected is not None and any(_is_as_long(part, expected) for part in _parts(batch)):
        return expected
    length = next((len(tensor) for tensor in _tensors(batch)), expected)
    if length is None:
        raise ValueError(
            f"No batch size can be told from a batch of type {type(batch).__name__} without tensors. Return "
            "'batch_size' from calculate_train_batch_loss / calculate_eval_batch_loss."
        )
    return length


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with dimensions in something nested."""
    return (part for part in _parts([data]) if isinstance(part, torch.Tensor) and part.ndim)


def _parts(data: Any) -> Iterator[Any]:
    """Yield what something nested consists of, and what that consists of."""
    values: Iterable[Any] = ()
    if isinstance(data, Mapping):
        values = data.values()
    elif isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        values = data
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = [getattr(data, field.name) for field in dataclasses.fields(data)]
    for value in values:
        yield value
        yield from _parts(value)


def _is_as_long(data: Any, size: int) -> bool:
    """Whether something has an element for each of so many samples."""
    if isinstance(data, torch.Tensor):
        return data.ndim > 0 and len(data) == size
    if isinstance(data, Mapping):
        return bool(data) and all(_is_as_long(value, size) for value in data.values())
    return isinstance(data, (list, tuple)) and len(data) == size


def is_list_of_samples(data: Any, size: int) -> bool:
    """Whether a list has an element for each sample, and not a column of all of them in each element.

    Where it could be either, as many elements as samples, those of samples are alike: in their types and, but for the
    length, in their shapes.
    """
    if not isinstance(data, (list, tuple)) or len(data) != size:
        return False
    as_long = [_is_as_long(element, size) for element in data]
    kinds = {(type(element), element.shape[1:] if isinstance(element, torch.Tensor) else None) for element in data}
    return not any(as_long) or (not all(as_long) and len(kinds) == 1)


def split_batch(batch: Any, parts: int, size: int) -> list[tuple[Any, int]]:
    """Split a batch into so many parts, as even as possible, each with its size; not more than it has samples.

    Tensors whose first dimension is that of the samples are split, and so are lists with an element for each sample.
    Anything else is in every part.

    :param size: how many samples it has
    :raises ValueError: when nothing in it has an element for each
    """
    if not any(_is_as_long(part, size) for part in _parts([batch])):
        raise ValueError(
            f"A batch of type {type(batch).__name__} cannot be split into micro-batches: nothing in it has an element "
            f"for each of its {size} samples. Let collate_fn return tensors, lists or dicts of such."
        )
    parts = min(parts, size)
    bounds = [size * part // parts for part in range(parts + 1)]
    return [(slice_batch(batch, begin, end, size), end - begin) for begin, end in itertools.pairwise(bounds)]


def slice_batch(data: Any, begin: int, end: int, size: int) -> Any:
    """Return some of the ``size`` samples of a batch, see :func:`split_batch`."""
    if isinstance(data, torch.Tensor):
        return data[begin:end] if data.ndim and len(data) == size else data
    if isinstance(data, Mapping):
        return {key: slice_batch(value, begin, end, size) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        if is_list_of_samples(data, size):
            return data[begin:end]
        return honor_type(data, [slice_batch(value, begin, end, size) for value in data])
    return data


def _signature(model: nn.Module) -> inspect.Signature:
    """Return the arguments of a model's ``forward``; those of its class, when it was replaced by a mere wrapper."""
    try:
        signature = inspect.signature(model.forward)
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
            return inspect.signature(partial(type(model).forward, model))
        return signature
    except (TypeError, ValueError):  # of a scripted module, say, which knows them otherwise
        return inspect.signature(lambda *args, **kwargs: None)


class BatchAdapter:
    """Feeds batches to a model in the ways that :meth:`Trainer.calculate_train_batch_loss` documents.

    ``model`` is given at each call, because it is wrapped while training; which keys its ``forward`` takes is
    looked up once.
    """

    def __init__(self, model: nn.Module) -> None:
        while isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile hides the signature
            model = model._orig_mod  # type: ignore[assignment]
        parameters = _signature(model).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._keys = [p.name for p in parameters if p.kind in named]
        self._name = type(model).__name__
        self._warned = False
        self._is_new = True
        self._first_label = _first_label(model)

    def outputs_and_loss(self, model: nn.Module, loss_func: Any, batch: Any, num_samples: int | None) -> BatchOutput:
        """Return the model's outputs for a batch, the loss of them, and what that is a mean over.

        :param num_samples: how many were collated into the batch, if that is known
        """
        if type(batch) in (tuple, list) and len(batch) == 2 and loss_func is not None and batch[1] is not None:
            outputs = model(batch[0])  # the usual case
            if self._is_new:
                self._is_new = not shapes_are_known(loss_func, outputs, batch[1])
            output = {"loss": loss_func(outputs, batch[1]), "model_outputs": outputs}
        else:
            output = self._other_outputs_and_loss(model, loss_func, batch)
        output["batch_size"] = find_batch_size(batch, num_samples)
        return output

    def _other_outputs_and_loss(self, model: nn.Module, loss_func: Any, batch: Any) -> BatchOutput:
        outputs, targets = self._call(model, batch)
        if loss_func is None:
            loss = self._own_loss(outputs, targets, batch)
            items = _count_labels(batch, self._first_label)
            if items is None:
                return {"loss": loss, "model_outputs": outputs}
            # Without any label the mean is NaN, of which no part counts.
            loss = torch.where(items.to(loss.device) > 0, loss, 0.0)
            return {"loss": loss, "model_outputs": outputs, "num_items_in_batch": items}
        if isinstance(batch, Mapping):
            targets = _targets_of(targets, batch)
        if targets is None:
            raise ValueError(
                f"The batch ({type(batch).__name__}) holds no targets for loss_func. Let the dataset return "
                "(inputs, targets), or override calculate_train_batch_loss."
            )
        return {"loss": loss_func(outputs, targets), "model_outputs": outputs}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for a batch, whose targets, if any, are not used."""
        if isinstance(batch, Mapping):
            batch = {k: v for k, v in batch.items() if k not in TARGET_KEYS}
        elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
            batch = batch[:1]
        return self._call(model, batch)[0]

    def _call(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the model's outputs, and the targets: what the batch holds besides the inputs (or ``None``)."""
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

    def _own_loss(self, outputs: Any, left_out: Any, batch: Any) -> Any:
        """Return the loss that the model itself returned."""
        if isinstance(batch, Mapping) and left_out and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._name}.forward takes no argument named {', '.join(map(repr, left_out))}: left out of "
                "the call. Drop them from the dataset, or override calculate_train_batch_loss to use them.",
                stacklevel=2,
            )
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            raise ValueError(
                f"loss_func is None and {self._name} returned no loss in its {type(outputs).__name__}. "
                "Pass a loss_func, or feed the model the labels that make it return one."
            )
        return loss


def _first_label(model: nn.Module) -> int | None:
    """Return the position of the first label in each row that counts in the loss of a Hugging Face model.

    ``None`` for models whose loss is no mean over the labels, and for those of others.
    """
    get_base_model = getattr(model, "get_base_model", None)  # of adapters (PEFT)
    if callable(get_base_model):
        model = get_base_model()
    if not hasattr(model, "loss_type") or "_loss_function" in vars(model):
        return None
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    calls_it = "loss_function" in getattr(forward, "co_names", ())
    if calls_it and model.loss_type in (None, "ForCausalLM", "ForConditionalGeneration"):
        return 1  # each label is predicted from what comes before it
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    is_seq2seq = is_encoder_decoder and "ForConditionalGeneration" in type(model).__name__  # old ones have no loss_type
    return 0 if is_seq2seq or model.loss_type in ("ForMaskedLM", "ForTokenClassification") else None


def _count_labels(batch: Any, first: int | None) -> torch.Tensor | None:
    """Return how many labels of a batch are not ignored, from a position in each row on; ``None`` when not known."""
    if first is None or not isinstance(batch, Mapping):
        return None
    name, first = ("shift_labels", 0) if batch.get("shift_labels") is not None else ("labels", first)
    labels = batch.get(name)
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2:
        return None
    return labels[..., first:].ne(_IGNORED_LABEL).sum()


def _targets_of(rest: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    """The one key that forward does not take; else all such keys; else a key with a usual name."""
    if rest:
        return next(iter(rest.values())) if len(rest) == 1 else rest
    return next((batch[key] for key in TARGET_KEYS if key in batch), None)


def complete_output(output: BatchOutput, data: Any, num_samples: int | None, method: str, training: bool) -> None:
    """Check what a step returned, and add what it left out.

    :param data: what the step was given, and ``num_samples`` how many samples were collated into it, if that is known
    :param method: the method that returned it, for errors
    """
    losses = output.get("loss") if type(output) is dict else None
    if not (isinstance(losses, torch.Tensor) and losses.ndim == 0 and (losses.requires_grad or not training)):
        check_loss(output, method, training)  # the usual case is done without a look at abstract types
        losses = output["loss"] = _as_scalars(output["loss"]) if training else output["loss"]
    if "batch_size" not in output:
        output["batch_size"] = find_batch_size(data, num_samples or None)
    size = output["batch_size"]
    if type(size) is not int and not isinstance(size, (numbers.Real, torch.Tensor)):
        raise TypeError(f"{method} returned batch_size={size!r}; it must be a number of samples.")
    if isinstance(size, int) and size < 1:
        raise ValueError(f"{method} returned batch_size={size!r}; it must be at least 1.")
    if num_samples == 0:  # the batch only keeps this process in step with the others
        output["batch_size"] = 0
    if not isinstance(losses, torch.Tensor) and losses is not None:
        output["loss"] = total_loss(losses)
        if losses.keys() != {"loss"}:
            output["losses"] = losses


def _as_scalars(losses: Any) -> Any:
    """Return losses with those of one element, of shape (1,) say, as scalars."""
    if isinstance(losses, Mapping):
        return {name: _as_scalars(loss) for name, loss in losses.items()}
    return losses.reshape(()) if losses.numel() == 1 else losses


def total_loss(losses: Any) -> torch.Tensor:
    """Return the loss that is minimised: the sum, when there are several by name."""
    total: torch.Tensor = reduce(operator.add, losses.values()) if isinstance(losses, Mapping) else losses
    return total


class ListOfSamples(list[Any]):
    """Outputs with an element for each sample, as models for detection return them, whatever the elements are."""


def to_cpu(outputs: Any, size: int | None = None) -> Any:
    """Return nested outputs as tensors on the CPU, in plain tuples, lists and dicts.

    Entries without a dimension for the samples (a mean loss, say) and entries that are no tensors are left out of
    dicts; elsewhere they are an error.

    :param size: how many samples they are of: a list with an element for each is kept as such
    """
    if size is not None and type(outputs) is list and is_list_of_samples(outputs, size):
        return ListOfSamples(recursively_apply(lambda tensor: tensor.detach().cpu(), outputs))
    if isinstance(outputs, torch.Tensor):
        if not outputs.ndim:
            raise ValueError("predict: the model returned a tensor without a dimension for the samples.")
        return outputs.detach().cpu()
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if isinstance(outputs, Mapping):
        return {k: to_cpu(v) for k, v in outputs.items() if next(_tensors(v), None) is not None}
    if isinstance(outputs, (list, tuple)):
        return honor_type(outputs, map(to_cpu, outputs))
    raise TypeError(
        f"predict: the model returned {type(outputs).__name__}; tensors, or tuples, lists and dicts of tensors, "
        "were expected. Override calculate_predict_batch_output to return such."
    )


def concatenate_if_possible(parts: Sequence[Any]) -> Any:
    """Concatenate nested outputs along their first dimension, or lists; return the list of parts where that fails."""
    if next(_tensors(parts), None) is None:
        return list(itertools.chain(*parts)) if isinstance(parts[0], list) else list(parts)
    try:
        return concatenate(parts)
    except (ValueError, TypeError, KeyError):
        return list(parts)


def concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate nested outputs of the same structure along their first dimension."""
    first = parts[0]
    if any(isinstance(part, ListOfSamples) for part in parts):
        return ListOfSamples(itertools.chain(*parts))
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            raise ValueError(
                f"predict: outputs of shapes {sorted({tuple(p.shape[1:]) for p in parts})} per sample cannot be "
                "concatenated. Pad them to one shape in calculate_predict_batch_output."
            ) from error
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            f"predict: the model returned lists of {sorted({len(part) for part in parts})} elements, which cannot be "
            "concatenated. Return tensors or dicts in calculate_predict_batch_output, or a list of one for each sample."
        )
    return honor_type(first, map(concatenate, zip(*parts, strict=True)))
