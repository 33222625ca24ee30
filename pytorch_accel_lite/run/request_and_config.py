"""The settings of a run: those requested, and those that follow from the data and the processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, runtime_checkable

from pytorch_accel_lite.base.display import call_repr
from pytorch_accel_lite.base.nested_values import to_number
from pytorch_accel_lite.data.loader_creation import LoaderKwargs
from pytorch_accel_lite.run.metric_checks import ExpectedMetrics
from pytorch_accel_lite.run.training_state import TrainingState


class StateSource(Protocol):
    """What can find training states, as a callback that saves them.

    Attributes:
        find_latest: returns the latest state that a trainer can resume from, or ``None``
        save_dir: where the training states are
    """

    @property
    def save_dir(self) -> str | os.PathLike[str]: ...  # noqa: D102
    @property
    def find_latest(self) -> Callable[..., TrainingState | None]: ...  # noqa: D102


@runtime_checkable
class DatedStateSource(StateSource, Protocol):
    """One that also dates new states, later than those that it has found, even if the clock is wrong."""

    def next_time(self) -> float:
        """Return the time for the next state, in seconds."""


@dataclass(eq=False)
class RunRequest:
    """The settings requested for a run, by the arguments of ``train()`` and by callbacks in ``configure_run``.

    Those not described here are arguments of ``Trainer.train()``. Most become part of the ``TrainerRunConfig``.

    Args:
        kind: whether the run trains, evaluates or predicts
        saves_training_states: derive the order of the data from a seed, even if the trainer has no seed
        skips_failed_batches: skip training batches that fail
        skips_in_evaluation: leave out evaluation batches that fail
        skips_in_prediction: leave out batches that fail in a prediction
        ends_at_signals: end the run after the current update on SIGTERM, SIGUSR1, SIGUSR2 and SIGINT
        max_batches: maximum number of batches that each process reads in a training epoch and in an evaluation
        first_sample: position of the first sample to predict
        state_sources: where to look for ``resume_from="latest"``: objects with ``find_latest(trainer)`` and
            ``save_dir``
        metrics: the metrics that callbacks record and watch
        paths: descriptions of what callbacks write, by path; see ``claim_path()``
        locked_paths: paths to which no other run may write, each with the name of its argument
        unfreezes: train parameters later that are frozen at the start, so that they must be saved, too
    """

    kind: Literal["training", "evaluation", "prediction"] = "training"
    num_epochs: int | None = None
    max_num_train_steps: int | None = None
    gradient_accumulation_steps: int | Mapping[int, int] = 1
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | None = None
    scheduler_interval: Literal["update", "epoch"] = "update"
    scheduler_metric: str | None = None
    eval_every_n_epochs: int = 1
    evaluate_every: str | None = None
    auto_microbatch: bool = False
    sanity_check: bool = False
    saves_training_states: bool = False
    skips_failed_batches: bool = False
    skips_in_evaluation: bool = False
    skips_in_prediction: bool = False
    ends_at_signals: bool = False
    max_batches: int | None = None
    first_sample: int = 0
    state_sources: list[StateSource] = field(default_factory=list)
    metrics: ExpectedMetrics = field(default_factory=ExpectedMetrics)
    paths: dict[str, str] = field(default_factory=dict)
    locked_paths: dict[str, str] = field(default_factory=dict)
    unfreezes: bool = False
    _owners: dict[str, tuple[object, str]] = field(default_factory=dict)

    def claim_path(
        self,
        owner: object,
        argument: str,
        path: str | os.PathLike[str] | None,
        content: str | None = None,
        *,
        locks: bool = True,
    ) -> None:
        """Declare that a callback writes to a path, to which no other callback and no other training may write.

        Args:
            owner: the callback
            argument: name of the callback's argument with the path
            path: the path; ``None`` does nothing
            content: what the path will contain, in a word or two; by default the name of the callback's class
            locks: whether a training run keeps other runs, also of other programs, from writing to the path until it
                ends

        Raises:
            ValueError: if another callback writes to the path; names the argument, the path and both callbacks
        """
        if path is None:
            return
        self.paths.setdefault(os.fspath(path), content or type(owner).__name__)
        other, _ = self._owners.setdefault(os.path.realpath(path), (owner, argument))
        if other is not owner:
            raise ValueError(
                f"{argument}={os.fspath(path)!r} is used by two callbacks, {type(owner).__name__} and "
                f"{type(other).__name__}, which would overwrite each other's files. Give each a different path."
            )
        if locks:
            self.locked_paths.setdefault(os.fspath(path), argument)


#: Marks settings that change what a run computes, not only its length, its speed or its output. A resumed run compares
#: them with those of the saved run.
_COMPARED = {"is_compared": True}


@dataclass(frozen=True, repr=False)
class TrainerRunConfig:
    """The settings of a training or evaluation run, fixed when it starts.

    Those not described here are arguments of ``Trainer.train()``, as requested.

    Args:
        num_epochs: number of epochs; ``None`` if the data have no length and the number of updates is limited
        train_per_device_batch_size: number of samples in a training batch of one process
        train_dl_kwargs: arguments of the training dataloader
        eval_per_device_batch_size: number of samples in an evaluation batch of one process
        eval_dl_kwargs: arguments of the evaluation dataloader
        train_total_batch_size: number of samples in one update, over all processes; in the first update, if
            ``gradient_accumulation_steps`` changes
        eval_total_batch_size: number of samples in one evaluation step, over all processes
        num_update_steps_per_epoch: number of optimizer updates per epoch, or in the first epoch if
            ``gradient_accumulation_steps`` changes; ``None`` if the data have no length, 0 in an evaluation run
        max_num_train_steps: number of optimizer updates in the run; ``None`` if the data have no length and no limit
            was given
        is_local_process_zero: whether this is the first process on its machine
        is_world_process_zero: whether this is the first process of the job
        is_distributed: whether the job has several processes
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``
        num_processes: number of processes in the job
        num_local_update_steps_per_epoch: the same number, because every process takes part in every update
        seed: the seed of the trainer, or ``None``
        logical_processes: the trainer's argument of this name, if it was passed; batch sizes are then those of a
            logical process
        deterministic: the trainer's argument of this name, if it was passed
    """

    num_epochs: int | None
    train_per_device_batch_size: int = field(metadata=_COMPARED)
    train_dl_kwargs: LoaderKwargs | None
    eval_per_device_batch_size: int
    eval_dl_kwargs: LoaderKwargs | None
    gradient_accumulation_steps: int | Mapping[int, int] = field(metadata=_COMPARED)
    gradient_clip_value: float | None = field(metadata=_COMPARED)
    train_total_batch_size: int
    eval_total_batch_size: int
    num_update_steps_per_epoch: int | None
    max_num_train_steps: int | None
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str = field(default="no", metadata=_COMPARED)
    num_processes: int = 1
    num_local_update_steps_per_epoch: int | None = None
    seed: int | None = None
    gradient_clip_norm: float | None = field(default=None, metadata=_COMPARED)
    scheduler_interval: Literal["update", "epoch"] = field(default="update", metadata=_COMPARED)
    scheduler_metric: str | None = field(default=None, metadata=_COMPARED)
    eval_every_n_epochs: int = field(default=1, metadata=_COMPARED)
    evaluate_every: str | None = field(default=None, metadata=_COMPARED)
    auto_microbatch: bool = False
    logical_processes: int | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        if self.num_local_update_steps_per_epoch is None:
            object.__setattr__(self, "num_local_update_steps_per_epoch", self.num_update_steps_per_epoch)

    def __repr__(self) -> str:
        return call_repr(type(self).__name__, self.notable())

    def notable(self) -> dict[str, object]:
        """Return the settings that differ from their defaults and, with several processes, which process this is."""
        per_process = {"is_distributed", "is_local_process_zero", "is_world_process_zero", "num_processes"}
        hidden = {"num_local_update_steps_per_epoch"} | (set() if self.is_distributed else per_process)
        defaults = {item.name: item.default for item in fields(self) if item.name != "mixed_precision"}
        settings = {name: value for name, value in vars(self).items() if name not in hidden and value is not None}
        return {name: value for name, value in settings.items() if value != defaults.get(name)}

    @classmethod
    def compared_settings(cls) -> tuple[str, ...]:
        """Return the names of the settings that a resumed run compares with those of the saved run."""
        return tuple(item.name for item in fields(cls) if item.metadata.get("is_compared"))

    def to_dict(self) -> dict[str, object]:
        """Return the settings as a dict, with numbers of numpy as Python's own.

        Objects among the dataloader arguments are shared, not copied.
        """
        return {k: dict(v) if isinstance(v, dict) else to_number(v) for k, v in vars(self).items()}
