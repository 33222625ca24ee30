"""Small models, data and trainers that tests use, and hand-written loops to compare with.

``make_data``, ``make_model`` and ``make_trainer`` use float32 and SGD. ``float64_data``, ``float64_model`` and
``adamw_trainer`` are for tests that compare numbers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback


def float64_data(size: int = 37, features: int = 5, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Data for ``float64_model``: a regression task."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, features, generator=generator, dtype=dtype)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(size, 1, generator=generator, dtype=dtype)
    return TensorDataset(x, y)


def float64_model(seed: int = 0, features: int = 5, dtype: torch.dtype = torch.float64) -> nn.Module:
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    torch.set_rng_state(generator_state)
    return model


@contextmanager
def fake_clock() -> Iterator[Callable[[float], None]]:
    """A fake clock for ``time.perf_counter``, which only the yielded function advances."""
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    with patch.object(time, "perf_counter", lambda: now[0]):
        yield pass_time


class Rows(Dataset[Any]):
    """A map-style dataset that is read sample by sample, as the trainer does not see that it is in memory."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.data[index]


def adamw_trainer(model: nn.Module, loss_func: Any = None, optimizer: Any = None, **kwargs: Any) -> Trainer:
    """A trainer with AdamW, and by default without callbacks."""
    kwargs.setdefault("callbacks", [])
    return Trainer(
        model,
        nn.MSELoss() if loss_func is None else loss_func,
        torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer is None else optimizer,
        **kwargs,
    )


def hand_written_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], epochs: int, loss_func: Any = None
) -> list[float]:
    """A plain training loop; returns the mean training loss of each epoch."""
    loss_func = loss_func or nn.MSELoss()
    losses = []
    for _ in range(epochs):
        model.train()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in loader:
            loss = loss_func(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach().double() * len(x)
        losses.append(total.item() / len(loader.dataset))
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def same_bits(first: Any, second: Any) -> bool:
    """Whether two nested states have the same bits."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same_bits(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same_bits, first, second))
    return type(first) is type(second) and bool(first == second)


@cache
def on_one_process(case: Callable[[], Any]) -> Any:
    """The result of a function on one process, computed once."""
    return case()


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[key].double() - second[key].double()).abs().max().item() for key in first)


def make_data(size: int = 6) -> TensorDataset:
    """A few samples in float32, for ``make_model``."""
    return float64_data(size, features=4, dtype=torch.float32)


def make_model(seed: int = 0, features: int = 4) -> nn.Module:
    """A model for ``make_data``."""
    return float64_model(seed, features, torch.float32)


def make_trainer(
    callbacks: Iterable[Any] = (), model: nn.Module | None = None, trainer_class: type[Trainer] = Trainer, **kwargs: Any
) -> Trainer:
    model = make_model() if model is None else model
    kwargs = {"loss_func": nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | kwargs
    return trainer_class(model, callbacks=callbacks, **kwargs)


def train(trainer: Trainer, epochs: int | None = 1, size: int = 6, batch_size: int = 2, **kwargs: Any) -> Trainer:
    """Train on a few samples in order; ``eval_dataset=True`` evaluates on the same."""
    data = kwargs.pop("train_dataset", None) or make_data(size)
    if kwargs.get("eval_dataset") is True:
        kwargs["eval_dataset"] = data
    kwargs.setdefault("train_dataloader_kwargs", {"shuffle": False})
    trainer.train(data, epochs, per_device_batch_size=batch_size, **kwargs)
    return trainer


def notes_of_error(error: BaseException, printed: str = "") -> str:
    """Return printed output and the notes of an error in a single line."""
    return " ".join(" ".join([printed, *getattr(error, "__notes__", [])]).split())


def listener(**methods: Callable[..., Any]) -> TrainerCallback:
    """A callback that calls ``method(trainer)``, or ``method(trainer, **kwargs)``, at the named events."""

    def event(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, trainer, **kwargs: method(trainer, **kwargs)

    return type("Listener", (TrainerCallback,), {name: event(method) for name, method in methods.items()})()


def raises(error: BaseException) -> Callable[..., None]:
    """A function that raises an error, whatever it is called with."""

    def action(*_: Any, **__: Any) -> None:
        raise error

    return action


def raises_at(update: int | None, error: BaseException, event: str = "on_train_step_end") -> TrainerCallback:
    """A callback that raises an error at an event, once the given number of updates is reached."""

    def check(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == update:
            raise error

    return listener(**{event: check})


class Blocks(nn.Module):
    """A model that repeats a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(self.drop(hidden))


@contextmanager
def changed_manifest(state: Path, *files: str) -> Iterator[dict[str, Any]]:
    """Yield the manifest of a training state to edit; then write it, with new checksums of itself and of the files."""
    path = state / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["checksum"]
    for name in files:
        content = (state / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    yield manifest
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


class Expanded(nn.Module):
    """Multiplies by an expanded buffer, whose elements share memory, changes it, and adds a read-only buffer."""

    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1, dtype=torch.float64))
        self.register_buffer("scale", self.one.expand(features))
        with torch.inference_mode():
            self.register_buffer("shift", torch.ones(features, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = x * self.scale.clone() + self.shift
        self.one.add_(0.1)
        return outputs


class CountsReads(TorchDispatchMode):
    """Counts calls of ``item()``, which read a number from a tensor."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, size: int = 6) -> None:
        self.data = make_data(size)

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


class Broken(Dataset[Any]):
    """A dataset with a sample that cannot be read."""

    def __init__(self, size: int = 6, broken: int = 4) -> None:
        self.data = make_data(size)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"scan {index} is unreadable")
        return self.data[index]


class Overflows(Trainer):
    """A trainer whose gradients overflow in the second update."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.progress.step == 1:
            output["loss"] = output["loss"] * torch.tensor(1e38) * 1e10
        return output


def image_data(size: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(size) % 3)


def image_model() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers).double()


def warnings_of(trainer: Trainer, data: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(data, 1, per_device_batch_size=2)
    return [str(each.message) for each in said]


def two_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One for weights, one for biases."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return {
        "matrix": torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
        "rest": torch.optim.AdamW([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.01}], lr=0.02),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["progress"] == expected["progress"]
    assert found["order"] == expected["order"]
    assert found["history"] == expected["history"]
    assert equal_weights(found["weights"], expected["weights"])
    assert found["scheduler"] == expected["scheduler"]
    for group, other in zip(found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True):
        assert group == other
    for index, state in expected["optimizer"]["state"].items():
        assert all(torch.equal(value, found["optimizer"]["state"][index][name]) for name, value in state.items())
    assert torch.equal(found["random"][0], expected["random"][0])
    assert found["random"][1:] == expected["random"][1:]


def normed_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()


def deep_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return layers.double()
