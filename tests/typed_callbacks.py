"""Callbacks in the styles that people write, for the type checker: ``make check`` runs it over this file.

An ignored error is expected: one that is no longer found is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import EarlyStoppingCallback
from pytorch_accel_lite.data import OwnShard

Batch = tuple[torch.Tensor, torch.Tensor]


class Watching(TrainerCallback):
    """Counts the training steps it has seen."""

    steps = 0


class TakesNothing(Watching):
    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.steps += 1


class TakesSome(Watching):
    def on_train_step_end(self, trainer: Trainer, batch: Batch, **kwargs: Any) -> None:
        self.steps += len(batch) // 2

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, torch.Tensor], **_: Any) -> None:
        pass


class TakesThemInAnotherOrder(Watching):
    def on_train_step_end(self, trainer: Trainer, step: int, batch: Batch, **kwargs: object) -> None:
        self.steps += 1

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        pass


class TakesWhatTheEditorOffers(Watching):
    def on_train_step_end(
        self, trainer: Trainer, *, batch: Any, batch_output: Mapping[str, Any], step: int, **kwargs: Any
    ) -> None:
        super().on_train_step_end(trainer, batch=batch, batch_output=dict(batch_output), step=step, **kwargs)
        self.steps += 1

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: Any) -> None:
        super().on_eval_epoch_end(trainer, is_intermediate=is_intermediate, **kwargs)


class TakesAnything(Watching):
    def on_train_step_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_step_end(trainer, **kwargs)
        self.steps += 1


class IsUntyped(Watching):
    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):  # type: ignore[no-untyped-def]
        super().on_train_step_end(trainer, batch, batch_output, **kwargs)  # type: ignore[call-arg]
        self.steps += 1


class ExtendsOneOfOurs(EarlyStoppingCallback):
    steps = 0

    def on_train_step_end(self, trainer: Trainer, step: int, **kwargs: Any) -> None:
        super().on_train_step_end(trainer, step=step, **kwargs)
        self.steps += 1


class HasNoRoomForMore(Watching):
    def on_train_step_end(  # type: ignore[override]
        self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], step: int
    ) -> None:
        self.steps += 1


class IsWrongAboutAType(Watching):
    def on_train_step_end(self, trainer: Trainer, step: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.steps += 1


STYLES: list[type[Watching] | type[ExtendsOneOfOurs]] = [
    TakesNothing,
    TakesSome,
    TakesThemInAnotherOrder,
    TakesWhatTheEditorOffers,
    TakesAnything,
    IsUntyped,
    ExtendsOneOfOurs,
    HasNoRoomForMore,
    IsWrongAboutAType,
]


def data_of_all_kinds(trainer: Trainer, data: TensorDataset) -> None:
    samples = [(torch.ones(4), torch.ones(1))]
    trainer.train(data, 1, {"clean": data, "noisy": DataLoader(data)})
    trainer.train(DataLoader(data), 1, samples)
    trainer.train(OwnShard([samples]), 1, Subset(data, range(2)))
    trainer.evaluate({"clean": samples})
    trainer.predict(data)
    trainer.train(5, 1)  # type: ignore[arg-type]


class Evaluates(Trainer):
    def evaluate(self, dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().evaluate(dataset, *args, **kwargs)
