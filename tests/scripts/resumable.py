"""A run with every kind of state, which resumes when the same command is run again.

python resumable.py FOLDER [ACCUMULATION [WORKERS [DELAY [EPOCHS [ASYNCHRONOUS]]]]]

The final weights, optimizer, history and the order of the samples are written to FOLDER/final.pt.
"""

from __future__ import annotations

import copy
import random
import shutil
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint.models.weights import full_state_dict
from tests.small_models import Rows, float64_data

EPOCHS, SIZE, GLOBAL_BATCH = 3, 22, 6


class Augmented(Rows):
    shift = 0.0  # which each epoch changes, also for workers that are kept

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        noise = 0.1 * torch.randn(5) + 0.1 * np.random.randn() + 0.1 * random.random()
        return x + noise, y + self.shift, torch.tensor(index)


class OrderCallback(TrainerCallback):
    """Changes the data in each epoch, and records the samples of every step, to compare a resumed run."""

    def __init__(self) -> None:
        self.order: list[list[int]] = []

    def on_train_epoch_start(self, trainer, **kwargs):
        trainer.train_dataset.shift = 0.1 * trainer.progress.epoch

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        samples = batch[2] if batch_output["batch_size"] else batch[2][:0]  # of a rank that only keeps step
        self.order.append(trainer.gather(samples).tolist())

    def state_dict(self):
        return {"order": self.order}

    def load_state_dict(self, state):
        self.order = state["order"]


class CopyStates(TrainerCallback):
    """Keeps a copy of every state that is written, also of those that a later one replaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _copy(self, trainer, kind):
        if not trainer.accelerator.is_main_process:
            return
        source = self.folder / "states" / f"update-{trainer.progress.update:09d}"
        shutil.copytree(source, self.folder / "copies" / f"{trainer.progress.update:03d}-{kind}" / source.name)

    def on_train_step_checkpoint(self, trainer, **kwargs):
        self._copy(trainer, "step")

    def on_epoch_checkpoint(self, trainer, **kwargs):
        self._copy(trainer, "epoch")


class Lingers(TrainerCallback):
    """Waits in an update until the process is killed, so that the run cannot end before.

    Args:
        update: the number of the update; ``None`` for a run that is not killed
    """

    def __init__(self, update: int | None = None) -> None:
        self.update = update

    def on_train_step_end(self, trainer, **kwargs):
        for _ in range(6000 if trainer.progress.update == self.update else 0):
            time.sleep(0.05)
            trainer.barrier()  # if another rank is killed, this one ends as in any step


class SlowTrainer(Trainer):
    delay = 0.0

    def _calculate(self, batch):
        time.sleep(self.delay)
        outputs = self.model(batch[0])
        return {"loss": nn.functional.mse_loss(outputs, batch[1]), "model_outputs": outputs}

    def calculate_train_batch_loss(self, batch):
        return self._calculate(batch)

    def calculate_eval_batch_loss(self, batch):
        return self._calculate(batch)


class Holding(SlowTrainer):
    """Trains a head that a closure holds, and has a replay buffer, a generator and counts as attributes."""

    def __init__(self, head: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.apply_head = lambda outputs: head(outputs)
        self.replay: deque[tuple[torch.Tensor, float]] = deque(maxlen=100)
        self.noise = np.random.default_rng(self.ranks.rank)
        self.counts = {"steps": 0, "mean": torch.zeros(1, dtype=torch.float64)}

    def calculate_train_batch_loss(self, batch):
        time.sleep(self.delay)
        outputs = self.apply_head(self.model(batch[0]))
        self.replay.extend((row, float(self.noise.random())) for row in outputs.detach())
        self.counts["steps"] += 1
        self.counts["mean"].mul_(0.9).add_(outputs.detach().mean())
        row, number = self.replay[self.counts["steps"] * 7 % len(self.replay)]
        wanted = batch[1] + 0.1 * row + 0.1 * number - 0.1 * self.counts["mean"]
        return {"loss": nn.functional.mse_loss(outputs, wanted), "model_outputs": outputs}


class Teaches(TrainerCallback):
    """Pulls the weights towards those of a momentum teacher, and unfreezes the first layer in the second epoch."""

    def on_training_run_start(self, trainer, **kwargs):
        self.teacher = copy.deepcopy(trainer.get_model())
        trainer.get_model()[0].requires_grad_(False)
        trainer.rewrap_model()

    def on_train_epoch_start(self, trainer, **kwargs):
        if trainer.progress.epoch == 2:
            trainer.get_model()[0].requires_grad_(True)
            trainer.rewrap_model()

    @torch.no_grad()
    def on_optimizer_step_end(self, trainer, **kwargs):
        for slow, fast in zip(self.teacher.parameters(), trainer.get_model().parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
            fast.data.lerp_(slow.data, 0.05)


def script(folder: Path, *arguments: object) -> list[str]:
    """The arguments of Python that run this script."""
    return ["tests/scripts/resumable.py", str(folder), *map(str, arguments)]


def saved_states(folder: Path) -> list[Path]:
    """The training states of a run, from the oldest to the newest."""
    return sorted(path for path in (folder / "states").iterdir() if path.name.startswith("update-"))


def final_state(folder: Path) -> dict[str, Any]:
    """What a run has written to FOLDER/final.pt."""
    return torch.load(folder / "final.pt", weights_only=False)


def make_model() -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    torch.set_rng_state(state)
    return model


def shard(model: nn.Module, accelerator: Accelerator) -> None:
    """Shard a model over all processes by ``fully_shard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    for module in (model[0], model[4], model):
        fully_shard(module, mesh=mesh)


def run(
    folder: Path,
    accumulation: int = 1,
    workers: int = 0,
    delay: float = 0.0,
    resume_from: Any = "latest",
    extra: tuple[Any, ...] = (),
    seed: int | None = 5,
    batch: int | None = None,
    epochs: int = EPOCHS,
    schedule: bool = True,
    size: int = SIZE,
    logical: int | None = None,
    evaluate_every: str | None = None,
    held: bool = False,
    **saver: Any,
) -> dict[str, Any]:
    model = make_model()
    accelerator = None
    if saver.get("sharded"):
        accelerator = Accelerator(cpu=True)
        shard(model, accelerator)
    order = OrderCallback()
    saving = SaveTrainingStateCallback(**({"save_dir": folder / "states", "save_every_n_steps": 1} | saver))
    head = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
    nn.init.ones_(head[1].weight)
    nn.init.zeros_(head[1].bias)
    trainer = (partial(Holding, head) if held else SlowTrainer)(
        model,
        None,
        torch.optim.AdamW([*model.parameters(), *head.parameters()] if held else model.parameters(), lr=0.01),
        callbacks=[
            *([Teaches()] if held else []),
            order,
            SaveBestModelCallback(folder / "best.pt", load_saved_checkpoint=False),
            EarlyStoppingCallback(early_stopping_patience=1000),
            saving,
            *extra,
        ],
        seed=seed,
        logical_processes=logical,
        accelerator=accelerator,
    )
    trainer.delay = delay
    total = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    trainer.train(
        Augmented(float64_data(size)),
        epochs,
        Augmented(float64_data(9)),
        per_device_batch_size=batch or GLOBAL_BATCH // trainer.accelerator.num_processes,
        gradient_accumulation_steps=accumulation,
        create_scheduler_fn=partial(OneCycleLR, max_lr=0.05, total_steps=total) if schedule else None,
        train_dataloader_kwargs={"num_workers": workers},
        eval_dataloader_kwargs={"num_workers": 0},
        resume_from=resume_from,
        evaluate_every=evaluate_every,
    )
    return {
        "weights": full_state_dict(model.state_dict(), keep=True),
        "optimizer": full_state_dict(trainer.optimizer.state_dict(), keep=True),
        "scheduler": trainer.scheduler.state_dict() if schedule else None,
        "held": [*head.state_dict().values(), trainer.counts, [*trainer.replay]] if held else None,
        "history": trainer.run_history.to_dict(),
        "order": order.order,
        "progress": trainer.progress.state_dict(),
        "random": (torch.rand(3), np.random.rand(), random.random()),
        "processes": trainer.accelerator.num_processes,
        "main": trainer.accelerator.is_main_process,
    }


def run_to_the_end(folder: Path, **kwargs: Any) -> None:
    """Run to the end, and write the result to ``final.pt``."""
    result = run(folder, **kwargs)
    if result["main"]:
        torch.save(result, folder / "unfinished.pt")
        (folder / "unfinished.pt").rename(folder / "final.pt")


def main() -> None:
    torch.set_num_threads(1)
    names = ("accumulation", "workers", "delay", "epochs", "asynchronous")
    arguments = dict(zip(names, sys.argv[2:], strict=False))
    run_to_the_end(Path(sys.argv[1]), **{k: float(v) if k == "delay" else int(v) for k, v in arguments.items()})


if __name__ == "__main__":
    main()
