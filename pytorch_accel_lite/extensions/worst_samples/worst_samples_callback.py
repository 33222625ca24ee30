"""Computing the loss of each sample in an evaluation, and keeping the largest of all processes."""

from __future__ import annotations

import copy
import inspect
import math
import operator
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import nn

from pytorch_accel_lite.extending import Run, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_function, check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import (
    Index,
    is_list_of_samples,
    is_named,
    is_number,
    slice_batch,
)
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import default_transform
from pytorch_accel_lite.extension_tools.texts_and_pages import align, find_plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class WorstSample(NamedTuple):
    """A sample with a large loss.

    Args:
        index: index in the dataset; ``None`` for a stream
        loss: loss of this sample alone
        prediction: the predicted class for a classifier, otherwise the model's output
        target: the target
        dataset: name of the dataset if several are evaluated, otherwise empty
    """

    index: Any
    loss: float
    prediction: Any
    target: Any
    dataset: str = ""


class WorstSamplesCallback(TrainerCallback):
    """Keep the samples with the largest losses in the latest evaluation, over all processes.

    The losses stay on the device until the evaluation ends.

    Args:
        k: number of samples to keep
        loss: called as ``loss(model_outputs, targets)``; returns a loss for each sample, or any metric that is larger
            for worse samples: a tensor of shape ``(batch_size, ...)``, whose further dimensions are averaged, or a
            list. Defaults to the trainer's loss function with ``reduction="none"``.
        transform: called as ``transform(batch, batch_output)``; returns the outputs and the targets: tensors, dicts of
            tensors, or lists with an element for each sample. Defaults to the model's output (or its ``logits``) and
            the batch's second element (or its ``labels``).
        show: print a table after each evaluation

    Attributes:
        samples: list of ``WorstSample``, largest loss first; a NaN loss counts as the largest
    """

    affects_training = False

    def __init__(
        self,
        k: int = 10,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        transform: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        *,
        show: bool = False,
    ) -> None:
        self.k = check_positive_int("k", k)
        self.loss = None if loss is None else check_function("loss", loss)
        self.transform = default_transform if transform is None else check_function("transform", transform)
        self.show = show
        self.samples: list[WorstSample] = []
        # By run, as an evaluation may interrupt another one.
        self._kept: dict[Run, tuple[Any, ...]] = {}  # indices, losses, predictions and targets
        self._gathered: dict[Run, list[WorstSample]] = {}  # those of the datasets before

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.eval_dataloader is not None:
            self._loss = self.loss or _without_reduction(trainer.loss_func)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.outer is None and trainer.eval_dataloader not in trainer.eval_dataloaders[1:]:
            self._kept, self._gathered = {}, {}  # of evaluations that failed

    def on_eval_step_end(
        self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: object
    ) -> None:
        indices = trainer.run.batch_indices
        if indices == []:  # a filler batch, which only keeps the processes in step
            return
        outputs, targets = self.transform(batch, batch_output)
        size = len(targets) if isinstance(targets, torch.Tensor) else int(batch_output["batch_size"])
        with torch.no_grad():
            losses = _per_sample(self._loss(outputs, targets), size)
        numbers = _numbers(indices, size, losses.device)
        columns = numbers, losses, _rows(_predicted(outputs, targets), size), _rows(targets, size)
        if trainer.run in self._kept:
            columns = tuple(map(_join, self._kept[trainer.run], columns))
        ranking = torch.nan_to_num(columns[1], nan=math.inf, posinf=math.inf)
        largest = ranking.topk(min(self.k, len(ranking))).indices
        self._kept[trainer.run] = tuple(_select(column, largest) for column in columns)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        run = trainer.run
        columns = send_to_device(self._kept.pop(run, ()), "cpu")
        name = trainer.run_history.metric_name_prefix.removesuffix("_")
        local_samples = [WorstSample._make([*map(_plain, row), name]) for row in zip(*columns, strict=True)]
        gathered = self._gathered.pop(run, [])
        for samples in trainer.data_ranks.all_gather_object(local_samples):
            gathered.extend(samples)
        gathered.sort(key=lambda s: math.inf if math.isnan(s.loss) else s.loss, reverse=True)
        self.samples = gathered[: self.k]
        if trainer.eval_dataloader in trainer.eval_dataloaders[:-1]:
            self._gathered[run] = self.samples
        if self.show:
            trainer.print(self)

    def __str__(self) -> str:
        """Return the samples as a table."""
        rows = [
            (f"{s.dataset} {s.index}".strip(), f"{s.loss:.4g}", _short(s.prediction), _short(s.target))
            for s in self.samples
        ]
        return "\n".join(align([("index", "loss", "prediction", "target"), *rows]))

    def plot(
        self, dataset: Any, path: str | os.PathLike[str] | None = None, classes: list[str] | None = None
    ) -> Figure:
        """Draw the samples, which must be images, as a contact sheet (extra ``plot``).

        Args:
            dataset: the evaluated dataset, or dict of datasets. Samples are tuples that begin with an image of shape
                ``(height, width)``, ``(channels, height, width)`` or ``(height, width, channels)``
            path: where to save the picture; ``None`` does not save it
            classes: names of the classes

        Raises:
            ValueError: if there is nothing to draw
        """
        if not self.samples or any(sample.index is None for sample in self.samples):
            raise ValueError("Nothing to draw: no samples with an index have been evaluated yet.")

        def name(value: Any) -> str:
            return classes[value] if classes is not None and isinstance(value, int) else _short(value)

        titles = [
            f"predicted {name(s.prediction)}, true {name(s.target)}\nloss {s.loss:.3g}, #{s.index}"
            for s in self.samples
        ]
        images = [_dataset_of(sample, dataset)[sample.index][0] for sample in self.samples]
        return find_plots("WorstSamplesCallback.plot").plot_sheet(images, titles, path)


def _dataset_of(sample: WorstSample, datasets: Any) -> Any:
    """Return the dataset of a sample, which is ``datasets`` itself unless several were evaluated."""
    if not sample.dataset or not is_named(datasets):
        return datasets
    # An averaged model adds its own prefix to the name.
    names = [name for name in datasets if f"_{sample.dataset}".endswith(f"_{name}")]
    return datasets[max(names, key=len, default=sample.dataset)]


def _numbers(indices: list[Index] | None, size: int, device: torch.device) -> list[Index] | list[None] | torch.Tensor:
    """Return the index of each row of a batch, or ``None`` for each, as where ``collate_fn`` has left samples out."""
    if indices is None or len(indices) != size:
        return [None] * size
    with suppress(TypeError):  # some indices are names
        return torch.as_tensor([operator.index(index) for index in indices], device=device)
    return indices


def _without_reduction(loss_func: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Return a version of the loss function that gives a value for each sample."""
    if isinstance(loss_func, nn.Module) and hasattr(loss_func, "reduction"):
        loss_func = copy.copy(loss_func)
        loss_func.reduction = "none"
        return loss_func  # type: ignore[no-any-return]
    with suppress(TypeError, ValueError):  # not written in Python
        if "reduction" in inspect.signature(loss_func).parameters:  # like functions of torch.nn.functional
            return partial(loss_func, reduction="none")
    raise ValueError(
        f"WorstSamplesCallback: cannot get per-sample losses from the loss function {loss_func!r}. Pass loss=, a "
        "function of outputs and targets that returns one value per sample."
    )


def _per_sample(losses: Any, size: int) -> torch.Tensor:
    if isinstance(losses, (list, tuple)) and all(map(is_number, losses)):
        losses = torch.tensor([float(loss) for loss in losses])
    if not isinstance(losses, torch.Tensor) or not losses.ndim or len(losses) != size:
        shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(f"WorstSamplesCallback: loss must return one value for each of {size} samples, not {shape}.")
    return losses.detach().float().flatten(1).mean(1) if losses.ndim > 1 else losses.detach().float()


def _predicted(outputs: Any, targets: Any) -> Any:
    """Return a classifier's predicted classes, or any other model's outputs."""
    if not isinstance(outputs, torch.Tensor):
        return recursively_apply(torch.Tensor.detach, outputs)
    outputs = outputs.detach()
    if not isinstance(targets, torch.Tensor) or outputs.ndim != targets.ndim + 1 or targets.is_floating_point():
        return outputs
    return outputs.argmax(1 if outputs.shape[2:] == targets.shape[1:] else -1)  # torch's class dimension, or the last


def _rows(values: Any, size: int) -> Any:
    """Return values as a tensor, or as a list with an element for each sample."""
    if isinstance(values, torch.Tensor) or is_list_of_samples(values, size):
        return values
    return [slice_batch(values, position, position + 1, size) for position in range(size)]


def _join(kept: Any, new: Any) -> Any:
    is_regular = isinstance(kept, torch.Tensor) and isinstance(new, torch.Tensor) and kept.shape[1:] == new.shape[1:]
    return torch.cat([kept, new]) if is_regular else [*kept, *new]


def _select(values: Any, positions: torch.Tensor) -> Any:
    return values[positions] if isinstance(values, torch.Tensor) else [values[i] for i in positions.tolist()]


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.numel() == 1 else value.clone()


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
