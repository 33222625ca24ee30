"""Weights of a mixture that change from epoch to epoch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from pytorch_accel_lite.data import Mixture, MixtureStream
from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_choice, check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import is_number
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import set_own_listening
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extensions.mixtures.ignored_weights import ignores_weights

#: Shares of datasets by name, relative to each other.
Weights: TypeAlias = Mapping[str, float]
#: Returns the weights, given the number of an epoch or of updates, and the latest value of each metric.
Schedule: TypeAlias = Callable[[int, dict[str, float]], Weights]


class MixtureScheduleCallback(TrainerCallback):
    """Change the weights of the ``Mixture`` or ``MixtureStream`` that a run trains on, and record the shares.

    Of a ``Mixture``, each dataset is read on from where it was, so the order is a function of the seed and of the
    weights so far, which training states hold. Any number of processes reads the same. ``share_NAME`` is the share of a
    dataset in the samples since it was recorded last: at the end of each epoch and, by updates, after each evaluation.

    By updates, what has been read ahead is read again when weights change, so that they hold from the next batch on. A
    ``MixtureStream`` needs a seed for that, and no workers but those of a ``StatefulDataLoader``.

    Args:
        weights: stages: weights by the number of complete epochs or updates after which they hold, such as ``{0:
            {"easy": 0.9, "hard": 0.1}, 5: {"easy": 0.5, "hard": 0.5}}``, of which some may be 0; or a function of a
            number and of the latest value of each metric, called on the first process. It is given the number of an
            epoch, counted from 1, before that; or the number of updates so far, before each epoch, after
            ``every_n_updates``, and after each evaluation within an epoch. ``None`` leaves the weights as they are.
        linear: whether the weights change linearly from one stage to the next, each as a share
        unit: whether the numbers of stages are epochs or updates
        every_n_updates: by updates, how often linear weights change and the function is called; 100 by default
    """

    def __init__(
        self,
        weights: Mapping[int, Weights] | Schedule | None = None,
        *,
        linear: bool = False,
        unit: Literal["epochs", "updates"] = "epochs",
        every_n_updates: int | None = None,
    ) -> None:
        check_choice("unit", unit, ("epochs", "updates"))
        if every_n_updates is not None:
            check_positive_int("every_n_updates", every_n_updates)
            if unit == "epochs":
                raise ValueError(f"every_n_updates={every_n_updates} needs unit='updates'. By default, epochs count.")
        self.weights = weights
        self.linear = linear
        self.unit = unit
        self.every_n_updates = every_n_updates or 100
        if weights is not None and not callable(weights):
            _check_stages(weights)
        elif linear:
            raise ValueError(f"linear=True needs stages, not weights={weights!r}: {{0: ..., 10: ...}}.")
        self._by_updates = unit == "updates" and weights is not None
        self._mixture: Mixture | MixtureStream | None = None
        self._epoch = 0
        self._is_in_epoch = False
        self._asked = 0  # number of updates after which the function was called last
        self._counted = 0  # samples of the epoch that the shares have been added up for
        self._recorded = 0  # samples of the epoch before the shares were recorded last
        self._due: dict[str, float] = {}  # samples of each dataset since then

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Check that the run trains on a mixture with the datasets of each stage."""
        data = trainer.run.data.train_dataset
        self._mixture = mixture = data if isinstance(data, (Mixture, MixtureStream)) else None
        self._epoch, self._is_in_epoch = 0, False
        self._counted, self._recorded, self._due = 0, 0, {}
        set_own_listening(trainer, self, self._changes_within_epochs, "on_update_end", "on_eval_epoch_end")
        if self.weights is None:
            return
        if mixture is None:
            raise ValueError(
                "MixtureScheduleCallback(weights=...) needs a Mixture or a MixtureStream to train on, not a "
                f"{type(data).__name__}: train(Mixture({{'easy': ..., 'hard': ...}}), ...)."
            )
        if isinstance(mixture, Mixture) and ignores_weights(trainer.run):
            raise ValueError(
                "MixtureScheduleCallback has no effect, because the loader of the Mixture has a sampler of torch. Pass "
                "the Mixture itself to train(), or create its loader by DataLoader(mixture, "
                "**mixture.loader_kwargs(batch_size))."
            )
        if self._by_updates and isinstance(mixture, MixtureStream):
            _check_can_return(trainer)
        if not callable(self.weights):
            for number in sorted(self.weights, reverse=True):  # a mistake in a later stage shows before training
                _set_weights(mixture, self.weights[number], 1)

    @property
    def _changes_within_epochs(self) -> bool:
        return self._by_updates and self._mixture is not None

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Change the weights."""
        self._epoch, self._is_in_epoch = trainer.progress.epoch, True
        if self._mixture is None or trainer.progress.is_mid_epoch:  # a resumed epoch continues as it was
            return
        self._counted, self._recorded, self._due = 0, 0, {}
        if self.weights is not None:
            self._asked = trainer.progress.update
            number = trainer.progress.update if self._by_updates else self._epoch - (not callable(self.weights))
            _set_weights(self._mixture, self._weights_at(trainer, number), self._epoch)

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """By updates, change the weights if it is time."""
        if not self._changes_within_epochs:
            return
        update = trainer.progress.update
        if not callable(self.weights):
            self._change(trainer, self._weights_at(trainer, update))
        elif update // self.every_n_updates > self._asked // self.every_n_updates:
            self._asked = update
            self._change(trainer, self._weights_at(trainer, update))

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """By updates, record the shares after an evaluation within an epoch, and ask the function."""
        if not self._changes_within_epochs:
            return
        if not self._is_in_epoch or not trainer.run.epoch_is_trained:  # the last dataset of an evaluation of the run
            return
        history, prefix = trainer.run_history, trainer.run_history.metric_name_prefix
        history.set_metric_name_prefix("")
        self._record(trainer)
        history.set_metric_name_prefix(prefix)
        if callable(self.weights):
            self._change(trainer, self._weights_at(trainer, trainer.progress.update))

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Record the shares."""
        self._is_in_epoch = False
        if self._mixture is not None:
            self._record(trainer)

    def _weights_at(self, trainer: TrainerLike, number: int) -> Weights:
        """Return the weights of an epoch, or after a number of updates, the same on all processes."""
        if not callable(self.weights):
            assert self.weights is not None
            return _at(self.weights, number, self.every_n_updates if self._by_updates else 1, self.linear)
        weights = trainer.broadcast_object(self._computed(trainer, number) if trainer.run.ranks.rank == 0 else None)
        assert weights is not None  # those of the first process
        return weights

    def _computed(self, trainer: TrainerLike, number: int) -> Weights:
        assert callable(self.weights)
        history = trainer.run_history
        values = {name: history.get_latest_metric(name) for name in history.get_metric_names()}
        return self.weights(number, {name: value for name, value in values.items() if is_number(value)})

    def _change(self, trainer: TrainerLike, weights: Weights) -> None:
        """Change the weights within an epoch, from the next batch on."""
        mixture, begin = self._mixture, trainer.progress.samples_in_epoch
        assert mixture is not None
        is_over = isinstance(mixture, Mixture) and begin >= mixture.num_samples
        if dict(weights) == mixture.weights or is_over:  # the next epoch begins with them
            return
        self._count(trainer)
        _set_weights(mixture, weights, self._epoch, begin)
        trainer.run.data.required_train_loader.read_again()

    def _count(self, trainer: TrainerLike) -> None:
        """Add up the samples that were due since the last change."""
        samples, rates = trainer.progress.samples_in_epoch, self._rates()
        for name, rate in rates.items():
            due = rate / math.fsum(rates.values()) * (samples - self._counted)
            self._due[name] = self._due.get(name, 0.0) + due
        self._counted = samples

    def _rates(self) -> Mapping[str, float]:
        """Return the present shares of the datasets, relative to each other."""
        mixture = self._mixture
        assert mixture is not None
        if isinstance(mixture, MixtureStream):
            return mixture.weights
        if self.weights is not None:
            return mixture.samples_per_epoch  # with the weights set last, which are this epoch's
        before, after = (mixture.samples_before(epoch) for epoch in (self._epoch, self._epoch + 1))
        return {name: after[name] - before[name] for name in before}

    def _record(self, trainer: TrainerLike) -> None:
        self._count(trainer)
        samples = self._counted - self._recorded
        if samples:
            for name, due in self._due.items():
                trainer.run_history.update_metric(f"share_{name}", due / samples)
        self._recorded, self._due = self._counted, {}

    def state_dict(self) -> StateDict:
        """Return the weights so far, and what the shares are computed from."""
        names = ("epoch", "asked", "counted", "recorded", "due")
        state = {name: getattr(self, f"_{name}") for name in names} | {"stages": []}
        if isinstance(self._mixture, Mixture):
            state |= self._mixture.state_of_weights()
        elif self._mixture is not None:
            state["weights"] = dict(self._mixture.weights)
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        for name in state.keys() & {"epoch", "asked", "counted", "recorded", "due"}:
            setattr(self, f"_{name}", state[name])
        if isinstance(self._mixture, Mixture):
            self._mixture.load_state_of_weights(state)
        elif self._mixture is not None:
            self._mixture.change_weights(state["weights"])


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


def _set_weights(mixture: Mixture | MixtureStream, weights: Weights, epoch: int, begin: int = 0) -> None:
    if isinstance(mixture, Mixture):
        mixture.change_weights(weights, epoch, begin)
    else:
        mixture.change_weights(weights)


def _check_can_return(trainer: TrainerLike) -> None:
    """Check that a stream can be read again from where an epoch is."""
    loader = trainer.run.data.required_train_loader
    obstacle = "the run has no seed. Pass Trainer(seed=...)" if loader.options.seed is None else loader.obstacle
    if obstacle:
        raise ValueError(
            "MixtureScheduleCallback(unit='updates') reads a MixtureStream again from where it is when weights change, "
            f"but this cannot be done: {obstacle}."
        )


def _at(stages: Mapping[int, Weights], done: int, every: int, linear: bool) -> Weights:
    """Return the weights after a number of complete epochs or updates.

    Args:
        every: after how many of them linear weights change
    """
    numbers = sorted(stages)
    place = bisect_right(numbers, done)
    before = stages[numbers[place - 1]]
    if not linear or place == len(numbers):
        return before
    begin, end = numbers[place - 1], numbers[place]
    following = (max(done - done % every, begin) - begin) / (end - begin)
    parts = [(before, 1 - following), (stages[end], following)]
    return {name: sum(part * each[name] / sum(each.values()) for each, part in parts) for name in before}
