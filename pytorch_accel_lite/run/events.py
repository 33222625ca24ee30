"""The events of a run, and the base class of callbacks, which declares them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from pytorch_accel_lite.base.arguments import constructor_arguments, remember_arguments
from pytorch_accel_lite.base.display import constructor_call
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.data.sources import BatchData, BatchOutput, Index

if TYPE_CHECKING:
    from pytorch_accel_lite.run.request_and_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer


class Failure(TypedDict):
    """A batch that has failed on a rank, as callbacks are told about it.

    Args:
        rank: the rank
        indices: indices of the samples in the dataset, or ``None`` if unknown
        error: type and text of the error
    """

    rank: int
    indices: list[Index] | None
    error: str


class Picture(NamedTuple):
    """A picture that shows an output of the model, as callbacks are told about it.

    Args:
        pixels: the colours of the pixels, of shape ``(height, width, 3)``
        png: the contents of a PNG file
    """

    pixels: npt.NDArray[np.uint8]
    png: bytes


class TrainerCallback:
    """Base class of all callbacks. Override the events you need; the others do nothing.

    This is the complete loop, with the event that fires at each point and the keywords that it passes::

        Trainer(...)
            on_init_end

        train(...)
            on_dataloaders_created                           (their lengths are not used yet)
            on_training_run_start
            for each epoch:
                on_train_epoch_start
                for each batch:
                    on_train_step_start
                    batch_output = calculate_train_batch_loss(batch)
                    on_backward_start                        batch, batch_output, step (may change the loss)
                    backward_step(loss)
                    on_backward_end                          batch, batch_output, step
                    on_train_batch_skipped                   failures, error, step (only of a batch that has failed)
                    at the end of a gradient accumulation window:
                        on_optimizer_step_start              (gradients are final: averaged and clipped)
                        optimizer_step, scheduler_step, optimizer_zero_grad
                        on_optimizer_step_end
                    on_train_step_end                        batch, batch_output, step (not of a batch that has failed)
                    after an update:
                        on_update_end                        step
                        for each eval_dataset, if evaluate_every is due:
                            evaluation
                        on_train_step_checkpoint             step (all callbacks have settled)
                on_train_epoch_end
                for each eval_dataset:
                    evaluation
                on_training_run_epoch_end
                on_epoch_checkpoint                          (all callbacks have settled)
            on_stop_training_error                           (only when the run was stopped early)
            on_exception                                     exception (only when an error ends the run)
            on_training_run_end

        evaluation
            on_eval_epoch_start                              is_intermediate
            for each batch:
                on_eval_step_start
                on_eval_step_end                             batch, batch_output (not of a batch that has failed)
                on_eval_batch_skipped                        failures, error, step (only of a batch that has failed)
            on_eval_epoch_end                                is_intermediate

        evaluate(...)
            on_dataloaders_created
            on_evaluation_run_start
            for each dataset:
                evaluation
            on_evaluation_run_end

        predict(...)
            on_predict_run_start
            for each batch:
                on_predict_step_end                          batch, batch_output (not of a batch that has failed)
                on_predict_batch_skipped                     failures, error, step (only of a batch that has failed)
            on_predict_run_end

        whenever processes are lost or join, see takeover
            on_processes_changed                             left, came

    A ``ShowOutputsCallback`` fires ``on_outputs``, with ``outputs`` and ``pictures``, after showing outputs.

    Some kinds of steps fire the events of the backward pass, or also those of the update, as follows::

        auto_microbatch, SkipFailedBatchesCallback, logical_processes
            for each part of the batch, as often as it is tried:
                on_backward_start
                on_backward_end                              (not if it fails)

        LBFGS, recompute_gradients()
            on_backward_start
            on_backward_end
            at the end of a gradient accumulation window:
                on_optimizer_step_start
                for each batch of the window, as often as its gradients are computed:
                    on_backward_start
                    on_backward_end
                on_optimizer_step_end

        train_step(...)
            for each update(loss):
                on_backward_start
                on_backward_end
                at the end of a gradient accumulation window:
                    on_optimizer_step_start
            at the end of a gradient accumulation window:
                on_optimizer_step_end

    If both exist, the trainer's own method (``train_epoch_start`` ...) is called before the event. ``step`` counts
    batches from 0 within an epoch; ``trainer.progress`` holds all counts. An event passes the trainer by position and
    everything else by keyword: name the arguments you need and accept ``**kwargs`` for the others, because more may be
    added. Adding a callback raises an error if one of its methods does not accept the arguments of its event.

    ``configure_run`` is called first, so that a callback can declare what it needs from a run. A callback with
    ``state_dict()`` and ``load_state_dict(state)`` is saved in training states. For your callbacks without these
    methods, training states keep the attributes.

    Attributes:
        affects_training: whether a run trains differently with this callback. ``False`` in callbacks that only observe,
            report or save, or that end a run: resumed runs and comparisons of runs do not mention them.
        arguments_may_differ: whether processes may create this callback with different arguments. ``True`` in callbacks
            that only display: those of other callbacks of this package decide when processes communicate, so they are
            compared before a run.
        saves_attributes: whether training states keep the attributes of your callback
        unsaved_attributes: names of attributes that training states leave out
    """

    affects_training: ClassVar[bool] = True
    arguments_may_differ: ClassVar[bool] = False
    saves_attributes: ClassVar[bool] = True
    unsaved_attributes: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        remember_arguments(cls)

    def __repr__(self) -> str:
        """Represent a callback as a call of its constructor, with the arguments it was created with.

        An attribute with the name and type of an argument is shown in place of the argument, because it may have
        changed.
        """
        return constructor_call(self, *constructor_arguments(self))

    def _as_created(self) -> str:
        """Represent a callback as the call that created it, even if its attributes have changed since."""
        return constructor_call(self, *constructor_arguments(self), is_current=False)

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: object) -> None:
        """Declare what this callback needs from a run. Called once per run, before its dataloaders are created.

        Args:
            request: the settings requested for the run, to be changed as needed; see ``RunRequest``
        """

    def on_init_end(self, trainer: Trainer, **kwargs: object) -> None:
        """The trainer has been constructed."""

    def on_dataloaders_created(self, trainer: Trainer, **kwargs: object) -> None:
        """The dataloaders of a run exist; nothing has been derived from their lengths yet."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: object) -> None:
        """The model is prepared, the dataloaders and the scheduler exist; no batch has been read."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: object) -> None:
        """An epoch of training begins."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: object) -> None:
        """A training batch has been read and placed on the device."""

    def on_backward_start(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, step: int, **kwargs: object
    ) -> None:
        """The loss of a batch is known. Gradients are computed from ``batch_output["loss"]`` as this event leaves it.

        A callback may therefore add to the loss or replace it, on every process. The recorded loss is the one that the
        step returned.
        """

    def on_backward_end(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, step: int, **kwargs: object
    ) -> None:
        """The gradients of a batch have been accumulated."""

    def on_train_batch_skipped(
        self, trainer: Trainer, *, failures: list[Failure], error: BaseException | None, step: int, **kwargs: object
    ) -> None:
        """A batch has failed and is skipped on all ranks.

        Args:
            failures: a dict for each rank that failed, with the ``rank``, the ``indices`` of its samples and the
                ``error`` as text
            error: the exception on the rank that raised it, ``None`` on other ranks
        """

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: object) -> None:
        """An update is about to happen; the gradients are averaged over the window and the ranks, unscaled, clipped."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: object) -> None:
        """An update has happened: new weights, scheduler stepped, gradients cleared.

        Also called after a skipped update (``trainer.update_was_skipped``), which leaves weights and scheduler alone.
        """

    def on_train_step_end(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, step: int, **kwargs: object
    ) -> None:
        """A training step is complete, its update included."""

    def on_update_end(self, trainer: Trainer, *, step: int, **kwargs: object) -> None:
        """A step with an update is complete, even if the batch of this step was skipped."""

    def on_train_step_checkpoint(self, trainer: Trainer, *, step: int, **kwargs: object) -> None:
        """All callbacks have handled a step with an update: the place to save."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: object) -> None:
        """The training part of an epoch is complete; its losses are in the run history."""

    def on_eval_epoch_start(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: object) -> None:
        """An evaluation begins.

        Args:
            is_intermediate: whether its losses are recorded as ``intermediate_eval_loss``, as those of
                ``run_evaluation()`` are by default; ``False`` for the run's own evaluations, also within an epoch
        """

    def on_eval_step_start(self, trainer: Trainer, **kwargs: object) -> None:
        """An evaluation batch has been read and placed on the device."""

    def on_eval_step_end(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        """An evaluation batch is complete."""

    def on_eval_batch_skipped(
        self, trainer: Trainer, *, failures: list[Failure], error: Exception, step: int, **kwargs: object
    ) -> None:
        """An evaluation batch of this rank has failed and is skipped. Do not communicate: other ranks are unaware.

        Args:
            failures: a single dict with the ``rank``, the ``indices`` of the samples and the ``error`` as text
            step: number of the batch in this evaluation, from 0
        """

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: object) -> None:
        """An evaluation is complete; its losses are in the run history."""

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: object) -> None:
        """An epoch is complete, its evaluation included."""

    def on_epoch_checkpoint(self, trainer: Trainer, **kwargs: object) -> None:
        """All callbacks have handled the end of the epoch: the place to save."""

    def on_stop_training_error(self, trainer: Trainer, **kwargs: object) -> None:
        """The run was stopped early; ``trainer.stop_reason`` says why."""

    def on_exception(self, trainer: Trainer, *, exception: BaseException, **kwargs: object) -> None:
        """An error ends the run: release resources.

        Do not communicate with other ranks, which may not have failed.
        """

    def on_training_run_end(self, trainer: Trainer, **kwargs: object) -> None:
        """The run has ended: it finished, was stopped early, or failed with an error raised on all ranks."""

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: object) -> None:
        """``evaluate`` begins."""

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: object) -> None:
        """``evaluate`` has ended."""

    def on_predict_run_start(self, trainer: Trainer, **kwargs: object) -> None:
        """``predict`` begins."""

    def on_predict_step_end(self, trainer: Trainer, *, batch: BatchData, batch_output: Tree, **kwargs: object) -> None:
        """A batch has been predicted; ``batch_output`` holds the outputs of the model."""

    def on_predict_batch_skipped(
        self, trainer: Trainer, *, failures: list[Failure], error: Exception, step: int, **kwargs: object
    ) -> None:
        """A batch of a prediction has failed and is skipped; the arguments are as in an evaluation."""

    def on_predict_run_end(self, trainer: Trainer, **kwargs: object) -> None:
        """``predict`` has ended."""

    def on_processes_changed(self, trainer: Trainer, *, left: list[int], came: list[int], **kwargs: object) -> None:
        """Called when the job continues without lost processes, or with new ones.

        ``trainer.ranks`` already has the new ranks. Do not communicate here: the interrupted work has not been repeated
        yet.

        Args:
            left: the former ranks of the lost processes
            came: the ranks of the new processes
        """

    def on_outputs(
        self, trainer: Trainer, *, outputs: Mapping[str, str], pictures: Mapping[str, Picture], **kwargs: object
    ) -> None:
        """A ``ShowOutputsCallback`` has shown outputs of the model.

        Args:
            outputs: texts, or paths of pictures, by name
            pictures: the pictures by name, as the bytes of a PNG file and as pixels
        """


#: Events that built-in callbacks fire, rather than the loop.
_OF_CALLBACKS = ("on_outputs",)
#: The events of the loop, in its order.
EVENTS: tuple[str, ...] = tuple(
    name for name in vars(TrainerCallback) if name.startswith("on_") and name not in _OF_CALLBACKS
)


def events_between(first: str, last: str) -> tuple[str, ...]:
    """Return the events of a part of the loop, in its order: those after ``first`` and before ``last``."""
    return EVENTS[EVENTS.index(first) + 1 : EVENTS.index(last)]


def keywords_of(event: str) -> tuple[str, ...]:
    """Return the names of an event's arguments besides the trainer, as ``TrainerCallback`` declares them."""
    parameters = inspect.signature(vars(TrainerCallback)[event]).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


Phase = Literal["training", "evaluation", "prediction"]
#: The events of the steps, by phase.
STEP_EVENTS: dict[Phase, tuple[str, ...]] = {
    "training": events_between("on_train_epoch_start", "on_train_epoch_end"),
    "evaluation": events_between("on_eval_epoch_start", "on_eval_epoch_end"),
    "prediction": events_between("on_predict_run_start", "on_predict_run_end"),
}


def _no_op(event: Callable[..., None]) -> Callable[..., None]:
    """Make ``super().on_train_step_end(trainer)`` work without the keywords, which are declared for editors."""

    @wraps(event)
    def nothing(*args: object, **kwargs: object) -> None:
        pass

    return nothing


for _event in (*EVENTS, *_OF_CALLBACKS):
    setattr(TrainerCallback, _event, _no_op(vars(TrainerCallback)[_event]))
