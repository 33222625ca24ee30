"""Memory that really runs out: torch is given little of it, or, in the last test, the whole of the GPU.

On a CPU the model stands in for the allocator: it raises torch's error for more samples than it has memory for.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from tests.gpu.parts import DEVICE, IN_ORDER, MIB, ON_GPU, adamw, copied, free_memory, moved, peak_of, sized

FEATURES = 64
WIDE = sized(2**16, 64)  # in the middle of the model: 256 KiB for each sample, several times
SAMPLES = sized(2048, 32)
FITS = sized(None, 10)  # samples that the stand-in has memory for


class Wide(nn.Module):
    """Its activations take most of the memory. There is nothing in it by which samples affect each other."""

    def __init__(self, width: int = WIDE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, width), nn.Linear(width, 1)
        self.most: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.most is not None and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory, as the stand-in says")
        return self.last(torch.tanh(self.first(x)))


@contextmanager
def little_memory(model: Wide, spare: int = 400 * MIB) -> Iterator[None]:
    """Limit torch's memory to this many bytes more than it holds now."""
    model.most = FITS
    if ON_GPU:
        free_memory()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        yield
    finally:
        model.most = None
        if ON_GPU:
            torch.cuda.set_per_process_memory_fraction(1.0)


def rows(size: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(size, FEATURES, generator=generator), torch.randn(size, 1, generator=generator))


def wide_trainer(model: Wide, callbacks: Any = (), optimizer: Any = None) -> Trainer:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    model.to(DEVICE)  # what is spared is beside the weights
    return Trainer(model, mse_loss, optimizer, callbacks)


def update(trainer: Trainer, size: int = SAMPLES, **kwargs: Any) -> None:
    trainer.train(rows(size), 1, per_device_batch_size=size, train_dataloader_kwargs=IN_ORDER, **kwargs)


@pytest.mark.extension("failed_batches")
def test_auto_microbatch_gives_the_gradient_of_the_whole_batch():
    gradients = []
    for limited in (False, True):
        model = Wide()
        trainer = wide_trainer(model)
        before = copied(model)
        if limited:
            with little_memory(model):
                update(trainer, auto_microbatch=True)
            assert trainer.num_microbatches > 1
        else:
            update(trainer)
        gradients.append(moved(before, model))
    by_hand = Wide().to(DEVICE)
    x, y = (tensor.to(DEVICE) for tensor in rows().tensors)
    mse_loss(by_hand(x), y).backward()
    expected = torch.cat([parameter.grad.flatten().double() for parameter in by_hand.parameters()])
    for gradient in gradients:
        assert float((gradient - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.extension("error_notes")
def test_out_of_memory_without_splitting_names_held_memory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = Wide()
    trainer = wide_trainer(model, optimizer=adamw(model))
    if ON_GPU:
        update(trainer, 8)  # so that the optimizer has a state
    with little_memory(model), pytest.raises(torch.OutOfMemoryError) as raised:
        update(trainer)
    note = " ".join(" ".join(raised.value.__notes__).split())
    assert "memory: weights" in note
    assert "gradients" in note
    assert "optimizer state" in note
    assert "pass auto_microbatch=True to train()" in note
    if ON_GPU:
        assert "peak" in note
        readable_by_the_viewer(tmp_path / "out_of_memory_rank0.pickle")


def readable_by_the_viewer(path: Path) -> None:
    """Check that torch's own viewer of snapshots finds the memory in one."""
    from torch.cuda import _memory_viz

    snapshot = pickle.loads(path.read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) > 0
    assert "snapshot.pickle" in _memory_viz.segment_plot(snapshot)
    assert _memory_viz.segsum(snapshot)


def test_a_run_continues_after_running_out_of_memory():
    """The memory of the failed attempt is freed."""
    model = Wide()
    trainer = wide_trainer(model)
    with little_memory(model):
        with pytest.raises(torch.OutOfMemoryError):
            update(trainer)
        update(trainer, 8)
    assert trainer.progress.update == 1


@pytest.mark.extension("tuning")
def test_find_batch_size_ends_and_frees_its_memory():
    model = Wide()
    trainer = wide_trainer(model)
    update(trainer, 8)
    weights = copied(model)
    free_memory()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    with little_memory(model):
        found = trainer.find_batch_size(rows())
        free_memory()
        after = torch.cuda.memory_allocated() if ON_GPU else 0
        update(wide_trainer(model), found)  # it fits
        with pytest.raises(torch.OutOfMemoryError):
            update(wide_trainer(model), 2 * found)
    assert after == pytest.approx(before, abs=MIB)
    assert FITS in (None, found)
    assert 1 < found < SAMPLES
    trainer.optimizer_zero_grad()
    assert all(name in weights for name, _ in model.named_parameters())


@pytest.mark.extension("failed_batches")
def test_evaluation_splits_batches_too():
    from torchmetrics import MeanSquaredError

    from pytorch_accel_lite.callbacks import MetricsCallback

    found = []
    for limited in (False, True):
        model = Wide()
        trainer = wide_trainer(model, [MetricsCallback(MeanSquaredError())])
        if limited:
            with little_memory(model, 200 * MIB):
                trainer.evaluate(rows(), SAMPLES, auto_microbatch=True)
        else:
            trainer.evaluate(rows(), SAMPLES)
        history = trainer.run_history
        found.append([history.get_latest_metric(name) for name in ("evaluation_loss", "MeanSquaredError")])
    with torch.no_grad():
        x, y = (tensor.to(DEVICE) for tensor in rows().tensors)
        by_hand = float(mse_loss(Wide().to(DEVICE)(x), y))
    for loss, metric in found:
        assert loss == pytest.approx(by_hand, rel=1e-4)
        assert metric == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.extension("failed_batches")
@pytest.mark.alone
@pytest.mark.skipif(not ON_GPU, reason="fills the memory of a GPU")
def test_a_batch_that_does_not_fit_into_the_whole_gpu_is_split(measured):
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    model = Wide(width=2**18)
    size = total // (4 * 2**18)  # the first activations alone take all of it
    trainer = wide_trainer(model)
    peak = peak_of(lambda: update(trainer, size, auto_microbatch=True))
    assert trainer.num_microbatches > 1
    assert peak < total
    measured(microbatches=trainer.num_microbatches)
