"""Weights of a mixture that change from epoch to epoch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pytorch_accel_lite.data import Mixture
from pytorch_accel_lite.extending import TrainerCallback, TrainerLike, check_positive_int
from pytorch_accel_lite.extending_callbacks import StateDict, is_number

#: Shares of datasets by name, relative to each other.
Weights: TypeAlias = Mapping[str, float]
#: Returns the weights of an epoch, counted from 1, given the latest value of each metric.
Schedule: TypeAlias = Callable[[int, dict[str, float]], Weights]


class MixtureScheduleCallback(TrainerCallback):
    """Change the weights of the ``Mixture`` that a run trains on, from epoch to epoch, and record the shares.

    Each dataset is read on from where it was, so the order is a function of the seed and of the weights of the epochs
    so far, which training states hold. Any number of processes reads the same. After each epoch, ``share_NAME`` is the
    share of the samples that were from a dataset.

    :param weights: stages: weights by the number of complete epochs after which they hold, such as ``{0: {"easy": 0.9,
        "hard": 0.1}, 5: {"easy": 0.5, "hard": 0.5}}``; or a function ``weights(epoch, metrics)`` of the epoch, counted
        from 1, and of the latest value of each metric, called on the first process before each epoch. ``None`` leaves
        the weights as they are.
    :param linear: whether the weights change linearly from one stage to the next, each as a share
    """

    def __init__(self, weights: Mapping[int, Weights] | Schedule | None = None, *, linear: bool = False) -> None:
        self.weights = weights
        self.linear = linear
        if weights is not None and not callable(weights):
            _check_stages(weights)
        elif linear:
            raise ValueError(f"linear=True needs stages, not weights={weights!r}: {{0: ..., 10: ...}}.")
        self._mixture: Mixture | None = None
        self._epoch = 0

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Check that the run trains on a mixture with the datasets of each stage."""
        data = trainer.run.data.train_dataset
        self._mixture = data if isinstance(data, Mixture) else None
        self._epoch = 0
        if self.weights is not None and self._mixture is None:
            raise ValueError(
                f"MixtureScheduleCallback(weights=...) needs a Mixture to train on, not a {type(data).__name__}: "
                "train(Mixture({'easy': ..., 'hard': ...}), ...)."
            )
        if self._mixture is not None and not callable(self.weights):
            for number in sorted(self.weights or {}):  # a mistake in a later stage shows before training
                self._mixture.change_weights(self.weights[number], 1)  # type: ignore[index]

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Change the weights."""
        self._epoch = trainer.progress.epoch
        if self._mixture is not None and self.weights is not None:
            weights = trainer.broadcast_object(self._weights_of(trainer) if trainer.run.ranks.rank == 0 else None)
            assert weights is not None  # those of the first process
            self._mixture.change_weights(weights, self._epoch)

    def _weights_of(self, trainer: TrainerLike) -> Weights:
        if not callable(self.weights):
            assert self.weights is not None
            return _at(self.weights, self._epoch - 1, self.linear)
        history = trainer.run_history
        values = {name: history.get_latest_metric(name) for name in history.get_metric_names()}
        return self.weights(self._epoch, {name: value for name, value in values.items() if is_number(value)})

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Record the shares."""
        if self._mixture is not None:
            for name, count in self._mixture.samples_per_epoch.items():
                trainer.run_history.update_metric(f"share_{name}", count / self._mixture.num_samples)

    def state_dict(self) -> StateDict:
        """Return the weights of the epochs so far."""
        stages = {} if self._mixture is None else self._mixture.stages
        return {"epoch": self._epoch, "stages": [[first, dict(weights)] for first, weights in stages.items()]}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self._epoch = state["epoch"]
        if self._mixture is not None:
            for first, weights in state["stages"]:
                self._mixture.change_weights(weights, first)


def _check_stages(stages: Mapping[int, Any]) -> None:
    if not isinstance(stages, Mapping) or 0 not in stages:
        raise ValueError(
            f"weights={stages!r} must be stages that begin with 0, such as {{0: {{'easy': 1, 'hard': 1}}}}."
        )
    for number, weights in stages.items():
        if number != 0:
            check_positive_int("a key of weights", number)
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights[{number}]={weights!r} must be weights of the datasets by name.")


def _at(stages: Mapping[int, Weights], epochs: int, linear: bool) -> Weights:
    """Return the weights after a number of complete epochs."""
    numbers = sorted(stages)
    place = bisect_right(numbers, epochs)
    before = stages[numbers[place - 1]]
    if not linear or place == len(numbers):
        return before
    begin, end = numbers[place - 1], numbers[place]
    following = (epochs - begin) / (end - begin)
    parts = [(before, 1 - following), (stages[end], following)]
    return {name: sum(part * each[name] / sum(each.values()) for each, part in parts) for name in before}
