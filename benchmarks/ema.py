"""The cost of averaging the weights of a ResNet-18 once, side by side: python -m benchmarks.ema [--rounds 7]."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from timm import create_model
from timm.utils import ModelEmaV2, ModelEmaV3

from benchmarks.report import footnote, in_rounds, interleave, table
from pytorch_accel_lite.ema import ModelEma


def measure(update: Callable[[], None]) -> dict[str, float]:
    update()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(10):
        update()
    return {"cpu": (time.process_time() - cpu) / 10, "wall": (time.perf_counter() - wall) / 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    torch.set_num_threads(1)
    from pytorch_accelerated.utils import ModelEma as AncestorEma

    model = create_model("resnet18")
    kinds = {
        "ours": ModelEma,
        "ours again (control)": ModelEma,
        "pytorch-accelerated": AncestorEma,
        "timm ModelEmaV2": ModelEmaV2,
        "timm ModelEmaV3": ModelEmaV3,
    }
    averages = {name: kind(model, decay=0.99) for name, kind in kinds.items()}
    measures = {name: partial(measure, partial(average.update, model)) for name, average in averages.items()}
    rounds = parser.parse_args().rounds
    print(table(interleave(measures, rounds), "ours"))
    print(footnote(in_rounds(rounds)))


if __name__ == "__main__":
    main()
