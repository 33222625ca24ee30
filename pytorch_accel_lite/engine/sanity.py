"""Evaluating a few batches before training, so that a broken evaluation does not cost an epoch. Leaves no trace."""

from __future__ import annotations

import copy
from contextlib import ExitStack

from pytorch_accel_lite.base.events import CallbackHandler
from pytorch_accel_lite.base.inspection import is_ours
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.data import ShardedLoader
from pytorch_accel_lite.data.map import MapLoader
from pytorch_accel_lite.engine.history import InMemoryRunHistory, RunHistory, count_values
from pytorch_accel_lite.engine.inference import run_evaluation
from pytorch_accel_lite.engine.restoring import preserving_attributes, replaced
from pytorch_accel_lite.engine.run import Run


def sanity_evaluation(trainer: TrainerLike, run: Run) -> None:
    """Evaluate the first batches of each evaluation dataset, and check that the watched metrics are recorded.

    Only callbacks that record metrics in evaluations take part, and all user-defined ones, as they may do so. If no
    batches were asked for, a single one is evaluated without any callback, where that cannot use up a stream, to find
    out whether there is a loss.

    :raises ValueError: if a watched metric is missing
    """
    expected = run.request.metrics
    is_asked_for = run.request.sanity_eval_batches > 0
    if not is_asked_for and not all(isinstance(loader, MapLoader) for loader in run.data.all_eval_loaders):
        return
    history = _copied(trainer.run_history)
    handler = CallbackHandler()
    if is_asked_for:
        handler.callbacks = [c for c in trainer.callback_handler if c in expected.evaluators or not is_ours(type(c))]
    before = count_values(history)
    with ExitStack() as stack:
        stack.enter_context(preserving_attributes(trainer, *handler.callbacks))
        stack.enter_context(replaced(run, is_sanity_evaluation=True, set_apart={}))
        for loader in run.data.all_eval_loaders:
            if isinstance(loader, ShardedLoader):
                most = run.request.sanity_eval_batches or 1
                limit = most if loader.limit is None else min(loader.limit, most)
                stack.enter_context(replaced(loader, limit=limit))
        trainer.run_history = history
        run_evaluation(trainer, is_intermediate=False, callbacks=handler)
    recorded = [name for name, count in count_values(history).items() if count > before.get(name, 0)]
    expected.check_evaluated(recorded, history.metric_name_prefix, losses_only=not is_asked_for)


def _copied(history: RunHistory) -> RunHistory:
    """Return a throwaway copy of a history, or an empty one if updates of the history might write somewhere."""
    if type(history).update_metric is InMemoryRunHistory.update_metric:
        return copy.deepcopy(history)
    empty = InMemoryRunHistory()
    empty.set_metric_name_prefix(history.metric_name_prefix)
    return empty
