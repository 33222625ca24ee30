"""Evaluation of one or several datasets, within a training run or on its own. Every sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accel_lite.attributes import evaluating_optimizers
from pytorch_accel_lite.batches import complete_output
from pytorch_accel_lite.distributed.prepared import mixed_precision, preserving_modes, reshard, sync_ddp_buffers, unwrap
from pytorch_accel_lite.distributed.stopping import StopCoordinator
from pytorch_accel_lite.events import CallbackHandler
from pytorch_accel_lite.randomness import preserving_generators
from pytorch_accel_lite.restoring import replaced
from pytorch_accel_lite.run import Run, add_note, create_config, create_loader, ending, entering, prepare_model
from pytorch_accel_lite.run_config import RunRequest
from pytorch_accel_lite.tracking import LossTrackers, count_values
from pytorch_accel_lite.utils import find_length

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


def evaluate(
    self: Trainer,
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
        prefix the names of the metrics.
    :param dataloader_kwargs: arguments for the ``DataLoader``, which override the defaults
    :return: the latest value of every metric recorded during this evaluation, by name. The values are also appended
        to the run history.
    """
    dataset = self._latest_eval_dataset if dataset is None else dataset
    self._check_data("dataset", dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
    history = self.run_history
    known = count_values(history)
    request = RunRequest("evaluation", num_epochs=1)
    with (
        _in_last_epoch(self),
        inference_run(self, request, dataset, per_device_batch_size, dataloader_kwargs, collate_fn) as run,
        preserving_randomness(run),
        preserving_modes(self.model.modules()) if run.outer is not None else nullcontext(),
        ending(self, run, "evaluation"),
    ):
        self.call_event("on_dataloaders_created")
        self.evaluation_run_start()
        self.call_event("on_evaluation_run_start")
        evaluate_all(self, run, is_training=False)
    counted = count_values(history).items()
    return {name: history.get_latest_metric(name) for name, count in counted if count > known.get(name, 0)}


@contextmanager
def inference_run(
    trainer: Trainer, request: RunRequest, dataset: Any, batch_size: int, loader_kwargs: Any, collate_fn: Any
) -> Iterator[Run]:
    """Enter an evaluation or prediction run, with its loaders and the model prepared.

    An outer run is left unchanged. Without one, an evaluation becomes the latest run.
    """
    batch_size = int(batch_size)
    run = trainer.current_run.derive()
    run.eval_dataset = dataset
    run.collate_fn = collate_fn
    with entering(trainer, run):
        if run.outer is None:
            run.train_loader = run.train_loader_kwargs = run.stop_reason = None
            run.control = StopCoordinator(trainer.ranks)
        trainer.callback_handler.configure_run(trainer, request)
        asked = replace(run.request, max_batches=request.max_batches, first_sample=request.first_sample)
        run.request = request if run.outer is None else asked
        create_eval_loaders(trainer, run, batch_size, loader_kwargs)
        prepare_model(trainer, training=False)
        if run.outer is None:
            run.config = create_config(trainer, run, batch_size)
            run.before = None if request.kind == "evaluation" else run.before
        yield run


def preserving_randomness(run: Run) -> AbstractContextManager[None]:
    """Preserve the generators of an outer run; without one, only those that seeded reading of data changes."""
    if run.outer is not None:
        return preserving_generators()
    return nullcontext() if run.data_seed is None else preserving_generators("python", "numpy")


@contextmanager
def _in_last_epoch(trainer: Trainer) -> Iterator[None]:
    """After a run, record metrics under its last epoch, rather than one that has not been trained."""
    history = trainer.run_history
    progress = trainer.progress
    epoch = history.current_epoch
    if not trainer.is_running and progress.epochs_completed and not progress.is_mid_epoch:
        history._set_epoch(epoch - 1)
    try:
        yield
    finally:
        history._set_epoch(epoch)


def create_eval_loaders(trainer: Trainer, run: Run, batch_size: int, loader_kwargs: dict[str, Any] | None) -> None:
    """Create the loaders of the evaluation dataset, or of several by name."""
    run.eval_loader = None
    run.eval_loaders = {}
    dataset = run.eval_dataset
    for name, part in dataset.items() if isinstance(dataset, dict) else [("", dataset)]:
        run.eval_dataset = part  # read by overrides of create_eval_dataloader
        source = trainer.create_eval_dataloader(batch_size, loader_kwargs)
        run.eval_loader = create_loader(trainer, run, source, training=False)
        if find_length(run.eval_loader) == 0:
            raise ValueError(
                "eval_dataset gives no batch: with drop_last=True it must hold at least one batch for every process."
            )
        if name:
            run.eval_loaders[name] = run.eval_loader
    run.eval_dataset = dataset


def run_evaluation(
    self: Trainer,
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
        self.sync_buffers(model)
        run.trained_model = own
    used = own if model is None else model
    handler = self.callback_handler if callbacks is None else callbacks
    with (
        entering(self, run),
        preserving_generators(),
        preserving_modes(own.modules()),
        _prefixed(self, prefix),
        replaced(self, model=used, callback_handler=handler),
    ):
        return evaluate_all(self, run, is_intermediate=is_intermediate)


@contextmanager
def _prefixed(trainer: Trainer, prefix: str) -> Iterator[None]:
    """Prefix the names of the metrics recorded in a block."""
    history = trainer.run_history
    before = history.metric_name_prefix
    history.set_metric_name_prefix(f"{before}{prefix}")
    try:
        yield
    finally:
        history.set_metric_name_prefix(before)


def evaluate_all(
    trainer: Trainer, run: Run, is_training: bool = True, is_intermediate: bool = False
) -> dict[str, float]:
    """Evaluate on all evaluation datasets; with several, their names prefix the names of the metrics."""
    if not run.eval_loaders and run.eval_loader is not None:
        with _loss_in_evaluation_mode(trainer):
            trainer._run_eval_epoch(run.eval_loader, is_training, is_intermediate)
        return run.recorded_losses
    losses: dict[str, float] = {}
    try:
        for name, loader in run.eval_loaders.items():
            run.eval_loader = loader
            run.eval_dataset_name = name
            with _prefixed(trainer, f"{name}_"), _loss_in_evaluation_mode(trainer):
                trainer._run_eval_epoch(loader, is_training, is_intermediate)
            losses |= {f"{name}_{metric}": loss for metric, loss in run.recorded_losses.items()}
    finally:
        run.eval_dataset_name = None
    return losses


@contextmanager
def _loss_in_evaluation_mode(trainer: Trainer) -> Iterator[None]:
    """Set a loss module to evaluation mode for a block, then restore the modes of its parts outside the model."""
    of_loss = set(trainer.loss_func.modules()) if isinstance(trainer.loss_func, nn.Module) else set()
    with preserving_modes(of_loss - set(trainer.model.modules())):
        for module in of_loss:
            module.training = False
        yield


def evaluation_epoch(trainer: Trainer, run: Run, source: Any, is_training: bool, is_intermediate: bool) -> None:
    """Evaluate on one dataset and record its losses."""
    trainer.eval_epoch_start()
    run.loss_trackers = LossTrackers()
    trainer.call_event("on_eval_epoch_start", is_intermediate=is_intermediate)
    loader = create_loader(trainer, run, source, training=False)
    sync_ddp_buffers(trainer.model, trainer.ranks)
    with evaluating_optimizers(trainer), unwrapped_model(trainer), torch.no_grad():
        for batch in loader.steps(run.progress.epoch):
            run.batch = batch
            trainer.call_event("on_eval_step_start")
            try:
                with mixed_precision(trainer.accelerator):
                    output = trainer.calculate_eval_batch_loss(batch.data)
                complete_output(output, batch.data, batch.num_samples, "calculate_eval_batch_loss", training=False)
            except Exception as error:
                add_note(error, trainer, run, "evaluation")
                raise
            if batch.num_samples != 0:
                run.loss_trackers.add(output)
            trainer.call_event("on_eval_step_end", batch=batch.data, batch_output=output)
    trainer.eval_epoch_end()
    name = "intermediate_eval_{}" if is_intermediate else "eval_{}_epoch" if is_training else "evaluation_{}"
    run.record_losses(trainer.run_history, trainer.ranks, name)
    trainer.call_event("on_eval_epoch_end", is_intermediate=is_intermediate)
    run.control.sync(now=True)


@contextmanager
def unwrapped_model(trainer: Trainer) -> Iterator[None]:
    """Bypass ``DistributedDataParallel``, whose forward pass communicates.

    Ranks may then have different numbers of batches. Synchronise their buffers beforehand.
    """
    wrapped = trainer.model
    is_sharded = trainer.is_sharded
    if not is_sharded:
        trainer.model = unwrap(wrapped)
    try:
        yield
    finally:
        trainer.model = wrapped
        if is_sharded:
            reshard(wrapped)
