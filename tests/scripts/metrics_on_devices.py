"""Metrics of several processes, whose values lie on a device of each; the first prints them: torchrun ... this file"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torchmetrics import Metric

from pytorch_accel_lite.callbacks import MetricsCallback
from tests.small_models import make_data, make_trainer


class OnDevice(Metric):
    """Moves its values to the device; those that other processes send are in host memory, as from a real device."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(1), dist_reduce_fx="sum")
        self.add_state("sizes", torch.zeros(1), dist_reduce_fx="cat")

    def update(self, targets: torch.Tensor) -> None:
        self.total = self.total.to("sim") + targets.sum().to("sim")
        self.sizes = self.sizes.to("sim") + len(targets)

    def compute(self) -> dict[str, float]:
        return {"total": float(self.total), "samples": float(self.sizes.sum())}


def main() -> None:
    torch.set_num_threads(1)
    trainer = make_trainer([MetricsCallback(OnDevice(), lambda batch, _: (batch[1],))])
    from tests import simulated_device  # noqa: F401 - added now, it is not taken for the device of the trainer

    results = trainer.evaluate(make_data(5), per_device_batch_size=2)
    if trainer.ranks.rank == 0:
        print(json.dumps({"total": results["total"], "samples": results["samples"]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
