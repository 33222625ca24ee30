"""A program whose processes are killed: it trains, evaluates and saves, and writes its results to files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback

CONFIG: dict[str, Any] = json.loads(sys.argv[1])
FOLDER = Path(CONFIG["folder"])
#: What this process is to do to itself, by the point at which it is: a signal, at ``"event:count"``.
MINE: dict[str, int] = CONFIG.get("kills", {}).get(os.environ.get("RANK", "new"), {})


def reach(point: str) -> None:
    """Carry out the action requested for a point; in a process that joins later, only once."""
    if point not in MINE:
        return
    mark = FOLDER / f"reached.{os.environ.get('RANK', 'new')}.{point}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), MINE[point])


class Victim(TrainerCallback):
    """Kills its process at the requested points, and records events."""

    saves_attributes = False

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.changes: list[Any] = []
        self.training = 0
        self.data = TensorDataset(torch.linspace(-1, 1, 88).view(11, 8))
        self.computed: dict[tuple[int, int], set[int]] = {}  # the generations in which each update was computed
        self.committed: list[tuple[int, int]] = []

    def reach(self, event: str) -> None:
        number = self.counts[event] = self.counts.get(event, 0) + 1
        reach(f"{event}:{number}")

    def on_processes_changed(self, trainer, *, left, came, **kwargs):
        self.changes.append([left, came, trainer.ranks.world_size])
        self.reach("changed")

    def on_backward_start(self, trainer, **kwargs):
        update = self.training, trainer.progress.update
        self.computed.setdefault(update, set()).add(trainer.ranks.generation)
        self.reach("forward")

    def on_backward_end(self, trainer, **kwargs):
        self.reach("backward")
        if pause := CONFIG.get("pause"):
            time.sleep(pause)

    def on_optimizer_step_start(self, trainer, **kwargs):
        self.reach("gradients")

    def on_optimizer_step_end(self, trainer, **kwargs):
        self.reach("update")
        self.committed.append((self.training, trainer.progress.update))
        if CONFIG.get("marks"):
            with open(FOLDER / f"updates.{os.getpid()}", "a") as file:
                file.write(f"{self.training} {trainer.progress.update} {trainer.ranks.world_size}\n")

    def on_train_step_end(self, trainer, **kwargs):
        self.reach("step")

    def on_update_end(self, trainer, **kwargs):
        self.reach("exchange")
        trainer.ranks.sum([1.0])
        if CONFIG.get("gathers"):
            for parameter in trainer.model.parameters():
                whole(parameter)
        if CONFIG.get("predicts"):
            predicted = trainer.predict(self.data, dataloader_kwargs={"num_workers": 0})
            trainer.run_history.update_metric("predicted", predicted.sum().item())

    def on_train_step_checkpoint(self, trainer, **kwargs):
        self.reach("checkpoint")

    def on_train_epoch_end(self, trainer, **kwargs):
        self.reach("epoch")

    def on_eval_step_end(self, trainer, **kwargs):
        self.reach("evaluation")

    def on_eval_epoch_end(self, trainer, **kwargs):
        self.reach("evaluated")

    def on_training_run_epoch_end(self, trainer, **kwargs):
        self.reach("saving")

    def on_training_run_start(self, trainer, **kwargs):
        self.reach("starting")

    def on_predict_step_end(self, trainer, **kwargs):
        self.reach("prediction")


class Stateful(TrainerCallback):
    """A callback with a kill point in ``state_dict()``."""

    saves_attributes = False
    count = 0

    def state_dict(self):
        self.count += 1
        reach(f"state:{self.count}")
        return {}

    def load_state_dict(self, state):
        pass


class Network(nn.Module):
    """Has buffers, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        width = CONFIG.get("width", 16)
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


class Logging(Trainer):
    """Logs a value of its own."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.log("margin", output["model_outputs"].amax(1))
        return output

    def clip_gradients(self):
        self.clipped = getattr(self, "clipped", 0) + 1
        reach(f"clipping:{self.clipped}")
        super().clip_gradients()


def shard(model: Network) -> None:
    """Divide the weights among the processes; for HSDP, twice among a half of them, if there are four."""
    size = dist.get_world_size()
    if CONFIG["sharded"] == "hsdp" and size == 4:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def digest(values: Any) -> str:
    sums = hashlib.sha256()
    for value in map(whole, values):
        sums.update(value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return sums.hexdigest()[:16]


def main() -> None:
    from pytorch_accel_lite.callbacks import MetricsCallback

    reach("beginning")
    torch.manual_seed(0)
    model = Network()
    if CONFIG.get("sharded"):
        if (FOLDER / "states").exists():
            reach("sharding again")
        shard(model)
    x = torch.randn(CONFIG.get("samples", 203), 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    victim = Victim()
    callbacks: list[Any] = [victim]
    if CONFIG.get("saves"):
        callbacks += [SaveBestModelCallback(str(FOLDER / "best.pt"), "eval_loss_epoch")]
        if "ModelEmaCallback" in shipped.__all__:  # otherwise its extension has been deleted
            callbacks.append(shipped.ModelEmaCallback(save_path=str(FOLDER / "average.pt")))
        if "MetricsFileCallback" in shipped.__all__:
            callbacks.append(shipped.MetricsFileCallback(str(FOLDER / "metrics.jsonl"), every="2 updates"))
        callbacks += [
            SaveTrainingStateCallback(str(FOLDER / "states"), save_every_n_steps=5, max_checkpoints=2),
            Stateful(),
        ]
    if CONFIG.get("metrics"):
        callbacks.append(MetricsCallback({"accuracy": MulticlassAccuracy(3), "auroc": MulticlassAUROC(3)}, train=True))
    if CONFIG.get("shows"):
        callbacks += get_default_callbacks()
        if "RunLogCallback" in shipped.__all__:  # otherwise its extension has been deleted
            callbacks.append(shipped.RunLogCallback(str(FOLDER / "log")))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if CONFIG.get("two_optimizers"):
        body, head = model.layers[:2].parameters(), model.layers[4].parameters()
        optimizer = {"body": torch.optim.AdamW(body, lr=1e-2), "head": torch.optim.SGD(head, lr=1e-1, momentum=0.9)}
    trainer = Logging(
        model, nn.CrossEntropyLoss(), optimizer, callbacks, seed=0, logical_processes=CONFIG.get("logical", 4)
    )

    def train() -> None:
        victim.training += 1
        trainer.train(
            data,
            num_epochs=CONFIG.get("epochs", 2),
            eval_dataset=TensorDataset(x[:53], x[:53, :3].argmax(1)),
            per_device_batch_size=4,
            gradient_accumulation_steps=CONFIG.get("accumulation", 1),
            gradient_clip_norm=CONFIG.get("clip", 1.0),
            create_scheduler_fn="cosine",
            train_dataloader_kwargs={"num_workers": CONFIG.get("workers", 0)},
            eval_dataloader_kwargs={"num_workers": 0},
            **CONFIG.get("train", {}),
        )

    for _ in range(CONFIG.get("trainings", 1)):
        train()
    predicted = trainer.predict(TensorDataset(x[:37]), dataloader_kwargs={"num_workers": 0})
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer.values()]
    state = [
        value for each in optimizers for states in each.state_dict()["state"].values() for value in states.values()
    ]
    result = {
        "weights": digest(model.state_dict().values()),
        "optimizer": digest(state),
        "history": trainer.run_history.to_dict(),
        "progress": trainer.progress.state_dict(),
        "predicted": digest([predicted]),
    }
    goodput = trainer.goodput
    own = {"changes": victim.changes, "rank": trainer.ranks.rank, "world_size": trainer.ranks.world_size}
    again = sum(len(generations) > 1 for generations in victim.computed.values())
    own |= {"again": again, "committed": victim.committed}
    own |= {"takeovers": goodput.takeovers, "seconds": goodput.seconds["takeover"], "time": str(goodput)}
    (FOLDER / f"result.{os.getpid()}.json").write_text(json.dumps({"result": result, **own}))


main()
