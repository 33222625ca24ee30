"""The metrics of torchmetrics by the names of their classes."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric

_MODULES = "aggregation audio classification clustering detection image nominal regression retrieval segmentation text"
#: The tasks of classification metrics, with the argument that only those of one task need.
_TASKS = {"multiclass": "num_classes", "multilabel": "num_labels"}


def create_metric(name: str, arguments: Mapping[str, Any]) -> Metric:
    """Create a metric of torchmetrics by its name, such as ``"accuracy"`` or ``"mean_squared_error"``.

    The task of a classification metric follows from its arguments.

    :param name: name of the class, in upper or lower case, with or without underscores
    :raises ValueError: if there is none, or it cannot be created with these arguments
    """
    classes = _classes()
    kind = classes.get(_plain(name))
    if kind is None:
        raise ValueError(f"metrics={name!r}: torchmetrics has no metric of this name.{_suggestion(name, classes)}")
    arguments = dict(arguments)
    if "task" in inspect.signature(kind).parameters and "task" not in arguments:
        tasks = [task for task, needed in _TASKS.items() if arguments.get(needed) is not None]
        if len(tasks) != 1:
            raise ValueError(
                f"metrics={name!r}: the task must be clear. Pass MetricsCallback({name!r}, num_classes=...) for "
                "several classes, num_labels=... for several labels of each sample, or task='binary'."
            )
        arguments["task"] = tasks[0]
    try:
        return kind(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(
            f"metrics={name!r}: torchmetrics' {kind.__name__}({listed}) failed: {str(error).rstrip('.')}. Pass its "
            f"arguments to MetricsCallback({name!r}, ...)."
        ) from error


def _classes() -> dict[str, Any]:
    """Return the classes of metrics by their names in lower case."""
    from torchmetrics import Metric

    modules = [importlib.import_module(f"torchmetrics.{module}") for module in _MODULES.split()]
    classes = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    return {_plain(kind.__name__): kind for kind in classes if issubclass(kind, Metric)}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def _suggestion(name: str, classes: Mapping[str, Any]) -> str:
    """Suggest the class that begins like a name, has it as its initials (``"mse"``), or is spelt similarly."""
    word = _plain(name)
    initials = ["".join(filter(str.isupper, kind.__name__)).lower() for kind in classes.values()]
    begun = sorted((plain for plain in classes if plain.startswith(word)), key=len)
    shortened = [plain for plain, letters in zip(classes, initials, strict=True) if letters == word]
    close = [*shortened, *begun, *difflib.get_close_matches(word, classes, n=1)]
    return f" Did you mean {classes[close[0]].__name__!r}?" if close else ""
