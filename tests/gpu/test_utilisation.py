"""The recorded utilisation of a matrix product equals that of its own timing."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, callbacks
from tests.gpu.parts import DEVICE, IN_ORDER, ON_GPU, sized

pytestmark = [pytest.mark.alone, pytest.mark.extension("throughput")]
WIDTH, LAYERS, STEPS = sized((8192, 6, 40), (64, 2, 6))
BATCH = WIDTH
#: Of a forward and a backward pass: the first layer needs no gradients of its inputs.
FLOPS = 2 * WIDTH * WIDTH * BATCH * (3 * LAYERS - 1)
PEAK = None if ON_GPU else 1e12


def products() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model.to(DEVICE, torch.bfloat16)


def mean_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.float().mean()


def data() -> TensorDataset:
    """One batch, which lies on the device, many times."""
    rows = torch.randn(BATCH, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    return TensorDataset(rows, torch.zeros(BATCH, device=DEVICE))


def update_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    mean_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds_by_hand() -> float:
    """The time of an update in a plain loop, by events of the device."""
    model = products()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x, y = data().tensors
    for _ in range(3):
        update_by_hand(model, optimizer, x, y)
    if not ON_GPU:
        start = time.perf_counter()
        for _ in range(STEPS):
            update_by_hand(model, optimizer, x, y)
        return (time.perf_counter() - start) / STEPS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        update_by_hand(model, optimizer, x, y)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / STEPS


def test_utilisation_is_exact_for_a_matrix_product(measured):
    """Uses the last of many epochs of one update each, after all warm-up."""
    throughput = callbacks.ThroughputCallback(count_flops=True, peak_flops=PEAK, window=STEPS)
    model = products()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    trainer = Trainer(model, mean_of, optimizer, [throughput])
    x, y = data().tensors
    repeated = TensorDataset(x.repeat(sized(4, 2), 1), y.repeat(sized(4, 2)))  # memory for four batches
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ThroughputCallback")  # the peak of this device is known
        trainer.train(repeated, STEPS // 2, per_device_batch_size=BATCH, train_dataloader_kwargs=IN_ORDER)
    history = trainer.run_history
    rates = history.get_metric_values("flops_per_second_epoch")[2:]
    samples = history.get_metric_values("samples_per_second_epoch")[2:]
    assert rates[0] / samples[0] == pytest.approx(FLOPS / BATCH, rel=1e-6)  # counted exactly
    if not ON_GPU:
        return
    best = sorted(rates)[len(rates) // 2]
    by_hand = FLOPS / seconds_by_hand()
    measured(over_own_timing=best / by_hand, mfu=history.get_latest_metric("mfu_epoch"))
    assert best == pytest.approx(by_hand, rel=0.03)


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no peak in the table")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_table_of_peaks_knows_this_device(precision):
    name = torch.cuda.get_device_name(DEVICE)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    throughput = callbacks.ThroughputCallback(flops_per_sample=100.0)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [throughput], mixed_precision=precision)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", message="ThroughputCallback"
        )  # it asks for the peak of a device that it does not know
        trainer.train(TensorDataset(torch.randn(8, 8), torch.randn(8, 1)), 1)
    rate, share = (trainer.run_history.get_latest_metric(f"{kind}_epoch") for kind in ("flops_per_second", "mfu"))
    assert 1e12 < rate / share < 1e16, name
    if "H100 80GB HBM3" in name and precision != "no":
        assert rate / share == pytest.approx(989.4e12)
