"""Stops, pauses and losses that are not finite, which one rank meets and all act upon."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import NonFiniteLossError, StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import TerminateOnNaNCallback
from tests.cases.common import rank, world_size
from tests.tasks import regression_data, small_model


class NaNOnOneRank(Trainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.progress.step == 3 and rank() == world_size() - 1:
            output["loss"] = output["loss"] * float("nan")
        return output


def nan_on_one_rank() -> Any:
    events = []

    class Events(TrainerCallback):
        def on_exception(self, trainer, exception, **kwargs):
            events.append(("on_exception", type(exception).__name__))

        def on_training_run_end(self, trainer, **kwargs):
            events.append(("on_training_run_end",))

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = NaNOnOneRank(model, nn.MSELoss(), optimizer, callbacks=[TerminateOnNaNCallback, Events])
    try:
        trainer.train(regression_data(60), 2, per_device_batch_size=2)
    except NonFiniteLossError as error:
        return {"message": str(error), "events": events, "update": trainer.progress.update}
    return None


class StopsAt(TrainerCallback):
    """Asks for the end of the run at an event, on the last rank only."""

    def __init__(self, event: str, update: int) -> None:
        self.update = update
        setattr(self, event, self.stop)

    def stop(self, trainer, **kwargs):
        if trainer.progress.update == self.update and rank() == world_size() - 1:
            raise StopTrainingError("enough")
