"""Trials: training with a trainer's model, after which everything is restored."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader

from pytorch_accel_lite.callbacks import CallbackHandler
from pytorch_accel_lite.data import Batch, CollateFunction, LoaderKwargs, Source
from pytorch_accel_lite.extending import BatchOutput, Run, RunRequest, Snapshot, StepSnapshot, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import as_one_dataset, complete_output, copy_loader
from pytorch_accel_lite.extension_tools.modules_and_devices import mixed_precision, preserving_modes
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    all_optimized_parameters,
    all_registered_objects,
    evaluating_optimizers,
    other_modules,
    set_optimizer_modes,
    sync_ddp_buffers,
)
from pytorch_accel_lite.extension_tools.runs_and_steps import (
    DataArguments,
    adding_error_notes,
    check_dataset,
    check_training,
    create_step,
    entering,
    loss_of,
    min_share_for_batch_norm,
    prepare_model,
    prepare_training,
    preserving_attributes,
    release_model,
    replaced,
    run_step,
    set_eval_loaders,
    set_train_loader,
    unwrapped_model,
)
from pytorch_accel_lite.extension_tools.states_and_files import trained_objects
from pytorch_accel_lite.tracking import InMemoryRunHistory, Progress


class Trial:
    """A training run without callbacks that leaves no trace. Tools try a program with it.

    The arguments are checked when it is created. Within ``with trial.running():``, the trainer is prepared for
    training, and the methods read batches and compute with them; everything is restored afterwards. Create and run it
    on every process.

    Args:
        trainer: the trainer whose program is tried
        name: the method of the trainer that makes the trial, for error messages
        train_dataset: the dataset, as in ``train()``
        batch_size: number of samples in a batch of each process
        request: the settings of the run
        loader_kwargs: arguments for the ``DataLoader``, as ``train_dataloader_kwargs`` of ``train()``
        collate_fn: makes a batch from a list of samples, as in ``train()``
        supports: what the tool supports besides steps with one loss and one update: ``"train_step"`` for an overridden
            one, ``"closure"`` for optimizers that need a closure, and the ``argument`` of a ``Division``
        sets_batch_size: whether ``batch_size`` also replaces the batch size of a ``DataLoader``

    Attributes:
        run: the run of the trial, which has no callbacks
    """

    def __init__(
        self,
        trainer: TrainerLike,
        name: str,
        train_dataset: Source,
        batch_size: int,
        request: RunRequest,
        loader_kwargs: LoaderKwargs | None = None,
        collate_fn: CollateFunction | None = None,
        supports: Collection[str] = (),
        sets_batch_size: bool = False,
    ) -> None:
        self.trainer = trainer
        self._name = name
        self._supports = supports
        self._sets_batch_size = sets_batch_size
        self._check_trainer()
        check_training(trainer.optimizer, trainer.accelerator, request)
        data = _with_batch_size(train_dataset, batch_size) if sets_batch_size else train_dataset
        arguments = DataArguments(data, batch_size, loader_kwargs, collate_fn)
        check_dataset(trainer, "train_dataset", arguments)
        self._data = as_one_dataset(train_dataset)
        self.run = Run.create(trainer, request, arguments, DataArguments(None, batch_size))
        self.run.data.seed = trainer.seed or 0

    def _check_trainer(self) -> None:
        """Check that the tool supports the trainer's steps, outside a run."""
        trainer, name = self.trainer, self._name
        if trainer.is_running:
            raise RuntimeError(f"{name}() cannot be called within a run. Call it before train().")
        trainer.division.check_tool(name, self._supports)
        if is_overridden(trainer, "train_step") and "train_step" not in self._supports:
            raise TypeError(
                f"{name}() makes steps with one loss and one update, unlike {type(trainer).__name__}.train_step. Use a "
                "trainer without that method."
            )

    @contextmanager
    def running(self) -> Iterator[Trial]:
        """Run the trial for a block, with the trainer prepared for training."""
        trainer, run = self.trainer, self.run
        with entering(trainer, run, f"{self._name}()"):
            set_train_loader(trainer, run)
            with _prepared(trainer):
                _begin_trial(trainer, run)
                if run.training_step.closure and "closure" not in self._supports:
                    raise TypeError(
                        f"{self._name}() makes updates without the closure that the optimizer needs. Try another one."
                    )
                run.batch_number = 0
                with adding_error_notes(trainer, run, "training"):
                    yield self

    def begin_on(self, trainer: TrainerLike, batch_size: int) -> Trial:
        """Return the same trial with a copy of the trainer. It has already begun; the caller must restore the copy."""
        trial = copy.copy(self)
        trial.trainer = trainer
        trial.run = trainer.current_run = self.run.derive()
        trainer.open_runs.append(trial.run)
        trial.run.data.eval_arguments = trial.run.data.eval_arguments._replace(batch_size=batch_size)
        _begin_trial(trainer, trial.run)
        return trial

    # batches

    def read_batch(self, batch_size: int) -> Batch:
        """Read the first training batch, with ``batch_size`` samples if from a dataset; also before ``running()``.

        Raises:
            ValueError: if there is no such batch
        """
        run, reader = self.run, self.trainer
        if reader.current_run is not run:
            reader = copy.copy(reader)
            vars(reader).update(current_run=run, open_runs=[run])
        run.data.train_dataset = _with_batch_size(self._data, batch_size) if self._sets_batch_size else self._data
        with replaced(run.data, train_arguments=run.data.train_arguments._replace(batch_size=batch_size)):
            set_train_loader(reader, run)
        try:
            batch: Batch | None = next(iter(run.data.required_train_loader.steps(1)), None)
        finally:
            run.data.required_train_loader.stop_workers()
        if batch is None:
            raise ValueError(
                f"train_dataset gave no batch: it is empty, or exhausted, or has fewer than {batch_size} samples, all "
                "of which drop_last=True leaves out."
            )
        return batch

    def batches(self) -> Iterator[Batch]:
        """Yield training batches indefinitely, one epoch after another.

        Raises:
            ValueError: if an epoch is empty, because all later epochs would be, too
        """
        loader = self.run.data.required_train_loader
        for epoch in itertools.count(1):
            batch = None
            for batch in loader.steps(epoch, min_share=min_share_for_batch_norm(self.trainer, self.run)):
                yield batch
            if batch is None:
                raise ValueError(
                    "train_dataset gave no batch: it is empty, or exhausted after it was read once. Let its __iter__ "
                    "start again each time, or pass a smaller num_steps."
                )

    def read_evaluation(self, eval_dataset: Source, loader_kwargs: LoaderKwargs | None = None) -> None:
        """Create the loaders of an evaluation dataset, ``run.data.eval_loader``."""
        data = self.run.data
        data.eval_dataset, data.eval_arguments = eval_dataset, data.eval_arguments._replace(loader_kwargs=loader_kwargs)
        set_eval_loaders(self.trainer, self.run)

    # passes and updates

    def loss_of(self, batch: Batch) -> torch.Tensor:
        """Return only the loss of a training batch, computed as in a training step."""
        return loss_of(self.trainer, batch)

    def output_of(self, batch: Batch, evaluation: bool = False, with_gradients: bool = True) -> BatchOutput:
        """Return the completed output of the trainer's method for training or evaluation batches.

        Args:
            with_gradients: whether the loss must have gradients
        """
        trainer = self.trainer
        compute = trainer.calculate_eval_batch_loss if evaluation else trainer.calculate_train_batch_loss
        with mixed_precision(trainer.accelerator):
            output = compute(batch.data)
        return complete_output(output, batch.data, batch.num_samples, "the step", training=with_gradients)

    def run_step(self, batch: Batch) -> None:
        """Make a training step, which ends in an update at the end of an accumulation window, or of the epoch."""
        run_step(self.trainer, self.run, batch)

    def update(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Make an update; return its mean losses over all processes, by name."""
        run = self.run
        done = run.progress.update
        run.loss_trackers = self.trainer.division.create_trackers()
        while run.progress.update == done:
            self.run_step(next(batches))
        return run.loss_trackers.means(run.data.ranks, "{}")

    # what is restored within the trial

    @contextmanager
    def epoch(self, handler: CallbackHandler) -> Iterator[None]:
        """Begin an epoch for a block. Its events go to the callbacks of a handler, and it has its own history."""
        trainer, run = self.trainer, self.run
        with (
            replaced(trainer, callback_handler=handler, run_history=InMemoryRunHistory()),
            replaced(run, loss_trackers=trainer.division.create_trackers()),
            replaced(run, training_step=run.training_step, window=copy.copy(run.window), progress=Progress()),
        ):
            run.training_step = create_step(trainer, run)
            run.progress.start_epoch()
            yield

    @contextmanager
    def keeping_training(self) -> Iterator[None]:
        """Restore after a block what training changes: weights, modes, optimizers, generators."""
        with Snapshot() as before:
            _keep_training(self.trainer, before)
            yield

    @contextmanager
    def keeping_attributes(self, *owners: object) -> Iterator[None]:
        """Restore after a block the attributes of the trainer and of other objects, with the contents of lists."""
        with preserving_attributes(self.trainer, *owners):
            yield

    @contextmanager
    def keeping_step(self, batch: Batch) -> Iterator[None]:
        """Restore after a block what a forward and backward pass on a batch changes."""
        with StepSnapshot(self.trainer), replaced(self.run, batch=batch):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate for a block, without gradients and with optimizers in evaluation mode."""
        with evaluating_optimizers(self.trainer), torch.no_grad():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute for a block without communication in the forward and backward pass, as if on a single process."""
        sync_ddp_buffers(self.trainer.model, self.trainer.ranks)
        with unwrapped_model(self.trainer):
            yield


def _with_batch_size(data: Source, size: int) -> Source:
    """Return a copy of a loader with another ``batch_size``; other data unchanged."""
    if not isinstance(data, DataLoader):
        return data
    kind: Any = type(data.batch_sampler)
    batches = kind(data.sampler, size, data.drop_last)
    return copy_loader(data, batch_size=size, batch_sampler=batches)


def _begin_trial(trainer: TrainerLike, run: Run) -> None:
    prepare_training(trainer, run)
    set_optimizer_modes(trainer, training=True)


@contextmanager
def _prepared(trainer: TrainerLike) -> Iterator[None]:
    """Prepare a trainer for training outside a run, without its callbacks, and restore everything afterwards."""
    prepare_model(trainer, training=True)
    try:
        with Snapshot(on_host=True) as before:  # on the host, to leave the device's memory to the trial
            before.enter_context(replaced(trainer, callback_handler=CallbackHandler(), scheduler=None))
            _keep_training(trainer, before)
            yield
    finally:
        if not trainer.is_running:
            release_model(trainer)


def _keep_training(trainer: TrainerLike, before: Snapshot) -> None:
    """Keep weights, buffers, gradients, modes, the optimizer, the scaler, attributes and the generators.

    This includes the loss function, registered objects, and other modules of the trainer, such as averaged copies,
    because its steps may change them.
    """
    owners = [trainer.get_model(), trainer.loss_func, trainer.optimizer, trainer.accelerator.scaler]
    owners += [*other_modules(trainer).values(), *trained_objects(trainer).values()]
    roots = list(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))
    stateful = [owner for owner in owners if hasattr(owner, "step") and not isinstance(owner, nn.Module)]
    of_modules = chain.from_iterable(root.parameters() for root in roots)
    parameters = list(dict.fromkeys([*of_modules, *all_optimized_parameters(trainer)]))
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ValueError("The model has uninitialised lazy layers. Pass it a batch first: model(inputs).")
    parts = list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))
    # A loss function may also be an object that is no module.
    others = [trainer, *([trainer.loss_func] if hasattr(trainer.loss_func, "__dict__") else [])]
    before.enter_context(preserving_attributes(*dict.fromkeys([*parts, *others])))
    before.enter_context(preserving_modes(parts))
    before.set_gradients_aside(parameters)
    before.keep_states([*stateful, *all_registered_objects(trainer).values()])
    before.keep_buffers(roots)
    before.keep_tensors(parameters)
    before.keep_generators()
