"""Evaluation on one or several datasets, and when a training run evaluates within its epochs.

Every sample counts once. An evaluation that interrupts a training run restores the modes of all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial

from torch import nn

from pytorch_accel_lite.base.modules import preserving_modes
from pytorch_accel_lite.base.random_generators import preserving_generators
from pytorch_accel_lite.base.user_code import is_overridden
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.loader_base import ShardedLoader
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.distributed.gradient_sync import sync_ddp_buffers
from pytorch_accel_lite.loop.guards.arguments_and_datasets import check_dataset
from pytorch_accel_lite.loop.guards.modes import call_start_event
from pytorch_accel_lite.loop.inference import compute_batches, inference, inference_run, preserving_randomness
from pytorch_accel_lite.loop.lifecycle import ending, entering
from pytorch_accel_lite.loop.loaders_and_lengths import sharded_for_run
from pytorch_accel_lite.loop.snapshot import replaced
from pytorch_accel_lite.run.callback_handler import CallbackHandler
from pytorch_accel_lite.run.ending import StopTrainingError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.history import MetricValue, RunHistory, count_values, counts_before_growth
from pytorch_accel_lite.run.intervals import Interval
from pytorch_accel_lite.run.latest_records import EvaluationRecord
from pytorch_accel_lite.run.notes_and_checks_seam import adding_error_notes
from pytorch_accel_lite.run.progress import EpochPhase
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.run_data import SKIPPED, DataArguments, SkippedBatches
from pytorch_accel_lite.run.scheduler_steps import step_within_epoch


class EvaluationKind(Enum):
    """What an evaluation is for. The value formats the names of its losses.

    Methods that users override or call have two flags in its place, as in pytorch-accelerated.
    """

    OF_RUN = "eval_{}_epoch"  # after its epochs, or within them
    INTERMEDIATE = "intermediate_eval_{}"  # within a run, in addition to its own
    ALONE = "evaluation_{}"  # by ``evaluate()``

    @classmethod
    def from_flags(cls, is_training: bool, is_intermediate: bool) -> EvaluationKind:
        """Return the kind that the arguments of ``_run_eval_epoch`` stand for."""
        return cls.INTERMEDIATE if is_intermediate else cls.OF_RUN if is_training else cls.ALONE

    @property
    def flags(self) -> dict[str, bool]:
        """The flags that differ from their defaults. Overrides written for pytorch-accelerated may lack the others."""
        if self is EvaluationKind.INTERMEDIATE:
            return {"is_intermediate": True}
        return {"is_training": False} if self is EvaluationKind.ALONE else {}


@contextmanager
def prefixing_metric_names(history: RunHistory, prefix: str) -> Iterator[None]:
    """Prefix the names of the metrics that are recorded within a block."""
    before = history.metric_name_prefix
    history.set_metric_name_prefix(f"{before}{prefix}")
    try:
        yield
    finally:
        history.set_metric_name_prefix(before)


def evaluate_all(trainer: TrainerLike, run: Run, kind: EvaluationKind) -> dict[str, float]:
    """Evaluate on all evaluation datasets. If there are several, the names of metrics begin with the dataset's name."""
    data = run.data
    losses: dict[str, float] = {}
    loaders = data.eval_loaders or {"": data.required_eval_loader}
    if kind is EvaluationKind.OF_RUN:
        run.training_run.counts_before_evaluation = count_values(trainer.run_history)
    try:
        for number, (name, loader) in enumerate(loaders.items(), 1):
            prefix = f"{name}_" if name else ""
            data.eval_loader = loader
            data.eval_dataset_name = name or None
            with (
                adding_error_notes(trainer, run, "evaluation"),
                run.goodput.counting("evaluation"),
                trainer.callback_handler.timing("evaluation"),
                prefixing_metric_names(trainer.run_history, prefix),
                replaced(loader, limit=loader.limit),  # a callback that limits it, and then fails, may be caught
                _loss_in_evaluation_mode(trainer),
            ):
                run.completes_evaluation = kind is EvaluationKind.OF_RUN and number == len(loaders)
                evaluate = _evaluation_on(trainer, run, loader, kind)
                trainer.ranks.repeat_if_process_lost(evaluate, changes=trainer)
                _note_completion(run)  # an override need not call evaluate_dataset()
            losses |= {f"{prefix}{metric}": loss for metric, loss in run.recorded_losses.items()}
    finally:
        data.eval_dataset_name = None
        run.completes_evaluation = False
    if kind is EvaluationKind.OF_RUN:
        run.training_run.counts_before_evaluation = None
    return losses


def _evaluation_on(trainer: TrainerLike, run: Run, loader: ShardedLoader, kind: EvaluationKind) -> Callable[[], None]:
    """Return what evaluates on one dataset: ``evaluate_dataset()``, or the user's method for it."""
    if not is_overridden(trainer, "_run_eval_epoch"):  # now, as a callback may have replaced it
        return partial(evaluate_dataset, trainer, run, loader, kind)
    return partial(trainer._run_eval_epoch, loader, **kind.flags)


@contextmanager
def _loss_in_evaluation_mode(trainer: TrainerLike) -> Iterator[None]:
    """Set a loss module to evaluation mode within a block, then restore the modes of its parts outside the model."""
    of_loss = set(trainer.loss_func.modules()) if isinstance(trainer.loss_func, nn.Module) else set()
    with preserving_modes(of_loss - set(trainer.model.modules())):
        for module in of_loss:
            module.training = False
        yield


def evaluate_dataset(trainer: TrainerLike, run: Run, source: Source, kind: EvaluationKind) -> None:
    """Evaluate on one dataset and record its losses."""
    is_intermediate = kind is EvaluationKind.INTERMEDIATE
    trainer.eval_epoch_start()
    run.loss_trackers = trainer.division.create_trackers()
    call_start_event(trainer, "on_eval_epoch_start", "evaluation", is_intermediate=is_intermediate)
    loader = sharded_for_run(trainer, run, source, training=False)
    sync_ddp_buffers(trainer.model, run.ranks)
    run.data.has_fillers = loader.options.fill
    run.skipped = None if run.skipped is None else SkippedBatches("evaluation")
    with inference(trainer), preserving_generators() if trainer.division.has_fixed_shares else nullcontext():
        last = _track_losses(trainer, run, loader.steps(run.progress.epoch))
        if run.data.has_fillers:
            _track_losses(trainer, run, _filler_batches(run, last))
    run.data.has_fillers = True
    if run.inference_step is not None:
        run.inference_step.report(trainer, run)
    trainer.eval_epoch_end()
    run.record_losses(trainer.run_history, kind.value)
    _note_completion(run)  # before the event: a run resumed from a state that is saved in it does not evaluate again
    trainer.call_event("on_eval_epoch_end", is_intermediate=is_intermediate)
    run.control.sync(now=True)


def _note_completion(run: Run) -> None:
    """Note that the evaluation after an epoch is complete if the dataset just evaluated is its last one."""
    if run.completes_evaluation:
        run.epoch_phase = EpochPhase.EVALUATED


def _filler_batches(run: Run, last: Batch | None) -> list[Batch]:
    """Return filler batches for the steps that only other processes have: one at the end, and one per skipped batch.

    Args:
        last: the last batch that this process has read
    """
    lacking = 0 if last is None or last.is_last else 1
    if run.skipped is not None:
        last = run.skipped.last_computed
        lacking += len(run.skipped.batches)
    return [] if last is None else [last._replace(num_samples=0)] * lacking


def _track_losses(trainer: TrainerLike, run: Run, batches: Iterable[Batch]) -> Batch | None:
    """Compute and add up the losses of batches; return the last batch, even if it was skipped."""
    listeners = trainer.callback_handler.listeners
    trackers = run.loss_trackers
    batch = None
    for batch, output in compute_batches(trainer, run, batches, trainer.calculate_eval_batch_loss):
        if output is SKIPPED:
            continue
        trackers.latest_batch = batch, output["batch_size"]  # inlines note_batch_size()
        if trackers.unweighed:
            trackers.weigh_logged()
        if batch.num_samples != 0:  # inlines is_filler
            trackers.add(output)
        if listeners["on_eval_step_end"]:
            trainer.call_event("on_eval_step_end", batch=batch.data, batch_output=output)
        del output  # frees its memory for the next output
    return batch


def begin_evaluations(run: Run) -> None:
    """Determine when a training run evaluates, from its beginning or from the point at which it resumes."""
    every = run.request.evaluate_every
    if not run.data.all_eval_loaders:
        if every is not None and run.ranks.rank == 0:
            warn_outside(f"evaluate_every={every!r} has no effect: train() was given no eval_dataset.")
        return
    run.evaluation_interval = interval = (
        Interval(run.request.eval_every_n_epochs, "epochs") if every is None else Interval(every)
    )
    interval.start(run, "" if every is None else "evaluate_every")
    if run.resumed is not None and (saved := run.resumed.shared.get("evaluations")) is not None:
        interval.load_state_dict(saved, run)


def evaluate_if_due(trainer: TrainerLike, run: Run, ends_epoch: bool = False) -> None:
    """Evaluate within an epoch, if that is due, and step a scheduler that follows a metric.

    Args:
        ends_epoch: whether the steps of the epoch are over. An evaluation that is then due, except by time, takes place
            after the epoch.
    """
    interval = run.evaluation_interval
    if interval is None or run.is_finished or not interval.is_due(run):
        return
    if ends_epoch and (run.ends_with_epoch or not interval.is_time):
        return
    inner = run.derive()
    stopped: StopTrainingError | None = None
    try:
        evaluate_in_derived_run(trainer, inner, EvaluationKind.OF_RUN)
    except StopTrainingError as stop:  # of a callback, which may come after a complete evaluation
        stopped = stop
    if inner.epoch_phase == EpochPhase.EVALUATED:
        interval.advance(run)
        run.counts_before_evaluation = None
        step_within_epoch(trainer)
    if stopped is not None:
        raise stopped


def evaluate(trainer: TrainerLike, passed: DataArguments) -> dict[str, MetricValue]:
    """Carry out ``Trainer.evaluate()``."""
    training = trainer.current_run.latest.training if passed.dataset is None else None
    arguments = passed if training is None else passed.completed_by(training.eval_arguments)
    # Those of a training need not apply to its eval_dataset, so only those that were passed are checked.
    check_dataset(trainer, "dataset", passed._replace(dataset=arguments.dataset))
    auto_microbatch = arguments.auto_microbatch
    if auto_microbatch and (what := "sharded weights" if trainer.is_sharded else trainer.division.argument):
        raise ValueError(f"evaluate(auto_microbatch=True) does not work with {what}: pass a smaller batch size.")
    request = RunRequest("evaluation", num_epochs=1, auto_microbatch=auto_microbatch)
    with (
        _collecting_values(trainer) as result,
        _recording_apart_from_run(trainer),
        inference_run(trainer, request, arguments) as run,
        preserving_randomness(trainer, run),
        preserving_modes(trainer.model.modules()) if run.outer is not None else nullcontext(),
        ending(trainer, run, "evaluation"),
    ):
        trainer.call_event("on_dataloaders_created")
        trainer.evaluation_run_start()
        trainer.call_event("on_evaluation_run_start")
        evaluate_all(trainer, run, EvaluationKind.ALONE)
    if run.outer is None:
        run.latest.evaluation = EvaluationRecord(arguments.dataset, result)
    return result


def run_evaluation(
    trainer: TrainerLike,
    model: nn.Module | None,
    prefix: str,
    kind: EvaluationKind,
    callbacks: CallbackHandler | Iterable[TrainerCallback] | None,
) -> dict[str, float]:
    """Carry out ``Trainer.run_evaluation()``."""
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model={model!r} must be a torch.nn.Module, not {type(model).__name__}.")
    if not trainer.is_running or trainer.train_dataloader is None or not trainer.eval_dataloaders:
        raise RuntimeError(
            "run_evaluation() only works within a training run that has an eval_dataset. Pass one to train(), or call "
            "evaluate(dataset)."
        )
    run = trainer.current_run.derive()
    trained = trainer.model
    if model is not None:
        run.trained_model = trained
    used = trained if model is None else model
    handler = trainer.callback_handler if callbacks is None else callbacks
    if not isinstance(handler, CallbackHandler):
        handler = CallbackHandler(handler)
    with (
        prefixing_metric_names(trainer.run_history, prefix),
        replaced(handler, timer=trainer.callback_handler.timer),
        replaced(trainer, model=used, callback_handler=handler),
    ):
        return evaluate_in_derived_run(trainer, run, kind)


def evaluate_in_derived_run(trainer: TrainerLike, run: Run, kind: EvaluationKind) -> dict[str, float]:
    """Evaluate in a run derived from the training run, which stays unchanged."""
    trained = trainer.model if run.trained_model is None else run.trained_model
    with entering(trainer, run, "run_evaluation()"), preserving_generators(), preserving_modes(trained.modules()):
        if run.trained_model is not None:
            trainer.sync_buffers(trainer.model)
        return evaluate_all(trainer, run, kind)


@contextmanager
def _collecting_values(trainer: TrainerLike) -> Iterator[dict[str, MetricValue]]:
    """Yield a dict that, after the block, has the latest values, by name, of the metrics recorded within the block.

    Within a run, values of metrics that the run also records are removed again. Other metrics keep their values, but
    these do not count as values of the run.
    """
    history, outer = trainer.run_history, trainer.current_run if trainer.is_running else None
    counts_before = count_values(history)
    latest: dict[str, MetricValue] = {}
    try:
        yield latest
    finally:
        before = counts_before_growth(history, counts_before)
        latest.update((name, history.get_latest_metric(name)) for name in before)
        if outer is not None:
            history.shorten({name: before[name] for name in before.keys() & outer.request.metrics.evaluated})
            for name, count in count_values(history).items():
                if name in before:
                    outer.latest.recorded_by_evaluate.setdefault(name, set()).update(range(before[name], count))


def _recording_apart_from_run(trainer: TrainerLike) -> AbstractContextManager[None]:
    """Outside a run, record metrics separately from those of the latest run, under its last trained epoch."""
    if trainer.is_running:
        return nullcontext()
    history, progress = trainer.run_history, trainer.progress
    is_between = progress.epochs_completed and not progress.is_mid_epoch
    epoch = max(history.current_epoch - 1, 1) if is_between else history.current_epoch
    apart: AbstractContextManager[None] = history.recording_apart(epoch)
    return apart
