"""Metrics of torchmetrics by name. By default, their task and number of classes follow from the outputs."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytorch_accel_lite.extension_tools.plain_types import Tree
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr

if TYPE_CHECKING:
    from torchmetrics import Metric

_MODULES = (
    "aggregation", "audio", "classification", "clustering", "detection", "image", "nominal", "regression", "retrieval",
    "segmentation", "text",
)  # fmt: skip
#: Common names of metrics, besides the names of their classes and their initials, such as "mse".
_ALIASES = {
    "acc": "accuracy",
    "auc": "auroc",
    "rocauc": "auroc",
    "averageprecisionscore": "averageprecision",
    "f1": "f1score",
    "iou": "jaccardindex",
    "mcc": "matthewscorrcoef",
    "r2": "r2score",
    "sensitivity": "recall",
}
#: Classes that give the accuracy of several classes if they average over samples, as they do by default.
_ACCURACIES_OF_SAMPLES = ("MulticlassF1Score", "MulticlassFBetaScore", "MulticlassPrecision", "MulticlassRecall")
#: Tasks of classification metrics, with the argument that only this task needs.
_TASKS = {"multiclass": "num_classes", "multilabel": "num_labels"}


class Classification(NamedTuple):
    """The task of a classifier, as far as its outputs and targets show.

    Attributes:
        task: ``"binary"``, ``"multiclass"`` or ``"multilabel"``
        size: the number of classes or labels; 2 in a binary task
    """

    task: str
    size: int

    @classmethod
    def of(cls, predictions: torch.Tensor, targets: torch.Tensor, may_be_probabilities: bool = False) -> Classification:
        """Return the task that the shapes of outputs and targets show. No values are read.

        Args:
            may_be_probabilities: whether targets of the shape of the outputs are probabilities of classes

        Raises:
            ValueError: if the shapes are not those of a classifier
        """
        shape, wanted = predictions.shape, targets.shape
        is_of_classes = predictions.is_floating_point() and not targets.is_floating_point()
        one_each = shape[1:2] in ((), (1,)) and shape == wanted
        if one_each or _has_one_channel(shape, wanted) or _has_one_channel(wanted, shape):
            return cls("binary", 2)
        if may_be_probabilities and shape == wanted:
            return cls("multiclass", shape[1])
        if is_of_classes and len(shape) == len(wanted) + 1 and shape[0] == wanted[0] and shape[2:] == wanted[1:]:
            return cls("multiclass", shape[1])
        if shape == wanted and len(shape) == 2:  # with more dimensions, these may be pixels of one label
            return cls("multilabel", shape[1])
        advice = "Pass MetricsCallback(names, num_classes=...), num_labels=..., or task='binary'."
        if is_of_classes and len(shape) > 2 and shape[:-1] == wanted:
            advice = (
                "Classes are expected in dimension 1, not in the last. Pass MetricsCallback(names, transform), where "
                "transform(batch, output) returns output['model_outputs'].logits.flatten(0, 1) and "
                "batch['labels'].flatten(), for example; and ignore_index=-100 if some labels do not count."
            )
        raise ValueError(
            f"the task of the metrics cannot be told from outputs {short_repr(predictions)} and targets "
            f"{short_repr(targets)}. {advice}"
        )

    @property
    def arguments(self) -> dict[str, object]:
        """The task as arguments of a torchmetrics metric."""
        needed = _TASKS.get(self.task)
        return {"task": self.task} | ({needed: self.size} if needed else {})


def with_shape_of_targets(predictions: Tree, targets: Tree, *others: Tree) -> tuple[Tree, ...]:
    """Return the arguments of a metric without a single channel that only the predictions or the targets have."""
    are_tensors = isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor)
    if are_tensors and _has_one_channel(predictions.shape, targets.shape):
        predictions = predictions.squeeze(1)
    elif are_tensors and _has_one_channel(targets.shape, predictions.shape):
        targets = targets.squeeze(1)
    return (predictions, targets, *others)


def as_labels(targets: torch.Tensor) -> torch.Tensor:
    """Return targets of 0.0 and 1.0, as losses take them, as integers; others as -1, which metrics refuse."""
    return torch.where(targets == targets.round(), targets, -1).long() if targets.is_floating_point() else targets


def are_labels(targets: Tree) -> bool:
    """Whether targets may be labels of classes: they are no fractions."""
    is_float = isinstance(targets, torch.Tensor) and targets.is_floating_point()
    return not is_float or bool((targets == targets.round()).all())


def takes_probabilities(loss_func: object) -> bool:
    """Whether targets of the shape of the outputs are probabilities of classes for this loss, such as one-hot ones."""
    return isinstance(loss_func, torch.nn.CrossEntropyLoss) or loss_func is torch.nn.functional.cross_entropy


def is_accuracy(metric: Metric) -> bool:
    """Whether a metric of another name gives the accuracy, as it averages over the samples of all classes."""
    is_of_samples = getattr(metric, "average", None) == "micro" and getattr(metric, "top_k", 1) == 1
    return is_of_samples and type(metric).__name__ in _ACCURACIES_OF_SAMPLES


def gives_logits(loss_func: object) -> bool:
    """Whether a model with this loss gives logits of binary labels."""
    kinds = (torch.nn.BCEWithLogitsLoss, torch.nn.MultiLabelSoftMarginLoss)
    functions = (torch.nn.functional.binary_cross_entropy_with_logits, torch.nn.functional.multilabel_soft_margin_loss)
    return isinstance(loss_func, kinds) or loss_func in functions


def below_0(logits: torch.Tensor) -> torch.Tensor:
    """Return logits that all lie between 0 and 1 reduced by 2, which leaves their softmax the same; others as is."""
    if not logits.is_floating_point():
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits - 2 * ((logits >= 0) & (logits <= 1)).all()


def _has_one_channel(shape: torch.Size, wanted: torch.Size) -> bool:
    return shape[1:2] == (1,) and shape[:1] + shape[2:] == wanted


class NamedMetric:
    """A metric given by its name, and not created yet.

    Args:
        name: name of the class, in upper or lower case, with or without underscores; its initials, such as ``"mse"``;
            or a common name, such as ``"f1"``, ``"auc"``, ``"iou"`` and ``"top5"``
        arguments: arguments for the metric

    Attributes:
        needs_task: whether ``create()`` needs the task of the classifier, which the arguments do not give

    Raises:
        ValueError: if there is no such metric
    """

    def __init__(self, name: str, arguments: Mapping[str, object]) -> None:
        self.arguments = dict(arguments)
        classes = _classes()
        word = _normalised(name)
        top = re.fullmatch(r"top(\d+)(accuracy|acc)?", word)
        if top:
            word = "accuracy"
            self.arguments = {"top_k": int(top[1])} | self.arguments
        word = _ALIASES.get(word, word)
        initials = [key for key, kind in classes.items() if word == re.sub("[^A-Z]", "", kind.__name__).lower()]
        found = word if word in classes else initials[0] if len(initials) == 1 else None
        if found is None:
            raise ValueError(
                f"metrics={name!r}: torchmetrics has no metric of this name.{_suggestion(word, classes)} "
                f"{_describe_common_metrics()}"
            )
        self._kind = classes[found]
        takes_task = "task" in inspect.signature(self._kind).parameters
        tasks = [task for task, needed in _TASKS.items() if self.arguments.get(needed) is not None]
        if takes_task and "task" not in self.arguments and len(tasks) == 1:
            self.arguments["task"] = tasks[0]
        self.needs_task = takes_task and "task" not in self.arguments

    def create(self, classification: Classification | None = None) -> Metric:
        """Create the metric, with the classifier's task if the metric needs a task."""
        known = {} if classification is None or not self.needs_task else classification.arguments
        metric: Metric = self._kind(**known, **self.arguments)
        return metric

    @property
    def higher_is_better(self) -> bool | None:
        """The direction that the metric declares, if it is the same in all tasks."""
        kinds = importlib.import_module("torchmetrics.classification")
        kind = getattr(kinds, f"Multiclass{self._kind.__name__}", self._kind)
        declared: bool | None = getattr(kind, "higher_is_better", None)
        return declared


def _classes() -> dict[str, type[Metric]]:
    """Return the classes of metrics by their names in lower case."""
    from torchmetrics import Metric

    modules = [importlib.import_module(f"torchmetrics.{module}") for module in _MODULES]
    classes = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    return {_normalised(kind.__name__): kind for kind in classes if issubclass(kind, Metric)}


def _normalised(name: str) -> str:
    return re.sub(r"[_\-\s@]", "", name.lower())


def _suggestion(word: str, classes: Mapping[str, type[Metric]]) -> str:
    """Suggest the class that begins with a name, or is spelt similarly."""
    longer = sorted((key for key in classes if key.startswith(word)), key=len)
    matches = [*longer, *difflib.get_close_matches(word, classes, n=1)]
    return f" Did you mean {classes[matches[0]].__name__!r}?" if matches else ""


def _describe_common_metrics() -> str:
    """List the most common metrics."""
    classification = importlib.import_module("torchmetrics.classification")
    regression = importlib.import_module("torchmetrics.regression")
    tasks = [name for name in classification.__all__ if f"Multiclass{name}" in classification.__all__]
    return f"For classifiers, there are {', '.join(tasks)}; for regression, {', '.join(regression.__all__)}."
