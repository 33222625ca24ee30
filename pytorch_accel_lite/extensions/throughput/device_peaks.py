"""The peak computing rates of devices, by which the model FLOPs utilisation is measured."""

from __future__ import annotations

import re

import torch

from pytorch_accel_lite.extending import TrainerLike

# Peak TFLOPs per second by part of the device's name, the most specific first, for 16-bit floats, TF32 and float32,
# without sparsity, from the vendors' data sheets. A device without TF32 computes in float32 instead.
_PEAKS = {
    "GB200": (2500, 1250, 80),
    "B200": (2250, 1125, 75),
    "GH200": (989.4, 494.7, 66.9),
    "H200 NVL": (835.5, 417.5, 60),
    "H200": (989.4, 494.7, 66.9),
    "H100 NVL": (835.5, 417.5, 60),
    "H100 PCIe": (756, 378, 51.2),
    "H100": (989.4, 494.7, 66.9),
    "H800": (989.4, 494.7, 66.9),
    "H20": (148, 74, 44),
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10G": (70, 35, 31.5),
    "A10": (125, 62.5, 31.2),
    "V100": (125, 15.7, 15.7),
    "T4": (65, 8.1, 8.1),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 6000 Ada": (364.2, 182.1, 91.1),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "MI300X": (1307.4, 653.7, 163.4),
    "MI325X": (1307.4, 653.7, 163.4),
    "MI250X": (191.5, 47.9, 47.9),  # one of its two dies, which are two devices
}
_VARIANTS = r"(?! (Ti|D|SUPER|Laptop)\b)"  # such variants have other peaks


def find_peak(trainer: TrainerLike) -> float | None:
    """Return the peak of the trainer's device in FLOPs per second, in the precision of training, if known."""
    name = getattr(getattr(torch, trainer.device.type, None), "get_device_name", lambda device: "")(trainer.device)
    peaks = next((peaks for model, peaks in _PEAKS.items() if re.search(rf"\b{model}\b{_VARIANTS}", name)), None)
    precision = precision_of(trainer)
    if peaks is None or "MIG" in name or precision not in ("float16", "bfloat16", "float32"):
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    return 1e12 * peaks[0 if precision != "float32" else 1 if uses_tf32 else 2]


def precision_of(trainer: TrainerLike) -> str:
    """Return the name of the type in which a trainer computes, such as ``bfloat16``."""
    mixed = trainer.accelerator.mixed_precision
    names = {"fp16": "float16", "bf16": "bfloat16"}
    dtype = next((parameter.dtype for parameter in trainer.get_model().parameters()), torch.float32)
    return str(dtype).removeprefix("torch.") if mixed == "no" else names.get(mixed, mixed)
