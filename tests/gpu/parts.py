"""The device, and what is trained on it: models of a size that means something, and the loops that one would write.

In a rehearsal the device is a CPU and all is small: to see that the tests themselves are right.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from tests.launching import WarmPython

T = TypeVar("T")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
REHEARSES = "REHEARSE_GPU_TESTS" in os.environ
IN_ORDER = {"shuffle": False}
MIB = 2**20
CLASSES = 10
#: Arguments of ``torch.compile``: on the CPU those that take no time.
COMPILED: dict[str, Any] = {} if ON_GPU else {"backend": "eager"}
#: How Python programs are started: where there is no GPU, they are forks, which saves the time of imports.
Program: type[subprocess.Popen[str]] = subprocess.Popen if ON_GPU else WarmPython
#: A scale of fp16 that grows within a short run.
SCALE, GROWS_AFTER = 2.0**10, 4


def sized(on_gpu: T, in_rehearsal: T) -> T:
    return on_gpu if ON_GPU else in_rehearsal


# ------------------------------------------------------------------------------------------------ models

SIDE, IMAGES = sized((64, 32), (8, 4))  # of images, and in a batch
LENGTH, ROWS = sized((256, 16), (16, 4))  # of sequences, and in a batch
WIDTH, DEPTH, VOCABULARY = sized((384, 6, 256), (32, 2, 256))


class Residual(nn.Module):
    """What a ResNet is made of, for rehearsals: a convolution, a sum with its input, batch norm, a global mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.norm1, self.norm2, self.fc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.conv1(x)).relu()
        return self.fc((x + self.norm2(self.conv2(x))).relu().mean((2, 3)))


def resnet() -> nn.Module:
    """A ResNet-18; in rehearsal one of two layers."""
    torch.manual_seed(0)
    if not ON_GPU:
        return Residual()
    from timm import create_model

    model: Any = create_model("resnet18", num_classes=CLASSES)
    if not pools_deterministically():
        model.maxpool = nn.AvgPool2d(3, 2, 1)
    return model  # type: ignore[no-any-return]


@cache
def pools_deterministically() -> bool:
    """Whether torch has a deterministic kernel for the backward pass of max pooling, as newer versions do."""
    x = torch.ones(1, 1, 4, 4, device=DEVICE, requires_grad=True)
    try:
        with deterministic():
            nn.functional.max_pool2d(x, 3, 2, 1).sum().backward()
    except RuntimeError:
        return False
    return True


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.to_heads(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        found = scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.from_heads(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class LanguageModel(nn.Module):
    """A transformer of ten million parameters; in rehearsal a small one."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, max(width // 64, 2)) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel()


def next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss over all tokens, by operations that have deterministic kernels."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def image_data(batches: int, batch_size: int = IMAGES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batches * batch_size, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(images, torch.randint(CLASSES, (len(images),), generator=generator))


def text_data(batches: int, batch_size: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (batches * batch_size, LENGTH + 1), generator=generator)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


class Task:
    """A model with its loss and its data, in batches of one size."""

    def __init__(self, kind: str) -> None:
        self.is_text = kind == "transformer"
        self.model: Callable[[], nn.Module] = transformer if self.is_text else resnet
        self.loss: Callable[..., torch.Tensor] = next_token if self.is_text else cross_entropy
        self.data: Callable[[int], TensorDataset] = text_data if self.is_text else image_data
        self.batch_size = ROWS if self.is_text else IMAGES

    def batches(self, count: int) -> list[Any]:
        columns = (tensor.split(self.batch_size) for tensor in self.data(count).tensors)
        return list(zip(*columns, strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ------------------------------------------------------------------------------------------ the plain loop


def on_device(batch: Any) -> Any:
    return tuple(tensor.to(DEVICE, non_blocking=True) for tensor in batch)


def autocast(precision: str) -> Any:
    """What a loop computes in, for the name of a precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(DEVICE.type, dtype)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE.type, init_scale=SCALE, growth_interval=GROWS_AFTER)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_func: Callable[..., torch.Tensor],
    batches: Iterable[Any],
    *,
    precision: str = "no",
    clip: float | None = None,
    schedule: Any = None,
    make_overflow: int | None = None,
    compile_with: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Train in a plain loop, and return the losses, on the device.

    Args:
        make_overflow: the number of the step whose loss is infinite
        compile_with: arguments of ``torch.compile`` for the forward pass with the loss
    """

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast(precision):
            return loss_func(model(inputs), targets)

    loss_of = compute if compile_with is None else torch.compile(compute, **compile_with)
    scales = scaler() if precision == "fp16" else None
    losses = []
    model.train()
    for step, batch in enumerate(batches):
        loss = loss_of(*on_device(batch))
        loss = loss * float("inf") if step == make_overflow else loss
        (loss if scales is None else scales.scale(loss)).backward()
        before = None if scales is None else scales.get_scale()
        if scales is not None:
            scales.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scales is None:
            optimizer.step()
        else:
            scales.step(optimizer)
            scales.update()
        was_skipped = scales is not None and scales.get_scale() < before
        if schedule is not None and not was_skipped:
            schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


# ---------------------------------------------------------------------------------------------- trainers


def half_precision() -> Accelerator:
    """An accelerator in fp16 with a gradient scaler, which has to be added by hand on a CPU."""
    if ON_GPU:
        handler = GradScalerKwargs(init_scale=SCALE, growth_interval=GROWS_AFTER)
        return Accelerator(mixed_precision="fp16", kwargs_handlers=[handler])
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler()
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
    return accelerator


def in_precision(precision: str) -> dict[str, Any]:
    """Arguments of a trainer for the name of a precision."""
    return {"accelerator": half_precision()} if precision == "fp16" else {"mixed_precision": precision}


def trainer_of(task: Task, callbacks: Any = (), model: nn.Module | None = None, **kwargs: Any) -> Trainer:
    model = task.model() if model is None else model
    kwargs.setdefault("optimizer", adamw(model))
    return Trainer(model, task.loss, callbacks=callbacks, **kwargs)


def fit(trainer: Trainer, task: Task, batches: int, epochs: int = 1, **kwargs: Any) -> Trainer:
    kwargs = {"per_device_batch_size": task.batch_size, "train_dataloader_kwargs": IN_ORDER} | kwargs
    trainer.train(task.data(batches), epochs, **kwargs)
    return trainer


def forget_accelerators() -> None:
    """Reset Accelerate's state, so that the next accelerator has its own settings."""
    AcceleratorState._reset_state(reset_partial_state=True)


# ------------------------------------------------------------------------------------------- comparisons


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name].to(DEVICE), theirs[name]) for name in theirs)


def distance(first: nn.Module, second: nn.Module) -> float:
    """The norm of the difference of two models' weights, over that of the second."""
    ours, theirs = (
        nn.utils.parameters_to_vector(model.parameters()).detach().double().cpu() for model in (first, second)
    )
    return float((ours - theirs).norm() / theirs.norm())


def moved(before: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
    """The change of the parameters since they were copied, as a vector: with SGD at a rate of 1, the gradients."""
    after = dict(model.named_parameters())
    return torch.cat([(before[name].to(DEVICE) - after[name].detach()).flatten().double() for name in before])


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic kernels in a block, as ``Trainer(deterministic=True)`` has them."""
    torch.use_deterministic_algorithms(True)
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark


def free_memory() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def peak_of(action: Callable[[], Any]) -> int:
    """The peak of allocated bytes on the device, beyond those allocated before."""
    free_memory()
    if not ON_GPU:
        counting = pytest.importorskip("pytorch_accel_lite.extensions.memory_estimate.live_bytes")  # may be deleted
        with counting.LiveBytes(DEVICE, lambda: ()) as live:
            action()
        return int(live.peak)
    product = torch.ones(64, 64, device=DEVICE)
    torch.mm(product, product)  # cuBLAS keeps its workspace from now on
    del product
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
