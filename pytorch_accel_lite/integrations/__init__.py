"""Schedulers and clusters that runs take part in: one file for each, imported when it is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_accel_lite.lazy import loaded_when_named

if TYPE_CHECKING:
    from pytorch_accel_lite.integrations.ray_train import RayReportCallback

__all__ = ["RayReportCallback"]

__getattr__ = loaded_when_named(__name__, {"RayReportCallback": f"{__name__}.ray_train"})


def __dir__() -> list[str]:
    return __all__
