"""Feeding batches to a model: the inputs, the targets and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from pytorch_accel_lite.base.modules import without_adapters
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch, infer_batch_size, size_of_filler
from pytorch_accel_lite.data.outputs import mean_that_counts
from pytorch_accel_lite.data.sources import BatchData, BatchOutput

#: Computes the loss, or several losses by name, from the outputs of a model and the targets.
LossFunction: TypeAlias = Callable[..., torch.Tensor | Mapping[str, torch.Tensor]]
_ELEMENTWISE = {
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.poisson_nll_loss, functional.kl_div),
}
_CROSS_ENTROPY = {nn.CrossEntropyLoss, functional.cross_entropy}


class LossShapeError(ValueError):
    """Raised for shapes of outputs and targets that a loss accepts, but does not compare sample by sample."""


def is_of_torch(loss: object) -> bool:
    """Whether a loss function or module is torch's own, and therefore takes tensors."""
    return str(getattr(_kind(loss), "__module__", "")).startswith("torch.nn")


def _kind(loss: object) -> object:
    """Return the class of a loss module, or a loss function, also if ``partial`` fixes some of its arguments."""
    loss = loss.func if isinstance(loss, partial) else loss
    return type(loss) if isinstance(loss, nn.Module) else loss


def shapes_are_known(loss: LossFunction | None, outputs: Tree, targets: Tree) -> bool:
    """Check shapes; return whether the check is conclusive, which it is not for a batch with a single element.

    Args:
        loss: a loss function, or a loss module

    Raises:
        LossShapeError: if the loss accepts these shapes, but does not compute the loss of each sample
    """
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return True
    kind = _kind(loss)
    if kind in _ELEMENTWISE:
        _check_broadcasting(tuple(outputs.shape), tuple(targets.shape))
        return outputs.numel() > 1
    if kind in _CROSS_ENTROPY and outputs.ndim > 1 and outputs.shape[1] == 1:
        raise LossShapeError(
            f"loss_func: cross entropy over the single class of outputs of shape {tuple(outputs.shape)} is always 0. "
            "For binary classification with one output use BCEWithLogitsLoss, with targets of the same shape, or give "
            "the model an output for each class."
        )
    return True


def _check_broadcasting(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    try:
        broadcast = tuple(torch.broadcast_shapes(outputs, targets))  # type: ignore[no-untyped-call]
    except RuntimeError:  # the loss function itself rejects these shapes
        return
    if broadcast not in (outputs, targets):
        raise LossShapeError(
            f"loss_func: outputs of shape {outputs} and targets of shape {targets} would be broadcast to {broadcast}, "
            "comparing each output with the targets of other samples. Make the shapes equal, for example with "
            "targets.unsqueeze(1) in the dataset or outputs.squeeze(1) in the model."
        )


#: The default ``ignore_index`` of torch's cross entropy.
IGNORED_LABEL = -100
#: Usual names of targets in batches that are dicts.
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


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
        self._targets_are_apart = False  # whether batches have had targets that the model does not take
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
            return {"loss": mean_that_counts(loss, items), "model_outputs": outputs, "num_items_in_batch": items}
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
        """Return the model's outputs for a batch without its targets, if any, which ``forward`` may take.

        If the model takes targets besides others that it does not take, they are inputs.
        """
        if type(batch) in (list, tuple):  # the usual case
            return model(batch[0])
        if isinstance(batch, Mapping):
            targets = self._targets_to_leave_out(batch)
            batch = {k: v for k, v in batch.items() if k not in targets}
        return self._call(model, batch)[0]

    def _targets_to_leave_out(self, batch: Mapping[str, Tree]) -> set[str]:
        """Return the keys of targets that the model could be given but does not need."""
        optional = [key for key in TARGET_KEYS if key in batch and key in self._optional]
        unnamed = {key for key in TARGET_KEYS if key in batch and key not in self._keys}
        if self._targets_are_apart or (unnamed and not self._takes_all):
            return set()
        return unnamed | {*optional[:1]}

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
        if usual:
            self._targets_are_apart = True
        if len(rest) > 1 and len(usual) == 1 and is_of_torch(loss_func):
            self._warn_of_ignored([key for key in rest if key not in usual])
            return rest[usual[0]]
        target_key = next((key for key in TARGET_KEYS if key in batch and (not rest or key in self._optional)), None)
        if rest and (usual or target_key is None):
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
