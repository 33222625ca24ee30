"""Two ranks that make different calls; the argument selects them."""

import os
import sys
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from pytorch_accel_lite import Trainer, TrainerCallback
from tests.small_models import adamw_trainer, float64_data, float64_model

case, _, left_out = sys.argv[1].partition(", not in step ")
torch.set_num_threads(1)
is_first = os.environ["RANK"] == "0"
data = float64_data(16)
short = InitProcessGroupKwargs(timeout=timedelta(seconds=5))


class EvaluatesAlone(TrainerCallback):
    def on_train_epoch_end(self, trainer, **kwargs):
        if is_first:
            trainer.evaluate(data)


class GathersForMetrics(TrainerCallback):
    def on_eval_step_end(self, trainer, batch, **kwargs):
        trainer.accelerator.gather_for_metrics(batch[1])


class UpdatesAlone(Trainer):
    def train_step(self, batch):
        loss = self.loss_func(self.model(batch[0]), batch[1])
        if is_first or self.progress.step != int(left_out):
            self.update(loss)
        return {"loss": loss.detach()}


callbacks = {"evaluates in a callback": [EvaluatesAlone], "gathers": [GathersForMetrics]}
accelerator = Accelerator(cpu=True, kwargs_handlers=[short])
assert accelerator.num_processes == int(os.environ["WORLD_SIZE"]) == 2
options = {"callbacks": callbacks.get(case, []), "accelerator": accelerator}
model = float64_model()
if case == "updates":
    trainer = UpdatesAlone(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), **options)
else:
    trainer = adamw_trainer(model, **options)
if case == "evaluates" and is_first:
    trainer.evaluate(data)
if case == "predicts" and not is_first:
    trainer.predict(data)
if case == "saves" and is_first:
    trainer.save_checkpoint("never.pt")
if case == "gathers rows" and not is_first:
    trainer.gather(torch.ones(2))
if case in ("updates", "evaluates in a callback"):
    trainer.train(data, 2, per_device_batch_size=2)
if case == "gathers":
    trainer.evaluate(float64_data(1))
