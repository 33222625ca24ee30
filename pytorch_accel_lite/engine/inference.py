"""Evaluation and prediction runs, within a training run or on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from pytorch_accel_lite.base.events import CallbackHandler
from pytorch_accel_lite.base.modules import preserving_modes
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.base.run_settings import RunRequest
from pytorch_accel_lite.distributed.stop_coordinator import StopCoordinator
from pytorch_accel_lite.engine.evaluation import create_eval_loaders, evaluate_all, prefixed
from pytorch_accel_lite.engine.history import count_values
from pytorch_accel_lite.engine.lifecycle import create_config, ending, entering, prepare_model
from pytorch_accel_lite.engine.restoring import replaced
from pytorch_accel_lite.engine.run import Run


def evaluate(
    self: TrainerLike,
    dataset: Any = None,
    per_device_batch_size: int = 8,
    dataloader_kwargs: dict[str, Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Evaluate the model, counting every sample exactly once on any number of processes.

    Can be called within a training run, which continues as if the evaluation had not happened. The other arguments
    are those of :meth:`train`.

    :param dataset: defaults to the ``eval_dataset`` of the last training run, and is not needed if
        ``create_eval_dataloader`` is overridden. The datasets of a dict are evaluated one by one, and their names
        (strings) prefix the names of the metrics.
    :param dataloader_kwargs: arguments for the ``DataLoader``, which override the defaults; ``drop_last=True`` leaves
        out the samples of a smaller last batch
    :return: the latest value of every metric recorded during this evaluation, by name. The values are also appended
        to the run history, except, within a run, those of metrics that the run's own evaluations record. After a run,
        its curves and rows do not contain them.
    """
    dataset = self._latest_eval_dataset if dataset is None else dataset
    self._check_data("dataset", dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
    request = RunRequest("evaluation", num_epochs=1)
    with (
        _finding_values(self) as found,
        _apart_from_run(self),
        inference_run(self, request, dataset, per_device_batch_size, dataloader_kwargs, collate_fn) as run,
        preserving_randomness(self, run),
        preserving_modes(self.model.modules()) if run.outer is not None else nullcontext(),
        ending(self, run, "evaluation"),
    ):
        self.call_event("on_dataloaders_created")
        self.evaluation_run_start()
        self.call_event("on_evaluation_run_start")
        evaluate_all(self, run, is_training=False)
    return found


def run_evaluation(
    self: TrainerLike,
    model: nn.Module | None = None,
    prefix: str = "",
    is_intermediate: bool = True,
    callbacks: CallbackHandler | None = None,
) -> dict[str, float]:
    """Evaluate on the ``eval_dataset`` of the current training run without changing the run.

    Call it from a callback, on every process. Modes, running losses and random generators are restored.

    :param model: a module to evaluate in place of the trainer's model, for example averaged weights. Checkpoints
        saved meanwhile still contain the trainer's model.
    :param prefix: prefix of the metric names in the run history
    :param is_intermediate: passed to the evaluation events. If ``True``, losses are recorded as
        ``intermediate_eval_loss``, otherwise as ``eval_loss_epoch``.
    :param callbacks: called instead of the trainer's callbacks
    :return: the mean losses by metric name
    :raises RuntimeError: if called outside a training run, or in one without an ``eval_dataset``
    """
    if not self.is_running or self.train_dataloader is None or not self.eval_dataloaders:
        raise RuntimeError(
            "run_evaluation() only works within a training run that has an eval_dataset. Pass one to train(), or call "
            "evaluate(dataset)."
        )
    run = self.current_run.derive()
    own = self.model
    if model is not None:
        run.trained_model = own
    used = own if model is None else model
    handler = self.callback_handler if callbacks is None else callbacks
    with (
        entering(self, run, "run_evaluation()"),
        preserving_generators(),
        preserving_modes(own.modules()),
        prefixed(self, prefix),
        replaced(self, model=used, callback_handler=handler),
    ):
        if model is not None:
            self.sync_buffers(model)
        return evaluate_all(self, run, is_intermediate=is_intermediate)


@contextmanager
def inference_run(
    trainer: TrainerLike, request: RunRequest, dataset: Any, batch_size: int, loader_kwargs: Any, collate_fn: Any
) -> Iterator[Run]:
    """Enter an evaluation or prediction run, with its loaders and the model prepared.

    An outer run is left unchanged. Without one, an evaluation becomes the latest run.
    """
    batch_size = int(batch_size)
    run = trainer.current_run.derive()
    run.data.eval_dataset = dataset
    run.data.collate_fn = collate_fn
    with entering(trainer, run, "evaluate()" if request.kind == "evaluation" else "predict()"):
        if run.outer is None:
            run.data.train_loader = run.data.train_loader_kwargs = run.end.reason = None
            run.control = StopCoordinator(trainer.ranks)
        trainer.callback_handler.configure_run(trainer, request)
        own = {name: getattr(request, name) for name in ("max_batches", "first_sample", "on_failed_batch")}
        asked = replace(run.request, **own)
        run.request = request if run.outer is None else asked
        create_eval_loaders(trainer, run, batch_size, loader_kwargs)
        prepare_model(trainer, training=False)
        if run.outer is None:
            run.config = create_config(trainer, run, batch_size)
            run.before = None if request.kind == "evaluation" else run.before
        yield run


def preserving_randomness(trainer: TrainerLike, run: Run) -> AbstractContextManager[None]:
    """Preserve the generators of an outer run; without one, only those that seeded reading of data changes."""
    if run.outer is not None or trainer.logical is not None:
        return preserving_generators()
    return nullcontext() if run.data.seed is None else preserving_generators("python", "numpy")


@contextmanager
def _finding_values(trainer: TrainerLike) -> Iterator[dict[str, Any]]:
    """Yield a dict for the latest values of the metrics that a block records, by name; it has them after the block.

    Within a run, metrics that the run's own evaluations record lose the values of the block. Others keep them, but they
    are not taken for those of the run.
    """
    history, outer = trainer.run_history, trainer.current_run if trainer.is_running else None
    known = count_values(history)
    found: dict[str, Any] = {}
    try:
        yield found
    finally:
        counts = count_values(history)
        before = {name: known.get(name, 0) for name in counts if counts[name] > known.get(name, 0)}
        found.update((name, history.get_latest_metric(name)) for name in before)
        if outer is not None:
            history._shorten({name: before[name] for name in before.keys() & outer.request.metrics.evaluated})
            for name, count in count_values(history).items():
                if name in before:
                    outer.set_apart.setdefault(name, set()).update(range(before[name], count))


def _apart_from_run(trainer: TrainerLike) -> AbstractContextManager[None]:
    """Outside a run, record metrics apart from its own: under its last epoch, rather than one that is not trained."""
    if trainer.is_running:
        return nullcontext()
    history, progress = trainer.run_history, trainer.progress
    is_between = progress.epochs_completed and not progress.is_mid_epoch
    epoch = progress.epochs_completed if is_between else history.current_epoch
    apart: AbstractContextManager[None] = history._recording_apart(epoch)
    return apart
