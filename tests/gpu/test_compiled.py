"""Compiled models and steps, CUDA graphs and channels-last equal a plain loop with the same settings."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from tests.gpu.parts import (
    COMPILED,
    DEVICE,
    ON_GPU,
    Task,
    adamw,
    deterministic,
    distance,
    fit,
    plain_loop,
    same_weights,
    sgd,
    sized,
    trainer_of,
)
from tests.launching import ROOT, environment

STEPS = sized(12, 3)
#: How far the weights of compiled code may be from those of a loop without, for each precision: the order of sums.
NEAR = {"no": 1e-4, "bf16": 3e-3}
GRAPHS: dict[str, Any] = {"mode": "reduce-overhead"} if ON_GPU else COMPILED


@contextlib.contextmanager
def no_warning() -> Any:
    """The trainer warns if it does not compile."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile_step")
        yield


def by_hand(task: Task, precision: str, compile_with: dict[str, Any] | None) -> torch.nn.Module:
    model = task.model().to(DEVICE)
    batches = task.batches(STEPS)
    plain_loop(model, sgd(model), task.loss, batches, precision=precision, compile_with=compile_with)
    return model


@pytest.mark.parametrize(
    ("kind", "precision"), [("transformer", "no"), ("transformer", "bf16"), ("resnet", "bf16")][: sized(3, 1)]
)
def test_a_compiled_step_trains_like_the_compiled_loop(kind, precision):
    task = Task(kind)
    model = task.model()
    compiled = trainer_of(
        task, model=model, optimizer=sgd(model), compile_step=COMPILED or True, mixed_precision=precision
    )
    with no_warning():
        fit(compiled, task, STEPS)
    assert distance(model, by_hand(task, precision, COMPILED)) < NEAR[precision]
    assert distance(model, by_hand(task, precision, None)) < NEAR[precision]


@pytest.mark.parametrize("precision", sized(["no", "bf16"], ["bf16"]))
def test_a_compiled_model_trains_like_the_loop(precision):
    task = Task("transformer")
    model = task.model()
    trainer = trainer_of(
        task, model=model, optimizer=sgd(model), compile_model=COMPILED or True, mixed_precision=precision
    )
    fit(trainer, task, STEPS)
    assert distance(model, by_hand(task, precision, None)) < NEAR[precision]


@pytest.mark.parametrize("accumulation", sized([1, 3], [3]))
def test_cuda_graphs_train_as_the_loop_also_over_windows(accumulation):
    """Graphs overwrite their outputs; losses, gradients of a window and logged means must survive."""
    task = Task("transformer")
    histories, models = [], []
    for options in (False, GRAPHS or True):
        model = task.model()
        trainer = trainer_of(task, model=model, optimizer=sgd(model), compile_step=options, mixed_precision="bf16")
        with no_warning():
            fit(trainer, task, STEPS, epochs=2, gradient_accumulation_steps=accumulation, gradient_clip_norm=1.0)
        models.append(model)
        histories.append(trainer.run_history.get_metric_values("train_loss_epoch"))
    assert distance(models[1], models[0]) < NEAR["bf16"]
    assert histories[1] == pytest.approx(histories[0], rel=5e-3)


def test_a_compiled_step_evaluates_with_the_weights_it_trains():
    task = Task("transformer")
    results = []
    for options in (False, COMPILED or True):
        model = task.model()
        trainer = trainer_of(task, model=model, optimizer=sgd(model), compile_step=options)
        fit(trainer, task, STEPS, eval_dataset=task.data(2), epochs=2)
        results.append((trainer.run_history.get_latest_metric("eval_loss_epoch"), trainer.predict(task.data(1), 4)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_channels_last_gives_the_bits_of_the_loop_with_it(precision):
    task = Task("resnet")
    trainer = trainer_of(task, channels_last=True, deterministic=True, mixed_precision=precision)
    fit(trainer, task, STEPS)
    model = task.model().to(DEVICE, memory_format=torch.channels_last)
    batches = [(images.contiguous(memory_format=torch.channels_last), y) for images, y in task.batches(STEPS)]
    with deterministic():
        plain_loop(model, adamw(model), task.loss, batches, precision=precision)
    assert trainer.get_model().conv1.weight.is_contiguous(memory_format=torch.channels_last) or not ON_GPU
    assert same_weights(trainer.get_model(), model)


def test_deterministic_runs_repeat_bits_and_keep_torchs_setting():
    task = Task("resnet")
    first, second = (fit(trainer_of(task, deterministic=True, seed=1), task, STEPS) for _ in range(2))
    assert same_weights(first.get_model(), second.get_model())
    assert not torch.are_deterministic_algorithms_enabled()


AFTER_A_PRODUCT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
model = nn.Linear(4, 1)
trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), [], deterministic=True)
trainer.train(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), 1)
"""


@pytest.mark.skipif(not ON_GPU, reason="cuBLAS is that of a GPU")
@pytest.mark.parametrize("config", [None, ":4096:8"])
def test_determinism_after_a_product_needs_the_cublas_variable(config):
    """Torch looks at it once, at the first product on the GPU; its error names it."""
    env = {name: value for name, value in environment().items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    env |= {} if config is None else {"CUBLAS_WORKSPACE_CONFIG": config}
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_PRODUCT], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 or (config is None and "CUBLAS_WORKSPACE_CONFIG" in done.stderr), done.stderr
