"""Evaluating a few batches before training, so that a broken evaluation does not cost an epoch; it leaves no trace."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.data import ShardedLoader
from pytorch_accel_lite.events import CallbackHandler
from pytorch_accel_lite.loops.evaluation import run_evaluation
from pytorch_accel_lite.run import Run
from pytorch_accel_lite.tracking import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.utils import is_ours

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


def sanity_evaluation(trainer: Trainer, run: Run) -> None:
    """Evaluate the first batches of each evaluation dataset, and check that the watched metrics are recorded.

    Callbacks that record metrics in evaluations take part, and those that are not of this package: they may do so.

    :raises ValueError: for the first watched metric that is missing
    """
    expected = run.request.metrics
    history = _copied(trainer.run_history)
    handler = CallbackHandler()
    handler.callbacks = [c for c in trainer.callback_handler if c in expected.evaluators or not is_ours(type(c))]
    before = _counts(history)
    with _unchanged([trainer, *handler.callbacks]), _limited(run.all_eval_loaders, run.request.sanity_eval_batches):
        trainer.run_history = history
        run.is_sanity_evaluation = True
        try:
            run_evaluation(trainer, is_intermediate=False, callbacks=handler)
        finally:
            run.is_sanity_evaluation = False
    recorded = [name for name, count in _counts(history).items() if count > before.get(name, 0)]
    expected.check_evaluated(recorded, history.metric_name_prefix)


def _copied(history: RunHistory) -> RunHistory:
    """Return a history to record in that nobody sees; an empty one in place of one that may write somewhere."""
    if type(history).update_metric is InMemoryRunHistory.update_metric:
        return copy.deepcopy(history)
    empty = InMemoryRunHistory()
    empty.set_metric_name_prefix(history.metric_name_prefix)
    return empty


def _counts(history: RunHistory) -> dict[str, int]:
    return {name: len(history.get_metric_values(name)) for name in history.get_metric_names()}


@contextmanager
def _limited(loaders: Iterable[Any], num_batches: int) -> Iterator[None]:
    """Let loaders read so many batches, or fewer where they are limited already."""
    limits = [(loader, loader.limit) for loader in loaders if isinstance(loader, ShardedLoader)]
    for loader, limit in limits:
        loader.limit = num_batches if limit is None else min(limit, num_batches)
    try:
        yield
    finally:
        for loader, limit in limits:
            loader.limit = limit


@contextmanager
def _unchanged(parts: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of a trainer and of callbacks; of lists, dicts, sets and deques also what they hold."""
    before = [(vars(part), {name: (value, _held(value)) for name, value in vars(part).items()}) for part in parts]
    try:
        yield
    finally:
        for attributes, values in before:
            for value, held in values.values():
                if held is not None:
                    value.clear()
                    (value.update if isinstance(value, (dict, set)) else value.extend)(held)
            attributes.clear()
            attributes.update({name: value for name, (value, _) in values.items()})


def _held(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set, deque)) else None
