"""Training states of a model of 1 GB: how long training waits for them, and constant memory."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.gpu.parts import DEVICE, IN_ORDER, MIB, ON_GPU, sized

pytestmark = pytest.mark.alone
WIDTH = sized(4096, 64)
LAYERS = sized({"large": 16, "small": 2}, {"large": 2, "small": 2})  # of 64 MiB each: 1 GiB, 128 MiB


def layers(size: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS[size])))


def rows(steps: int) -> TensorDataset:
    return TensorDataset(torch.randn(4 * steps, WIDTH), torch.randn(4 * steps, WIDTH))


class Pauses(TrainerCallback):
    """Measures how long the device idles because of a state, and the memory of device and host after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.on_host: list[int] = []
        self.on_device: list[int] = []

    def before(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "training-state-writer":
                thread.join()  # what is measured is the copy, not the writing of the state before
        if ON_GPU:
            torch.cuda.synchronize()
        self._start = time.perf_counter()

    def after(self) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        self.on_host.append(resident_bytes())
        self.on_device.append(torch.cuda.memory_allocated() if ON_GPU else 0)


class Around(TrainerCallback):
    """Calls a function at the time of states, before or after those callbacks that stand between."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def on_train_step_checkpoint(self, trainer: Any, **kwargs: Any) -> None:
        self.call()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def train(size: str, states: int, folder: Path) -> tuple[Pauses, Trainer]:
    pauses = Pauses()
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, asynchronous=True, max_checkpoints=1)
    model = layers(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [Around(pauses.before), saving, Around(pauses.after)], seed=0)
    trainer.train(rows(states), 1, per_device_batch_size=4, train_dataloader_kwargs=IN_ORDER)
    return pauses, trainer


def seconds_of_a_copy() -> float:
    """The time of the plainest copy to pinned memory of as many bytes."""
    tensors = [parameter.detach() for parameter in layers("large").to(DEVICE).parameters()]
    buffers = [torch.empty_like(tensor, device="cpu", pin_memory=ON_GPU) for tensor in tensors]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def test_training_waits_only_for_a_copy_of_the_state(tmp_path, measured):
    """Later pauses are those of a copy into pinned memory that is there already, which the device makes."""
    pauses, trainer = train("large", 4, tmp_path)
    first, *later = pauses.seconds
    copying = seconds_of_a_copy()
    pause = statistics.median(later)
    measured(first_pause_seconds=first, pause_seconds=pause, plain_copy_seconds=copying)
    assert trainer.progress.update == 4
    if ON_GPU:
        assert pause < 3 * copying + 0.1


@pytest.mark.parametrize("steps", [20])
def test_memory_is_flat_over_20_states(steps, tmp_path, measured):
    pauses, _ = train("small", steps, tmp_path)
    assert len(pauses.on_host) == steps
    assert max(pauses.on_device[1:]) <= min(pauses.on_device[1:]) + MIB
    growth = max(pauses.on_host[10:]) - max(pauses.on_host[2:10])
    measured(growth_of_host_memory_mib=growth / MIB)
    assert growth < sized(64, 16) * MIB  # half a state
